"""The plugin of vLLM against stubs of its interface: registration, the loading of weights, and products."""

from __future__ import annotations

import json
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rarefy
from rarefy.integrations import vllm as plugin

ROOT = Path(__file__).resolve().parents[2]
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class LinearMethodBase:
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    pass


class LinearBase(nn.Module):
    """As vLLM's: asks the config for a method, which creates the weights and multiplies."""

    def __init__(self, k: int, rows: list[int], config: Any, prefix: str, partitions: int = 1) -> None:
        super().__init__()
        self.quant_method = config.get_quant_method(self, prefix)
        if not isinstance(self.quant_method, UnquantizedLinearMethod):
            sizes = [n // partitions for n in rows]
            create = self.quant_method.create_weights
            create(self, k, sizes, k, sum(rows), torch.float32, weight_loader=None)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias)


@pytest.fixture
def registered(monkeypatch):
    known: dict[str, type] = {}
    base = "vllm.model_executor.layers"
    contents = {
        "vllm": {},
        "vllm.model_executor": {},
        base: {},
        f"{base}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{base}.quantization": {
            "register_quantization_config": lambda name: lambda kind: known.setdefault(name, kind)
        },
        f"{base}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    plugin.register.cache_clear()
    plugin.register()
    plugin.register()  # every process of vLLM may call it again
    yield known
    plugin.register.cache_clear()


@pytest.fixture
def folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("rarefy.integrations.transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config).eval()
    patterns = {r".*(self_attn)\..*": "block:4x4@0.5", r".*(gate|up)_proj": "block:4x1@0.5:w8"}
    rarefy.sparsify(model, patterns, measure=False)
    model.save_pretrained(tmp_path)
    return tmp_path, model.model.layers[0]


def _config(known: dict[str, type], path: Path) -> Any:
    config = known["rarefy"].from_config(
        json.loads((path / "config.json").read_text())["quantization_config"]
    )
    config.packed_modules_mapping = PACKED
    return config


def _load(layer: nn.Module, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
    """As the load_weights of vLLM's Llama: names of parts become that of the fused layer."""
    places = {f"{prefix}.{name}": place for name, place in layer.named_parameters()}
    path, _, last = prefix.rpartition(".")
    for name, tensor in tensors.items():
        if not name.startswith(path):
            continue
        for i, part in enumerate(PACKED.get(last, [last])):
            if f".{part}." in name and (place := places.get(name.replace(part, last))) is not None:
                shard = {"qkv_proj": part[0], "gate_up_proj": i}.get(last)
                place.weight_loader(place, tensor, *(() if shard is None else (shard,)))


def test_layers_multiply_as_those_that_were_saved(registered, folder):
    path, block = folder
    config = _config(registered, path)
    assert config.get_name() == "rarefy" and torch.bfloat16 in config.get_supported_act_dtypes()
    tensors = load_file(path / "model.safetensors")
    x = torch.randn(3, 16)
    for prefix, rows, layers in (
        ("model.layers.0.self_attn.qkv_proj", [16, 8, 8], ("q_proj", "k_proj", "v_proj")),
        ("model.layers.0.self_attn.o_proj", [16], ("o_proj",)),
        ("model.layers.0.mlp.gate_up_proj", [32, 32], ("gate_proj", "up_proj")),
    ):
        layer = LinearBase(16, rows, config, prefix)
        _load(layer, prefix, tensors)
        layer.quant_method.process_weights_after_loading(layer)
        holder = block.mlp if "mlp" in prefix else block.self_attn
        wanted = torch.cat([getattr(holder, name)(x) for name in layers], -1)
        assert torch.equal(layer(x), wanted)
        bias = torch.randn(sum(rows))
        torch.testing.assert_close(layer(x, bias), wanted + bias)
        assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_what_is_dense_is_left_to_vllm(registered, folder):
    config = _config(registered, folder[0])
    layer = LinearBase(32, [16], config, "model.layers.0.mlp.down_proj")
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    assert config.get_quant_method(nn.Embedding(2, 2), "model.embed_tokens") is None


def test_what_cannot_be_is_one_sentence(registered, folder):
    path, _ = folder
    prefix = "model.layers.0.self_attn.qkv_proj"
    config = _config(registered, path)
    with pytest.raises(
        NotImplementedError, match=r"^\[vllm\] tensor_parallel_size must be 1.*; got 16x16 of"
    ):
        LinearBase(16, [16, 8, 8], config, prefix, partitions=2)
    with pytest.raises(ValueError, match=r"q_proj\.weight must be of shape \[8, 16\]; got \[16, 16\]"):
        LinearBase(16, [8, 8, 16], config, prefix)
    layer = LinearBase(16, [16, 8, 8], config, prefix)
    with pytest.raises(
        ValueError, match=r"^\[vllm\] model.*q_proj\.weight must have values, .*; got no values"
    ):
        layer.quant_method.process_weights_after_loading(layer)
    del config.modules["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(NotImplementedError, match=f"all parts of {prefix}, .* must be sparse, or none"):
        LinearBase(16, [16, 8, 8], config, prefix)
    for bad in ({"format": "bsr-v2", "modules": {}}, {"format": "bsr-v1"}):
        with pytest.raises(ValueError, match='must be of format "bsr-v1", with modules'):
            registered["rarefy"].from_config(bad)
    with pytest.raises(NotImplementedError, match="must not be tied; got a"):
        registered["rarefy"].from_config({"format": "bsr-v1", "modules": {}, "ties": {"a": "b"}})


def test_the_package_names_the_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    value = text.partition('[project.entry-points."vllm.general_plugins"]')[2].split('"')[1]
    point = metadata.EntryPoint("rarefy", value, "vllm.general_plugins")
    assert point.load() is plugin.register
