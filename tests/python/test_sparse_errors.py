"""What sparse matrices refuse, by name and position; any arrays give a matrix or an error."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rarefy import sparse
from rarefy.sparse import SparseMatrix
from sparse_matrices import csr


def _bad(**changes):
    arrays = {
        "data": torch.ones(3),
        "indices": torch.tensor([0, 1, 2]),
        "indptr": torch.tensor([0, 2, 3]),
        "shape": (2, 3),
    }
    arrays |= changes
    return SparseMatrix(**arrays)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"data": torch.ones(3, 1)}, ValueError, r"data must have 1 dimension \(CSR\) or 3 \(BSR\); got 2"),
        ({"data": torch.ones(3, dtype=torch.bool)}, TypeError, "data must be of dtype float64"),
        ({"data": torch.ones(3, 0, 2)}, ValueError, r"sides of at least 1; got \(3, 0, 2\)"),
        ({"data": torch.ones(3, 2, 0)}, ValueError, r"sides of at least 1; got \(3, 2, 0\)"),
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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"indices": torch.tensor([0, 3, 2])}, r"indices must be in \[0, 3\); got indices\[1\]=3"),
        ({"indices": torch.tensor([0, 2**40, 2])}, r"\[0, 3\); got indices\[1\]=1099511627776"),
        ({"indptr": torch.tensor([1, 2, 3])}, "indptr must begin with 0 and end with 3"),
        ({"indptr": torch.tensor([0, 2**40, 3])}, r"not decrease; got indptr\[1\]=1099511627776, then 3"),
        ({"indices": torch.tensor([1, 0, 2])}, r'"trusted"; got indices\[1\]=0 after 1'),
        ({"indices": torch.tensor([1, 1, 2])}, r"sorted and distinct in .*; got indices\[1\]=1 after 1"),
        ({"data": torch.ones(2, 2, 257), "shape": (4, 3), "indices": torch.zeros(2).long(),
          "indptr": torch.tensor([0, 1, 2])}, "block_shape must be at most"),
    ],
)  # fmt: skip
def test_trusted_arrays_are_named_as_scipy_names_them(changes, text):
    with pytest.raises(ValueError, match=text) as caught:
        _bad(**changes, check="trusted")
    assert str(caught.value).startswith("[SparseMatrix] ") and "_indices" not in str(caught.value)


def test_blocks_without_a_side_are_refused_as_arrays_that_come_again():
    """So many that their plan would be kept."""
    indices, indptr = torch.zeros(600, dtype=torch.int64), torch.tensor([0, 600])
    for sides in ((0, 2), (2, 0)):
        for _ in range(3):
            with pytest.raises(ValueError, match=r"\[sparse_dense\] blocks of data must have sides of at"):
                sparse.sparse_dense(torch.ones(1, 4), (torch.ones(600, *sides), indices, indptr))


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
        (lambda: matrix[0.5:], TypeError, r"\[sparse_slice\] rows must be a slice between ints; got slice"),
        (lambda: matrix[0:1, 0:1, 0:1], IndexError, r"\[sparse_slice\] a tuple must have 2 slices, .*got 3"),
        (lambda: matrix[(slice(0, 1),)], IndexError, r"\[sparse_slice\] a tuple must have 2 slices, .*got 1"),
        (lambda: sparse.sparse_concat(3), TypeError, r"\[sparse_concat\] matrices must be a seq.*; got int"),
        (lambda: sparse.sparse_concat(None), TypeError, "sequence of sparse matrices; got NoneType"),
        (lambda: sparse.sparse_concat(matrix), TypeError, "sequence of sparse matrices; got SparseMatrix"),
        (lambda: sparse.sparse_concat(matrix.to_scipy()), TypeError, "matrices; got csr_array"),
        (lambda: sparse.sparse_concat(torch.ones(2)), TypeError, "matrices; got Tensor"),
        (lambda: sparse.sparse_concat([]), ValueError, "at least one matrix"),
        (lambda: sparse.sparse_concat([matrix, matrix.T]), ValueError, r"matrices\[1\] must have 6 columns"),
        (lambda: sparse.sparse_concat([matrix], 2), ValueError, "dim must be 0 or 1"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    assert matrix[0:1].shape == (1, 6)
    assert sparse.sparse_concat(each for each in (matrix, matrix)).shape == (8, 6)


@pytest.mark.parametrize("left", [False, True])
def test_activations_of_integers_are_named_on_both_sides(left):
    (data, *indices), _ = csr(4, 6, 0.5, torch.int32)
    x = torch.ones(2, 6, dtype=torch.int32)
    for name in ("gelu", "gelu_tanh", "silu"):
        requirement = rf"^\[sparse_dense\] activation of integers must be none or relu; got {name}$"
        with pytest.raises(ValueError, match=requirement):
            sparse.sparse_dense(x, (data, *indices), activation=name, sparse_lhs=left)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("of", ["matrix", "arrays"])
def test_calls_like_ones_before_are_looked_at_as_the_first(of, tokens):
    """What is kept takes no argument that was not checked."""
    arrays, _ = csr(40, 60, 0.5)
    weight = SparseMatrix(*arrays, shape=(40, 60)) if of == "matrix" else arrays
    x, bias = torch.randn(tokens, 60), torch.ones(40)
    wrong = [
        (torch.ones(40, 1), ValueError, r"bias must have shape \(40,\); got \(40, 1\)"),
        (torch.ones(1, 40), ValueError, r"bias must have shape \(40,\); got \(1, 40\)"),
        (torch.ones(3), ValueError, r"bias must have shape \(40,\); got \(3,\)"),
        (bias.double(), TypeError, "bias must be of the dtype of x, torch.float32; got torch.float64"),
        (bias.to("meta"), TypeError, "bias must be on the device of x, cpu; got meta"),
        ([1.0] * 40, TypeError, "bias must be a torch.Tensor; got list"),
    ]
    for _ in range(3):
        for other, error, text in wrong:
            with pytest.raises(error, match=rf"^\[sparse_dense\] {text}$"):
                sparse.sparse_dense(x, weight, other)
        for call in (
            lambda: sparse.sparse_dense(x, weight, check="never"),
            lambda: sparse.spmm(weight, x.t(), check="never"),
            lambda: sparse.spmv(weight, x[0], check="never"),
            lambda: sparse.sparse_add(weight, weight, check="never"),
        ):
            with pytest.raises(ValueError, match=r"check must be .* or \"trusted\"; got 'never'"):
                call()
        want = sparse.sparse_dense(x, weight) + bias
        torch.testing.assert_close(sparse.sparse_dense(x, weight, bias), want)
        torch.testing.assert_close(sparse.sparse_dense(x, weight, bias.numpy()), want)
        sparse.spmm(weight, x.t()), sparse.spmv(weight, x[0])


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


def _numbers(rng, count: int, kind: str, near: int) -> np.ndarray:
    """Indices, most of them near the valid ones, others at the ends of int32 and int64 and around 2³²."""
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    far = [least, least + 1, most, most - 1, -1, least // 2, most // 2, 2**31 - 1, -(2**31), near, 2 * near]
    if kind == "i8":
        far += [2**31, 2**32, 2**32 + 1, -(2**32), 2**33 + near - 1, 2**63 - 2**32]  # small in their low bits
    numbers = rng.integers(0, near, count).astype(kind)
    wrong = rng.random(count) < 0.1
    numbers[wrong] = rng.choice(np.array(far, kind), int(wrong.sum()))
    return numbers


def _is_valid(indices: list[int], indptr: list[int], rows: int, columns: int, ascending: bool) -> bool:
    valid = len(indptr) == rows + 1 and indptr[0] == 0 and indptr[-1] == len(indices)
    valid = valid and all(a <= b for a, b in pairwise(indptr))
    valid = valid and all(0 <= index < columns for index in indices)
    if valid and ascending:
        parts = (indices[a:b] for a, b in pairwise(indptr))
        valid = all(a < b for part in parts for a, b in pairwise(part))
    return valid


@pytest.mark.filterwarnings("ignore:.*not sorted")
@pytest.mark.parametrize("check", ["once", "trusted"])
@pytest.mark.parametrize("kinds", ["i4 i4", "i8 i8", "i4 i8"])
def test_extreme_arrays_give_a_matrix_or_an_error(kinds, check, one_thread):
    """A fuzzer of the constructor, 60,000 draws in all; what it takes is the matrix that was meant."""
    rng, draws, columns = np.random.default_rng(0), 10_000, 5
    of_indices, of_indptr = kinds.split()
    sizes = rng.integers(0, (4, 7), (draws, 2))  # rows and indices
    wrong = rng.random((draws, 2)) < 0.05  # numbers of indices and of pointers
    indices = _numbers(rng, 8 * draws, of_indices, columns).reshape(draws, 8)
    indices[::2].sort(axis=1)
    pointers = _numbers(rng, 4 * draws, of_indptr, 7).reshape(draws, 4)
    steps = np.sort(rng.integers(0, sizes[:, 1:] + 1, (draws, 4)), axis=1)
    pointers[::4] = pointers[::4].clip(0, sizes[::4, 1:])  # of valid size
    pointers[1::4], pointers[2::4] = steps[1::4], steps[2::4]  # ascending
    taken = 0
    for at in range(draws):
        rows, count = (int(size) for size in sizes[at])
        block = (1, 2)[at % 5 == 0]
        given = indices[at, : count + wrong[at, 0]]
        indptr = pointers[at, : rows + 1 + wrong[at, 1]].copy()
        if at % 4:
            indptr[0], indptr[rows] = 0, count if rows else 0
        data = np.ones(count if block == 1 else (count, block, block), "f4")
        arrays = data, given.copy(), indptr
        valid = count == len(given)
        valid = valid and _is_valid(given.tolist(), indptr.tolist(), rows, columns, check == "trusted")
        matrix = refused = None
        try:
            matrix = SparseMatrix(*arrays, shape=(rows * block, columns * block), check=check)
        except (ValueError, TypeError) as error:
            refused = str(error)
        assert valid == (refused is None), (arrays, refused)
        assert valid or refused.startswith("[SparseMatrix] ind"), (arrays, refused)
        if valid:
            taken += 1
            assert float(matrix.to_dense().sum()) == data.size
    assert draws // 50 < taken < draws // 2
