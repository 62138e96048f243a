"""What sparse matrices refuse, by name and position; any arrays give a matrix or an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rarefy import sparse
from rarefy.sparse import SparseMatrix
from sparse_matrices import csr, random_blocks


def _bad(**changes):
    arrays = {
        "data": torch.ones(3),
        "indices": torch.tensor([0, 1, 2]),
        "indptr": torch.tensor([0, 2, 3]),
        "shape": (2, 3),
    }
    arrays |= changes
    return SparseMatrix(arrays["data"], arrays["indices"], arrays["indptr"], shape=arrays["shape"])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"data": torch.ones(3, 1)}, ValueError, r"data must have 1 dimension \(CSR\) or 3 \(BSR\); got 2"),
        ({"data": torch.ones(3, dtype=torch.bool)}, TypeError, "data must be of dtype float64"),
        ({"data": torch.ones(4)}, ValueError, "indices must have 4 elements, as many as data; got 3"),
        (
            {"indices": torch.tensor([0, 3, 2])},
            ValueError,
            r"indices must be in \[0, 3\); got indices\[1\]=3",
        ),
        ({"indices": torch.tensor([0, -1, 2])}, ValueError, r"in \[0, 3\); got indices\[1\]=-1"),
        ({"indices": torch.tensor([0.0, 1, 2])}, TypeError, "indices must be int32 or int64; got float32"),
        ({"indices": torch.tensor([[0, 1, 2]])}, ValueError, "indices must have 1 dimension"),
        ({"indptr": torch.tensor([0, 2])}, ValueError, "indptr must have 3 elements, one more than rows"),
        ({"indptr": torch.tensor([1, 2, 3])}, ValueError, "indptr must begin with 0 and end with 3"),
        ({"indptr": torch.tensor([0, 2, 4])}, ValueError, "end with 3, the number of indices; got 0 … 4"),
        ({"indptr": torch.tensor([0, 4, 3])}, ValueError, r"not decrease; got indptr\[1\]=4, then 3"),
        ({"shape": (2, -3)}, ValueError, "shape"),
        ({"shape": (3, 3)}, ValueError, "indptr must have 4 elements"),
    ],
)
def test_wrong_arrays_are_named_with_the_position(changes, error, text):
    with pytest.raises(error, match=text) as caught:
        _bad(**changes)
    assert str(caught.value).startswith("[SparseMatrix] ")


def test_padding_must_be_zero():
    data = torch.ones(1, 2, 2)
    with pytest.raises(ValueError, match="zero"):
        SparseMatrix(data, torch.tensor([0]), torch.tensor([0, 1]), shape=(1, 2))


def test_wrong_operands_are_named():
    arrays, _ = csr(4, 6, 0.5)
    matrix = SparseMatrix(*arrays, shape=(4, 6))
    x = torch.randn(2, 6)
    cases = [
        (
            lambda: sparse.sparse_dense(x[:, :5], matrix),
            ValueError,
            r"\[sparse_dense\] x must have 6 columns",
        ),
        (
            lambda: sparse.sparse_dense(x.double(), matrix),
            TypeError,
            r"\[sparse_dense\] data must be of the dtype of x, torch.float64; got torch.float32",
        ),
        (
            lambda: sparse.sparse_dense(x, matrix, torch.ones(4).double()),
            TypeError,
            "bias must be of the dty",
        ),
        (
            lambda: sparse.sparse_dense(x, matrix, torch.ones(4), sparse_lhs=True),
            ValueError,
            r"\[sparse_dense\] bias must have shape \(2,\); got \(4,\)",
        ),
        (lambda: sparse.sparse_dense(x.int(), matrix), TypeError, "x must be of the dtype of data"),
        (lambda: sparse.sparse_dense(x, "w"), TypeError, r"weight must be a SparseMatrix.*got str"),
        (lambda: sparse.sparse_dense(x, matrix, activation="swish"), ValueError, "activation must be"),
        (
            lambda: sparse.sparse_dense(x, matrix, torch.ones(5)),
            ValueError,
            r"\[sparse_dense\] bias must have shape \(4,\); got \(5,\)",
        ),
        (lambda: sparse.sparse_dense(x, arrays, check="never"), ValueError, 'check must be "once"'),
        (lambda: sparse.sparse_dense(torch.randn(2, 2, 6), matrix, sparse_lhs=True), ValueError, "2 dim"),
        (lambda: sparse.spmm(matrix, x), ValueError, r"\[spmm\] b must have 6 rows"),
        (lambda: sparse.spmv(matrix, x), ValueError, r"\[spmv\] v must have 1 dimension"),
        (lambda: sparse.spmv(matrix, x[0, :3]), ValueError, "v must have 6 elements"),
        (lambda: sparse.sddmm(matrix, x, x), ValueError, r"\[sddmm\] x and y must have 4 and 6 rows"),
        (lambda: sparse.sddmm(matrix, torch.ones(4, 2), torch.ones(6, 3)), ValueError, "as many columns"),
        (
            lambda: sparse.sddmm(matrix, torch.ones(4, 2), torch.ones(6, 2).double()),
            TypeError,
            r"\[sddmm\] y must be of torch.float32 on cpu, as x is; got torch.float64 on cpu",
        ),
        (lambda: matrix @ matrix, ValueError, r"\[sparse_matmul\] b must have 6 rows"),
        (lambda: sparse.sparse_add(matrix, torch.ones(4, 5)), ValueError, r"\[sparse_add\] both must be"),
        (lambda: sparse.sparse_add(matrix, torch.ones(4, 6).double()), TypeError, "both must be of"),
        (lambda: matrix[::2], TypeError, r"\[sparse_slice\] rows must be a slice with step 1"),
        (lambda: sparse.sparse_concat([]), ValueError, "at least one matrix"),
        (lambda: sparse.sparse_concat([matrix, matrix.T]), ValueError, r"matrices\[1\] must have 6 columns"),
        (lambda: sparse.sparse_concat([matrix], 2), ValueError, "dim must be 0 or 1"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    blocks = random_blocks(2, 3, 2, 2, 0.9)[0]
    with pytest.raises(ValueError, match="rows must begin at a multiple of the block's 2; got 1"):
        sparse.sparse_slice(blocks, slice(1, 4))
    with pytest.raises(ValueError, match="both must be in blocks of"):
        sparse.sparse_add(SparseMatrix(*blocks, shape=(4, 6)), matrix)


@pytest.mark.filterwarnings("ignore:.*not sorted")
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-2, 6), max_size=6), st.lists(st.integers(-1, 7), min_size=4, max_size=4))
def test_any_arrays_give_a_matrix_or_an_error(indices, indptr):
    """Whatever the numbers are, kernels stay inside the matrix, and errors are ours."""
    valid = indptr[0] == 0 and indptr == sorted(indptr) and indptr[-1] == len(indices)
    valid = valid and all(0 <= index < 5 for index in indices)
    arrays = np.ones(len(indices)), np.array(indices, "i8"), np.array(indptr)
    if valid:
        matrix = SparseMatrix(*arrays, shape=(3, 5))
        assert float(sparse.sparse_dense(torch.ones(1, 5, dtype=torch.float64), matrix).sum()) == len(indices)
    else:
        with pytest.raises(ValueError, match=r"^\[SparseMatrix\] ind"):
            SparseMatrix(*arrays, shape=(3, 5))
