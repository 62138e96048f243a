"""Which layers the patcher replaces, which it leaves alone and why, and errors that change nothing."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from rarefy import BlockSparseLinear, BlockSparseModelPatcher, BlockSpec, PseudoBlockSparseLinear
from tiny import FEED, Tiny, assert_unchanged, ids, snapshot


def patch(model, pattern, spec, **options):
    patcher = BlockSparseModelPatcher()
    patcher.add_pattern(pattern, spec)
    return patcher.patch_model(model, **{"measure": False, **options})


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("block:16x16@0.5", BlockSpec((16, 16), 0.5)),
        ("block:4x1@1", BlockSpec((4, 1), 1.0)),
        ("block:1x32@0", BlockSpec((1, 32), 0.0)),
        ("block:3x5@2.5e-1", BlockSpec((3, 5), 0.25)),
    ],
)
def test_specs_are_read_and_written(text, spec):
    assert BlockSpec.parse(text) == spec
    assert BlockSpec.parse(str(spec)) == spec
    assert BlockSpec.parse(spec) is spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "16x16@0.5",
        "block:16@0.5",
        "block:16x16",
        "block:16x16@",
        "block:16x16@half",
        "block:16x16@0.5@0.5",
        "block: 16x16@0.5",
        "block:16x16@0.5 ",
        "block:-4x4@0.5",
        "block:0x4@0.5",
        "block:4x0@0.5",
        "block:4.0x4@0.5",
        "block:4x4@1.5",
        "block:4x4@-0.1",
        "block:4x4@nan",
        "block:4x4@inf",
        "block:٤x٤@0.5",
        "nm:2:4",
    ],
)
def test_wrong_specs_are_named(text):
    with pytest.raises(ValueError, match=r"^\[add_pattern\] .*; got ") as caught:
        BlockSparseModelPatcher().add_pattern("fc", text)
    assert "block" in str(caught.value) or "density" in str(caught.value)


@pytest.mark.parametrize("spec", [None, 0.5, (16, 16), b"block:4x4@0.5"], ids=str)
def test_specs_of_the_wrong_kind_are_named(spec):
    with pytest.raises(TypeError, match=r"^\[add_pattern\] spec"):
        BlockSparseModelPatcher().add_pattern("fc", spec)


def test_wrong_patterns_are_named():
    with pytest.raises(ValueError, match=r"^\[add_pattern\] .*\("):
        BlockSparseModelPatcher().add_pattern("fc(", "block:4x4@0.5")
    with pytest.raises(TypeError, match=r"^\[add_pattern\] "):
        BlockSparseModelPatcher().add_pattern(None, "block:4x4@0.5")
    with pytest.raises(ValueError, match="at least one pattern"):
        BlockSparseModelPatcher().patch_model(Tiny())


def test_patterns_match_whole_names():
    model = Tiny(11)
    report = patch(model, r"encoder\.layer\.1\.output\.dense", "block:4x4@0.5")
    assert [row.name for row in report.replaced] == ["encoder.layer.1.output.dense"]
    assert type(model.encoder.layer[10].output["dense"]) is nn.Linear
    assert type(model.encoder.layer[1].output["dense"]) is BlockSparseLinear


def test_the_first_pattern_that_matches_counts():
    model, patcher = Tiny(), BlockSparseModelPatcher()
    patcher.add_pattern(r"encoder\.layer\.1\..*dense", "block:2x2@0.25")
    patcher.add_pattern(FEED, "block:4x4@0.5")
    patcher.patch_model(model, measure=False)
    assert model.encoder.layer[1].output["dense"].block_shape == (2, 2)
    assert model.encoder.layer[0].output["dense"].block_shape == (4, 4)


def test_patchable_layers():
    found = BlockSparseModelPatcher().get_patchable_layers(Tiny())
    names = [layer.name for layer in found]
    wanted = {"once", "head", "encoder.layer.0.output.dense", "attention.in_proj", "attention.out_proj"}
    assert len(names) == 8 and wanted < set(names)
    assert all(isinstance(layer.module, nn.Linear) for layer in found)


@pytest.mark.parametrize(
    "pattern", ["encoder.layer.0.output", "heads", r"encoder\.layer\.2\..*", "once.weight"]
)
def test_a_pattern_without_a_layer_lists_near_names(pattern):
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"^\[patch_model\] .*near") as caught:
        patch(model, pattern, "block:4x4@0.5")
    near = {"heads": "head", "once.weight": "once"}.get(pattern, "encoder.layer")
    assert re.search(near, str(caught.value).split("near")[1])
    assert_unchanged(model, before)


class Doubling(nn.Module):
    def forward(self, weight):
        return 2 * weight


class MyLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook():
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda _module, _inputs, output: output + 1)
    return layer


def with_own_forward():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    return layer


def parametrized():
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Doubling())
    return layer


def pruned():
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


ODD = {
    "subclass": (lambda: MyLinear(8, 8), "MyLinear"),
    "lazy": (lambda: nn.LazyLinear(8), "[Ll]azy"),
    "parametrized": (parametrized, "parametri"),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "parametri"),
    "torch_pruning": (pruned, "computed|hook"),
    "hook": (with_hook, "hook"),
    "own_forward": (with_own_forward, "forward"),
    "already_sparse": (lambda: BlockSparseLinear(8, 8, block_shape=(4, 4)), "already"),
    "already_pseudo": (lambda: PseudoBlockSparseLinear(8, 8, block_shape=(4, 4)), "already|Pseudo"),
    "embedding": (lambda: nn.Embedding(8, 8), "[Ee]mbedding"),
    "block_too_tall": (lambda: nn.Linear(8, 3), "block"),
    "block_too_wide": (lambda: nn.Linear(3, 8), "block"),
    "meta": (lambda: nn.Linear(8, 8, device="meta"), "meta"),
    "complex": (lambda: nn.Linear(8, 8, dtype=torch.complex64), "complex64"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_layers_that_must_stay_are_named_and_stay(name):
    make, said = ODD[name]
    model = nn.ModuleDict({"odd": make(), "plain": nn.Linear(8, 8)})
    odd = model["odd"]
    report = patch(model, "odd|plain", "block:4x4@0.5")
    assert model["odd"] is odd and type(model["plain"]) is BlockSparseLinear
    assert re.search(said, report["odd"].reason), report["odd"].reason
    assert report["plain"].reason is None
    assert [row.name for row in report.skipped] == ["odd"]


def test_tied_weights_and_embeddings_are_named_and_work_on():
    model = Tiny().eval()
    names, expected = list(model.state_dict()), model(ids())
    report = patch(model, "decoder|embeddings|head", "block:4x4@1")
    assert "embeddings.weight" in report["decoder"].reason
    assert "mbedding" in report["embeddings"].reason
    assert [row.name for row in report.replaced] == ["head"]
    assert model.decoder.weight is model.embeddings.weight
    assert torch.equal(model(ids()), expected)
    assert [name for name in model.state_dict() if not name.startswith("head")] == [
        name for name in names if not name.startswith("head")
    ]


def test_a_weight_that_is_a_view_of_another_is_tied():
    model = nn.ModuleDict({"whole": nn.Linear(8, 16), "part": nn.Linear(8, 8)})
    model["part"].weight = nn.Parameter(model["whole"].weight.detach()[:8])
    report = patch(model, "whole|part", "block:4x4@0.5")
    assert "whole.weight" in report["part"].reason and "part.weight" in report["whole"].reason


def test_a_tied_bias_stays_tied():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].bias = model["a"].bias
    patch(model, "a", "block:4x4@0.5")
    assert type(model["a"]) is BlockSparseLinear and model["a"].bias is model["b"].bias


def test_a_layer_used_twice_becomes_one_sparse_layer():
    model = Tiny()
    report = patch(model, "again", "block:4x4@0.5")
    assert model.once is model.again and type(model.once) is BlockSparseLinear
    assert {report["once"].name, *report["once"].also} == {"once", "again"}
    assert report["again"] is report["once"]
    assert "once.weight.values" in model.state_dict() and "again.weight.values" in model.state_dict()


def test_the_model_itself_cannot_be_replaced():
    layer = nn.Linear(8, 8)
    report = patch(layer, ".*", "block:4x4@0.5")
    assert type(layer) is nn.Linear and "from_dense" in report[""].reason


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder_layers_run_sparse_in_eval(activation):
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, activation=activation, batch_first=True), 2
    ).eval()
    x = torch.randn(2, 5, 16)
    with torch.inference_mode():
        expected = model(x)
        patch(model, r"layers\.\d\.linear[12]", "block:4x4@1")
        assert type(model.layers[1].linear2) is BlockSparseLinear
        torch.testing.assert_close(model(x), expected)


def test_hugging_face_encoder():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertForMaskedLM(config).eval()
    expected = model(input_ids=ids()).logits
    self_attention = r"attention\.(self\.(query|key|value)|output\.dense)"
    pattern = rf"bert\.encoder\.layer\.\d+\.({self_attention}|(intermediate|output)\.dense)"
    report = patch(model, pattern + "|.*decoder|.*word_embeddings", "block:4x4@1")
    assert len(report.replaced) == 12
    assert "tied" in report["cls.predictions.decoder"].reason
    torch.testing.assert_close(model(input_ids=ids()).logits, expected)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# Errors leave the model as it was ---------------------------------------------------------------


def refuse(_name, _layer):
    raise RuntimeError("no")


BAD_CALLS = {
    "scores_of_another_shape": ({"scores": {"head": torch.ones(3, 3)}}, ValueError, "head.*shape"),
    "scores_with_nan": ({"scores": {"head": torch.full((7, 16), torch.nan)}}, ValueError, "head.*NaN"),
    "scores_no_tensor": ({"scores": {"head": [1.0]}}, TypeError, "head|scores"),
    "scores_for_no_layer": ({"scores": {"heads": torch.ones(7, 16)}}, ValueError, r"near.*head"),
    "scores_for_unmatched_layer": ({"scores": {"norm": torch.ones(16)}}, ValueError, "norm"),
    "scores_no_dict": ({"scores": torch.ones(7, 16)}, TypeError, "scores"),
    "tokens_zero": ({"tokens": 0}, ValueError, "tokens"),
    "tokens_no_int": ({"tokens": 1.5}, TypeError, "tokens"),
    "filter_raises": ({"filter_fn": refuse}, RuntimeError, "no"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_named_and_change_nothing(name):
    options, kind, said = BAD_CALLS[name]
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(kind, match=said):
        patch(model, f"{FEED}|head", "block:4x4@0.5", **options)
    assert_unchanged(model, before)


def test_the_model_must_be_a_module():
    for call in (BlockSparseModelPatcher().get_patchable_layers, lambda m: patch(m, "fc", "block:4x4@1")):
        with pytest.raises(TypeError, match="model must be an nn\\.Module"):
            call({})


def test_a_failure_in_the_last_layer_changes_nothing(monkeypatch):
    model, calls = Tiny(), []
    before = snapshot(model)
    from_dense = BlockSparseLinear.from_dense

    def fail_at_the_end(layer, **options):
        calls.append(layer)
        if len(calls) == 4:
            raise MemoryError
        return from_dense(layer, **options)

    monkeypatch.setattr(BlockSparseLinear, "from_dense", fail_at_the_end)
    with pytest.raises(MemoryError):
        patch(model, FEED, "block:4x4@0.5")
    assert_unchanged(model, before)


def test_deepcopy_of_a_patched_model_is_independent():
    model = Tiny()
    patch(model, FEED, "block:4x4@0.5")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.encoder.layer[0].output["dense"].weight.values.zero_()
    assert model.encoder.layer[0].output["dense"].weight.values.abs().sum() > 0
