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

from .checks import check_int, fail
from .loading import entries_in
from .log import progress
from .modules import BlockSparseLinear
from .report import Report, environment
from .report_data import LayerRow
from .serialization import KEY, build, format_of
from .sparse_weight import Spec
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
        spec: what dense layers would become, as in rarefy.sparsify; None: they are listed as they are.
        measure: time each kind of sparse layer on this machine against a dense one of its size.
        tokens: rows of x in that.

    Returns a Report with a row for each matrix that a layer may multiply by.

    Raises ValueError for files that are not valid, with file and key; OSError where one cannot be read.
    """
    op = "report_folder"
    check_int(op, "tokens", tokens, 1)
    target = None if spec is None else Spec.parse(spec, op)
    rows: list[LayerRow] = []
    measured: list[tuple[LayerRow, nn.Linear, BlockSparseLinear]] = []
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
            measured += [(rows[-1], *_pair(weight))] if measure else []
        for name in progress([n for n in tensors.matrices() if n not in pieces], "reading matrices"):
            dense = tensors[name]
            row = LayerRow(name.removesuffix(".weight"), [], tuple(dense.shape))
            rows.append(row)
            row.reason = f"dense, {float((dense == 0).double().mean()):.0%} zeros"
            if target is not None and dense.is_floating_point():
                row.reason = target.why_not(tuple(dense.shape))
                if row.reason is None:
                    made = target.make(dense)
                    rows[-1] = _row(name, made)
                    measured += [(rows[-1], *_pair(made))] if measure else []
    if measure:
        time_layers(measured, tokens)
    return Report(rows, tokens=tokens, dry_run=target is not None, environment=environment())


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
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
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


def _entries(op: str, path: Path, metadata: list[Mapping[str, str]]) -> dict[str, Any]:
    """What is sparse, as config.json says, or the files themselves; nothing in a dense model."""
    config = path / "config.json"
    if path.is_dir() and config.exists():
        try:
            found = json.loads(config.read_text("utf-8")).get("quantization_config") or {}
        except (ValueError, AttributeError) as error:
            fail(op, "config.json must be a JSON object", error)
        if found.get("quant_method") == "rarefy":
            return dict(found.get("modules") or {})
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
    parser.add_argument("--spec", help='what dense layers would become: "block:16x16@0.5", "csr@0.1" …')
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
