"""BitmapPattern: which single elements of a matrix are stored, one bit each. Immutable, shared by copies."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _load
from .bitmap_ops import HEADER, bitmap_columns, bitmap_plan
from .checks import check_shape, check_tensor, fail
from .pattern import BsrPattern

_pack_bits, _unpack_bits = map(_load.op, ("_mask_pack", "_mask_unpack"))


class BitmapPattern:
    """Which elements of an (N, K) matrix are stored, one bit each. Immutable, checked once, shared by copies.

    Args:
        bitmap: (N, ⌈K/8⌉) uint8: bit k % 8 of byte k / 8 of row n says whether W[n, k] is stored. Copied.
        shape: (N, K).

    Attributes:
        nnz: how many elements are stored.
        two_of_four: whether they are exactly two of each four neighbours in a row.
        plan: what kernels read of it, on the CPU.

    Raises:
        ValueError: another shape, bits past the last column, with the position.
        TypeError: another dtype or kind of object.
    """

    def __init__(self, bitmap: Tensor, *, shape: tuple[int, int], op: str = "BitmapPattern") -> None:
        self.shape = torch.Size(check_shape(op, shape))
        check_tensor(op, "bitmap", bitmap)
        if bitmap.is_meta:
            fail(op, "bitmap must hold data", "a tensor on the meta device", TypeError)
        with torch.inference_mode(False):
            self.bits = bitmap.detach().cpu().clone(memory_format=torch.contiguous_format)
            self.plan = bitmap_plan(self.bits, *self.shape, op)
        self.nnz, self.two_of_four = int(self.plan[3]), bool(self.plan[4])

    @classmethod
    def from_mask(cls, mask: Tensor) -> BitmapPattern:
        """The pattern of a bool (N, K) tensor."""
        return cls(_pack_bits(mask.detach().cpu().contiguous()), shape=(mask.shape[0], mask.shape[1]))

    def mask(self) -> Tensor:
        """(N, K) bool on the CPU: which elements are stored."""
        return _unpack_bits(self.bits, self.shape[1]).view(torch.bool)

    def blocks(self, device: torch.device) -> BsrPattern:
        """The same elements as 1×1 blocks, for gradients and for GPUs: made when first asked for."""
        known = self.__dict__.get("_blocks")
        if known is None:
            crow, col = bitmap_columns(self.plan, *self.shape)
            known = self._blocks = BsrPattern(crow, col, shape=tuple(self.shape), block_shape=(1, 1))
        twin = self.__dict__.get("_twin", known)  # kept here: the blocks themselves hold no twin of theirs
        if twin.device != device:
            twin = self._twin = known.to(device)
        return twin

    def counts(self) -> Tensor:
        """(N,) int32: how many elements each row stores."""
        return self.plan[HEADER : HEADER + self.shape[0] + 1].diff()

    def __eq__(self, other: object) -> bool:
        """Whether the same elements are stored."""
        if not isinstance(other, BitmapPattern):
            return NotImplemented
        return self is other or (self.shape == other.shape and torch.equal(self.bits, other.bits))

    def __hash__(self) -> int:  # noqa: D105
        return hash((self.shape, self.nnz))

    def __copy__(self) -> BitmapPattern:  # noqa: D105
        return self

    def __deepcopy__(self, memo: dict) -> BitmapPattern:  # noqa: D105
        return self

    def __reduce__(self) -> tuple:  # noqa: D105
        return _rebuild, (self.bits, tuple(self.shape))


def _fake_unpack(bits: Tensor, columns: int) -> Tensor:
    return bits.new_empty((bits.shape[0], columns))


if _load.problem is None:
    torch.library.register_fake("rarefy::_mask_unpack", _fake_unpack)


def _rebuild(bits: Tensor, shape: tuple[int, int]) -> BitmapPattern:
    return BitmapPattern(bits, shape=shape)
