"""bench/block_shapes.py: its file, its plot, and one row on a tiny encoder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parent))

import block_shapes
from examples.minilm import prune
from examples.minilm.evaluate import embed_entries
from test_demo import TEXTS, Words, encoder, split_of

pytestmark = pytest.mark.usefixtures("one_thread")


def row(block: str, density: str, minutes: str = "0") -> dict[str, str]:
    figures = dict.fromkeys(block_shapes.FIGURES, "")
    figures |= {f"predicted_{kind}_{d}": "2.0" for kind in ("dense", "sparse") for d in block_shapes.DTYPES}
    of = dict(zip(block_shapes.KEYS, (block, density, "ffn", minutes), strict=True))
    return of | figures | {"cosine": "0.9", "acc10": "0.6"}


def test_rows_are_kept_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert block_shapes.read(path) == {}
    rows = {("4x1", "0.5", "ffn", minutes): row("4x1", "0.5", minutes) for minutes in ("0", "20")}
    block_shapes.write(path, rows)
    assert block_shapes.read(path) == rows and [p.name for p in tmp_path.iterdir()] == ["rows.csv"]
    block_shapes.plot(rows, tmp_path / "plot.svg")
    assert "4x1" in (tmp_path / "plot.svg").read_text()


def test_a_row_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = object.__new__(block_shapes.Bench)
    bench.dense, bench.tokenizer, bench.split = encoder(0), Words(), split_of()
    bench.base = embed_entries(bench.dense, bench.tokenizer, bench.split.validation)
    bench.batches = list(prune.same_lengths(bench.tokenizer, TEXTS))
    monkeypatch.setattr(block_shapes, "Bench", lambda: bench)
    monkeypatch.setattr(block_shapes, "predicted", lambda *a: {"predicted_dense_f32": 1.0})
    arguments = ["x", "--out", str(tmp_path / "x.csv"), "--blocks", "4x1", "8x4", "--densities", "0.5"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert block_shapes.main() == 0
    rows = block_shapes.read(tmp_path / "x.csv")
    tall, square = rows["4x1", "0.5", "ffn", "0"], rows["8x4", "0.5", "ffn", "0"]
    assert 0.9 < float(square["cosine"]) <= float(tall["cosine"]) <= 1
    assert tall["predicted_dense_f32"] == "1.0000" and tall["steps"] == "0"
    monkeypatch.setattr(bench, "sparse", lambda *a: pytest.fail("made again"))
    assert block_shapes.main() == 0
    shapes = list(block_shapes.layers_of(bench.dense, "ffn").values())
    assert shapes == [(32, 16), (16, 32)] * 2
    assert len(block_shapes.layers_of(bench.dense, "all")) == 12


def test_layers_are_timed_in_turns() -> None:
    found = block_shapes.measured([(32, 16), (16, 32)], "4x1", 0.5, rounds=1)
    assert set(found) == {f"measured_{kind}_{d}" for kind in ("dense", "sparse") for d in ("f32", "bf16")}
    assert all(time > 0 for time in found.values())
