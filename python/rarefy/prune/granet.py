"""GraNet: RigL that begins denser and gets sparser on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..checks import check_density, fail
from .checkpoint import check_entries
from .movable import Movable
from .moving import RigL, top


class GraNet(RigL):
    """RigL whose layers begin denser than they end (Liu et al. 2021, gradual pruning with regeneration).

    Of each layer's blocks the part that stays falls along Zhu & Gupta's cubic curve from 1 at `begin` to
    `final` at `end`; of what a change keeps, the part `fraction`, smallest first, gives way to blocks of
    largest gradient, as in RigL. Values and state get memory of the new size, in the same Parameters; what a
    step costs falls with the blocks. sparse_start with twice to ten times the density that is wanted, so that
    layers find the inputs they need while there is room.

    Args:
        final: the part of the blocks that stays in the end, in [0, 1]: round(final · nnzb) of each layer.
        others: see RigL; `end` must be given, and changes something whatever `every` is.
    """

    def __init__(self, model: Any, optimizer: Any = None, *, final: float, **others: Any):
        op = type(self).__name__
        self.final = check_density(op, final)
        if others.get("end") is None:
            fail(op, "end must be given: the step by which so few blocks are left", None)
        super().__init__(model, optimizer, **others)
        self.first = {layer.name: layer.nnzb for layer in self.layers}

    def settings(self) -> dict[str, str]:  # noqa: D102
        return super().settings() | {"final": str(self.final)}

    def due(self, step: int) -> bool:
        """Whether step `step`, counted from 1, changes patterns."""
        return self.begin <= step <= self.end and (step % self.every == 0 or step == self.end)

    def _next(self, layer: Movable, fraction: float, gradient: torch.Tensor | None) -> torch.Tensor:
        first = self.first[layer.name]
        last = round(self.final * first)
        rest = 1 - min(1.0, (self.clock - self.begin) / max(1, self.end - self.begin))
        count = min(layer.nnzb, last + round((first - last) * rest**3))
        kept = top(layer.norms(), count - round(fraction * count))
        return top(self._wanted(layer, gradient).masked_fill_(kept, torch.inf), count)

    def state_dict(self) -> dict[str, Any]:
        """As of every method, and how many blocks layers began with."""
        return super().state_dict() | {"first": dict(self.first)}

    def _check_state(self, op: str, state_dict: Mapping[str, Any]) -> None:
        super()._check_state(op, state_dict)
        check_entries(op, state_dict, {"first": Mapping})
        check_entries(op, state_dict["first"], dict.fromkeys(self.first, int), "first")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As of every method."""
        super().load_state_dict(state_dict, strict)
        self.first = {name: state_dict["first"][name] for name in self.first}
