"""Raw arrays in any order that come again: sorted once, and compared with what was kept of them."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import torch

from rarefy import sparse
from rarefy.compat import tvm
from rarefy.sparse import SparseMatrix, recent

N, K = 96, 80
pytestmark = pytest.mark.filterwarnings("ignore:.*not sorted")


@pytest.fixture(autouse=True)
def _nothing_is_kept():
    sparse.forget_arrays()
    yield
    sparse.forget_arrays()


@pytest.fixture
def sorts(monkeypatch):
    """One entry for each matrix that was sorted."""
    made, sort = [], SparseMatrix._sort

    def counted(matrix, columns):
        made.append(matrix._op)
        return sort(matrix, columns)

    monkeypatch.setattr(SparseMatrix, "_sort", counted)
    return made


def arrays_of(block=(1, 1), index=torch.int32, repeated=False, seed=0, per_row=20, dtype=torch.float32):
    """Rows in random order; `repeated`: drawn with replacement. One row is empty."""
    random = np.random.default_rng(seed)
    rows, columns = N // block[0], K // block[1]
    per_row = min(per_row, columns)
    chosen = [random.choice(columns, per_row, replace=repeated) for _ in range(rows)]
    chosen[5] = chosen[5][:0]
    indptr = torch.tensor([0, *np.cumsum([len(row) for row in chosen])], dtype=index)
    indices = torch.from_numpy(np.concatenate(chosen)).to(index)
    shape = (len(indices),) if block == (1, 1) else (len(indices), *block)
    data = torch.from_numpy(random.integers(-4, 5, shape)).to(dtype)
    return data, indices, indptr


def dense_of(arrays):
    data, indices, indptr = (part.detach().numpy() for part in arrays)
    kind = scipy.sparse.csr_array if data.ndim == 1 else scipy.sparse.bsr_array
    return torch.from_numpy(kind((data, indices, indptr), shape=(N, K)).toarray())


def whole(*shape, dtype=torch.float32):
    return torch.randint(-4, 5, shape).to(dtype)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [(1, 1), (2, 2), (1, 4), (3, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_arrays_that_come_again_are_sorted_once(sorts, block, index, repeated, tokens):
    arrays, x, bias = arrays_of(block, index, repeated), whole(tokens, K), whole(N)
    want = x @ dense_of(arrays).T
    for _ in range(4):
        assert torch.equal(sparse.sparse_dense(x, arrays), want)
        assert torch.equal(sparse.sparse_dense(x, arrays, bias), want + bias)
        assert torch.equal(sparse.sparse_dense(x, arrays, activation="relu"), want.relu())
        assert torch.equal(sparse.spmm(arrays, x.t()), want.t())
        assert torch.equal(sparse.spmv(arrays, x[0]), want[0])
    assert len(sorts) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("repeated", [False, True])
def test_every_product_of_every_dtype(sorts, dtype, repeated):
    arrays = arrays_of(repeated=repeated, dtype=dtype)
    dense, x, left = dense_of_any(arrays), whole(6, K, dtype=dtype), whole(N, 6, dtype=dtype)
    stored = (dense_of_any((torch.ones_like(arrays[0]), *arrays[1:])) != 0).to(dtype)
    for _ in range(3):
        assert torch.equal(sparse.sparse_dense(x, arrays), x @ dense.T)
        assert torch.equal(sparse.sparse_dense(whole(0, K, dtype=dtype), arrays), x[:0] @ dense.T)
        assert torch.equal(sparse.sparse_add(arrays, dense), dense + dense)
        sampled = sparse.sddmm(arrays, left, x.t())
        assert torch.equal(sampled.to_dense(), left @ x * stored)
        product = sparse.sparse_matmul(
            arrays, sparse.SparseMatrix.of(torch.eye(K, dtype=dtype).to_sparse_csr())
        )
        assert torch.equal(product.to_dense(), dense)
    assert set(sorts) <= {"sparse_dense", "sparse_matmul"} and len(sorts) <= 2


def dense_of_any(arrays):
    """Also of dtypes that scipy does not have."""
    data, indices, indptr = arrays
    dense = torch.zeros(N, K, dtype=data.dtype)
    row = torch.arange(N).repeat_interleave(indptr.diff().long())
    return dense.index_put((row, indices.long()), data, accumulate=True)


def test_values_are_whatever_a_call_brings(sorts):
    data, indices, indptr = arrays = arrays_of()
    x, numpy = whole(3, K), data.numpy()
    for step in range(5):
        numpy[:] = np.random.default_rng(step).integers(-4, 5, len(numpy))
        y = sparse.sparse_dense(x.numpy(), (numpy, indices.numpy(), indptr.numpy()))
        assert torch.equal(y, x @ dense_of(arrays).T)
        assert torch.equal(
            sparse.sparse_dense(x, (data.double().float()[None].t()[:, 0], indices, indptr)), y
        )
    assert len(sorts) == 1


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_indices_that_were_written_to_are_noticed_wherever_they_are(sorts, index, repeated):
    _, indices, indptr = arrays = arrays_of(index=index, repeated=repeated)
    x = whole(3, K)
    for turn, at in enumerate([0, 1, 17, len(indices) // 2, len(indices) - 1]):
        for _ in range(2):
            assert torch.equal(sparse.sparse_dense(x, arrays), x @ dense_of(arrays).T)
        assert len(sorts) == turn + 1
        indices[at] = (int(indices[at]) + 1) % K
    indptr[6] += 1  # the first entry behind a row that stores nothing becomes that row's
    for _ in range(3):
        assert torch.equal(sparse.sparse_dense(x, arrays), x @ dense_of(arrays).T)
    assert len(sorts) == 6


def test_indices_that_became_wrong_are_refused_by_position():
    for index in (torch.int32, torch.int64):
        _, indices, indptr = arrays = arrays_of(index=index)
        x = whole(3, K)
        for _ in range(3):
            want = sparse.sparse_dense(x, arrays)
        right, at = int(indices[-1]), len(indices) - 1
        for wrong in (K, -1, *((right + (1 << 32), right - (1 << 32)) if index == torch.int64 else ())):
            indices[-1] = wrong
            for _ in range(2):
                with pytest.raises(
                    ValueError, match=rf"indices must be in \[0, {K}\); got indices\[{at}\]={wrong}"
                ):
                    sparse.sparse_dense(x, arrays)
        indices[-1] = right
        indptr[3] = -1
        with pytest.raises(ValueError, match="indptr must not decrease"):
            sparse.sparse_dense(x, arrays)
        indptr[3] = 60
        assert torch.equal(sparse.sparse_dense(x, arrays), want)


def test_indices_that_became_sorted_are_taken_as_they_are(sorts):
    data, indices, indptr = arrays = arrays_of()
    x = whole(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    for first, end in pairwise(indptr.tolist()):
        indices[first:end] = indices[first:end].sort().values
    for _ in range(4):
        assert torch.equal(sparse.sparse_dense(x, arrays, check="trusted"), x @ dense_of(arrays).T)
    assert len(sorts) == 1 and recent.find(data, indices, indptr, K).ascends


@pytest.mark.parametrize("count", [2, 600])
def test_trusted_arrays_are_refused_however_often_they_came(sorts, count):
    indices = torch.arange(count).flip(0)
    arrays, x = (torch.ones(count), indices, torch.tensor([0, count])), torch.ones(1, count)
    for _ in range(3):
        assert sparse.sparse_dense(x, arrays).item() == count
        for call in (
            lambda: sparse.sparse_dense(x, arrays, check="trusted"),
            lambda: sparse.spmm(arrays, x.t(), check="trusted"),
        ):
            with pytest.raises(ValueError, match=r"must be sorted and distinct .*; got indices\[1\]="):
                call()
    assert len(sorts) == 1


def test_indices_are_read_in_each_call_whatever_check_says(sorts):
    _, indices, _ = arrays = arrays_of()
    x = whole(3, K)
    for step in range(6):
        indices[1] = step // 2
        for check in ("once", "always"):
            y = sparse.sparse_dense(x, arrays, check=check)
            assert torch.equal(y, x @ dense_of(arrays).T)
    assert len(sorts) == 3


def test_the_warning_comes_once_and_says_so():
    arrays, x = arrays_of(), whole(3, K)
    text = r"^\[sparse_dense\] indices are not sorted in each row: sorted once, as long as they stay as they "
    with pytest.warns(UserWarning, match=text) as caught:
        sparse.sparse_dense(x, arrays)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            sparse.sparse_dense(x, arrays)
            sparse.sparse_dense(x.clone().requires_grad_(), arrays).sum().backward()
            sparse.SparseMatrix.of(scipy.sparse.csr_array(tuple(a.numpy() for a in arrays), shape=(N, K)))
        sparse.sparse_dense(x, arrays_of(repeated=True))
    sparse.forget_arrays()
    with pytest.warns(UserWarning, match=text):
        sparse.sparse_dense(x, arrays)


def test_the_warning_of_what_cannot_be_kept_says_in_each_call(monkeypatch, sorts):
    data, indices, indptr = arrays_of()
    wide = indices.repeat_interleave(2)[::2]
    x = whole(3, K)
    text = r"\[sparse_dense\] indices are not .*: sorted in this call, once by SparseMatrix.of"
    with pytest.warns(UserWarning, match=text):
        sparse.sparse_dense(x, (data, wide, indptr))
    with torch.autocast("cpu"), pytest.warns(UserWarning, match=text):
        sparse.sparse_dense(x, (data, indices, indptr))
    monkeypatch.setattr(recent, "_MOST_WORDS", 4 * len(indices))
    for _ in range(2):
        with pytest.warns(UserWarning, match=text):
            sparse.sparse_dense(x, (data, indices, indptr))
    assert len(sorts) == 4


def test_few_indices_are_kept_too(sorts):
    """Of sorted ones less than 512 are read anew, in less time than it takes to find them."""
    arrays = torch.tensor([1.0, 2]), torch.tensor([2, 0]), torch.tensor([0, 2])
    x = torch.tensor([[1.0, 10, 100]])
    for _ in range(3):
        assert sparse.sparse_dense(x, arrays).item() == 102
    assert len(sorts) == 1
    arrays[1][1] = 2
    for _ in range(3):
        assert sparse.sparse_dense(x, arrays).item() == 300
    arrays[1][1] = 3
    with pytest.raises(ValueError, match=r"indices must be in \[0, 3\); got indices\[1\]=3"):
        sparse.sparse_dense(x, arrays)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("block", [(1, 1), (2, 4)])
def test_gradients_of_arrays_that_came_before(sorts, block, repeated):
    data, indices, indptr = arrays_of(block, repeated=repeated)
    x, results = torch.randn(5, K), []
    with torch.inference_mode():  # what is kept in here serves gradients
        sparse.sparse_dense(x, (data, indices, indptr))
    held = SparseMatrix(data.clone().requires_grad_(), indices, indptr, shape=(N, K))
    for step in range(4):
        leaf, its_x = data.clone().requires_grad_(), x.clone().requires_grad_()
        weight = (leaf, indices, indptr) if step else held
        y = sparse.sparse_dense(its_x, weight, activation="gelu")
        y.square().sum().backward()
        results.append((y.detach(), weight.data.grad if weight is held else leaf.grad, its_x.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)
    assert len(sorts) == 2


def test_second_derivatives_and_forward_mode(sorts):
    data, indices, indptr = arrays_of(per_row=2, dtype=torch.float64)
    x = torch.randn(2, K, dtype=torch.float64, requires_grad=True)
    sparse.sparse_dense(x, (data, indices, indptr))
    data.requires_grad_()

    def product(d, x):
        return sparse.sparse_dense(x, (d, indices, indptr))[:, ::12]

    assert torch.autograd.gradgradcheck(product, (data, x), atol=1e-4)
    assert len(sorts) == 1
    tangent = torch.randn_like(data)
    _, moved = torch.func.jvp(lambda d: product(d, x.detach()), (data.detach(),), (tangent,))
    assert torch.equal(moved, product(tangent, x.detach()))


@pytest.mark.parametrize("repeated", [False, True])
def test_other_kinds_of_matrices(sorts, repeated):
    arrays, x = arrays_of(repeated=repeated), whole(4, K)
    dense = dense_of(arrays)
    numpy = tuple(array.numpy() for array in arrays)
    csr = scipy.sparse.csr_array(numpy, shape=(N, K))
    csc = scipy.sparse.csc_array(numpy, shape=(K, N))
    matrices = [(csr, dense), (csc, dense.T)]
    if not repeated:
        data, indices, indptr = arrays
        matrices.append(
            (torch.sparse_csr_tensor(indptr, indices, data, (N, K), check_invariants=False), dense)
        )
    for matrix, want in matrices:
        for _ in range(3):
            assert torch.equal(sparse.sparse_transpose(matrix).to_dense(), want.T)
            assert torch.equal(sparse.spmm(matrix, whole(want.shape[1], 3) * 0), torch.zeros(len(want), 3))
    assert len(sorts) == 1
    held = SparseMatrix.of(csr)
    b = whole(K, 8)
    for _ in range(3):
        assert torch.equal(held @ b, dense @ b) and torch.equal(sparse.sparse_dense(x, held), x @ dense.T)
    for _ in range(2):
        moved = tvm.sparse_transpose(*numpy, columns=K)
        assert torch.equal(dense_of_transposed(moved), dense.T)
    assert len(sorts) == 1


def dense_of_transposed(arrays):
    return torch.from_numpy(scipy.sparse.csr_array(tuple(a.numpy() for a in arrays), shape=(K, N)).toarray())


def test_padding_is_looked_at_in_each_call():
    block = (1, 3)  # 80 columns are 27 blocks, the last of 2
    indptr = torch.arange(0, 27 * N + 1, 27, dtype=torch.int32)
    indices = torch.arange(27, dtype=torch.int32).flip(0).repeat(N)
    data = whole(27 * N, *block)
    data[::27, :, 2] = 0
    x = whole(3, K)
    for _ in range(4):
        y = sparse.sparse_dense(x, (data, indices, indptr))
    dense = data.view(N, 27, 3).flip(1).reshape(N, 81)[:, :K]
    assert torch.equal(y, x @ dense.T)
    data[0, 0, 2] = 1
    for _ in range(2):
        with pytest.raises(ValueError, match="padd"):
            sparse.sparse_dense(x, (data, indices, indptr))


def test_bad_arguments_are_refused_as_the_first_time():
    data, indices, indptr = arrays = arrays_of()
    x = whole(3, K)
    for _ in range(3):
        sparse.sparse_dense(x, arrays)
    with pytest.raises(ValueError, match=f"bias must have shape \\({N},\\)"):
        sparse.sparse_dense(x, arrays, torch.randn(N + 1))
    with pytest.raises(TypeError, match="data must be of the dtype of x"):
        sparse.sparse_dense(x.double(), arrays)
    with pytest.raises(ValueError, match="indices must have"):
        sparse.sparse_dense(x, (data[1:], indices, indptr))
    with pytest.raises(ValueError, match="indptr must begin with 0 and end with"):
        sparse.sparse_dense(x, (data, indices, indptr[:-1]))
    with pytest.raises(TypeError, match="data must be of dtype"):
        sparse.sparse_dense(x, (data > 0, indices, indptr))
    with pytest.raises(ValueError, match='check must be "once"'):
        sparse.sparse_dense(x, arrays, check="never")
    narrow = int(indices.max())
    with pytest.raises(ValueError, match=rf"indices must be in \[0, {narrow}\)"):
        sparse.sparse_dense(x[:, :narrow], arrays)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("repeated", [False, True])
def test_what_is_kept_is_counted(monkeypatch, index, repeated):
    arrays = [arrays_of(index=index, repeated=repeated, seed=seed) for seed in range(4)]
    x = whole(3, K)
    sparse.sparse_dense(x, arrays[0])
    kept = recent.find(*arrays[0], K)
    held = (kept.pattern.row_plan, kept._given, kept.order, kept.slot)
    assert 4 * kept.words == sum(part.untyped_storage().nbytes() for part in held if part is not None)
    count = len(arrays[0][1])
    assert 3 * count < kept.words <= 4 * count + 2 * (len(arrays[0][2]) + 8)
    assert (kept.order is None) == repeated and (kept.slot is None) != repeated
    monkeypatch.setattr(recent, "_MOST_WORDS", 9 * count)
    for each in arrays[1:]:
        sparse.sparse_dense(x, each)
    assert [recent.find(*each, K) is not None for each in arrays] == [False, False, True, True]
    sparse.forget_arrays()
    assert not recent._seen


def test_threads_with_the_same_arrays_and_their_own():
    x, failed = whole(5, K), []
    shared = arrays_of(seed=100)
    wanted = x @ dense_of(shared).T

    def work(seed):
        arrays = arrays_of(seed=seed, repeated=seed % 2 == 1)
        want = x @ dense_of(arrays).T
        for turn in range(40):
            if turn % 20 == 10:
                sparse.forget_arrays()
            if not torch.equal(sparse.sparse_dense(x, arrays), want):
                failed.append((seed, turn))
            if not torch.equal(sparse.sparse_dense(x, shared), wanted):
                failed.append(("shared", turn))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert failed == []


def test_graphs_do_not_meet_what_is_kept():
    arrays, x = arrays_of(), whole(3, K)
    compiled = torch.compile(lambda x, *arrays: sparse.sparse_dense(x, arrays), backend="eager")
    for _ in range(2):
        want = sparse.sparse_dense(x, arrays)
        torch.testing.assert_close(compiled(x, *arrays), want)
