"""Top-KAST: a forward set within a backward set, against a masked dense oracle and in a network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import rarefy
from moving_oracle import K, N, best, block_norms, data, layer_of, mask_at
from rarefy import BlockSparseLinear
from rarefy.masks import expand_mask
from rarefy.prune import TopKAST, sparse_start


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
