"""Masks as bits, and the core's ops that make and apply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _load, _torch_private
from ..checks import check_int, check_tensor, fail

_prune_mask = _load.op("_prune_mask")
_allocate = _load.op("_prune_allocate")
_lamp = _load.op("_lamp_scores_")
_apply = _load.op("_mask_apply_")
_pack = _load.op("_mask_pack")
_unpack = _load.op("_mask_unpack")
_unpack_into = _load.op("_mask_unpack_")

if _load.problem is None:
    for _name in ("_prune_mask", "_prune_allocate", "_lamp_scores_", "_mask_apply_"):
        _torch_private.rename_type_errors(getattr(torch.ops.rarefy, _name))


@dataclass(frozen=True)
class Scores:
    """How much each weight of a matrix matters, as the core takes it: nothing is computed beforehand.

    Attributes:
        values: (N, K), in float64, float32, bfloat16 or float16, on any device.
        importance: what an element counts: "value", "magnitude" |x| or "square" x²; a unit of several
            elements counts as their sum, for "square" as the root of it.
        column_scale: (K,) float64 factors of |x| or x², or None.
    """

    values: torch.Tensor
    importance: str = "value"
    column_scale: torch.Tensor | None = None

    def to_host(self) -> Scores:
        """The same on the CPU, where masks are made."""
        scale = None if self.column_scale is None else self.column_scale.double().cpu().contiguous()
        return Scores(self.values.detach().cpu(), self.importance, scale)

    def dense(self) -> torch.Tensor:
        """(N, K) float64: what each element counts."""
        x = self.values.detach().double()
        x = {"value": x, "magnitude": x.abs(), "square": x.square()}[self.importance]
        return x if self.column_scale is None else x * self.column_scale.to(x.device)


@dataclass(frozen=True)
class Mask:
    """Which elements of an (N, K) matrix stay, one bit each.

    Attributes:
        bits: (N, ⌈K/8⌉) uint8 on the CPU; bit c % 8 of byte c / 8, as numpy.packbits with bitorder="little".
        cols: K.
        kept: how many elements stay.
        nan: how many scores were NaN; they count as lowest.
    """

    bits: torch.Tensor
    cols: int
    kept: int
    nan: int = 0

    @classmethod
    def pack(cls, mask: torch.Tensor) -> Mask:
        """Of a bool (N, K) tensor; ValueError for another."""
        check_tensor("Mask.pack", "mask", mask)
        if mask.ndim != 2 or mask.dtype != torch.bool:
            got = f"{tuple(mask.shape)}, {mask.dtype}"
            fail("Mask.pack", "mask must be a bool matrix", got)
        mask = mask.detach().cpu().contiguous()
        return cls(_pack(mask), mask.shape[1], int(mask.sum()))

    def unpack(self) -> torch.Tensor:
        """The bool (N, K) tensor."""
        return _unpack(self.bits, self.cols).view(torch.bool)

    @torch.no_grad()
    def copy_into(self, buffer: torch.Tensor) -> None:
        """Writes the mask into a bool tensor of N rows and N·K elements."""
        if buffer.device.type == "cpu" and buffer.is_contiguous():
            _unpack_into(buffer.detach().view(len(self.bits), self.cols), self.bits)
            torch.autograd.graph.increment_version(buffer)
        else:
            buffer.copy_(self.unpack().view(buffer.shape))

    @property
    def density(self) -> float:
        """Elements that stay / all; 1 if there are none."""
        return self.kept / (len(self.bits) * self.cols) if len(self.bits) * self.cols else 1.0

    @torch.no_grad()
    def apply_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sets to zero what does not stay, NaN included, in place; `tensor` is of N rows and N·K elements.

        Raises TypeError for a dtype that Scores do not have either.
        """
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            _apply(tensor.detach().view(len(self.bits), self.cols), self.bits)
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.masked_fill_(~self.unpack().to(tensor.device).view(tensor.shape), 0)
        return tensor


def make_mask(
    scores: Scores,
    units: tuple[int, int, int, int],
    remove: int,
    *,
    each_row: bool = False,
    previous: Mask | None = None,
) -> Mask:
    """The mask without the `remove` lowest units; see include/rarefy/prune.h for what decides.

    Args:
        scores: of an (N, K) matrix.
        units: (R, C, n, m): blocks of R × C, with m > 0 also n:m.
        remove: how many units leave, with `each_row` of every row of units.
        each_row: see `remove`.
        previous: what it has removed leaves before anything else.

    Raises ValueError for more or fewer units than there are, units without elements, and a `previous` of
    another size; TypeError for scores of another dtype than Scores have.
    """
    scores = scores.to_host()
    before = None if previous is None else previous.bits
    args = (scores.values, scores.importance, scores.column_scale, before, list(units), each_row, remove)
    bits, kept, nan = _prune_mask(*args)
    return Mask(bits, scores.values.shape[1], kept, nan)


@torch.no_grad()
def lamp_scores(weight: torch.Tensor) -> torch.Tensor:
    """w² / Σ of the squares that are not less, of all weights in ascending order: (1, N·K) float64."""
    matrix = weight.detach().cpu().reshape(1, -1)
    scores = torch.empty(matrix.shape, dtype=torch.float64)
    _lamp(matrix, scores)
    return scores


def allocate_global(
    scores: Sequence[Scores],
    units: Sequence[tuple[int, int, int, int]],
    limits: Sequence[tuple[int, int]],
    remove: int,
    previous: Sequence[Mask | None] | None = None,
) -> list[int]:
    """How many units each matrix loses if the `remove` lowest of all leave, within (least, most) for each.

    The matrices are read where they are; nothing is concatenated.

    Args:
        scores: of each matrix, all of the same importance.
        units: of each, as of make_mask.
        limits: of each, how many units it loses at least and at most.
        remove: how many leave in all.
        previous: of each, None or a mask: what it has removed leaves before anything else.

    Raises ValueError for no matrix, lists of different lengths, limits beyond the units that there are, and a
    `remove` that they do not allow; TypeError for scores of another dtype than Scores have.
    """
    check_int("allocate_global", "remove", remove)
    if not scores:
        fail("allocate_global", "scores must have a matrix", "none")
    hosted = [s.to_host() for s in scores]
    if len({s.values.dtype == torch.float64 for s in hosted}) > 1:
        hosted = [Scores(s.values.double(), s.importance, s.column_scale) for s in hosted]
    none = torch.empty(0)
    before = [none if p is None else p.bits for p in (previous or [None] * len(hosted))]
    scales = [none if s.column_scale is None else s.column_scale for s in hosted]
    flat_units = [number for unit in units for number in unit]
    flat_limits = [number for pair in limits for number in pair]
    values = [s.values for s in hosted]
    return list(_allocate(values, hosted[0].importance, scales, before, flat_units, flat_limits, remove))
