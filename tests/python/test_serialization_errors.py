"""Files that lie, are cut off or do not fit: each is named, and nothing has changed."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file as save_tensors
from torch import nn

import rarefy
from small_files import saved, skeleton_of_small, small
from tiny import Tiny, assert_unchanged, snapshot


def tensor(key, change):
    """A lie: change(old tensor) in place of a tensor, or no tensor where it returns None."""

    def lie(tensors, _metadata):
        changed = change(tensors[key])
        if changed is None:
            del tensors[key]
        else:
            tensors[key] = changed

    return lie


def indices(name, position, value, dtype=torch.int32):
    def change(old):
        new = old.to(dtype)
        new[position] = value
        return new

    return tensor(f"fc.weight.{name}", change)


def entry(**changes):
    """A lie in the metadata of fc.weight; None takes a key away."""

    def lie(_tensors, metadata):
        root = json.loads(metadata["rarefy"])
        for key, value in changes.items():
            root["modules"]["fc.weight"][key] = value
            if value is None:
                del root["modules"]["fc.weight"][key]
        metadata["rarefy"] = json.dumps(root)

    return lie


def root(change):
    def lie(_tensors, metadata):
        parsed = json.loads(metadata["rarefy"])
        change(parsed)
        metadata["rarefy"] = json.dumps(parsed)

    return lie


def text(value):
    def lie(_tensors, metadata):
        metadata["rarefy"] = value

    return lie


def add(key, value):
    def lie(tensors, _metadata):
        tensors[key] = value

    return lie


def dirty(position):
    def change(values):
        values[position] = 0.5
        return values

    return tensor("fc.weight.values", change)


LIES = {
    "crow_first_not_zero": (indices("crow_indices", 0, 1), "crow_indices"),
    "crow_last_not_nnzb": (indices("crow_indices", -1, 4), "crow_indices"),
    "crow_falls": (indices("crow_indices", 1, 5), "crow_indices"),
    "crow_negative": (indices("crow_indices", 1, -1), "crow_indices"),
    "crow_too_long": (tensor("fc.weight.crow_indices", lambda t: torch.cat([t, t[-1:]])), "crow_indices"),
    "crow_beyond_int32": (
        indices("crow_indices", 1, 2**32 + 2, torch.int64),
        r"crow_indices\[1\]=4294967298",
    ),
    "crow_of_floats": (tensor("fc.weight.crow_indices", lambda t: t.float()), "crow_indices"),
    "crow_missing": (tensor("fc.weight.crow_indices", lambda t: None), "crow_indices"),
    "col_out_of_range": (indices("col_indices", 4, 4), "col_indices"),
    "col_negative": (indices("col_indices", 0, -1), "col_indices"),
    "col_twice": (indices("col_indices", 1, 0), "col_indices"),
    "col_unsorted": (indices("col_indices", 2, 2), "col_indices"),
    "col_beyond_int32": (indices("col_indices", 0, 2**32, torch.int64), r"col_indices\[0\]=4294967296"),
    "col_too_short": (tensor("fc.weight.col_indices", lambda t: t[:-1].clone()), "indices"),
    "col_in_two_dimensions": (tensor("fc.weight.col_indices", lambda t: t[None].clone()), "col_indices"),
    "values_too_few": (tensor("fc.weight.values", lambda t: t[:-1].clone()), "values"),
    "values_flat": (tensor("fc.weight.values", lambda t: t.flatten()), "values"),
    "values_of_another_dtype": (tensor("fc.weight.values", lambda t: t.double()), "f64|float64"),
    "values_of_ints": (tensor("fc.weight.values", lambda t: t.to(torch.int32)), "values"),
    "values_missing": (tensor("fc.weight.values", lambda t: None), "values"),
    "padding_of_rows_not_zero": (dirty((2, 1, 0)), r"values\[2, 1, 0\]"),
    "padding_of_columns_not_zero": (dirty((4, 0, 2)), r"values\[4, 0, 2\]"),
    "bias_of_another_shape": (tensor("fc.bias", lambda t: t[:-1].clone()), r"fc\.bias"),
    "bias_of_another_dtype": (tensor("fc.bias", lambda t: t.half()), r"fc\.bias"),
    "bias_missing": (tensor("fc.bias", lambda t: None), r"fc\.bias"),
    "unknown_tensor": (add("fc.scale", torch.ones(9)), r"fc\.scale"),
    "pattern_of_no_layer": (
        add("norm.weight.crow_indices", torch.zeros(2).int()),
        r"norm\.weight\.crow_indices",
    ),
    "dense_twin": (add("fc.weight", torch.zeros(9, 11)), r"fc\.weight"),
    "shape_of_another_model": (entry(shape=[9, 12]), "shape"),
    "shape_turned": (entry(shape=[11, 9]), "shape"),
    "shape_huge": (entry(shape=[2**62, 2**62]), "shape"),
    "shape_negative": (entry(shape=[-9, 11]), "shape"),
    "shape_of_floats": (entry(shape=[9.0, 11.0]), "shape"),
    "shape_with_true": (entry(shape=[True, 11]), "shape"),
    "shape_of_three": (entry(shape=[9, 11, 1]), "shape"),
    "shape_missing": (entry(shape=None), "shape"),
    "block_of_another_shape": (entry(block_shape=[3, 4]), "indices"),
    "block_zero": (entry(block_shape=[0, 3]), "block_shape"),
    "block_as_text": (entry(block_shape="4x3"), "block_shape"),
    "nnzb_wrong": (entry(nnzb=6), "nnzb|blocks"),
    "nnzb_as_text": (entry(nnzb="5"), "nnzb"),
    "nnzb_true": (entry(nnzb=True), "nnzb"),
    "dtype_wrong": (entry(dtype="f16"), "f16"),
    "dtype_unknown": (entry(dtype="f8"), "f8"),
    "dtype_a_list": (entry(dtype=["f32"]), "dtype|f32"),
    "entry_with_more_keys": (entry(scales=[1]), "scales|keys"),
    "entry_missing": (root(lambda r: r["modules"].pop("fc.weight")), r"fc\.weight"),
    "entry_a_list": (root(lambda r: r["modules"].update({"fc.weight": []})), r"fc\.weight"),
    "entry_of_no_layer": (
        root(lambda r: r["modules"].update({"norm.weight": r["modules"].pop("fc.weight")})),
        r"norm\.weight",
    ),
    "modules_a_list": (root(lambda r: r.update(modules=[])), "modules"),
    "format_of_the_future": (root(lambda r: r.update(format="bsr-v2")), "bsr-v2"),
    "metadata_no_json": (text("{"), "JSON"),
    "metadata_deep": (text("[" * 100000), "JSON"),
    "metadata_a_number": (text("7"), "rarefy"),
    "not_a_rarefy_file": (lambda _tensors, metadata: metadata.pop("rarefy"), "rarefy"),
}


@pytest.mark.parametrize("target", ["dense", "sparse"])
@pytest.mark.parametrize("name", LIES)
def test_lies_are_named_and_change_nothing(tmp_path, name, target):
    lie, said = LIES[name]
    tensors, metadata = saved(small(), tmp_path)
    lie(tensors, metadata)
    save_tensors(tensors, tmp_path / "m.safetensors", metadata)
    model = skeleton_of_small() if target == "dense" else small()
    before = snapshot(model)
    with pytest.raises((ValueError, TypeError), match=rf"^\[load_file\] (?s:.*)({said})"):
        rarefy.load_file(model, tmp_path / "m.safetensors")
    assert_unchanged(model, before)


def test_every_truncation_is_refused(tmp_path):
    saved(small(), tmp_path)
    whole = (tmp_path / "m.safetensors").read_bytes()
    model = skeleton_of_small()
    before = snapshot(model)
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"^\[load_file\]"):
            rarefy.load_file(model, tmp_path / "cut.safetensors")
    assert_unchanged(model, before)


def test_skeletons_that_do_not_fit_are_named(tmp_path):
    rarefy.save_file(small(), tmp_path / "m.safetensors")
    tied, larger, half, other = (skeleton_of_small() for _ in range(4))
    tied.twin = nn.Linear(11, 9)
    tied.twin.weight = tied.fc.weight
    larger.fc = nn.Linear(12, 9)
    half.half()
    other.fc = nn.Embedding(9, 11)
    for model, said in ((tied, "tied|twin"), (larger, "shape"), (half, "float16"), (other, r"fc\.weight")):
        before = snapshot(model)
        with pytest.raises((ValueError, TypeError), match=rf"^\[load_file\] .*({said})"):
            rarefy.load_file(model, tmp_path / "m.safetensors")
        assert_unchanged(model, before)


def test_tied_tensors_must_agree(tmp_path):
    untied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied = copy.deepcopy(untied)
    tied[1].weight = tied[0].weight
    rarefy.save_file(untied, tmp_path / "m.safetensors")
    before = snapshot(tied)
    with pytest.raises(ValueError, match=r"^\[load_file\] .*[01]\.weight"):
        rarefy.load_file(tied, tmp_path / "m.safetensors")
    assert_unchanged(tied, before)


def test_missing_file_and_wrong_objects(tmp_path):
    with pytest.raises(FileNotFoundError):
        rarefy.load_file(Tiny(), tmp_path / "none.safetensors")
    with pytest.raises(TypeError, match=r"^\[load_file\] model"):
        rarefy.load_file({}, tmp_path / "none.safetensors")
    with pytest.raises(TypeError, match=r"^\[save_file\] model"):
        rarefy.save_file(Tiny().state_dict(), tmp_path / "m.safetensors")
    with pytest.raises((TypeError, ValueError), match=r"^\[save_file\]"):
        rarefy.save_file(Tiny().to("meta"), tmp_path / "m.safetensors")
    odd = nn.Module()
    odd.fc = nn.Module()
    odd.fc.register_buffer("crow_indices", torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^\[save_file\] .*fc\.crow_indices"):
        rarefy.save_file(odd, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []
