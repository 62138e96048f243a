"""Skewed patterns on a GPU against random ones of as many blocks, the three products of a layer.

Barabási–Albert: rows and columns are drawn as often as nodes of such a graph have neighbours (the i-th in
proportion to i^-1/2). One dense row: that, and the rest at random. Half of the rows empty: all in the other
half. Kernel time by replay of a CUDA graph, in turns; a result is compared with dense before it is timed.

python bench/gpu_skew.py                               # 8192 × 4096 → 4096; writes nothing
python bench/gpu_skew.py --blocks 64x64 128x1 --densities 0.25 --csv FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import rarefy
from gpu_layers import check
from rows import write_csv
from timing import graph_of, interleave

DTYPE = torch.bfloat16
OPS = torch.ops.rarefy


def kept(scores: Tensor, count: int) -> Tensor:
    """The `count` largest."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[scores.flatten().topk(count).indices] = True
    return mask.view_as(scores)


def patterns(rows: int, cols: int, count: int) -> dict[str, Tensor]:
    """Masks of (rows, cols) blocks with `count` of them."""
    uniform = torch.rand(rows, cols)
    degrees = [1 / (torch.randperm(n) + 1.0).sqrt() for n in (rows, cols)]
    dense_row = uniform.clone()
    dense_row[rows // 2] += 1
    half = uniform.clone()
    half[1::2] -= 1
    return {
        "random": kept(uniform, count),
        # The largest of log(u) / w: without replacement, each in proportion to w (Efraimidis and Spirakis).
        "Barabási–Albert": kept(uniform.log() / torch.outer(*degrees), count),
        "one dense row": kept(dense_row, count),
        "half of the rows empty": kept(half, count),
    }


def products(x: Tensor, dy: Tensor, mask: Tensor, block: tuple[int, int]) -> dict[str, Callable[[], Tensor]]:
    """Calls of the three products, linear checked."""
    size = (dy.shape[1], x.shape[1])
    pattern = rarefy.BsrPattern.from_mask(mask, shape=size, block_shape=block, device=x.device)
    values = torch.randn(pattern.nnzb, *block, device=x.device, dtype=x.dtype)
    w = rarefy.BsrWeight.from_pattern(values, pattern)
    layer = rarefy.BlockSparseLinear.from_weight(w)
    derived = w.derived(x)
    for_weight = (derived[0], derived[2]) if derived else ()
    check(layer(x), x @ w.to_dense().T)
    return {
        "linear": lambda: OPS.bsr_linear(x, w.values, w.plan, None, *size, *derived),
        "grad_input": lambda: OPS.bsr_grad_input(dy, w.values, w.plan, *size, *derived),
        "grad_weight": lambda: OPS.bsr_grad_weight(dy, x, w.plan, *block, *size, None, *for_weight),
    }


@torch.no_grad()
def measured(shape: tuple[int, int, int], block: tuple[int, int], density: float) -> list[dict]:
    """A row for each product and pattern."""
    tokens, cols, rows = shape
    x, dy = (torch.randn(tokens, n, device="cuda", dtype=DTYPE) for n in (cols, rows))
    grid = (rows // block[0], cols // block[1])
    masks = patterns(*grid, round(density * grid[0] * grid[1]))
    calls = {name: products(x, dy, mask, block) for name, mask in masks.items()}
    found = []
    for op in calls["random"]:
        times = interleave({name: graph_of(ops[op]) for name, ops in calls.items()}, "cuda", budget=0.2)
        random = times["random"].median
        for name, its in times.items():
            found.append(
                {"shape": "x".join(map(str, shape)), "block": f"{block[0]}x{block[1]}", "density": density,
                 "op": op, "pattern": name, "us": round(its.median * 1e6, 1),
                 "spread": "-".join(f"{t * 1e6:.1f}" for t in its.spread),
                 "of_random": round(random / its.median, 3)}
            )  # fmt: skip
        line = ", ".join(f"{name} {random / its.median:.2f}" for name, its in times.items())
        print(f"{block[0]}x{block[1]} at {density}, {op}: {random * 1e6:.1f} us; {line}", flush=True)
    return found


def main() -> None:
    """Prints a line for each product, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8192x4096x4096", help="tokens x in x out")
    blocks = ["128x128", "64x64", "32x32", "16x16", "128x1", "64x1", "32x1"]
    parser.add_argument("--blocks", nargs="+", default=blocks)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.25, 0.1])
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokens, cols, features = (int(size) for size in args.shape.split("x"))
    rows = []
    for text in args.blocks:
        r, c = (int(side) for side in text.split("x"))
        for density in args.densities:
            rows += measured((tokens, cols, features), (r, c), density)
    if args.csv:
        common = {"device": torch.cuda.get_device_name(), "date": time.strftime("%F"),
                  "torch": torch.__version__, "command": "python " + " ".join(sys.argv)}  # fmt: skip
        write_csv(args.csv, [row | common for row in rows])


if __name__ == "__main__":
    main()
