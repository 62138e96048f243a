"""Sparse matrices outside of layers beside scipy, torch (MKL) and memory: f32, int32 indices, in turns.

Transposes beside a copy of their indices and values; matrix × vector beside reading as many bytes, values and
indices of 32 bits, by rarefy_peak; matrix × matrix at several densities; sums, slices and joins; sparse ×
sparse; a product beside the layer of the same weight, and one with arrays that each call checks beside a
matrix that holds them.
Results are compared before they are timed. One thread's time is the processor's; with more it is the wall's.
A row's figure is from the best turn of each.

python bench/matrices.py --threads 2 --csv out.csv
python bench/matrices.py --only transpose
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import nn

import rarefy
from feed_forward import measure
from rarefy import sparse
from reached import Calls, arguments, measured_ceiling
from rows import write_csv
from run import cpu_name, git_commit

COLUMNS = 128  # of the dense side of a matrix × matrix
Measured = tuple[str, Calls, int]  # its name, everybody's call, and bytes to compare with reading, or 0


class Case:
    """A random matrix, as everybody holds it."""

    def __init__(self, rows: int, columns: int, density: float, seed: int = 0) -> None:
        """Rows with about as many elements each."""
        random = np.random.default_rng(seed)
        self.density = density
        self.scipy = scipy.sparse.random_array(
            (rows, columns), density=density, format="csr", dtype=np.float32, rng=random
        )
        self.scipy.sort_indices()
        self.arrays = [torch.from_numpy(a) for a in (self.scipy.indptr, self.scipy.indices, self.scipy.data)]
        self.torch = torch.sparse_csr_tensor(*self.arrays, (rows, columns), check_invariants=False)
        indptr, indices, data = self.arrays
        self.ours = sparse.SparseMatrix(data, indices, indptr, shape=(rows, columns))
        self.text = f"{rows} x {columns} at {density:g}"
        self.bytes = data.nbytes + indices.nbytes


def transposes(case: Case) -> Measured:
    """Wᵀ in the same form."""
    _, indices, data = case.arrays
    want = case.scipy.T.tocsr()
    got = sparse.sparse_transpose(case.ours)
    if not np.array_equal(got.data.numpy(), want.data) or not np.array_equal(
        got.indices.numpy(), want.indices
    ):
        raise AssertionError("the transposes differ")
    calls = {
        "ours": lambda: sparse.sparse_transpose(case.ours),
        "scipy": lambda: case.scipy.T.tocsr(),
        "torch": lambda: case.torch.to_sparse_csc(),
        "copy": lambda: (indices.clone(), data.clone()),
    }
    return f"transpose {case.text}", calls, 0


def products(case: Case, columns: int) -> Measured:
    """W b for a vector, or for a matrix of some columns."""
    b = torch.randn(case.scipy.shape[1], columns) if columns > 1 else torch.randn(case.scipy.shape[1])
    array = b.numpy()
    torch.testing.assert_close(case.ours @ b, torch.from_numpy(case.scipy @ array), rtol=1e-3, atol=1e-3)
    calls = {
        "ours": lambda: case.ours @ b,
        "scipy": lambda: case.scipy @ array,
        "torch": lambda: case.torch @ b,
    }
    what = "matrix x vector" if columns == 1 else f"matrix x {columns} columns"
    return f"{what} {case.text}", calls, case.bytes if columns == 1 else 0


def sums(case: Case) -> Measured:
    """W + V of another pattern."""
    other = Case(*case.scipy.shape, case.density, seed=1)
    torch.testing.assert_close(
        (case.ours + other.ours).to_dense(), torch.from_numpy((case.scipy + other.scipy).toarray())
    )
    calls = {
        "ours": lambda: case.ours + other.ours,
        "scipy": lambda: case.scipy + other.scipy,
        "torch": lambda: case.torch + other.torch,
    }
    return f"sum {case.text}", calls, 0


def parts(case: Case, what: str) -> Measured:
    """Half of the rows or of the columns, or W below or beside itself."""
    half, (w, ours) = case.scipy.shape[0] // 2, (case.scipy, case.ours)
    calls = {
        "rows": {"ours": lambda: ours[:half], "scipy": lambda: w[:half]},
        "columns": {"ours": lambda: ours[:, half:], "scipy": lambda: w[:, half:]},
        "below": {
            "ours": lambda: sparse.sparse_concat([ours, ours]),
            "scipy": lambda: scipy.sparse.vstack([w, w], format="csr"),
        },
        "beside": {
            "ours": lambda: sparse.sparse_concat([ours, ours], dim=1),
            "scipy": lambda: scipy.sparse.hstack([w, w], format="csr"),
        },
    }[what]
    got, want = calls["ours"](), calls["scipy"]()
    if not np.array_equal(got.indptr.numpy(), want.indptr) or not np.array_equal(got.data.numpy(), want.data):
        raise AssertionError("the parts differ")
    return f"{what} {case.text}", calls, 0


def sparse_products(case: Case) -> Measured:
    """W W; torch's (MKL) and scipy's come unsorted."""
    want = case.scipy @ case.scipy
    torch.testing.assert_close(
        sparse.sparse_matmul(case.ours, case.ours).to_dense(), torch.from_numpy(want.toarray())
    )

    def in_order() -> None:
        (case.scipy @ case.scipy).sort_indices()

    calls = {
        "ours": lambda: sparse.sparse_matmul(case.ours, case.ours),
        "scipy": in_order,
        "scipy unsorted": lambda: case.scipy @ case.scipy,
        "torch": lambda: case.torch @ case.torch,
    }
    return f"sparse x sparse {case.text}", calls, 0


def layers(tokens: int, spec: str) -> Measured:
    """sparse_dense of a matrix that is held, beside the layer with the same weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 3072))
    rarefy.sparsify(model, {"0": spec}, measure=False)
    layer, x = model[0], torch.randn(tokens, 768)
    w = layer.weight
    held = sparse.SparseMatrix(w.values.detach(), w.col_indices, w.crow_indices, shape=tuple(w.shape))
    torch.testing.assert_close(sparse.sparse_dense(x, held, layer.bias), layer(x))
    calls = {
        "ours": lambda: sparse.sparse_dense(x, held, layer.bias),
        "layer": lambda: layer(x),
    }
    return f"sparse_dense {spec} 768 -> 3072, {tokens} tokens", calls, 0


def raw_arrays(block: tuple[int, int], density: float, tokens: int, index: torch.dtype) -> Measured:
    """A product with arrays that each call checks, beside one with a matrix that holds them: 768→3072."""
    grid = 3072 // block[0], 768 // block[1]
    mask = rarefy.masks.random_blocks(grid, density, torch.Generator().manual_seed(0))
    pattern = rarefy.BsrPattern.from_mask(mask, shape=(3072, 768), block_shape=block)
    indptr, indices = (part.to(index) for part in pattern.indices())
    shape = (pattern.nnzb,) if block == (1, 1) else (pattern.nnzb, *block)
    arrays = torch.randn(shape), indices, indptr
    held = sparse.SparseMatrix(*arrays, shape=(3072, 768))
    x = torch.randn(tokens, 768)
    torch.testing.assert_close(sparse.sparse_dense(x, arrays), sparse.sparse_dense(x, held))
    calls = {
        "ours": lambda: sparse.sparse_dense(x, arrays),
        "held": lambda: sparse.sparse_dense(x, held),
    }
    name = "x".join(map(str, block))
    text = (
        f"raw arrays, {pattern.nnzb} {str(index).removeprefix('torch.')} indices of {name}, {tokens} tokens"
    )
    return text, calls, 0


def cases() -> Iterator[Any]:
    """What is measured, each made when its turn comes."""
    for size in ((10_000, 10_000, 0.1), (1_000_000, 1_000_000, 1e-5)):
        yield "transpose", lambda size=size: transposes(Case(*size))
    dense = (3000, 3000, 0.1), (60_000, 3000, 0.1), (16_000, 16_000, 0.05)
    short = (4096, 4096, 0.01), (20_000, 20_000, 0.01), (20_000, 20_000, 0.003), (200_000, 200_000, 1e-4)
    vectors = *dense, *short, (1_000_000, 1_000_000, 5e-6)
    for size in vectors:
        yield "vector", lambda size=size: products(Case(*size), 1)
    for density in (0.3, 0.1, 0.03, 0.01, 0.003):
        yield "columns", lambda density=density: products(Case(4096, 4096, density), COLUMNS)
    for size in ((768, 768, 0.01), (3072, 768, 0.01), (768, 768, 0.1), (4096, 4096, 0.01)):
        for few in (2, 4, 8, 15, 32):
            yield "few", lambda size=size, few=few: products(Case(*size), few)
    for tokens in (1, 128):
        yield "layer", lambda tokens=tokens: layers(tokens, "block:16x1@0.25")
    for block, density in (((1, 1), 0.1), ((1, 1), 0.35), ((2, 2), 0.25), ((1, 16), 0.1), ((16, 1), 0.25)):
        for tokens in (1, 8, 32, 512):
            for index in (torch.int32, torch.int64):
                its = block, density, tokens, index
                yield "raw", lambda its=its: raw_arrays(*its)
    for size in ((4096, 4096, 0.05), (20_000, 20_000, 0.005)):
        yield "sum", lambda size=size: sums(Case(*size))
        for what in ("rows", "columns", "below", "beside"):
            yield "part", lambda size=size, what=what: parts(Case(*size), what)
    yield "sparse x sparse", lambda: sparse_products(Case(4000, 4000, 0.01))


def measured(make: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    text, calls, read = make()
    # Before and after: a shared host's memory is twice as fast a minute later.
    readings = [measured_ceiling(args, f"{read / 1e6:.2f}")[1]] if read else []
    with torch.no_grad():
        best = {name: min(turns) for name, turns in measure(calls, args.threads, args.rounds).items()}
    row: dict[str, Any] = {"case": text}
    for name in ("ours", "scipy", "scipy unsorted", "torch", "copy", "layer", "held"):
        row[f"{name}_ms"] = round(best[name] * 1e3, 4) if name in best else ""
    row["reading_share"] = ""
    if read:
        readings.append(measured_ceiling(args, f"{read / 1e6:.2f}")[1])
        row["reading_share"] = round(read / best["ours"] / max(readings), 2)
    return row


def main() -> None:
    """Prints a line a case, and writes all where --csv says."""
    args = arguments(__doc__)
    torch.set_num_threads(args.threads)
    same = {
        "machine": cpu_name(), "threads": args.threads, "date": time.strftime("%F"), "commit": git_commit(),
        "torch": torch.__version__, "scipy": scipy.__version__, "command": "python " + " ".join(sys.argv),
    }  # fmt: skip
    rows = []
    for name, make in cases():
        if args.only in name:
            rows.append(measured(make, args) | same)
            print(*(f"{key}={value}" for key, value in rows[-1].items() if value != "" and key not in same))
    if args.csv and rows:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
