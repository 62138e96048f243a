"""Whatever users hold as a sparse matrix, in rarefy.sparse: formats of scipy and torch, NumPy, operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse as sp

import rarefy
from rarefy import sparse
from rarefy.sparse import SparseMatrix
from sparse_matrices import csr, random_blocks, whole


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "lil", "dok", "dia"])
def test_every_format_of_scipy(kind):
    dense = torch.randint(-4, 5, (12, 20)) * (torch.rand(12, 20) < 0.3)
    for make in (sp.coo_matrix, sp.coo_array):
        w = make(dense.float().numpy()).asformat(kind)
        x = whole(3, 20)
        assert torch.equal(sparse.sparse_dense(x, w), x @ dense.float().T)
        assert torch.equal(sparse.sparse_transpose(w).to_dense(), dense.float().T)
        assert torch.equal(SparseMatrix.of(w) @ x.T, dense.float() @ x.T)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc"])
def test_every_layout_of_torch_and_its_gradients(device, kind):
    dense = (torch.randint(-4, 5, (12, 20)) * (torch.rand(12, 20) < 0.3)).double().to(device)
    blocks = ((4, 2),) if kind in ("bsr", "bsc") else ()
    leaf = dense.clone().requires_grad_()
    x = whole(3, 20, dtype=torch.float64).to(device)
    w = leaf.to_sparse() if kind == "coo" else getattr(leaf.detach(), f"to_sparse_{kind}")(*blocks)
    assert torch.equal(sparse.sparse_dense(x, w), x @ dense.T)
    if kind == "coo":
        twice = torch.sparse_coo_tensor(w.indices().repeat(1, 2), w.values().repeat(2), w.shape)
        assert torch.equal(sparse.sparse_dense(x, twice), 2 * x @ dense.T)
    elif kind in ("csr", "csc"):  # torch makes no gradients of blocks
        values = w.values().clone().requires_grad_()
        inner = (w.crow_indices(), w.col_indices()) if kind == "csr" else (w.ccol_indices(), w.row_indices())
        w = getattr(torch, f"sparse_{kind}_tensor")(*inner, values, size=w.shape)
        sparse.sparse_dense(x, w).sum().backward()
        column = (
            w.col_indices() if kind == "csr" else torch.arange(20).repeat_interleave(inner[0].diff().cpu())
        )
        assert torch.equal(values.grad, x.sum(0)[column.to(device).long()])
        return
    else:
        return
    sparse.sparse_dense(x, w).sum().backward()
    assert torch.equal(leaf.grad, (dense != 0) * x.sum(0))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["csc", "bsr", "bsc"])
def test_leaves_of_which_torch_keeps_no_gradients_are_refused(kind):
    """Their products would be fine, and only backward() would fail, inside torch."""
    dense = torch.eye(4)
    leaf = getattr(dense, f"to_sparse_{kind}")(*(() if kind == "csc" else ((2, 2),))).requires_grad_()
    x = torch.randn(2, 4)
    for call in (
        lambda: sparse.sparse_dense(x, leaf),
        lambda: sparse.spmm(leaf, x.t()),
        lambda: SparseMatrix.of(leaf),
    ):
        with pytest.raises(TypeError, match=rf"no leaf .* with data as the leaf; got torch.sparse_{kind}"):
            call()
    with torch.no_grad():
        assert torch.equal(sparse.sparse_dense(x, leaf), x)
    assert torch.equal(sparse.sparse_dense(x, leaf.detach()), x)
    made = dense.clone().requires_grad_()  # no leaf: gradients go on to one
    made_sparse = getattr(made, f"to_sparse_{kind}")(*(() if kind == "csc" else ((2, 2),)))
    sparse.sparse_dense(x, made_sparse).sum().backward()
    assert made.grad is not None


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_leaves_of_other_layouts_have_gradients(kind):
    dense = torch.eye(4)
    leaf = (dense.to_sparse() if kind == "coo" else dense.to_sparse_csr()).requires_grad_()
    x = torch.randn(2, 4)
    sparse.sparse_dense(x, leaf).sum().backward()
    torch.testing.assert_close(leaf.grad.to_dense(), torch.diag(x.sum(0)))


def test_a_matrix_is_made_of_what_users_hold():
    arrays, dense = csr(6, 9, 0.5)
    held = SparseMatrix.of(sp.csr_array(tuple(a.numpy() for a in arrays), shape=dense.shape))
    assert held._keeps and torch.equal(held.to_dense(), dense)
    assert SparseMatrix.of(held) is held
    weight = rarefy.CsrWeight.from_dense(dense, density=1.0)
    assert SparseMatrix.of(weight).data is weight.values
    for value, got in ((dense, "a dense Tensor"), (dense.numpy(), "a dense ndarray"), ("w", "str")):
        with pytest.raises(TypeError, match=rf"\[SparseMatrix.of\] value must be .*; got {got}"):
            SparseMatrix.of(value)
    with pytest.raises(ValueError, match="without batch or dense dimensions"):
        SparseMatrix.of(torch.ones(2, 3, 4).to_sparse())
    with pytest.raises(ValueError, match=r"\[SparseMatrix.of\] value must have 2 dimensions; got \(9,\)"):
        SparseMatrix.of(sp.coo_array(np.ones(9)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32], ids=str)
def test_operators_with_dense_operands_on_either_side(dtype):
    arrays, dense = random_blocks(3, 4, 4, 2, 0.5, dtype)
    matrix = SparseMatrix(*arrays, shape=tuple(dense.shape))
    x, y = whole(2, 3, 12, dtype=dtype), whole(12, 8, dtype=dtype)
    assert torch.equal(x @ matrix, x @ dense)
    assert torch.equal(x[0, 0] @ matrix, x[0, 0] @ dense)
    assert torch.equal(torch.as_tensor(x.numpy() @ matrix), x @ dense)
    assert torch.equal(matrix @ y[:8].numpy(), dense @ y[:8])
    assert torch.equal(y + matrix, y + dense)
    assert torch.equal(y.numpy() + matrix, y + dense)
    assert torch.equal(matrix + y.numpy(), y + dense)
    with pytest.raises(ValueError, match="x must have 12 columns, as the matrix has rows"):
        x[..., :5] @ matrix
    if dtype == torch.float64:
        data = arrays[0].clone().requires_grad_()
        x = torch.randn(3, 12, dtype=dtype, requires_grad=True)
        call = lambda d, x: x @ SparseMatrix(d, *arrays[1:], shape=tuple(dense.shape))  # noqa: E731
        assert torch.autograd.gradcheck(call, (data, x))


def test_numpy_arrays_that_torch_cannot_share():
    w = sp.random_array((6, 9), density=0.5, rng=np.random.default_rng(0), format="csr")
    x = np.arange(18.0).reshape(2, 9)
    want = torch.from_numpy(x @ w.toarray().T)
    for array in (x[::-1][::-1], x.astype(">f8"), np.asfortranarray(x)):
        torch.testing.assert_close(sparse.sparse_dense(array, w), want)
    torch.testing.assert_close(sparse.sparse_dense(x[:, ::-1], w[:, ::-1]), want)
    torch.testing.assert_close(sparse.sparse_dense(x, w, np.ones(6)), want + 1)
    with pytest.raises(
        TypeError, match=r"\[sparse_dense\] x must be of a dtype that torch knows; got object"
    ):
        sparse.sparse_dense(x.astype(object), w)


@pytest.mark.parametrize("kind", ["tuple", "csr", "torch", "matrix"])
def test_the_warning_is_about_the_callers_line(kind):
    sparse.forget_arrays()  # the same ones of another test may have lain at the same place
    w = sp.csr_array((np.ones(2), np.array([2, 0]), np.array([0, 2])), shape=(1, 3))
    of_torch = torch.sparse_csr_tensor(
        torch.tensor([0, 2]), torch.tensor([2, 0]), torch.ones(2).double(), size=(1, 3)
    )
    arrays, x = (w.data, w.indices, w.indptr), torch.ones(1, 3, dtype=torch.float64)
    calls = {
        "tuple": lambda: sparse.sparse_dense(x, arrays),
        "csr": lambda: sparse.sparse_dense(x, w),
        "torch": lambda: sparse.sparse_dense(x, of_torch),
        "matrix": lambda: SparseMatrix(*arrays, shape=w.shape),
    }
    with pytest.warns(UserWarning, match="indices are not sorted") as caught:
        calls[kind]()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("block", [(1, 1), (2, 3)])
def test_a_matrix_moves_to_a_device_and_a_dtype(device, block):
    r, c = block
    data = torch.randn(4, *(block if block != (1, 1) else ()), requires_grad=True)
    # Unsorted, and one block twice.
    matrix = sparse.SparseMatrix(
        data, torch.tensor([2, 0, 1, 1]), torch.tensor([0, 2, 2, 4]), shape=(3 * r, 3 * c)
    )
    assert matrix.to("cpu", torch.float32) is matrix is matrix.to()
    moved = matrix.to(device, torch.float64)
    assert moved.device.type == device and moved.dtype == torch.float64
    torch.testing.assert_close(moved.to_dense().cpu(), matrix.to_dense().double())
    assert moved.to(device, torch.float64) is moved
    x = torch.arange(3.0 * c, dtype=torch.float64, device=device)
    (moved @ x).sum().backward()
    want = x.view(3, c)[[2, 0, 1, 1]].float().cpu()
    torch.testing.assert_close(data.grad, want[:, None].expand(4, r, c).reshape(data.shape))
    with pytest.raises(TypeError, match=r"\[SparseMatrix.to\] dtype must be .*; got torch.bool"):
        matrix.to(dtype=torch.bool)
    assert matrix.to(dtype=torch.int32).dtype == torch.int32
