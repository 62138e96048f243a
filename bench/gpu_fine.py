"""Blocks that no GPU kernel has tiles for, and few tokens, beside dense: from PyTorch, by CUDA graph.

Prints microseconds. Results are checked before they are timed.

python bench/gpu_fine.py            # all products, 8192 × 4096 → 4096, and the plain kernels beside them
python bench/gpu_fine.py --batches  # the same with 17 to 512 tokens, tall vectors among them
python bench/gpu_fine.py --few      # linear with 1 to 16 tokens, a chain of three weights
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import rarefy
from gpu_layers import DTYPE, OPS, check, graph_ms

FINE = ((8, 8), (16, 1), (4, 4), (1, 1), (64, 4), (24, 24), (128, 2))
FEW = ((128, 1), (64, 1), (32, 1), (16, 1), (8, 8), (4, 4), (1, 1), (24, 24))
PRODUCTS = ("linear", "grad_input", "grad_weight")
SIMT_MOST = 1.5e10  # products beyond which plain kernels take too long to be timed


def products(m: int, k: int, n: int, block: tuple[int, int], density: float) -> str:
    """A line: dense, chosen and plain kernels, each linear, grad_input and grad_weight."""
    x, dy = torch.randn(m, k, device="cuda", dtype=DTYPE), torch.randn(m, n, device="cuda", dtype=DTYPE)
    w = rarefy.BlockSparseLinear(k, n, density=density, block_shape=block, device="cuda", dtype=DTYPE).weight
    dense = w.to_dense().detach()
    want: list[Callable] = [lambda: x @ dense.T, lambda: dy @ dense, lambda: dy.T @ x]
    parts = ["dense " + " ".join(f"{graph_ms(f) * 1e3:.0f}" for f in want)]
    for forced in ("", "cuda:simt"):
        if forced and density * m * k * n > SIMT_MOST:
            continue
        rarefy.force_impl(forced)
        derived = w.derived(x)
        for_weight = (derived[0], derived[2]) if derived else ()
        calls = (
            lambda d=derived: OPS.bsr_linear(x, w.values, w.plan, None, n, k, *d),
            lambda d=derived: OPS.bsr_grad_input(dy, w.values, w.plan, n, k, *d),
            lambda d=for_weight: OPS.bsr_grad_weight(dy, x, w.plan, *block, n, k, None, *d),
        )
        for call, its in zip(calls[:2], want[:2], strict=True):
            check(call(), its())
        kernels = " ".join(rarefy.explain(w, x, op=op)["kernel"] for op in PRODUCTS)
        parts.append(f"{kernels} " + " ".join(f"{graph_ms(f) * 1e3:.0f}" for f in calls))
    rarefy.force_impl("")
    return f"{m}x{k}x{n} {block[0]}x{block[1]}@{density}: " + " | ".join(parts)


def few(m: int, k: int, n: int, block: tuple[int, int], density: float) -> str:
    """A line: a call of a chain of ten for each of three weights."""
    x = torch.randn(m, k, device="cuda", dtype=DTYPE)
    weights = [
        rarefy.BlockSparseLinear(k, n, density=density, block_shape=block, device="cuda", dtype=DTYPE).weight
        for _ in range(3)
    ]
    dense = [w.to_dense().detach() for w in weights]
    held = [w.derived(x) for w in weights]

    def sparse_chain() -> None:
        for w, derived in zip(weights, held, strict=True):
            for _ in range(10):
                OPS.bsr_linear(x, w.values, w.plan, None, n, k, *derived)

    def dense_chain() -> None:
        for w in dense:
            for _ in range(10):
                x @ w.T

    check(OPS.bsr_linear(x, weights[0].values, weights[0].plan, None, n, k, *held[0]), x @ dense[0].T)
    kernel = rarefy.explain(weights[0], x, op="linear")["kernel"]
    t_dense, t = (graph_ms(f, 9) / 30 * 1e3 for f in (dense_chain, sparse_chain))
    return f"{m}x{k}x{n} {block[0]}x{block[1]}@{density}: dense {t_dense:.1f} | {kernel} {t:.1f}"


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--few", action="store_true", help="up to 16 tokens")
    parser.add_argument("--batches", action="store_true", help="17 to 512 tokens")
    asked = parser.parse_args()
    with torch.no_grad():
        if asked.batches:
            for block in ((128, 1), (64, 1), (16, 1), (8, 8)):
                for density in (0.25, 0.1, 0.05):
                    for m in (17, 64, 128, 256, 512):
                        print(products(m, 4096, 4096, block, density), flush=True)
        elif asked.few:
            for k, n in ((4096, 14336), (14336, 4096)):
                for block in FEW:
                    for density in (0.25, 0.1):
                        for m in (1, 4, 8, 16):
                            print(few(m, k, n, block, density), flush=True)
        else:
            for density in (0.25, 0.1, 0.05, 0.02, 0.005):
                for block in FINE:
                    print(products(8192, 4096, 4096, block, density), flush=True)


if __name__ == "__main__":
    main()
