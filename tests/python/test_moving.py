"""Patterns that move: each method against a masked dense oracle, optimizers, checkpoints, errors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import rarefy
from ranks import results_of_ranks
from rarefy import BlockSparseLinear, PseudoBlockSparseLinear
from rarefy.masks import expand_mask, to_blocks
from rarefy.prune import (
    SET,
    GraNet,
    MagnitudeRegrow,
    RigL,
    SRigL,
    TopKAST,
    drop_fractions,
    gradient_norms,
    sparse_start,
)
from states import with_entry, without_entry

K, N, TOKENS = 30, 41, 24


def layer_of(form: str, density: float, seed: int = 1) -> BlockSparseLinear:
    """A float64 layer, (41, 30), with a random pattern."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(K, N, dtype=torch.float64))
    sparse_start(model, form, density, seed=seed)
    return model[0]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(TOKENS, K, dtype=torch.float64, generator=generator)
    return x, torch.randn(TOKENS, N, dtype=torch.float64, generator=generator)


def block_norms(dense: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Norms by plain loops."""
    rows, cols = -(-dense.shape[0] // block[0]), -(-dense.shape[1] // block[1])
    norms = torch.zeros(rows, cols, dtype=torch.float64)
    for i in range(rows):
        for j in range(cols):
            part = dense[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            norms[i, j] = math.sqrt(sum(v * v for v in part.flatten().tolist()))
    return norms


def best(scores: torch.Tensor, among: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """The `count` largest among some positions, by a plain sort."""
    places = sorted(map(tuple, among.nonzero().tolist()), key=lambda at: -float(scores[at]))
    return places[:count]


def mask_at(places, like: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(like)
    for at in places:
        mask[at] = True
    return mask


class Oracle:
    """The layer as an nn.Linear whose weight is zero outside a mask, and one step of a method."""

    def __init__(self, layer: BlockSparseLinear, optimizer_type, options) -> None:
        self.block, self.mask = layer.block_shape, layer.weight.block_mask()
        self.linear = layer.to_dense()
        self.optimizer = optimizer_type(self.linear.parameters(), **options)

    def elements(self) -> torch.Tensor:
        return expand_mask(self.mask, (N, K), self.block)

    def step(self, x, target) -> torch.Tensor:
        """A training step with masked gradients; the whole gradient."""
        self.optimizer.zero_grad()
        functional.mse_loss(self.linear(x), target).backward()
        whole = self.linear.weight.grad.clone()
        self.linear.weight.grad *= self.elements()
        self.optimizer.step()
        return whole

    def move(self, new: torch.Tensor) -> None:
        assert int(new.sum()) == int(self.mask.sum())
        old, self.mask = self.elements(), new
        kept = old & self.elements()
        with torch.no_grad():
            self.linear.weight *= kept
            for state in self.optimizer.state[self.linear.weight].values():
                if state.shape == self.linear.weight.shape:
                    state *= kept

    def drop(self, fraction: float) -> torch.Tensor:
        nnzb = int(self.mask.sum())
        norms = block_norms(self.linear.weight.detach(), self.block)
        return mask_at(best(norms, self.mask, nnzb - round(fraction * nnzb)), self.mask)

    def grow(self, kept: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return kept | mask_at(best(wanted, ~kept, int(self.mask.sum() - kept.sum())), self.mask)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
]
FORMS = ["block:4x3", "csr", "block:8x1", "block:16x16"]


def follow(method, layer, oracle, wanted, steps=13, every=3) -> None:
    """Trains layer and oracle alike; `wanted(oracle, whole gradient, fraction)` is the oracle's new mask."""
    values, memory = layer.weight.values, layer.weight.values.data_ptr()
    for step in range(1, steps + 1):
        x, target = data(step)
        method.optimizers[0].zero_grad()
        functional.mse_loss(layer(x), target).backward()
        method.optimizers[0].step()
        moves = method.step()
        whole = oracle.step(x, target)
        assert bool(moves) == (step % every == 0)
        if moves:
            fraction = 0.4 * (1 + math.cos(math.pi * step / 20)) / 2
            oracle.move(wanted(oracle, whole, fraction))
        assert torch.equal(layer.weight.block_mask(), oracle.mask), f"step {step}"
        torch.testing.assert_close(layer.weight.to_dense(), oracle.linear.weight, rtol=1e-9, atol=1e-12)
    assert layer.weight.values is values and values.data_ptr() == memory
    state = method.optimizers[0].state[values]
    other = oracle.optimizer.state[oracle.linear.weight]
    for key, tensor in other.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape == (N, K):
            blocks = to_blocks(tensor, layer.block_shape)[oracle.mask].reshape(values.shape)
            torch.testing.assert_close(state[key], blocks, rtol=1e-8, atol=1e-13)


def rigl(oracle, whole, fraction):
    return oracle.grow(oracle.drop(fraction), block_norms(whole, oracle.block))


@pytest.mark.parametrize(("optimizer_type", "options"), OPTIMIZERS)
def test_rigl_is_its_masked_dense_oracle_with_every_optimizer(optimizer_type, options):
    layer = layer_of("block:4x3", 0.3)
    oracle = Oracle(layer, optimizer_type, options)
    optimizer = optimizer_type(layer.parameters(), **options)
    follow(RigL(nn.Sequential(layer), optimizer, fraction="cosine:0.4", every=3, end=20), layer, oracle, rigl)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("density", [0.2, 0.9])
def test_rigl_is_its_oracle_for_every_block(form, density):
    layer = layer_of(form, density)
    options = {"lr": 0.05, "momentum": 0.9}
    oracle = Oracle(layer, torch.optim.SGD, options)
    optimizer = torch.optim.SGD(layer.parameters(), **options)
    follow(RigL(nn.Sequential(layer), optimizer, fraction="cosine:0.4", every=3, end=20), layer, oracle, rigl)


def test_set_is_its_oracle():
    layer = layer_of("block:4x3", 0.3)
    oracle = Oracle(layer, torch.optim.AdamW, {"lr": 0.01})
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    method = SET(nn.Sequential(layer), optimizer, fraction="cosine:0.4", every=3, end=20, seed=4)
    random = torch.Generator().manual_seed(4)

    def grown(oracle, whole, fraction):
        drawn = torch.rand(oracle.mask.shape, generator=random)
        return oracle.grow(oracle.drop(fraction), drawn)

    follow(method, layer, oracle, grown)


@pytest.mark.parametrize("density", [0.3, 0.5])
def test_srigl_is_its_oracle_and_rows_have_equal_fan_in(density):
    layer = layer_of("block:4x3", density)
    oracle = Oracle(layer, torch.optim.Adam, {"lr": 0.01})
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    method = SRigL(nn.Sequential(layer), optimizer, fraction="cosine:0.4", every=3, end=20)

    def grown(oracle, whole, fraction):
        kept, norms = oracle.drop(fraction), block_norms(oracle.linear.weight.detach(), oracle.block)
        gradient, nnzb = block_norms(whole, oracle.block), int(oracle.mask.sum())
        free = ~oracle.mask
        grows = mask_at(best(gradient, free, min(round(fraction * nnzb), int(free.sum()))), free)
        salient = (kept | grows).sum(1).tolist()
        rows = len(salient)
        target = [nnzb // rows] * rows
        for row in sorted(range(rows), key=lambda i: -salient[i])[: nnzb % rows]:
            target[row] += 1
        new = torch.zeros_like(kept)
        for row, count in enumerate(target):
            places = sorted(
                range(kept.shape[1]), key=lambda j: -float(norms[row, j]) if kept[row, j] else 1.0
            )
            places = [j for j in places if kept[row, j]][:count]
            others = sorted(
                (j for j in range(kept.shape[1]) if not kept[row, j]), key=lambda j: -gradient[row, j]
            )
            new[row, (places + others)[:count]] = True
        return new

    follow(method, layer, oracle, grown)
    counts = layer.weight.block_mask().sum(1)
    assert int(counts.max() - counts.min()) <= 1


def test_srigl_gives_rows_up_that_are_not_salient():
    layer = layer_of("block:4x3", 0.3)
    with torch.no_grad():  # the first block row is as good as dead: small weights, no gradient
        layer.weight.values[layer.weight.block_row_indices() == 0] *= 1e-6
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    method = SRigL(nn.Sequential(layer), optimizer, salient=0.3, fraction=0.3, every=1)
    nnzb = layer.weight.nnzb
    x, target = data(0)
    target[:, :4] = layer(x).detach()[:, :4]
    functional.mse_loss(layer(x), target).backward()
    method.step()
    counts = layer.weight.block_mask().sum(1)
    alive = counts[counts > 0]
    assert counts[0] == 0 and int(counts.sum()) == nnzb and len(alive) > 5
    assert int(alive.max() - alive.min()) <= 1


@pytest.mark.parametrize("form", ["block:4x3", "csr"])
def test_top_kast_is_its_masked_dense_oracle(form):
    layer = layer_of(form, 0.5)
    values = layer.weight.values
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    method = TopKAST(nn.Sequential(layer), optimizer, forward=0.4, fraction=0.2, every=4, end=20)
    assert layer.weight.values is values
    weight, bias = layer.weight, nn.Parameter(layer.bias.detach().clone())
    stored, active = weight.block_mask(), method.active("0")
    nnzb, computing = int(stored.sum()), round(0.4 * int(stored.sum()))
    every = torch.zeros(N, K, dtype=torch.float64)  # values of B, by a plain loop
    for e, (i, j) in enumerate(stored.nonzero().tolist()):
        r, c = layer.block_shape
        part = every[i * r : (i + 1) * r, j * c : (j + 1) * c]
        part.copy_(values.detach().reshape(-1, r, c)[e][: part.shape[0], : part.shape[1]])
    dense = nn.Parameter(every)
    other = torch.optim.SGD([bias, dense], lr=0.1, momentum=0.9)
    for step in range(1, 14):
        assert int(active.sum()) == computing and bool((stored | ~active).all())
        inside = expand_mask(active, (N, K), layer.block_shape)
        x, target = data(step)
        x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
        for one in (optimizer, other):
            one.zero_grad()
        y = layer(x1)
        y2 = functional.linear(x2, dense * inside, bias)
        torch.testing.assert_close(y, y2)
        (functional.mse_loss(y, target) + method.penalty(0.01)).backward()
        # The gradient of B: that of a dense weight whose value is A's, straight through.
        leaf = (dense * inside).detach().requires_grad_()
        functional.mse_loss(functional.linear(x2, leaf, bias), target).backward()
        outside = expand_mask(stored & ~active, (N, K), layer.block_shape)
        weights = inside + outside / (computing / stored.numel())
        dense.grad = (
            leaf.grad * expand_mask(stored, (N, K), layer.block_shape) + 0.01 * dense.detach() * weights
        )
        torch.testing.assert_close(x1.grad, x2.grad)
        optimizer.step()
        other.step()
        before = active, stored
        norms = block_norms(dense.detach(), layer.block_shape)
        if method.step():
            assert step % 4 == 0
            stored, active = weight.block_mask(), method.active("0")
            chosen = mask_at(best(norms, before[1], computing), stored)
            assert torch.equal(active, chosen) and int(stored.sum()) == nnzb
            gone = before[1] & ~stored
            rest = nnzb - computing
            last = mask_at(best(-norms, before[1] & ~chosen, round(0.2 * rest)), stored)
            assert bool((last | ~gone).all()) and bool(gone.any())
            # What is new was drawn; the oracle takes it over.
            with torch.no_grad():
                whole = (
                    BlockSparseLinear.from_weight(
                        rarefy.BsrWeight.from_pattern(
                            values.detach().reshape(-1, *layer.block_shape).clone(), weight.pattern
                        )
                    )
                    .to_dense()
                    .weight
                )
                fresh = expand_mask(stored & ~before[1], (N, K), layer.block_shape)
                dense.copy_(torch.where(fresh, whole, dense * expand_mask(stored, (N, K), layer.block_shape)))
                kept = expand_mask(stored & before[1], (N, K), layer.block_shape)
                other.state[dense]["momentum_buffer"] *= kept
                assert bool((dense[fresh] != 0).any())
        torch.testing.assert_close(
            layer.weight.to_dense(), dense * expand_mask(active, (N, K), layer.block_shape)
        )
    y, was = layer(x), optimizer.state[values]["momentum_buffer"][weight.active].clone()
    method.finish()
    assert type(layer.weight) in (rarefy.BsrWeight, rarefy.CsrWeight) and layer.weight.nnzb == computing
    torch.testing.assert_close(layer(x), y)
    assert torch.equal(optimizer.state[values]["momentum_buffer"], was)


def test_top_kast_computes_with_its_part_in_a_network_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    sparse_start(model, "block:16x1", 0.5)
    TopKAST(model, forward=0.2, fraction=0.1)
    x = torch.randn(300, 256)
    with torch.no_grad():
        expected = functional.linear(x, model[0].weight.to_dense(), model[0].bias).relu()
        expected = functional.linear(expected, model[2].weight.to_dense(), model[2].bias)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(copy.deepcopy(model)(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and all(p.grad.dtype == p.dtype for p in model.parameters())


def test_magnitude_regrow_draws_as_large_as_asked():
    for distribution in ("uniform", "gaussian"):
        layer = layer_of("csr", 0.5)
        deviation = float(layer.weight.values.detach().std(correction=0))
        before = layer.weight.to_dense().detach()
        method = MagnitudeRegrow(
            nn.Sequential(layer), fraction=0.5, every=1, scale=0.1, distribution=distribution
        )
        (move,) = method.step()
        after = layer.weight.to_dense().detach()
        drawn = after[(after != 0) & (before == 0)] / (0.1 * deviation)
        assert len(drawn) == move.grown > 100 and len(drawn.unique()) == len(drawn)
        if distribution == "uniform":
            assert drawn.abs().max() <= 1 and abs(float(drawn.mean())) < 0.2
        assert abs(float(drawn.std()) - (3**-0.5 if distribution == "uniform" else 1)) < 0.2


@pytest.mark.parametrize(("optimizer_type", "options"), OPTIMIZERS)
@pytest.mark.parametrize("form", ["block:4x3", "csr"])
def test_granet_is_its_oracle_and_ends_with_exactly_so_many(form, optimizer_type, options):
    layer = layer_of(form, 0.6)
    oracle, optimizer = Oracle(layer, optimizer_type, options), optimizer_type(layer.parameters(), **options)
    moving = GraNet(nn.Sequential(layer), optimizer, final=0.25, fraction=0.3, every=4, begin=2, end=15)
    values, first = layer.weight.values, layer.weight.nnzb
    for step in range(1, 21):
        x, target = data(step)
        optimizer.zero_grad()
        functional.mse_loss(layer(x), target).backward()
        optimizer.step()
        moves, whole = moving.step(), oracle.step(x, target)
        assert bool(moves) == (step in (4, 8, 12, 15))
        if moves:
            last = round(0.25 * first)
            count = last + round((first - last) * (1 - (step - 2) / 13) ** 3)
            norms = block_norms(oracle.linear.weight.detach(), oracle.block)
            kept = mask_at(best(norms, oracle.mask, count - round(0.3 * count)), oracle.mask)
            grown = best(block_norms(whole, oracle.block), ~kept, round(0.3 * count))
            new = kept | mask_at(grown, kept)
            old, oracle.mask = oracle.elements(), new
            with torch.no_grad():
                oracle.linear.weight *= old & oracle.elements()
                for state in oracle.optimizer.state[oracle.linear.weight].values():
                    if state.shape == oracle.linear.weight.shape:
                        state *= old & oracle.elements()
        assert torch.equal(layer.weight.block_mask(), oracle.mask), f"step {step}"
        torch.testing.assert_close(layer.weight.to_dense(), oracle.linear.weight, rtol=1e-9, atol=1e-12)
    assert layer.weight.nnzb == round(0.25 * first) and layer.weight.values is values
    assert moves == [] and moving.report()[0].nnzb == layer.weight.nnzb


def test_granet_gets_sparser_where_nothing_grows_too():
    layer = layer_of("block:4x3", 0.5)
    before, moving = (
        layer.weight.block_mask(),
        GraNet(nn.Sequential(layer), final=0.5, fraction=0.0, every=1, end=1),
    )
    functional.mse_loss(layer(data(1)[0]), data(1)[1]).backward()
    (move,) = moving.step()
    assert move.grown == 0 and move.nnzb == round(0.5 * int(before.sum()))
    assert bool((before | ~layer.weight.block_mask()).all())
    with pytest.raises(ValueError, match="end must be given"):
        GraNet(nn.Sequential(layer), final=0.5, fraction=0.3)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        GraNet(nn.Sequential(layer), final=1.5, fraction=0.3, end=4)


@pytest.mark.parametrize("method", [RigL, SET, GraNet])
@pytest.mark.parametrize("form", ["block:4x3", "csr"])
def test_patterns_move_in_compiled_models(method, form):
    losses, patterns = [], []
    torch._dynamo.reset()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(K, 20), nn.Tanh(), nn.Linear(20, N)).double()
        sparse_start(model, form, 0.4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"final": 0.5} if method is GraNet else {}
        moving = method(model, optimizer, every=3, end=20, **options)
        counted = CompileCounterWithBackend("aot_eager")
        net = torch.compile(model, backend=counted) if compiled else model
        for step in range(1, 11):
            x, target = data(step)
            optimizer.zero_grad()
            loss = functional.mse_loss(net(x), target)
            loss.backward()
            optimizer.step()
            moving.step()
            losses.append(loss.item())
        patterns.append([model[i].weight.block_mask() for i in (0, 2)])
        assert all(move.grown for move in moving.report())
    # Blocks that move are no reason to compile again; fewer blocks are other sizes.
    assert counted.frame_count == 1 or (method is GraNet and counted.frame_count <= 4)
    torch.testing.assert_close(losses[:10], losses[10:])
    assert all(torch.equal(a, b) for a, b in zip(*patterns, strict=True))


def test_compiled_models_run_as_written_while_gradients_are_watched_alone():
    def eager():
        counted = CompileCounterWithBackend("eager")
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=counted)(torch.ones(2))
        return counted.frame_count == 0

    one, two = (RigL(nn.Sequential(layer_of("csr", 0.3)), fraction=0.1, every=1) for _ in "12")
    assert eager()
    del one  # never stepped
    assert eager()
    two.end = 0
    two._arm()
    assert not eager()


@pytest.mark.parametrize("method", [RigL, SET, SRigL, MagnitudeRegrow])
def test_masked_dense_twins_move_alike(method):
    layer = layer_of("block:4x3", 0.3)
    twin = PseudoBlockSparseLinear.from_sparse(layer)
    runs = []
    for module in (layer, twin):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        moving = method(nn.Sequential(module), optimizer, every=2, end=20, seed=3)
        for step in range(1, 12):
            x, target = data(step)
            optimizer.zero_grad()
            functional.mse_loss(module(x), target).backward()
            optimizer.step()
            moving.step()
        runs.append((moving.report(), moving.layers[0].mask(), module.to_dense().weight))
    assert runs[0][0] == runs[1][0] and runs[0][0][0].grown > 5
    assert torch.equal(runs[0][1], runs[1][1])
    torch.testing.assert_close(runs[0][2], runs[1][2])


def test_grown_blocks_can_start_as_the_layer_draws_them():
    layer = layer_of("block:4x3", 0.3)
    before = layer.weight.block_mask()
    SET(nn.Sequential(layer), fraction=0.5, every=1, init="uniform").step()
    mask = layer.weight.block_mask()
    dense = layer.weight.to_dense().detach()
    for i, j in (mask & ~before).nonzero().tolist():
        block = dense[4 * i : 4 * i + 4, 3 * j : 3 * j + 3]
        assert bool((block != 0).all()) and block.abs().max() <= (3 * int(mask[i].sum())) ** -0.5


def test_several_passes_and_calls_are_one_gradient():
    """Micro-batches, and a layer that is called twice: the norms are those of the sum."""
    torch.manual_seed(0)
    layer = BlockSparseLinear(12, 12, density=0.3, block_shape=(3, 3), dtype=torch.float64)
    moving = RigL(nn.Sequential(layer), fraction=0.5, every=1)
    dense = layer.to_dense()
    for _ in range(3):
        x = torch.randn(5, 2, 12, dtype=torch.float64)
        for module in (layer, dense):
            module(torch.tanh(module(x))).square().sum().backward()
    kept = mask_at(
        best(block_norms(dense.weight.detach(), (3, 3)), layer.weight.block_mask(), layer.weight.nnzb // 2),
        layer.weight.block_mask(),
    )
    wanted = best(block_norms(dense.weight.grad, (3, 3)), ~kept, layer.weight.nnzb - int(kept.sum()))
    moving.step()
    assert torch.equal(layer.weight.block_mask(), kept | mask_at(wanted, kept))


@pytest.mark.parametrize("block", [(1, 1), (4, 3), (16, 16), (64, 1), (1, 7)])
@pytest.mark.parametrize("piece", [1, 200, 2**22])
def test_gradient_norms_in_pieces(block, piece):
    dy, x = torch.randn(9, N, dtype=torch.float64), torch.randn(9, K, dtype=torch.float64)
    expected = block_norms(dy.T @ x, block)
    torch.testing.assert_close(gradient_norms(dy, x, block, piece=piece), expected)
    near = gradient_norms(dy.bfloat16(), x.bfloat16(), block, piece=piece)
    assert near.dtype == torch.float32
    torch.testing.assert_close(near.double(), expected, rtol=0.05, atol=0.2)


def test_the_whole_gradient_never_exists():
    dy, x = torch.randn(4, 4096), torch.randn(4, 1024)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.most = max(self.most, out.numel())
            return out

    with Largest() as seen:
        gradient_norms(dy, x, (16, 16), piece=2**16)
    assert seen.most <= 2**16


@pytest.mark.parametrize("form", FORMS)
def test_candidates_alone_have_their_gradients_computed(form):
    layer = layer_of(form, 0.2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    moving = RigL(nn.Sequential(layer), optimizer, fraction=0.5, every=1, candidates=1.5, seed=3)
    dense, stored = layer.to_dense(), layer.weight.block_mask()
    x, target = data(0)
    for module in (layer, dense):
        functional.mse_loss(module(x), target).backward()
    drawn = torch.rand(stored.shape, generator=torch.Generator().manual_seed(3))
    count = min(int((~stored).sum()), round(1.5 * layer.weight.nnzb))
    candidates = mask_at(best(drawn, ~stored, count), stored)
    norms = block_norms(dense.weight.detach(), layer.block_shape)
    keep = layer.weight.nnzb - round(0.5 * layer.weight.nnzb)
    kept = mask_at(best(norms, stored, keep), stored)
    grown = best(block_norms(dense.weight.grad, layer.block_shape), candidates, layer.weight.nnzb - keep)
    moving.step()
    assert torch.equal(layer.weight.block_mask(), kept | mask_at(grown, stored))


def test_tokens_bounds_what_the_gradient_is_made_of():
    torch.manual_seed(0)
    layer = BlockSparseLinear(K, N, density=0.3, block_shape=(4, 3), dtype=torch.float64)
    other = copy.deepcopy(layer)
    moving, every = (
        RigL(nn.Sequential(layer), fraction=0.5, every=1, tokens=8),
        RigL(nn.Sequential(other), fraction=0.5, every=1),
    )
    x, target = data(0)
    functional.mse_loss(layer(x), target, reduction="sum").backward()
    functional.mse_loss(other(x[::3]), target[::3], reduction="sum").backward()
    moving.step()
    every.step()
    assert torch.equal(layer.weight.block_mask(), other.weight.block_mask())


def train(model, optimizer, moving, first, last):
    for step in range(first, last):
        x, target = data(step)
        optimizer.zero_grad()
        functional.mse_loss(model(x), target).backward()
        optimizer.step()
        moving.step()


@pytest.mark.parametrize("method", [RigL, GraNet, SET, SRigL, MagnitudeRegrow, TopKAST])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(method, tmp_path):
    def fresh(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(K, 20), nn.Tanh(), nn.Linear(20, N)).double()
        sparse_start(model, "block:4x3", 0.4, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"final": 0.3} if method is GraNet else {}
        return model, optimizer, method(model, optimizer, every=3, end=30, seed=seed, **options)

    whole = fresh(1)
    train(*whole, 0, 25)
    first = fresh(1)
    train(*first, 0, 11)
    torch.save([x.state_dict() for x in first], tmp_path / "run.pt")
    model, optimizer, moving = second = fresh(1)
    train(*fresh(7), 0, 5)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    rarefy.load_state_dict(model, saved[0])
    optimizer.load_state_dict(saved[1])
    moving.load_state_dict(saved[2])
    train(*second, 11, 25)
    assert moving.report() == whole[2].report() and moving.clock == 25
    for key, value in whole[0].state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_the_same_seed_is_the_same_run_and_another_is_not():
    masks = []
    for seed in (1, 1, 2):
        layer = layer_of("block:4x3", 0.3)
        moving = SET(nn.Sequential(layer), fraction=0.5, every=1, seed=seed)
        torch.manual_seed(seed + len(masks))  # the global generator has no say
        moving.step()
        masks.append(layer.weight.block_mask())
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


def test_gradients_that_are_not_finite_put_the_change_off():
    layer = layer_of("block:4x3", 0.3)
    moving = RigL(nn.Sequential(layer), fraction=0.3, every=4)
    before = layer.weight.block_mask()
    for step in range(1, 6):
        x, target = data(step)
        layer.weight.values.grad = None
        loss = functional.mse_loss(layer(x), target) * (math.inf if step == 4 else 1.0)
        loss.backward()
        moves = moving.step()
        assert bool(moves) == (step == 5)
        assert torch.equal(layer.weight.block_mask(), before) == (step < 5)


@pytest.mark.parametrize("candidates", [None, 1.5])
def test_under_autocast_and_in_bfloat16(candidates):
    """The gradient of an output may be narrower than the input of its layer."""
    for dtype, cast in ((torch.float32, True), (torch.bfloat16, False)):
        layer = layer_of("block:4x3", 0.3).to(dtype)
        moving = RigL(nn.Sequential(layer), fraction=0.3, every=1, candidates=candidates)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            y = layer(data(0)[0].to(dtype))
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()
        assert moving.step()[0].grown > 0
        assert layer.weight.values.dtype == dtype


def test_layers_are_watched_in_steps_with_a_change_alone():
    layer = layer_of("block:4x3", 0.3)
    moving = RigL(nn.Sequential(layer), fraction=0.3, every=3)
    for step in range(1, 8):
        assert bool(layer._forward_hooks) == (step % 3 == 0)
        functional.mse_loss(layer(data(step)[0]), data(step)[1]).backward()
        moving.step()


def test_ties_grow_evenly_over_rows():
    layer = layer_of("csr", 0.2)
    moving = RigL(nn.Sequential(layer), fraction=1.0, every=1)
    (layer(data(0)[0]) * 0).sum().backward()  # all gradients are zero
    with torch.no_grad():
        layer.weight.values.zero_()
    moving.step()
    rows, columns = (layer.weight.block_mask().sum(dim) for dim in (1, 0))
    assert rows.min() >= 3 and rows.max() <= 10 and columns.min() >= 3 and columns.max() <= 14  # means 6, 8


def test_tied_and_frozen_weights():
    torch.manual_seed(0)
    first = BlockSparseLinear(12, 12, density=0.4, block_shape=(3, 3))
    second = BlockSparseLinear.from_weight(
        rarefy.BsrWeight.from_pattern(first.weight.values, first.weight.pattern)
    )
    frozen = BlockSparseLinear(12, 12, density=0.4, block_shape=(3, 3)).requires_grad_(False)
    model = nn.Sequential(first, nn.Tanh(), second, frozen)
    moving = RigL(model, fraction=0.5, every=1)
    assert [x.names for x in moving.layers] == [["0", "2"]]
    mask = frozen.weight.block_mask()
    model(torch.randn(5, 12)).square().sum().backward()
    assert moving.step()[0].grown > 0
    assert torch.equal(first.weight.block_mask(), second.weight.block_mask())
    assert first.weight.values is second.weight.values and torch.equal(mask, frozen.weight.block_mask())


def _train_on_a_rank(rank):
    layer = layer_of("block:4x3", 0.3)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(layer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    moving = RigL(model, optimizer, fraction=0.4, every=2)
    for step in range(1, 7):
        x, target = (part[rank::2] for part in data(step))
        optimizer.zero_grad()
        functional.mse_loss(model(x), target).backward()
        optimizer.step()
        moving.step()
    return layer.weight.block_mask(), layer.weight.to_dense(), moving.report()


@pytest.mark.timeout(300)
def test_ranks_of_ddp_move_alike(tmp_path):
    first, second = results_of_ranks(_train_on_a_rank, tmp_path)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert first[2] == second[2] and first[2][0].grown > 5


def test_drop_fractions():
    formulas = {
        "constant:0.3": lambda t: 0.3,
        "cosine:0.3": lambda t: 0.15 * (1 + math.cos(math.pi * t)),
        "linear:0.4": lambda t: 0.4 * (1 - t),
        "power:0.5:2": lambda t: 0.5 * (1 - t) ** 2,
    }
    for text, formula in formulas.items():
        fraction = drop_fractions.parse_fraction(text)
        assert drop_fractions.parse_fraction(str(fraction)) == fraction
        for step in (0, 1, 13, 40):
            assert fraction.at(step, 40) == pytest.approx(formula(step / 40))
        assert fraction.at(41, 40) == 0
    assert drop_fractions.parse_fraction(0.2).at(10**9, None) == 0.2


def test_sparse_start_counts_exactly_and_draws_for_what_is_stored():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    densities = sparse_start(model, "csr", 0.02, allocation="erk", layers=["[02]"], seed=3)
    stored = sum(model[i].weight.nnzb for i in (0, 2))
    assert stored == round(0.02 * (64 * 256 + 256 * 128)) and type(model[4]) is nn.Linear
    assert densities["0"] == model[0].weight.density > 0.02 > densities["2"]
    counts = model[0].weight.pattern.crow_indices.diff()
    rows = model[0].weight.block_row_indices()
    assert bool((model[0].weight.values.detach().abs() <= counts[rows].rsqrt() * 1.0001).all())


BAD = [
    ({"fraction": "cosin:0.3", "end": 9}, "near names: cosine"),
    ({"fraction": "cosine:0.3"}, "end must be given"),
    ({"fraction": 1.5}, r"in \[0, 1\]"),
    ({"fraction": "cosine:1:2:3", "end": 9}, "must be written"),
    ({"fraction": "power:0.3:-1", "end": 9}, "exponent must not be negative"),
    ({"fraction": 0.3, "every": 0}, "every must be at least 1"),
    ({"fraction": 0.3, "begin": 5, "end": 4}, "end must be at least 5"),
    ({"fraction": 0.3, "init": "ones"}, "init must be a known one"),
    ({"fraction": 0.3, "layers": ["1"]}, "near names: 0"),
    ({"fraction": 0.3, "layers": ["("]}, "regular expressions"),
    ({"fraction": 0.3, "candidates": 0}, "candidates must be positive"),
    ({"fraction": 0.3, "tokens": 0}, "tokens must be at least 1"),
]


@pytest.mark.parametrize(("options", "text"), BAD)
def test_bad_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        RigL(nn.Sequential(layer_of("block:4x3", 0.3)), **options)


def test_other_misuse_is_refused():
    layer = layer_of("block:4x3", 0.3)
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match="must have a BlockSparseLinear"):
        SET(nn.Sequential(nn.Linear(2, 2)), fraction=0.1)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim"):
        SET(model, [3], fraction=0.1)
    moving = RigL(model, fraction=0.3, every=1)
    with pytest.raises(ValueError, match="forward and backward"):
        moving.step()
    with pytest.raises(ValueError, match="settings"):
        SET(model, fraction=0.3).load_state_dict(moving.state_dict())
    with pytest.raises(ValueError, match="settings"):
        RigL(model, fraction=0.2, every=1).load_state_dict(moving.state_dict())
    other = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(ValueError, match="same layers"):
        RigL(other, fraction=0.3, every=1).load_state_dict(moving.state_dict())
    with pytest.raises(TypeError, match="BsrWeight or a CsrWeight"):
        TopKAST(nn.Sequential(PseudoBlockSparseLinear(8, 8, block_shape=(2, 2))), fraction=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[layer.weight.values]["factors"] = torch.ones(7)
    with pytest.raises(ValueError, match="shape to move with it"):
        RigL(model, optimizer, fraction=0.3)
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer must hold weights of 0 or another layer"):
        RigL(model, others, fraction=0.3)
    SET(model, [others, torch.optim.SGD(model.parameters(), lr=0.1)], fraction=0.3)
    frozen = nn.Sequential(layer_of("block:4x3", 0.3)).requires_grad_(False)
    assert SET(frozen, others, fraction=0.3).layers == []  # nothing to hold
    with pytest.raises(ValueError, match=r"blocks must not be larger than 1, 4x8; got 8x8"):
        sparse_start(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "block:8x8", 0.5)
    with pytest.raises(ValueError, match="whole name"):
        sparse_start(nn.Sequential(nn.Linear(4, 4)), "csr", 0.5, layers=["weight"])
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        sparse_start(nn.Sequential(nn.Linear(4, 4)), "csr", 1.5)


def test_damaged_states_are_refused_before_anything_changes():
    model = nn.Sequential(layer_of("block:4x3", 0.3))
    for make in (SET, GraNet, TopKAST):
        options = {"final": 0.5, "end": 4} if make is GraNet else {}
        options |= {"forward": 0.5} if make is TopKAST else {}
        moving = make(model, fraction=0.3, every=2, **options)
        state = moving.state_dict()
        damaged = [
            *(without_entry(state, key) for key in state),
            with_entry(state, -1, "clock"),
            with_entry(state, True, "clock"),
            with_entry(state, 1, "late"),
            with_entry(state, torch.zeros(3, dtype=torch.uint8), "random"),
            with_entry(state, torch.zeros(16), "random"),
            with_entry(state, {}, "explored"),
            with_entry(state, None, "explored", "0"),
            with_entry(state, state["explored"]["0"].float(), "explored", "0"),
            with_entry(state, None, "grown", "0"),
            with_entry(state, {}, "settings"),
            with_entry(state, {"method": make.__name__}, "settings"),
            with_entry(state, "1", "settings", "unknown"),
        ]
        if make is GraNet:
            damaged += [with_entry(state, {}, "first"), with_entry(state, 2.5, "first", "0")]
        if make is TopKAST:
            damaged += [
                with_entry(state, {}, "active"),
                with_entry(state, torch.tensor([10**6]), "active", "0"),
            ]
        moving.clock = 7
        random = moving.random.get_state()
        for bad in damaged:
            with pytest.raises(ValueError, match=r"\.load_state_dict\] "):
                moving.load_state_dict(bad)
            assert moving.clock == 7 and torch.equal(moving.random.get_state(), random)
        moving.load_state_dict(state)
        assert moving.clock == 0


def test_bitmaps_do_not_move_and_are_told_so():
    model = nn.Sequential(nn.Linear(8, 8))
    sparse_start(model, "bitmap", 0.5)
    with pytest.raises(ValueError, match=r"blocks or csr, that trains .* got bitmap, which do not move"):
        RigL(model, fraction=0.3)
