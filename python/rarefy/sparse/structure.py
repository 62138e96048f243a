"""What changes where a sparse matrix stores: transposing, adding, slicing, joining."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_private import eager, unrecorded
from ..checks import fail
from ..pattern import BsrPattern
from . import moves
from .arrays import as_tensor, is_dense
from .kinds import as_matrix
from .matrix import SparseMatrix


def transposed(values: Tensor, pattern: BsrPattern) -> tuple[Tensor, BsrPattern]:
    """Values, (nnz,) or (nnzb, R, C), and pattern of the transposed matrix; differentiable."""
    if eager() and unrecorded(values):
        other, moved = pattern.transposed(values)
        return moved, other
    other, order = pattern.transposition()
    moved = values.index_select(0, order)
    return (moved if moved.ndim == 1 else moved.transpose(1, 2).contiguous()), other


def sparse_transpose(a: Any, *, check: str = "once") -> SparseMatrix:
    """Return aᵀ: (K, N) for a of (N, K), blocks (C, R) for blocks (R, C); rectangular too.

    In each row of the result entries keep the order of a's rows. Gradients flow to a's data. `a`, `check` and
    the errors (ValueError, TypeError) are those of `sparse_dense`'s weight.
    """
    matrix = as_matrix("sparse_transpose", "a", a, check=check)
    return SparseMatrix.on_pattern(*transposed(matrix.values(), matrix.pattern))


def sparse_add(a: Any, b: Any, *, check: str = "once") -> SparseMatrix | Tensor:
    """Return a + b: a sparse matrix and a dense one (in either order) as a dense one, or two sparse ones.

    Args:
        a: (N, K), sparse (see `sparse_dense`) or dense.
        b: the same, of a's dtype, any that a SparseMatrix has. Two sparse ones must be cut into equal
            blocks; the result stores what either does.
        check: see SparseMatrix.

    Raises:
        ValueError: an index, a size or a shape is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """
    op = "sparse_add"
    if is_dense(a):
        a, b = b, a
    if not is_dense(b):
        return _add_sparse(op, as_matrix(op, "a", a, check=check), as_matrix(op, "b", b, check=check))
    dense = as_tensor(op, "dense", b)
    if dense.ndim != 2:
        fail(op, "dense must have 2 dimensions", dense.ndim)
    matrix = as_matrix(op, "a", a, columns=dense.shape[1], check=check)
    _check_alike(op, matrix, tuple(dense.shape), dense.dtype, dense.device)
    return moves.add_dense(dense, matrix.blocks(), matrix.pattern)


def _check_alike(
    op: str, a: SparseMatrix, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(a.shape) != shape:
        fail(op, f"both must be of one shape, {tuple(a.shape)}", shape)
    if a.dtype != dtype or a.device != device:
        fail(op, f"both must be of {a.dtype} on {a.device}", f"{dtype} on {device}", TypeError)


def _add_sparse(op: str, a: SparseMatrix, b: SparseMatrix) -> SparseMatrix:
    _check_alike(op, a, tuple(b.shape), b.dtype, b.device)
    if a.block_shape != b.block_shape:
        fail(op, f"both must be in blocks of {a.block_shape}", b.block_shape)
    blocks, pattern = moves.add(a.blocks(), a.pattern, b.blocks(), b.pattern)
    return SparseMatrix.of_blocks(blocks, pattern, a, b)


def _range(op: str, name: str, piece: Any, size: int, block: int) -> tuple[int, int]:
    """First and end of a slice, in blocks; both at the edge of one."""
    if not isinstance(piece, slice) or piece.step not in (None, 1):
        fail(op, f"{name} must be a slice with step 1", repr(piece), TypeError)
    try:
        chosen = range(size)[piece]
    except TypeError:
        fail(op, f"{name} must be a slice between ints", repr(piece), TypeError)
    first, end = chosen.start, max(chosen.start, chosen.stop)
    for what, at in (("begin", first), ("end", end)):
        if at % block and at != size:
            fail(op, f"{name} must {what} at a multiple of the block's {block}", at)
    return first, end


def sparse_slice(
    a: Any, rows: slice = slice(None), columns: slice = slice(None), *, check: str = "once"
) -> SparseMatrix:
    """Return ``a[rows, columns]`` for slices with step 1, at the edges of blocks.

    Gradients flow to a's data. `a`, `check` and the errors are those of `sparse_dense`'s weight; a slice that
    cuts a block is a ValueError, another step a TypeError.
    """
    op = "sparse_slice"
    matrix = as_matrix(op, "a", a, check=check)
    r, c = matrix.block_shape
    spans = _range(op, "rows", rows, matrix.shape[0], r), _range(op, "columns", columns, matrix.shape[1], c)
    return SparseMatrix.of_blocks(*moves.part(matrix.blocks(), matrix.pattern, *spans), matrix)


def sparse_concat(matrices: Sequence[Any], dim: int = 0, *, check: str = "once") -> SparseMatrix:
    """Return matrices below one another (dim 0) or side by side (dim 1).

    They must be of one format, dtype and block shape, and all but the last must end at the edge of a block.
    Gradients flow to the data of all. Each matrix, `check` and errors are those of `sparse_dense`'s weight,
    and matrices that do not fit each other are a ValueError.
    """
    op = "sparse_concat"
    if dim not in (0, 1):
        fail(op, "dim must be 0 or 1", repr(dim))
    # One matrix may be iterable, too: scipy's gives its rows.
    if isinstance(matrices, Tensor) or hasattr(matrices, "tocsr") or not isinstance(matrices, Iterable):
        fail(op, "matrices must be a sequence of sparse matrices", type(matrices).__name__, TypeError)
    parts = [as_matrix(op, f"matrices[{i}]", m, check=check) for i, m in enumerate(matrices)]
    if not parts:
        fail(op, "there must be at least one matrix", 0)
    one = parts[0]
    for i, part in enumerate(parts):
        if (part.format, part.block_shape, part.dtype) != (one.format, one.block_shape, one.dtype):
            requirement = f"matrices[{i}] must be {one.format} of {one.dtype} in blocks of {one.block_shape}"
            fail(op, requirement, f"{part.format} of {part.dtype} in blocks of {part.block_shape}")
        if part.shape[1 - dim] != one.shape[1 - dim]:
            requirement = f"matrices[{i}] must have {one.shape[1 - dim]} {'columns' if dim == 0 else 'rows'}"
            fail(op, requirement, part.shape[1 - dim])
        if i + 1 < len(parts) and part.shape[dim] % one.block_shape[dim]:
            requirement = f"matrices[{i}] must end at a multiple of the block's {one.block_shape[dim]}"
            fail(op, requirement, part.shape[dim])
    blocks, pattern = moves.joined([part.blocks() for part in parts], [part.pattern for part in parts], dim)
    return SparseMatrix.of_blocks(blocks, pattern, *parts)
