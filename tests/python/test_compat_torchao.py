"""rarefy.compat.torchao_sparsity: the deleted library's names, its numerics, and the paper's."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import rarefy
from rarefy.compat import torchao_sparsity as ao


def net(sizes=(16, 32, 8)) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))


def is_two_of_four(x: torch.Tensor) -> bool:
    return bool(((x.reshape(-1, 4) != 0).sum(1) <= 2).all())


def test_fake_sparsity_is_two_of_four_by_magnitude():
    model, dense = net(), net()
    assert ao.apply_fake_sparsity(model) is None
    for layer, before in ((model[0], dense[0]), (model[2], dense[2])):
        assert type(layer.weight) is nn.Parameter and float((layer.weight == 0).double().mean()) == 0.5
        assert torch.equal(layer.weight, before.weight * ao.mask_creator(before.weight))
        for group in layer.weight.reshape(-1, 4).tolist():
            assert sum(v == 0 for v in group) == 2
    other = net()
    ao.apply_fake_sparsity(other, lambda module, name: name == "2")
    assert torch.equal(other[0].weight, dense[0].weight) and is_two_of_four(other[2].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_semi_sparse_weights_are_stored_without_their_zeros(dtype):
    model = net().to(dtype)
    with pytest.raises(ValueError, match="0 must be 2:4"):
        ao.sparsify_(model, ao.semi_sparse_weight())
    assert type(model[0]) is nn.Linear
    ao.apply_fake_sparsity(model)
    weights, x = [model[i].weight.detach().clone() for i in (0, 2)], torch.ones(3, 16, dtype=dtype)
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ao.sparsify_(model, ao.SemiSparseWeightConfig()) is model
    for i, weight in zip((0, 2), weights, strict=True):
        assert type(model[i]) is rarefy.BlockSparseLinear and model[i].weight.spec_format() == "2:4"
        assert model[i].weight.dtype == dtype and torch.equal(model[i].weight.to_dense(), weight)
        assert not model[i].weight.requires_grad
    torch.testing.assert_close(model(x), expected)
    some = net()
    ao.apply_fake_sparsity(some)
    ao.sparsify_(some, ao.semi_sparse_weight(), lambda module, name: name == "2")
    assert type(some[0]) is nn.Linear and type(some[2]) is rarefy.BlockSparseLinear


@pytest.mark.parametrize("side", [4, 8])
def test_block_sparse_weights_are_stored_without_their_zeros(side):
    model = net()
    with torch.no_grad():
        model[0].weight[: 2 * side, side:] = 0
    expected = model(torch.ones(3, 16))
    assert ao.sparsify_(model, ao.block_sparse_weight(side), lambda module, name: name == "0") is model
    assert type(model[0]) is rarefy.BlockSparseLinear and type(model[2]) is nn.Linear
    blocks = (32 // side) * (16 // side)
    assert model[0].weight.nnzb == blocks - 2 * (16 // side - 1) and not model[0].weight.requires_grad
    torch.testing.assert_close(model(torch.ones(3, 16)), expected)
    with pytest.raises(TypeError, match="config must be"):
        ao.sparsify_(model, "2:4")


def wanda(weight, x, level=0.5, size=None, **options) -> torch.Tensor:
    """The mask of a layer with this weight after this input."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    model = nn.Sequential(layer)
    sparsifier = ao.WandaSparsifier(level, size, **options)
    sparsifier.prepare(model, None)
    for part in x.split(2):
        model(part)
    sparsifier.step()
    sparsifier.squash_mask()
    assert not layer._forward_pre_hooks and type(model[0].weight) is nn.Parameter
    return model[0].weight != 0


def test_wanda_is_the_papers():
    """Upstream: one threshold for all rows, and sums of squares."""
    rows = torch.tensor([[1.0, 1, 1, 1], [10, 10, 10, 10]])
    same = torch.ones(2, 4)
    assert wanda(rows, same).sum(1).tolist() == [2, 2]
    assert wanda(rows, same, upstream=True).sum(1).tolist() == [0, 4]
    one, x = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    assert wanda(one, x).tolist() == [[True, False]]
    assert wanda(one, x, upstream=True).tolist() == [[False, True]]
    weight, x = torch.randn(6, 20), torch.randn(9, 20)
    scores = weight.abs().double() * x.double().square().sum(0).sqrt()
    kept = wanda(weight, x, 0.7)
    for row, score in zip(kept, scores, strict=True):
        assert int(row.sum()) == 6 and score[row].min() > score[~row].max()
    kept = wanda(weight, x, 0.5, 4).reshape(-1, 4)
    for group, score in zip(kept, scores.reshape(-1, 4), strict=True):
        assert int(group.sum()) == 2 and score[group].min() > score[~group].max()


def test_wanda_without_data_is_refused_and_the_observer_adds_up():
    sparsifier = ao.WandaSparsifier()
    sparsifier.prepare(net(), None)
    with pytest.raises(ValueError, match="data must run"):
        sparsifier.step()
    x = torch.randn(3, 5, 7)
    for upstream in (False, True):
        observer = ao.PerChannelNormObserver(upstream)
        assert torch.equal(observer(x[:1]), x[:1])
        observer(x[1:])
        squares = x.double().reshape(-1, 7).square().sum(0)
        torch.testing.assert_close(observer.norm, squares if upstream else squares.sqrt())


def test_wanda_goes_on_from_a_state_dict():
    data = torch.randn(4, 16)
    whole, half, rest = (ao.WandaSparsifier(0.5) for _ in "123")
    models = [net() for _ in "123"]
    for sparsifier, model in zip((whole, half, rest), models, strict=True):
        sparsifier.prepare(model, None)
    models[0](data)
    models[1](data[:2])
    rest.load_state_dict(half.state_dict())
    models[2](data[2:])
    for sparsifier in (whole, rest):
        sparsifier.step()
        sparsifier.squash_mask()
    assert torch.equal(models[0][0].weight, models[2][0].weight)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 8), (0, 2)])
def test_mask_creator_keeps_n_of_m(n, m):
    x = torch.randn(6, 24)
    mask = ao.mask_creator(x, n, m)
    for values, kept in zip(x.reshape(-1, m), mask.reshape(-1, m), strict=True):
        assert int(kept.sum()) == n
        assert n == 0 or values[kept].abs().min() >= values[~kept].abs().max()
    with pytest.raises(ValueError, match="N must be"):
        ao.mask_creator(x, 5, 4)


def test_supermask_learns_scores_and_becomes_linear():
    torch.manual_seed(0)
    linear = nn.Linear(12, 10)
    layer = ao.SupermaskLinear.from_linear(linear, sparsity_level=0.5, blocksize=4)
    assert layer.scores.shape == (3, 3) and int((layer.get_mask()[::4, ::4] == 0).sum()) == 4
    x = torch.randn(5, 12)
    torch.testing.assert_close(layer(x), functional.linear(x, linear.weight * layer.get_mask(), linear.bias))
    layer(x).square().sum().backward()
    assert bool((layer.scores.grad != 0).all())  # those that are left out, too
    dense = ao.SupermaskLinear.to_linear(layer)
    assert torch.equal(dense(x), layer(x)) and type(dense) is nn.Linear
    fixed = ao.SupermaskLinear(0.25, 4, True, True, 12, 10)
    assert not fixed.scores.requires_grad and not fixed.weight.requires_grad
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        ao.SupermaskLinear(1.5, 4, in_features=8, out_features=8)


def test_tiles_are_two_of_four_both_ways_and_greedy():
    torch.manual_seed(0)
    x = torch.randn(12, 20)
    mask = ao.tile_mask(x)
    assert is_two_of_four(mask) and is_two_of_four(mask.T.contiguous())
    for i, j in itertools.product(range(0, 12, 4), range(0, 20, 4)):
        kept, rows, cols = set(), [0] * 4, [0] * 4
        places = itertools.product(range(4), repeat=2)
        for r, c in sorted(places, key=lambda at: -abs(float(x[i + at[0], j + at[1]]))):
            if rows[r] < 2 and cols[c] < 2:
                kept.add((r, c))
                rows[r] += 1
                cols[c] += 1
        assert set(map(tuple, mask[i : i + 4, j : j + 4].nonzero().tolist())) == kept
    assert ao.tile_mask(torch.randn(5, 7)).shape == (5, 7)


@pytest.mark.parametrize("gradient", ["sparse", "dense", "ste"])
def test_gradients_of_training_functions(gradient):
    x = torch.randn(8, 8, requires_grad=True)
    y = ao.semi_structured_sparsify(x)
    assert torch.equal(y, x * ao.tile_mask(x))
    factors = torch.randn(8, 8)
    (y * factors).sum().backward()
    assert torch.equal(x.grad, factors)
    x.grad = None
    pattern = torch.rand(8, 8) < 0.5
    (ao.semi_structured_sparsify_like(x, pattern, gradient) * factors).sum().backward()
    assert torch.equal(x.grad, factors * pattern if gradient == "sparse" else factors)
    with pytest.raises(ValueError, match="near names: sparse"):
        ao.semi_structured_sparsify_like(x, pattern, "spare")


def test_swaps_keep_parameters_and_train():
    model = net()
    weight = model[0].weight
    ao.swap_linear_with_semi_sparse_linear(
        model, {"0": ao.SemiSparseLinear, "2": ao.SemiSparseActivationLinear}
    )
    assert model[0].weight is weight and type(model[2]) is ao.SemiSparseActivationLinear
    x = torch.randn(8, 16)
    hidden = functional.linear(x, weight * ao.tile_mask(weight), model[0].bias).relu()
    expected = functional.linear(hidden * ao.tile_mask(hidden), model[2].weight, model[2].bias)
    torch.testing.assert_close(model(x), expected)
    model(x).square().sum().backward()
    assert bool((weight.grad != 0).any())
    ao.swap_semi_sparse_linear_with_linear(model)
    assert type(model[0]) is nn.Linear and model[0].weight is weight and type(model[2]) is nn.Linear
    with pytest.raises(ValueError, match="near names"):
        ao.swap_linear_with_semi_sparse_linear(model, {"7": ao.SemiSparseLinear})
