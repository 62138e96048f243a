"""Gradients where nothing is stored: what they are made of, what they cost, when they are watched."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from moving_oracle import FORMS, K, N, best, block_norms, data, layer_of, mask_at
from rarefy import BlockSparseLinear
from rarefy.prune import RigL, gradient_norms


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
