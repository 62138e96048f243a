"""Int8 weights in files: round trips, and lies about them."""

import json

import pytest
import torch

import rarefy
from rarefy import Int8Weight
from test_serialization import assert_same_state, command, read  # noqa: F401 (a fixture)
from tiny import FEED, Tiny, ids


def int8_tiny() -> Tiny:
    model = Tiny().eval()
    specs = {FEED: "block:16x1@0.5:int8", "once": "block:4x4@0.5:w8", "head": "block:16x2@0.5:bf16"}
    rarefy.sparsify(model, specs, measure=False)
    return model


def test_file_round_trip_into_dense_sparse_and_meta_models(tmp_path):
    model = int8_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    tensors, metadata = read(tmp_path / "m.safetensors")
    entry = json.loads(metadata["rarefy"])["modules"]["encoder.layer.1.intermediate.dense.weight"]
    assert entry == {
        "format": "int8", "shape": [32, 16], "block_shape": [16, 1], "nnzb": 16,
        "dtype": "i8", "x_dtype": "f32", "activations": "int8",
    }  # fmt: skip
    assert tensors["encoder.layer.1.intermediate.dense.weight.scales"].shape == (32,)
    dense, other = Tiny().eval(), Tiny().eval()
    rarefy.sparsify(other, {FEED: "block:2x8@0.75", "once": "block:16x1@0.5:int8"}, measure=False)
    with torch.device("meta"):
        meta = Tiny().eval()
    for skeleton in (dense, other, meta, int8_tiny()):
        rarefy.load_file(skeleton, tmp_path / "m.safetensors")
        assert_same_state(model, skeleton)
        assert torch.equal(model(ids()), skeleton(ids()))
        assert not skeleton.once.weight.dynamic
    with pytest.raises(TypeError, match="must be bfloat16"):
        rarefy.load_file(Tiny().eval().bfloat16(), tmp_path / "m.safetensors")


def test_state_dicts_bring_their_format():
    model = Tiny().eval()
    rarefy.sparsify(model, {FEED: "block:16x1@0.5:int8"}, measure=False)
    other = Tiny().eval()
    rarefy.sparsify(other, {FEED: "block:16x1@0.5:int8"}, measure=False)
    third = Tiny().eval()
    rarefy.sparsify(third, {FEED: "block:2x8@0.75:bf16"}, measure=False)
    for target in (other, Tiny().eval(), third):
        rarefy.load_state_dict(target, model.state_dict())
        assert_same_state(model, target)
        weight = target.encoder.layer[0].output["dense"].weight
        assert isinstance(weight, Int8Weight) and weight.x_dtype == torch.float32
        assert torch.equal(model(ids()), target(ids()))


LIES = {
    "nnzb_wrong": ({"nnzb": 15}, "15 blocks"),
    "dtype_wrong": ({"dtype": "f32"}, "i8"),
    "x_dtype_f64": ({"x_dtype": "f64"}, "x_dtype must be"),
    "activations_unknown": ({"activations": "int4"}, "activations"),
    "activations_number": ({"activations": 8}, "activations"),
    "format_bsr": ({"format": "bsr"}, "activations"),
    "scales_negative": ({}, r"scales\[3\]=-1"),
    "scales_nan": ({}, r"scales\[3\]=nan"),
    "scales_zero": ({}, r"scales\[3\]=0"),
    "scales_short": ({}, "scales must be of shape"),
    "scales_double": ({}, "scales must be float32"),
    "value_too_low": ({}, r"values\[2, 1, 0\]=-128"),
}


def lie(tensors, name, weight="encoder.layer.1.intermediate.dense.weight"):
    scales = tensors[f"{weight}.scales"]
    if name in ("scales_negative", "scales_nan", "scales_zero"):
        scales[3] = {"scales_negative": -1.0, "scales_nan": torch.nan, "scales_zero": 0.0}[name]
    if name == "scales_short":
        tensors[f"{weight}.scales"] = scales[1:].clone()
    if name == "scales_double":
        tensors[f"{weight}.scales"] = scales.double()
    if name == "value_too_low":
        tensors[f"{weight}.values"][2, 1, 0] = -128


@pytest.mark.parametrize("name", LIES)
def test_lies_in_files_are_named(tmp_path, name, command):  # noqa: F811
    from safetensors.torch import save_file as save_tensors

    change, said = LIES[name]
    model = int8_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    command("verify", tmp_path / "m.safetensors")
    tensors, metadata = read(tmp_path / "m.safetensors")
    root = json.loads(metadata["rarefy"])
    root["modules"]["encoder.layer.1.intermediate.dense.weight"].update(change)
    lie(tensors, name)
    save_tensors(tensors, tmp_path / "m.safetensors", metadata | {"rarefy": json.dumps(root)})
    with pytest.raises((ValueError, TypeError), match=rf"^\[load_file\] (?s:.*)({said})"):
        rarefy.load_file(model, tmp_path / "m.safetensors")
    with pytest.raises(AssertionError):
        command("verify", tmp_path / "m.safetensors")
