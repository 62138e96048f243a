"""sparsify and desparsify on whole models: exact weights, kept attributes, training, and the way back."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BlockSparseLinear, BsrWeight
from rarefy.masks import block_norms, expand_mask, top_blocks
from tiny import FEED, Tiny, assert_unchanged, ids, snapshot


def sparsify(model, patterns, **options):
    return rarefy.sparsify(model, patterns, **{"measure": False, **options})


def masked(model: nn.Module, pattern: str, block_shape, density) -> nn.Module:
    """The dense oracle: the same model with the blocks of smallest norm set to zero."""
    twin = copy.deepcopy(model)
    for name, layer in twin.named_modules():
        if isinstance(layer, nn.Linear) and re.fullmatch(pattern, name):
            weight = layer.weight.data
            kept = top_blocks(block_norms(weight, block_shape), density)
            weight *= expand_mask(kept, tuple(weight.shape), block_shape)
    return twin


@pytest.mark.parametrize("block_shape", [(4, 4), (4, 1), (1, 1), (3, 5), (16, 16)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_weights_equal_the_masked_dense_model(block_shape, density):
    model = Tiny().double().eval()
    oracle = masked(model, FEED, block_shape, density)
    r, c = block_shape
    report = sparsify(model, {FEED: f"block:{r}x{c}@{density}"})
    assert len(report.replaced) == 4
    for name, layer in model.named_modules():
        if isinstance(layer, BlockSparseLinear):
            assert torch.equal(layer.weight.to_dense(), oracle.get_submodule(name).weight), name
            assert torch.equal(layer.bias, oracle.get_submodule(name).bias), name
    torch.testing.assert_close(model(ids()), oracle(ids()), rtol=0, atol=1e-12)


def test_round_trip_at_density_one_is_bit_exact():
    model = Tiny()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sparsify(model, {f"{FEED}|once|head": "block:3x5@1"})
    names = rarefy.desparsify(model)
    assert len(names) == 6 and "once" in names
    assert not any(isinstance(m, BlockSparseLinear) for m in model.modules())
    assert model.once is model.again
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert rarefy.desparsify(model) == []


def test_special_values_survive_bit_for_bit():
    model = nn.Sequential(nn.Linear(8, 8))
    weight = model[0].weight.data
    weight[0, :4] = torch.tensor([-0.0, float("inf"), float("-inf"), 1e-45])
    weight[1, 1] = float("nan")
    before = weight.clone().view(torch.int32)
    sparsify(model, {"0": "block:2x2@1"})
    rarefy.desparsify(model)
    assert torch.equal(model[0].weight.data.view(torch.int32), before)


def test_attributes_carry_over_both_ways():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, bias=False)).eval()
    model[0].weight.requires_grad_(False)
    model[1].train()
    bias = model[0].bias
    for step in (lambda: sparsify(model, {r"\d": "block:4x4@0.5"}), lambda: rarefy.desparsify(model)):
        step()
        first, second = ([p.requires_grad for p in layer.weight.parameters()]
                         if isinstance(layer.weight, BsrWeight) else [layer.weight.requires_grad]
                         for layer in model)  # fmt: skip
        assert (first, second) == ([False], [True])
        assert model[0].bias is bias and model[1].bias is None
        assert not model[0].training and model[1].training
        assert model[0].weight.dtype == torch.bfloat16 and model[1].weight.dtype == torch.float32


def test_scores_choose_the_blocks_by_any_name_of_the_layer():
    model = Tiny()
    dense = model.once.weight.detach().clone()
    scores = torch.zeros(4, 4)
    scores[1, 2] = scores[3, 0] = 1
    sparsify(model, {"once": "block:4x4@0.125"}, scores={"again": scores})
    assert torch.equal(model.once.weight.block_mask(), scores.bool())
    expected = dense * expand_mask(scores.bool(), (16, 16), (4, 4))
    assert torch.equal(model.once.weight.to_dense(), expected)


def test_filter_sees_what_would_change_and_decides():
    seen, model = [], Tiny()

    def keep_outputs(name, layer):
        seen.append((name, type(layer)))
        return "output" in name

    report = sparsify(model, {f"{FEED}|decoder": "block:4x4@0.5"}, filter_fn=keep_outputs)
    assert len(seen) == 4 and {kind for _, kind in seen} == {nn.Linear}
    assert len(report.replaced) == 2
    assert "filter_fn" in report["encoder.layer.0.intermediate.dense"].reason


def test_dry_run_reports_the_same_and_changes_nothing():
    model = Tiny()
    before = snapshot(model)
    planned = sparsify(model, {f"{FEED}|decoder": "block:4x4@0.5"}, dry_run=True)
    assert_unchanged(model, before)
    done = sparsify(model, {f"{FEED}|decoder": "block:4x4@0.5"})
    assert planned.dry_run and not done.dry_run
    assert planned.to_dict()["layers"] == done.to_dict()["layers"]


def test_measuring_leaves_the_random_state_and_gradients_alone():
    model = nn.Sequential(nn.Linear(8, 8))
    state = torch.get_rng_state()
    rarefy.sparsify(model, {"0": "block:4x4@0.5"}, measure=True, tokens=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].weight.values.grad is None and model[0].weight.values.requires_grad


def test_a_sparsified_model_trains_and_stays_sparse():
    model = Tiny()
    sparsify(model, {FEED: "block:4x3@0.5"})
    weight = model.encoder.layer[0].output["dense"].weight
    mask, start = weight.block_mask(), weight.values.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    target = ids().flatten()
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(ids()).flatten(0, 1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not torch.equal(weight.values, start)
    assert torch.equal(weight.block_mask(), mask)
    BsrWeight(weight.values, weight.crow_indices, weight.col_indices, shape=weight.shape, block_shape=(4, 3))


def test_pickled_and_loaded_state_dict():
    model = Tiny()
    sparsify(model, {FEED: "block:4x4@0.5"})
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(ids()), model(ids()))
    other = Tiny()
    with pytest.raises((RuntimeError, ValueError)):
        other.load_state_dict(model.state_dict())
    rarefy.load_state_dict(other, model.state_dict())
    assert torch.equal(other(ids()), model(ids()))


def test_desparsify_keeps_shared_weights_shared():
    weight = BsrWeight.from_dense(torch.randn(8, 8), block_shape=(4, 4), density=0.5)
    model = nn.Sequential(*(BlockSparseLinear.from_weight(weight, torch.zeros(8)) for _ in range(2)))
    expected = weight.to_dense()
    assert rarefy.desparsify(model) == ["0", "1"]
    assert model[0].weight is model[1].weight and torch.equal(model[0].weight, expected)


def test_desparsify_refuses_what_it_would_break():
    with pytest.raises(TypeError, match=r"^\[desparsify\]"):
        rarefy.desparsify({})
    with pytest.raises((TypeError, ValueError), match=r"^\[desparsify\].*to_dense"):
        rarefy.desparsify(BlockSparseLinear(8, 8, block_shape=(4, 4)))
    model = nn.Sequential(*(BlockSparseLinear(8, 8, block_shape=(4, 4)) for _ in range(2)))
    model[1].register_forward_hook(lambda _module, _inputs, output: output + 1)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"^\[desparsify\].*hook"):
        rarefy.desparsify(model)
    assert_unchanged(model, before)


def test_wrong_kinds_of_arguments_are_named():
    for model, patterns in (({}, {"fc": "block:4x4@1"}), (Tiny(), ["fc"]), (Tiny(), 7)):
        with pytest.raises(TypeError, match=r"^\[sparsify\] (model|patterns)"):
            rarefy.sparsify(model, patterns)
    with pytest.raises(ValueError, match="at least one pattern"):
        rarefy.sparsify(Tiny(), {})
    with pytest.raises(ValueError, match=r"spec must look like .*; got 'fc'"):
        rarefy.sparsify(Tiny(), "fc")


def test_nonzero_keeps_each_block_that_is_not_all_zeros():
    model = nn.Sequential(nn.Linear(10, 12), nn.Linear(12, 4))
    with torch.no_grad():
        model[0].weight[:4, :4] = 0
        model[0].weight[8:, 8:] = -0.0
        model[0].weight[5, 5] = torch.nan
        model[1].weight.zero_()
    dense = model[0].weight.detach().clone()
    rarefy.sparsify(model, "block:4x4@nonzero", measure=False)
    assert model[0].weight.nnzb == 7 and model[1].weight.nnzb == 0
    assert torch.equal(model[0].weight.to_dense().nan_to_num(7), dense.nan_to_num(7))
    for spec in ("csr@nonzero", {"block_shape": (1, 1), "density": "nonzero"}, "block:1x1@nonzero:bf16"):
        weight = BlockSparseLinear.from_dense(model[0].to_dense(), spec).weight
        assert weight.nnzb == int((dense != 0).sum())
    assert str(rarefy.Spec.parse("block:4x1@nonzero:int8")) == "block:4x1@nonzero:int8"
    with pytest.raises(ValueError, match="scores rank what a number of blocks keeps"):
        BlockSparseLinear.from_dense(nn.Linear(4, 4), "csr@nonzero", scores=torch.ones(4, 4))


def test_a_spec_alone_is_for_all_layers_and_auto_is_one():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Embedding(4, 4))
    (row, stays) = rarefy.sparsify(model, "auto", measure=False).rows
    assert (row.format is not None) == isinstance(model[0], BlockSparseLinear) and row.predicted is not None
    assert stays.reason.startswith("an embedding")
    rarefy.sparsify(model, rarefy.Spec.parse("block:4x4@0.125"), measure=False)
    assert model[0].block_shape == (4, 4)


def test_a_pattern_of_layers_that_must_stay_warns():
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(4, 4))
    with pytest.warns(UserWarning, match=r"^\[patch_model\] pattern '1' matches only .* 1: an embedding"):
        rarefy.sparsify(model, {"1": "csr@0.5", "0": "csr@0.5"}, measure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rarefy.sparsify(model, {".*": "csr@0.5"}, measure=False)


def test_narrow_values_become_dense_in_the_dtype_that_the_layer_multiplies_in():
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(8, 12))
    rarefy.sparsify(model, {"0": "block:4x1@0.5:bf16", "2": "csr@0.5:f16"}, measure=False)
    x = torch.randn(2, 4, 1, 1)
    wanted = model(x)
    rarefy.desparsify(model)
    assert model[0].weight.dtype == model[2].weight.dtype == torch.float32
    torch.testing.assert_close(model(x), wanted)
