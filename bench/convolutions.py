"""Convolutions of ResNet's sizes, dense against sparse on the CPU: forward, and a training step of the layer.

Images are channels_last, as both want them; a step is forward and backward with gradients to images, weight
and bias. Milliseconds are medians, in turns with dense.

python bench/convolutions.py                            # on torch's threads
python bench/convolutions.py --threads 1 --block 8x1 --density 0.3 --csv out.csv
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rarefy import BlockSparseConv2d
from rarefy.timing import measure_pair, quietest
from rows import write_csv

# Images, channels, output channels, rows and columns, kernel, stride.
CASES = (
    (8, 64, 64, 56, 3, 1),
    (8, 128, 128, 28, 3, 1),
    (8, 256, 256, 14, 3, 1),
    (8, 512, 512, 7, 3, 1),
    (1, 64, 64, 56, 3, 1),
    (1, 256, 256, 14, 3, 1),
    (8, 128, 256, 28, 3, 2),
    (2, 3, 64, 224, 7, 2),
)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def step(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Forward and backward."""
    layer.zero_grad()
    x.grad = None
    layer(x).backward(gradient)


def measure(case: tuple[int, ...], dtype: str, block: tuple[int, int], density: float) -> dict[str, Any]:
    """A row: milliseconds of dense and sparse, and how many times as fast that is."""
    images, channels, out, side, kernel, stride = case
    dense = nn.Conv2d(channels, out, kernel, stride, kernel // 2).to(
        DTYPES[dtype], memory_format=torch.channels_last
    )
    sparse = BlockSparseConv2d.from_dense(dense, block_shape=block, density=density)
    x = torch.randn(images, channels, side, side).to(DTYPES[dtype], memory_format=torch.channels_last)
    with torch.inference_mode():
        forward = quietest(lambda: measure_pair(partial(dense, x), partial(sparse, x)))
        gradient = torch.randn_like(dense(x))
    gradient, x = gradient.clone(), x.requires_grad_()
    steps = quietest(
        lambda: measure_pair(partial(step, dense, x, gradient), partial(step, sparse, x, gradient))
    )
    row: dict[str, Any] = {
        "case": f"{images}x{channels}x{side}x{side} {kernel}x{kernel}/{stride} -> {out}",
        "dtype": dtype,
        "block": f"{block[0]}x{block[1]}",
        "density": density,
        "threads": torch.get_num_threads(),
    }
    for name, times in (("forward", forward), ("step", steps)):
        row[f"{name}_dense_ms"] = round(times.dense.median, 3)
        row[f"{name}_sparse_ms"] = round(times.sparse.median, 3)
        row[f"{name}_times_dense"] = round(times.dense.median / times.sparse.median, 2)
        row[f"{name}_noise"] = times.noise or ""
    return row


def main() -> int:
    """Prints a row for each case, dtype and density."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block", default="16x1", help="output × input channels (default: %(default)s)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.5, 0.25, 0.1])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows, cols = (int(side) for side in args.block.split("x"))
    results = []
    for case in CASES:
        for dtype in args.dtype:
            for density in args.density:
                row = measure(case, dtype, (rows, cols), density)
                results.append(row)
                print(*row.values(), flush=True)
    if args.csv:
        command = f"python bench/convolutions.py --threads {args.threads} --block {args.block}"
        write_csv(args.csv, [row | {"command": command} for row in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
