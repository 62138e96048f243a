"""Arrays that come again: what was checked and planned of them serves the next call with the same indices.

Whoever holds scipy's arrays, and no SparseMatrix, gives the same indices to call after call. From the second
one on their pattern is kept, and a call compares its indices with it, all of them: as exact as checking them
anew, in a fifth to a tenth of the time of planning. Values are whatever a call brings, and never kept.
Indices that are not sorted are kept from the first call on, with where their entries go: sorting them takes
some hundred times as long as comparing them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from .. import _load
from .._torch_private import PLAIN, eager, entry
from ..derivatives import run_eagerly
from ..derived import Derived, Kept, reads_itself
from ..pattern import HEADER, BsrPattern
from .order import gathered

_LEAST = 512  # sorted indices; fewer are read as fast as they are found
_MOST_SEEN = 64
_MOST_WORDS = 1 << 24  # of 4 bytes, of all that is kept: 64 MiB, and what kernels derive of patterns
_SAMPLED = 4

_row_plan_is_of = entry(_load.op("_row_plan_is_of"))


class Recent:
    """A pattern that came with arrays, and what kernels derive of it alone.

    Of unsorted arrays also their indices as they came, and `order` or `slot`; see order.py.
    """

    __slots__ = ("_derived", "_given", "order", "pattern", "slot", "words")

    def __init__(
        self,
        pattern: BsrPattern,
        given: Tensor | None = None,
        order: Tensor | None = None,
        slot: Tensor | None = None,
    ) -> None:
        self.pattern, self.order, self.slot = pattern, order, slot
        self._given = pattern.row_plan if given is None else given
        kept = (pattern.row_plan, given, order, slot)
        self.words = sum(part.nbytes for part in kept if part is not None) // 4
        self._derived: dict[Any, Derived | tuple[()]] = {}  # by the dtypes of x and of values

    @property
    def ascends(self) -> bool:
        """Whether the arrays were sorted, without duplicates, when they came."""
        return self._given is self.pattern.row_plan

    def is_of(self, indices: Tensor, indptr: Tensor) -> bool:
        """Whether these are its indices, element by element."""
        return _row_plan_is_of(self._given, indices, indptr)

    def derived(self, x: Tensor, blocks: Tensor) -> Derived | tuple[()]:
        """What kernels for x want that does not follow from values."""
        if not x.dtype.is_floating_point or not blocks.is_floating_point():
            return ()
        name = x.dtype, blocks.dtype
        if name not in self._derived:
            stored = blocks.dtype == x.dtype or reads_itself(blocks, x.dtype)
            self._derived[name] = Kept(self.pattern, blocks.detach(), x.dtype, stored).unpacked()
        return self._derived[name]

    def product(self, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor | None:
        """X Wᵀ + bias of a call that meets nothing, with values (nnz,) or (nnzb, R, C) of x's dtype.

        None where something about the arguments is for others to look at.
        """
        n, k = self.pattern.shape
        if x.ndim == 0 or x.shape[-1] != k or x.dtype != data.dtype or not x.is_floating_point():
            return None
        if bias is not None and (bias.dtype != x.dtype or bias.shape != (n,) or not bias.is_contiguous()):
            return None
        if bias is not None and bias.device != x.device:
            return None
        if self.pattern.is_padded or not data.is_contiguous():
            return None
        data = gathered(data, self.pattern.nnzb, self.order, self.slot)
        blocks = data.view(-1, 1, 1) if data.ndim == 1 else data
        return run_eagerly(x, blocks, bias, (self.pattern.plan_by_rows, n, k, *self.derived(x, blocks)))


_lock = threading.Lock()
_seen: OrderedDict[tuple, Recent | list[int]] = OrderedDict()  # what came last is last
_last: tuple | None = None


def find(
    data: Tensor, indices: Tensor, indptr: Tensor, columns: int, check: str = "once", few: bool = False
) -> Recent | None:
    """What is kept of these indices of a matrix with so many columns; remembers that they were here.

    None the first time, for those that are not valid, and, with `check` "trusted", for those that do not
    ascend. Plain tensors of any device, dtype and size may ask, in eager calls: those that have no plan on
    the CPU are never found. With `few` so may less than 512 indices, which are kept if they were sorted here.
    """
    if indices.ndim != 1 or indptr.ndim != 1:
        return None
    shape, count = data.shape, len(indices)
    if (count < _LEAST and not few) or len(shape) not in (1, 3) or shape[0] != count:
        return None
    name = _name(data, indices, indptr, columns)
    known = _seen.get(name)
    if type(known) is Recent and known.is_of(indices, indptr):
        if check == "trusted" and not known.ascends:
            return None
        if name != _last:
            _remember(name, known)
        return known
    if indices.device.type != "cpu" or not _LEAST <= count <= _MOST_WORDS:
        return None
    # Memory that other indices lay in: a pattern is made of those of which some are the same.
    sample = indices[:: -(-count // _SAMPLED)].tolist()
    if known != sample:
        _remember(name, sample)
        return None
    block = name[-1]
    matrix = ((len(indptr) - 1) * block[0], columns)
    pattern = BsrPattern.by_rows(indptr, indices, shape=matrix, block_shape=block)
    if pattern is None:
        return None
    known = Recent(pattern)
    _remember(name, known)
    return known


def _name(data: Tensor, indices: Tensor, indptr: Tensor, columns: int) -> tuple:
    return indices.data_ptr(), len(indices), len(indptr), columns, tuple(data.shape[1:]) or (1, 1)


def can_keep(data: Tensor, indices: Tensor, indptr: Tensor) -> bool:
    """Whether unsorted arrays that a call sorts are known when they come again."""
    if not eager() or any(type(a) not in PLAIN or a.device.type != "cpu" for a in (data, indices, indptr)):
        return False
    words = 4 * len(indices) + 2 * (HEADER + len(indptr))  # at most: duplicates make the pattern smaller
    return indices.is_contiguous() and indptr.is_contiguous() and words <= _MOST_WORDS


def keep(
    arrays: tuple[Tensor, Tensor, Tensor], pattern: BsrPattern, order: Tensor | None, slot: Tensor | None
) -> None:
    """Keeps what unsorted or repeated indices were sorted to, if `can_keep`, for the next call with them."""
    _, indices, indptr = arrays
    with torch.inference_mode(False):
        header = pattern.row_plan[:HEADER].clone()
        header[5] = len(indices)
        given = torch.cat((header, indptr.int(), indices.int()))  # as a row plan, to be compared alone
    _remember(_name(*arrays, pattern.shape[1]), Recent(pattern, given, order, slot))


def _remember(name: tuple, known: Recent | list[int]) -> None:
    """As what came last; drops what came longest ago where all together are too many."""
    global _last
    with _lock:
        _last = name
        _seen[name] = known
        _seen.move_to_end(name)
        left = _MOST_WORDS
        for place, other in enumerate(reversed(list(_seen))):
            left -= _seen[other].words if type(_seen[other]) is Recent else 0
            if left < 0 or place >= _MOST_SEEN:
                del _seen[other]


def forget_arrays() -> None:
    """Drops what is kept of arrays: 4 to 12 bytes for each index that was sorted, 16 to 24 for others."""
    with _lock:
        _seen.clear()
