"""What pruning itself takes, against what is asked: masks of one large layer, of many, and reconstruction.

    python bench/prune_step.py
    python bench/prune_step.py --rounds 15

One magnitude step of Sparsifier (scores, mask, and the mask where the model sees it) on a layer of 4096 ×
4096 in float32; globally over six such layers, 100 M weights, with the memory that it takes beside
them; SparseGPT and OBS in blocks on a layer of 3072 × 768. Wall-clock time, the least of the rounds, which a
quiet machine repeats, and processor time of all threads, which a busy one changes least.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rarefy.prune import Sparsifier, reconstruct_weight


def timed(make: Callable[[], Callable[[], object]], rounds: int) -> tuple[float, float]:
    """Seconds of what `make` returns: (wall clock, processor), the least of the rounds each."""
    walls, processors = [], []
    for _ in range(rounds):
        run = make()
        wall, processor = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return min(walls), min(processors)


def step(weights: list[torch.Tensor], pattern: str, **options: object) -> Callable[[], object]:
    """Makes one step of a new Sparsifier on layers of these weights, which stay as they are."""
    layers = []
    for weight in weights:
        layers.append(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
        layers[-1].weight = nn.Parameter(weight.clone())
    sparsifier = Sparsifier(0.5, pattern=pattern, **options)
    sparsifier.prepare(nn.Sequential(*layers))
    return sparsifier.step


def memory(what: str) -> int:
    """Bytes of this process, "VmRSS" now, "VmHWM" at most since the peak was forgotten (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def main() -> int:  # noqa: D103
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads; seconds: wall clock, processor, asked")
    many = [torch.randn(4096, 4096) for _ in range(6)]  # 100.7 M weights
    run = step(many, "unstructured", scope="global", in_place=True)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, begin = memory("VmRSS"), time.perf_counter()
    run()
    wall, more = time.perf_counter() - begin, memory("VmHWM") - before
    part = more / sum(w.nbytes for w in many)
    print(f"global, 100.7 M weights: {wall:.2f}, 2; beside the weights {part:.3f} of them, 0.2")
    del run
    one, limits = many[:1], {"unstructured": 0.080, "2:4": 0.040, "block:64x64": 0.040}
    del many
    for pattern, asked in limits.items():
        wall, processor = timed(lambda pattern=pattern: step(one, pattern), args.rounds)
        print(f"4096 x 4096, {pattern}: {wall:.4f}, {processor:.4f}, {asked}")
    weight, x = torch.randn(3072, 768), torch.randn(2048, 768) @ torch.randn(768, 768)
    gram = x.T @ x
    for method, pattern in (("sparsegpt", "block:16x16"), ("sparsegpt", "block:32x1"), ("obs", "block:32x1")):
        wall, processor = timed(
            lambda how=(pattern, 0.5, method): lambda: reconstruct_weight(weight, gram, *how), 2
        )
        print(f"3072 x 768, {method}, {pattern}: {wall:.2f}, {processor:.2f}, 15")
    return 0


if __name__ == "__main__":
    sys.exit(main())
