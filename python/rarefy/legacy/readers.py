"""What the readers of old formats share: how one is known by its tensors; checks of untrusted ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_tensor, fail
from ..csr import CsrWeight
from ..pattern import BsrPattern
from ..sparse_weight import SparseWeight

OP = "load_legacy"

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Reader:
    """A format: its name in messages, the endings of its tensors, and what makes a weight of them.

    Attributes:
        format: who wrote it, as --explain says.
        endings: of the names of all tensors that there must be; `optional`, of those that there may be.
        read: from the tensors by ending, the weight's name, and its shape in the model or None.
        weight: what is added to the name before the endings to have the weight's: "" or ".weight".
    """

    format: str
    endings: tuple[str, ...]
    read: Callable[[str, dict[str, torch.Tensor], tuple[int, int] | None], SparseWeight | torch.Tensor]
    optional: tuple[str, ...] = ()
    weight: str = ""

    def names(self, tensors: Tensors) -> list[str]:
        """The names without endings of what is stored this way."""
        first = self.endings[0]
        names = [key.removesuffix(first) for key in tensors if key.endswith(first)]
        return [name for name in names if all(name + ending in tensors for ending in self.endings)]

    def take(self, name: str, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Its tensors out of `tensors`, by ending."""
        there = [e for e in (*self.endings, *self.optional) if name + e in tensors]
        return {e: check_tensor(OP, name + e, tensors.pop(name + e)).detach().cpu() for e in there}


def check(condition: bool, requirement: str, got: object) -> None:
    """Raises ValueError unless the condition holds."""
    if not condition:
        fail(OP, requirement, got)


def csr_of_mask(values: torch.Tensor, mask: torch.Tensor) -> CsrWeight:
    """Values, in order, at the places of a bool mask (N, K)."""
    pattern = BsrPattern.from_mask(mask, shape=tuple(mask.shape), block_shape=(1, 1))
    return CsrWeight.from_pattern(values.contiguous().clone(), pattern)
