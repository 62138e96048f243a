"""rarefy.sparse against scipy and dense torch: conventions, dtypes, gradients, bad input."""

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
from rarefy.masks import to_blocks
from rarefy.sparse import SparseMatrix, expanded, products, softmax

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
NUMPY = {torch.float64: "f8", torch.float32: "f4", torch.int64: "i8", torch.int32: "i4"}
NUMPY |= {torch.int16: "i2", torch.int8: "i1"}


def random_blocks(rows: int, columns: int, r: int, c: int, density: float, dtype=torch.float32, index="i4"):
    """Blocks as (data, indices, indptr), and the dense matrix; integers up to 8, exact in any dtype."""
    mask = torch.rand(rows, columns) < density
    blocks = torch.randint(-8, 9, (int(mask.sum()), r, c)).to(dtype)
    place = mask.nonzero()
    dense = torch.zeros(rows, columns, r, c, dtype=dtype)
    dense[place[:, 0], place[:, 1]] = blocks
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    indptr[1:] = mask.sum(1).cumsum(0)
    kind = {"i4": torch.int32, "i8": torch.int64}[index]
    arrays = (blocks, place[:, 1].to(kind), indptr.to(kind))
    return arrays, dense.transpose(1, 2).reshape(rows * r, columns * c)


def csr(rows: int, columns: int, density: float, dtype=torch.float32, index="i4"):
    (data, indices, indptr), dense = random_blocks(rows, columns, 1, 1, density, dtype, index)
    return (data.flatten(), indices, indptr), dense


def whole(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(dtype)


def on(arrays, device):
    return tuple(array.to(device) for array in arrays)


# What TVM's suite tests ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("trial", range(20))
def test_bsr_of_random_sizes(trial):
    rng = np.random.default_rng(trial)
    r, c = rng.integers(1, 16, 2)
    m, rows, columns = rng.integers(1, 32), *rng.integers(1, 16, 2)
    arrays, dense = random_blocks(rows, columns, r, c, float(np.clip(rng.random(), 0.1, 0.9)))
    x = torch.rand(m, columns * c)
    torch.testing.assert_close(sparse.sparse_dense(x, arrays), x @ dense.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("sizes", "block"), [((128, 128, 1280), (1, 1)), ((128, 128, 16), (2, 2))])
def test_shapes_that_tvm_pads_for_gpus(device, sizes, block):
    m, n, k = sizes
    (blocks, *indices), _ = random_blocks(n // block[0], k // block[1], *block, 0.01)
    arrays = (torch.rand_like(blocks), *indices)  # as TVM's: rows of few blocks, most of them empty
    if block == (1, 1):
        arrays = (arrays[0].flatten(), *indices)
    x, dense = torch.rand(m, k), SparseMatrix(*arrays, shape=(n, k)).to_dense()
    y = sparse.sparse_dense(x.to(device), on(arrays, device)).cpu()
    torch.testing.assert_close(y, x @ dense.T, atol=1e-5, rtol=1e-5)


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


# What it does not -----------------------------------------------------------------------------------


@pytest.mark.timeout(900)  # 20 s alone, more than the usual two minutes beside other work
@pytest.mark.filterwarnings("ignore:.*not sorted")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_scipy_agrees_on_random_matrices(data):
    """Products, sums, transposes and slices; unsorted and repeated indices, empty rows and matrices."""
    r, c, d = (data.draw(st.integers(1, 4)) for _ in range(3))
    rows, inner, columns = (data.draw(st.integers(0, 6)) for _ in range(3))
    # All draws first: behind an operation that was stopped once, as by a timeout, others look inconsistent.
    top, bottom = sorted(data.draw(st.integers(0, rows)) * r for _ in range(2))
    left, right = sorted(data.draw(st.integers(0, inner)) * c for _ in range(2))
    arrays = []
    for grid, block in (((rows, inner), (r, c)), ((inner, columns), (c, d)), ((rows, inner), (r, c))):
        counts = [data.draw(st.integers(0, 4)) if grid[1] else 0 for _ in range(grid[0])]
        indices = [data.draw(st.integers(0, grid[1] - 1)) for count in counts for _ in range(count)]
        values = [data.draw(st.integers(-5, 5)) for _ in indices]
        blocks = np.array(values, "f8")[:, None, None] + np.arange(block[0] * block[1]).reshape(block)
        indptr = np.array([0, *np.cumsum(counts)], "i4")
        shape = (grid[0] * block[0], grid[1] * block[1])
        arrays.append(((blocks, np.array(indices, "i4"), indptr), shape))
    matrices = [SparseMatrix(*a, shape=shape) for a, shape in arrays]
    dense = [_dense_of(*a, shape) for a, shape in arrays]
    a, b, like_a = matrices
    for matrix, want in zip(matrices, dense, strict=True):
        assert torch.equal(matrix.to_dense(), want)
        assert torch.equal(matrix.T.to_dense(), want.T)
        x = torch.arange(3.0 * want.shape[1], dtype=torch.float64).reshape(3, -1)
        assert torch.equal(sparse.sparse_dense(x, matrix), x @ want.T)
        assert torch.equal(matrix @ x.T, want @ x.T)
        assert torch.equal(matrix @ x[0], want @ x[0])
    assert torch.equal((a @ b).to_dense(), dense[0] @ dense[1])
    assert torch.equal(sparse.sparse_matmul(a, b, dense=True), dense[0] @ dense[1])
    assert torch.equal((a + like_a).to_dense(), dense[0] + dense[2])
    assert torch.equal(sparse.sparse_concat([a, like_a]).to_dense(), torch.cat((dense[0], dense[2])))
    assert torch.equal(sparse.sparse_concat([a, like_a], 1).to_dense(), torch.cat((dense[0], dense[2]), 1))
    assert torch.equal(a[top:bottom, left:right].to_dense(), dense[0][top:bottom, left:right])


def _dense_of(data, indices, indptr, shape):
    """By plain loops: what occurs twice is summed."""
    _, r, c = data.shape
    dense = torch.zeros(shape, dtype=torch.float64)
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            j = indices[e]
            dense[i * r : (i + 1) * r, j * c : (j + 1) * c] += torch.from_numpy(data[e])
    return dense


def test_unsorted_indices_are_sorted_once_and_said():
    data, indices, indptr = torch.tensor([1.0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3])
    with pytest.warns(UserWarning, match=r"\[SparseMatrix\] indices are not sorted in each row: sorted once"):
        matrix = SparseMatrix(data, indices, indptr, shape=(2, 3))
    assert matrix.to_dense().tolist() == [[2, 0, 1], [0, 3, 0]]
    with pytest.raises(ValueError, match="col_indices must be"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("columns", [300, 65_536, 65_537])
def test_products_with_few_vectors_hold_columns_of_two_bytes(columns, tokens, dtype):
    (data, indices, indptr), _ = csr(40, columns, 0.01, dtype)  # too few for windows
    matrix = SparseMatrix(data, indices, indptr, shape=(40, columns))
    x = torch.randn(*((tokens, columns) if tokens else (columns,)), dtype=dtype)
    info = rarefy.backend_info()
    known = "avx2" in info["cpu_features"] and info["forced_impl"] in (None, "cpu:avx2", "cpu:avx512")
    for _ in range(2):
        y = sparse.sparse_dense(x, matrix)
        assert torch.equal(y, sparse.sparse_dense(x, (data, indices, indptr))), "bits depend on what is held"
        held = sum(kept.nbytes for kept in matrix._kept.values())
        assert held == 0 if columns > 65_536 or not known else 2 * len(data) <= held < 2 * len(data) + 512
        assert "plan" not in matrix.pattern.__dict__, "the transposed index was made for nothing"
        data.mul_(2)


def test_columns_of_two_bytes_serve_no_gradients():
    (data, indices, indptr), dense = csr(64, 96, 0.4)
    matrix = SparseMatrix(data, indices, indptr, shape=(64, 96))
    x = whole(96)
    y = matrix @ x
    data.requires_grad_()
    x.requires_grad_()
    for xs in (x, x.expand(2, 96)):
        out = sparse.sparse_dense(xs, matrix)
        assert torch.equal(out.reshape(-1, 64)[0], y)
        dx, dw = torch.autograd.grad(out.sum(), (x, data))
        torch.testing.assert_close(dx, dense.sum(0) * out.ndim)
        torch.testing.assert_close(dw, x.detach()[indices.long()] * out.ndim)


def _holds_windows(matrix):
    kept = matrix._kept.get((matrix.dtype, "few"))
    return kept is not None and kept._packed[1] is not None


def test_products_with_few_vectors_hold_values_in_windows():
    (data, indices, indptr), dense = csr(70, 900, 0.2)
    matrix = SparseMatrix(data, indices, indptr, shape=(70, 900))
    info = rarefy.backend_info()
    known = "avx512" in info["cpu_features"] and info["forced_impl"] in (None, "cpu:avx512")
    for tokens in (1, 2, 3, 4, 5, 1):
        x, bias = whole(tokens, 900), whole(70)
        assert torch.equal(sparse.sparse_dense(x, matrix), x @ dense.T)
        assert torch.equal(sparse.sparse_dense(x, matrix, bias), x @ dense.T + bias)
    assert _holds_windows(matrix) == known
    assert torch.equal(matrix @ x[0], dense @ x[0])
    assert "plan" in matrix.pattern.__dict__  # of five tokens
    data.mul_(2)
    assert torch.equal(matrix @ x[0], 2 * dense @ x[0])
    matrix.data = data.clone()
    assert torch.equal(matrix @ x[0], 2 * dense @ x[0])
    data.data = torch.zeros_like(data)  # which torch does not count
    assert torch.equal(matrix @ x[0], 2 * dense @ x[0])
    matrix.data.data = torch.zeros_like(data)
    assert torch.equal(matrix @ x[0], torch.zeros(70))


def test_values_that_change_with_each_product_are_not_packed():
    (data, indices, indptr), dense = csr(70, 900, 0.2)
    matrix = SparseMatrix(data, indices, indptr, shape=(70, 900))
    x = torch.randn(900)
    for used in (
        1,
        3,
        5,
        2,
        7,
    ):  # times; after less than 4 the next values are read as they lie
        data.mul_(-1)
        results = [matrix @ x for _ in range(used)]
        assert all(torch.equal(result, results[0]) for result in results)
        dense = -dense
        torch.testing.assert_close(results[0], dense @ x, atol=1e-3, rtol=1e-4)
        (kept,) = matrix._kept.values()
        if _holds_windows(matrix):
            assert kept._packed[0] == kept._at(data)


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


def test_a_weights_gradients_are_those_of_its_parameter():
    weight = rarefy.CsrWeight.from_dense(torch.randn(6, 5), density=0.5)
    x = torch.randn(4, 5, requires_grad=True)
    sparse.spmm(weight, x.t()).square().sum().backward()
    dense = weight.to_dense().detach().requires_grad_()
    (dense @ x.detach().t()).square().sum().backward()
    rows = weight.pattern.block_rows()
    torch.testing.assert_close(weight.values.grad, dense.grad[rows, weight.pattern.indices()[1].long()])


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


@pytest.mark.filterwarnings("ignore:.*not sorted")
@pytest.mark.parametrize("repeated", [False, True])
def test_gradients_of_every_product(device, repeated):
    """By finite differences in float64: data with unsorted indices, and with some that occur twice."""
    columns = [2, 0, 1, 3, 0] if not repeated else [2, 2, 1, 3, 3]
    indices = torch.tensor(columns, device=device)
    indptr = torch.tensor([0, 2, 5, 5], device=device)

    def matrix(data):
        return SparseMatrix(data, indices, indptr, shape=(6, 8))

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)

    data, x, bias = normal(5, 2, 2), normal(3, 8), normal(6)
    check = torch.autograd.gradcheck
    assert check(lambda d, x, b: sparse.sparse_dense(x, matrix(d), b, activation="gelu"), (data, x, bias))
    assert check(lambda d, x: sparse.sparse_dense(x, matrix(d), sparse_lhs=True), (data, x))
    assert check(lambda d, x: sparse.spmm(matrix(d), x.t()), (data, x))
    assert check(lambda d, x: sparse.spmv(matrix(d), x[0]), (data, x))
    assert check(lambda d: sparse.sparse_transpose(matrix(d)).data, (data,))
    assert check(lambda d: (matrix(d) + matrix(d * d)).data, (data,))
    assert check(lambda d, y: sparse.sparse_add(matrix(d), y), (data, normal(6, 8)))
    assert check(lambda d: matrix(d)[2:6, 2:8].data, (data,))
    assert check(lambda d: sparse.sparse_concat([matrix(d), matrix(2 * d)], 1).data, (data,))
    assert check(
        lambda d, x, y: sparse.sddmm(matrix(d), x, y, weighted=True).data, (data, normal(6, 3), normal(8, 3))
    )
    assert check(lambda d: sparse.sparse_softmax(matrix(d)).data, (data,))
    assert torch.autograd.gradgradcheck(lambda d: sparse.sparse_softmax(matrix(d)).data, (data,))


@pytest.mark.filterwarnings("ignore:.*not sorted")
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.timeout(300)  # 300 000 small operations on a GPU, whose host may be busy
def test_gradients_of_sparse_times_sparse(device, repeated):
    columns = [2, 0, 1, 3, 0] if not repeated else [2, 2, 1, 3, 3]
    indices = torch.tensor(columns, device=device)
    indptr = torch.tensor([0, 2, 5, 5], device=device)

    def product(d, e):
        left, right = (SparseMatrix(data, indices, indptr, shape=(6, 8)) for data in (d, e))
        return (left @ right.T).data

    data = tuple(
        torch.randn(5, 2, 2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)
    )
    assert torch.autograd.gradcheck(product, data)
    assert torch.autograd.gradgradcheck(product, data)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_of_sparse_matrices_in_every_dtype(device, dtype):
    (left, a), (right, b) = random_blocks(5, 6, 2, 3, 0.5, dtype), random_blocks(6, 4, 3, 5, 0.5, dtype)
    product = sparse.sparse_matmul(on(left, device), on(right, device))
    assert product.dtype == dtype and product.block_shape == (2, 5)
    assert torch.equal(product.to_dense().cpu().double(), (a.double() @ b.double()).to(dtype).double())


@pytest.mark.parametrize("elements", [1, 40, 1 << 26])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_sorted_pairs_are_the_products_by_rows(device, monkeypatch, elements, data):
    """What a GPU runs against the core: patterns, values, values on a pattern; padding that holds NaN."""
    monkeypatch.setattr(expanded, "_ELEMENTS", elements)
    r, s, c = (data.draw(st.integers(1, 3)) for _ in range(3))
    m, k, n = (data.draw(st.integers(1, 7)) for _ in range(3))
    operands, host = [], []
    for shape, block in (((m, k), (r, s)), ((k, n), (s, c)), ((m, n), (r, c))):
        grid = [-(-size // side) for size, side in zip(shape, block, strict=True)]
        bits = data.draw(st.integers(0, 2 ** (grid[0] * grid[1]) - 1))
        mask = torch.tensor([bits >> i & 1 for i in range(grid[0] * grid[1])]).bool().reshape(grid)
        pattern = BsrPattern.from_mask(mask, shape=shape, block_shape=block)
        dense = to_blocks(whole(*shape), block)
        dense = torch.where(to_blocks(torch.ones(shape), block) > 0, dense, torch.nan)
        host.append((dense[mask], pattern))
        operands.append((host[-1][0].to(device), pattern.to(device)))
    (a, pa), (b, pb), (_, pc) = operands
    blocks, pattern = expanded.product(a, pa, b, pb)
    want, found = products._product(*host[0], *host[1])
    assert torch.equal(blocks.cpu(), want) and pattern.to("cpu") == found
    sampled = products._SampledProduct.apply(host[0][0], host[1][0], tuple(p for _, p in host))
    assert torch.equal(expanded.sampled(a, pa, b, pb, pc).cpu(), sampled)


def test_a_product_stores_what_cancels():
    a = SparseMatrix(torch.tensor([1.0, 1]), torch.tensor([0, 1]), torch.tensor([0, 2]), shape=(1, 2))
    b = SparseMatrix(torch.tensor([1.0, -1]), torch.tensor([0, 0]), torch.tensor([0, 1, 2]), shape=(2, 1))
    product = a @ b
    assert product.data.tolist() == [0]


# Softmax and attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [(1, 1), (4, 8)])
def test_softmax_is_that_of_a_masked_dense_matrix(device, dtype, block):
    """Ragged edges, a row that stores nothing, −∞ inside a block, and a whole row of it."""
    shape = (14, 29)
    mask = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) < 0.4
    mask[1], mask[0, -1] = False, True
    pattern = BsrPattern.from_mask(mask, shape=shape, block_shape=block)
    dense = (torch.randn(shape) * 4).to(dtype)
    dense[0], dense[2, ::3] = -torch.inf, -torch.inf
    finite = dense.float().nan_to_num(neginf=-1e30)
    weight = rarefy.BsrWeight.from_dense(finite, block_shape=block, mask=mask)
    data = weight.values.detach().where(weight.values > -1e29, -torch.inf).to(dtype)
    got = sparse.sparse_softmax(SparseMatrix.on_pattern(data.to(device), pattern.to(device)))
    stored = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    want = dense.double().masked_fill(~stored, -torch.inf).softmax(1).nan_to_num(0)
    accuracy = {torch.float64: 1e-14, torch.float32: 2e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}
    torch.testing.assert_close(
        got.to_dense().cpu().double(), want, rtol=2 * accuracy[dtype], atol=accuracy[dtype] * 1e-2
    )
    assert got.dtype == dtype


def test_softmax_of_nan_is_nan():
    data = torch.tensor([1.0, float("nan"), 2.0])
    matrix = SparseMatrix(data, torch.tensor([0, 1, 0]), torch.tensor([0, 2, 3]), shape=(2, 2))
    assert sparse.sparse_softmax(matrix).data.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "heads_at_once"), [(24, None), (24, 4), (21, None)], ids=["all", "some", "ragged"]
)
def test_attention_is_masked_dense_attention(device, causal, length, heads_at_once, monkeypatch):
    keys, block = 40, 8
    mask = torch.rand(-(-length // block), keys // block) < 0.5
    mask[:, 0] = True
    pattern = BsrPattern.from_mask(mask, shape=(length, keys), block_shape=(block, block), device=device)
    if heads_at_once:
        bytes_ = heads_at_once * pattern.nnzb * block * block * 4
        monkeypatch.setitem(softmax._SCORES, torch.device(device).type, bytes_)
    elements = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)[:length]
    if causal:
        elements &= torch.ones(length, keys, dtype=torch.bool).tril()
    sizes = ((2, 3, length, 16), (2, 3, keys, 16), (2, 3, keys, 12))
    ours = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
    theirs = [tensor.detach().cpu().double().requires_grad_() for tensor in ours]
    got = sparse.sparse_attention(*ours, pattern, causal=causal)
    want = nn.functional.scaled_dot_product_attention(*theirs, attn_mask=elements)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-6)
    weights = torch.randn(want.shape, dtype=torch.float64)
    (want * weights).sum().backward()
    (got * weights.to(got)).sum().backward()
    for mine, oracle in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), oracle.grad, rtol=1e-4, atol=1e-5)


def test_patterns_on_a_diagonal():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]) > 0
    pattern = BsrPattern.from_mask(mask, shape=(8, 6), block_shape=(4, 2))
    thrice = pattern.on_diagonal(3)
    assert thrice == BsrPattern.from_mask(
        torch.block_diag(*[mask] * 3) > 0, shape=(24, 18), block_shape=(4, 2)
    )
    assert pattern.on_diagonal(3) is thrice
    assert pattern.on_diagonal(1) is pattern
    for copies in range(4, 9):  # numbers of heads come and go: their plans do, too
        assert pattern.on_diagonal(copies).shape == (pattern.shape[0] * copies, pattern.shape[1] * copies)
    assert len(pattern._diagonals) == 2 and pattern.on_diagonal(8) is pattern.on_diagonal(8)
    padded = BsrPattern.from_mask(mask, shape=(7, 6), block_shape=(4, 2))
    assert padded.on_diagonal(1) is padded
    with pytest.raises(
        ValueError, match=r"\[BsrPattern.on_diagonal\] \(7, 6\) must be multiples of the block"
    ):
        padded.on_diagonal(2)


def test_attention_without_heads():
    pattern = BsrPattern.from_mask(torch.ones(2, 2) > 0, shape=(8, 8), block_shape=(4, 4))
    q = torch.randn(2, 0, 8, 3)
    assert sparse.sparse_attention(q, q, q, pattern).shape == (2, 0, 8, 3)


# Bad input ------------------------------------------------------------------------------------------


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
        (lambda: sparse.sparse_dense(x.double(), matrix), TypeError, "dtype|float"),
        (lambda: sparse.sparse_dense(x.int(), matrix), TypeError, "x must be of the dtype of data"),
        (lambda: sparse.sparse_dense(x, "w"), TypeError, r"weight must be a SparseMatrix.*got str"),
        (lambda: sparse.sparse_dense(x, matrix, activation="swish"), ValueError, "activation must be"),
        (lambda: sparse.sparse_dense(x, matrix, torch.ones(5)), ValueError, "bias"),
        (lambda: sparse.sparse_dense(x, arrays, check="never"), ValueError, 'check must be "once"'),
        (lambda: sparse.sparse_dense(torch.randn(2, 2, 6), matrix, sparse_lhs=True), ValueError, "2 dim"),
        (lambda: sparse.spmm(matrix, x), ValueError, r"\[spmm\] b must have 6 rows"),
        (lambda: sparse.spmv(matrix, x), ValueError, r"\[spmv\] v must have 1 dimension"),
        (lambda: sparse.spmv(matrix, x[0, :3]), ValueError, "v must have 6 elements"),
        (lambda: sparse.sddmm(matrix, x, x), ValueError, r"\[sddmm\] x and y must have 4 and 6 rows"),
        (lambda: sparse.sddmm(matrix, torch.ones(4, 2), torch.ones(6, 3)), ValueError, "as many columns"),
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


class Uses(torch.nn.Module):
    """A product with a matrix that it holds, in both orders."""

    def __init__(self, blocks):
        super().__init__()
        make = random_blocks(6, 4, *blocks, 0.5)[0] if blocks else csr(24, 16, 0.3)[0]
        r, c = blocks or (4, 4)
        self.data = torch.nn.Parameter(torch.as_tensor(make[0]))
        self.matrix = sparse.SparseMatrix(self.data, *make[1:], shape=(6 * r, 4 * c))

    def forward(self, x):
        return sparse.sparse_dense(x, self.matrix, activation="relu"), sparse.spmm(self.matrix, x.t())


@pytest.mark.parametrize("blocks", [None, (4, 2), (1, 8)])
@pytest.mark.parametrize("train", [False, True])
def test_matrices_compile_and_export_whole(blocks, train):
    torch.manual_seed(0)
    model = Uses(blocks)
    x = torch.randn(5, model.matrix.shape[1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(train):
        got = compiled(x)  # first: nothing has made a plan or asked what kernels derive
        want = model(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if train:
        gradients = [torch.autograd.grad(sum(y.square().sum() for y in ys), model.data) for ys in (want, got)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
        return
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        torch.testing.assert_close(exported.module()(x), want, rtol=1e-5, atol=1e-5)


class Attends(torch.nn.Module):
    """Attention on blocks of scores, and a product of integers."""

    def __init__(self):
        super().__init__()
        blocks = torch.ones(4, 4).tril() > 0
        self.scores = rarefy.BsrPattern.from_mask(blocks, shape=(16, 16), block_shape=(4, 4))
        (data, indices, indptr), _ = csr(6, 8, 0.5)
        data = (torch.as_tensor(data) * 5).to(torch.int32)
        self.matrix = sparse.SparseMatrix(data, indices, indptr, shape=(6, 8))

    def forward(self, x):
        attended = sparse.sparse_attention(x, x, x, self.scores, causal=True)
        return attended, sparse.sparse_dense((x * 10).to(torch.int32), self.matrix)


def test_attention_and_integers_compile_and_export_whole():
    model, x = Attends(), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    want = model(x)
    for got in (
        torch.compile(model, fullgraph=True, backend="aot_eager")(x),
        torch.export.export(model, (x,)).module()(x),
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    leaf = [x.clone().requires_grad_() for _ in range(2)]
    model(leaf[0])[0].square().sum().backward()
    torch.compile(model, fullgraph=True, backend="aot_eager")(leaf[1])[0].square().sum().backward()
    torch.testing.assert_close(leaf[0].grad, leaf[1].grad, rtol=1e-4, atol=1e-4)


def test_forward_mode_and_torch_func_through_matrices():
    """Products and transposes whose matrix is made in the call, from a row plan."""
    (data, indices, indptr), dense = csr(24, 16, 0.3, torch.float64)
    data, x = torch.as_tensor(data), torch.randn(5, 16, dtype=torch.float64)

    def turned(data):
        matrix = sparse.SparseMatrix(data, indices, indptr, shape=(24, 16))
        return sparse.sparse_transpose(matrix).to_dense()

    def product(data, x):
        return sparse.sparse_dense(x, sparse.SparseMatrix(data, indices, indptr, shape=(24, 16))).square()

    ones = torch.ones_like(data)
    stored = sparse.SparseMatrix(ones, indices, indptr, shape=(24, 16)).to_dense()
    value, tangent = torch.func.jvp(turned, (data,), (ones,))
    assert torch.equal(value, dense.T)
    assert torch.equal(tangent, stored.T)
    assert torch.equal(torch.func.grad(lambda d: turned(d).sum())(data), ones)
    _, tangent = torch.func.jvp(product, (data, x), (ones, torch.ones_like(x)))
    change = torch.ones_like(x) @ dense.T + x @ stored.T
    torch.testing.assert_close(tangent, 2 * (x @ dense.T) * change)
    # Reverse over forward: the tangent's product is recorded though its operands are not.
    second = torch.func.grad(lambda x: torch.func.jvp(lambda x: product(data, x), (x,), (x,))[1].sum())(x)
    torch.testing.assert_close(second, 4 * (x @ dense.T) @ dense)


@pytest.mark.parametrize("train", [False, True])
def test_transposes_compile_whole(train):
    (data, indices, indptr), dense = csr(24, 16, 0.3)
    data = torch.as_tensor(data).clone().requires_grad_(train)
    matrix = sparse.SparseMatrix(data, indices, indptr, shape=(24, 16))
    x = torch.randn(24, 3)
    compiled = torch.compile(lambda x: sparse.spmm(sparse.sparse_transpose(matrix), x), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    y = compiled(x)
    torch.testing.assert_close(y, dense.T @ x, rtol=1e-4, atol=1e-4)
    assert y.requires_grad == train


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [3, 4, 7, 15, 16, 50, 128])
@pytest.mark.parametrize("block", [(1, 1), (1, 4), (2, 2)])
def test_spmm_where_little_is_stored_is_scipys(block, columns, dtype):
    """Rows with few elements meet b as it lies; derivatives, other strides, other blocks go the usual way."""
    matrix = sp.random_array((60, 44), density=0.1, dtype=NUMPY[dtype], rng=np.random.default_rng(3))
    a = matrix.tocsr() if block == (1, 1) else matrix.tobsr(block)
    b = torch.randn(44, columns, dtype=dtype)
    wide = torch.randn(44, columns + 7, dtype=dtype)
    ours = sparse.SparseMatrix(a.data, a.indices, a.indptr, shape=a.shape)
    for right in (b, wide[:, :columns], b.t().contiguous().t(), wide[:, 1 : columns + 1]):
        with torch.no_grad():
            got = sparse.spmm(ours, right)
        torch.testing.assert_close(got, torch.from_numpy(matrix.toarray() @ right.numpy()))
        assert got.shape == (60, columns)
    if columns >= 4 if dtype == torch.float64 else block[0] == 1 and columns >= 16:
        with torch.no_grad():
            assert sparse.spmm(ours, b).is_contiguous()  # by row: in place
    right = b.clone().requires_grad_()
    sparse.spmm(ours, right).sum().backward()
    ones = torch.ones(60, columns, dtype=dtype)
    torch.testing.assert_close(right.grad, torch.from_numpy(matrix.toarray().T) @ ones)


def test_float64_is_multiplied_by_kernels_of_its_own():
    layer = rarefy.BlockSparseLinear.from_dense(torch.nn.Linear(64, 32, dtype=torch.float64), "block:4x1@0.5")
    for tokens in (1, 3, 12):
        kernel = rarefy.explain(layer, torch.randn(tokens, 64, dtype=torch.float64))["kernel"]
        forced = rarefy.backend_info()["forced_impl"]
        assert kernel.endswith("_linear_doubles") or forced not in (None, "cpu:avx2", "cpu:avx512")
