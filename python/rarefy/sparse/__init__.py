"""Sparse matrices in scipy's arrays: products of any kind, with gradients, on the layers' kernels."""

from .conv import sparse_conv2d
from .matrix import SparseMatrix
from .products import sddmm, sparse_dense, sparse_matmul, spmm, spmv
from .recent import forget_arrays
from .softmax import sparse_attention, sparse_softmax
from .structure import sparse_add, sparse_concat, sparse_slice, sparse_transpose

__all__ = [
    "SparseMatrix",
    "forget_arrays",
    "sddmm",
    "sparse_add",
    "sparse_attention",
    "sparse_concat",
    "sparse_conv2d",
    "sparse_dense",
    "sparse_matmul",
    "sparse_slice",
    "sparse_softmax",
    "sparse_transpose",
    "spmm",
    "spmv",
]
