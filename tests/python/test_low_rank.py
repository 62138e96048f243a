"""Low rank against the optimum of numpy's SVD, with data, and with sparse blocks beside it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import rarefy
from rarefy.prune import LowRankConv2d, LowRankLinear, factorize, factorize_weight, factorize_with_blocks


def correlated(tokens=200, k=24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, 8, generator=generator) @ torch.randn(
        8, k, generator=generator
    ) + 0.1 * torch.randn(tokens, k, generator=generator)


@pytest.mark.parametrize("rank", [1, 5, 16])
def test_without_data_the_loss_is_the_singular_values_left_out(rank):
    weight = torch.randn(16, 24, dtype=torch.float64)
    u, v = factorize_weight(weight, rank=rank)
    values = np.linalg.svd(weight.numpy(), compute_uv=False)
    assert u.shape == (16, rank) and v.shape == (rank, 24)
    lost = float((weight - u @ v).square().sum())
    assert lost == pytest.approx((values[rank:] ** 2).sum(), abs=1e-9)


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_with_data_the_output_loses_the_least_possible(rank):
    """No matrix of this rank is nearer in XWᵀ than its truncated SVD; W's own SVD is farther."""
    weight, x = torch.randn(16, 24, dtype=torch.float64), correlated().double()
    u, v = factorize_weight(weight, rank=rank, gram=x.T @ x, dampening=1e-12)
    values = np.linalg.svd((x @ weight.T).numpy(), compute_uv=False)
    lost = float((x @ (weight - u @ v).T).square().sum())
    assert lost == pytest.approx((values[rank:] ** 2).sum(), rel=1e-6)
    u, v = factorize_weight(weight, rank=rank)
    assert float((x @ (weight - u @ v).T).square().sum()) > 1.2 * lost


def test_energy_is_the_smallest_rank_that_keeps_it():
    weight = torch.randn(16, 24, dtype=torch.float64)
    squares = torch.linalg.svdvals(weight).square()
    for energy in (0.0, 0.3, 0.9, 1.0):
        rank = factorize_weight(weight, energy=energy)[1].shape[0]
        assert float(squares[:rank].sum()) >= (energy - 1e-9) * float(squares.sum())
        assert rank == 1 or float(squares[: rank - 1].sum()) < energy * float(squares.sum())


def test_planted_blocks_and_factors_are_found():
    torch.manual_seed(0)
    u, v = torch.randn(32, 2, dtype=torch.float64), torch.randn(2, 48, dtype=torch.float64)
    planted = torch.zeros(32, 48, dtype=torch.float64)
    for i, j in ((0, 3), (2, 1), (5, 9), (7, 0)):
        planted[4 * i : 4 * i + 4, 4 * j : 4 * j + 4] = 3 * torch.randn(4, 4, dtype=torch.float64)
    weight = u @ v + planted
    a, b, s = factorize_with_blocks(weight, "block:4x4", 4 / 96, 2, rounds=40)
    assert int((s.reshape(8, 4, 12, 4) != 0).any(3).any(1).sum()) == 4
    whole = weight.square().sum()
    assert float((weight - a @ b - s).square().sum() / whole) < 1e-3
    alone = factorize_weight(weight, rank=2)
    assert float((weight - alone[0] @ alone[1]).square().sum() / whole) > 0.05


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("sparse", [None, "block:4x4@0.125", "csr@0.1"])
def test_layers_become_products(sparse):
    model, x = net().eval(), correlated()
    expected = net()(x)
    result = factorize(model, ratio=0.6, data=x.split(50), sparse=sparse, config={"0|2": {}})
    print(result)
    for name, row in zip(("0", "2"), result, strict=True):
        layer, dense = model.get_submodule(name), net().get_submodule(name)
        assert type(layer) is LowRankLinear and not layer.training and row.rank == layer.rank
        stored = 0 if sparse is None else layer.sparse.weight.values.numel()
        assert row.after == row.rank * sum(dense.weight.shape) + stored <= 0.6 * row.before
        assert torch.equal(layer.up.bias, dense.bias)
        assert (layer.sparse is None) == (sparse is None)
    assert result.layers[0].error < 0.2
    y = model(x)
    torch.testing.assert_close(model[0](x), model[0].to_dense()(x), rtol=1e-4, atol=1e-5)
    assert ((y - expected).square().sum() / expected.square().sum()).item() < 0.5
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), y)
    if sparse is not None:
        assert isinstance(model[0].sparse, rarefy.BlockSparseLinear)


def test_data_counts_and_layers_that_gain_nothing_stay():
    model, blind = net(), net()
    x = correlated()
    result = factorize(model, rank=6, data=[x])
    factorize(blind, rank=6)
    assert [row.rank for row in result] == [6, 6, None]
    assert "as many parameters" in result.layers[2].reason and type(model[4]) is nn.Linear
    first = net()[0](x)
    lost, more = (float((m[0](x) - first).square().sum()) for m in (model, blind))
    assert lost < 0.7 * more
    tied = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    tied["b"].weight = tied["a"].weight
    assert "tied" in factorize(tied, rank=1).layers[0].reason and type(tied["a"]) is nn.Linear


CONVOLUTIONS = [
    {},
    {"stride": 2, "padding": (1, 2), "bias": False},
    {"padding": "same", "dilation": (1, 2), "padding_mode": "reflect"},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_convolutions_become_products_that_lose_the_least_possible(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 20, 3, **options), nn.ReLU(), nn.Conv2d(20, 8, 1)).eval()
    dense, x = copy.deepcopy(model), torch.randn(40, 6, 8, 8)
    x = x + 3 * x[:, :1]  # channels that go together
    result = factorize(model, rank=5, data=x.split(10), config={"0": {}})
    (row,), layer = result, model[0]
    assert type(layer) is LowRankConv2d and layer.rank == row.rank == 5 and not layer.training
    assert (row.before, row.after) == (20 * 54, 5 * (20 + 54))
    whole = copy.deepcopy(dense[0])
    with torch.no_grad():
        whole.weight.copy_(layer.matrix().view(whole.weight.shape))
        torch.testing.assert_close(layer(x), whole(x), rtol=1e-4, atol=1e-5)
        y, got = (m(x).movedim(1, -1).flatten(0, -2).double() for m in (dense[0], layer))
        bias = 0 if whole.bias is None else whole.bias
        values = torch.linalg.svdvals(y - bias).square()
        lost = float((y - got).square().sum())
    assert lost == pytest.approx(float(values[5:].sum()), rel=1e-2)
    assert row.error == pytest.approx(lost / float(values.sum()), rel=1e-3)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


def test_convolutions_that_stay_say_why():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 2, 1))
    assert ["groups" in row.reason for row in factorize(model, ratio=0.5, config={"0": {}})] == [True]
    (row,) = factorize(model, ratio=0.5, sparse="csr@0.1", config={"1": {}})
    assert row.rank is None and "linear layers" in row.reason and type(model[1]) is nn.Conv2d
    tied = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    tied[1].weight = tied[0].weight
    assert "tied" in factorize(tied, rank=1).layers[0].reason and type(tied[0]) is nn.Conv2d
    assert "model itself" in factorize(nn.Conv2d(8, 8, 3), rank=1).layers[0].reason
    twice = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(twice, nn.ReLU(), twice)
    assert factorize(model, rank=1).layers[0].rank == 1 and model[0] is model[2] is not twice


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "one of rank, energy and ratio"),
        ({"rank": 2, "ratio": 0.5}, "one of rank, energy and ratio"),
        ({"ratio": 1.5}, r"in \[0, 1\]"),
        ({"energy": 0.9, "sparse": "csr@0.1"}, "rank or ratio"),
        ({"rank": 0}, "at least 1"),
        ({"rank": 2, "config": {"9": {}}}, "matches none"),
        ({"rank": 2, "data": []}, "reach every layer"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_changes(options, text):
    model = net()
    with pytest.raises(ValueError, match=text):
        factorize(model, **options)
    assert all(type(m) in (nn.Linear, nn.ReLU) for m in model)


def test_bad_weights_are_refused():
    with pytest.raises(ValueError, match="one of rank and energy"):
        factorize_weight(torch.randn(4, 4))
    with pytest.raises(ValueError, match="at most 4"):
        factorize_weight(torch.randn(4, 6), rank=5)
    with pytest.raises(ValueError, match=r"gram \(K, K\)"):
        factorize_weight(torch.randn(4, 6), rank=2, gram=torch.eye(4))
    with pytest.raises(ValueError, match="finite"):
        factorize_weight(torch.randn(4, 6), rank=2, gram=torch.full((6, 6), torch.nan))
    with pytest.raises(ValueError, match=r"u must be \(N, r\)"):
        LowRankLinear(torch.ones(4, 2), torch.ones(3, 6))


def test_single_elements_beside_the_product_may_be_a_bitmap():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32))
    other = copy.deepcopy(model)
    factorize(model, rank=4, sparse="bitmap@0.2")
    factorize(other, rank=4, sparse="csr@0.2")
    assert isinstance(model[0].sparse.weight, rarefy.BitmapWeight)
    assert torch.equal(model[0].to_dense().weight, other[0].to_dense().weight)
    for spec in ("2:4", "2:4@nonzero", "block:4x4@0.5:int8"):
        with pytest.raises(ValueError, match=f"sparse must be blocks, csr or bitmap; got {spec}"):
            factorize(other, rank=2, sparse=spec)
