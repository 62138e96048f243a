"""Whole runs with patterns that move: compiled models, checkpoints, seeds, ranks of DDP, tied weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import rarefy
from moving_oracle import K, N, data, layer_of
from ranks import results_of_ranks
from rarefy import BlockSparseLinear
from rarefy.prune import SET, GraNet, MagnitudeRegrow, RigL, SRigL, TopKAST, sparse_start


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
