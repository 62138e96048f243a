"""Old sparse checkpoints: files that their libraries wrote (tests/python/data/legacy), and hostile ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

import rarefy
from rarefy import BlockSparseLinear, CsrWeight, SparseWeight
from rarefy.legacy import load, read_legacy
from rarefy.legacy.blocks import BlockSparseTensor

DATA = Path(__file__).parent / "data" / "legacy"
FILES = sorted(path.name for path in DATA.iterdir() if path.suffix in (".safetensors", ".pt"))


def _state(name: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / f"{name}.safetensors")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("spec", [None, "dense", "block:4x1@nonzero"])
def test_files_of_the_original_libraries_are_read_bit_for_bit(name, spec):
    out, (found,) = read_legacy(DATA / name, spec=spec)
    weight, expected = out["fc.weight"], out["expected"]
    blocks = "block" in name
    if spec == "dense":
        assert isinstance(weight, torch.Tensor)
    else:
        assert isinstance(weight, SparseWeight)
        assert isinstance(weight, CsrWeight) == (spec is None and not blocks)
        weight = weight.to_dense()
    assert weight.dtype == expected.dtype and torch.equal(weight.detach(), expected)
    assert found.name == "fc.weight" and found.shape == tuple(expected.shape) and str(found)


def test_files_are_those_that_make_py_says():
    assert len(FILES) == 9


@pytest.mark.parametrize("name", FILES)
def test_checkpoints_load_into_a_model(name, tmp_path):
    state = dict(read_legacy(DATA / name)[0])
    expected, bias = state["expected"], state.get("fc.bias")
    source = load._file(DATA / name)
    n, k = expected.shape
    model = nn.ModuleDict({"fc": nn.Linear(k, n, bias=bias is not None, dtype=expected.dtype)}).eval()
    again = copy.deepcopy(model)
    found = rarefy.load_legacy(model, {key: t for key, t in source.items() if key != "expected"})
    assert [f.name for f in found] == ["fc.weight"]
    assert type(model["fc"]) is BlockSparseLinear and not model["fc"].training
    assert torch.equal(model["fc"].weight.to_dense(), expected)
    assert bias is None or torch.equal(model["fc"].bias, bias)
    # The same by way of a bsr-v1 file.
    load.save({key: t for key, t in state.items() if key != "expected"}, tmp_path / "new.safetensors")
    rarefy.load_file(again, tmp_path / "new.safetensors")
    assert torch.equal(again["fc"].weight.to_dense(), expected)


# Formats that are written here -----------------------------------------------------------------------


def _pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 8), nn.Conv2d(2, 2, 3), nn.Linear(8, 4))
    for layer in (model[0], model[1]):
        prune.l1_unstructured(layer, "weight", 0.6)
    prune.random_unstructured(model[0], "bias", 2)
    return model


def test_masks_of_torch_prune_load_into_the_dense_model_with_its_outputs(tmp_path):
    pruned = _pruned()
    model = nn.Sequential(nn.Linear(12, 8), nn.Conv2d(2, 2, 3), nn.Linear(8, 4))
    torch.save({"epoch": 3, "state_dict": pruned.state_dict()}, tmp_path / "old.pth")
    with torch.no_grad():
        pruned[0].weight_orig[pruned[0].weight_mask == 0] = torch.nan  # what is masked counts for nothing
    folder = tmp_path / "of a Trainer"
    folder.mkdir()
    torch.save(pruned.state_dict(), folder / "pytorch_model.bin")
    torch.save({"arguments": Evil()}, folder / "training_args.bin")  # beside it, and never read
    for source in (tmp_path / "old.pth", pruned.state_dict(), tmp_path, folder):
        twin = copy.deepcopy(model)
        found = rarefy.load_legacy(twin, source)
        assert [f.name for f in found] == ["0.weight", "0.bias", "1.weight"]
        assert type(twin[0]) is BlockSparseLinear and type(twin[1]) is nn.Conv2d
        assert torch.equal(twin[0].weight.to_dense().detach(), pruned[0].weight.nan_to_num())
        assert torch.equal(twin[0].bias, pruned[0].bias) and torch.equal(twin[1].weight, pruned[1].weight)
        assert torch.equal(twin[2].weight, pruned[2].weight)


@pytest.mark.filterwarnings("ignore:.*(beta|deprecated|invariant|prototype)")
@pytest.mark.parametrize("layout", ["bsr", "csr", "csc", "coo", "semi"])
def test_sparse_tensors_of_torch(layout, tmp_path):
    w = torch.randn(64, 64) * (torch.rand(64, 64) < 0.3)
    if layout == "semi":
        w = w.reshape(-1, 4)
        w[:, :2] = 0
        w = w.reshape(64, 64).half()
        packed, meta = sparse_semi_structured_from_dense_cutlass(w)
        kind = torch.sparse.SparseSemiStructuredTensorCUTLASS
        sparse = kind(w.shape, packed, meta, None, None, None)
    else:
        sparse = w.to_sparse_bsr((16, 16)) if layout == "bsr" else getattr(w, f"to_sparse_{layout}")()
    torch.save({"fc.weight": sparse, "fc.bias": torch.zeros(64, dtype=w.dtype)}, tmp_path / "old.pt")
    model = nn.ModuleDict({"fc": nn.Linear(64, 64, dtype=w.dtype)})
    (found,) = rarefy.load_legacy(model, tmp_path / "old.pt")
    assert found.now == ("block:16x16" if layout == "bsr" else "csr")
    assert torch.equal(model["fc"].weight.to_dense(), w)


class SparseDimensions(nn.Module):
    """A layer as nn_pruning's, whose rows and columns that stay are a smaller layer."""

    def __init__(self, linear: nn.Linear, rows: torch.Tensor | None, cols: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("input_extract", cols)
        self.register_buffer("output_expand", rows)
        n, k = linear.weight.shape
        rows = torch.arange(n) if rows is None else rows
        cols = torch.arange(k) if cols is None else cols
        self.linear = nn.Linear(len(cols), len(rows))
        self.linear.weight.data, self.linear.bias.data = (
            linear.weight.data[rows][:, cols],
            linear.bias.data[rows],
        )
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x if self.input_extract is None else x[..., self.input_extract])
        if self.output_expand is None:
            return y
        return y.new_zeros(*y.shape[:-1], self.n).index_copy(-1, self.output_expand, y)


@pytest.mark.parametrize("rows", [None, (0, 3, 6)])
@pytest.mark.parametrize("cols", [None, (1, 2, 9)])
def test_nn_prunings_compiled_layers(rows, cols):
    if rows is None and cols is None:
        pytest.skip("a plain layer")
    positions = [None if p is None else torch.tensor(p) for p in (rows, cols)]
    old = nn.ModuleDict({"fc": SparseDimensions(nn.Linear(10, 8), *positions)})
    model, x = nn.ModuleDict({"fc": nn.Linear(10, 8)}), torch.randn(5, 10)
    rarefy.load_legacy(model, old.state_dict())
    torch.testing.assert_close(model["fc"](x), old["fc"](x))
    with pytest.raises(ValueError, match=r"^\[load_legacy\] a model must say how large fc is"):
        read_legacy(old.state_dict())


# Bad input -------------------------------------------------------------------------------------------

BAD: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    (
        "sparse-bitmask-float32",
        lambda s: s.update({"fc.shape": torch.tensor([7, 2**40])}),
        r"must be at most 2147483647; got fc\.shape=\(7, ",
    ),
    (
        "sparse-bitmask-float32",
        lambda s: s.update({"fc.shape": torch.tensor([7, 2**30])}),
        r"fc\.bitmask must be \(7",
    ),
    (  # tensors of such a shape take no memory, and its pattern would
        "sparse-bitmask-float32",
        lambda s: s.update(
            {"fc.shape": torch.tensor([2**31, 0]), "fc.bitmask": torch.empty(2**31, 0, dtype=torch.uint8)}
            | {"fc.compressed": torch.empty(0)}
        ),
        r"must be at most 2147483647; got fc\.shape=\(2147483648, 0\)",
    ),
    (
        "sparse-bitmask-float32",
        lambda s: s.update({"fc.shape": torch.tensor([7, -1])}),
        r"fc\.shape\[1\] must be at least 0",
    ),
    (
        "sparse-bitmask-float32",
        lambda s: s.update({"fc.shape": torch.tensor([7.0, 19.0])}),
        r"fc\.shape\[0\] must be an int",
    ),
    (
        "sparse-bitmask-float32",
        lambda s: s.update({"fc.shape": torch.tensor([7, 19, 1])}),
        r"fc\.shape must have 2 elements",
    ),
    (
        "sparse-bitmask-float32",
        lambda s: s.update({"fc.shape": torch.tensor([2**30, 2**30])}),
        "uint8, as the",
    ),
    ("sparse-bitmask-float32", lambda s: s["fc.bitmask"][0].fill_(255), "no bits beyond column 19"),
    ("sparse-bitmask-float32", lambda s: s["fc.bitmask"][0].fill_(0), "values, one for each bit"),
    ("sparse-bitmask-float32", lambda s: s.update({"fc.bitmask": s["fc.bitmask"].int()}), "uint8"),
    ("sparse-bitmask-float32", lambda s: s["fc.row_offsets"][2].add_(1), "row_offsets must be where"),
    (
        "sparse-bitmask-float32",
        lambda s: s.update({"fc.compressed": s["fc.compressed"].long()}),
        "must be of dtype",
    ),
    ("sparse-24-bitmask-float32", lambda s: s["fc.bitmask"][1, 0].bitwise_xor_(1), "one for each bit"),
    ("marlin-24-4-group-512", lambda s: s["fc.meta"][0, 0].fill_(0), "two columns of each four"),
    (
        "marlin-24-4-group-512",
        lambda s: s.update({"fc.meta": s["fc.meta"][:1].clone()}),
        "weight_packed must",
    ),
    ("marlin-24-4-group-512", lambda s: s.update({"fc.meta": s["fc.meta"].int()}), "int16"),
    (
        "marlin-24-4-group-512",
        lambda s: s.update({"fc.meta": s["fc.meta"][:0]}),
        r"meta must be \(K/32, 2N\)",
    ),
    (
        "marlin-24-4-group-512",
        lambda s: s.update({"fc.scale_packed": s["fc.scale_packed"][:3]}),
        "scale_packed",
    ),
    ("marlin-24-4-group-512", lambda s: s.update({"fc.weight_packed": s["fc.weight_packed"][0]}), "int32"),
    (
        "marlin-24-4-group-512",
        lambda s: s.update({"fc.weight_packed": s["fc.weight_packed"][:, :96]}),
        "128 or",
    ),
    ("pytorch-block-sparse", lambda s: s["fc.weight.cols_a"][0, 0].fill_(99), r"col_indices\[0\]=99 out of"),
    ("pytorch-block-sparse", lambda s: s["fc.weight.cols_a"][0, 1].fill_(99), "name each of 32 blocks once"),
    ("pytorch-block-sparse", lambda s: s["fc.weight.cols_a"][0, 1].fill_(-1), "name each of 32 blocks once"),
    ("pytorch-block-sparse", lambda s: s["fc.weight.row_start_ends_a"][-1].fill_(9), "fc.weight: .*crow"),
    (
        "pytorch-block-sparse",
        lambda s: s.update({"fc.weight.cols_a": s["fc.weight.cols_a"][:0]}),
        "at least one",
    ),
    (
        "pytorch-block-sparse",
        lambda s: s.update({"fc.weight.data": s["fc.weight.data"][:-1]}),
        "blocks × rows",
    ),
]


@pytest.mark.parametrize(("name", "damage", "message"), BAD, ids=range(len(BAD)))
def test_tensors_that_contradict_each_other_are_refused(name, damage, message):
    state = _state(name)
    damage(state)
    with pytest.raises((ValueError, TypeError), match=rf"^\[load_legacy\] (?s:.)*{message}") as error:
        read_legacy(state)
    assert "\n" not in str(error.value) and "fc" in str(error.value)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("safetensors")])
def test_random_damage_is_an_error_or_a_valid_weight(name):
    """Bytes of any tensor, changed at random, shapes cut: nothing but ValueError and TypeError comes out."""
    original = _state(name.removesuffix(".safetensors"))
    generator, errors = torch.Generator().manual_seed(0), []
    for _ in range(60):
        state = {key: tensor.clone() for key, tensor in original.items() if key != "expected"}
        key = sorted(state)[int(torch.randint(len(state), (), generator=generator))]
        raw = state[key].reshape(-1).view(torch.uint8)
        at = torch.randint(len(raw), (3,), generator=generator)
        raw[at] = torch.randint(256, (3,), generator=generator, dtype=torch.uint8)
        if int(torch.randint(4, (), generator=generator)) == 0:
            state[key] = state[key][: int(torch.randint(len(state[key]) + 1, (), generator=generator))]
        try:
            out, _found = read_legacy(state)
        except (ValueError, TypeError) as error:
            errors.append(str(error))
        else:
            assert out["fc.weight"].to_dense().shape == out["fc.weight"].shape
    assert errors and all(error.startswith("[load_legacy]") for error in errors)


def test_sources_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 32)
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "dense.safetensors")
    for source, kind, message in (
        (tmp_path / "none.pt", FileNotFoundError, "must be a file or a folder"),
        (tmp_path / "empty", ValueError, "folder must hold one of"),
        (tmp_path / "bad.pt", ValueError, "bad.pt must be a state_dict"),
        (tmp_path / "evil.pt", ValueError, "evil.pt must be a state_dict"),
        (tmp_path / "list.pt", TypeError, "of names and tensors; got list"),
        (tmp_path / "bad.safetensors", ValueError, "bad.safetensors must be a safetensors file"),
        (tmp_path / "dense.safetensors", ValueError, "format that rarefy.load_legacy knows; got 1 others"),
    ):
        with pytest.raises(kind, match=rf"^\[load_legacy\] .*{message}") as error:
            read_legacy(source)
        assert "\n" not in str(error.value)
    assert Evil.calls == 0


class Evil:
    calls = 0

    def __reduce__(self) -> tuple:
        return (Evil._called, ())

    @staticmethod
    def _called() -> None:
        Evil.calls += 1


def test_sparse_weights_of_a_conv1d_are_refused_dense_or_sparse():
    """Its checkpoint has them transposed: a square one would load without a word."""
    conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
    state = {"0.weight_orig": torch.randn(8, 8), "0.weight_mask": torch.eye(8)}
    model = nn.Sequential(conv1d(8, 8))
    for _ in range(2):
        with pytest.raises(ValueError, match=r'must be of an nn.Linear \(spec="dense" loads others\)'):
            rarefy.load_legacy(model, state)
        rarefy.sparsify(model, {".*": "block:4x4@0.5"}, measure=False)


def test_sparse_weights_of_a_projection_load():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    weight = torch.randn(8, 8)
    mask = (torch.rand(8, 8) < 0.4).float()
    state = {f"attention.{name}": t for name, t in model["attention"].state_dict().items()}
    state.pop("attention.out_proj.weight")
    state |= {"attention.out_proj.weight_orig": weight, "attention.out_proj.weight_mask": mask}
    rarefy.load_legacy(model, state)
    assert torch.equal(model["attention"].out_proj.weight.to_dense().detach(), weight * mask)


def test_an_error_leaves_the_model_as_it_was():
    model = nn.ModuleDict({"fc": nn.Linear(19, 7), "other": nn.Linear(2, 2)})
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = _state("sparse-bitmask-float32") | {"fc.bias": torch.zeros(7)}
    with pytest.raises(
        ValueError, match=r"^\[load_legacy\] every tensor of the model must be there; got none for "
    ):
        rarefy.load_legacy(model, state)
    with pytest.raises(ValueError, match=r"fc\.weight must be of shape \(3, 19\)"):
        rarefy.load_legacy(nn.ModuleDict({"fc": nn.Linear(19, 3)}), state)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module; got dict"):
        rarefy.load_legacy({}, state)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_the_stand_in_for_torchao_computes_nothing():
    tensor = load._file(DATA / "torchao-block-sparse.pt")["fc.weight"]
    assert type(tensor) is BlockSparseTensor
    with pytest.raises(TypeError, match=r"must be read by rarefy\.load_legacy"):
        torch.add(tensor, 1)
    with pytest.raises(TypeError, match="stands for"):
        BlockSparseTensor()


def test_convert_on_the_command_line(tmp_path, capsys):
    source, target = str(DATA / "sparse-bitmask-float32.safetensors"), tmp_path / "new.safetensors"
    assert load.main([source, str(target), "--explain", "--spec", "block:1x1@nonzero"]) == 0
    said = capsys.readouterr().out
    assert "fc.weight: compressed-tensors sparse-bitmask, 7×19 at density" in said and "block:1x1" in said
    assert load_file(target)["fc.weight.values"].shape[1:] == (1, 1)
    assert load.main([source, "--explain"]) == 0
    assert load.main([str(tmp_path / "none"), str(target)]) == 1
    assert "must be a file or a folder" in capsys.readouterr().out
