"""Which units are compared with each other, and how a sparsity is shared among layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_known, fail
from .masks import Scores, allocate_global, lamp_scores
from .patterns import count_of, matrix_shape


@dataclass(frozen=True)
class Scope:
    """Base of Local, PerRow and Global."""


@dataclass(frozen=True)
class Local(Scope):
    """The units of each layer among themselves: "local"."""


@dataclass(frozen=True)
class PerRow(Scope):
    """Those of each row of units, so that every row loses the same number: "per_row"."""


@dataclass(frozen=True)
class Global(Scope):
    """The units of all layers: "global".

    Attributes:
        min_density: what every layer keeps at least.
        max_density: what every layer keeps at most.
    """

    min_density: float = 0.0
    max_density: float = 1.0

    def __post_init__(self) -> None:  # noqa: D105
        if not 0 <= self.min_density <= self.max_density <= 1:
            got = f"{self.min_density} and {self.max_density}"
            fail("Global", "densities must satisfy 0 <= min_density <= max_density <= 1", got)

    def limits(self, units: int) -> tuple[int, int]:
        """How many of a layer's units must leave, and may."""
        return units - math.floor(self.max_density * units), units - math.ceil(self.min_density * units)


@dataclass(frozen=True)
class LayerInfo:
    """What an allocation knows of a layer: its weight (any dimensions), and inputs observed, or None."""

    name: str
    weight: torch.Tensor
    units: int
    inputs: torch.Tensor | None = None  # (groups, K), sums of squares


@dataclass(frozen=True)
class Allocation:
    """Base of all allocations."""

    @property
    def needs(self) -> str | None:
        """What must be observed, as of a criterion."""
        return None

    def removed(self, layers: Sequence[LayerInfo], sparsity: float) -> list[int]:
        """How many units each layer loses; together round(sparsity · units of all)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Uniform(Allocation):
    """The same sparsity in every layer: "uniform"."""

    def removed(self, layers: Sequence[LayerInfo], sparsity: float) -> list[int]:  # noqa: D102
        return [count_of(sparsity, layer.units) for layer in layers]


def _exact(densities: Sequence[float], units: Sequence[int], sparsity: float) -> list[int]:
    """Counts near (1 − density) · units that add up to round(sparsity · all).

    Where they do not, all densities move by the same, within [0, 1]; largest remainders get the rest.
    """
    total = count_of(sparsity, sum(units))

    def lost(shift: float) -> list[float]:
        return [min(max(1 - d + shift, 0.0), 1.0) * u for d, u in zip(densities, units, strict=True)]

    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lost(middle)) < total else (low, middle)
    wanted = lost(high)
    counts = [math.floor(w) for w in wanted]
    order = sorted(range(len(units)), key=lambda i: (counts[i] - wanted[i], i))
    missing, at = total - sum(counts), 0
    while missing:
        i, step = order[at % len(order)], 1 if missing > 0 else -1
        if 0 <= counts[i] + step <= units[i]:
            counts[i] += step
            missing -= step
        at += 1
    return counts


@dataclass(frozen=True)
class ER(Allocation):
    """Density in proportion to (N + K) / (N · K), at most 1 (Erdős–Rényi; Mocanu et al. 2018): "er"."""

    def weigh(self, shape: torch.Size) -> float:
        """The density of a layer up to a factor."""
        rows, cols = matrix_shape(shape)
        return (rows + cols) / max(1, rows * cols)

    def removed(self, layers: Sequence[LayerInfo], sparsity: float) -> list[int]:  # noqa: D102
        units = [layer.units for layer in layers]
        raw = [self.weigh(layer.weight.shape) for layer in layers]
        keep, full = (1 - sparsity) * sum(units), set()
        while True:  # layers that would be more than dense are dense, and the others share the rest
            rest = keep - sum(units[i] for i in full)
            share = sum(r * u for i, (r, u) in enumerate(zip(raw, units, strict=True)) if i not in full)
            factor = rest / share if share else 0.0
            over = {i for i, r in enumerate(raw) if i not in full and factor * r > 1}
            if not over:
                break
            full |= over
        return _exact([1.0 if i in full else factor * r for i, r in enumerate(raw)], units, sparsity)


@dataclass(frozen=True)
class ERK(ER):
    """ER with the kernel's sizes: Σ shape / Π shape (Evci et al. 2020): "erk"."""

    def weigh(self, shape: torch.Size) -> float:  # noqa: D102
        return sum(shape) / max(1, shape.numel())


@dataclass(frozen=True)
class OWL(Allocation):
    """Layers with more outliers stay denser (Yin et al. 2024): "owl".

    An outlier is an |W_ij| ‖X_j‖ above m times the layer's mean; densities differ by at most 2λ, and the
    density of the whole is kept.

    Attributes:
        m: what makes an outlier.
        lmbda: λ.
    """

    m: float = 5.0
    lmbda: float = 0.08

    @property
    def needs(self) -> str:  # noqa: D102
        return "inputs"

    def removed(self, layers: Sequence[LayerInfo], sparsity: float) -> list[int]:  # noqa: D102
        parts = []
        for layer in layers:
            if layer.inputs is None:
                advice = "run data through the model inside Sparsifier.calibration() first"
                fail("OWL", f"needs observed inputs ({advice})", f"none of {layer.name}")
            weight = layer.weight.detach().reshape(len(layer.inputs), -1, layer.inputs.shape[1])
            scores = weight.abs().double().cpu() * layer.inputs.sqrt().unsqueeze(1)
            parts.append(float((scores > self.m * scores.mean()).double().mean()))
        low, span = min(parts), max(parts) - min(parts)
        around = [2 * self.lmbda * (part - low) / span if span else 0.0 for part in parts]
        units = [layer.units for layer in layers]
        mean = sum(a * u for a, u in zip(around, units, strict=True)) / max(1, sum(units))
        return _exact([1 - sparsity + a - mean for a in around], units, sparsity)


@dataclass(frozen=True)
class LAMP(Allocation):
    """Global selection of w² / Σ of the squares of the layer that are not less (Lee et al. 2021): "lamp".

    The scores are made of single weights whatever the pattern; a layer's sparsity is that of its weights.
    """

    def removed(self, layers: Sequence[LayerInfo], sparsity: float) -> list[int]:  # noqa: D102
        scores = [Scores(lamp_scores(layer.weight)) for layer in layers]
        sizes = [layer.weight.numel() for layer in layers]
        limits, units = [(0, size) for size in sizes], [(1, 1, 0, 0)] * len(sizes)
        lost = allocate_global(scores, units, limits, count_of(sparsity, sum(sizes)))
        densities = [1 - n / size if size else 1.0 for n, size in zip(lost, sizes, strict=True)]
        return _exact(densities, [layer.units for layer in layers], sparsity)


def _parse(op: str, what: str, given: Any, base: type, names: dict[str, type]) -> Any:
    if isinstance(given, base):
        return given
    if not isinstance(given, str):
        requirement = f"{what} must be of rarefy.prune.{base.__name__} or a str"
        fail(op, requirement, type(given).__name__, TypeError)
    check_known(op, what, given, names)
    return names[given]()


def parse_scope(scope: Any, op: str = "parse_scope") -> Scope:
    """A Scope, "local", "per_row" or "global".

    Raises ValueError for an unknown name (near ones are listed), TypeError for another kind of object.
    """
    return _parse(op, "scope", scope, Scope, {"local": Local, "per_row": PerRow, "global": Global})


def parse_allocation(allocation: Any, op: str = "parse_allocation") -> Allocation:
    """An Allocation, "uniform", "er", "erk", "owl" or "lamp".

    Raises ValueError for an unknown name (near ones are listed), TypeError for another kind of object.
    """
    names = {"uniform": Uniform, "er": ER, "erk": ERK, "owl": OWL, "lamp": LAMP}
    return _parse(op, "allocation", allocation, Allocation, names)
