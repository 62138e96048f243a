"""Arrays that come again: what was checked and planned of them serves the next call with the same indices.

Whoever holds scipy's arrays, and no SparseMatrix, gives the same indices to call after call. From the second
one on their pattern is kept, and a call compares its indices with it, all of them: as exact as checking them
anew, in a fifth to a tenth of the time of planning. Values are whatever a call brings, and never kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from torch import Tensor

from .. import _load
from .._torch_private import entry
from ..derivatives import run_eagerly
from ..derived import Derived, Kept, reads_itself
from ..pattern import BsrPattern

_LEAST = 512  # indices; fewer are read as fast as they are found
_MOST_SEEN = 64
_MOST_INDICES = 1 << 24  # of all patterns that are kept: 64 MiB, and what kernels derive of them
_SAMPLED = 4

_row_plan_is_of = entry(_load.op("_row_plan_is_of"))


class Recent:
    """A pattern that came with arrays, and what kernels derive of it alone."""

    __slots__ = ("_derived", "pattern")

    def __init__(self, pattern: BsrPattern) -> None:
        self.pattern = pattern
        self._derived: dict[Any, Derived | tuple[()]] = {}  # by the dtypes of x and of values

    def is_of(self, indices: Tensor, indptr: Tensor) -> bool:
        """Whether these are its indices, element by element."""
        return _row_plan_is_of(self.pattern.row_plan, indices, indptr)

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
        blocks = data.view(-1, 1, 1) if data.ndim == 1 else data
        return run_eagerly(x, blocks, bias, (self.pattern.plan_by_rows, n, k, *self.derived(x, blocks)))


_lock = threading.Lock()
_seen: OrderedDict[tuple, Recent | list[int]] = OrderedDict()  # what came last is last
_last: tuple | None = None


def find(data: Tensor, indices: Tensor, indptr: Tensor, columns: int) -> Recent | None:
    """What is kept of these indices of a matrix with so many columns; remembers that they were here.

    None the first time, for those that do not ascend or are not valid, and outside of eager calls. Plain
    tensors of any device, dtype and size may ask: those that have no plan on the CPU are never found.
    """
    if indices.ndim != 1 or indptr.ndim != 1:
        return None
    shape, count = data.shape, len(indices)
    if not _LEAST <= count <= _MOST_INDICES or len(shape) not in (1, 3) or shape[0] != count:
        return None
    block = tuple(shape[1:]) or (1, 1)
    name = (indices.data_ptr(), count, len(indptr), columns, block)
    known = _seen.get(name)
    if type(known) is Recent and known.is_of(indices, indptr):
        if name != _last:
            _remember(name, known)
        return known
    if indices.device.type != "cpu":
        return None
    # Memory that other indices lay in: a pattern is made of those of which some are the same.
    sample = indices[:: -(-count // _SAMPLED)].tolist()
    if known != sample:
        _remember(name, sample)
        return None
    matrix = ((len(indptr) - 1) * block[0], columns)
    pattern = BsrPattern.by_rows(indptr, indices, shape=matrix, block_shape=block)
    if pattern is None:
        return None
    known = Recent(pattern)
    _remember(name, known)
    return known


def _remember(name: tuple, known: Recent | list[int]) -> None:
    """As what came last; drops what came longest ago where all together are too many."""
    global _last
    with _lock:
        _last = name
        _seen[name] = known
        _seen.move_to_end(name)
        left = _MOST_INDICES
        for place, other in enumerate(reversed(list(_seen))):
            left -= _seen[other].pattern.nnzb if type(_seen[other]) is Recent else 0
            if left < 0 or place >= _MOST_SEEN:
                del _seen[other]


def forget_arrays() -> None:
    """Drops what is kept of arrays that came more than once: 4 to 12 bytes for each index."""
    with _lock:
        _seen.clear()
