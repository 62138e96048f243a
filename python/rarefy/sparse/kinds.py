"""as_matrix: a SparseMatrix of whatever users hold as a sparse matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch_private import PLAIN, eager
from ..checks import fail
from ..sparse_weight import SparseWeight
from .arrays import CHECKS, as_tensor, refuse_check
from .matrix import SparseMatrix
from .recent import can_keep, find, keep

# torch's layouts that store rows, and those that store columns.
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
# Those in which backward() cannot add to a leaf's gradient: "… tensors do not have is_contiguous".
_WITHOUT_GRADIENTS = (torch.sparse_bsr, *_BY_COLUMN)


def as_matrix(
    op: str, name: str, value: Any, *, columns: int | None = None, check: str = "once"
) -> SparseMatrix:
    """A SparseMatrix of what users hold: one, (data, indices, indptr), or another library's.

    Args:
        op: for messages, with `name`.
        name: what the argument is called.
        value: a SparseMatrix, which keeps its plan; a SparseWeight; a tuple of scipy's arrays; a matrix of
            scipy.sparse or torch. CSR and BSR are taken as they are, other formats are converted, to CSR or
            BSR, in each call.
        columns: of a tuple, which does not say it; None: as many as its indices reach.
        check: for tuples and other libraries' matrices; see SparseMatrix.
    """
    if check not in CHECKS:
        refuse_check(op, check)
    if isinstance(value, SparseMatrix):
        return value.settled()
    if isinstance(value, SparseWeight):
        if value.format not in ("bsr", "csr"):  # others' values are not the elements of the matrix
            fail(op, f"{name} must be a weight of format bsr or csr", value.format, TypeError)
        return SparseMatrix.on_pattern(value.values, value.pattern)
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return _of_torch(op, name, value, check)
    if hasattr(value, "tocsr"):
        return _of_scipy(op, name, value, check)
    if not isinstance(value, tuple | list) or len(value) != 3:
        requirement = (
            f"{name} must be a SparseMatrix, a SparseWeight, (data, indices, indptr), or a sparse matrix of "
            "scipy or torch"
        )
        dense = isinstance(value, Tensor) or hasattr(value, "__array_interface__")
        got = f"a dense {type(value).__name__}" if dense else type(value).__name__
        fail(op, requirement, got, TypeError)
    data, indices, indptr = (
        as_tensor(op, part, array) for part, array in zip(("data", "indices", "indptr"), value, strict=True)
    )
    r, c = (data.shape[1], data.shape[2]) if data.ndim == 3 else (1, 1)
    if columns is None:
        columns = (int(indices.max()) + 1) * c if indices.numel() else 0
    shape = (max(0, indptr.numel() - 1) * r, columns)
    return passing(data, indices, indptr, shape=shape, check=check, op=op)


def passing(*arrays: Any, shape: tuple[int, int], check: str, op: str) -> SparseMatrix:
    """A matrix for one call, which derives nothing that only later calls would gain by.

    On the pattern of arrays that came before, if these are the same ones.
    """
    names = ("data", "indices", "indptr")
    arrays = tuple(as_tensor(op, name, array) for name, array in zip(names, arrays, strict=True))
    plain = eager() and all(type(array) in PLAIN for array in arrays)
    recent = find(*arrays, shape[1], check, few=True) if plain else None
    matrix = None if recent is None else SparseMatrix.of_recent(arrays, recent, check, op)
    if matrix is None or tuple(matrix.shape) != shape:
        matrix = SparseMatrix(*arrays, shape=shape, check=check, op=op)
        if matrix._moves and not op.startswith("SparseMatrix") and can_keep(*arrays):
            keep(arrays, matrix.pattern, matrix._order, matrix._slot)
    matrix._keeps = False
    return matrix


def _of_torch(op: str, name: str, tensor: Tensor, check: str) -> SparseMatrix:
    """Of any sparse layout, differentiably; what is stored by column is transposed."""
    if (
        tensor.layout in _WITHOUT_GRADIENTS
        and tensor.requires_grad
        and tensor.is_leaf
        and torch.is_grad_enabled()
    ):
        requirement = (
            f"{name} must be no leaf that requires gradients in a layout in which torch keeps none: give "
            "(data, indices, indptr), by row, with data as the leaf"
        )
        fail(op, requirement, tensor.layout, TypeError)
    values = tensor.values() if tensor.layout in _BY_ROW + _BY_COLUMN else None
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        values = tensor.values()
    if values is None:
        fail(op, f"{name} must be a tensor with a sparse layout that is known", tensor.layout, TypeError)
    if tensor.ndim != 2 or values.ndim != (3 if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc) else 1):
        fail(op, f"{name} must be a matrix without batch or dense dimensions", tuple(tensor.shape))
    rows, columns = (int(size) for size in tensor.shape)
    options = {"check": check, "op": op}
    if tensor.layout == torch.sparse_coo:
        row, column = tensor.indices()
        indptr = torch.zeros(rows + 1, dtype=torch.int64, device=row.device)
        indptr[1:] = torch.bincount(row, minlength=rows).cumsum(0)
        return passing(values, column, indptr, shape=(rows, columns), **options)
    if tensor.layout in _BY_ROW:
        arrays = values, tensor.col_indices(), tensor.crow_indices()
        return passing(*arrays, shape=(rows, columns), **options)
    values = values if values.ndim == 1 else values.transpose(1, 2)
    arrays = values, tensor.row_indices(), tensor.ccol_indices()
    return _transposed(passing(*arrays, shape=(columns, rows), **options))


def _of_scipy(op: str, name: str, matrix: Any, check: str) -> SparseMatrix:
    """Of any of scipy's formats."""
    if len(matrix.shape) != 2:
        fail(op, f"{name} must have 2 dimensions", tuple(matrix.shape))
    if matrix.format not in ("csr", "csc", "bsr"):
        matrix = matrix.tocsr()
    arrays = matrix.data, matrix.indices, matrix.indptr
    shape = tuple(int(size) for size in matrix.shape)
    by_column = matrix.format == "csc"
    result = passing(*arrays, shape=shape[::-1] if by_column else shape, check=check, op=op)
    return _transposed(result) if by_column else result


def _transposed(matrix: SparseMatrix) -> SparseMatrix:
    from .structure import sparse_transpose

    result = sparse_transpose(matrix)
    result._keeps = False
    return result
