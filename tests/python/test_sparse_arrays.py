"""sparse_dense with scipy's arrays, read, checked and used by one op: as a held matrix, or the long way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import sparse as sp

from rarefy import sparse
from rarefy.sparse import SparseMatrix, products
from sparse_matrices import FLOATS, csr, random_blocks

_BLOCKS = [(1, 1), (2, 2), (1, 16), (2, 8), (4, 1), (16, 1), (3, 5)]


@pytest.fixture
def at_once(monkeypatch):
    """The long way is closed."""

    def held_alone(op, name, value, **options):
        assert isinstance(value, SparseMatrix), "the long way"
        return value

    monkeypatch.setattr(products, "as_matrix", held_alone)


def not_held(arrays, *shape):
    """What the long way makes of arrays: a matrix that derives nothing for later calls."""
    matrix = SparseMatrix(*arrays, shape=shape)
    matrix._keeps = False
    return matrix


def arrays_of(rows, columns, block, density, dtype=torch.float32):
    if block == (1, 1):
        return csr(rows, columns, density, dtype)
    return random_blocks(rows // block[0], columns // block[1], *block, density, dtype)


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("block", _BLOCKS, ids=str)
def test_bits_are_those_of_the_long_way(at_once, block, tokens):
    arrays, dense = arrays_of(240, 480, block, 0.3)
    x, bias = torch.randn(tokens, 480), torch.randn(240)
    matrix = not_held(arrays, 240, 480)
    for index in (
        [torch.int32] * 2,
        [torch.int64] * 2,
        [torch.int64, torch.int32],
        [torch.int32, torch.int64],
    ):
        ours = (arrays[0], arrays[1].to(index[0]), arrays[2].to(index[1]))
        y = sparse.sparse_dense(x, ours, bias)
        assert torch.equal(y, sparse.sparse_dense(x, matrix, bias))
        assert torch.equal(sparse.sparse_dense(x, ours), sparse.sparse_dense(x, matrix))
    torch.testing.assert_close(y, x @ dense.T + bias, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("columns", [100, 288, 289, 1000, 3000])
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_rows_of_every_length(at_once, columns, density):
    """Parts of sums, tiles' ends, rows that store nothing, and the last indices of all."""
    (data, indices, indptr), _ = csr(70, columns, density)
    keep = torch.rand(70) < 0.8
    lengths = torch.where(keep, indptr.diff(), 0)
    chosen = keep.repeat_interleave(indptr.diff().long())
    arrays = data[chosen], indices[chosen], torch.cat([indptr[:1], lengths.cumsum(0).to(indptr.dtype)])
    matrix = not_held(arrays, 70, columns)
    x = torch.randint(-4, 5, (40, columns)).float()
    for tokens in (5, 17, 40):
        y = sparse.sparse_dense(x[:tokens], arrays)
        assert torch.equal(y, sparse.sparse_dense(x[:tokens], matrix))
        torch.testing.assert_close(y, x[:tokens] @ matrix.to_dense().T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes_ranks_and_strides(at_once, dtype):
    arrays, _ = csr(50, 60, 0.2, dtype)
    matrix = not_held(arrays, 50, 60)
    wide = torch.randn(3, 7, 120).to(dtype)
    for x in (
        wide[..., :60],
        wide[..., ::2],
        wide[0, 0, :60],
        wide[:0, :, :60],
        wide.transpose(0, 1)[..., :60],
    ):
        y = sparse.sparse_dense(x, arrays)
        assert y.shape == (*x.shape[:-1], 50)
        assert torch.equal(y, sparse.sparse_dense(x, matrix))


@pytest.mark.parametrize("of", [sp.csr_matrix, sp.csr_array, lambda w: sp.bsr_matrix(w, blocksize=(2, 3))])
def test_scipys_matrices_and_arrays_of_numpy(at_once, of):
    w = of(sp.random(24, 36, 0.3, random_state=1, dtype=np.float32))
    w.sort_indices()
    x = np.random.default_rng(0).standard_normal((9, 36)).astype(np.float32)
    want = torch.from_numpy(x @ w.toarray().T)
    torch.testing.assert_close(sparse.sparse_dense(x, w), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        sparse.sparse_dense(x, (w.data, w.indices, w.indptr)), want, atol=1e-4, rtol=1e-4
    )


def test_what_threads_keep_is_their_own(at_once):
    """Larger and smaller matrices take turns in memory that a thread keeps from call to call."""
    cases = []
    for columns in (64, 1000, 333):
        arrays, _ = csr(200, columns, 0.2)
        x = torch.randint(-3, 4, (20, columns)).float()
        cases.append((arrays, x, not_held(arrays, 200, columns)))

    def turns(_):
        for arrays, x, matrix in cases * 20:
            assert torch.equal(sparse.sparse_dense(x, arrays), sparse.sparse_dense(x, matrix))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(turns, range(4)))


def test_arrays_that_need_the_long_way():
    (data, indices, indptr), dense = csr(20, 30, 0.3)
    x = torch.randn(6, 30)
    want = x @ dense.T
    read_only = data.numpy().copy()
    read_only.flags.writeable = False
    for arrays in (
        (read_only, indices, indptr),
        (data.numpy().astype(">f4"), indices, indptr),
        (data.repeat_interleave(2)[::2], indices, indptr),
        (data, indices.repeat_interleave(2)[::2], indptr),
        [data, indices, indptr],
    ):
        torch.testing.assert_close(sparse.sparse_dense(x, arrays), want, atol=1e-4, rtol=1e-4)
    order = torch.cat([torch.arange(a, b).flip(0) for a, b in pairwise(indptr)])
    sparse.forget_arrays()
    with pytest.warns(UserWarning, match="not sorted"):
        y = sparse.sparse_dense(x, (data[order], indices[order], indptr))
    torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)
    twice = torch.tensor([1.0, 2]), torch.tensor([3, 3]), torch.tensor([0, 2])
    assert torch.equal(sparse.sparse_dense(x, twice), x[:, 3:4] * 3)
    weight = data.clone().requires_grad_()
    sparse.sparse_dense(x, (weight, indices, indptr)).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_invalid_arrays_are_named(index):
    data, x = torch.ones(3), torch.randn(2, 4)
    indptr = torch.tensor([0, 2, 3], dtype=index)
    cases = [
        ([0, 4, 1], indptr, r"indices must be in \[0, 4\); got indices\[1\]=4"),
        ([0, -1, 1], indptr, r"indices must be in \[0, 4\); got indices\[1\]=-1"),
        ([0, 1, 1], indptr.flip(0), "indptr must begin with 0"),
        ([0, 1, 1], torch.tensor([0, 4, 3], dtype=index), "indptr must not decrease"),
        ([0, 1], indptr, "indices must have 3 elements"),
    ]
    if index == torch.int64:
        cases.append(([0, 2**32, 1], indptr, r"indices must be in \[0, 4\); got indices\[1\]=4294967296"))
        cases.append(([0, 1, 1], torch.tensor([0, 2**32, 3]), "indptr must not decrease"))
    for indices, rows, message in cases:
        with pytest.raises(ValueError, match=message):
            sparse.sparse_dense(x, (data, torch.tensor(indices, dtype=index), rows))
    with pytest.raises(ValueError, match='check must be "once"'):
        sparse.sparse_dense(x, (data, torch.tensor([0, 1, 1], dtype=index), indptr), check="sometimes")
    with pytest.raises(ValueError, match=r"bias must have shape \(2,\)"):
        sparse.sparse_dense(x, (data, torch.tensor([0, 1, 1], dtype=index), indptr), torch.ones(3))
