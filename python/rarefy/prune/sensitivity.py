"""Sensitivity: what a layer's sparsity costs in quality and brings in time; sparsities under a budget."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..checks import check_int, check_known, fail
from ..log import progress
from ..masks import grid_of, to_blocks
from .budget import choose
from .criteria import check_sparsity, parse_criterion
from .groups import Config, FilterFn, find_groups
from .patterns import Pattern, matrix_shape, parse_pattern

_INDEX = 4  # bytes of an index
_COSTS = {"parameters": "parameters", "bytes": "bytes", "milliseconds": "ms"}


@dataclass(frozen=True)
class Point:
    """One group of layers pruned to one sparsity, the others left alone.

    Attributes:
        group: its name.
        layers: names of its weights.
        sparsity: what was asked for; 0 is the dense group.
        loss: what `evaluate` says then.
        parameters: weights that stay; bytes: of values and indices as they are stored.
        milliseconds: of one call of each of its layers, predicted; None where no prediction is made.
    """

    group: str
    layers: tuple[str, ...]
    sparsity: float
    loss: float
    parameters: int
    bytes: int
    milliseconds: float | None


@dataclass(frozen=True)
class Plan:
    """Sparsities under a budget, with `config` for Sparsifier.prepare and reconstruct; what they cost."""

    sparsities: dict[str, float]  # by weight
    loss: float  # the sum of the single increases: an estimate
    parameters: int
    bytes: int
    milliseconds: float | None

    @property
    def config(self) -> dict[str, dict[str, float]]:
        """{name of a layer: {"sparsity": s}} of the layers that are pruned."""
        return {re.escape(name): {"sparsity": s} for name, s in self.sparsities.items() if s > 0}


@dataclass
class Sensitivity:
    """The points of all groups, `loss` of the dense model, and how they were measured."""

    pattern: str
    tokens: int
    loss: float
    points: list[Point] = field(default_factory=list)

    def __iter__(self) -> Iterator[Point]:  # noqa: D105
        return iter(self.points)

    def __len__(self) -> int:  # noqa: D105
        return len(self.points)

    def groups(self) -> dict[str, list[Point]]:
        """The points by group, of ascending sparsity."""
        found: dict[str, list[Point]] = {}
        for point in sorted(self.points, key=lambda p: p.sparsity):
            found.setdefault(point.group, []).append(point)
        order = dict.fromkeys(point.group for point in self.points)
        return {group: found[group] for group in order}

    def allocate(
        self,
        *,
        parameters: float | None = None,
        bytes: float | None = None,  # noqa: A002
        milliseconds: float | None = None,
    ) -> Plan:
        """For each group one of the sparsities that were measured: the least sum of losses under a budget.

        Args:
            parameters: weights that all groups together may have. Exactly one budget is given.
            bytes: that they may store.
            milliseconds: that they may take, by prediction.

        Losses are taken to add up, as if layers did not depend on each other.

        Raises ValueError for a budget that cannot be met, with the least that can, and for milliseconds where
        no time was predicted.
        """
        budgets = {"parameters": parameters, "bytes": bytes, "milliseconds": milliseconds}
        given = {kind: value for kind, value in budgets.items() if value is not None}
        if len(given) != 1:
            fail("allocate", "one budget of parameters, bytes or milliseconds must be given", sorted(given))
        ((kind, budget),) = given.items()
        rows = list(self.groups().values())
        costs = [[getattr(point, kind) for point in row] for row in rows]
        if any(cost is None for row in costs for cost in row):
            fail("allocate", "milliseconds need predicted times (float32 or bfloat16 on the CPU)", "none")
        losses = [[point.loss - self.loss for point in row] for row in rows]
        at = choose(costs, losses, budget, _COSTS[kind])
        chosen = [row[i] for row, i in zip(rows, at, strict=True)]
        times = [point.milliseconds for point in chosen]
        return Plan(
            {name.removesuffix(".weight"): point.sparsity for point in chosen for name in point.layers},
            sum(point.loss - self.loss for point in chosen),
            sum(point.parameters for point in chosen),
            sum(point.bytes for point in chosen),
            None if None in times else sum(times),
        )

    def to_json(self) -> str:
        """Everything, as `from_json` reads it."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Sensitivity:
        """What to_json wrote; ValueError for something else."""
        try:
            saved = json.loads(text)
            points = [Point(**{**p, "layers": tuple(p["layers"])}) for p in saved["points"]]
            return cls(saved["pattern"], saved["tokens"], saved["loss"], points)
        except (ValueError, KeyError, TypeError) as error:
            fail("Sensitivity.from_json", "text must be of Sensitivity.to_json", repr(error))

    def to_csv(self) -> str:
        """A line for each point, with a head."""
        from .sensitivity_files import to_csv

        return to_csv(self)

    def to_html(self) -> str:
        """A page of its own: both curves of every group, and the table."""
        from .sensitivity_files import to_html

        return to_html(self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes .csv, .json, .html or, with matplotlib, .png, in one step."""
        from .sensitivity_files import write

        write(self, path)


@torch.no_grad()
def sensitivity(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    pattern: Any = "block:16x16",
    sparsities: Sequence[float] = (0.25, 0.5, 0.75, 0.9),
    *,
    by: str | Mapping[str, str] = "layer",
    criterion: Any = "magnitude",
    prune: Callable[[str, torch.Tensor, float], torch.Tensor] | None = None,
    config: Config = None,
    filter_fn: FilterFn | None = None,
    tokens: int = 512,
    time: bool = True,
    resume: Sensitivity | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Sensitivity:
    """Prunes one layer or group after the other, evaluates, and puts its weights back, bit for bit.

    Args:
        model: any module; not changed in the end, nor by an error or an interruption.
        evaluate: called with the model; a number, the smaller the better (an accuracy: its negative).
        pattern: see parse_pattern.
        sparsities: of each group, in (0, 1]; the dense model is measured once.
        by: "layer"; "module": layers of the same parent together, as query, key and value; or {name: regular
            expression for whole names of weights}, each weight in one.
        criterion: one that needs no data.
        prune: instead of criterion and pattern's mask: the new weight from name, weight and sparsity, such as
            reconstruct_weight makes.
        config: which weights, as of Sparsifier.prepare.
        filter_fn: the same.
        tokens: for which times are predicted.
        time: whether they are: by rarefy's predictor, on this CPU, of nn.Linear at sparsity 0 and of what the
            pattern is stored as; without, or for what it cannot predict (N:M), `milliseconds` is None.
        resume: a part of the same measurement, whose groups are not measured again.
        path: where the report is written after each group; see Sensitivity.write.

    Shows a progress bar on a terminal.

    Raises ValueError for no sparsities, those outside (0, 1] or more than the pattern allows, names that
    match nothing, a loss of the dense model that is not finite, and a `resume` of another pattern or other
    tokens; TypeError for a loss that is no number.
    """
    op = "sensitivity"
    pattern, criterion = parse_pattern(pattern, op), parse_criterion(criterion, op)
    if criterion.needs is not None and prune is None:
        fail(op, "criterion must be one that needs no data (prune= can be any)", criterion)
    if not len(sparsities):
        fail(op, "sparsities must hold one or more", "none")
    for sparsity in sparsities:
        pattern.check_sparsity(op, check_sparsity(op, "sparsities", sparsity))
    check_int(op, "tokens", tokens, 1)
    lots = _lots(op, find_groups(op, model, config, filter_fn), by)
    for weight in (_weight(g) for lot in lots.values() for g in lot):
        pattern.check_shape(op, "a weight", weight.shape)

    def loss_of() -> float:
        loss = evaluate(model)
        try:
            return float(loss)
        except (TypeError, ValueError):
            return fail(op, "evaluate must return a number", repr(loss), TypeError)

    report = copy.deepcopy(resume)
    if report is None:
        report = Sensitivity(str(pattern), tokens, loss_of())
        if not math.isfinite(report.loss):
            fail(op, "evaluate must give the dense model a finite number", report.loss)
    elif (report.pattern, report.tokens) != (str(pattern), tokens):
        got = f"{report.pattern} for {report.tokens} tokens"
        fail(op, f"resume must be of {pattern} for {tokens} tokens", got)
    done, random = report.groups(), torch.Generator().manual_seed(0)

    def changed(group: dict[str, Any], sparsity: float) -> torch.Tensor:
        name, weight = group["tensor_fqn"], _weight(group).detach()
        if prune is not None:
            return prune(name, weight.clone(), sparsity)
        matrix = weight.reshape(matrix_shape(weight.shape))
        mask = pattern.mask(criterion.score(name, matrix, {}, random), weight.shape, sparsity)
        return mask.apply_(weight.clone())

    for name, lot in progress(lots.items(), op):
        if name in done:
            continue
        names = tuple(group["tensor_fqn"] for group in lot)
        kept = [_weight(group).detach().clone() for group in lot]
        points = [_point(name, names, kept, pattern, 0.0, report.loss, tokens, time)]
        for sparsity in sparsities:
            try:
                for group in lot:
                    _weight(group).copy_(changed(group, sparsity))
                now = [_weight(group).detach() for group in lot]
                points.append(_point(name, names, now, pattern, sparsity, loss_of(), tokens, time))
            finally:
                for group, weight in zip(lot, kept, strict=True):
                    _weight(group).copy_(weight)
        report.points += points
        if path is not None:
            report.write(path)
    return report


def _weight(group: dict[str, Any]) -> torch.Tensor:
    return getattr(group["module"], group["tensor_name"])


def _lots(op: str, groups: list[dict[str, Any]], by: str | Mapping[str, str]) -> dict[str, list[dict]]:
    """Groups of weights that are pruned together, by name."""
    lots: dict[str, list[dict[str, Any]]] = {}
    if not isinstance(by, Mapping):
        check_known(op, "by", by, ("layer", "module"))
    for group in groups:
        name = group["module_fqn"]
        if isinstance(by, Mapping):
            hits = [key for key, regex in by.items() if re.fullmatch(regex, name)]
            if len(hits) != 1:
                fail(op, f"{name} must match one expression of by", f"{len(hits)}: {', '.join(hits)}")
            name = hits[0]
        elif by == "module":
            name = name.rpartition(".")[0]
        lots.setdefault(name, []).append(group)
    return lots


def _point(
    name: str, names: tuple[str, ...], weights: list[torch.Tensor], pattern: Pattern, sparsity: float,
    loss: float, tokens: int, time: bool,
) -> Point:  # fmt: skip
    """What a group of weights, pruned or dense, has, stores and takes."""
    stored = [_stored(weight, pattern if sparsity else None) for weight in weights]
    times = [_milliseconds(*x, tokens) if time else None for x in zip(weights, stored, strict=True)]
    parameters, size = 0, 0
    for weight, (form, block, count) in zip(weights, stored, strict=True):
        values = count * math.prod(block)
        rows, cols = matrix_shape(weight.shape)
        indices = {"dense": 0, "bits": rows * -(-cols // 8)}
        blocks = _INDEX * (count + grid_of((rows, cols), block)[0] + 1)
        parameters += min(values, weight.numel())
        size += values * weight.element_size() + indices.get(form, blocks)
    total = None if None in times else sum(times)
    return Point(name, names, sparsity, loss, parameters, size, total)


def _stored(weight: torch.Tensor, pattern: Pattern | None) -> tuple[str, tuple[int, int], int]:
    """How a weight would be stored, "dense", "blocks" or "bits" (one an element); the blocks, how many."""
    form = None if pattern is None else pattern.spec
    if form is None or weight.ndim != 2:
        return "dense", (1, 1), weight.numel()
    single = form in ("csr", "bitmap", "2:4")
    r, c = (1, 1) if single else map(int, form.removeprefix("block:").split("x"))
    count = int((to_blocks(weight, (r, c)) != 0).flatten(2).any(2).sum())
    return "bits" if single and form != "csr" else "blocks", (r, c), count


def _milliseconds(
    weight: torch.Tensor, stored: tuple[str, tuple[int, int], int], tokens: int
) -> float | None:
    """A call of a linear layer, predicted; None where there is no prediction."""
    form, block, count = stored
    from ..advice import can_predict
    from ..predictor import Case, predicted_seconds

    if weight.ndim != 2 or form == "bits" or not can_predict(weight):
        return None
    case = Case(tokens, *weight.shape, dtype=weight.dtype, device=weight.device.type)
    if form != "dense":
        density = count / math.prod(grid_of(tuple(weight.shape), block))
        case = replace(case, block=block, density=density)
    seconds = predicted_seconds(case)
    return None if seconds == math.inf else 1e3 * seconds
