"""How sparsity grows over the steps: when masks are due, and how sparse they are then."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..checks import check_int, check_known, fail


@dataclass(frozen=True)
class Schedule:
    """A clock from `begin` to `end`, with a mask every `every` steps, and one at `end` in any case.

    Attributes:
        begin: the first step with a mask.
        end: the last one; from then on nothing changes.
        every: steps from one mask to the next.
        initial: sparsity at `begin`, for those schedules that grow.
    """

    begin: int = 0
    end: int = 0
    every: int = 1
    initial: float = 0.0

    def __post_init__(self) -> None:  # noqa: D105
        name = type(self).__name__
        check_int(name, "begin", self.begin)
        check_int(name, "end", self.end)
        check_int(name, "every", self.every, 1)
        if self.end < self.begin:
            fail(name, "end must not be before begin", f"begin={self.begin}, end={self.end}")
        if not 0 <= self.initial <= 1:
            fail(name, "initial must be in [0, 1]", self.initial)

    def due(self, step: int) -> bool:
        """Whether step `step`, counted from 0, makes masks."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)

    def part(self, way: float) -> float:
        """How much of the whole change is done after a part of the way, both in [0, 1]."""
        return 1.0

    def sparsity(self, step: int, final: float) -> float:
        """The sparsity in force after step `step`; 0 before `begin`, exactly `final` from `end` on."""
        if step < self.begin:
            return 0.0
        if step >= self.end:
            return final
        last = step - (step - self.begin) % self.every  # when masks were last due
        way = (last - self.begin) / (self.end - self.begin)
        return self.initial + (final - self.initial) * self.part(way)


@dataclass(frozen=True)
class OneShot(Schedule):
    """The final sparsity at once, at step `begin`: "one_shot"."""

    def __post_init__(self) -> None:  # noqa: D105
        if self.end < self.begin:
            object.__setattr__(self, "end", self.begin)
        super().__post_init__()

    def due(self, step: int) -> bool:  # noqa: D102
        return step == self.begin

    def sparsity(self, step: int, final: float) -> float:  # noqa: D102
        return final if step >= self.begin else 0.0


@dataclass(frozen=True)
class Cubic(Schedule):
    """s + (i − s)(1 − t)³ (Zhu & Gupta 2017): fast while much is redundant, slow at the end."""

    def part(self, way: float) -> float:  # noqa: D102
        return 1 - (1 - way) ** 3


@dataclass(frozen=True)
class Linear(Schedule):
    """s + (i − s)(1 − t): the same step each time: "linear"."""

    def part(self, way: float) -> float:  # noqa: D102
        return way


@dataclass(frozen=True)
class Exponential(Schedule):
    """(1 − e^(−rate·t)) / (1 − e^(−rate)): what is left to do shrinks by the same factor each time."""

    rate: float = 5.0

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        if not (self.rate > 0 and math.isfinite(self.rate)):
            fail("Exponential", "rate must be positive", self.rate)

    def part(self, way: float) -> float:  # noqa: D102
        return math.expm1(-self.rate * way) / math.expm1(-self.rate)


@dataclass(frozen=True)
class Cosine(Schedule):
    """(1 − cos πt) / 2: slow at both ends."""

    def part(self, way: float) -> float:  # noqa: D102
        return (1 - math.cos(math.pi * way)) / 2


@dataclass(frozen=True)
class Periodic(Schedule):
    """The final sparsity each time, with masks made anew every `every` steps until `end`."""


@dataclass(frozen=True)
class Lambda(Schedule):
    """fn(step) · final each time, as torch.ao's LambdaSL; without `end` for ever."""

    fn: Callable[[int], float] = lambda step: 1.0
    end: int = 2**62

    def sparsity(self, step: int, final: float) -> float:  # noqa: D102
        if step < self.begin:
            return 0.0
        step = min(step, self.end)
        value = self.fn(step - (step - self.begin) % self.every) * final
        if not 0 <= value <= 1:
            fail("Lambda", "fn must give a sparsity in [0, 1] times the final one", f"{value} at step {step}")
        return value


_NAMES = {
    "one_shot": OneShot,
    "cubic": Cubic,
    "linear": Linear,
    "exponential": Exponential,
    "cosine": Cosine,
    "periodic": Periodic,
}


def parse_schedule(schedule: Any, op: str = "parse_schedule") -> Schedule:
    """A Schedule, "one_shot", or "cubic:100:2000:50" for one with begin, end and every.

    Raises ValueError for an unknown name (near ones are listed), TypeError for another kind of object.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        fail(op, "schedule must be a Schedule or a str", type(schedule).__name__, TypeError)
    name, *numbers = schedule.split(":")
    check_known(op, "schedule", name, _NAMES, got=schedule)
    if len(numbers) > 3 or not all(n.isdigit() for n in numbers):
        fail(op, "schedule must be written name:begin:end:every", repr(schedule))
    return _NAMES[name](*map(int, numbers))
