"""What the readers of old formats share: how one is known by its tensors; checks of untrusted ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import DTYPE_NAMES, check_tensor, fail
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


def check_pair(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Two sizes that are stored as a tensor."""
    values = tensor.flatten().tolist()
    whole = not tensor.is_floating_point() and len(values) == 2
    check(whole and all(0 <= n < 2**31 for n in values), f"{name} must be two sizes", values[:3])
    return int(values[0]), int(values[1])


def check_values(name: str, values: torch.Tensor) -> torch.Tensor:
    """Raises unless values are of a dtype that weights can have."""
    known = values.dtype in DTYPE_NAMES
    check(known, f"{name} must be one of {', '.join(DTYPE_NAMES.values())}", values.dtype)
    return values


def csr_of_mask(values: torch.Tensor, mask: torch.Tensor) -> CsrWeight:
    """Values, in order, at the places of a bool mask (N, K)."""
    crow = torch.zeros(mask.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(mask.sum(1), 0, out=crow[1:])
    shape = (mask.shape[0], mask.shape[1])
    pattern = BsrPattern(crow, mask.nonzero()[:, 1], shape=shape, block_shape=(1, 1), op=OP)
    return CsrWeight.from_pattern(values.contiguous().clone(), pattern)
