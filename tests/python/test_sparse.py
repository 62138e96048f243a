"""sparse_dense and its relatives: what TVM tests, scipy on random matrices, indices, what users hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse as sp
from torch import nn

import rarefy
from rarefy import BsrPattern, sparse
from rarefy.sparse import SparseMatrix
from sparse_matrices import FLOATS, INTEGERS, csr, on, random_blocks, whole


def test_the_op_has_a_short_name():
    assert rarefy.sparse_dense is sparse.sparse_dense


def test_csr_weight_of_odd_sizes(device):
    arrays, dense = csr(17, 47, 0.2)
    x = torch.randn(1, 47)
    y = sparse.sparse_dense(x.to(device), on(arrays, device)).cpu()
    torch.testing.assert_close(y, x @ dense.T, atol=1e-4, rtol=1e-4)


def test_csr_on_the_left(device):
    arrays, dense = csr(17, 47, 0.2)
    w = torch.randn(3, 47)
    y = sparse.sparse_dense(w.to(device), on(arrays, device), sparse_lhs=True).cpu()
    assert y.shape == (17, 3)
    torch.testing.assert_close(y, dense @ w.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_bsr_with_and_without_relu(device, relu, left):
    arrays, dense = random_blocks(8, 8, 8, 16, 0.9)
    x = torch.randn(1, 128)
    activation = "relu" if relu else None
    y = sparse.sparse_dense(x.to(device), on(arrays, device), sparse_lhs=left, activation=activation).cpu()
    want = dense @ x.T if left else x @ dense.T
    torch.testing.assert_close(y, want.relu() if relu else want, atol=1e-4, rtol=1e-4)


def tvms_blocks(rng, n: int, k: int, block: tuple[int, int], density: float) -> sp.bsr_matrix:
    """TVM's random_bsr_matrix: so many blocks of normal numbers at random places of (n, k)."""
    (r, c), count = block, int(int(density * n * k) / (block[0] * block[1])) + 1
    mask = np.zeros((n // r) * (k // c), bool)
    mask[rng.choice(len(mask), count, replace=False)] = True
    stored = np.kron(mask.reshape(n // r, k // c), np.ones(block))
    return sp.bsr_matrix((stored * rng.standard_normal((n, k))).astype("f4"), blocksize=block)


def check_as_tvm(rng, w: sp.bsr_matrix, m: int, device: str) -> None:
    """Its tolerance of 1e-5, towards the exact product."""
    x = rng.standard_normal((m, w.shape[1])).astype("f4")
    arrays = on(tuple(map(torch.from_numpy, (w.data, w.indices, w.indptr))), device)
    y = sparse.sparse_dense(torch.from_numpy(x).to(device), arrays).cpu().numpy()
    np.testing.assert_allclose(y, x.astype("f8") @ w.toarray().astype("f8").T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trial", range(20))
def test_bsr_of_random_sizes(device, trial):
    rng = np.random.default_rng(trial)
    block = tuple(int(side) for side in rng.integers(1, 16, 2))
    m, rows, columns = (int(size) for size in (rng.integers(1, 32), *rng.integers(1, 16, 2)))
    density = float(np.clip(rng.random(), 0.1, 0.9))
    check_as_tvm(rng, tvms_blocks(rng, rows * block[0], columns * block[1], block, density), m, device)


@pytest.mark.parametrize(("n", "block"), [(1280, (1, 1)), (16, (2, 2))])
@pytest.mark.parametrize("csr", [False, True])
def test_shapes_that_tvm_pads_for_gpus(device, n, block, csr):
    """128 tokens and 128 inputs; rows of few blocks, most of them empty."""
    rng = np.random.default_rng(0)
    w = tvms_blocks(rng, n, 128, block, 0.01)
    check_as_tvm(rng, w.tocsr() if csr else w, 128, device)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_dtype_is_exact_on_integers(device, dtype, bias):
    arrays, dense = csr(5, 7, 0.5, dtype)
    x, b = whole(3, 7, dtype=dtype), whole(5, dtype=dtype)
    y = sparse.sparse_dense(x.to(device), on(arrays, device), b.to(device) if bias else None).cpu()
    want = x.long() @ dense.long().T + (b.long() if bias else 0)
    assert y.dtype == dtype
    assert torch.equal(y, want.to(dtype))


def test_integers_in_blocks_at_ragged_edges(device):
    pattern = BsrPattern.from_mask(torch.rand(5, 4) < 0.6, shape=(18, 23), block_shape=(4, 6), device=device)
    for dtype in INTEGERS:
        matrix = SparseMatrix.on_pattern(whole(pattern.nnzb, 4, 6, dtype=dtype).to(device), pattern)
        x, b = whole(2, 3, 23, dtype=dtype), whole(18, dtype=dtype)
        y = sparse.sparse_dense(x.to(device), matrix, b.to(device), activation="relu").cpu()
        want = (x.long() @ matrix.to_dense().cpu().long().T + b.long()).to(dtype)
        assert torch.equal(y, want.clamp(min=0))


def test_integers_wrap_around_as_in_numpy(device):
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        dense = torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), (6, 9), dtype=dtype)
        w = sp.csr_matrix(dense.numpy())
        x = torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), (4, 9), dtype=dtype)
        w = on(tuple(torch.from_numpy(array) for array in (w.data, w.indices, w.indptr)), device)
        y = sparse.sparse_dense(x.to(device), w, activation="relu").cpu()
        with np.errstate(over="ignore"):
            want = x.numpy() @ dense.numpy().T
        assert torch.equal(y, torch.from_numpy(np.maximum(want, 0)))


@pytest.mark.parametrize("size", [(3, 4, 3), (3, 3, 3), (5, 5, 5), (7, 9, 5)])
def test_all_four_transposes(size):
    """TensorFlow's sparse_dense_matmul: either operand as it is or transposed; rows may be empty."""
    m, k, n = size
    arrays, dense = csr(m, k, 0.4)
    a = SparseMatrix(*arrays, shape=(m, k))
    b = torch.randn(k, n)
    for left, dense_left in ((a, dense), (a.T.T, dense)):
        torch.testing.assert_close(left @ b, dense_left @ b)
        torch.testing.assert_close(left @ b.T.contiguous().T, dense_left @ b)
    torch.testing.assert_close(a.T @ torch.ones(m, n), dense.T @ torch.ones(m, n))
    torch.testing.assert_close(a.T @ torch.ones(n, m).T, dense.T @ torch.ones(m, n))


@pytest.mark.parametrize("index", ["i4", "i8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
def test_sparse_plus_dense(device, index, dtype):
    for arrays, dense in (csr(3, 49, 0.2, dtype, index), random_blocks(3, 5, 4, 3, 0.4, dtype, index)):
        other = whole(*dense.shape, dtype=dtype)
        assert torch.equal(sparse.sparse_add(other.to(device), on(arrays, device)).cpu(), other + dense)
        assert torch.equal(sparse.sparse_add(on(arrays, device), other.to(device)).cpu(), other + dense)


def test_transpose_of_a_large_square():
    arrays, dense = csr(1023, 1023, 0.3)
    assert torch.equal(sparse.sparse_transpose(arrays).to_dense(), dense.T)


KINDS = ("f4", "f8", "i1", "i2", "i4", "i8")


@pytest.mark.timeout(900)  # 20 s alone, more than the usual two minutes beside other work
@pytest.mark.filterwarnings("ignore:.*not sorted")
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_scipy_agrees_on_random_matrices(data):
    """Products, sums, transposes and slices of CSR and BSR; unsorted and repeated indices, empty rows.

    Matrices may be empty, too. Floats are whole numbers, so sums are exact; integers may wrap around.
    """
    csr, dtype = data.draw(st.booleans()), data.draw(st.sampled_from(KINDS))
    r, c, d = (1 if csr else data.draw(st.integers(1, 4)) for _ in range(3))
    rows, inner, columns = (data.draw(st.integers(0, 6)) for _ in range(3))
    # All draws first: behind an operation that was stopped once, as by a timeout, others look inconsistent.
    top, bottom = sorted(data.draw(st.integers(0, rows)) * r for _ in range(2))
    left, right = sorted(data.draw(st.integers(0, inner)) * c for _ in range(2))
    matrices, theirs = [], []
    for grid, block in (((rows, inner), (r, c)), ((inner, columns), (c, d)), ((rows, inner), (r, c))):
        counts = [data.draw(st.integers(0, 4)) if grid[1] else 0 for _ in range(grid[0])]
        indices = [data.draw(st.integers(0, grid[1] - 1)) for count in counts for _ in range(count)]
        values = np.array([data.draw(st.integers(-5, 5)) for _ in indices], dtype)
        if not csr:
            values = values[:, None, None] + np.arange(block[0] * block[1]).astype(dtype).reshape(block)
        index, pointer = (data.draw(st.sampled_from(("i4", "i8"))) for _ in range(2))
        arrays = values, np.array(indices, index), np.array([0, *np.cumsum(counts)], pointer)
        shape = (grid[0] * block[0], grid[1] * block[1])
        matrices.append(SparseMatrix(*arrays, shape=shape))
        theirs.append(scipys(*arrays, shape))
    a, b, like_a = matrices
    for matrix, want in zip(matrices, theirs, strict=True):
        agree(matrix, want)
        agree(matrix.to_scipy(), want)
        agree(matrix.T, want.T)
        x = np.arange(3 * want.shape[1]).astype(dtype).reshape(3, -1)
        agree(sparse.sparse_dense(x, matrix), (want @ x.T).T)
        agree(sparse.sparse_dense(x, matrix, sparse_lhs=True), want @ x.T)
        agree(matrix @ x.T, want @ x.T)
        agree(matrix @ x[0], want @ x[0])
        agree(matrix + want.toarray(), want + want)
    agree(a @ b, theirs[0] @ theirs[1])
    agree(sparse.sparse_matmul(a, b, dense=True), theirs[0] @ theirs[1])
    agree(a + like_a, theirs[0] + theirs[2])
    agree(sparse.sparse_concat([a, like_a]), sp.vstack([theirs[0], theirs[2]]))
    agree(sparse.sparse_concat([a, like_a], 1), sp.hstack([theirs[0], theirs[2]]))
    agree(a[top:bottom, left:right], theirs[0][top:bottom, left:right])


def scipys(data, indices, indptr, shape):
    """The matrix in scipy, as CSR, which knows all operations; sums what occurs twice."""
    if data.ndim == 1:
        return sp.csr_array((data, indices, indptr), shape=shape)
    if not all(shape):  # scipy has no blocks of nothing
        return sp.csr_array(shape, dtype=data.dtype)
    return sp.bsr_array((data, indices, indptr), shape=shape).tocsr()


def agree(got, want) -> None:
    """The same elements, of the same dtype; `want` is scipy's or NumPy's."""
    got = got.to_dense() if isinstance(got, SparseMatrix) else got
    got, want = (each.toarray() if hasattr(each, "toarray") else np.asarray(each) for each in (got, want))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_unsorted_indices_are_sorted_once_and_said():
    data, indices, indptr = torch.tensor([1.0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3])
    with pytest.warns(UserWarning, match=r"\[SparseMatrix\] indices are not sorted in each row: sorted once"):
        matrix = SparseMatrix(data, indices, indptr, shape=(2, 3))
    assert matrix.to_dense().tolist() == [[2, 0, 1], [0, 3, 0]]
    with pytest.raises(ValueError, match=r"indices must be sorted and .*; got indices\[1\]=0 after 2"):
        SparseMatrix(data, indices, indptr, shape=(2, 3), check="trusted")


@pytest.mark.filterwarnings("ignore:.*not sorted")
def test_data_is_read_when_it_is_multiplied():
    """With sorted indices, with unsorted ones, and with some that occur twice: data stays the caller's."""
    for indices in ([0, 2], [2, 0], [1, 1]):
        data = torch.ones(2)
        matrix = SparseMatrix(data, torch.tensor(indices), torch.tensor([0, 2]), shape=(1, 3))
        x = torch.tensor([[1.0, 10, 100]])
        before = sparse.sparse_dense(x, matrix)
        data.mul_(3)
        assert torch.equal(sparse.sparse_dense(x, matrix), 3 * before)


def test_indices_are_read_again_only_if_asked():
    arrays = [torch.ones(2), torch.tensor([0, 1]), torch.tensor([0, 1, 2])]
    once = SparseMatrix(*arrays, shape=(2, 3))
    always = SparseMatrix(*arrays, shape=(2, 3), check="always")
    arrays[1][1] = 2
    x = torch.tensor([[1.0, 10, 100]])
    assert sparse.sparse_dense(x, once).tolist() == [[1, 10]]
    assert sparse.sparse_dense(x, always).tolist() == [[1, 100]]
    arrays[1][1] = 3
    with pytest.raises(ValueError, match=r"indices must be in \[0, 3\); got indices\[1\]=3"):
        sparse.sparse_dense(x, always)


def test_what_numpy_writes_to_indices_is_seen_where_that_is_asked():
    """No counter of torch's moves then."""
    a = sp.csr_matrix(np.eye(2, 3, dtype=np.float32))
    always = SparseMatrix.of(a, check="always")
    x = torch.tensor([[1.0, 10, 100]])
    assert sparse.sparse_dense(x, always).tolist() == [[1, 10]]
    a.indices[0] = 2
    assert sparse.sparse_dense(x, always).tolist() == [[100, 10]]
    a.indices[0] = 77
    with pytest.raises(ValueError, match=r"indices must be in \[0, 3\); got indices\[0\]=77"):
        sparse.sparse_dense(x, always)


def test_what_numpy_writes_is_seen_of_arrays_that_came_before():
    """A pattern that is kept of raw arrays is no copy of them."""
    a = sp.csr_matrix(np.eye(1024, 1025, dtype=np.float32))
    x = torch.arange(1025.0).expand(3, -1).contiguous()
    for _ in range(3):
        assert sparse.sparse_dense(x, a)[0, 7] == 7
    always = SparseMatrix.of(a, check="always")
    a.indices[7] = 1024
    assert sparse.sparse_dense(x, always)[0, 7] == 1024


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_most_extreme_indptr_is_refused(kind):
    """Differences of such are no int64."""
    least = torch.iinfo(kind).min
    for indptr in ([0, 1, least, -1, 4], [0, 1, -least - 1, -1, 4], [0, least // 2, -(least // 2), 3, 4]):
        for check in ("once", "trusted"):
            with pytest.raises(ValueError, match=r"\[SparseMatrix\] "):
                SparseMatrix(
                    torch.ones(4), torch.zeros(4, dtype=kind), torch.tensor(indptr, dtype=kind),
                    shape=(4, 1), check=check,
                )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")  # torch on its own sparse tensors
@pytest.mark.parametrize("kind", ["tuple", "scipy", "torch", "weight", "matrix"])
@pytest.mark.parametrize("block", [None, (4, 2)])
def test_everything_that_users_hold(device, kind, block):
    arrays, dense = csr(12, 8, 0.4) if block is None else random_blocks(3, 4, *block, 0.5)
    x = torch.randn(2, 3, 8)
    if kind == "tuple":
        weight = on(arrays, device)
    elif kind == "scipy":
        data, indices, indptr = (array.numpy() for array in arrays)
        weight = (sp.csr_array if block is None else sp.bsr_array)((data, indices, indptr), shape=dense.shape)
        device = "cpu"
    elif kind == "torch":
        make = torch.sparse_csr_tensor if block is None else torch.sparse_bsr_tensor
        weight = make(arrays[2], arrays[1], arrays[0], size=dense.shape).to(device)
    elif kind == "weight":
        cls = rarefy.CsrWeight if block is None else rarefy.BsrWeight
        pattern = BsrPattern(arrays[2], arrays[1], shape=tuple(dense.shape), block_shape=block or (1, 1))
        weight = cls.from_pattern(arrays[0], pattern).to(device)
    else:
        weight = SparseMatrix(*on(arrays, device), shape=tuple(dense.shape))
    y = sparse.sparse_dense(x.to(device), weight).cpu()
    torch.testing.assert_close(y, nn.functional.linear(x, dense))


def test_weights_of_other_formats_multiply_and_are_no_matrices():
    weight = rarefy.Int8Weight.from_dense(torch.randn(32, 16), block_shape=(16, 4), density=0.5)
    x, bias = torch.randn(3, 16), torch.randn(32)
    got = sparse.sparse_dense(x, weight, bias, activation="relu")
    assert torch.equal(got, weight.linear(x, bias).relu())
    for call in (sparse.sparse_transpose, lambda w: sparse.sparse_dense(x, w, sparse_lhs=True)):
        with pytest.raises(TypeError, match="must be a weight of format bsr or csr; got int8"):
            call(weight)


def test_strided_and_expanded_inputs():
    arrays, dense = random_blocks(4, 3, 2, 5, 0.5)
    x = torch.randn(15, 6).t()[::2]
    torch.testing.assert_close(sparse.sparse_dense(x, arrays), x @ dense.T)
    wide = torch.randn(1, 15).expand(7, 15)
    torch.testing.assert_close(sparse.sparse_dense(wide, arrays), wide @ dense.T)
    assert sparse.sparse_dense(torch.randn(0, 15), arrays).shape == (0, 8)
    assert sparse.sparse_dense(torch.randn(15), arrays).shape == (8,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 20])
@pytest.mark.parametrize("shape", [(4, 6, 0.6), (40, 60, 0.4), (9, 70, 0.9)])
def test_nan_and_infinity_reach_the_rows_that_store_their_column(shape, tokens, dtype):
    """Not the rows beside these, whose last elements are read with the first ones of the next row."""
    (data, indices, indptr), _ = csr(*shape)
    stored = torch.from_numpy(sp.csr_array((torch.ones(len(data)), indices, indptr), shape[:2]).toarray())
    arrays, columns = (data.to(dtype), indices, indptr), shape[1]
    for first in range(columns):
        x = torch.randn(tokens, columns).to(dtype)
        x[0, first], x[-1, -1 - first] = float("nan"), float("inf")
        y = sparse.sparse_dense(x, arrays)
        assert torch.equal(~y.isfinite(), (~x.isfinite()).float() @ stored.t() > 0)
