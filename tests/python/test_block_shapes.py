"""bench/block_shapes.py: its file, its plot, and one row on a tiny encoder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parent))

import block_shapes
from demo_encoder import TEXTS, Words, encoder, split_of
from examples.minilm import prune

pytestmark = pytest.mark.usefixtures("one_thread")


def row(block: str, budget: str = "0 minutes") -> dict[str, str]:
    figures = dict.fromkeys(block_shapes.FIGURES, "")
    figures |= {f"predicted_{kind}_{d}": "2.0" for kind in ("dense", "sparse") for d in block_shapes.DTYPES}
    of = dict(zip(block_shapes.KEYS, (block, "0.5", "ffn", budget, ""), strict=True))
    steps = {"steps": "0" if budget == "0 minutes" else "10"}
    return of | figures | steps | {"held_out_cosine": "0.9", "acc10": "0.6"}


def test_rows_are_kept_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert block_shapes.read(path) == {}
    rows = {("4x1", "0.5", "ffn", b, ""): row("4x1", b) for b in ("0 minutes", "20 minutes")}
    block_shapes.write(path, rows)
    assert block_shapes.read(path) == rows and [p.name for p in tmp_path.iterdir()] == ["rows.csv"]
    trained = row("4x1", "20 minutes") | {"recipe": "relations=0", "steps": "20"}
    untimed = {f"predicted_{kind}_{d}": "" for kind in ("dense", "sparse") for d in block_shapes.DTYPES}
    rows["4x1", "0.5", "ffn", "20 minutes", "relations=0"] = trained | untimed  # the times of the others
    rows["4x1", "0.5", "ffn", "20 minutes", "lr=1"] = trained | {"recipe": "lr=1", "held_out_cosine": ""}
    block_shapes.plot(rows, tmp_path / "plot.svg")
    assert "4x1" in (tmp_path / "plot.svg").read_text()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> block_shapes.Bench:
    made = object.__new__(block_shapes.Bench)
    made.dense, made.tokenizer, made.split = encoder(0), Words(), split_of()
    made.kept, made.base, made.order = tmp_path, {}, None
    with torch.no_grad():  # layers that matter
        for p in made.dense.encoder.parameters():
            p.mul_(8 if p.ndim == 2 else 1)
    made.batches = list(prune.same_lengths(made.tokenizer, TEXTS))
    monkeypatch.setattr(block_shapes, "Bench", lambda kept: made)
    monkeypatch.setattr(block_shapes, "predicted", lambda *a: {"predicted_dense_f32": 1.0})
    monkeypatch.setattr(block_shapes, "prepare", lambda kept, of, threads: made.pruned(*of))
    monkeypatch.setattr(block_shapes, "ProcessPoolExecutor", Here)
    return made


class Here:
    """A pool whose processes are this one."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function, *arguments):
        return map(function, *arguments)


def main_of(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> dict:
    options = ["--out", str(path), "--densities", "0.6", *arguments]
    monkeypatch.setattr(sys, "argv", ["x", *options])
    assert block_shapes.main() == 0
    return block_shapes.read(path)


def test_rows_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: block_shapes.Bench) -> None:
    path = tmp_path / "x.csv"
    rows = main_of(monkeypatch, path, "--blocks", "4x1", "8x4")
    tall, square = (rows[block, "0.6", "ffn", "0 minutes", ""] for block in ("4x1", "8x4"))
    assert 0.9 < float(square["cosine"]) <= float(tall["cosine"]) <= 1
    assert tall["held_out_cosine"] == tall["cosine"]  # the same entries here
    assert tall["predicted_dense_f32"] == "1.000" and tall["steps"] == "0"
    _, masks = bench.pruned("4x1", 0.6, "ffn")
    shapes = block_shapes.layers_of(bench.dense, "ffn")
    assert list(shapes.values()) == [(32, 16), (16, 32)] * 2 and set(masks) <= set(shapes)
    whole = sum(n * k for n, k in shapes.values())
    kept = whole - sum(len(m.bits) * m.cols - m.kept for m in masks.values())
    assert 0.5 * whole < kept <= 0.6 * whole
    assert len(block_shapes.layers_of(bench.dense, "all")) == 12
    with monkeypatch.context() as patch:
        patch.setattr(prune, "prune", lambda *a: pytest.fail("made again"))
        recipes = ("--jobs", "2", "--recipes", "", "lr=0")
        rows = main_of(monkeypatch, path, "--blocks", "4x1", "--steps", "30", *recipes)
    trained, still = (rows["4x1", "0.6", "ffn", "30 steps", recipe] for recipe in ("", "lr=0"))
    assert still["cosine"] == tall["cosine"] < trained["cosine"]
    assert (trained["steps"], trained["on"]) == ("30", "CPU")
    timed = main_of(
        monkeypatch, path, "--blocks", "4x1", "--minutes", "0.01", "--device", "cpu:0", "--recipes", "lr=1e-3"
    )
    found = timed["4x1", "0.6", "ffn", "0.01 minutes", "lr=1e-3"]
    assert int(found["steps"]) % 50 == 0 < int(found["steps"]) and found["cosine"] != tall["cosine"]


def test_students_that_were_trained_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: block_shapes.Bench
) -> None:
    path, trained = tmp_path / "x.csv", tmp_path / "trained"
    options = ("--blocks", "4x1", "--steps", "12", "--recipes", "average=0.5", "--trained", str(trained))
    rows = main_of(monkeypatch, path, *options)
    kept = torch.load(trained / "ffn-4x1-0.6-average=0.5.pt", weights_only=True)
    student = block_shapes.copy.deepcopy(bench.dense)
    student.encoder.load_state_dict(kept["weights"])
    found = rows["4x1", "0.6", "ffn", "12 steps", "average=0.5"]
    assert f"{bench.figures(student)['held_out_cosine']:.4f}" == found["held_out_cosine"]
    for name, parts in kept["masks"].items():
        assert (student.get_submodule(name).weight[~block_shapes.Mask(*parts).unpack()] == 0).all()
    assert sum(w.untyped_storage().nbytes() for w in kept["weights"].values()) == sum(
        p.nbytes for p in bench.dense.encoder.parameters()
    )


@pytest.mark.parametrize("recipe", ["average=0.2", "pieces=0.5", "more=1"])
def test_what_only_students_on_a_device_learn_by_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: block_shapes.Bench, recipe: str
) -> None:
    with pytest.raises(ValueError, match="are for students on a device; got " + recipe):
        main_of(monkeypatch, tmp_path / "x.csv", "--blocks", "4x1", "--minutes", "1", "--recipes", recipe)


def test_nothing_to_do_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: block_shapes.Bench
) -> None:
    path = tmp_path / "x.csv"
    options = ("--blocks", "4x1", "--steps", "2")
    rows = main_of(monkeypatch, path, *options)
    assert main_of(monkeypatch, path, *options) == rows


def test_processes_find_the_sensitivities_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: block_shapes.Bench
) -> None:
    monkeypatch.setattr(
        block_shapes,
        "prepare",
        lambda kept, of, threads: (next(kept.glob("sensitivity*")), bench.pruned(*of)),
    )
    main_of(monkeypatch, tmp_path / "x.csv", "--blocks", "4x1", "8x4", "--steps", "2", "--jobs", "2")


def test_a_recipe_keeps_the_kinds_of_its_numbers() -> None:
    recipe = block_shapes.recipe_of("lr=1e-3,tokens=64,seed=1,pooled=4")
    assert recipe == block_shapes.Recipe(lr=1e-3, tokens=64, seed=1, pooled=4.0)
    assert [type(x) for x in (recipe.tokens, recipe.seed, recipe.pooled)] == [int, int, float]


@pytest.mark.parametrize("bad", ["rate=1", "lr=fast"])
def test_a_recipe_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"names must be|could not convert"):
        block_shapes.recipe_of(bad)


def test_layers_are_timed_without_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    block_shapes.write(path, {("4x1", "0.5", "ffn", "0 minutes", ""): row("4x1")})
    monkeypatch.setattr(block_shapes, "Bench", lambda kept: pytest.fail("not needed"))
    monkeypatch.setattr(block_shapes, "skeleton", lambda: encoder(0))
    again = row("4x1", "3 steps")
    block_shapes.write(path, block_shapes.read(path) | {("4x1", "0.5", "ffn", "3 steps", ""): again})
    one, other = main_of(monkeypatch, path, "--measure").values()
    assert (
        float(one["measured_sparse_f32"]) > 0 and one["measured_sparse_f32"] == other["measured_sparse_f32"]
    )
    monkeypatch.setattr(block_shapes, "measured", lambda *a: pytest.fail("has been measured"))
    main_of(monkeypatch, path, "--measure")


def test_layers_are_timed_in_turns() -> None:
    found = block_shapes.measured([(32, 16), (16, 32)], "4x1", 0.5, rounds=1)
    assert set(found) == {f"measured_{kind}_{d}" for kind in ("dense", "sparse") for d in ("f32", "bf16")}
    assert all(time > 0 for time in found.values())
