"""The report of sparsify: one row a layer, as a table, a dict, JSON and an HTML page."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import report_html
from .backend import backend_info
from .files import replacing
from .report_data import LayerRow, lines


def environment() -> dict[str, Any]:
    """What figures were measured on: without it they mean nothing."""
    info = backend_info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rarefy": info["version"],
        "torch": torch.__version__,
        "cpu": info.get("cpu"),
        "threads": torch.get_num_threads(),
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],  # of the last minute, our own work included
        "cuda_devices": info.get("cuda_devices", []),
        "forced_impl": info.get("forced_impl"),
    }


@dataclass
class Report:
    """What sparsify did, or with dry_run would do: iterable over its rows. `print(report)` shows a table."""

    rows: list[LayerRow]
    tokens: int = 512  # rows of x in the measured calls
    dry_run: bool = False
    networks: list[tuple[str, ...]] = field(default_factory=list)  # feed-forward ones, by their layers' names
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
            "networks": [list(names) for names in self.networks],
            "layers": [row.to_dict() for row in self.rows],
        }

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Writes to_dict() as JSON."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        with replacing(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page: the table, and plots of speed and bytes for each layer."""
        text = report_html.page(self.rows, self.summary(), self.tokens, self.environment)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        """The same for notebooks: the table, plots and footer, in a frame of their own style."""
        return report_html.fragment(self.rows, self.summary(), self.tokens, self.environment)

    def summary(self) -> str:
        """A few sentences: layers and bytes, noisy times, and layers that are slower or larger than dense."""
        verb = "would become" if self.dry_run else "became"
        text = f"{len(self.replaced)} layers {verb} sparse, {len(self.skipped)} matched and stayed dense."
        dense, sparse = self.dense_bytes, self.sparse_bytes
        if dense:
            text += (
                f" Weights: {dense / 1e6:.2f} MB dense, {sparse / 1e6:.2f} MB sparse ({sparse / dense:.0%})."
            )
        if self.networks:
            first, more = " > ".join(self.networks[0]), ", …" if len(self.networks) > 1 else ""
            text += (
                f" Feed-forward networks that may run as one op: {len(self.networks)} ({first}{more});"
                " their time is not the sum of their layers'."
            )
        if noisy := [row.name for row in self.rows if row.noise]:
            load, processors = (self.environment.get(key) for key in ("load", "processors"))
            busy = "" if load is None else f" (load {load:.1f} on {processors} processors)"
            text += (
                f" Times of {len(noisy)} layers are noise{busy}: measure again on an idle machine,"
                " no speedup is given for them."
            )
        if slower := [row.name for row in self.rows if row.is_slower]:
            text += f" Slower than dense at {self.tokens} tokens: {', '.join(slower)}."
        if any(row.on_images and row.times for row in self.rows):
            text += (
                " Convolutions were timed on channels_last images; contiguous ones are transposed on the way,"
                " but for 1×1 in float32: model.to(memory_format=torch.channels_last), x likewise."
            )
        if larger := [row.name for row in self.rows if row.is_larger]:
            text += f" Larger than dense, for the index: {', '.join(larger)}."
        return text

    def __str__(self) -> str:
        """A table of the matched layers; those that no pattern matches are counted below it."""
        matched = [row for row in self.rows if row.matched]
        text = f"{_table(lines(matched))}\n\n{self.summary()}"
        unmatched = len(self.rows) - len(matched)
        if unmatched:
            text += f" No pattern matches {unmatched} other layers."
        return text


def _table(rows: list[tuple[str, ...]]) -> str:
    """Plain text, aligned: words left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, 1, 2, len(widths) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in rows
    )
