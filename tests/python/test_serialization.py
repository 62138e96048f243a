"""bsr-v1 files: exact round trips, tied and shared weights, the command's opinion, and every lie by name."""

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file as save_tensors
from torch import nn

import rarefy
from rarefy import BlockSparseLinear, BsrWeight
from small_files import read, saved, skeleton_of_small, small
from tiny import FEED, Tiny, ids

BUILDS = Path(__file__).parents[2] / "build"


def sparse_tiny() -> Tiny:
    model = Tiny().eval()
    rarefy.sparsify(model, {FEED: "block:4x3@0.5", "once": "block:1x1@0.25"}, measure=False)
    return model


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
