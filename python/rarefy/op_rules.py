"""What the registrations of ops share: fake results, and the casts of autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import _torch_private


def fake_rows_like(op: str, argument: str, tensor: Tensor, columns: int, dimension: str, new: int) -> Tensor:
    """An empty result with `new` columns, after the check of a tensor's own."""
    if tensor.dim() == 0 or tensor.shape[-1] != columns:
        got = tuple(tensor.shape)
        raise ValueError(f"[{op}] {argument}'s last dimension must be {dimension}={columns}; got shape {got}")
    return tensor.new_empty((*tensor.shape[:-1], new))


def meets_nothing(*tensors: Tensor | None) -> bool:
    """Whether an op with these would meet nothing on its way but a kernel: it may go there at once."""
    plain = all(tensor is None or type(tensor) in _torch_private.PLAIN for tensor in tensors)
    if not plain or not _torch_private.eager():
        return False
    return not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors)


def autocast_to(device_type: str) -> Callable[[Tensor | None], Tensor | None]:
    """What casts as F.linear does under autocast: floats of this device but float64."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if tensor.device.type != device_type:
            return tensor
        return tensor.to(torch.get_autocast_dtype(device_type))

    return cast
