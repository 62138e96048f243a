"""What a saved model holds, and how fast its layers are here: python -m rarefy report, and bench.

A model is a file of save_file, a folder of transformers (also in shards, and dense), or any safetensors file.
No architecture is needed: layers are what the tensors say.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .auto import Auto
from .checks import check_int, fail
from .loading import entries_in
from .log import progress
from .modules import BlockSparseLinear
from .report import Report, environment
from .report_data import LayerRow
from .serialization import KEY, METHOD, build, format_of
from .sparse_weight import SparseWeight
from .spec import Spec
from .timing import time_layers


def report_folder(
    path: str | os.PathLike[str],
    *,
    spec: str | Spec | None = None,
    measure: bool = False,
    tokens: int = 512,
) -> Report:
    """Reports on the layers of a saved model: what is sparse, how, and what that saves.

    Args:
        path: a safetensors file, or a folder with some and a config.json.
        spec: what dense layers would become, as in rarefy.sparsify of a model in eval mode, also "auto"
            and "auto:any"; None: they are listed as they are.
        measure: time each kind of sparse layer on this machine against a dense one of its size.
        tokens: rows of x in that.

    Returns a Report with a row for each matrix that a layer may multiply by.

    Raises ValueError for files that are not valid, with file and key; OSError where one cannot be read.
    """
    op = "report_folder"
    check_int(op, "tokens", tokens, 1)
    target = None if spec is None else Auto.parse(spec, op) or Spec.parse(spec, op)
    rows: list[LayerRow] = []
    timed = _Timed() if measure else None
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(op, _files(op, Path(path)), stack)
        sparse = _entries(op, Path(path), tensors.metadata)
        pieces = set()
        for name, value in progress(sparse.items(), "reading layers"):
            kind, entry = format_of(op, name, value)
            found = {f"{name}.{p}": tensors[f"{name}.{p}"] for p in kind.pieces if f"{name}.{p}" in tensors}
            pieces |= found.keys()
            weight = build(op, name, found, kind, entry)
            rows.append(_row(name, weight))
            if timed is not None:
                timed.add(rows[-1], weight)
        for name in progress([n for n in tensors.matrices() if n not in pieces], "reading matrices"):
            dense = tensors[name]
            row = LayerRow(name.removesuffix(".weight"), [], tuple(dense.shape))
            rows.append(row)
            zeros = 1 - int(torch.count_nonzero(dense)) / max(1, dense.numel())
            row.reason = f"dense, {zeros:.0%} zeros"
            if target is not None and dense.is_floating_point():
                chosen, row.predicted = _chosen(target, dense, tokens)
                row.reason = chosen if isinstance(chosen, str) else chosen.why_not(tuple(dense.shape))
                if row.reason is None:
                    made = chosen.make(dense)
                    rows[-1] = _row(name, made)
                    rows[-1].format, rows[-1].predicted = chosen.format + chosen.suffix, row.predicted
                    if timed is not None:
                        timed.add(rows[-1], made)
    if timed is not None:
        timed.run(tokens)
    return Report(rows, tokens=tokens, dry_run=target is not None, environment=environment())


def _chosen(
    target: Auto | Spec, dense: torch.Tensor, tokens: int
) -> tuple[Spec | str, tuple[float, float] | None]:
    """What a matrix becomes, or why it stays; with predicted milliseconds where "auto" chose."""
    if isinstance(target, Spec):
        return target, None
    linear = nn.Linear(*reversed(dense.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(dense, requires_grad=False)
    return target.chosen(linear.eval(), tokens)


class _Timed:
    """Layers to be timed: of those that are alike one is kept in memory, dense and sparse."""

    def __init__(self) -> None:
        self.first: dict[Any, tuple[LayerRow, nn.Linear, BlockSparseLinear]] = {}
        self.others: list[tuple[LayerRow, Any]] = []

    def add(self, row: LayerRow, weight: SparseWeight) -> None:
        """Takes a row and its weight."""
        key = (row.shape, row.format, row.density, weight.dtype, weight.x_dtype)
        if key in self.first:
            self.others.append((row, key))
        else:
            self.first[key] = (row, *_pair(weight))

    def run(self, tokens: int) -> None:
        """Times them and fills the rows in."""
        time_layers(list(self.first.values()), tokens)
        for row, key in self.others:
            row.times, row.timed_as = self.first[key][0].times, self.first[key][0].name


def _row(name: str, weight: Any) -> LayerRow:
    row = LayerRow(name.removesuffix(".weight"), [], tuple(weight.shape))
    row.format, row.density, row.sparse_bytes = weight.spec_format(), weight.density, weight.nbytes
    row.dense_bytes = weight.numel() * (weight.x_dtype or weight.dtype).itemsize
    return row


def _pair(weight: Any) -> tuple[nn.Linear, BlockSparseLinear]:
    sparse = BlockSparseLinear.from_weight(weight).requires_grad_(False).eval()
    return sparse.to_dense().requires_grad_(False).eval(), sparse


class _Tensors:
    """The tensors of several files, read when they are asked for."""

    def __init__(self, op: str, files: list[Path], stack: contextlib.ExitStack) -> None:
        self.metadata: list[Mapping[str, str]] = []
        self.places: dict[str, Any] = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                fail(op, f"{path.name} must be a safetensors file", error)
            self.metadata.append(file.metadata() or {})
            self.places |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.places[name].get_tensor(name)

    def matrices(self) -> Iterator[str]:
        """Names of what layers may multiply by: matrices called weight, but for embeddings."""
        for name in sorted(self.places):
            layer = name.endswith("weight") and "embed" not in name
            if layer and len(self.places[name].get_slice(name).get_shape()) == 2:
                yield name


def _files(op: str, path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"[{op}] path must be a file or a folder; got {path}")
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = _names_in_index(op, index)
        for name in names:
            if not (path / name).is_file():
                fail(
                    op,
                    f"the folder must hold {name}, which its index names",
                    "no such file",
                    FileNotFoundError,
                )
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        fail(op, "the folder must hold safetensors files", path)
    return files


def _names_in_index(op: str, index: Path) -> list[str]:
    """The files that an index names, which must lie beside it."""
    try:
        found = json.loads(index.read_text("utf-8"))["weight_map"].values()
        names = sorted(set(found))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        fail(op, f"{index.name} must be a JSON object with a weight_map of names", repr(error))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            fail(op, f"{index.name} must name files beside it", repr(name))
    return names


def _entries(op: str, path: Path, metadata: list[Mapping[str, str]]) -> dict[str, Any]:
    """What is sparse, as config.json says, or the files themselves; nothing in a dense model."""
    config = path / "config.json"
    if path.is_dir() and config.exists():
        try:
            found = json.loads(config.read_text("utf-8")).get("quantization_config") or {}
        except (ValueError, AttributeError) as error:
            fail(op, "config.json must be a JSON object", error)
        if not isinstance(found, Mapping):
            fail(op, "quantization_config of config.json must be an object", type(found).__name__)
        if found.get("quant_method") == METHOD:
            modules = found.get("modules") or {}
            if not isinstance(modules, Mapping):
                fail(op, "modules in config.json must be an object", type(modules).__name__)
            return dict(modules)
    merged: dict[str, Any] = {}
    for entry in metadata:
        merged |= entries_in(op, entry) if KEY in entry else {}
    return merged


# python -m rarefy report, and bench ----------------------------------------------------------------


def main(argv: list[str], *, measure: bool) -> int:
    """Prints what a saved model holds; `bench` also times its layers here. Exit code 1 for bad input."""
    prog = f"python -m rarefy {'bench' if measure else 'report'}"
    parser = argparse.ArgumentParser(prog=prog, description=main.__doc__)
    parser.add_argument("path", help="safetensors file, or a folder of transformers")
    parser.add_argument(
        "--spec", help='what dense layers would become: "block:16x16@0.5", "csr@0.1", "auto:any" …'
    )
    parser.add_argument("--tokens", type=int, default=512, help="rows of x (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", help="write a page with plots there")
    args = parser.parse_args(argv)
    try:
        found = report_folder(args.path, spec=args.spec, measure=measure, tokens=args.tokens)
        if args.html:
            found.write_html(args.html)
    except (ValueError, TypeError, OSError) as error:
        print(f"rarefy: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0
