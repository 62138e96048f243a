"""LoRA on sparse layers by PEFT's own calls: training, files, merging that refuses what would be lost."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BlockSparseLinear

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from rarefy.integrations.peft import SparseLinear, strict_merge  # noqa: E402

IDS = torch.arange(12).reshape(2, 6)


def _model(spec: str = "block:4x4@0.5") -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=40)).eval()
    rarefy.sparsify(model, {r".*mlp\..*": spec}, measure=False)
    return model


def _lora(model: Any, targets: Any = ("up_proj", "down_proj", "q_proj"), **options: Any) -> Any:
    targets = targets if isinstance(targets, str) else list(targets)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **options))


def _draw(model: Any) -> None:
    """B starts as zeros, so that an adapter does nothing yet."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("spec", ["block:4x4@0.5", "csr@0.5", "block:4x4@0.5:bf16", "block:4x1@0.5:w8"])
def test_lora_computes_what_it_does_on_the_dense_twin(spec):
    model = _lora(_model(spec))
    _draw(model)
    twin = copy.deepcopy(model.base_model.model)
    for module in twin.modules():
        if isinstance(module, SparseLinear):
            module.base_layer = module.base_layer.to_dense().to(torch.float32)
    torch.testing.assert_close(_logits(model), _logits(twin), rtol=1e-2, atol=1e-3)
    assert sum(isinstance(m, SparseLinear) for m in model.modules()) == 4


def test_training_moves_the_adapters_alone_and_they_are_saved_and_loaded(tmp_path):
    base = _model()
    model = _lora(copy.deepcopy(base)).train()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert any("values" in name for name in frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(5):
        loss = model(IDS, labels=IDS).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.equal(_logits(again), _logits(model.eval()))
    with model.disable_adapter():
        assert torch.equal(_logits(model), _logits(base))
    # The base is saved by transformers, with the adapter beside it.
    base.save_pretrained(tmp_path / "base")
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(_logits(peft.PeftModel.from_pretrained(other, tmp_path)), _logits(model))


def test_all_linear_includes_sparse_layers():
    model = _lora(_model(), "all-linear")
    wrapped = [m.base_layer for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert sum(isinstance(m, BlockSparseLinear) for m in wrapped) == 6 and len(wrapped) == 14
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    assert sum(len(m.lora_A) for m in model.modules() if isinstance(m, SparseLinear)) == 12


def test_merging_refuses_what_would_be_lost_and_drops_it_when_told():
    model = _lora(_model(), ("up_proj", "down_proj"))
    _draw(model)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"^\[merge\] an adapter must lie within .*; got .*% of the square"):
        model.merge_adapter()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    strict_merge(model, False)
    layer = next(m for m in model.modules() if isinstance(m, SparseLinear))
    weight, pattern = layer.base_layer.weight, layer.base_layer.weight.pattern
    mask, values = weight.to_dense() != 0, weight.values.clone()
    expected = weight.to_dense() + layer.get_delta_weight("default") * mask
    model.merge_adapter(safe_merge=True)
    assert weight.pattern is pattern
    torch.testing.assert_close(weight.to_dense(), expected)
    model.unmerge_adapter()
    torch.testing.assert_close(weight.values, values)
    plain = model.merge_and_unload()
    assert not any(isinstance(m, SparseLinear) for m in plain.modules())
    assert sum(isinstance(m, BlockSparseLinear) for m in plain.modules()) == 6


@pytest.mark.parametrize("spec", ["block:4x4@1", "csr@1"])
def test_merging_is_exact_where_nothing_is_lost(spec):
    model = _lora(_model(spec), ("up_proj", "down_proj"))
    _draw(model)
    wanted = _logits(model)
    torch.testing.assert_close(_logits(model.merge_and_unload()), wanted)


def test_what_cannot_be_merged_or_adapted_says_so():
    model = _lora(_model("block:4x1@0.5:w8"), ("up_proj",))
    _draw(model)
    with pytest.raises(TypeError, match=r"weight of floats on a pattern; got Int8Weight"):
        model.merge_adapter()
    with pytest.raises(ValueError, match="unsupported variant"):
        _lora(_model(), ("up_proj",), use_dora=True)


def test_an_adapter_costs_what_its_products_cost(one_thread):
    base = BlockSparseLinear(1024, 1024, density=0.5, block_shape=(16, 16)).requires_grad_(False)
    config = peft.LoraConfig(r=16, target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(base), config).eval()
    layer = model.base_model.model[0]
    a, b, x = layer.lora_A["default"], layer.lora_B["default"], torch.randn(512, 1024)

    def apart() -> torch.Tensor:
        return base(x) + b(a(x)) * layer.scaling["default"]

    def seconds(run: Any) -> float:
        begin = time.process_time()
        run()
        return time.process_time() - begin

    with torch.no_grad():
        assert torch.equal(layer(x), apart())
        pairs = [(seconds(lambda: layer(x)), seconds(apart)) for _ in range(15)]
    assert min(p[0] for p in pairs) < 1.1 * min(p[1] for p in pairs)
