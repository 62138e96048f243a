"""Products of shapes that nobody asked for, beside cuBLAS: where kernels are slower than dense, or behind.

python bench/gpu_shapes.py                   # 18 shapes, 1,200 products; prints what falls behind
python bench/gpu_shapes.py --csv FILE --all  # prints all
python bench/gpu_shapes.py --shapes 777x3072x8192,300x4096x4096

Tokens × in → out that are no powers of two, of real models, wide, narrow, odd: gpu_reached.py has what
kernels are tuned for. Bf16, linear and both gradients, X by token and by feature where that matters, in a
graph of one call after another; results are checked before. "behind": more than 15 points and 10 us short of
what gpu_reached.py asks of 8192 × 4096 → 4096; "loses": slower than dense.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from gpu_reached import DENSITIES, LESS, MORE_US, SQUARES, TALL, Row, microseconds, products
from rows import write_csv
from run import git_commit

SHAPES = (
    *("2048x4096x4096", "1024x4096x4096", "2048x8192x8192", "4096x5120x5120", "8192x2048x2048"),
    *("2048x4096x1024", "8192x5120x13824", "16384x1024x4096", "12608x768x768", "300x4096x4096"),
    *("1000x2560x10240", "128x8192x8192", "4096x8192x1024", "2048x1536x6144", "777x3072x8192"),
    *("2048x777x1001", "2048x768x50257", "8192x4095x4097"),
)
TOTAL_US = 700  # of calls in a graph


def measure(row: Row, dense_us: float) -> dict[str, object]:
    """A row of the file."""
    us = microseconds(row.sparse, TOTAL_US).us
    work = 100 * row.density * dense_us
    if row.unit == "%":
        allowed = max(work / max(row.required - LESS, 1), work / row.required + MORE_US)
    else:
        allowed = dense_us / row.required + MORE_US
    verdict = "loses" if us > 1.02 * dense_us else "behind" if us > allowed else ""
    return {
        "case": row.case,
        "sparse_us": f"{us:.1f}",
        "dense_us": f"{dense_us:.1f}",
        "speedup": f"{dense_us / us:.2f}",
        "efficiency": f"{work / us:.0f}",
        "verdict": verdict,
    }


def main() -> None:
    """Prints rows as they come, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description="Shapes that nobody asked for, beside cuBLAS.")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="tokens x in x out, with commas")
    parser.add_argument("--all", action="store_true", help="print what is as fast as asked, too")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    found = []
    with torch.no_grad():
        for shape in (tuple(map(int, text.split("x"))) for text in args.shapes.split(",")):
            for block in SQUARES + TALL:
                for at in range(len(DENSITIES)):
                    dense: dict[str, float] = {}
                    for row in products(shape, block, at):
                        op = row.case.split()[0]
                        if op not in dense:
                            dense[op] = microseconds(row.dense, TOTAL_US).us
                        found.append(measure(row, dense[op]))
                        if args.all or found[-1]["verdict"]:
                            print(*found[-1].values(), flush=True)
    for verdict in ("loses", "behind"):
        print(f"{sum(row['verdict'] == verdict for row in found)} of {len(found)}: {verdict}")
    if args.csv and found:
        common = {
            "machine": torch.cuda.get_device_name(),
            "date": time.strftime("%F"),
            "commit": git_commit(),
            "torch": torch.__version__,
            "command": f"python bench/gpu_shapes.py --shapes {args.shapes}",
        }
        write_csv(args.csv, [row | common for row in found])


if __name__ == "__main__":
    main()
