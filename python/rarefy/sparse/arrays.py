"""Scipy's arrays as tensors, and what is refused of them by name and position."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..checks import check_tensor, fail, first_position
from .order import falls

CHECKS = ("once", "always", "trusted")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_INDICES = (torch.int32, torch.int64)


def as_tensor(op: str, name: str, value: Any) -> Tensor:
    """A strided tensor, or a NumPy array as one that shares its memory where torch can.

    Read-only arrays are copied, and so are reversed ones and those of the other byte order.
    """
    if type(value) is Tensor and value.layout is torch.strided:
        return value
    if not isinstance(value, Tensor) and hasattr(value, "__array_interface__"):
        try:
            if not value.dtype.isnative or any(step < 0 for step in value.strides):
                value = value.astype(value.dtype.newbyteorder("="), order="C")
            value = torch.from_numpy(value) if value.flags.writeable else torch.tensor(value)
        except TypeError:
            fail(op, f"{name} must be of a dtype that torch knows", value.dtype, TypeError)
    return check_tensor(op, name, value)


def is_dense(value: Any) -> bool:
    """Whether it is a strided tensor or a NumPy array."""
    if isinstance(value, Tensor):
        return value.layout == torch.strided
    return hasattr(value, "__array_interface__")


def check_index(op: str, name: str, index: Tensor, device: torch.device) -> None:
    """TypeError or ValueError unless it is an index array on the device of data."""
    if index.dtype not in _INDICES:
        fail(op, f"{name} must be int32 or int64", str(index.dtype).removeprefix("torch."), TypeError)
    if index.device != device:
        fail(op, f"{name} must be on the device of data, {device}", index.device, TypeError)
    if index.ndim != 1:
        fail(op, f"{name} must have 1 dimension", f"{index.ndim}: {tuple(index.shape)}")


def check_ranges(op: str, indices: Tensor, indptr: Tensor, columns: int) -> None:
    """ValueError, with the position, unless indptr ascends from 0 to the end, and indices are columns."""
    if int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
        got = f"{int(indptr[0])} … {int(indptr[-1])}"
        fail(op, f"indptr must begin with 0 and end with {len(indices)}, the number of indices", got)
    descents = indptr[1:] < indptr[:-1]  # differences may be too large for int64
    if bool(descents.any()):
        (at,) = first_position(descents)
        fail(op, "indptr must not decrease", f"indptr[{at}]={int(indptr[at])}, then {int(indptr[at + 1])}")
    wrong = (indices < 0) | (indices >= columns)
    if bool(wrong.any()):
        (at,) = first_position(wrong)
        fail(op, f"indices must be in [0, {columns})", f"indices[{at}]={int(indices[at])}")


def check_ascent(op: str, indices: Tensor, indptr: Tensor) -> None:
    """ValueError, with the position, unless valid indices are sorted and distinct in each row."""
    descents = falls(indices, indptr)
    if bool(descents.any()):
        (at,) = first_position(descents)
        got = f"indices[{at + 1}]={int(indices[at + 1])} after {int(indices[at])}"
        fail(op, 'indices must be sorted and distinct in each row where check is "trusted"', got)


def refuse_check(op: str, check: object) -> NoReturn:
    """The error of a `check` that is none of CHECKS."""
    fail(op, 'check must be "once", "always" or "trusted"', repr(check))


def check_dtype(op: str, requirement: str, dtype: torch.dtype) -> None:
    """TypeError unless a matrix may be of this dtype."""
    if dtype not in FLOATS + INTEGERS:
        known = ", ".join(str(d).removeprefix("torch.") for d in FLOATS + INTEGERS)
        fail(op, f"{requirement} {known}", dtype, TypeError)


def callers_level() -> int:
    """The stacklevel, for warnings.warn where this is called, of the first frame outside of Rarefy."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rarefy."):
        frame, level = frame.f_back, level + 1
    return level
