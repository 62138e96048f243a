"""Times a dense layer and its sparse replacement against each other, in turns, in one process."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

_ROUNDS = range(5, 51)  # at least, at most
_BUDGET = 0.2  # seconds a pair may take once it has had its least rounds


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


def time_pair(dense: nn.Module, sparse: nn.Module, tokens: int) -> tuple[Timing, Timing]:
    """Forward times of two layers on the same (tokens, K) input, in turns: both meet the same noise."""
    weight = sparse.weight
    generator = torch.Generator().manual_seed(0)  # the user's global one stays as it is
    x = torch.randn(tokens, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    on_cuda = x.device.type == "cuda"
    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for layer in (dense, sparse):
            layer(x)  # warm up
        start = time.perf_counter()
        while len(times[0]) < _ROUNDS.start or (
            len(times[0]) < _ROUNDS.stop - 1 and time.perf_counter() - start < _BUDGET
        ):
            turns = ((dense, times[0]), (sparse, times[1]))
            for layer, seconds in turns if len(times[0]) % 2 == 0 else reversed(turns):
                if on_cuda:
                    torch.cuda.synchronize(x.device)
                begin = time.perf_counter()
                layer(x)
                if on_cuda:
                    torch.cuda.synchronize(x.device)
                seconds.append(time.perf_counter() - begin)
    return Timing.of(times[0]), Timing.of(times[1])
