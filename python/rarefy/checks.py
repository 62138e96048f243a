"""Argument checks that every module shares: "[op] requirement; got value" as ValueError or TypeError."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection
from typing import Any, NoReturn

import torch

# The dtypes of stored values and their names on disk and in the C++ core.
DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_INT32_MAX = 2**31 - 1


def fail(op: str, requirement: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    """Raises `kind` with the text "[op] requirement; got value"."""
    raise kind(f"[{op}] {requirement}; got {got}")


def check_tensor(op: str, name: str, value: Any) -> torch.Tensor:
    """Returns `value` if it is a strided tensor."""
    if not isinstance(value, torch.Tensor):
        fail(op, f"{name} must be a torch.Tensor", type(value).__name__, TypeError)
    if value.layout != torch.strided:
        fail(op, f"{name} must be a strided (dense) tensor", value.layout, TypeError)
    return value


def check_int(op: str, name: str, value: Any, minimum: int = 0) -> int:
    """Returns `value` as an int, at least `minimum`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        fail(op, f"{name} must be an int", repr(value), TypeError)
    if value < minimum:
        fail(op, f"{name} must be at least {minimum}", value)
    return int(value)


def check_pair(op: str, name: str, value: Any, minimum: int) -> tuple[int, int]:
    """Returns `value` as two ints, each at least `minimum`."""
    if isinstance(value, str) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        fail(op, f"{name} must be a pair of ints", repr(value), TypeError)
    if len(value) != 2:
        fail(op, f"{name} must have 2 elements", f"{len(value)}: {tuple(value)}")
    return (
        check_int(op, f"{name}[0]", value[0], minimum),
        check_int(op, f"{name}[1]", value[1], minimum),
    )


def _check_sizes(op: str, name: str, value: Any, minimum: int) -> tuple[int, int]:
    sizes = check_pair(op, name, value, minimum)
    if max(sizes) > _INT32_MAX:
        fail(op, f"shape and block_shape must be at most {_INT32_MAX}", f"{name}={sizes}")
    return sizes


def check_shape(op: str, shape: Any, name: str = "shape") -> tuple[int, int]:
    """Returns (N, K), not negative; int32, as indices are."""
    return _check_sizes(op, name, shape, 0)


def check_block_shape(op: str, block_shape: Any) -> tuple[int, int]:
    """Returns (R, C), each at least 1; int32."""
    return _check_sizes(op, "block_shape", block_shape, 1)


def check_block_fits(op: str, shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the block shape unless it reaches far past the matrix; check_shape of the core has the rule.

    Asked here too where memory for blocks is allocated before the core sees them.
    """
    most = tuple(256 * max(1, -(-size // 256)) for size in shape)
    if block_shape[0] > most[0] or block_shape[1] > most[1]:
        requirement = f"block_shape must be at most {most}, the shape rounded up to multiples of 256"
        fail(op, requirement, f"{tuple(block_shape)} for shape {tuple(shape)}")
    return block_shape


def check_density(op: str, density: Any, name: str = "density") -> float:
    """Returns `density` as a float in [0, 1]."""
    if not isinstance(density, numbers.Real) or isinstance(density, bool):
        fail(op, f"{name} must be a number", repr(density), TypeError)
    if not 0 <= density <= 1 or math.isnan(density):
        fail(op, f"{name} must be in [0, 1]", density)
    return float(density)


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    """Raises TypeError unless values can be stored in this dtype."""
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPE_NAMES)
        fail(op, f"{name} must be of dtype {known}", str(dtype).removeprefix("torch."), TypeError)


def check_devices(op: str, values: torch.Tensor, **indices: Any) -> None:
    """Raises TypeError unless the index tensors are on the device of values."""
    for name, index in indices.items():
        if isinstance(index, torch.Tensor) and index.device != values.device:
            fail(op, f"{name} must be on the device of values, {values.device}", index.device, TypeError)


def first_position(bad: torch.Tensor) -> tuple[int, ...]:
    """The position of the first True, in row-major order; there must be one."""
    flat, position = int(bad.flatten().to(torch.uint8).argmax()), []
    for size in reversed(bad.shape):
        flat, at = divmod(flat, size)
        position.append(at)
    return tuple(reversed(position))


def check_known(op: str, what: str, name: object, known: Collection[str], got: object = None) -> None:
    """Raises ValueError, with the near names, unless `name`, which came as `got`, is a known one."""
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3) or known
        got = name if got is None else got
        fail(op, f"{what} must be a known one", f"{got!r}; near names: {', '.join(near)}")
