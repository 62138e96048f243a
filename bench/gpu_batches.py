"""linear with 17 to 512 tokens beside dense, from PyTorch: us a call in a chain of 15, by CUDA graph.

Three weights take turns, so that none stays in L2. Results are checked before they are timed.

python bench/gpu_batches.py
"""

from __future__ import annotations

import torch

import rarefy
from gpu_layers import DTYPE, OPS, check, graph_ms

SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096))
BLOCKS = ((128, 128), (64, 64), (32, 32), (16, 16), (128, 1), (64, 1), (32, 1), (16, 1))
TOKENS = (32, 64, 128, 256, 512)
WEIGHTS, CALLS = 3, 5


def dense(m: int, k: int, n: int) -> float:
    """Microseconds of a call."""
    x = torch.randn(m, k, device="cuda", dtype=DTYPE)
    weights = [torch.randn(n, k, device="cuda", dtype=DTYPE) for _ in range(WEIGHTS)]

    def chain() -> None:
        for w in weights:
            for _ in range(CALLS):
                x @ w.T

    return graph_ms(chain, 7) / (WEIGHTS * CALLS) * 1e3


def sparse(m: int, k: int, n: int, block: tuple[int, int], density: float) -> tuple[float, str]:
    """Microseconds of a call, and which kernel that is in which configuration."""
    x = torch.randn(m, k, device="cuda", dtype=DTYPE)
    weights = [
        rarefy.BlockSparseLinear(k, n, density=density, block_shape=block, device="cuda", dtype=DTYPE).weight
        for _ in range(WEIGHTS)
    ]
    held = [w.derived(x) for w in weights]

    def chain() -> None:
        for w, derived in zip(weights, held, strict=True):
            for _ in range(CALLS):
                OPS.bsr_linear(x, w.values, w.plan, None, n, k, *derived)

    check(
        OPS.bsr_linear(x, weights[0].values, weights[0].plan, None, n, k, *held[0]),
        x @ weights[0].to_dense().detach().T,
    )
    chosen = rarefy.explain(weights[0], x, op="linear")
    return graph_ms(chain, 7) / (WEIGHTS * CALLS) * 1e3, f"{chosen['kernel']} {chosen['config']}"


def main() -> None:
    """Prints a line for each shape, density and block: a time for each number of tokens."""
    with torch.no_grad():
        for k, n in SHAPES:
            print(f"{k}->{n} tokens {TOKENS}: dense", *(f"{dense(m, k, n):.1f}" for m in TOKENS), flush=True)
            for density in (0.25, 0.1):
                for block in BLOCKS:
                    found = [sparse(m, k, n, block, density) for m in TOKENS]
                    times = " ".join(f"{t:.1f}" for t, _ in found)
                    print(f"{k}->{n} {block[0]}x{block[1]}@{density}: {times} | {found[1][1]}", flush=True)


if __name__ == "__main__":
    main()
