"""What a sparsifier did, layer by layer: printed, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..files import replacing


@dataclass(frozen=True)
class Row:
    """One weight: its name, shape and pattern, the sparsity that was asked for, and what its mask has."""

    name: str
    shape: tuple[int, ...]
    pattern: str
    target: float  # sparsity in force
    actual: float  # part of the elements that the mask removes
    nnz: int  # elements that stay
    empty_rows: int
    empty_columns: int


@dataclass(frozen=True)
class Table:
    """The rows, and the totals over them."""

    rows: list[Row]

    @classmethod
    def of(cls, *columns: Iterable[Any]) -> Table:
        """Of names, shapes, patterns, sparsities asked for, and masks (Mask), one each for every weight."""
        rows = []
        for name, shape, pattern, target, mask in zip(*columns, strict=True):
            bits = mask.unpack()
            empty = [int((~bits.any(dim)).sum()) for dim in (1, 0)]
            rows.append(Row(name, shape, pattern, target, 1 - mask.density, mask.kept, *empty))
        return cls(rows)

    def __iter__(self) -> Iterator[Row]:  # noqa: D105
        return iter(self.rows)

    def __len__(self) -> int:  # noqa: D105
        return len(self.rows)

    def __getitem__(self, name: str) -> Row:
        """The row of this tensor; KeyError if there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def sparsity(self) -> float:
        """Elements removed / all elements, over all rows."""
        total = sum(_size(row.shape) for row in self.rows)
        return 1 - sum(row.nnz for row in self.rows) / total if total else 0.0

    def __str__(self) -> str:  # noqa: D105
        heads = ["weight", "shape", "pattern", "target", "actual", "nnz", "empty rows", "empty columns"]
        lines = [heads]
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            numbers = [f"{row.target:.4f}", f"{row.actual:.4f}", str(row.nnz)]
            lines.append(
                [row.name, shape, row.pattern, *numbers, str(row.empty_rows), str(row.empty_columns)]
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        text = "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )
        return f"{text}\nsparsity of all: {self.sparsity:.4f}"

    def to_csv(self) -> str:
        """One line a row, with a head."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(field.name for field in fields(Row))
        for row in self.rows:
            writer.writerow(
                [("x".join(map(str, v)) if isinstance(v, tuple) else v) for v in asdict(row).values()]
            )
        return out.getvalue()

    def to_json(self) -> str:
        """The rows as a list of objects."""
        return json.dumps([asdict(row) for row in self.rows], indent=2)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes to_json() for a path that ends in .json, else to_csv(), in one step."""
        text = self.to_json() + "\n" if os.fspath(path).endswith(".json") else self.to_csv()
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
