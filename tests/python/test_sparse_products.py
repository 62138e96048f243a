"""Products of sparse matrices: with few vectors, sparse times sparse, in float64, where little is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse as sp

import rarefy
from rarefy import BsrPattern, sparse
from rarefy.masks import to_blocks
from rarefy.sparse import SparseMatrix, expanded, products
from sparse_matrices import FLOATS, NUMPY, csr, on, random_blocks, whole


@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(300, torch.float32), (300, torch.float64), (65_536, torch.float64), (65_537, torch.float64)],
    ids=str,
)
def test_products_with_few_vectors_hold_columns_of_two_bytes(columns, tokens, dtype):
    (data, indices, indptr), _ = csr(40, columns, 0.01, dtype)  # float32: too few to hold values twice
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
    known = "avx2" in info["cpu_features"] and info["forced_impl"] in (None, "cpu:avx2", "cpu:avx512")
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


@pytest.mark.parametrize(("columns", "width"), [(65_536, 2), (65_537, 4)])
def test_products_with_few_vectors_hold_short_rows_by_lanes(columns, width):
    (data, indices, indptr), dense = csr(300, columns, 0.001)
    matrix = SparseMatrix(data, indices, indptr, shape=(300, columns))
    info = rarefy.backend_info()
    known = "avx2" in info["cpu_features"] and info["forced_impl"] in (None, "cpu:avx2", "cpu:avx512")
    for tokens in (1, 2, 3, 4, 1):
        x, bias = whole(tokens, columns), whole(300)
        assert torch.equal(sparse.sparse_dense(x, matrix, bias), x @ dense.T + bias)
        held = sum(kept.nbytes for kept in matrix._kept.values())
        assert 0 <= held - (4 + width) * len(data) < 4096 if known else held == 0
    data.mul_(-1)
    assert torch.equal(matrix @ x[0], -dense @ x[0])
    assert "plan" not in matrix.pattern.__dict__, "the transposed index was made for nothing"


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [3, 4, 5, 7, 8, 9, 15, 16, 50, 128])
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
    if columns >= 4 and (dtype == torch.float64 or block[0] == 1):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [2, 3, 4, 6, 8, 9, 12, 16, 24, 37, 130])
def test_a_product_like_one_before_is_the_same(columns, dtype, monkeypatch):
    """From the second on `a @ b` goes to its op at once: whatever b and data are by then."""
    (data, indices, indptr), dense = csr(50, 1700, 0.02, dtype)
    data = torch.cat((data, torch.ones(1000, dtype=dtype)))  # a long row, whose sums have parts; an empty one
    indices = torch.cat((indices, torch.arange(1000, dtype=torch.int32)))
    indptr = torch.cat((indptr, torch.tensor([len(data)] * 2, dtype=torch.int32)))
    dense = torch.cat((dense, (torch.arange(1700) < 1000).to(dtype)[None], torch.zeros(1, 1700, dtype=dtype)))
    a = SparseMatrix(data, indices, indptr, shape=(52, 1700))
    wide = whole(1700, columns + 5, dtype=dtype)
    with monkeypatch.context() as patched:
        for turn in range(3):
            for b in (wide[:, 3 : columns + 3], wide[:, :columns].contiguous(), wide.t()[:columns].t()):
                assert torch.equal(a @ b, dense @ b) and torch.equal(sparse.spmm(a, b), dense @ b)
            data.mul_(-1)
            dense.neg_()
            if turn == 1 and a.in_place(b) is not None:  # the long way is not gone again
                patched.setattr(products, "_linear", None)
    assert torch.equal((a @ wide[:, :columns].to_sparse_csr()).to_dense(), dense @ wide[:, :columns])
    for wrong in (wide[1:, :columns], wide[:, :columns].half()):
        fresh = SparseMatrix(data, indices, indptr, shape=a.shape)
        said = []
        for matrix in (a, fresh):
            with pytest.raises((ValueError, TypeError)) as error:
                _ = matrix @ wrong
            said.append(str(error.value))
        assert said[0] == said[1]
    b = wide[:, :columns].contiguous().requires_grad_()
    (a @ b).sum().backward()
    assert torch.equal(b.grad, dense.sum(0)[:, None].expand(-1, columns))
    data.requires_grad_()
    (a @ b.detach()).sum().backward()
    assert torch.equal(data.grad, b.detach().sum(1)[indices.long()])
    a.data = data.detach() * 3
    assert torch.equal(a @ b.detach(), 3 * dense @ b.detach())
    a.data = torch.stack((data.detach(), data.detach()), 1)[:, 0]  # with gaps
    assert torch.equal(a @ b.detach(), dense @ b.detach())


def test_indices_are_read_again_in_products_like_one_before():
    data, indices = torch.ones(2), torch.tensor([0, 1], dtype=torch.int32)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    a = SparseMatrix(data, indices, indptr, shape=(2, 2), check="always")
    twice = SparseMatrix(data, torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2, 2]), shape=(2, 2))
    b = torch.tensor([[1.0, 2], [3, 4]])
    for _ in range(2):
        assert torch.equal(a @ b, b) and torch.equal(twice @ b, torch.tensor([[2.0, 4], [0, 0]]))
    indices[0] = 1
    assert torch.equal(a @ b, b[[1, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 70])
@pytest.mark.parametrize("block", [(1, 4), (1, 16), (2, 8), (4, 16)])
def test_products_of_wide_blocks_take_rows_alone(block, tokens, dtype):
    """Of raw arrays no whole plan is made ahead; the bits are those of a matrix that is held."""
    arrays, dense = random_blocks(24, 9, *block, 0.4, dtype)
    x = whole(tokens, dense.shape[1], dtype=dtype)
    made = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rarefy.pattern, "bsr_plan", lambda *args: made.append(args))
        raw = sparse.sparse_dense(x, arrays)
        by_columns = sparse.spmm(arrays, x.t())
    assert not made
    assert torch.equal(raw, sparse.sparse_dense(x, SparseMatrix(*arrays, shape=tuple(dense.shape))))
    want = (x.double() @ dense.double().T).to(dtype)
    assert torch.equal(raw, want) and torch.equal(by_columns, want.T)
