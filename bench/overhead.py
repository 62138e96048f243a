"""Host time of a call: BlockSparseLinear against nn.Linear, so small that everything but the product counts.

python bench/overhead.py                  # 32 to 32 features, one CPU thread
python bench/overhead.py --device cuda    # what the host needs to queue the work
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import rarefy

Call = Callable[[], object]
CALLS = 100  # in a turn, whose mean counts


def calls_of(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Call]:
    """The ways to call a layer that are measured."""

    def no_grad() -> None:
        with torch.no_grad():
            layer(x)

    leaf = x.clone().requires_grad_()
    return {
        "forward": lambda: layer(x),
        "forward, no_grad": no_grad,
        "forward + backward": lambda: layer(x).backward(dy),
        "forward + backward to x": lambda: layer(leaf).backward(dy),
    }


def turn(call: Call) -> float:
    """CPU seconds of the process per call: other processes do not count."""
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start) / CALLS


def measure(pair: tuple[Call, Call], rounds: int) -> tuple[list[float], list[float]]:
    """Turns of two calls in turns, after a warm-up."""
    for call in pair:
        turn(call)
    both = [(turn(pair[0]), turn(pair[1])) for _ in range(rounds)]
    return [a for a, _ in both], [b for _, b in both]


def cell(turns: list[float]) -> str:
    """Median and quartiles in microseconds."""
    low, median, high = (1e6 * q for q in statistics.quantiles(turns, n=4))
    return f"{median:.1f} ({low:.1f} – {high:.1f})"


def table(device: str, features: int, tokens: int, rounds: int) -> str:
    """Rows of a Markdown table: both layers, and the median of the ratios of neighbouring turns."""
    sparse = rarefy.BlockSparseLinear(features, features, density=1.0, block_shape=(32, 32), device=device)
    dense = nn.Linear(features, features, device=device)
    x, dy = (torch.randn(tokens, features, device=device) for _ in range(2))
    torch.testing.assert_close(sparse(x), sparse.to_dense()(x), rtol=1e-4, atol=1e-4)
    ours, theirs = calls_of(sparse, x, dy), calls_of(dense, x, dy)
    lines = [
        f"| {tokens} × {features} → {features} | nn.Linear, µs | BlockSparseLinear, µs | ratio |",
        "|---|---|---|---|",
    ]
    for name in ours:
        a, b = measure((theirs[name], ours[name]), rounds)
        ratio = statistics.median(q / p for p, q in zip(a, b, strict=True))
        lines.append(f"| {name} | {cell(a)} | {cell(b)} | {ratio:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--features", type=int, default=32, help="inputs and outputs")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200, help=f"turns of each layer, of {CALLS} calls")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.disable()  # it strikes whoever is at turn
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread\n")
    print(table(options.device, options.features, options.tokens, options.rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
