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
from .blocks import to_csr
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
        b: the same, of a's dtype, any that a SparseMatrix has.
        check: see SparseMatrix.

    Two sparse ones of equal blocks give a matrix in such blocks, others CSR; it stores what either does.

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
        a, b = to_csr(a), to_csr(b)
    blocks, pattern = moves.add(a.blocks(), a.pattern, b.blocks(), b.pattern)
    return SparseMatrix.of_blocks(blocks, pattern, a, b)


def _range(op: str, name: str, piece: Any, size: int) -> moves.Span:
    """First and end of a slice."""
    if not isinstance(piece, slice) or piece.step not in (None, 1):
        fail(op, f"{name} must be a slice with step 1", repr(piece), TypeError)
    try:
        chosen = range(size)[piece]
    except TypeError:
        fail(op, f"{name} must be a slice between ints", repr(piece), TypeError)
    return chosen.start, max(chosen.start, chosen.stop)


def sparse_slice(
    a: Any, rows: slice = slice(None), columns: slice = slice(None), *, check: str = "once"
) -> SparseMatrix:
    """Return ``a[rows, columns]`` for slices with step 1: in a's blocks, or CSR where an edge cuts one.

    Gradients flow to a's data. `a`, `check` and the errors are those of `sparse_dense`'s weight; another
    step is a TypeError.
    """
    op = "sparse_slice"
    matrix = as_matrix(op, "a", a, check=check)
    (n, k), (r, c) = matrix.shape, matrix.block_shape
    spans = _range(op, "rows", rows, n), _range(op, "columns", columns, k)
    whole = _to_edges(spans[0], r, n), _to_edges(spans[1], c, k)
    part = SparseMatrix.of_blocks(*moves.part(matrix.blocks(), matrix.pattern, *whole), matrix)
    if whole == spans:
        return part
    part = to_csr(part)  # of the blocks that the slice meets, no others
    spans = tuple((first - at, end - at) for (first, end), (at, _) in zip(spans, whole, strict=True))
    return SparseMatrix.of_blocks(*moves.part(part.blocks(), part.pattern, *spans), part)


def _to_edges(span: moves.Span, block: int, size: int) -> moves.Span:
    """The span of whole blocks that this one meets; itself if it begins and ends at their edges."""
    first, end = span
    return first if first == size else first // block * block, min(size, -(-end // block) * block)


def sparse_concat(matrices: Sequence[Any], dim: int = 0, *, check: str = "once") -> SparseMatrix:
    """Return matrices below one another (dim 0) or side by side (dim 1).

    The result is in their blocks if these are equal, and all but the last end at the edge of one; else CSR.
    Gradients flow to the data of all. Each matrix, `check` and errors are those of `sparse_dense`'s weight,
    and matrices of another dtype, device or size than the first one's are a ValueError.
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
        if (part.dtype, part.device) != (one.dtype, one.device):
            requirement = f"matrices[{i}] must be of {one.dtype} on {one.device}"
            fail(op, requirement, f"{part.dtype} on {part.device}")
        if part.shape[1 - dim] != one.shape[1 - dim]:
            requirement = f"matrices[{i}] must have {one.shape[1 - dim]} {'columns' if dim == 0 else 'rows'}"
            fail(op, requirement, part.shape[1 - dim])
    cut = any(part.shape[dim] % part.block_shape[dim] for part in parts[:-1])
    if cut or any(part.block_shape != one.block_shape for part in parts):
        parts = [to_csr(part) for part in parts]
    blocks, pattern = moves.joined([part.blocks() for part in parts], [part.pattern for part in parts], dim)
    return SparseMatrix.of_blocks(blocks, pattern, *parts)
