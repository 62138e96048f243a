"""What a report says of one layer, as plain data, and the text of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .timing import Times, Timing

COLUMNS = (
    "layer",
    "shape",
    "format",
    "density",
    "speedup",
    "dense ms",
    "sparse ms",
    "dense kB",
    "sparse kB",
    "",
)


@dataclass
class LayerRow:
    """One layer: what it became and what that changed, or the reason why it stayed.

    Bytes are those of the weight as it is saved, indices included. Times are of one forward call.
    """

    name: str
    also: list[str]  # further names of the same module
    shape: tuple[int, ...] | None
    matched: bool = True
    reason: str | None = None
    format: str | None = None
    density: float | None = None
    dense_bytes: int | None = None
    sparse_bytes: int | None = None
    times: Times | None = None
    timed_as: str | None = None  # the equal layer that was timed instead
    on_images: bool = False  # a convolution, timed on channels_last
    predicted: tuple[float, float] | None = None  # ms of dense and sparse, where "auto" chose

    @property
    def dense_time(self) -> Timing | None:
        """Of the dense layer; None where nothing was measured."""
        return self.times and self.times.dense

    @property
    def sparse_time(self) -> Timing | None:
        """Of the sparse layer; None where nothing was measured."""
        return self.times and self.times.sparse

    @property
    def speedup(self) -> float | None:
        """Dense time / sparse time; None where nothing was measured, or nothing but noise."""
        return self.times and self.times.speedup

    @property
    def noise(self) -> str | None:
        """Why the times say nothing about the layer, or None."""
        return self.times and self.times.noise

    @property
    def is_slower(self) -> bool:
        """Whether the sparse layer was measured, and slower than the dense one."""
        return self.speedup is not None and self.speedup < 1

    @property
    def is_larger(self) -> bool:
        """Whether the sparse weight, with its indices, takes more bytes than the dense one."""
        return self.sparse_bytes is not None and self.sparse_bytes > self.dense_bytes

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values; times in milliseconds."""
        row: dict[str, Any] = {
            "name": self.name,
            "also": list(self.also),
            "shape": None if self.shape is None else list(self.shape),
            "format": self.format,
            "density": self.density,
            "dense_bytes": self.dense_bytes,
            "sparse_bytes": self.sparse_bytes,
        }
        for key, timing in (("dense", self.dense_time), ("sparse", self.sparse_time)):
            row[f"{key}_ms"] = timing.median if timing else None
            row[f"{key}_ms_quartiles"] = [timing.lower, timing.upper] if timing else None
        row["rounds"] = self.dense_time.rounds if self.dense_time else None
        row["speedup"] = self.speedup
        row["noise"] = self.noise
        row["waited"] = self.times.waited if self.times else None
        row["timed_as"] = self.timed_as
        row["predicted_ms"] = None if self.predicted is None else list(self.predicted)
        row["skipped"] = self.reason
        return row


def lines(rows: Sequence[LayerRow]) -> list[tuple[str, ...]]:
    """The head of a table and its rows as text; with what was predicted, if anything was."""
    all_of_them = [COLUMNS, *map(_cells, rows)]
    if not any(row.predicted for row in rows):
        return all_of_them
    said = [(row.predicted and f"{row.predicted[0] / row.predicted[1]:.2f}x") or "" for row in rows]
    at = COLUMNS.index("speedup") + 1
    return [
        (*line[:at], text, *line[at:]) for line, text in zip(all_of_them, ["predicted", *said], strict=True)
    ]


def _cells(row: LayerRow) -> tuple[str, ...]:
    """A row as text, under COLUMNS."""

    def number(value: float | None, pattern: str) -> str:
        return "" if value is None else format(value, pattern)

    name = " = ".join((row.name, *row.also))
    shape = "" if row.shape is None else "x".join(map(str, row.shape))
    sizes = [number(b and b / 1e3, ".1f") for b in (row.dense_bytes, row.sparse_bytes)]
    times = [number(t and t.median, ".3f") for t in (row.dense_time, row.sparse_time)]
    speedup = "noise" if row.noise else "" if row.speedup is None else f"{row.speedup:.2f}x"
    notes = [
        f"stays: {row.reason}" if row.reason else "",
        "slower than dense" if row.is_slower else row.noise or "",
        "larger than dense" if row.is_larger else "",
    ]
    note = "; ".join(filter(None, notes))
    return (name, shape, row.format or "", number(row.density, ".3f"), speedup, *times, *sizes, note)
