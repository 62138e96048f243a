"""What the registrations of ops share: fake results, and the casts of autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def fake_rows_like(op: str, argument: str, tensor: Tensor, columns: int, dimension: str, new: int) -> Tensor:
    """An empty result with `new` columns, after the check of a tensor's own."""
    if tensor.dim() == 0 or tensor.shape[-1] != columns:
        got = tuple(tensor.shape)
        raise ValueError(f"[{op}] {argument}'s last dimension must be {dimension}={columns}; got shape {got}")
    return tensor.new_empty((*tensor.shape[:-1], new))


def autocast_to(device_type: str) -> Callable[[Tensor | None], Tensor | None]:
    """What casts as F.linear does under autocast: floats of this device but float64."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if tensor.device.type != device_type:
            return tensor
        return tensor.to(torch.get_autocast_dtype(device_type))

    return cast
