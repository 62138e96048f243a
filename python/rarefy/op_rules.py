"""What the registrations of ops share: fake results, and the casts of autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from . import _torch_private


def fake_rows_like(op: str, argument: str, tensor: Tensor, columns: int, dimension: str, new: int) -> Tensor:
    """An empty result with `new` columns, after the check of a tensor's own."""
    if tensor.dim() == 0 or tensor.shape[-1] != columns:
        got = tuple(tensor.shape)
        raise ValueError(f"[{op}] {argument}'s last dimension must be {dimension}={columns}; got shape {got}")
    return tensor.new_empty((*tensor.shape[:-1], new))


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Registers what an op gives for tensors without data, once it is sure that the first one is such.

    The dispatcher takes a fake kernel for a real one where a single tensor is on the meta device: its result,
    memory that nobody wrote, would be on the device of x.
    """

    @functools.wraps(fake)
    def checked(*args: Any) -> Any:
        first, *others = [arg.device.type for arg in args if isinstance(arg, Tensor)]
        if first != "meta" and "meta" in others:
            raise TypeError(f"[{name.lstrip('_')}] tensors must be on one device; got {first} and meta")
        return fake(*args)

    torch.library.register_fake(f"rarefy::{name}", checked)


def meets_nothing(*tensors: Tensor | None) -> bool:
    """Whether an op with these would meet nothing on its way but a kernel: it may go there at once."""
    for tensor in tensors:  # loops: generators take a microsecond more
        if tensor is not None and type(tensor) not in _torch_private.PLAIN:
            return False
    if not _torch_private.eager():
        return False
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    return True


def autocast_to(device_type: str) -> Callable[[Tensor | None], Tensor | None]:
    """What casts as F.linear does under autocast: floats of this device but float64."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if tensor.device.type != device_type:
            return tensor
        return tensor.to(torch.get_autocast_dtype(device_type))

    return cast


def register_autocast(library: torch.library.Library, name: str, op: Any, floats: Collection[int]) -> None:
    """The op's kernels for autocast on the CPU and on CUDA: arguments `floats`, by position, are cast."""
    for device_type in ("cpu", "cuda"):
        cast = autocast_to(device_type)

        def kernel(*args: Any, device_type: str = device_type, cast: Callable = cast) -> Tensor:
            cast_args = (cast(arg) if at in floats else arg for at, arg in enumerate(args))
            return _torch_private.without_autocast(device_type, op, *cast_args)

        library.impl(name, kernel, f"Autocast{device_type.upper()}")
