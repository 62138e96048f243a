"""How exact predicted times are: layers that no calibration measured, predicted and measured.

python bench/predictor.py                                  # the shapes and blocks below, all threads
python bench/predictor.py --threads 1 --csv out.csv
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import rarefy
from rarefy.predictor import Case, Predictor, measure
from rows import write_csv

SHAPES = ((3072, 768), (768, 3072), (1024, 1024), (1536, 512), (640, 960), (2048, 2048))
LARGE = ((4096, 4096), (11008, 4096))  # weights out of memory: see --large
TOKENS = (1, 2, 8, 32, 64, 256, 512, 1024)
BLOCKS = (None, (4, 1), (16, 1), (32, 1), (16, 16), (32, 32))
KINDS = {  # of what is stored; bf16 and int8 under f32, CSR as blocks of one
    "f32": (torch.float32, BLOCKS, {}),
    "bf16": (torch.bfloat16, BLOCKS, {}),
    "f32:bf16": (torch.float32, BLOCKS[1:], {"values": torch.bfloat16}),
    "bf16x": (torch.float32, BLOCKS[1:], {"rounds_x": True}),
    "int8": (torch.float32, BLOCKS[1:], {"int8": True}),
    "csr": (torch.float32, ((1, 1),), {}),
}
DENSITIES = (0.5, 0.25, 0.1)
MOST_WORK = 2e9  # products of a case: longer ones are left out


def cases(kinds: list[str], shapes: tuple[tuple[int, int], ...]) -> list[Case]:
    """All combinations, or where they are many every seventh, so that each value of each is there."""
    found = [
        Case(m, n, k, dtype, block, density, **more)
        for dtype, blocks, more in (KINDS[kind] for kind in kinds)
        for block in blocks
        for n, k in shapes
        for m in TOKENS
        for density in (DENSITIES if block else (1.0,))
        if m * n * k <= MOST_WORK and (block is None or (n % block[0] == 0 and k % block[1] == 0))
    ]
    return found[:: 7 if len(found) > 400 else 1]


def main() -> None:
    """Prints medians and quartiles of |predicted / measured − 1|, and writes every case where --csv says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["f32", "bf16"])
    parser.add_argument("--every", type=int, default=1, help="use every so manieth case")
    parser.add_argument("--large", action="store_true", help="layers whose weights come out of memory")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = cases(args.kinds, LARGE if args.large else SHAPES)[:: args.every]
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(Path(folder))
        begin = time.perf_counter()
        predictor.calibrate(chosen)
        spent = time.perf_counter() - begin
    cpu = rarefy.backend_info()["cpu"]
    print(f"{cpu}, {args.threads} threads: {len(predictor.costs)} groups calibrated in {spent:.1f} s")
    rows, errors = [], {}
    for case in chosen:
        predicted, measured = predictor.seconds(case), measure(case)
        errors.setdefault(case.group, []).append(abs(predicted / measured - 1))
        rows.append(
            {
                "cpu": cpu,
                "threads": args.threads,
                "date": time.strftime("%F"),
                "group": case.group,
                "tokens": case.tokens,
                "out_features": case.out_features,
                "in_features": case.in_features,
                "density": case.density,
                "predicted_ms": f"{1e3 * predicted:.4f}",
                "measured_ms": f"{1e3 * measured:.4f}",
                "error": f"{predicted / measured - 1:.3f}",
                "command": "python " + " ".join(sys.argv),
            }
        )
    errors["all"] = [error for group in errors.values() for error in group]
    for group, found in errors.items():
        quartiles = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
        print(
            f"{group:38} {len(found):4} cases: median error {quartiles[1]:.1%}, "
            f"upper quartile {quartiles[2]:.1%}"
        )
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
