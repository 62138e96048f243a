"""torch.sparse and scipy.sparse matrices: what to take from them and give to them, always as copies."""

from __future__ import annotations

from typing import Any

import torch

from .checks import check_shape, fail
from .masks import grid_of


def padded_shape(op: str, shape: tuple[int, int], block_shape: tuple[int, int], pad: bool) -> tuple[int, int]:
    """The shape rounded up to multiples of the block, which both libraries ask for; pad says to do so."""
    padded = _round_up(shape, block_shape)
    if padded != tuple(shape) and not pad:
        fail(op, f"shape must be a multiple of block_shape {block_shape}, or pad=True", tuple(shape))
    return padded


def unpadded(op: str, shape: Any, padded: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """The true shape of a matrix that came padded to multiples of its block."""
    if shape is None:
        return (int(padded[0]), int(padded[1]))
    shape = check_shape(op, shape)
    if _round_up(shape, block_shape) != tuple(padded):
        fail(op, f"shape must be {tuple(padded)} before padding to blocks of {block_shape}", shape)
    return shape


def _round_up(shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    grid = grid_of(shape, block_shape)
    return grid[0] * block_shape[0], grid[1] * block_shape[1]


# torch -------------------------------------------------------------------------------------------


def from_torch(op: str, tensor: Any, layouts: tuple[torch.layout, ...]) -> tuple[torch.Tensor, ...]:
    """Copies of values, crow_indices and col_indices of a compressed matrix."""
    names = " or ".join(str(layout) for layout in layouts)
    if not isinstance(tensor, torch.Tensor) or tensor.layout not in layouts:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        fail(op, f"tensor must be a {names} tensor", got, TypeError)
    values = tensor.values().detach().clone(memory_format=torch.contiguous_format)
    if tensor.ndim != 2 or values.ndim != (3 if tensor.layout == torch.sparse_bsr else 1):
        fail(op, "tensor must be a matrix without batch or dense dimensions", tuple(tensor.shape))
    return values, tensor.crow_indices(), tensor.col_indices()


# scipy -------------------------------------------------------------------------------------------


def check_scipy(op: str, matrix: Any, kinds: tuple[str, ...]) -> str:
    """The format of a scipy.sparse matrix or array, one of `kinds`."""
    kind = getattr(matrix, "format", type(matrix).__name__)
    if kind not in kinds or not hasattr(matrix, "indptr"):
        names = " or ".join(name.upper() for name in kinds)
        fail(op, f"matrix must be a scipy.sparse {names} matrix", kind, TypeError)
    return kind


def cut_into_blocks(matrix: Any, block_shape: tuple[int, int]) -> Any:
    """A CSR matrix as a BSR one, padded to multiples of the block."""
    matrix = matrix.copy()
    matrix.sum_duplicates()
    matrix.resize(_round_up(matrix.shape, block_shape))
    return matrix.tobsr(blocksize=block_shape)


def from_scipy(op: str, matrix: Any) -> tuple[torch.Tensor, ...]:
    """Copies of values, crow_indices and col_indices, sorted, duplicates summed."""
    matrix = matrix.copy()
    matrix.sum_duplicates()
    matrix.sort_indices()
    try:
        arrays = (matrix.data, matrix.indptr, matrix.indices)
        return tuple(torch.tensor(array, device="cpu") for array in arrays)
    except TypeError:
        fail(op, "matrix must have a dtype that torch knows", matrix.dtype, TypeError)


def scipy_arrays(op: str, values: torch.Tensor, pattern: Any) -> tuple[Any, ...]:
    """Copies of values, col_indices and crow_indices as scipy takes them."""
    if values.dtype in (torch.bfloat16, torch.float16):
        requirement = "values must have a dtype that scipy.sparse computes with (.float() converts)"
        fail(op, requirement, values.dtype, TypeError)
    crow, col = pattern.indices()
    return tuple(t.detach().cpu().numpy().copy() for t in (values, col, crow))
