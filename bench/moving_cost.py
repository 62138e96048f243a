"""What one change of a moving pattern costs against one training step, for one layer of each density.

    python bench/moving_cost.py --size 1024 --tokens 512 --form block:16x16

Times are the shortest of several, in milliseconds, interleaved; a step is forward, backward and AdamW.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

from rarefy.prune import SET, RigL, SRigL, TopKAST, sparse_start


def shortest(call, times: list[float]) -> None:
    """Adds the time of a call."""
    begin = time.perf_counter()
    call()
    times.append(1e3 * (time.perf_counter() - begin))


def measure(size: int, tokens: int, form: str, density: float, rounds: int) -> dict[str, float]:
    """Times of a step and of a change by each method."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size))
    sparse_start(model, form, density)
    x = torch.randn(tokens, size, requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times: dict[str, list[float]] = {"step": []}

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    few = {"candidates": 1.0}
    kinds = [
        ("SET", SET, {}),
        ("RigL", RigL, {}),
        ("RigL, candidates=1", RigL, few),
        ("SRigL, candidates=1", SRigL, few),
    ]
    for name, method, options in [*kinds, ("TopKAST", TopKAST, {})]:
        moving = method(model, optimizer, fraction=0.3, every=1, **options)
        for _ in range(rounds):
            step() if method is TopKAST else shortest(step, times["step"])
            shortest(moving.step, times.setdefault(name, []))
        if method is TopKAST:
            moving.finish()
    return {name: min(found) for name, found in times.items()}


def main() -> int:  # noqa: D103
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--form", default="block:16x16")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.25, 0.1, 0.05])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.form}, {args.size}x{args.size}, {args.tokens} tokens, {torch.get_num_threads()} threads")
    for density in args.densities:
        found = measure(args.size, args.tokens, args.form, density, args.rounds)
        ratios = "  ".join(
            f"{name} {ms:.2f} ms ({ms / found['step']:.2f})" for name, ms in found.items() if name != "step"
        )
        print(f"density {density:<5g} step {found['step']:.2f} ms  {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
