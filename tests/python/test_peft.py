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
        _lora(_model(), ("up_proj",), use_bdlora=peft.tuners.lora.config.BdLoraConfig())
    model = nn.ModuleDict({"fc": BlockSparseLinear(8, 8, block_shape=(4, 4), activation="relu")})
    with pytest.raises(ValueError, match=r"\[lora\] a sparse layer .* must have no activation; got 'relu'"):
        _lora(model, ("fc",))


# DoRA ----------------------------------------------------------------------------------------------


def _dora(model: Any, **options: Any) -> Any:
    model = _lora(model, ("up_proj", "down_proj"), use_dora=True, **options)
    _draw(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    return model


@pytest.mark.parametrize(
    "spec", ["block:4x4@0.5", "csr@0.5", "block:5x3@0.7", "block:4x4@0.5:bf16", "block:4x1@0.5:w8"]
)
def test_dora_computes_and_learns_what_pefts_own_does_on_the_dense_twin(spec):
    model = _dora(_model(spec))
    base = copy.deepcopy(model).unload()
    rarefy.desparsify(base)
    twin = _lora(base.float(), ("up_proj", "down_proj"), use_dora=True)
    mine, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    adapters = [name for name in mine if "lora_" in name]
    assert adapters == [name for name in theirs if "lora_" in name] and len(adapters) == 12
    with torch.no_grad():
        for name in adapters:
            theirs[name].copy_(mine[name])
    model(IDS, labels=IDS).loss.backward()
    twin(IDS, labels=IDS).loss.backward()
    limit = 1e-2 if spec.endswith(("w8", "bf16")) else 1e-4
    torch.testing.assert_close(_logits(model), _logits(twin), rtol=limit, atol=limit)
    for name in adapters:
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, rtol=limit, atol=limit)


def test_dora_is_saved_and_loaded_by_peft_and_makes_no_dense_weight(tmp_path):
    base = _model()
    model = _dora(copy.deepcopy(base), lora_dropout=0.1)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.equal(_logits(again.eval()), _logits(model.eval()))
    layer = next(m for m in model.train().modules() if isinstance(m, SparseLinear))
    x = torch.randn(3, layer.in_features)
    with torch.no_grad():
        first, second = layer(x), layer(x)
    assert not torch.equal(first, second)  # dropout
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)
            )
            return out

    big = peft.get_peft_model(
        nn.Sequential(BlockSparseLinear(256, 512, density=0.1, block_shape=(16, 16))),
        peft.LoraConfig(r=4, target_modules=["0"], use_dora=True),
    )
    with Sizes():
        big(torch.randn(2, 256)).sum().backward()
    assert sizes and max(sizes) < 256 * 512 // 2


def test_dora_merges_what_is_stored_alone_and_gives_it_back():
    model = _dora(_model("block:4x4@1"))
    wanted = _logits(model)
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    before = [layer.base_layer.weight.values.clone() for layer in layers]
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(_logits(model), wanted)
    model.unmerge_adapter()
    assert all(torch.equal(m.base_layer.weight.values, v) for m, v in zip(layers, before, strict=True))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up_proj", "down_proj"]))
    with pytest.raises(
        ValueError, match=r"^\[merge\] a DoRA adapter must be merged alone; got 'default', 'other'"
    ):
        model.merge_adapter(["default", "other"])
    model.merge_adapter(["other"])
    with pytest.raises(ValueError, match="a DoRA adapter must be merged alone; got 'other', 'default'"):
        model.merge_adapter(["default"])
    model = _dora(_model("csr@1"))
    wanted = _logits(model)
    torch.testing.assert_close(_logits(model.merge_and_unload()), wanted)
    sparse = _dora(_model())
    with pytest.raises(ValueError, match="an adapter must lie within the pattern"):
        sparse.merge_adapter()


def test_dora_on_rows_that_store_nothing_is_finite_and_learns():
    layer = BlockSparseLinear(16, 8, density=0.5, block_shape=(4, 4))
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[0] = True  # rows 4 to 7 store nothing
    layer = BlockSparseLinear.from_dense(layer.to_dense(), block_shape=(4, 4), mask=mask)
    model = peft.get_peft_model(
        nn.Sequential(layer), peft.LoraConfig(r=2, target_modules=["0"], use_dora=True)
    ).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x, wanted = torch.randn(32, 16), torch.randn(32, 8)
    losses = []
    for _ in range(20):
        loss = (model(x) - wanted)[:, 4:].square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


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
