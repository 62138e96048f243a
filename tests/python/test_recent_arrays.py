"""Arrays that come again are compared with what was kept of them: sparse/recent.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse
import torch

from rarefy import sparse
from rarefy.sparse import recent

N, K = 96, 80


@pytest.fixture(autouse=True)
def _nothing_is_kept():
    sparse.forget_arrays()
    yield
    sparse.forget_arrays()


def arrays_of(block=(1, 1), index=torch.int32, density=0.3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    grid = N // block[0], K // block[1]
    mask = torch.rand(grid, generator=generator) < max(density, 600 / (grid[0] * grid[1]))
    mask[5] = False
    counts = mask.sum(1)
    indptr = torch.zeros(grid[0] + 1, dtype=index)
    indptr[1:] = counts.cumsum(0)
    indices = mask.nonzero()[:, 1].to(index).contiguous()
    shape = (len(indices),) if block == (1, 1) else (len(indices), *block)
    return torch.randn(shape, generator=generator).to(dtype), indices, indptr


def is_kept(arrays, columns=K):
    return type(recent._seen.get(name_of(arrays, columns))) is recent.Recent


def name_of(arrays, columns=K):
    return recent._name(*arrays, columns)


def expected(x, arrays):
    data, indices, indptr = (part.double().numpy() if part.is_floating_point() else part for part in arrays)
    kind = scipy.sparse.csr_array if data.ndim == 1 else scipy.sparse.bsr_array
    dense = kind((data, indices.numpy(), indptr.numpy()), shape=(N, K)).toarray()
    return torch.from_numpy(x.double().numpy() @ dense.T)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [(1, 1), (2, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_calls_with_the_same_arrays_agree_and_are_kept_from_the_second_on(index, block, tokens):
    arrays, x = arrays_of(block, index), torch.randn(tokens, K)
    first = sparse.sparse_dense(x, arrays)
    for call in range(1, 5):
        assert is_kept(arrays) == (call > 1)
        y = sparse.sparse_dense(x, arrays)
        assert torch.equal(y, first)
        torch.testing.assert_close(y.double(), expected(x, arrays), rtol=1e-4, atol=1e-4)
    held = sparse.SparseMatrix(*arrays, shape=(N, K))
    torch.testing.assert_close(y, sparse.sparse_dense(x, held))


def test_values_that_were_written_to_are_those_of_the_next_product():
    data, indices, indptr = arrays = arrays_of()
    x = torch.randn(3, K)
    numpy = data.numpy()
    for step in range(5):
        numpy[:] = np.random.default_rng(step).standard_normal(len(numpy))
        y = sparse.sparse_dense(x.numpy(), (numpy, indices.numpy(), indptr.numpy()))
        torch.testing.assert_close(y.double(), expected(x, arrays), rtol=1e-4, atol=1e-4)
    assert is_kept(arrays)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_indices_that_were_written_to_are_noticed_wherever_they_are(index):
    _, indices, indptr = arrays = arrays_of(index=index)
    x = torch.randn(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    for row in range(0, N, 7):
        at = int(indptr[row])
        before = int(indices[at])
        if indptr[row] == indptr[row + 1] or before == 0:
            continue
        indices[at] = before - 1  # sorted and distinct as ever
        y = sparse.sparse_dense(x, arrays)
        torch.testing.assert_close(y.double(), expected(x, arrays), rtol=1e-4, atol=1e-4)
    # The first entry behind a row that stores nothing becomes that row's.
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    indptr[6] += 1
    for _ in range(3):
        y = sparse.sparse_dense(x, arrays)
        torch.testing.assert_close(y.double(), expected(x, arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_indices_that_became_wrong_are_refused_by_position(index):
    _, indices, _ = arrays = arrays_of(index=index)
    x = torch.randn(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    right = int(indices[-1])
    indices[-1] = K
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"indices must be in \[0, {K}\); got indices\[{len(indices) - 1}\]={K}"
        ):
            sparse.sparse_dense(x, arrays)
    indices[-1] = right
    torch.testing.assert_close(
        sparse.sparse_dense(x, arrays).double(), expected(x, arrays), rtol=1e-4, atol=1e-4
    )


def test_int64_indices_differ_also_above_their_low_32_bits():
    _, indices, indptr = arrays = arrays_of(index=torch.int64)
    x = torch.randn(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    for array in (indices, indptr):
        at = len(array) // 2
        array[at] += 1 << 32
        with pytest.raises(ValueError, match="got ind"):
            sparse.sparse_dense(x, arrays)
        array[at] -= 1 << 32


def test_indices_that_became_unsorted_are_sorted_as_ever():
    _, indices, _ = arrays = arrays_of()
    x = torch.randn(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    indices[0], indices[1] = int(indices[1]), int(indices[0])
    with pytest.warns(UserWarning, match="not sorted"):
        y = sparse.sparse_dense(x, arrays)
    torch.testing.assert_close(y.double(), expected(x, arrays), rtol=1e-4, atol=1e-4)


def test_gradients_of_arrays_that_came_before():
    data, indices, indptr = arrays_of()
    x = torch.randn(5, K)
    results = []
    for _ in range(4):
        leaf, its_x = data.clone().requires_grad_(), x.clone().requires_grad_()
        y = sparse.sparse_dense(its_x, (leaf, indices, indptr), activation="gelu")
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, its_x.grad))
    assert is_kept((data, indices, indptr))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.int8])
def test_other_products_and_dtypes_of_arrays_that_came_before(dtype):
    data, indices, indptr = arrays = arrays_of()
    data = (3 * data).round().to(dtype)
    arrays = data, indices, indptr
    x = torch.randint(-3, 4, (6, K)).to(dtype)
    matrix = sparse.SparseMatrix(*arrays, shape=(N, K))
    for _ in range(4):
        for got, want in (
            (sparse.sparse_dense(x, arrays), sparse.sparse_dense(x, matrix)),
            (sparse.spmm(arrays, x.t()), sparse.spmm(matrix, x.t())),
            (sparse.spmv(arrays, x[0]), sparse.spmv(matrix, x[0])),
            (
                sparse.sparse_dense(x, arrays, activation="relu"),
                sparse.sparse_dense(x, matrix, activation="relu"),
            ),
        ):
            torch.testing.assert_close(got, want)
    assert is_kept(arrays)


def test_padding_is_looked_at_in_each_call():
    block = (1, 3)  # 80 columns are 27 blocks, the last of 2
    indptr = torch.arange(0, 27 * N + 1, 27, dtype=torch.int32)
    indices = torch.arange(27, dtype=torch.int32).repeat(N)
    data = torch.randn(27 * N, *block)
    data[26::27, :, 2] = 0
    x = torch.randn(3, K)
    for _ in range(4):
        y = sparse.sparse_dense(x, (data, indices, indptr))
    dense = data.view(N, 81)[:, :K]
    torch.testing.assert_close(y, x @ dense.T, rtol=1e-4, atol=1e-4)
    data[26, 0, 2] = 1
    with pytest.raises(ValueError, match="padd"):
        sparse.sparse_dense(x, (data, indices, indptr))


def test_bad_arguments_are_refused_as_the_first_time():
    data, indices, indptr = arrays = arrays_of()
    x = torch.randn(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    with pytest.raises(ValueError, match=f"bias must have shape \\({N},\\)"):
        sparse.sparse_dense(x, arrays, torch.randn(N + 1))
    with pytest.raises(TypeError, match="data must be of the dtype of x"):
        sparse.sparse_dense(x.double(), arrays)
    with pytest.raises(ValueError, match="indices must have"):
        sparse.sparse_dense(x, (data[1:], indices, indptr))
    for wrong in ((data, indices[0], indptr), (data, indices, indptr[0]), (data, indices[None], indptr)):
        with pytest.raises(ValueError, match="must have 1 dimension"):
            sparse.spmv(wrong, x[0])
    with pytest.raises(ValueError, match='check must be "once"'):
        sparse.sparse_dense(x, arrays, check="never")
    with pytest.raises(TypeError, match="data must be of dtype"):
        sparse.sparse_dense(x, (data > 0, indices, indptr))


def test_matrices_of_scipy_in_one_size_are_told_apart():
    x = torch.randn(4, K)
    random = np.random.default_rng(0)
    columns = [np.sort(random.permuted(np.tile(np.arange(K), (N, 1)), axis=1)[:, :20], 1) for _ in range(6)]
    indptr = np.arange(0, 20 * N + 1, 20, dtype=np.int32)
    matrices = [
        scipy.sparse.csr_matrix(
            (random.standard_normal(20 * N).astype(np.float32), c.ravel(), indptr), (N, K)
        )
        for c in columns
    ]
    for _ in range(4):
        for matrix in matrices:
            want = torch.from_numpy(x.numpy() @ matrix.toarray().T)
            torch.testing.assert_close(sparse.sparse_dense(x, matrix), want, rtol=1e-4, atol=1e-4)
    assert sum(type(kept) is recent.Recent for kept in recent._seen.values()) == len(matrices)


def test_what_is_kept_has_a_limit(monkeypatch):
    first, second = arrays_of(seed=1), arrays_of(seed=2)
    monkeypatch.setattr(recent, "_MOST_WORDS", max(len(first[1]), len(second[1])) + N + 20)
    x = torch.randn(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, first)
    for _ in range(3):
        sparse.sparse_dense(x, second)
    assert is_kept(second) and not is_kept(first)
    monkeypatch.setattr(recent, "_MOST_SEEN", 3)
    others = [arrays_of(seed=seed) for seed in range(3, 8)]
    for arrays in others:
        sparse.sparse_dense(x, arrays)
    assert list(recent._seen) == [name_of(arrays) for arrays in others[-3:]]
    sparse.forget_arrays()
    assert not recent._seen


def test_threads_with_arrays_of_their_own():
    x, failed = torch.randn(5, K), []

    def work(seed):
        arrays = arrays_of(seed=seed)
        want = sparse.sparse_dense(x, sparse.SparseMatrix(*arrays, shape=(N, K)))
        for turn in range(60):
            if turn % 20 == 10:
                sparse.forget_arrays()
            y = sparse.sparse_dense(x, arrays)
            if not torch.allclose(y, want, rtol=1e-4, atol=1e-4):
                failed.append((seed, turn))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert failed == []


def test_graphs_do_not_meet_what_is_kept():
    arrays, x = arrays_of(), torch.randn(3, K)
    for _ in range(3):
        want = sparse.sparse_dense(x, arrays)
    compiled = torch.compile(lambda x, *arrays: sparse.sparse_dense(x, arrays), backend="eager")
    torch.testing.assert_close(compiled(x, *arrays), want)
