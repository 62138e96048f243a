"""A feed-forward network as one op, as two sparse layers, and dense: nn.Sequential(Linear, GELU, Linear).

python bench/feed_forward.py --csv FILE                  # all cases, float32, 1 and 2 threads
python bench/feed_forward.py --case 512x384x1536 4x1 0.5 --threads 1 --compile
python bench/feed_forward.py --case 512x768x3072 32x1 0.5 --threads 2 --dtype bf16
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import rarefy

SIZES = ((384, 1536), (768, 3072), (1024, 4096))
TOKENS = (512, 2048)
BLOCKS = ("4x1", "16x1", "32x1", "16x16")
DENSITIES = (0.5, 0.25)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TURN = 0.02  # seconds: shorter calls are repeated


def network(k: int, h: int, spec: str | None, fuse: bool, dtype: torch.dtype) -> nn.Module:
    """Dense, or sparse at random."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(k, h), nn.GELU(), nn.Linear(h, k))}).to(dtype)
    if spec is not None:
        rarefy.sparsify(model, {r"net\..*": spec}, measure=False, fuse=fuse)
    return model["net"].eval().requires_grad_(False)


def clock(threads: int) -> Callable[[], float]:
    """One thread: CPU time, in which other processes do not count. More: the wall's."""
    return time.process_time if threads == 1 else time.perf_counter


def measure(calls: dict[str, Callable[[], object]], threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a call, turn by turn, each contestant once a round."""
    now, turns, repeats = clock(threads), {name: [] for name in calls}, {}
    for name, call in calls.items():
        call()
        start = now()
        call()
        repeats[name] = max(1, round(TURN / max(now() - start, 1e-6)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = now()
            for _ in range(repeats[name]):
                call()
            turns[name].append((now() - start) / repeats[name])
    return turns


def run(m: int, k: int, h: int, block: str, density: float, threads: int, args: argparse.Namespace) -> dict:
    """One row: milliseconds of each contestant, and the ratios of a round's neighbours, as medians."""
    torch.set_num_threads(threads)
    dtype = DTYPES[args.dtype]
    x, spec = torch.randn(m, k, dtype=dtype), f"block:{block}@{density}{':int8' if args.int8 else ''}"
    nets = {
        "dense": network(k, h, None, False, dtype),
        "layers": network(k, h, spec, False, dtype),
        "network": network(k, h, spec, True, dtype),
    }
    if args.compile:
        nets["dense_compiled"] = torch.compile(nets["dense"])
    with torch.inference_mode():
        wanted = nets["layers"](x)
        nets["network"](x)  # what kernels derive is there from the second call on
        tolerance = {} if dtype == torch.float32 and not args.int8 else {"rtol": 0.02, "atol": 0.01}
        torch.testing.assert_close(nets["network"](x), wanted, **tolerance)
        calls = {name: lambda net=net: net(x) for name, net in nets.items()}
        turns = measure(calls, threads, args.rounds)
    ratio = {
        name: statistics.median(a / b for a, b in zip(turns[name], turns["network"], strict=True))
        for name in turns
    }
    flops = 4 * m * k * h * density
    row = {
        "M": m,
        "K": k,
        "H": h,
        "block": block,
        "density": density,
        "dtype": args.dtype,
        "int8": args.int8,
        "threads": threads,
    }
    row |= {f"{name}_ms": round(1e3 * statistics.median(t), 4) for name, t in turns.items()}
    row |= {f"{name}_min_ms": round(1e3 * min(t), 4) for name, t in turns.items()}
    row |= {f"{name}/network": round(ratio[name], 3) for name in turns if name != "network"}
    row["useful_gflops"] = round(flops / statistics.median(turns["network"]) / 1e9, 1)
    return row


def main() -> None:
    """Runs and prints; with --csv also writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs=3, metavar=("MxKxH", "BLOCK", "DENSITY"))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--int8", action="store_true", help="layers in int8 that round x")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="dense torch.compile, too")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.case:
        m, k, h = map(int, args.case[0].split("x"))
        cases = [(m, k, h, args.case[1], float(args.case[2]))]
    else:
        cases = [(m, k, h, b, d) for k, h in SIZES for m in TOKENS for d in DENSITIES for b in BLOCKS]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    about = {
        "machine": rarefy.backend_info()["cpu"],
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
    }
    rows = []
    for threads in args.threads:
        for case in cases:
            row = run(*case, threads, args)
            row["repro"] = (
                "python bench/feed_forward.py --case {}x{}x{} {} {} --threads {} --dtype {}{}".format(
                    *case, threads, args.dtype, " --int8" if args.int8 else ""
                )
            )
            rows.append(row | about)
            print(" ".join(f"{key}={value}" for key, value in row.items() if key != "repro"), flush=True)
            if args.csv:
                with args.csv.open("w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0].keys())
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
