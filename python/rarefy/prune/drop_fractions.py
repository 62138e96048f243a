"""How many blocks move when a pattern moves: a part of those stored, constant or annealed over the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..checks import check_known, fail
from .criteria import check_sparsity


@dataclass(frozen=True)
class DropFraction:
    """Base: the part of a layer's stored blocks that is dropped, and grown elsewhere, at a step.

    Attributes:
        initial: the part at step 0, in [0, 1].
    """

    initial: float = 0.3

    def __post_init__(self) -> None:  # noqa: D105
        check_sparsity(type(self).__name__, "initial", self.initial)

    @property
    def needs_end(self) -> bool:
        """Whether it must know the last step."""
        return True

    def part(self, way: float) -> float:
        """What is left of `initial` after a part of the way to the end, both in [0, 1]."""
        raise NotImplementedError

    def at(self, step: int, end: int | None) -> float:
        """The part at `step`; 0 after `end`."""
        if end is not None and step > end:
            return 0.0
        return self.initial * self.part(step / end if end else 0.0)

    def __str__(self) -> str:  # noqa: D105
        return f"{type(self).__name__.lower()}:{self.initial:g}"


@dataclass(frozen=True)
class Constant(DropFraction):
    """The same at every change: "constant:0.3" (SET, Mocanu et al. 2018)."""

    @property
    def needs_end(self) -> bool:  # noqa: D102
        return False

    def part(self, way: float) -> float:  # noqa: D102
        return 1.0


@dataclass(frozen=True)
class Cosine(DropFraction):
    """(1 + cos πt) / 2 of it: "cosine:0.3" (RigL, Evci et al. 2020)."""

    def part(self, way: float) -> float:  # noqa: D102
        return (1 + math.cos(math.pi * way)) / 2


@dataclass(frozen=True)
class Linear(DropFraction):
    """1 − t of it: "linear:0.3"."""

    def part(self, way: float) -> float:  # noqa: D102
        return 1 - way


@dataclass(frozen=True)
class Power(DropFraction):
    """(1 − t)^exponent of it: "power:0.3:3" (Evci et al. 2020, appendix)."""

    exponent: float = 3.0

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        if not 0 <= self.exponent < math.inf:
            fail("Power", "exponent must not be negative", self.exponent)

    def part(self, way: float) -> float:  # noqa: D102
        return (1 - way) ** self.exponent

    def __str__(self) -> str:  # noqa: D105
        return f"{super().__str__()}:{self.exponent:g}"


_NAMES = {"constant": Constant, "cosine": Cosine, "linear": Linear, "power": Power}


def parse_fraction(fraction: Any, op: str = "parse_fraction") -> DropFraction:
    """A DropFraction; a number, which is constant; or "cosine:0.3", "linear:0.3", "power:0.3:3".

    Raises ValueError for an unknown name (near ones are listed) or a part outside [0, 1], TypeError for
    another kind of object.
    """
    if isinstance(fraction, DropFraction):
        return fraction
    if isinstance(fraction, str):
        name, *numbers = fraction.split(":")
        check_known(op, "fraction", name, _NAMES, got=fraction)
        kind = _NAMES[name]
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = [math.nan] * 3
        if len(values) > (2 if kind is Power else 1):
            fail(op, "fraction must be written name:initial (power:initial:exponent)", repr(fraction))
        return kind(*values)
    return Constant(check_sparsity(op, "fraction", fraction))
