"""save_pretrained and from_pretrained of sparse models, on tiny random models of ten architectures."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

import rarefy
from rarefy import BlockSparseLinear
from transformers_models import (
    ARCHITECTURES,
    DTYPE,
    FEED,
    IDS,
    SIZES,
    VERSION,
    RarefyConfig,
    architecture,
    assert_same,
    integration,
    output_of,
    pixels,
    quiet,  # noqa: F401 (a fixture of every test here)
    sparse_bert,
    transformers,
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_saved_and_loaded_and_sparsified_while_they_load(name, tmp_path):
    kind, config, inputs, layers = architecture(name)
    model = kind(config).eval()
    model.save_pretrained(tmp_path / "dense")
    model = kind.from_pretrained(tmp_path / "dense")
    report = rarefy.sparsify(model, {".*": "block:4x4@0.5"}, measure=False)
    assert sum(row.format is not None for row in report.rows) == layers
    model.save_pretrained(tmp_path / "sparse")
    wanted = output_of(model, inputs)

    loaded = kind.from_pretrained(tmp_path / "sparse")
    assert_same(model, loaded)
    assert torch.equal(output_of(loaded, inputs), wanted)

    config = RarefyConfig({".*": "block:4x4@0.5"})
    made = kind.from_pretrained(tmp_path / "dense", quantization_config=config)
    assert_same(model, made)
    made.save_pretrained(tmp_path / "made")
    assert_same(model, kind.from_pretrained(tmp_path / "made"))

    for dtype in (torch.bfloat16, torch.float16):
        narrow = kind.from_pretrained(tmp_path / "sparse", **{DTYPE: dtype})
        floats = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        torch.testing.assert_close(output_of(narrow, floats).float(), wanted, rtol=0.1, atol=0.1)

    assert len(rarefy.desparsify(loaded)) == layers
    dense = kind.from_pretrained(tmp_path / "dense")
    assert [type(m) for m in loaded.modules()] == [type(m) for m in dense.modules()]
    torch.testing.assert_close(output_of(loaded, inputs), wanted)


def test_one_spec_for_all_layers_and_auto(tmp_path):
    transformers.BertModel(transformers.BertConfig(**SIZES)).eval().save_pretrained(tmp_path)
    for spec in ("csr@0.5", "auto", "auto:bf16x", rarefy.Spec.parse("block:4x4@0.5")):
        model = transformers.BertModel.from_pretrained(tmp_path)
        rarefy.sparsify(model, spec, measure=False)
        config = RarefyConfig(spec)
        assert json.loads(json.dumps(config.to_dict()))["patterns"] == str(spec)
        assert_same(model, transformers.BertModel.from_pretrained(tmp_path, quantization_config=config))


def test_auto_stores_int8_while_a_model_loads_only_if_it_is_asked_for(tmp_path, monkeypatch):
    def predicted(case):
        return 1.0 if case.block is None else 0.1 if case.int8 else 0.5

    monkeypatch.setattr("rarefy.auto.predicted_seconds", predicted)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    for spec, dtype in (("auto:any", torch.float32), ("auto:int8", torch.int8)):
        config = RarefyConfig(spec)
        model = transformers.BertModel.from_pretrained(tmp_path, quantization_config=config)
        layers = [m for m in model.modules() if isinstance(m, rarefy.BlockSparseLinear)]
        assert layers and {layer.weight.dtype for layer in layers} == {dtype}


def test_projections_of_an_attention_are_saved_and_loaded_and_sparsified_while_they_load(tmp_path):
    sizes = {key: SIZES[key] for key in SIZES if key != "vocab_size"}
    config = transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    kind, inputs, patterns = transformers.SiglipVisionModel, {"pixel_values": pixels()}, {".*": "csr@0.5"}
    kind(config).save_pretrained(tmp_path / "dense")
    model = kind.from_pretrained(tmp_path / "dense")
    rarefy.sparsify(model, patterns, measure=False)
    (name,) = (name for name in model.state_dict() if name.endswith("in_proj_weight.values"))
    assert isinstance(model.get_submodule(name.removesuffix(".values")), rarefy.CsrWeight)
    model.save_pretrained(tmp_path / "sparse")
    loaded = kind.from_pretrained(tmp_path / "sparse")
    assert_same(model, loaded)
    assert torch.equal(output_of(loaded, inputs), output_of(model, inputs))
    made = kind.from_pretrained(tmp_path / "dense", quantization_config=RarefyConfig(patterns))
    assert_same(model, made)
    rarefy.desparsify(loaded)
    dense = kind(config)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in dense.modules()]
    narrow = kind.from_pretrained(tmp_path / "sparse", **{DTYPE: torch.bfloat16})
    assert narrow.get_submodule(name.removesuffix(".values")).dtype == torch.bfloat16


@pytest.mark.parametrize("shards", [None, "4KB"])
def test_every_format_is_saved_and_loaded_in_shards_and_by_device_map(shards, tmp_path):
    model = sparse_bert()
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shards is not None)
    for options in ({}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}, {DTYPE: torch.float32}):
        loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, local_files_only=True, **options)
        assert_same(model, loaded)
        assert torch.equal(output_of(loaded, {"input_ids": IDS}), output_of(model, {"input_ids": IDS}))
    # A model that was loaded is as one that was sparsified: no traces, and it saves again.
    assert not hasattr(loaded.config, "quantization_config") and not hasattr(loaded, "hf_quantizer")
    loaded.save_pretrained(tmp_path / "again")
    assert_same(model, transformers.BertForMaskedLM.from_pretrained(tmp_path / "again"))


def test_one_file_is_a_bsr_v1_file_and_config_json_says_the_same(tmp_path):
    model = sparse_bert().bert
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("rarefy", "bsr-v1")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["rarefy"])["modules"] == config["modules"]
    other = transformers.BertModel(model.config, add_pooling_layer=False).eval()
    rarefy.load_file(other, tmp_path / "model.safetensors")
    assert_same(model, other)


def test_files_of_rarefy_and_layers_of_gpt2(tmp_path):
    def build() -> Any:
        kind, config, _, _ = architecture("gpt2")
        return kind(config).eval().transformer

    model, dense = build(), build()
    bias = model.h[0].mlp.c_fc.bias
    rarefy.sparsify(model, {r".*mlp\.c_.*": "csr@0.5"}, measure=False)
    assert model.h[0].mlp.c_fc.bias is bias
    rarefy.save_file(model, tmp_path / "a.safetensors")
    rarefy.load_file(dense, tmp_path / "a.safetensors")
    assert_same(model, dense)
    other = build()
    rarefy.load_state_dict(other, model.state_dict())
    for twin in (dense, copy.deepcopy(other)):
        rarefy.desparsify(twin)
        layer = twin.h[0].mlp.c_fc
        assert type(layer) is transformers.pytorch_utils.Conv1D and (layer.nx, layer.nf) == (16, 64)
        assert torch.equal(layer.weight, model.h[0].mlp.c_fc.weight.to_dense().T)
        assert layer.weight.is_contiguous() and layer.weight.requires_grad


def test_layers_of_gpt2_that_share_a_weight_share_it_when_they_are_dense_again():
    kind, config, inputs, _ = architecture("gpt2")
    model = kind(config).eval()
    rarefy.sparsify(model, {r".*mlp\.c_fc": "block:4x4@0.5"}, measure=False)
    first, second = (block.mlp.c_fc for block in model.transformer.h)
    second.weight = first.weight
    wanted = output_of(model, inputs)
    rarefy.desparsify(model)
    first, second = (block.mlp.c_fc for block in model.transformer.h)
    assert first.weight is second.weight and first is not second
    torch.testing.assert_close(output_of(model, inputs), wanted)


@pytest.mark.parametrize("direction", ["add", "remove"])
def test_the_base_model_is_loaded_with_another_head(direction, tmp_path):
    model = sparse_bert()
    (model if direction == "remove" else model.bert).save_pretrained(tmp_path)
    kind = transformers.BertModel if direction == "remove" else transformers.BertForMaskedLM
    loaded = kind.from_pretrained(tmp_path)
    assert_same(model.bert.encoder, (loaded if direction == "remove" else loaded.bert).encoder)


def test_keys_of_old_checkpoints_are_renamed(tmp_path):
    model = sparse_bert()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): t for k, t in tensors.items()}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(model, transformers.BertForMaskedLM.from_pretrained(tmp_path))


def test_a_sparse_weight_at_two_places_is_stored_once(tmp_path):
    def tie(model: Any) -> Any:
        layers = model.bert.encoder.layer
        layers[1].output.dense.weight = layers[0].output.dense.weight
        return model

    model = tie(sparse_bert({FEED: "block:4x4@0.5"}))
    model.save_pretrained(tmp_path)
    kept = [k for k in load_file(tmp_path / "model.safetensors") if k.endswith("output.dense.weight.values")]
    assert kept == ["bert.encoder.layer.0.output.dense.weight.values"]
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert_same(model, loaded)
    layers = loaded.bert.encoder.layer
    assert layers[1].output.dense.weight is layers[0].output.dense.weight


class _Shared(transformers.PreTrainedModel):
    """One layer under two names."""

    config_class = transformers.BertConfig
    _tied_weights_keys = {"again.weight": "once.weight"} if VERSION >= "5" else ["again.weight"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.once = torch.nn.Linear(16, 16, bias=False)
        self.again, self.head = self.once, torch.nn.Linear(16, 8)
        self.post_init()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.head(self.again(torch.tanh(self.once(x))))}

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            module.weight.data.fill_(7.0)


def test_one_module_under_two_names_is_stored_once(tmp_path):
    model = _Shared(transformers.BertConfig(**SIZES)).eval()
    with torch.no_grad():
        model.once.weight.normal_()
    rarefy.sparsify(model, {"once": "block:4x4@0.5", "head": "csr@0.5"}, measure=False)
    assert model.once is model.again
    model.save_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / "model.safetensors") if key.startswith("again")]
    loaded = _Shared.from_pretrained(tmp_path)
    assert loaded.once is loaded.again
    assert_same(model, loaded)
    x = torch.randn(3, 16)
    assert torch.equal(output_of(loaded, {"x": x}), output_of(model, {"x": x}))


def test_narrow_values_first_do_not_make_the_model_narrow(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    first = BlockSparseLinear.from_dense(torch.nn.Linear(16, 16, bias=False), "block:4x4@0.5:bf16")
    model.model.embed_tokens = torch.nn.Sequential(first)
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_importing_twice_registers_once():
    auto = transformers.quantizers.auto
    assert auto.AUTO_QUANTIZER_MAPPING["rarefy"] is integration.RarefyQuantizer
