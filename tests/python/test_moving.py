"""Patterns that move: SET, RigL, SRigL and magnitude regrow, each against a masked dense oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from moving_oracle import FORMS, OPTIMIZERS, Oracle, best, block_norms, data, follow, layer_of, mask_at, rigl
from rarefy import PseudoBlockSparseLinear
from rarefy.prune import SET, MagnitudeRegrow, RigL, SRigL, drop_fractions, sparse_start


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


def test_ties_grow_evenly_over_rows():
    layer = layer_of("csr", 0.2)
    moving = RigL(nn.Sequential(layer), fraction=1.0, every=1)
    (layer(data(0)[0]) * 0).sum().backward()  # all gradients are zero
    with torch.no_grad():
        layer.weight.values.zero_()
    moving.step()
    rows, columns = (layer.weight.block_mask().sum(dim) for dim in (1, 0))
    assert rows.min() >= 3 and rows.max() <= 10 and columns.min() >= 3 and columns.max() <= 14  # means 6, 8


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
