"""bsr-v1 files: exact round trips, tied and shared weights, the command's opinion, and every lie by name."""

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file as save_tensors
from torch import nn

import rarefy
from rarefy import BlockSparseLinear, BsrWeight
from tiny import FEED, Tiny, assert_unchanged, ids, snapshot

BUILDS = Path(__file__).parents[2] / "build"


def sparse_tiny() -> Tiny:
    model = Tiny().eval()
    rarefy.sparsify(model, {FEED: "block:4x3@0.5", "once": "block:1x1@0.25"}, measure=False)
    return model


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]), key


def test_dense_skeleton_becomes_sparse_bit_for_bit(tmp_path):
    model, skeleton = sparse_tiny(), Tiny().eval()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    assert rarefy.load_file(skeleton, tmp_path / "m.safetensors") is None
    assert_same_state(model, skeleton)
    assert isinstance(skeleton.encoder.layer[1].output["dense"], BlockSparseLinear)
    assert skeleton.once is skeleton.again and isinstance(skeleton.once, BlockSparseLinear)
    assert skeleton.decoder.weight is skeleton.embeddings.weight
    assert torch.equal(model(ids()), skeleton(ids()))


def test_sparse_skeleton_takes_another_pattern_over(tmp_path):
    model, other = sparse_tiny(), Tiny().eval()
    rarefy.sparsify(other, {FEED: "block:2x8@0.75", "once": "block:4x4@1"}, measure=False)
    rarefy.save_file(model, tmp_path / "m.safetensors")
    rarefy.load_file(other, tmp_path / "m.safetensors")
    assert_same_state(model, other)
    assert other.once.block_shape == (1, 1)
    assert torch.equal(model(ids()), other(ids()))


def test_same_pattern_keeps_the_parameters(tmp_path):
    model = sparse_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    other = copy.deepcopy(model)
    before = dict(other.named_parameters())
    with torch.no_grad():
        for parameter in before.values():
            parameter.mul_(2)
    rarefy.load_file(other, tmp_path / "m.safetensors")
    assert_same_state(model, other)
    assert all(before[name] is parameter for name, parameter in other.named_parameters())


def test_dense_model_round_trips(tmp_path):
    model, other = Tiny(), Tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    rarefy.load_file(other, tmp_path / "m.safetensors")
    assert_same_state(model, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("density", [0, 0.3, 1])
def test_one_layer_of_each_dtype_with_padding(tmp_path, dtype, density, device):
    options = {"dtype": dtype, "device": device}
    model = nn.Sequential(BlockSparseLinear(11, 9, density=density, block_shape=(4, 3), **options))
    skeleton = nn.Sequential(nn.Linear(11, 9, **options))
    rarefy.save_file(model, tmp_path / "m.safetensors")
    rarefy.load_file(skeleton, tmp_path / "m.safetensors")
    assert_same_state(model, skeleton)
    assert skeleton[0].block_shape == (4, 3) and skeleton[0].weight.shape == (9, 11)
    assert {t.device.type for t in (*skeleton.parameters(), *skeleton.buffers())} == {device}
    x = torch.randn(5, 11, **options)
    assert torch.equal(model(x), skeleton(x))


def test_meta_skeleton_loads_without_its_dense_weights(tmp_path):
    model = sparse_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        skeleton = Tiny().eval()
    rarefy.load_file(skeleton, tmp_path / "m.safetensors")
    assert_same_state(model, skeleton)
    assert skeleton.decoder.weight is skeleton.embeddings.weight and skeleton.once is skeleton.again
    assert torch.equal(model(ids()), skeleton(ids()))


def test_training_mode_and_requires_grad_stay_those_of_the_model(tmp_path):
    rarefy.save_file(sparse_tiny(), tmp_path / "m.safetensors")
    skeleton = Tiny()
    skeleton.once.requires_grad_(False)
    skeleton.encoder.layer[0].eval()
    rarefy.load_file(skeleton, tmp_path / "m.safetensors")
    assert not skeleton.once.weight.values.requires_grad and skeleton.once.training
    loaded = skeleton.encoder.layer[0].output["dense"]
    assert loaded.weight.values.requires_grad and not loaded.training


def test_file_says_what_it_holds_and_stores_shared_tensors_once(tmp_path):
    model = sparse_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    tensors, metadata = read(tmp_path / "m.safetensors")
    root = json.loads(metadata["rarefy"])
    assert root["format"] == "bsr-v1" and root["version"] == rarefy.__version__
    weight = model.encoder.layer[1].intermediate["dense"].weight
    assert root["modules"]["encoder.layer.1.intermediate.dense.weight"] == {
        "shape": [32, 16],
        "block_shape": [4, 3],
        "nnzb": weight.nnzb,
        "dtype": "f32",
    }
    assert len(root["modules"]) == 5
    assert ("embeddings.weight" in tensors) != ("decoder.weight" in tensors)
    assert ("once.weight.values" in tensors) != ("again.weight.values" in tensors)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert not any(key.endswith(".plan") for key in tensors)


def test_views_of_one_tensor_and_transposed_tensors_are_stored(tmp_path):
    model, other = nn.Module(), nn.Module()
    base = torch.arange(24.0).reshape(4, 6)
    for key, tensor in (("whole", base), ("part", base[1:3]), ("turned", base.t())):
        model.register_buffer(key, tensor)
        other.register_buffer(key, torch.zeros(tensor.shape))
    rarefy.save_file(model, tmp_path / "m.safetensors")
    rarefy.load_file(other, tmp_path / "m.safetensors")
    assert_same_state(model, other)


@pytest.fixture
def command() -> Callable[..., dict]:
    """Calls the rarefy command, which must succeed, and returns what it prints as JSON."""
    found = [os.environ.get("RAREFY_CLI", ""), *map(str, BUILDS.glob("*/src/cli/rarefy"))]
    programs = [path for path in found if os.access(path, os.X_OK)]
    if not programs:
        pytest.skip("the rarefy command is not built")

    def call(*arguments: object) -> dict:
        line = [programs[0], *map(str, arguments), "--json"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


def test_the_command_accepts_the_files(tmp_path, command):
    rarefy.save_file(sparse_tiny(), tmp_path / "m.safetensors")
    rarefy.save_file(Tiny(), tmp_path / "dense.safetensors")
    assert command("verify", tmp_path / "m.safetensors")["sparse_weights"] == 5
    assert command("verify", tmp_path / "dense.safetensors")["sparse_weights"] == 0


def test_files_that_the_command_converted_load(tmp_path, command):
    model, skeleton = skeleton_of_small(), skeleton_of_small()
    rarefy.save_file(model, tmp_path / "dense.safetensors")
    options = ("--block", "4x3", "--density", "0.5", "--include", "fc.weight")
    command("convert", tmp_path / "dense.safetensors", tmp_path / "m.safetensors", *options)
    rarefy.load_file(skeleton, tmp_path / "m.safetensors")
    rarefy.sparsify(model, {"fc": "block:4x3@0.5"}, measure=False)
    assert_same_state(model, skeleton)


def test_weights_that_share_a_pattern_or_everything(tmp_path):
    weight = BsrWeight.from_dense(torch.randn(6, 6), block_shape=(2, 2), density=0.5)
    pattern = {"shape": weight.shape, "block_shape": weight.block_shape}
    other = BsrWeight(2 * weight.values.detach(), weight.crow_indices, weight.col_indices, **pattern)
    empty = BsrWeight.from_dense(torch.zeros(6, 6), block_shape=(2, 2), density=0)
    layers = [BlockSparseLinear.from_weight(w) for w in (weight, other, weight, empty, empty)]
    model = nn.Sequential(*layers)
    rarefy.save_file(model, tmp_path / "m.safetensors")
    assert {"0.weight.values", "1.weight.col_indices"} <= read(tmp_path / "m.safetensors")[0].keys()
    assert "2.weight.values" not in read(tmp_path / "m.safetensors")[0]
    loaded = copy.deepcopy(model)
    rarefy.sparsify(rarefy_copy := nn.Sequential(nn.Linear(6, 6)), {"0": "block:3x3@1"}, measure=False)
    loaded[0].weight.assign_(rarefy_copy[0].weight)
    rarefy.load_file(loaded, tmp_path / "m.safetensors")
    assert_same_state(model, loaded)
    assert loaded[0].weight is loaded[2].weight


def test_int64_indices_are_accepted(tmp_path):
    model, skeleton = small(), skeleton_of_small()
    tensors, metadata = saved(model, tmp_path)
    for key in ("fc.weight.crow_indices", "fc.weight.col_indices"):
        tensors[key] = tensors[key].long()
    save_tensors(tensors, tmp_path / "m.safetensors", metadata)
    rarefy.load_file(skeleton, tmp_path / "m.safetensors")
    assert_same_state(model, skeleton)


def umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


def test_writing_replaces_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    rarefy.save_file(small(), path)
    before = path.read_bytes()

    def no_space(tensors, file, **_options):
        Path(file).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(rarefy.serialization, "save_tensors", no_space)
    with pytest.raises(OSError, match="no space"):
        rarefy.save_file(Tiny(), path)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.safetensors"]  # noqa: PTH208


# Bad input ---------------------------------------------------------------------------------------


def small() -> nn.Module:
    """fc: 9 x 11 with blocks of 4 x 3, padded at both edges; rows of blocks hold 2, 0 and 3."""
    torch.manual_seed(1)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]]).bool()
    weight = BsrWeight.from_dense(torch.randn(9, 11), block_shape=(4, 3), mask=mask)
    model = nn.Module()
    model.fc = BlockSparseLinear.from_weight(weight, torch.randn(9))
    model.norm = nn.LayerNorm(9)
    return model


def skeleton_of_small() -> nn.Module:
    model = nn.Module()
    model.fc, model.norm = nn.Linear(11, 9), nn.LayerNorm(9)
    return model


def saved(model: nn.Module, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    rarefy.save_file(model, folder / "m.safetensors")
    return read(folder / "m.safetensors")


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
