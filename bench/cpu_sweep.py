"""Layers of any block, density, dtype and number of tokens beside dense ones: which of them lose?

    python bench/cpu_sweep.py --threads 1
    python bench/cpu_sweep.py --dtypes bf16 --blocks 10x10 3x5 1x1 --tokens 5 512 --csv out.csv
    python bench/cpu_sweep.py --dtypes f32 --backward

Dense is nn.Linear in the same dtype; for int8, the better of torch's engines for dynamic int8. A figure is
how many times as fast the layer is, best of some calls each; those below 1 are counted at the end. With
--backward a figure is of the layer and its gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rarefy
from by_fours import microseconds
from dynamic_int8 import by_engine
from rows import write_csv

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
BLOCKS = (
    *("1x1", "1x4", "1x16", "1x100", "2x1", "2x2", "2x8", "3x1", "3x5", "4x1", "4x4", "5x7", "6x6", "8x1"),
    *("8x8", "10x10", "12x1", "12x12", "16x1", "16x16", "16x64", "17x33", "20x15", "24x1", "24x24", "32x1"),
    *("32x2", "32x32", "50x50", "64x1", "64x16", "64x64", "128x1"),
)
TOKENS = (1, 2, 4, 5, 8, 16, 32, 64, 512)


def trained(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    """A call of the layer and of its gradients."""

    def call() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x).backward(dy)

    return call


def timed(layer: nn.Module, tokens: int, dtype: torch.dtype, args: argparse.Namespace) -> float:
    """Microseconds of a layer for so many tokens."""
    x = torch.randn(tokens, args.k, dtype=dtype)
    if args.backward:
        return microseconds(
            trained(layer, x.requires_grad_(), torch.randn(tokens, args.n, dtype=dtype)), args.seconds
        )
    with torch.inference_mode():
        return microseconds(lambda: layer(x), args.seconds)


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=(*DTYPES, "int8"), default=["f32", "bf16"])
    parser.add_argument("--shapes", nargs="+", default=["768x3072"], help="in_features x out_features")
    parser.add_argument("--blocks", nargs="+", default=BLOCKS)
    parser.add_argument("--densities", nargs="+", type=float, default=[0.5, 0.25, 0.1])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.05, help="of each measurement")
    parser.add_argument("--backward", action="store_true", help="the layer and its gradients")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.backward and "int8" in args.dtypes:
        parser.error("layers in int8 have no gradients")
    return args


def main() -> None:
    """Prints a line for each block and density."""
    args = arguments()
    torch.set_num_threads(args.threads)
    rows = []
    print(f"{rarefy.backend_info()['cpu']}, {args.threads} threads")
    for shape in args.shapes:
        args.k, args.n = (int(side) for side in shape.split("x"))
        for dtype in args.dtypes:
            torch.manual_seed(0)
            plain = nn.Linear(args.k, args.n)
            inputs = DTYPES.get(dtype, torch.float32)
            dense = plain.to(inputs)
            rivals = list(by_engine(nn.Sequential(plain)).values()) if dtype == "int8" else [dense]
            base = {m: min(timed(rival, m, inputs, args) for rival in rivals) for m in args.tokens}
            print(f"{shape} {dtype}: dense us", *(f"{m}:{us:.0f}" for m, us in base.items()))
            cases = [(block, density) for block in args.blocks for density in args.densities]
            for block, density in tqdm(cases, disable=None, leave=False):
                spec = f"block:{block}@{density}" + (":int8" if dtype == "int8" else "")
                model = nn.Sequential(nn.Linear(args.k, args.n).to(inputs))
                rarefy.sparsify(model, {"0": spec})
                layer = model[0].requires_grad_(args.backward)
                found = {m: timed(layer, m, inputs, args) for m in args.tokens}
                line = " ".join(f"{m}:{base[m] / us:.2f}" for m, us in found.items())
                tqdm.write(f"{shape} {dtype} {block} {density}  {line}")
                rows += [
                    {
                        "cpu": rarefy.backend_info()["cpu"],
                        "threads": args.threads,
                        "date": time.strftime("%F"),
                        "torch": torch.__version__,
                        "shape": shape,
                        "dtype": dtype,
                        "block": block,
                        "density": density,
                        "tokens": m,
                        "backward": args.backward,
                        "us": round(us, 1),
                        "dense_us": round(base[m], 1),
                        "speedup": round(base[m] / us, 3),
                        "command": "python " + " ".join(sys.argv),
                    }
                    for m, us in found.items()
                ]
    slower = sum(row["speedup"] < 1 for row in rows)
    print(f"{slower} of {len(rows)} are slower than dense")
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
