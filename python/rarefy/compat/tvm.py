"""TVM's sparse operators by their names and argument order, which were deleted with Relay in 2025.

Arrays are tensors or NumPy arrays, as in scipy. What the originals left open or got wrong is decided here:
rectangular transposes, leading dimensions, int64 indices, every dtype, a bias everywhere, gradients, and
indices that are checked. On the CPU their default case, CSR on the right, was a serial scalar loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import sparse
from ..checks import check_block_shape, check_density, check_int, fail
from ..masks import nonzero_blocks
from ..pattern import BsrPattern
from ..report import Report
from ..sparse.arrays import as_tensor
from ..sparse.kinds import as_matrix, passing
from ..sparse.matrix import SparseMatrix
from ..sparsify import sparsify

Arrays = tuple[Tensor, Tensor, Tensor]  # data, indices, indptr


def sparse_dense(
    dense_data: Any, sparse_data: Any, sparse_indices: Any, sparse_indptr: Any, sparse_lhs: bool = False
) -> Tensor:
    """`topi.nn.sparse_dense`: ``dense_data @ S.T``, (M, N), or with `sparse_lhs` ``S @ dense_data.T``.

    CSR if `sparse_data` has 1 dimension, BSR if it has 3; see rarefy.sparse.sparse_dense for all else.
    """
    arrays = (sparse_data, sparse_indices, sparse_indptr)
    return sparse.sparse_dense(dense_data, arrays, sparse_lhs=sparse_lhs)


def sparse_transpose(
    sparse_data: Any, sparse_indices: Any, sparse_indptr: Any, columns: int | None = None
) -> Arrays:
    """`topi.nn.sparse_transpose`: the arrays of the transposed matrix, rows in order; BSR too.

    `columns` of the matrix are as many as its rows by default: the original knew square ones alone.
    """
    data = as_tensor("sparse_transpose", "sparse_data", sparse_data)
    indptr = as_tensor("sparse_transpose", "sparse_indptr", sparse_indptr)
    rows = max(0, len(indptr) - 1) * (data.shape[1] if data.ndim == 3 else 1)
    shape = (rows, rows if columns is None else columns)
    matrix = passing(data, sparse_indices, indptr, shape=shape, check="once", op="sparse_transpose")
    result = sparse.sparse_transpose(matrix)
    kind = matrix.indices.dtype
    return result.data, result.indices.to(kind), result.indptr.to(kind)


def sparse_add(dense_data: Any, sparse_data: Any, sparse_indices: Any, sparse_indptr: Any) -> Tensor:
    """`topi.nn.sparse_add`: ``dense_data + S``, dense; CSR or BSR."""
    dense = as_tensor("sparse_add", "dense_data", dense_data)
    return sparse.sparse_add(dense, (sparse_data, sparse_indices, sparse_indptr))


def sparse_conv2d(
    dense_data: Any,
    sparse_data: Any,
    sparse_indices: Any,
    sparse_indptr: Any,
    layout: str = "NHWC",
    kernel_size: int = 1,
) -> Tensor:
    """`topi.nn.sparse_conv2d`, and the kernels of 3×3 behind relay's: stride 1, output of the input's size.

    Args:
        dense_data: (B, H, W, C), or (B, C, H, W) with layout "NCHW".
        sparse_data: (nnzb, R, C'), or (nnzb, R) for blocks of one column; (nnz,) for CSR. The matrix is
            (O, KH · KW · C), columns in the order (kernel row, kernel column, channel) for NHWC. For NCHW
            they are in the order (channel, kernel row, kernel column), in blocks of one column, as in TVM.
        sparse_indices: (nnzb,) int32 or int64.
        sparse_indptr: (O / R + 1,) int32 or int64.
        layout: "NHWC" or "NCHW".
        kernel_size: odd, rows as columns; the originals knew 1 and 3. Zeros are around the images.

    Returns (B, H, W, O), or (B, O, H, W). See rarefy.sparse.sparse_conv2d for dtypes, gradients and all else.
    """
    op = "sparse_conv2d"
    x, data = as_tensor(op, "dense_data", dense_data), as_tensor(op, "sparse_data", sparse_data)
    if check_int(op, "kernel_size", kernel_size, 1) % 2 == 0:
        fail(op, "kernel_size must be odd", kernel_size)
    weight: Any = (data[:, :, None] if data.ndim == 2 else data, sparse_indices, sparse_indptr)
    if layout == "NCHW" and kernel_size > 1 and x.ndim == 4:
        if data.ndim == 3 and data.shape[2] != 1:
            requirement = "blocks must have one column where columns are in the order of OIHW (NCHW, k×k)"
            fail(op, requirement, tuple(data.shape))
        places = kernel_size * kernel_size
        matrix = as_matrix(op, "weight", weight, columns=places * x.shape[1])
        weight = _by_place(matrix, places)
    options = {"kernel_size": kernel_size, "padding": kernel_size // 2, "layout": layout}
    return sparse.sparse_conv2d(x, weight, **options)


def _by_place(matrix: SparseMatrix, places: int) -> SparseMatrix:
    """Columns in the order (channel, place of the kernel), one a block, as (place, channel)."""
    (_, k), pattern = matrix.shape, matrix.pattern
    row, column = pattern.block_rows(), pattern.indices()[1].long()
    positions = row * k + column % places * (k // places) + column // places
    positions, order = positions.sort()
    sizes = {"shape": tuple(matrix.shape), "block_shape": matrix.block_shape}
    return SparseMatrix.on_pattern(matrix.values()[order], BsrPattern.from_positions(positions, **sizes))


def csrmv(a: Any, x: Any, y: Any = None) -> Tensor:
    """`topi.sparse.csrmv`: ``a @ x + y``, (M, 1), for a sparse a, (M, K), and x (K, 1).

    `y` is `csrmm`'s c: (M,), or (1,), the one shape that TVM's docstring has.
    """
    x = as_tensor("csrmv", "x", x)
    if x.ndim != 2 or x.shape[1] != 1:
        fail("csrmv", "x must have 2 dimensions, one column", tuple(x.shape))
    product = sparse.sparse_dense(x.t(), a).t()
    return product if y is None else product + _by_row("csrmv", "y", y, product)


def csrmm(a: Any, b: Any, c: Any = None) -> Tensor:
    """`topi.sparse.csrmm`: ``a @ b + c``, (M, N), for a sparse a, (M, K), and b (K, N).

    `a`: a SparseMatrix, (data, indices, indptr), or a CSR matrix of scipy or torch. `c`, of the product's
    dtype: (M,), an element for each row; (1,); or 2 dimensions that broadcast to (M, N). TVM's docstring says
    of c "with shape [n]", while its code adds ``bias[i]`` to row i, and its tests give (M,).
    """
    b = as_tensor("csrmm", "b", b)
    if b.ndim != 2:
        fail("csrmm", "b must have 2 dimensions", tuple(b.shape))
    product = sparse.sparse_dense(b.t(), a).t()
    return product if c is None else product + _by_row("csrmm", "c", c, product)


def _by_row(op: str, name: str, bias: Any, product: Tensor) -> Tensor:
    """`bias` in 2 dimensions that broadcast to the product's: an element for each row if it has one."""
    bias = as_tensor(op, name, bias)
    (m, n), shape = product.shape, tuple(bias.shape)
    given = (*shape, 1) if bias.ndim == 1 else shape
    if len(given) != 2 or given[0] not in (1, m) or given[1] not in (1, n):
        fail(op, f"{name} must have shape ({m},), (1,), or 2 dimensions that broadcast to ({m}, {n})", shape)
    if bias.dtype != product.dtype:
        fail(op, f"{name} must be of the product's dtype, {product.dtype}", bias.dtype, TypeError)
    if bias.device != product.device:
        fail(op, f"{name} must be on the product's device, {product.device}", bias.device, TypeError)
    return bias.reshape(given)


def dense_si(data: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    """`topi.sparse.dense` of a sparse input (M, K) and a dense weight (N, K): ``data @ weight.T + bias``."""
    return sparse.sparse_dense(weight, data, bias, sparse_lhs=True)


def dense_sw(data: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    """`topi.sparse.dense` of a dense input (M, K) and a sparse weight (N, K): ``data @ weight.T + bias``."""
    return sparse.sparse_dense(data, weight, bias)


def dense(data: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    """`topi.sparse.dense`: `dense_si` for a dense weight, else `dense_sw`."""
    strided = isinstance(weight, Tensor) and weight.layout == torch.strided
    if strided or (hasattr(weight, "__array_interface__") and not isinstance(weight, Tensor)):
        return dense_si(data, weight, bias)
    return dense_sw(data, weight, bias)


class bsr_dense:
    """`relay.data_dep_optimization.bsr_dense`."""

    @staticmethod
    def convert(model: nn.Module, blocksize: tuple[int, int], sparsity_threshold: float) -> Report:
        """Makes the nn.Linear layers sparse of whose blocks at least `sparsity_threshold` are zero, exactly.

        In place; `blocksize` is (R, C). The original counted zeros among the elements, and so stored nearly
        all blocks of a weight whose zeros are spread.
        """
        return _convert("bsr_dense.convert", model, nn.Linear, blocksize, sparsity_threshold)


class bsr_conv2d:
    """`relay.data_dep_optimization.bsr_conv2d`."""

    @staticmethod
    def convert(
        model: nn.Module,
        blocksize: tuple[int, int],
        sparsity_threshold: float,
        layout: str = "NHWC",
        kernel_size: int | None = None,
    ) -> Report:
        """The same of nn.Conv2d: 1×1 and k×k, both memory formats, and groups that blocks fit into.

        Blocks are (output channels, input channels) at a place of the kernel. `layout`, "NHWC" or "NCHW",
        changes nothing: there it said how weights lie, which modules know, and images come in either memory
        format. With `kernel_size` only layers with so many rows and columns of the kernel become sparse; all
        by default, where the original took those of 1×1, and knew 3 besides.
        """
        op = "bsr_conv2d.convert"
        if layout not in ("NHWC", "NCHW"):
            fail(op, 'layout must be "NHWC" or "NCHW"', repr(layout))
        if kernel_size is not None:
            check_int(op, "kernel_size", kernel_size, 1)
        return _convert(op, model, nn.Conv2d, blocksize, sparsity_threshold, kernel_size)


def _convert(
    op: str, model: nn.Module, kind: type, blocksize: Any, threshold: Any, kernel: int | None = None
) -> Report:
    block, threshold = check_block_shape(op, blocksize), check_density(op, threshold, "sparsity_threshold")

    def is_sparse(_: str, module: nn.Module) -> bool:
        if not isinstance(module, kind):
            return False
        weight = module.weight.detach()
        if kernel is not None and weight.shape[2:] != (kernel, kernel):
            return False
        matrix = weight.movedim(1, -1).flatten(1)  # channels of a place beside one another
        return float((~nonzero_blocks(matrix, block)).double().mean()) >= threshold

    spec = f"block:{block[0]}x{block[1]}@nonzero"
    return sparsify(model, spec, filter_fn=is_sparse, measure=False)
