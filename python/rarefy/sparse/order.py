"""Indices in any order: whether they ascend, and where entries go if they do not."""

from __future__ import annotations

import torch
from torch import Tensor


def ascends(indices: Tensor, indptr: Tensor) -> bool:
    """Whether indices are sorted and distinct in each row; indptr is valid."""
    return not bool(falls(indices, indptr).any())


def falls(indices: Tensor, indptr: Tensor) -> Tensor:
    """Of each index but the last, whether the next one of its row is not larger; indptr is valid."""
    result = indices[1:] <= indices[:-1]
    starts = indptr[1:-1]
    result[(starts[(starts > 0) & (starts < len(indices))] - 1).long()] = False
    return result


def in_order(
    indices: Tensor, indptr: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Valid indices sorted and without duplicates: indptr, indices, and `order` or `slot`; see `gathered`."""
    rows, device = len(indptr) - 1, indices.device
    order = None
    with torch.inference_mode(False):  # gradients may be asked for later
        row = torch.arange(rows, device=device).repeat_interleave(indptr.diff().long())
        positions, slot = torch.unique(row * columns + indices, return_inverse=True)
        if len(positions) == len(slot):
            order = torch.empty_like(slot)
            order[slot] = torch.arange(len(slot), device=device)
            slot = None
        indptr = torch.searchsorted(positions, torch.arange(rows + 1, device=device) * columns)
        return indptr, positions % max(1, columns), order, slot


def gathered(data: Tensor, count: int, order: Tensor | None, slot: Tensor | None) -> Tensor:
    """The values of `count` sorted entries, differentiable: of those in `order`, or summed into their `slot`.

    Both are (len(data),) int64, and one at most is there; without them data are as they should be.
    """
    if order is not None:
        return data.index_select(0, order)
    if slot is not None:
        return data.new_zeros((count, *data.shape[1:])).index_add(0, slot, data)
    return data
