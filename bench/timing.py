"""Interleaved timing on the CPU and on CUDA: every contestant has its turn in every round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

TURN = 2e-3  # seconds: shorter calls are repeated within a turn, and the mean of a turn counts
ROUNDS = (5, 25)  # fewest and most turns of a contestant
SLOW_TURNS = 3  # of one whose single turn would use up half of the budget

Call = Callable[[], object]


@dataclass
class Times:
    """Seconds per call over all turns."""

    turns: list[float]

    @property
    def median(self) -> float:
        """Of the turns; an outlier does not move it."""
        return statistics.median(self.turns)

    @property
    def spread(self) -> tuple[float, float]:
        """Fastest and slowest turn."""
        return min(self.turns), max(self.turns)


def run_on_cpu(call: Call, repeats: int) -> float:
    """Seconds per call, by the wall clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def run_on_cuda(call: Call, repeats: int) -> float:
    """Seconds per call between two events of the current stream."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / repeats


def graph_of(call: Call) -> Call:
    """The same work as a CUDA graph: the kernels alone, without Python and launches in between."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def interleave(calls: dict[str, Call], device: str, budget: float) -> dict[str, Times]:
    """Time all calls in turns, after a warm-up, for about `budget` seconds.

    The number of turns follows from the budget. Contestants with fewer turns have them evenly spread over the
    rounds, so that a slow one costs neither the others' precision nor minutes.
    """
    run = run_on_cuda if device == "cuda" else run_on_cpu
    estimates = {}
    for name, call in calls.items():
        run(call, 1)  # the first call of a kernel: libraries load, caches fill, graphs upload
        estimates[name] = max(run(call, 1), 1e-7)
    repeats = {name: max(1, round(TURN / t)) for name, t in estimates.items()}
    turn = {name: repeats[name] * t for name, t in estimates.items()}
    least, most = ROUNDS
    turns = {}
    for name, seconds in turn.items():
        fair = int(budget / len(calls) / seconds)
        turns[name] = SLOW_TURNS if seconds > budget / 2 else min(most, max(least, fair))
    rounds = max(turns.values())
    plan = {name: {i * rounds // n for i in range(n)} for name, n in turns.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            if number in plan[name]:
                found[name].append(run(call, repeats[name]))
    return {name: Times(samples) for name, samples in found.items()}
