"""Times a dense layer and its sparse replacement against each other, and says when the times mean nothing.

Other processes make times lie: a scheduler gives slices of some milliseconds, so that samples are wrong by
whole slices and yet agree with each other. So calls are timed one by one, dense and sparse in turns; wall
time is held against the processor time that the threads got; and the whole is done in passes, which must
agree.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .conv import geometry_of
from .log import progress

_PASSES = 3
_ROUNDS = range(3, 201)  # of a pass: at least, at most
_BUDGET = 0.07  # seconds a pass may take once it has had its least rounds
_TRIES = 3  # of a measurement that turns out noisy

MOST_WAITED = 0.15  # share of the time; 0.00 to 0.01 where nothing disturbs (SCHED_FIFO)
_MOST_APART = 1.15  # largest ratio of a pass / smallest
_MOST_SPREAD = 1.5  # upper quartile / lower quartile


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of repeated calls, in milliseconds."""

    median: float
    lower: float
    upper: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarises single times in seconds; at least two."""
        lower, median, upper = (1e3 * q for q in statistics.quantiles(seconds, n=4, method="inclusive"))
        return cls(median, lower, upper, len(seconds))


@dataclass(frozen=True)
class Times:
    """A dense and a sparse layer, measured in turns, and what speaks against the result."""

    dense: Timing
    sparse: Timing
    ratios: tuple[float, ...] = ()  # dense / sparse, of each pass
    waited: float = 0.0  # share of the time in which a thread of ours was ready to run and did not

    @property
    def noise(self) -> str | None:
        """Why these times say nothing about the layers, or None."""
        if self.waited > MOST_WAITED:
            return f"threads waited {self.waited:.0%} of the time for a processor"
        if self.ratios and max(self.ratios) > _MOST_APART * min(self.ratios):
            return f"passes disagree: {min(self.ratios):.2f}x to {max(self.ratios):.2f}x"
        if any(t.upper > _MOST_SPREAD * t.lower for t in (self.dense, self.sparse)):
            return f"quartiles lie more than {_MOST_SPREAD}x apart"
        return None

    @property
    def speedup(self) -> float | None:
        """Dense time / sparse time; None where the times are noise."""
        return None if self.noise else self.dense.median / self.sparse.median


def queued(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds that the threads of this process have waited in a processor's queue; 0 where nobody counts.

    Of each thread no more than it has run: threads of a tokenizer that look for work behind those that
    multiply wait for 60 to 85 % of the time, run for 1 %, and hold up nobody.
    """
    nanoseconds = 0
    for task in tasks.glob("*/schedstat"):
        try:
            nanoseconds += min(map(int, task.read_text().split()[:2]))  # ran, waited
        except (OSError, ValueError):  # a thread that has ended, a kernel without statistics
            continue
    return 1e-9 * nanoseconds


@dataclass(frozen=True)
class Clock:
    """What is measured by, in seconds: tests bring their own."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] | None = time.thread_time  # of the calling thread; None: it may wait
    queued: Callable[[], float] = queued  # of all threads


def measure_pair(
    dense: Callable[[], Any],
    sparse: Callable[[], Any],
    *,
    clock: Clock | None = None,
    rounds: range = _ROUNDS,
    budget: float = _BUDGET,
) -> Times:
    """Times two functions in turns, after a call of each to warm up.

    Args:
        dense: what to time; it must have done its work when it returns.
        sparse: what to time it against.
        clock: what to measure by.
        rounds: how often each is called in one of the three passes, at least and at most.
        budget: seconds that a pass may take once it has had its least rounds.
    """
    clock = clock or Clock()
    for function in (dense, sparse):
        function()
    all_times: tuple[list[float], list[float]] = ([], [])
    ratios, wall, cpu, in_queue = [], 0.0, 0.0, 0.0
    for _ in range(_PASSES):
        times: tuple[list[float], list[float]] = ([], [])
        start, start_cpu, start_queued = clock.wall(), clock.cpu and clock.cpu(), clock.queued()
        while len(times[0]) < rounds.start or (
            len(times[0]) < rounds.stop - 1 and clock.wall() - start < budget
        ):
            turns = ((dense, times[0]), (sparse, times[1]))
            for function, seconds in turns if len(times[0]) % 2 == 0 else reversed(turns):
                begin = clock.wall()
                function()
                seconds.append(clock.wall() - begin)
        in_queue += clock.queued() - start_queued
        elapsed = clock.wall() - start
        wall += elapsed
        cpu += clock.cpu() - start_cpu if clock.cpu else elapsed
        ratios.append(statistics.median(times[0]) / statistics.median(times[1]))
        for whole, part in zip(all_times, times, strict=True):
            whole += part
    # Threads that spin while they wait for others use their processor; those of Python's lock are not queued.
    waited = max(in_queue, wall - cpu) / wall
    return Times(Timing.of(all_times[0]), Timing.of(all_times[1]), tuple(ratios), waited)


def quietest(measure: Callable[[], Times], tries: int = _TRIES) -> Times:
    """The first result without noise, or of `tries` the one whose threads waited least."""
    found: list[Times] = []
    while len(found) < tries:
        found.append(measure())
        if found[-1].noise is None:
            return found[-1]
    return min(found, key=lambda times: times.waited)


def _input(dense: nn.Module, tokens: int) -> torch.Tensor:
    """Rows of x; for a convolution a square image, channels last, of as many places of output or more."""
    generator = torch.Generator("cpu").manual_seed(0)  # the user's global one stays as it is
    if not isinstance(dense, nn.Conv2d):
        x = torch.randn(tokens, dense.weight.shape[1], generator=generator, device="cpu")
        return x.to(dense.weight)
    side = math.isqrt(tokens - 1) + 1
    sizes = geometry_of(dense).input((side, side))
    x = torch.randn(1, dense.in_channels, *sizes, generator=generator, device="cpu")
    return x.to(dense.weight).to(memory_format=torch.channels_last)


def time_pair(dense: nn.Module, sparse: nn.Module, tokens: int) -> Times:
    """Forward times of two layers on the same input, (tokens, K) for linear ones."""
    x = _input(dense, tokens)
    if x.device.type != "cuda":
        with torch.inference_mode():
            return measure_pair(lambda: dense(x), lambda: sparse(x))

    def finished(layer: nn.Module) -> None:
        layer(x)
        torch.cuda.synchronize(x.device)

    with torch.inference_mode():
        torch.cuda.synchronize(x.device)
        return measure_pair(lambda: finished(dense), lambda: finished(sparse), clock=Clock(cpu=None))


def time_layers(layers: list[tuple[Any, nn.Module, nn.Module]], tokens: int) -> None:
    """Times dense layers against sparse ones and stores what comes out in their rows.

    Layers that are equal in shape, format, density, dtype, device and bias are timed once; noisy ones again
    after all others, when the machine may be quiet. A bar shows progress on a terminal after a second.

    Args:
        layers: (row, dense, sparse): `times` of the rows, LayerRows, is set, and `timed_as` where another
            row's layer was timed.
        tokens: rows of x; of a convolution, places of the output.
    """
    groups: dict[Any, list[tuple[Any, nn.Module, nn.Module]]] = {}
    for row, dense, sparse in layers:
        tensors = (dense.weight.device, dense.weight.dtype, sparse.weight.dtype, dense.bias is None)
        geometry = [getattr(dense, name, None) for name in ("kernel_size", "stride", "dilation", "groups")]
        key = (row.shape, row.format, row.density, tensors, *geometry)
        groups.setdefault(key, []).append((row, dense, sparse))
    todo = list(groups.values())
    for attempt in range(_TRIES):
        text = "timing layers" if attempt == 0 else "timing noisy layers again"
        for group in progress(todo, text):
            first, dense, sparse = group[0]
            times = time_pair(dense, sparse, tokens)
            if first.times is None or (times.noise is None, -times.waited) > (False, -first.times.waited):
                first.times = times
        todo = [group for group in todo if group[0][0].times.noise]
    for (first, _, _), *others in groups.values():
        for row, _, _ in others:
            row.times, row.timed_as = first.times, first.name
