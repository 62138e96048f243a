"""The report of sparsify: one row a layer, as a table, a dict, JSON and an HTML page."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .backend import backend_info
from .timing import Timing

COLUMNS = (
    "layer",
    "shape",
    "format",
    "density",
    "dense kB",
    "sparse kB",
    "dense ms",
    "sparse ms",
    "speedup",
    "",
)


def environment() -> dict[str, Any]:
    """What figures were measured on: without it they mean nothing."""
    info = backend_info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rarefy": info["version"],
        "torch": torch.__version__,
        "cpu": info.get("cpu"),
        "threads": torch.get_num_threads(),
        "cuda_devices": info.get("cuda_devices", []),
        "forced_impl": info.get("forced_impl"),
    }


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
    dense_time: Timing | None = None
    sparse_time: Timing | None = None

    @property
    def speedup(self) -> float | None:
        """Dense time / sparse time; None where nothing was measured."""
        if self.dense_time is None or self.sparse_time is None:
            return None
        return self.dense_time.median / self.sparse_time.median

    @property
    def is_slower(self) -> bool:
        """Whether the sparse layer was measured, and slower than the dense one."""
        return self.speedup is not None and self.speedup < 1

    @property
    def is_noisy(self) -> bool:
        """Whether quartiles of a measured time lie further apart than a factor of 1.5."""
        return any(t is not None and t.upper > 1.5 * t.lower for t in (self.dense_time, self.sparse_time))

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
        row["skipped"] = self.reason
        return row


@dataclass
class Report:
    """What sparsify did, or with dry_run would do: iterable over its rows. `print(report)` shows a table."""

    rows: list[LayerRow]
    tokens: int = 512  # rows of x in the measured calls
    dry_run: bool = False
    environment: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LayerRow]:  # noqa: D105
        return iter(self.rows)

    def __len__(self) -> int:  # noqa: D105
        return len(self.rows)

    def __getitem__(self, name: str) -> LayerRow:
        """The row of the layer with this name; KeyError if there is none."""
        for row in self.rows:
            if name == row.name or name in row.also:
                return row
        raise KeyError(name)

    @property
    def replaced(self) -> list[LayerRow]:
        """The rows of layers that became sparse."""
        return [row for row in self.rows if row.reason is None]

    @property
    def skipped(self) -> list[LayerRow]:
        """The rows of layers that a pattern matches and that stayed as they are."""
        return [row for row in self.rows if row.matched and row.reason is not None]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the replaced weights before."""
        return sum(row.dense_bytes for row in self.replaced)

    @property
    def sparse_bytes(self) -> int:
        """Bytes of the replaced weights after, indices included."""
        return sum(row.sparse_bytes for row in self.replaced)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for json."""
        return {
            "dry_run": self.dry_run,
            "tokens": self.tokens,
            "environment": dict(self.environment),
            "total": {
                "replaced": len(self.replaced),
                "skipped": len(self.skipped),
                "dense_bytes": self.dense_bytes,
                "sparse_bytes": self.sparse_bytes,
            },
            "layers": [row.to_dict() for row in self.rows],
        }

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Writes to_dict() as JSON."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page: the table, and plots of speed and bytes for each layer."""
        from .report_html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def summary(self) -> str:
        """A few sentences: how many layers and bytes, noisy figures, and which are slower than dense."""
        verb = "would become" if self.dry_run else "became"
        text = f"{len(self.replaced)} layers {verb} sparse, {len(self.skipped)} matched and stayed dense."
        dense, sparse = self.dense_bytes, self.sparse_bytes
        if dense:
            text += (
                f" Weights: {dense / 1e6:.2f} MB dense, {sparse / 1e6:.2f} MB sparse ({sparse / dense:.0%})."
            )
        if noisy := sum(row.is_noisy for row in self.rows):
            text += f" Times that vary by more than 1.5x: {noisy} (measure again on an idle machine)."
        slower = [row.name for row in self.rows if row.is_slower]
        if slower:
            text += f" Slower than dense at {self.tokens} tokens: {', '.join(slower)}."
        return text

    def __str__(self) -> str:
        """A table of the matched layers; those that no pattern matches are counted below it."""
        lines = [cells(row) for row in self.rows if row.matched]
        text = f"{_table([COLUMNS, *lines])}\n\n{self.summary()}"
        unmatched = len(self.rows) - len(lines)
        if unmatched:
            text += f" No pattern matches {unmatched} other layers."
        return text


def cells(row: LayerRow) -> tuple[str, ...]:
    """A row as text, under COLUMNS."""

    def number(value: float | None, pattern: str) -> str:
        return "" if value is None else format(value, pattern)

    name = " = ".join((row.name, *row.also))
    shape = "" if row.shape is None else "x".join(map(str, row.shape))
    sizes = [number(b and b / 1e3, ".1f") for b in (row.dense_bytes, row.sparse_bytes)]
    times = [number(t and t.median, ".3f") for t in (row.dense_time, row.sparse_time)]
    speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
    note = f"stays: {row.reason}" if row.reason else "slower than dense" if row.is_slower else ""
    return (name, shape, row.format or "", number(row.density, ".3f"), *sizes, *times, speedup, note)


def _table(lines: list[tuple[str, ...]]) -> str:
    """Plain text, aligned: words left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, 1, 2, len(COLUMNS) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
