"""nn.MultiheadAttention with sparse projections against the same module with zeros in its weights."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import rarefy
from rarefy.attention import SparseMultiheadAttention

SPECS = {r".*(in|q|k|v|out)_proj": "block:4x4@0.5"}


def _pair(specs: dict[str, str] | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model around an attention, and its dense twin."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2, **options)}).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases start as zeros
            parameter.normal_(std=0.3)
    rarefy.sparsify(model, SPECS if specs is None else specs, measure=False)
    twin = copy.deepcopy(model)
    rarefy.desparsify(twin)
    assert type(model["attention"]) is SparseMultiheadAttention
    assert type(twin["attention"]) is nn.MultiheadAttention
    assert type(twin["attention"].out_proj) is type(nn.MultiheadAttention(2, 1).out_proj)
    return model, twin


def _masks(heads: int = 2) -> dict[str, Any]:
    lower = torch.ones(5, 5).tril() == 0
    return {
        "none": None,
        "bool": lower,
        "float": torch.zeros(5, 5).masked_fill(lower, -torch.inf),
        "each head": torch.randn(3 * heads, 5, 5),
    }


@pytest.mark.parametrize("mask", _masks())
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_equals_the_dense_twin(mask, extra, batch_first):
    model, twin = _pair(batch_first=batch_first, **extra)
    x = torch.randn((3, 5, 16) if batch_first else (5, 3, 16))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    for weights, average, padded in itertools.product((True, False), repeat=3):
        options = {
            "need_weights": weights,
            "average_attn_weights": average,
            "key_padding_mask": padding if padded else None,
            "attn_mask": _masks()[mask],
        }
        if padded and mask == "each head":
            options["key_padding_mask"] = torch.zeros(3, 5).masked_fill(padding, -torch.inf)
        if padded and mask == "float":
            options["key_padding_mask"] = torch.zeros(3, 5).masked_fill(padding, -torch.inf)
        got, want = (m["attention"](x, x, x, **options) for m in (model, twin))
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
        assert (got[1] is None) == (want[1] is None) == (not weights)
        if weights:
            torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 12, "vdim": 20}])
@pytest.mark.parametrize("specs", [SPECS, {r".*out_proj": "csr@0.5"}, {r".*(in|q|v)_proj": "block:4x1@0.5"}])
def test_attention_to_another_sequence_and_gradients(sizes, specs):
    if sizes and specs is SPECS:
        specs = {r".*_proj": "block:4x4@0.5"}
    model, twin = _pair(specs, batch_first=True, **sizes)
    query = torch.randn(3, 5, 16)
    key, value = torch.randn(3, 7, sizes.get("kdim", 16)), torch.randn(3, 7, sizes.get("vdim", 16))
    inputs = [query, key, value] if sizes else [query, key, key]
    for arguments in (inputs, [query, key, value], [t[0] for t in inputs]):
        results = []
        for module in (model, twin):
            leaves = {id(t): t.clone().requires_grad_() for t in arguments}
            out, _ = module["attention"](*(leaves[id(t)] for t in arguments))
            out.square().sum().backward()
            grads = [leaf.grad for leaf in leaves.values()]
            results.append([out, *grads, module["attention"].out_proj.bias.grad])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        model.zero_grad(), twin.zero_grad()


def test_is_causal_is_a_hint_that_wants_its_mask():
    model, twin = _pair(batch_first=True)
    x, lower = torch.randn(3, 5, 16), torch.ones(5, 5).tril() == 0
    options = {"attn_mask": lower, "is_causal": True, "need_weights": False}
    got, want = (m["attention"](x, x, x, **options)[0] for m in (model, twin))
    torch.testing.assert_close(got, want)
    with pytest.raises(RuntimeError, match="attn_mask must come with is_causal"):
        model["attention"](x, x, x, is_causal=True)


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("training", [True, False])
def test_in_an_encoder_and_a_decoder(training):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    report = rarefy.sparsify(model, {r".*(_proj|linear\d)": "block:4x4@0.5"}, measure=False)
    assert sum(row.format is not None for row in report.rows) == 2 * 4 + 6
    twin = copy.deepcopy(model)
    assert len(rarefy.desparsify(twin)) == 14
    x, padding = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [3], [4]])
    results = []
    for m in (model, twin):
        with torch.set_grad_enabled(training):
            memory = m["encoder"](x, src_key_padding_mask=padding)
            memory = torch.where(padding[..., None], 0, memory)
            results.append(m["decoder"](x, memory, memory_key_padding_mask=padding))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_names_files_copies_and_the_way_back(tmp_path):
    model, twin = _pair()
    keys = set(model.state_dict())
    assert {"attention.in_proj_weight.values", "attention.in_proj_bias", "attention.out_proj.bias"} <= keys
    rarefy.save_file(model, tmp_path / "a.safetensors")
    for build in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        assert build(model).state_dict().keys() == keys
    x = torch.randn(5, 3, 16)
    want = model["attention"](x, x, x)[0]
    for skeleton in (nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2)}).eval(), copy.deepcopy(model)):
        other = copy.deepcopy(skeleton)
        rarefy.load_file(skeleton, tmp_path / "a.safetensors")
        rarefy.load_state_dict(other, model.state_dict())
        for loaded in (skeleton, other):
            assert torch.equal(loaded["attention"](x, x, x)[0], want)
    bias = model["attention"].in_proj_bias
    rarefy.desparsify(model)
    assert model["attention"].in_proj_bias is bias
    assert model.state_dict().keys() == twin.state_dict().keys()
    for key, tensor in twin.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)


def test_one_projection_sparser_again_and_in_another_format():
    model, _ = _pair({"attention.in_proj": "block:4x4@0.5"})
    attention = model["attention"]
    parameter = attention.in_proj_weight.values
    hook = attention.register_forward_hook(lambda *_: None)
    rarefy.sparsify(model, {"attention.in_proj": "block:4x4@0.25"}, measure=False)
    assert attention.in_proj_weight.values is parameter and attention.in_proj_weight.density == 0.25
    rarefy.sparsify(model, {"attention.in_proj": "csr@0.1"}, measure=False)
    assert attention.in_proj_weight.spec_format() == "csr"
    assert rarefy.desparsify(model) == ["attention.in_proj"] and len(attention._forward_hooks) == 1
    hook.remove()


def test_what_stays():
    class Own(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({"own": Own(16, 2), "tied": nn.MultiheadAttention(16, 2)})
    model["tied"].in_proj_weight = model["own"].in_proj_weight
    report = rarefy.sparsify(model, {".*": "block:4x4@0.5"}, measure=False)
    reasons = {row.name: row.reason for row in report.rows}
    assert "multiplies by its parameters itself" in reasons["own"]
    assert "reads this weight directly" in reasons["own.out_proj"]
    assert reasons["tied.in_proj"] == "its weight is tied to own.in_proj_weight"
    assert reasons["tied.out_proj"] is None
