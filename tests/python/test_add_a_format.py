"""The format of docs/add_a_format.md: after one registration, everything that takes a format takes it."""

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rarefy
from examples.add_a_format.columns import ColumnsSpec, ColumnsWeight
from rarefy import BlockSparseLinear, Spec, register_format
from test_serialization import assert_same_state, read
from tiny import FEED, Tiny, assert_unchanged, ids, snapshot

ROOT = Path(__file__).parents[2]


def columns_tiny(spec="columns@0.25") -> Tiny:
    model = Tiny().eval()
    rarefy.sparsify(model, {FEED: spec, "once": "block:4x4@0.5", "head": "csr@0.5"}, measure=False)
    return model


def test_specs():
    assert Spec.parse("columns@0.25") == ColumnsSpec(0.25) == Spec.parse({"column_density": 0.25})
    assert str(Spec.parse("columns@0.25:bf16")) == "columns@0.25:bf16"
    with pytest.raises(ValueError, match=r'"block:.*or "columns@0\.25" or "csr@0\.1".*; got \'columns\''):
        Spec.parse("columns")
    with pytest.raises(ValueError, match=r"^\[register_format\] the format's name must be new"):
        register_format(type("Other", (ColumnsWeight,), {}), ColumnsSpec)


def test_sparsify_report_training_and_back():
    model, dense = Tiny().eval(), Tiny().eval()
    dense.load_state_dict(model.state_dict())
    report = rarefy.sparsify(model, {FEED: "columns@0.25"}, tokens=4)
    row = report["encoder.layer.0.intermediate.dense"]
    assert (row.format, row.density, row.sparse_bytes) == ("columns", 0.25, 32 * 4 * 4 + 4 * 8)
    layer = model.encoder.layer[0].intermediate["dense"]
    assert isinstance(layer.weight, ColumnsWeight) and "format=columns" in repr(layer)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, BlockSparseLinear):
                dense.get_submodule(name).weight.copy_(module.weight.to_dense())
    torch.testing.assert_close(model(ids()), dense(ids()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids()).square().mean().backward()
    optimizer.step()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(twin(ids()), model(ids()))
    rarefy.sparsify(twin, {FEED: "csr@0.1"}, measure=False)
    rarefy.desparsify(model)
    assert type(model.encoder.layer[0].intermediate["dense"]) is nn.Linear


def test_a_layer_with_an_activation():
    layer, x = (
        BlockSparseLinear.from_dense(nn.Linear(16, 8), "columns@0.25", activation="gelu"),
        torch.randn(3, 16),
    )
    torch.testing.assert_close(layer(x), nn.functional.gelu(layer.to_linear()(x)))


@pytest.mark.parametrize("spec", ["columns@0.25", "columns@0.25:bf16"])
def test_files_and_state_dicts(spec, tmp_path):
    model = columns_tiny(spec)
    rarefy.save_file(model, tmp_path / "m.safetensors")
    _, metadata = read(tmp_path / "m.safetensors")
    entry = json.loads(metadata["rarefy"])["modules"]["encoder.layer.1.intermediate.dense.weight"]
    assert entry["format"] == "columns" and entry["shape"] == [32, 16]
    other = Tiny().eval()
    rarefy.sparsify(other, {FEED: "columns@0.5"}, measure=False)
    for skeleton in (Tiny().eval(), columns_tiny(spec), other):
        rarefy.load_file(skeleton, tmp_path / "m.safetensors")
        assert_same_state(model, skeleton)
        assert torch.equal(skeleton(ids()), model(ids()))
    if ":" not in spec:
        rarefy.load_state_dict(fresh := Tiny().eval(), model.state_dict())
        assert torch.equal(fresh(ids()), model(ids()))
        model.load_state_dict(copy.deepcopy(model).state_dict())


def test_wrong_tensors_are_named_and_change_nothing(tmp_path):
    from safetensors.torch import save_file as save_tensors

    model = columns_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    tensors, metadata = read(tmp_path / "m.safetensors")
    key = "encoder.layer.0.output.dense.weight.column_indices"
    before = snapshot(model)
    for wrong in (tensors[key].flip(0), tensors[key][:-1].clone(), tensors[key] + 100):
        save_tensors(tensors | {key: wrong}, tmp_path / "w.safetensors", metadata)
        with pytest.raises(ValueError, match=r"^\[load_file\] .*output\.dense\.weight: .*; got "):
            rarefy.load_file(model, tmp_path / "w.safetensors")
        with pytest.raises(ValueError, match=r"^\[BlockSparseLinear.load_state_dict\] .*column_indices must"):
            model.load_state_dict(model.state_dict() | {key: wrong})
        assert_unchanged(model, before)


def test_the_page_shows_the_code():
    """Every line of Python on the page is a line of the example."""
    source = (ROOT / "examples/add_a_format/columns.py").read_text()
    page = (ROOT / "docs/add_a_format.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known = {line.strip() for line in source.splitlines()}
    lines = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert len(lines) > 20
    assert [line for line in lines if line not in known and line != "..."] == []
