"""Optimal brain surgeon over whole layers: the order in which blocks leave, and weights at any sparsity."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from .. import _load
from ..checks import check_int, check_tensor, fail
from ..masks import expand_mask, grid_of
from .criteria import check_sparsity
from .damping import Damped, damped
from .groups import Config, FilterFn, collect_grams, find_groups
from .masks import Mask, Scores, make_mask
from .patterns import Pattern, parse_pattern

_costs = _load.op("_block_obs_costs_")
_least_squares = _load.op("_least_squares_")


def check_shapes(op: str, name: str, weight: torch.Tensor, gram: torch.Tensor | Damped) -> None:
    """Weight (N, K) and gram (K, K), or ValueError."""
    matrix = gram.gram if isinstance(gram, Damped) else gram
    check_tensor(op, name, weight)
    check_tensor(op, "gram", matrix)
    if weight.ndim != 2 or tuple(matrix.shape) != (weight.shape[1],) * 2:
        shapes = f"{tuple(weight.shape)} and {tuple(matrix.shape)}"
        fail(op, f"{name} must be (N, K) and gram (K, K)", shapes)


class Elimination:
    """Blocks of one weight in the order in which they leave; made once, then pruned to any sparsity.

    In every block row the block B of least tr(B (H⁻¹_BB)⁻¹ Bᵀ) leaves, H = XᵀX + λI, and the others are
    solved for again, until none is left (Hassibi & Stork 1993; Frantar & Alistarh 2022). A sparsity takes
    those of least cost over all block rows, so rows that need more keep more, and solves for what stays.

    Args:
        weight: (N, K), of any float dtype; copied.
        gram: (K, K), XᵀX of calibration inputs; or a Damped of it, which is used as it is.
        pattern: blocks, or single weights.
        dampening: λ / mean of XᵀX's diagonal; see damped.
        steps: rounds from all blocks to none; in each a part of every block row leaves.
        name: for messages.

    Attributes:
        damped: H, with its inverse.
        costs: (⌈N/R⌉, ⌈K/C⌉) float64: by how much ‖X(W − Ŵ)ᵀ‖² + λ‖W − Ŵ‖² grew, about, when a block left.

    Takes K³/3 operations for each block row.

    Raises ValueError for shapes that differ, patterns other than blocks, XᵀX that is not finite.
    """

    def __init__(
        self, weight: torch.Tensor, gram: torch.Tensor | Damped, pattern: Any, *, dampening: float = 0.01,
        steps: int = 32, name: str = "weight",
    ) -> None:  # fmt: skip
        op = "Elimination"
        check_shapes(op, name, weight, gram)
        check_int(op, "steps", steps, 1)
        self.pattern: Pattern = parse_pattern(pattern, op)
        self.pattern.check_shape(op, name, weight.shape)
        units = self.pattern.units(weight.shape)
        if units[3] or self.pattern.fixed or self.pattern.each_row:
            fail(op, "pattern must be blocks counted over the whole layer", self.pattern)
        self.block = units[0], units[1]
        self._home = weight.device, weight.dtype
        self._weight = weight.detach().cpu().double().contiguous().clone()
        self.damped = damped(op, gram, dampening, name)
        reached = self._weight * (self.damped.gram.diagonal() != 0)  # what no input reaches costs nothing
        self.costs = torch.zeros(grid_of(tuple(weight.shape), self.block), dtype=torch.float64)
        _costs(reached, self.damped.inverse, list(units), steps, self.costs)

    def mask(self, sparsity: float) -> Mask:
        """Which weights stay: exactly pattern.removed(shape, sparsity) blocks leave, those of least cost."""
        shape = tuple(self._weight.shape)
        check_sparsity("Elimination", "sparsity", sparsity)
        remove = self.pattern.removed(torch.Size(shape), sparsity)
        blocks = make_mask(Scores(self.costs), (1, 1, 0, 0), remove).unpack()
        return Mask.pack(expand_mask(blocks, shape, self.block))

    def prune(self, sparsity: float) -> tuple[torch.Tensor, Mask]:
        """The best weights (N, K) with that mask, in the weight's dtype and on its device, and the mask."""
        new, mask = self.solve(sparsity)
        return new.to(*self._home), mask

    def solve(self, sparsity: float) -> tuple[torch.Tensor, Mask]:
        """The same in float64 on the CPU."""
        mask, new = self.mask(sparsity), self._weight.clone()
        _least_squares(new, mask.bits, self.damped.hessian, self.damped.inverse)
        return new, mask


def eliminations(
    model: nn.Module,
    data: Collection[Any],
    pattern: Any,
    *,
    config: Config = None,
    filter_fn: FilterFn | None = None,
    forward: Callable[[Any], Any] | None = None,
    **options: Any,
) -> dict[str, Elimination]:
    """The Elimination of each nn.Linear, with the inputs it has in the model as it is, by weights' names.

    What `sensitivity` prunes with: prune=lambda name, weight, sparsity: found[name].prune(sparsity)[0].

    Args:
        model: in the mode (eval) in which it is to be good; not changed.
        data: batches: tensors, tuples of arguments or dicts of them.
        pattern: blocks.
        config: which layers, as for Sparsifier.prepare.
        filter_fn: as there.
        forward: what to do with a batch instead of calling the model.
        **options: dampening, steps.

    Each holds 16·K² bytes. Raises ValueError for data that does not reach a layer, or is not finite there.
    """
    op = "eliminations"
    groups = [g for g in find_groups(op, model, config, filter_fn) if isinstance(g["module"], nn.Linear)]
    grams, found = collect_grams(op, model, groups, data, forward), {}
    for group in groups:
        name, weight = group["tensor_fqn"], getattr(group["module"], group["tensor_name"])
        found[name] = Elimination(weight, grams.pop(name)[0], pattern, name=name, **options)
    return found
