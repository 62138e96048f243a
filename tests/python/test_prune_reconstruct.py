"""Reconstruction against the published algorithms in plain numpy: errors are no larger, counts exact."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import rarefy
from rarefy.prune import (
    Elimination,
    Mask,
    Moments,
    arrange_hidden,
    eliminations,
    factorize_weight,
    grams,
    layer_error,
    reconstruct,
    reconstruct_layer,
    reconstruct_weight,
    sensitivity,
)
from rarefy.prune.damping import damped
from rarefy.prune.patterns import parse_pattern


def problem(n=48, k=96, tokens=300, seed=0):
    """A weight, and inputs that are correlated and of different size."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g, dtype=torch.float64) / k**0.5 + torch.eye(k)
    x = torch.randn(tokens, k, generator=g, dtype=torch.float64) @ mix
    x *= torch.rand(k, generator=g, dtype=torch.float64) * 3 + 0.1
    return torch.randn(n, k, generator=g, dtype=torch.float64), x.T @ x


def published(weight, gram, sparsity, n=0, m=0, panel=128, exact=False):
    """SparseGPT as its authors wrote it down: thresholds (or exact counts), panels, errors to the right."""
    w, h = weight.numpy().copy(), gram.numpy().copy()
    k = w.shape[1]
    h[np.diag_indices(k)] += 0.01 * np.mean(np.diag(h))
    u = np.linalg.cholesky(np.linalg.inv(h)).T
    for begin in range(0, k, panel):
        end = min(begin + panel, k)
        part, errors = w[:, begin:end].copy(), np.zeros((len(w), end - begin))
        cost = part**2 / np.diag(u)[begin:end] ** 2
        gone = np.zeros(part.shape, bool)
        if m == 0 and exact:
            whole = round(sparsity * w.size)
            due = round(whole * end / k) - round(whole * begin / k)
            gone.ravel()[np.argsort(cost, axis=None)[:due]] = True
        elif m == 0:
            gone = cost <= np.sort(cost.ravel())[int(cost.size * sparsity)]
        for i in range(end - begin):
            d = u[begin + i, begin + i]
            if m and i % m == 0:
                now = part[:, i : i + m] ** 2 / np.diag(u)[begin + i : begin + i + m] ** 2
                lowest = np.argsort(now, axis=1)[:, : m - n]
                np.put_along_axis(gone[:, i : i + m], lowest, True, axis=1)
            q = np.where(gone[:, i], 0, part[:, i])
            e = (part[:, i] - q) / d
            part[:, i:] -= np.outer(e, u[begin + i, begin + i : end])
            part[:, i] = q
            errors[:, i] = e
        w[:, begin:end] = part
        w[:, end:] -= errors @ u[begin:end, end:]
    return torch.from_numpy(w)


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("panel", [32, 128])
def test_sparsegpt_is_no_worse_than_published(sparsity, panel):
    weight, gram = problem()
    new, mask = reconstruct_weight(weight, gram, "unstructured", sparsity, panel=panel)
    assert mask.kept == weight.numel() - round(sparsity * weight.numel())
    assert torch.equal(new == 0, ~mask.unpack())
    exact = published(weight, gram, sparsity, panel=panel, exact=True)
    torch.testing.assert_close(new, exact, rtol=1e-8, atol=1e-10)
    # The published threshold takes one weight more from each panel: that costs, but for chance.
    ours = theirs = 0.0
    for seed in range(8):
        weight, gram = problem(seed=seed)
        new, _ = reconstruct_weight(weight, gram, "unstructured", sparsity, panel=panel)
        ours += layer_error(weight, new, gram)
        theirs += layer_error(weight, published(weight, gram, sparsity, panel=panel), gram)
    assert ours <= theirs


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 3)])
def test_sparsegpt_n_of_m_is_the_published(n, m):
    weight, gram = problem()
    new, mask = reconstruct_weight(weight, gram, f"{n}:{m}", panel=96 if m == 3 else 128)
    oracle = published(weight, gram, 0, n, m, panel=96 if m == 3 else 128)
    torch.testing.assert_close(new, oracle, rtol=1e-8, atol=1e-10)
    assert int(mask.unpack().view(len(weight), -1, m).sum(2).max()) == n


@pytest.mark.parametrize("pattern", ["block:4x4", "block:1x8", "block:16x1", "block:16x16", "block:5x7"])
def test_sparsegpt_in_blocks(pattern):
    weight, gram = problem()
    kind = parse_pattern(pattern)
    new, mask = reconstruct_weight(weight, gram, pattern, 0.5)
    blocks = rarefy.masks.to_blocks(mask.unpack(), (kind.r, kind.c)).flatten(2).any(2)
    assert int((~blocks).sum()) == kind.removed(weight.shape, 0.5)
    assert torch.equal(rarefy.masks.expand_mask(blocks, tuple(weight.shape), (kind.r, kind.c)), mask.unpack())
    assert torch.equal(new == 0, ~mask.unpack())
    plain = rarefy.masks.top_blocks(rarefy.masks.block_norms(weight, (kind.r, kind.c)), 0.5)
    plain = weight * rarefy.masks.expand_mask(plain, tuple(weight.shape), (kind.r, kind.c))
    assert layer_error(weight, new, gram) < 0.9 * layer_error(weight, plain, gram)


def test_blocks_of_one_are_unstructured():
    weight, gram = problem()
    one, two = (reconstruct_weight(weight, gram, p, 0.5)[0] for p in ("unstructured", "block:1x1"))
    assert torch.equal(one, two)


def test_sparsegpt_keeps_to_a_given_mask():
    weight, gram = problem()
    mask = Mask.pack(torch.rand(weight.shape) < 0.5)
    new, same = reconstruct_weight(weight, gram, "unstructured", 0.5, mask=mask)
    assert torch.equal(same.unpack(), mask.unpack())
    assert torch.equal(new == 0, ~mask.unpack())
    assert layer_error(weight, new, gram) < 0.85 * layer_error(weight, weight * mask.unpack(), gram)


def _best(weight, gram, mask):
    """Least squares row by row, in numpy."""
    h = gram.numpy() + 0.01 * np.mean(np.diag(gram.numpy())) * np.eye(len(gram))
    out = np.zeros(weight.shape)
    for r, row in enumerate(weight.numpy()):
        s = mask[r].numpy()
        if s.any():
            out[r, s] = np.linalg.solve(h[np.ix_(s, s)], h[s] @ row)
    return torch.from_numpy(out)


@pytest.mark.parametrize("density", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_least_squares_is_its_oracle(density):
    weight, gram = problem()
    mask = torch.rand(weight.shape) < density
    mask[1] = mask[0]
    new, _ = reconstruct_weight(weight, gram, "unstructured", method="least_squares", mask=Mask.pack(mask))
    torch.testing.assert_close(new, _best(weight, gram, mask), rtol=1e-7, atol=1e-9)


def test_refit_makes_every_method_better():
    weight, gram = problem()
    for method in ("sparsegpt", "obs", "wanda", "magnitude"):
        pattern = "row_balanced" if method == "obs" else "unstructured"
        once, mask = reconstruct_weight(weight, gram, pattern, 0.6, method)
        again, same = reconstruct_weight(weight, gram, pattern, 0.6, method, refit=True)
        assert torch.equal(mask.bits, same.bits)
        assert layer_error(weight, again, gram) <= layer_error(weight, once, gram) * (1 + 1e-9)


def test_methods_are_ordered_as_in_the_papers():
    weight, gram = problem(64, 128, 500)
    error = {
        m: layer_error(weight, reconstruct_weight(weight, gram, "unstructured", 0.5, m)[0], gram)
        for m in ("magnitude", "wanda", "sparsegpt", "obs")
    }
    assert error["magnitude"] > error["wanda"] > error["sparsegpt"] > error["obs"]


def surgeon(weight, gram, r, c, drop, steps):
    """The demo's block OBS: a few blocks of every block row at a time, the joint update after each."""
    w = weight.numpy().copy()
    h0 = gram.numpy() + 0.01 * np.mean(np.diag(gram.numpy())) * np.eye(len(gram))
    for begin in range(0, len(w), r):
        rows, inverse, keep, done = w[begin : begin + r], np.linalg.inv(h0), np.ones(w.shape[1] // c, bool), 0
        for step in range(steps):
            count = drop * (step + 1) // steps - done
            done += count
            cost = np.full(len(keep), np.inf)
            for j in np.flatnonzero(keep):
                b = slice(j * c, (j + 1) * c)
                cost[j] = np.trace(rows[:, b] @ np.linalg.solve(inverse[b, b], rows[:, b].T))
            gone = np.argsort(cost, kind="stable")[:count]
            keep[gone] = False
            d = (gone[:, None] * c + np.arange(c)).ravel()
            if len(d):
                solved = np.linalg.solve(inverse[np.ix_(d, d)], inverse[d])
                rows -= rows[:, d] @ solved
                inverse = inverse - inverse[:, d] @ solved
            rows[:, np.repeat(~keep, c)] = 0
    return torch.from_numpy(w)


@pytest.mark.parametrize(("r", "c"), [(1, 1), (4, 1), (16, 1), (4, 4), (16, 16)])
def test_block_obs_is_the_demos(r, c):
    weight, gram = problem()
    blocks = 96 // c
    for density in (0.25, 0.5, 1.0):
        drop = blocks - round(density * blocks)
        new, mask = reconstruct_weight(weight, gram, f"row_balanced:{r}x{c}", 1 - density, "obs", steps=5)
        torch.testing.assert_close(new, surgeon(weight, gram, r, c, drop, 5), rtol=1e-7, atol=1e-8)
        kept = rarefy.masks.to_blocks(mask.unpack(), (r, c)).flatten(2).any(2).sum(1)
        assert set(kept.tolist()) == {blocks - drop}


def eliminated(weight, gram, r, c, steps):
    """What each block costs when it leaves, in rounds until none is left, in numpy."""
    h0 = gram.numpy() + 0.01 * np.mean(np.diag(gram.numpy())) * np.eye(len(gram))
    across = -(-weight.shape[1] // c)
    costs = np.zeros((-(-len(weight) // r), across))
    for i in range(len(costs)):
        w, inverse, left, last, done = (
            weight.numpy()[i * r : (i + 1) * r].copy(),
            np.linalg.inv(h0),
            [],
            0.0,
            0,
        )
        left = list(range(across))
        for step in range(steps):
            count = across * (step + 1) // steps - done
            done += count
            cost = {}
            for j in left:
                b = slice(j * c, (j + 1) * c)
                cost[j] = np.trace(w[:, b] @ np.linalg.solve(inverse[b, b], w[:, b].T))
            gone = sorted(left, key=cost.get)[:count]
            for j in gone:
                costs[i, j] = last = max(last, cost[j])
            left = [j for j in left if j not in gone]
            d = np.concatenate([np.arange(j * c, min((j + 1) * c, w.shape[1])) for j in gone] or [[]]).astype(
                int
            )
            solved = np.linalg.solve(inverse[np.ix_(d, d)], inverse[d])
            w -= w[:, d] @ solved
            inverse = inverse - inverse[:, d] @ solved
    return torch.from_numpy(costs)


@pytest.mark.parametrize(("r", "c"), [(1, 1), (4, 1), (16, 1), (4, 4), (5, 7)])
def test_elimination_is_its_oracle(r, c):
    weight, gram = problem()
    weight[:16] *= 3  # rows of different need
    found = Elimination(weight, gram, f"block:{r}x{c}", steps=7)
    torch.testing.assert_close(found.costs, eliminated(weight, gram, r, c, 7), rtol=1e-6, atol=1e-9)
    before = torch.ones(weight.shape, dtype=torch.bool)
    for sparsity in (0.0, 0.3, 0.6, 0.9, 1.0):
        new, mask = found.prune(sparsity)
        stays, units = mask.unpack(), parse_pattern(f"block:{r}x{c}")
        blocks = rarefy.masks.to_blocks(stays, (r, c)).flatten(2).any(2)
        assert int((~blocks).sum()) == units.removed(weight.shape, sparsity)
        left = found.costs[blocks].min() if blocks.any() else torch.inf
        assert blocks.all() or found.costs[~blocks].max() < left
        assert not (stays & ~before).any()  # what has left stays away
        torch.testing.assert_close(new, _best(weight, gram, stays), rtol=1e-6, atol=1e-8)
        before = stays


def test_obs_over_the_whole_layer_gives_more_to_rows_that_need_more():
    weight, gram = problem()
    weight[:16] *= 3
    new, mask = reconstruct_weight(weight, gram, "block:16x1", 0.5, "obs")
    balanced, _ = reconstruct_weight(weight, gram, "row_balanced:16x1", 0.5, "obs")
    kept = mask.unpack()[::16].sum(1)
    assert int(kept.sum()) == 3 * 96 // 2 and int(kept[0]) > max(kept[1:])
    assert layer_error(weight, new, gram) < 0.9 * layer_error(weight, balanced, gram)
    same, _ = Elimination(weight, gram, "block:16x1").prune(0.5)
    torch.testing.assert_close(new, same)


def test_elimination_of_inputs_that_never_come():
    weight, gram = problem()
    gram[10] = gram[:, 10] = 0
    found = Elimination(weight.float(), gram, "block:4x1")
    new, mask = found.prune(12 / (12 * 96))
    assert not mask.unpack()[:, 10].any() and new.dtype == torch.float32
    new, _ = found.prune(0.0)
    torch.testing.assert_close(new, weight.float())


def test_eliminations_of_a_model_feed_sensitivity():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    found = eliminations(model, data(), "block:2x2", config={"up|down": {}})
    assert list(found) == ["up.weight", "down.weight"]
    x = torch.cat(data())
    with torch.no_grad():
        want = model(x)
    report = sensitivity(
        model,
        lambda m: (m(x) - want).square().mean().item(),
        "block:2x2",
        (0.25, 0.5, 0.75),
        prune=lambda name, weight, sparsity: found[name].prune(sparsity)[0],
        config={"up|down": {}},
        time=False,
    )
    plain = sensitivity(
        model, lambda m: (m(x) - want).square().mean().item(), "block:2x2", (0.25, 0.5, 0.75),
        config={"up|down": {}}, time=False,
    )  # fmt: skip
    assert all(p.loss <= q.loss for p, q in zip(report, plain, strict=True))
    assert [p.parameters for p in report] == [p.parameters for p in plain]
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    with pytest.raises(ValueError, match=r"data must reach every layer; got none at up\.weight"):
        eliminations(model, [], "block:2x2", config={"up|down": {}})
    with pytest.raises(ValueError, match="pattern must be blocks counted over the whole layer; got 2:4"):
        Elimination(torch.ones(4, 4), torch.eye(4), "2:4")


def test_block_obs_with_ragged_edges():
    weight, gram = problem(10, 23)
    new, mask = reconstruct_weight(weight, gram, "row_balanced:4x5", 0.4, "obs")
    blocks = rarefy.masks.to_blocks(mask.unpack(), (4, 5)).flatten(2).any(2)
    assert blocks.sum(1).tolist() == [3, 3, 3]
    assert torch.equal(rarefy.masks.expand_mask(blocks, (10, 23), (4, 5)), mask.unpack())
    best = reconstruct_weight(weight, gram, "unstructured", method="least_squares", mask=mask)[0]
    torch.testing.assert_close(new, best, rtol=1e-6, atol=1e-8)  # OBS ends at the best on its mask


def test_int8_is_rounded_before_the_dtype_is():
    """Steps and what the right makes up for come from float64, not from what bf16 left of the weights."""
    torch.manual_seed(3)
    x = torch.randn(300, 16) @ torch.randn(16, 16)
    weight, gram = torch.randn(8, 16).bfloat16(), x.T @ x
    for method in ("obs", "sparsegpt", "magnitude"):
        wide, _ = reconstruct_weight(weight.double(), gram, "block:4x1", 0.5, method, int8=True)
        new, _ = reconstruct_weight(weight, gram, "block:4x1", 0.5, method, int8=True)
        assert torch.equal(new, wide.bfloat16()), method


@pytest.mark.parametrize("dampening", [-0.1, float("nan"), float("inf")])
def test_dampening_is_checked_wherever_it_is_used(dampening):
    layer = nn.Linear(4, 4)
    gram = torch.eye(4)
    with pytest.raises(ValueError, match=r"\[Elimination\] dampening must be finite and not negative"):
        Elimination(layer.weight, gram, "block:2x1", dampening=dampening)
    with pytest.raises(ValueError, match=r"\[reconstruct\] dampening must be"):
        reconstruct_weight(layer.weight, gram, "2:4", dampening=dampening)
    with pytest.raises(ValueError, match=r"\[factorize\] dampening must be"):
        factorize_weight(layer.weight, rank=1, gram=gram, dampening=dampening)
    with pytest.raises(ValueError, match=r"\[arrange_hidden\] dampening must be"):
        arrange_hidden(layer, nn.Linear(4, 4), gram, 2, 0.5, ridge=dampening)


def test_grams_are_those_of_the_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Conv1d(1, 1, 1), nn.Linear(4, 3))
    data = [torch.randn(5, 1, 6), torch.randn(2, 1, 6)]
    found = grams(model, data)
    assert list(found) == ["0.weight", "3.weight"]
    x = torch.cat(data).flatten(0, 1).double()
    torch.testing.assert_close(found["0.weight"], (x.T @ x).unsqueeze(0))
    only = grams(model, data, config={"3": {}}, forward=lambda x: model(2 * x))
    assert list(only) == ["3.weight"] and only["3.weight"].shape == (1, 4, 4)
    with pytest.raises(ValueError, match=r"\[grams\] data must reach every layer; got none at 0.weight"):
        grams(model, [])


def test_a_singular_hessian_is_damped_more_and_said():
    gram = torch.ones(8, 8, dtype=torch.float64) * 4
    gram[0, 0] = 3.9  # indefinite: no damping below 0.1 / 4 makes it positive
    weight = torch.randn(4, 8)
    with pytest.warns(RuntimeWarning, match=r"XᵀX of fc is singular; dampening raised from 0\.001 to 0\.1"):
        new, mask = reconstruct_weight(weight, gram, "2:4", dampening=0.001, name="fc")
    assert mask.kept == 16 and new.isfinite().all()
    exact = torch.ones(8, 8, dtype=torch.float64) * 4  # its factor has zeros on the diagonal
    with pytest.warns(RuntimeWarning, match=r"singular; dampening raised from 0 to 1e-05"):
        damped("x", exact, 0.0, "w")
    bad = torch.diag(torch.tensor([-1e9, 1.0]))
    with pytest.raises(ValueError, match="XᵀX of w must be positive definite after dampening"):
        damped("x", bad, 0.01, "w")
    with pytest.raises(ValueError, match="XᵀX of w must be finite; got NaN or infinity"):
        damped("x", bad * torch.nan, 0.01, "w")


def test_columns_without_inputs_leave_first():
    weight, gram = problem()
    gram[10] = gram[:, 10] = 0
    _, mask = reconstruct_weight(weight, gram, "unstructured", 0.1)
    assert not mask.unpack()[:, 10].any()
    new, mask = reconstruct_weight(weight, gram, "unstructured", 0.0)
    torch.testing.assert_close(new, weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(torch.relu(self.conv(x)).mean((2, 3)))))


def data():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(64, 4, 6, 6, generator=g) for _ in range(3)]


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_a_whole_model(memory):
    dense, model = Net(), Net()
    model.load_state_dict(dense.state_dict())
    seen = []
    result = reconstruct(
        model, data(), "unstructured", 0.5, refit=True, memory=memory, on_layer=lambda *a: seen.append(a[0])
    )
    assert seen == list(result.masks) == ["conv.weight", "up.weight", "down.weight"]
    for name, mask in result.masks.items():
        weight = model.get_parameter(name).detach().flatten(1)
        assert torch.equal(weight == 0, ~mask.unpack())
        assert mask.density == pytest.approx(0.5, abs=0.01)
    plain = copy.deepcopy(dense)
    reconstruct(plain, data(), "unstructured", 0.5, "magnitude")
    x = data()[0]
    with torch.no_grad():
        want = dense(x)
        assert (model(x) - want).norm() < 0.5 * (plain(x) - want).norm()
    assert "conv.weight" in str(result)


def deep(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(4, 12, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 6, bias=False))


def test_towards_the_dense_model_layers_mend_what_came_before():
    dense = deep()
    lost, x = {}, torch.cat(data())
    held_out = torch.randn(200, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    for how in ("own", "dense", "all at once"):
        model = copy.deepcopy(dense)
        options = {} if how == "own" else {"towards": dense}
        memory = 0 if how != "all at once" else 1 << 30
        result = reconstruct(model, data(), "block:4x1", 0.6, "obs", memory=memory, **options)
        with torch.no_grad():
            lost[how] = float((model(held_out) - dense(held_out)).square().mean())
            if how == "dense":  # the last layer's error is the model's
                want = float((model(x) - dense(x)).square().sum() / dense(x).square().sum())
                assert result.errors["7.weight"] == pytest.approx(want, rel=1e-3)
        for name, mask in result.masks.items():
            assert torch.equal(model.get_parameter(name).flatten(1) != 0, mask.unpack())
    assert lost["dense"] < 0.95 * min(lost["own"], lost["all at once"])


def test_towards_is_reconstruct_layer_on_what_the_layers_give():
    dense = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    x, model = torch.randn(300, 16), copy.deepcopy(dense)
    reconstruct(
        model, [x[:100], x[100:]], "row_balanced:4x1", 0.5, "obs", towards=dense, memory=0, dampening=0.02
    )
    again = copy.deepcopy(dense)
    for here in (0, 2):
        moments = Moments(again[here].in_features, again[here].out_features)
        with torch.no_grad():
            moments.add(again[:here](x), dense[: here + 1](x))
        reconstruct_layer(again[here], moments, "row_balanced:4x1", 0.5, ridge=0.02)
        for name in ("weight", "bias"):
            torch.testing.assert_close(getattr(model[here], name), getattr(again[here], name))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"towards": nn.Linear(3, 3)}, "must have a layer conv of shape"),
        ({"towards": "same"}, "must be a copy of the model"),
        ({"towards": "copy", "forward": print}, "forward must be None"),
    ],
)
def test_towards_refuses_what_does_not_fit(options, text):
    model = Net()
    others = {"same": model, "copy": copy.deepcopy(model)}
    options = options | {"towards": others.get(options["towards"], options["towards"])}
    with pytest.raises(ValueError, match=text):
        reconstruct(model, data(), **options)


def test_towards_says_which_layer_does_not_fit():
    class Often(nn.Module):
        def __init__(self, times: int, rows: int, width: int = 6) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.times, self.rows, self.width = times, rows, width

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            for _ in range(self.times):
                x = self.two(x[: self.rows, : self.width])
            return x

    x = [torch.randn(20, 6)]
    with pytest.raises(TypeError, match=r"towards must be an nn\.Module; got int"):
        reconstruct(Often(1, 20), x, "2:4", towards=3)
    with pytest.raises(ValueError, match=r"the layer of two\.weight 2 times, as the model does; got 1 times"):
        reconstruct(Often(2, 20), x, "2:4", towards=Often(1, 20))
    with pytest.raises(ValueError, match=r"the layer of two\.weight 20 tokens in a call; got 7 of \(7, 6\)"):
        reconstruct(Often(1, 20), x, "2:4", towards=Often(1, 7))
    with pytest.raises(ValueError, match=r"the inputs of two\.weight must have 6 features; got \(20, 5\)"):
        reconstruct(Often(1, 20, 5), x, "2:4", towards=Often(1, 20))


def test_layers_of_their_own_and_those_done_before():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    config = {"up": {"sparsity": 0.75, "pattern": "block:4x4"}, "down|conv": {}}
    result = reconstruct(model, data(), "2:4", config=config, skip=["down.weight"])
    assert set(result.masks) == {"up.weight", "conv.weight"}
    assert result.masks["up.weight"].density == 0.25
    assert torch.equal(model.down.weight, before["down.weight"])


def test_an_interruption_costs_the_layer_in_progress_alone():
    whole, done = Net(), []
    model = copy.deepcopy(whole)
    expected = reconstruct(whole, data(), "2:4", memory=0)

    def interrupted():
        yield from data()
        if done:  # the second layer's data are collected
            raise KeyboardInterrupt

    class Batches:
        def __iter__(self):
            return interrupted()

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        reconstruct(model, Batches(), "2:4", memory=0, on_layer=lambda name, mask, error: done.append(name))
    first = next(iter(expected.masks))
    assert done == [first]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if k != first)
    assert not any(module._forward_pre_hooks for module in model.modules())
    rest = reconstruct(model, data(), "2:4", memory=0, skip=done)
    assert [*done, *rest.masks] == list(expected.masks)
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in model.state_dict().items())


def test_bad_input():
    weight, gram = problem()

    def message(*args, **options):
        with pytest.raises((ValueError, TypeError)) as error:
            reconstruct_weight(*args, **options)
        return str(error.value)

    assert "near names: sparsegpt" in message(weight, gram, "2:4", method="sparsgpt")
    assert "must be (N, K) and gram (K, K); got (48, 96) and (95, 96)" in message(weight, gram[1:], "2:4")
    assert "sparsity must be in [0, 1]; got -1" in message(weight, gram, "unstructured", -1)
    assert "at most 0.5 with the pattern 2:4" in message(weight, gram, "2:4", 0.7)
    assert 'counts in whole layers ("obs" in rows)' in message(weight, gram, "row_balanced", 0.5)
    assert 'the method "obs" is for blocks' in message(weight, gram, "2:4", method="obs")
    assert "blocks must not be larger than weight, 48x96; got 64x1" in message(weight, gram, "block:64x1")
    assert "panel must be at least 1; got 0" in message(weight, gram, "2:4", panel=0)
    assert "steps must be at least 1; got 0" in message(weight, gram, "block:4x1", method="obs", steps=0)
    assert "dampening must be finite and not negative; got -1" in message(weight, gram, "2:4", dampening=-1)
    assert 'mask needs the method "sparsegpt"' in message(
        weight, gram, "2:4", method="wanda", mask=Mask.pack(weight > 0)
    )
    with pytest.raises(ValueError, match=r"data must reach every layer; got none at conv\.weight"):
        reconstruct(Net(), [])
    with pytest.raises(ValueError, match=r"the inputs of conv\.weight must be finite"):
        reconstruct(Net(), [data()[0] * torch.nan])


def gptq(weight, gram, mask):
    """Rounding to 255 levels by rows, columns from left to right, errors to the right; in numpy."""
    w, h = weight.double().numpy().copy(), gram.numpy().copy()
    h[np.diag_indices(len(h))] += 0.01 * np.mean(np.diag(h))
    u = np.linalg.cholesky(np.linalg.inv(h)).T
    most = np.abs(w * mask.numpy())
    at, step = most.argmax(1), np.where(most.max(1) > 0, most.max(1), 127) / 127
    sign = np.sign(w[np.arange(len(w)), at])
    for c in range(w.shape[1]):
        q = np.clip(np.round(w[:, c] / step), -127, 127)
        q = np.where(at == c, 127 * sign, q) * step * mask.numpy()[:, c]
        w[:, c:] -= np.outer((w[:, c] - q) / u[c, c], u[c, c:])
        w[:, c] = q
    return torch.from_numpy(w).to(weight.dtype)


@pytest.mark.parametrize(
    ("pattern", "method"), [("block:16x1", "obs"), ("block:4x4", "sparsegpt"), ("unstructured", "wanda")]
)
def test_joint_int8_is_gptq_on_the_mask(pattern, method):
    weight, gram = problem()
    weight = weight.float()
    weight[5] = 0
    plain, mask = reconstruct_weight(weight, gram, pattern, 0.5, method)
    joint, same = reconstruct_weight(weight, gram, pattern, 0.5, method, int8=True)
    assert torch.equal(mask.bits, same.bits)
    torch.testing.assert_close(joint, gptq(plain, gram, mask.unpack()), rtol=1e-5, atol=1e-6)
    block = (16, 1) if method == "obs" else (4, 4) if method == "sparsegpt" else (1, 1)
    kept = rarefy.masks.to_blocks(mask.unpack(), block).flatten(2).any(2)

    def stored(w):
        return rarefy.Int8Weight.from_dense(w, block_shape=block, mask=kept).to_dense()

    torch.testing.assert_close(stored(joint), joint, rtol=1e-6, atol=0)  # what is stored is what was made
    extra = [layer_error(plain, stored(w), gram) for w in (joint, plain)]
    assert extra[0] < 0.9 * extra[1]
