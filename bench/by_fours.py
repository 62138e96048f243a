"""Five to sixteen tokens on the CPU: four at a time by the kernels for a few, against what they get.

python bench/by_fours.py                                  # one thread, three minutes
python bench/by_fours.py --threads 4 --shapes 4096x11008
python bench/by_fours.py --slower                         # tokens that take longer than more of them do

How many times as fast the first are (1: they are what is chosen), from the best of some calls of each in
turns; linear_few.cc chooses by it (docs/design/cpu/few_tokens.md). Layers are random, through PyTorch, in
inference mode.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

import rarefy
from rarefy import backend

SHAPES = ("768x3072", "2048x2048", "4096x11008")  # in × out
BLOCKS = ("8x8", "16x1", "16x16", "32x1", "32x32", "64x1", "64x64", "128x1", "1x16", "2x2", "1x1")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TOKENS = (5, 6, 8, 12, 16)
MANY = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


def microseconds(call: Callable[[], object], seconds: float = 0.08) -> float:
    """The best of ten calls, or of those of so long."""
    call()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 10 and (not times or time.perf_counter() < end):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def layers(shapes: list[str], blocks: list[str]) -> Iterator[tuple[str, rarefy.BlockSparseLinear]]:
    """Their text, and a layer of each."""
    for shape, (name, dtype), density, block in itertools.product(shapes, DTYPES.items(), (0.5, 0.1), blocks):
        (k, n), sides = map(int, shape.split("x")), tuple(map(int, block.split("x")))
        torch.manual_seed(1)
        layer = rarefy.BlockSparseLinear(k, n, density=density, block_shape=sides, dtype=dtype)
        yield f"{shape} {name} {block}@{density}", layer


def inputs(layer: rarefy.BlockSparseLinear, tokens: Iterable[int]) -> dict[int, Tensor]:
    """By tokens."""
    return {m: torch.randn(m, layer.in_features, dtype=layer.weight.dtype) for m in tokens}


def gains(layer: rarefy.BlockSparseLinear) -> list[str]:
    """Of four at a time, by tokens; nothing where four tokens have another kernel."""
    kernel = backend.explain(layer, inputs(layer, [4])[4])["kernel"]
    if not kernel.endswith("_linear_few"):
        return []
    found = []
    for m, x in inputs(layer, TOKENS).items():
        times: dict[str, list[float]] = {"": [], f"{kernel}()": []}
        for forced in (*times, *times):
            before = backend.force_impl(forced)
            try:
                times[forced].append(microseconds(partial(layer, x)))
            finally:
                backend.force_impl(before)
        default, fours = (min(its) for its in times.values())
        found.append(f"{m} {default / fours:.2f}")
    return found


def slower(layer: rarefy.BlockSparseLinear) -> list[str]:
    """Tokens that take an eighth longer than more of them."""
    took = {m: microseconds(partial(layer, x)) for m, x in inputs(layer, MANY).items()}
    found = []
    for m in MANY[:-1]:
        more = min((other for other in MANY if other > m), key=took.__getitem__)
        if took[m] > 1.125 * took[more]:
            found.append(f"{m} {took[m]:.0f} us, {more} {took[more]:.0f}")
    return found


def main() -> None:
    """Prints a line for each layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS))
    parser.add_argument("--slower", action="store_true", help="tokens that take longer than more of them")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        for text, layer in layers(args.shapes, args.blocks):
            if found := (slower if args.slower else gains)(layer):
                print(text, "; ".join(found), sep=": ", flush=True)


if __name__ == "__main__":
    main()
