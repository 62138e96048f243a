"""Layers fitted to what is wanted of them, against least squares in numpy; rows put in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import rarefy
from rarefy.prune import Moments, arrange, arrange_hidden, reconstruct_layer


def wanted(bias=True, seed=0):
    """A layer, inputs with many dependences and a mean, and outputs that another layer would give."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(500, 24, generator=g) @ torch.randn(24, 24, generator=g) + 1
    layer, other = nn.Linear(24, 16, bias), nn.Linear(24, 16)
    with torch.no_grad():
        for p in (*layer.parameters(), *other.parameters()):
            p.copy_(torch.randn(p.shape, generator=g))
        other.weight.copy_(layer.weight + 0.3 * other.weight)
        y = other(x)
    return layer, x, y


def moments_of(x, y):
    moments = Moments(x.shape[-1], y.shape[-1])
    for some, want in zip(x.view(5, 4, 25, -1), y.view(5, 4, 25, -1), strict=True):
        moments.add(some, want)
    return moments


def best(x, y, kept, near, ridge, bias):
    """Argmin ‖XWᵀ + b − Y‖² + λ‖W − near‖² with W zero outside `kept`, row by row."""
    x, y, near = x.double().numpy(), y.double().numpy(), near.double().numpy()
    mean, middle = (x.mean(0), y.mean(0)) if bias else (np.zeros(x.shape[1]), np.zeros(y.shape[1]))
    gram, cross = (x - mean).T @ (x - mean), (x - mean).T @ (y - middle)
    pull = ridge * np.mean(np.diag(gram))
    out = np.zeros(near.shape)
    for r, s in enumerate(kept.numpy()):
        h = gram[np.ix_(s, s)] + pull * np.eye(s.sum())
        out[r, s] = np.linalg.solve(h, cross[s, r] + pull * near[r, s])
    return torch.from_numpy(out), torch.from_numpy(middle - out @ mean)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pattern", [None, "block:4x1", "block:4x4", "unstructured", "row_balanced:16x1"])
def test_a_layer_is_the_best_for_what_is_wanted(bias, pattern):
    layer, x, y = wanted(bias)
    near = layer.weight.detach().clone()
    mask = reconstruct_layer(layer, moments_of(x, y), pattern, None if pattern is None else 0.5)
    kept = torch.ones(16, 24, dtype=torch.bool) if mask is None else mask.unpack()
    assert (mask is None) == (pattern is None) and int(kept.sum()) == (384 if pattern is None else 192)
    weight, offset = best(x, y, kept, near, 0.01, bias)
    torch.testing.assert_close(layer.weight.double(), weight, rtol=1e-3, atol=1e-4)
    if bias:
        torch.testing.assert_close(layer.bias.double(), offset, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["obs", "sparsegpt", "wanda"])
def test_every_method_makes_up_for_what_leaves(method):
    layer, x, y = wanted()
    blocks = rarefy.masks.top_blocks(rarefy.masks.block_norms(layer.weight.detach(), (4, 1)), 0.5)
    plain = layer.weight.detach() * rarefy.masks.expand_mask(blocks, (16, 24), (4, 1))
    options = {"refit": True} if method == "wanda" else {}
    reconstruct_layer(layer, moments_of(x, y), "block:4x1", 0.5, method, **options)
    lost = y - x @ plain.T
    assert (layer(x) - y).norm() < 0.85 * (lost - lost.mean(0)).norm()  # even with the best bias


def test_moments_refuse_what_does_not_fit():
    layer, x, y = wanted()
    moments = Moments(24, 16)
    with pytest.raises(
        ValueError, match=r"\[Moments.add\] x must be \(…, 24\) and y \(…, 16\); got \(500, 16\)"
    ):
        moments.add(y, x)
    with pytest.raises(ValueError, match="x and y must be finite; got NaN or infinity"):
        moments.add(x, y * torch.inf)
    with pytest.raises(ValueError, match="moments must have tokens; got 0"):
        reconstruct_layer(layer, moments)
    with pytest.raises(ValueError, match=r"moments must be of 24 inputs and 16 outputs; got \(16, 24\)"):
        reconstruct_layer(layer, moments_of(y, x), "block:4x1", 0.5)


def test_moments_of_half_precision_are_those_of_float():
    _, x, y = wanted()
    x, y = x.bfloat16(), y.bfloat16()
    half, full = moments_of(x, y), moments_of(x.float(), y.float())
    assert torch.equal(half.gram, full.gram) and torch.equal(half.cross, full.cross)


def test_rows_that_care_for_the_same_inputs_become_neighbours():
    importance = 0.3 * torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    importance[::2, :3] += 1.0
    importance[1::2, 3:] += 1.0
    order = arrange(importance, rows=4, kept=3)
    assert sorted(order.tolist()) == list(range(8))
    assert len({i % 2 for i in order[:4].tolist()}) == 1
    assert torch.equal(arrange(importance[order], rows=4, kept=3), torch.arange(8))
    with pytest.raises(
        ValueError, match=r"N a multiple of rows, and kept in \[1, K\]; got \(8, 6\), rows=3, kept=3"
    ):
        arrange(importance, 3, 3)


def test_hidden_features_in_order_compute_the_same():
    g = torch.Generator().manual_seed(0)
    up, down, x = nn.Linear(12, 32), nn.Linear(32, 12), torch.randn(64, 12, generator=g)
    want = down(torch.nn.functional.gelu(up(x)))
    order = arrange_hidden(up, down, x.T @ x, 8, 0.5)
    assert sorted(order.tolist()) == list(range(32)) and order.tolist() != list(range(32))
    torch.testing.assert_close(down(torch.nn.functional.gelu(up(x))), want)
    with pytest.raises(ValueError, match="down must have as many inputs as up has outputs; got 32, 12"):
        arrange_hidden(down, down, torch.eye(32), 4, 0.5)


def test_moments_are_factored_once(monkeypatch):
    layer, x, y = wanted()
    real, calls = torch.linalg.cholesky_ex, []
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: calls.append(len(a)) or real(a))
    reconstruct_layer(layer, moments_of(x, y), "block:4x1", 0.5)
    assert calls == [24]


def test_nothing_that_is_asked_for_is_dropped():
    layer, x, y = wanted()
    before = layer.weight.clone()
    with pytest.raises(ValueError, match=r"\[reconstruct_layer\] int8 and sparsity must come with a pattern"):
        reconstruct_layer(layer, moments_of(x, y), None, 0.5, int8=True)
    with pytest.raises(ValueError, match="dampening must be finite and not negative; got -1"):
        reconstruct_layer(layer, moments_of(x, y), "block:4x1", 0.5, ridge=-1.0)
    assert torch.equal(layer.weight, before)


def test_an_order_that_stays_is_not_sought_again(monkeypatch):
    importance = torch.zeros(16, 8)
    for row in range(16):  # four kinds of rows, mixed
        importance[row, 2 * (row % 4) : 2 * (row % 4) + 2] = 1.0 + 0.1 * row
    real, rounds = torch.Tensor.topk, []
    monkeypatch.setattr(torch.Tensor, "topk", lambda *a, **k: rounds.append(1) or real(*a, **k))
    order = arrange(importance, 4, 2, rounds=50)
    assert len(rounds) < 20
    monkeypatch.undo()
    assert torch.equal(order, arrange(importance, 4, 2, rounds=len(rounds)))
    assert sorted(order.tolist()) == list(range(16))
