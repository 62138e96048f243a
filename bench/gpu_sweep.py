"""linear with 1 to 2048 tokens on a GPU, from PyTorch: where it loses to dense, or to more tokens of itself.

Microseconds of a call in a chain of calls in a CUDA graph, in bf16; three weights take turns. A line for each
layer that has such tokens, and a last one that counts them (docs/design/hopper/sweep.md).

python bench/gpu_sweep.py                              # two minutes
python bench/gpu_sweep.py --shapes 4096x14336 --all    # every time
"""

from __future__ import annotations

import argparse
import itertools

import torch

import rarefy
from gpu_batches import WEIGHTS
from gpu_layers import DTYPE, OPS, check, graph_ms

SHAPES = ("768x3072", "3072x768", "1024x4096", "4096x1024", "4096x4096", "4096x14336", "14336x4096")
BLOCKS = ("128x128", "64x64", "32x32", "16x16", "128x1", "64x1", "32x1", "16x1", "8x8", "1x1")
DENSITIES = (0.5, 0.25, 0.1)
TOKENS = (1, 2, 4, 8, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
SLOWER = 1.1  # times as long as more tokens


def microseconds(calls: list) -> float:
    """Of one of them in a chain of them all, four times."""
    repeats = 4

    def chain() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    return graph_ms(chain, 5) / (repeats * len(calls)) * 1e3


def inputs(k: int) -> dict[int, torch.Tensor]:
    """By tokens."""
    return {m: torch.randn(m, k, device="cuda", dtype=DTYPE) for m in TOKENS}


def dense_times(k: int, n: int) -> dict[int, float]:
    """By tokens."""
    weights = [torch.randn(n, k, device="cuda", dtype=DTYPE) for _ in range(WEIGHTS)]
    return {m: microseconds([lambda w=w, x=x: x @ w.T for w in weights]) for m, x in inputs(k).items()}


def sparse_times(k: int, n: int, block: tuple[int, int], density: float) -> dict[int, float]:
    """By tokens; results of the fewest and the most are checked."""
    weights = [
        rarefy.BlockSparseLinear(k, n, density=density, block_shape=block, device="cuda", dtype=DTYPE).weight
        for _ in range(WEIGHTS)
    ]
    found = {}
    for m, x in inputs(k).items():
        calls = []
        for w in weights:
            derived = w.derived(x)
            calls.append(
                lambda w=w, x=x, derived=derived: OPS.bsr_linear(x, w.values, w.plan, None, n, k, *derived)
            )
        if m in (TOKENS[0], TOKENS[-1]):
            check(calls[0](), x @ weights[0].to_dense().detach().T)
        found[m] = microseconds(calls)
    return found


def main() -> None:
    """Prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS))
    parser.add_argument("--all", action="store_true", help="every time, not those that lose alone")
    args = parser.parse_args()
    counts = {"cases": 0, "slower than dense": 0, "slower than more tokens": 0}
    with torch.no_grad():
        for shape in args.shapes:
            k, n = map(int, shape.split("x"))
            dense = dense_times(k, n)
            print(f"{shape} dense:", *(f"{m} {t:.1f}" for m, t in dense.items()), flush=True)
            for density, block in itertools.product(DENSITIES, args.blocks):
                times = sparse_times(k, n, tuple(map(int, block.split("x"))), density)
                found = []
                for i, (m, t) in enumerate(times.items()):
                    behind = t > dense[m]
                    more = min(list(times.values())[i + 1 :], default=t)
                    counts["cases"] += 1
                    counts["slower than dense"] += behind
                    counts["slower than more tokens"] += t > SLOWER * more
                    marks = ("*" if behind else "") + ("^" if t > SLOWER * more else "")
                    if marks or args.all:
                        found.append(f"{m} {t:.1f}{marks}")
                if found:
                    print(f"{shape} {block}@{density}:", *found, flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), "(* and ^)")


if __name__ == "__main__":
    main()
