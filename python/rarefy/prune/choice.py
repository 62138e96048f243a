"""Which units leave each weight of a Sparsifier now: within a layer, a row, or over all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checks import fail
from .masks import Mask, Scores, allocate_global
from .patterns import EachRow, Pattern, count_of, matrix_shape
from .scopes import Global, LayerInfo, PerRow, Uniform

if TYPE_CHECKING:
    from .sparsifier import Sparsifier

Group = dict[str, Any]


def choose_masks(s: Sparsifier, levels: dict[str, float]) -> None:
    """Gives all weights new masks, at these sparsities by name."""
    if isinstance(s.scope, Global):
        _choose_globally(s, levels)
        return
    counts = _allocated(s, levels)
    for group in s.groups:
        fqn = group["tensor_fqn"]
        if counts is None or fqn not in counts:
            choose_alone(s, group, levels[fqn])
        else:
            shape = s._original(group).shape
            s._set(
                group,
                _pattern(s, group).mask_of_count(scores_of(s, group), shape, counts[fqn], _before(s, fqn)),
            )


def choose_alone(s: Sparsifier, group: Group, sparsity: float) -> None:
    """Gives one weight a new mask at its own sparsity."""
    shape, previous = s._original(group).shape, _before(s, group["tensor_fqn"])
    s._set(group, _pattern(s, group).mask(scores_of(s, group), shape, sparsity, previous))


def _allocated(s: Sparsifier, levels: dict[str, float]) -> dict[str, int] | None:
    """Units that leave each layer, unless all layers have their own sparsity."""
    if isinstance(s.allocation, Uniform):
        return None
    groups = [g for g in s.groups if not g["pattern"].fixed]
    layers = []
    for group in groups:
        weight, inputs = s._original(group).detach(), s.state[group["tensor_fqn"]].get("inputs")
        # Counts of each row of units are shared as counts of all.
        layers.append(LayerInfo(group["tensor_fqn"], weight, group["pattern"].count(weight.shape), inputs))
    removed = s.allocation.removed(layers, _mean(levels, layers))
    if isinstance(s.scope, PerRow):
        pairs = zip(groups, layers, strict=True)
        across = [_pattern(s, group).count(layer.weight.shape) for group, layer in pairs]
        removed = [
            count_of(n / x.units, a) if x.units else 0
            for n, x, a in zip(removed, layers, across, strict=True)
        ]
    return {layer.name: n for layer, n in zip(layers, removed, strict=True)}


def _choose_globally(s: Sparsifier, levels: dict[str, float]) -> None:
    groups = [g for g in s.groups if not g["pattern"].fixed]
    scores = [scores_of(s, group) for group in groups]
    if len({x.importance for x in scores}) > 1:
        scores = [Scores(x.dense()) for x in scores]
    names, weights = [g["tensor_fqn"] for g in groups], [s._original(g) for g in groups]
    patterns, shapes = [g["pattern"] for g in groups], [weight.shape for weight in weights]
    counts = [pattern.count(shape) for pattern, shape in zip(patterns, shapes, strict=True)]
    layers = [LayerInfo(*x) for x in zip(names, weights, counts, strict=True)]
    total = sum(p.removed(x, levels[n]) for p, x, n in zip(patterns, shapes, names, strict=True))
    limits = [s.scope.limits(n) for n in counts]
    # On its way a schedule may ask for less than the ceilings take: those hold for what is asked.
    least, most = sum(low for low, _ in limits), sum(high for _, high in limits)
    if total < least:
        limits = [(0, high) for _, high in limits]
    if total > most:
        got = f"{_mean(levels, layers):g}; the most that can be is {most / max(1, sum(counts)):g}"
        fail("step", f"sparsity must leave every layer a density of {s.scope.min_density:g}", got)
    units = [pattern.units(shape) for pattern, shape in zip(patterns, shapes, strict=True)]
    previous = [_before(s, name) for name in names]
    removed = allocate_global(scores, units, limits, total, previous) if groups else []
    for group, score, shape, n, before in zip(groups, scores, shapes, removed, previous, strict=True):
        s._set(group, group["pattern"].mask_of_count(score, shape, n, before))
    for group in s.groups:
        if group["pattern"].fixed:
            s._set(group, group["pattern"].mask(scores_of(s, group), s._original(group).shape, 0.0))


def _pattern(s: Sparsifier, group: Group) -> Pattern:
    pattern = group["pattern"]
    if isinstance(s.scope, PerRow) and not pattern.each_row and not pattern.fixed:
        return EachRow(pattern)
    return pattern


def _before(s: Sparsifier, fqn: str) -> Mask | None:
    return None if s.regrow else s.state[fqn]["mask"]


def scores_of(s: Sparsifier, group: Group) -> Scores:
    """What the criterion says of one weight now."""
    weight = s._original(group).detach()
    matrix, fqn = weight.reshape(matrix_shape(weight.shape)), group["tensor_fqn"]
    if group["pattern"].fixed:
        return Scores(matrix)
    return s.criterion.score(fqn, matrix, s.state[fqn], s.random)


def _mean(levels: dict[str, float], layers: list[LayerInfo]) -> float:
    """The sparsity over all units of the layers."""
    total = sum(layer.units for layer in layers)
    return sum(levels[layer.name] * layer.units for layer in layers) / total if total else 0.0
