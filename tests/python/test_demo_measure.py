"""What examples/minilm measures and says of it: times, contests, goals, reports."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import rarefy
from demo_encoder import TEXTS, Words, encoder
from examples.minilm import data, distill, measure, model, report, run, summary
from rarefy.prune import Point, Sensitivity

pytestmark = pytest.mark.usefixtures("one_thread")  # the encoders here have matrices of 16 columns


def test_encoding_times_give_one_row_for_each_batch_and_dtype() -> None:
    many = [data.Entry(str(i), text) for i, text in enumerate(TEXTS)]
    dense = encoder(0)
    models = measure.contenders(dense, encoder(1))
    rows = measure.encoding_times(models, Words(), many, rounds=range(2, 3), batches=(1, 8))
    assert [(row["batch"], row["dtype"]) for row in rows] == [
        (1, "f32"),
        (8, "f32"),
        (1, "bf16"),
        (8, "bf16"),
    ]
    for row in rows:
        ratio = row["dense_ms"] / row["sparse_ms"]
        assert row["speedup"] is None if row["noise"] else row["speedup"] == pytest.approx(ratio)
    assert all(p.dtype == torch.float32 for p in dense.parameters())
    assert rows[1]["tokens"] == measure_tokens(many, 8)


def test_contest_of_the_fastest_that_are_good_enough() -> None:
    many = [data.Entry(str(i), text) for i, text in enumerate(TEXTS)]
    models = measure.contenders(encoder(0), encoder(1))
    assert {"dense f32", "dense bf16", "sparse f32", "sparse bf16"} <= set(models)
    found = {name: {"acc1": 0.4, "acc10": 0.6, "mean_cosine": 1.0} for name in models}
    found["sparse bf16"] = found["sparse bf16"] | {"acc10": 0.589}
    found["dense bf16"] = found["dense bf16"] | {"acc10": 0.59}
    rows, best = measure.contest(models, found, Words(), many, rounds=range(2, 3), batch=8)
    assert {row["name"]: row["good"] for row in rows} == {n: n != "sparse bf16" for n in models}
    assert best["sparse"] == "sparse f32" and best["dense"].startswith("dense") and best["good"]
    assert rows[0]["speedup"] == 1.0 and all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "says", "near"), [("int8", "int8", 0.99), ("bf16 layers", "bfloat16", 0.999)]
)
def test_the_same_blocks_join_in_other_dtypes(name: str, says: str, near: float) -> None:
    sparse = encoder(0)
    rarefy.sparsify(sparse, {model.FFN_LAYERS: "block:16x1@0.5"}, measure=False)
    models = measure.contenders(encoder(0), sparse)
    wide, narrow = (models[f"sparse {dtype}"] for dtype in ("f32", name))
    layers = [net.get_submodule("encoder.layer.0.output.dense") for net in (wide, narrow)]
    assert layers[0].weight.nnzb == layers[1].weight.nnzb and says in str(layers[1])
    embedded = [model.embed(net, Words(), TEXTS) for net in (wide, narrow)]
    assert near < (embedded[0] * embedded[1]).sum(-1).min() and not torch.equal(*embedded)
    assert embedded[1].dtype == torch.float32


def test_the_share_outside_of_layers_is_between_those_of_none_and_all() -> None:
    many = [data.Entry(str(i), text) for i, text in enumerate(TEXTS)]
    models = measure.contenders(encoder(0), encoder(1))
    layers = [name for name, m in models["dense f32"].named_modules() if isinstance(m, torch.nn.Linear)]
    some = measure.outside(models, layers, Words(), many, rounds=3)
    none = measure.outside(models, [], Words(), many, rounds=3)
    for dtype in ("f32", "bf16"):
        assert none[dtype] == {"share": 1.0, "bound": 1.0}
        assert 0 < some[dtype]["share"] < 1 and some[dtype]["bound"] == 1 / some[dtype]["share"]
    assert not models["dense f32"].get_submodule(layers[0])._forward_hooks


def measure_tokens(many: list[data.Entry], size: int) -> int:
    texts = measure.middle_batch(many, size)
    return size * max(len(text.split()) for text in texts)


def result(speedup: float = 1.5, acc10: float = 0.6, linear: int = 75) -> dict:
    row = {
        "batch": 32,
        "tokens": 400,
        "dtype": "f32",
        "dense_ms": 30.0,
        "sparse_ms": 30 / speedup,
        "speedup": speedup,
        "noise": None,
    }
    row |= {"dense_quartiles_ms": [29.0, 31.0], "sparse_quartiles_ms": [19.0, 21.0], "rounds": 25}
    bf16 = row | {"dtype": "bf16", "dense_ms": 15.0, "sparse_ms": 10.0, "speedup": 1.5}
    quality = {"acc1": 0.4, "mean_cosine": 0.98, "noise": None}
    models = {
        "dense f32": {"acc10": 0.605, "ms": 30.0, "speedup": 1.0},
        "sparse f32": {"acc10": acc10, "ms": 30 / speedup, "speedup": speedup},
        "dense bf16": {"acc10": 0.605, "ms": 15.0, "speedup": 2.0},
        "sparse bf16": {"acc10": acc10, "ms": 10.0, "speedup": 3.0},
    }
    best = {"dense": "dense bf16", "sparse": "sparse bf16", "dense_ms": 15.0, "sparse_ms": 10.0}
    return {
        "quality": {
            "dense": {"acc1": 0.4, "acc10": 0.605},
            "sparse": {"acc1": 0.4, "acc10": acc10},
            "mean_cosine": 0.98,
        },
        "speed": [row, bf16],
        "models": [
            {"name": name, "good": found["acc10"] >= 0.595 - 1e-9} | quality | found
            for name, found in models.items()
        ],
        "best": best | {"speedup": 1.5, "noise": None, "over_dense_f32": 3.0, "good": True},
        "outside": {"f32": {"share": 0.2, "bound": 5.0}, "bf16": {"share": 0.4, "bound": 2.5}},
        "size": {
            "linear_dense_bytes": 100,
            "linear_sparse_bytes": linear,
            "file_dense_bytes": 200,
            "file_sparse_bytes": 175,
        },
        "layers": [],
        "machine": {},
        "versions": {},
        "seconds_total": 1.0,
    }


def test_goals_are_named_when_missed() -> None:
    assert summary.missed_goals(result()) == []
    assert summary.missed_goals(result(acc10=0.595, speedup=1.3, linear=80)) == []
    missed = summary.missed_goals(result(acc10=0.594, speedup=1.29, linear=81))
    assert len(missed) == 4
    assert "1.29" in missed[0] and "19.0 %" in missed[3]
    assert all("0.594" in sentence and "sparse" in sentence for sentence in missed[1:3])
    slow = result()
    slow["speed"][1]["speedup"], slow["best"]["speedup"], slow["best"]["over_dense_f32"] = 1.39, 1.38, 2.37
    missed = summary.missed_goals(slow)
    assert [found in text for found, text in zip(("1.39×", "1.38×", "2.37×"), missed, strict=True)] == [
        True
    ] * 3
    assert "sparse bf16" in missed[1] and "dense bf16" in missed[1]
    nearly = result()
    nearly["best"]["over_dense_f32"] = 2.3962
    assert ["2.3962×" in text for text in summary.missed_goals(nearly)] == [True]


def test_missed_goals_are_an_exit_code_with_check_alone() -> None:
    missed = summary.missed_goals(result(speedup=1.2))
    assert run.exit_code(missed, check=False) == 0 and run.exit_code(missed, check=True) == 1
    assert run.exit_code([], check=True) == 0
    assert not run.options([]).check and run.options(["--check"]).check


def test_a_saved_encoder_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "quietest", lambda turns: turns())
    held_out = [data.Entry(str(i), text) for i, text in enumerate(TEXTS[:40])]
    monkeypatch.setattr(run.data, "read_entries", lambda folder: held_out)
    monkeypatch.setattr(run.data, "find_wordnet", lambda: tmp_path)
    monkeypatch.setattr(run.data, "split", lambda entries: data.Split(entries, entries, []))
    for name, made in (("load_dense", encoder(0)), ("skeleton", encoder(1)), ("load_tokenizer", Words())):
        monkeypatch.setattr(run, name, lambda made=made: made)
    options = ["--measure", "--out", str(tmp_path)]
    assert run.main(options) == 2  # nothing is there yet
    student = encoder(0)
    rarefy.sparsify(student, {model.FFN_LAYERS: "block:4x1@0.5"}, measure=False)
    rarefy.save_file(student, tmp_path / "sparse.safetensors")
    before = (tmp_path / "sparse.safetensors").read_bytes()
    assert run.main(options) == 0
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["quality"]["mean_cosine"] < 1 and len(found["speed"]) == 8
    assert 0 < found["size"]["linear_sparse_bytes"] < found["size"]["linear_dense_bytes"]
    assert (tmp_path / "sparse.safetensors").read_bytes() == before
    assert not (tmp_path / "report.json").exists()


def test_a_busy_machine_gives_no_speedup_and_says_so() -> None:
    noisy = result()
    noisy["speed"][0] |= {"speedup": None, "noise": "passes disagree: 1.20x to 1.90x"}
    assert summary.missed_goals(noisy) == [
        "Goal not measured: encoding at batch 32 in f32, for passes disagree: 1.20x to 1.90x."
    ]
    assert [row[-1] for row in summary.speed_rows(noisy)] == ["noise", "1.50×"]
    assert summary.slower_notes(noisy["speed"]) == []
    noisy["best"] |= {"speedup": None, "noise": "passes disagree"}
    assert "passes disagree" in summary.best_sentence(noisy["best"])


def test_a_slower_dtype_is_said() -> None:
    (note,) = summary.slower_notes(result(speedup=0.9)["speed"])
    assert note.startswith("Batch 32, f32: sparse is not faster than dense (33.33 against 30.00 ms)")


@pytest.mark.parametrize(
    "bad",
    [
        "--block=4",
        "--block=0x1",
        "--block=5x1",
        "--share=0.2",
        "--share=1.5",
        "--minutes=-1",
    ],
)
def test_bad_options_are_refused(bad: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        run.options([bad])
    assert caught.value.code == 2 and bad.partition("=")[2] in capsys.readouterr().err


def test_json_report_has_the_promised_keys(tmp_path: Path) -> None:
    points = ((0.0, None, 0.1), (9.0, 0.1, 0.02))
    curve = [{"seconds": at, "train": train, "validation": loss} for at, train, loss in points]
    progress = distill.Progress(step=3, seconds=9.0, train=0.1, best=0.02, curve=curve)
    details = {"spec": "block:4x1@0.5", "one_shot": {"acc1": 0.3, "acc10": 0.5}, "training": progress}
    layers = ("encoder.layer.1.output.dense.weight",)
    points = [Point("down, layer 1", layers, s, 0.01 * s, 100, 400, None) for s in (0.0, 0.5)]
    details |= {"sensitivity": Sensitivity("block:4x1", 512, 0.0, points)}
    details |= {"plan": details["sensitivity"].allocate(parameters=100)}
    rows = rarefy.sparsify(encoder(0), {model.FFN_LAYERS: "block:4x1@0.5"}).to_dict()["layers"]
    report.write(result() | {"layers": rows}, details, tmp_path)
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert list(read) == [
        "quality",
        "speed",
        "models",
        "best",
        "outside",
        "size",
        "layers",
        "machine",
        "versions",
        "seconds_total",
    ]
    assert set(read["speed"][0]) >= {"batch", "tokens", "dtype", "dense_ms", "sparse_ms", "speedup"}
    page = (tmp_path / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>") and "dense bf16" in page and "40% of dense" in page
    assert (
        page.count("<td>encoder.layer.1.output.dense</td>") == 1
        and page.count("<svg") == 5
        and page.count("The frontier") == 1
    )
    assert not re.search(
        r"""<script|<link|@import|(src|xlink:href|href)="(?!#|data:)""", page
    )  # self-contained


def test_what_is_measured_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "quietest", lambda turns: turns())
    dense, sparse = encoder(0), encoder(0)
    layers = rarefy.sparsify(sparse, {model.FFN_LAYERS: "block:4x1@0.5"}, measure=False)
    held_out = [data.Entry(str(i), text) for i, text in enumerate(TEXTS[:40])]
    split = data.Split(held_out, held_out, [])
    found = run.measured(dense, sparse, Words(), split, [row.name for row in layers.replaced])
    assert {row["name"] for row in found["models"]} >= {"dense f32", "sparse bf16"}
    assert [(row["dtype"], row["batch"]) for row in found["speed"]][:1] == [("f32", 1)]
    whole = result() | found
    details = {"spec": "block:4x1@0.5", "one_shot": {"acc1": 0.3, "acc10": 0.5}}
    console = Console(record=True, width=120, file=io.StringIO())
    report.show(whole, details, console)
    text = console.export_text()
    assert "Best against best at batch 32" in text and "of dense's time is not in" in text
    assert isinstance(summary.missed_goals(whole), list)
