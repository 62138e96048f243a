"""TVM's own cases under its names, and what it got wrong, by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse as sp
from torch import nn

import rarefy
from rarefy.compat import tvm


def matrix(rows: int, columns: int, density: float, dtype: str = "f4", seed: int = 0) -> sp.csr_matrix:
    rng = np.random.default_rng(seed)
    values = np.where(rng.random((rows, columns)) < density, rng.uniform(-100, 100, (rows, columns)), 0)
    return sp.csr_matrix(values.astype(dtype))


def arrays(w) -> tuple:
    return w.data, w.indices, w.indptr


def products_of_tvm(dtype: str, columns: int) -> tuple:
    """Operands as its tests draw them, (5, 7) and (7, columns), and a bias of the rows."""
    rng, scale = np.random.default_rng(1), 1 if dtype[0] == "f" else 100  # integers are exact, of any size
    a = np.maximum(rng.random((5, 7)) - 0.5, 0) * scale
    b, c = (rng.random((7, columns)) - 0.5) * scale, rng.random(5) * scale
    return sp.csr_matrix(a.astype(dtype)), b.astype(dtype), c.astype(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_csrmv(dtype, bias):
    a, x, y = products_of_tvm(dtype, 1)
    got = tvm.csrmv(a, x, y if bias else None)
    assert got.shape == (5, 1)
    np.testing.assert_allclose(got.numpy(), a @ x + (y.reshape(5, 1) if bias else 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [2, 5])  # 2: TVM's; 5: a square, where rows and columns are as many
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i8"])
def test_csrmm(dtype, bias, columns):
    a, b, c = products_of_tvm(dtype, columns)
    got = tvm.csrmm(a, b, c if bias else None)
    np.testing.assert_allclose(got.numpy(), a @ b + (c.reshape(5, 1) if bias else 0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(5,), (1,), (1, 1), (5, 1), (1, 3), (5, 3)])
def test_every_bias_that_csrmm_takes(shape):
    a, b, _ = products_of_tvm("f8", 3)
    c = torch.arange(1.0, 1 + np.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()
    got = tvm.csrmm(a, b, c)
    two = c.detach()[:, None] if c.ndim == 1 else c.detach()
    np.testing.assert_allclose(got.detach().numpy(), a @ b + two.numpy())
    got.sum().backward()
    assert float(c.grad.sum()) == 5 * 3


def test_what_csrmm_refuses_is_named():
    a, b, c = products_of_tvm("f4", 3)
    for shape in ((3,), (7,), (0,), (), (3, 5), (5, 2), (1, 5, 3)):
        with pytest.raises(ValueError, match=r"\[csrmm\] c must have shape \(5,\), \(1,\), or 2") as caught:
            tvm.csrmm(a, b, np.zeros(shape, "f4"))
        assert str(caught.value).endswith(f"broadcast to (5, 3); got {shape}")
    with pytest.raises(TypeError, match=r"c must be of the product's dtype, torch.float32; got torch.f"):
        tvm.csrmm(a, b, c.astype("f8"))
    with pytest.raises(TypeError, match=r"\[csrmm\] c must be on the product's device, cpu; got meta"):
        tvm.csrmm(a, b, torch.zeros(5, device="meta"))
    for thing in (3.0, [1.0] * 5, "c"):
        with pytest.raises(TypeError, match=r"\[csrmm\] c must be a torch.Tensor"):
            tvm.csrmm(a, b, thing)
    with pytest.raises(ValueError, match=r"\[csrmv\] y must have shape \(5,\), \(1,\), or .*; got \(3,\)"):
        tvm.csrmv(a, b[:, :1], np.zeros(3, "f4"))
    for x in (b, b[:, 0]):
        with pytest.raises(ValueError, match=r"\[csrmv\] x must have 2 dimensions, one column; got \(7"):
            tvm.csrmv(a, x)
    with pytest.raises(ValueError, match=r"\[csrmm\] b must have 2 dimensions; got \(7,\)"):
        tvm.csrmm(a, b[:, 0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "i4", "i2"])
def test_dense_with_a_sparse_input_and_with_a_sparse_weight(dtype, bias):
    rng = np.random.default_rng(2)
    x, w = (np.maximum(rng.uniform(-10, 10, size), 0).astype(dtype) for size in ((3, 5), (2, 5)))
    b = rng.uniform(-10, 10, 2).astype(dtype) if bias else np.zeros(2, dtype)
    given = torch.from_numpy(b) if bias else None
    want = x @ w.T + b
    for got in (
        tvm.dense_si(sp.csr_matrix(x), w, given),
        tvm.dense_sw(x, sp.csr_matrix(w), given),
        tvm.dense(sp.csr_matrix(x), w, given),
        tvm.dense(x, sp.csr_matrix(w), given),
    ):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4)


@pytest.mark.parametrize("left", [False, True])
def test_sparse_dense(left):
    w = matrix(17, 47, 0.2)
    x = np.random.default_rng(3).random((1, 47)).astype("f4")
    got = tvm.sparse_dense(x, *arrays(w), sparse_lhs=left).numpy()
    np.testing.assert_allclose(got, w @ x.T if left else (w @ x.T).T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("index", ["i4", "i8"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_sparse_add(dtype, index):
    w = matrix(3, 49, 0.2, dtype)
    dense = np.random.default_rng(4).random((3, 49)).astype(dtype)
    got = tvm.sparse_add(dense, w.data, w.indices.astype(index), w.indptr.astype(index))
    np.testing.assert_allclose(got.numpy(), dense + w.toarray(), rtol=1e-6)


def test_sparse_transpose_gives_arrays_of_the_same_kind():
    w = matrix(103, 103, 0.3)
    for index in ("i4", "i8"):
        data, indices, indptr = tvm.sparse_transpose(w.data, w.indices.astype(index), w.indptr.astype(index))
        assert {indices.dtype, indptr.dtype} == {torch.from_numpy(np.zeros(0, index)).dtype}
        want = w.T.tocsr()
        want.sort_indices()
        for got, array in zip((data, indices, indptr), arrays(want), strict=True):
            np.testing.assert_array_equal(got.numpy(), array)


def test_sparse_transpose_of_a_rectangle():
    """The original: square matrices of CSR alone."""
    w = sp.bsr_matrix(matrix(6, 20, 0.5).toarray(), blocksize=(2, 5))
    result = tvm.sparse_transpose(*arrays(w), columns=20)
    got = sp.bsr_matrix(tuple(array.numpy() for array in result), shape=(20, 6))
    np.testing.assert_array_equal(got.toarray(), w.toarray().T)
    with pytest.raises(ValueError, match=r"\[sparse_transpose\] indices must be in"):
        tvm.sparse_transpose(*arrays(matrix(2, 9, 0.9)))


def test_there_are_gradients():
    """The original registers none for any sparse operator."""
    w = matrix(4, 6, 0.5, "f8")
    data = torch.from_numpy(w.data).requires_grad_()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d, x: tvm.sparse_dense(x, d, w.indices, w.indptr), (data, x))


def test_leading_dimensions():
    """The original's docstring promises them; its code unpacks two sizes."""
    w = matrix(4, 6, 0.5)
    x = torch.randn(2, 3, 6)
    got = tvm.sparse_dense(x, *arrays(w))
    torch.testing.assert_close(got, x @ torch.from_numpy(w.toarray()).T)


def test_an_index_out_of_range_is_an_error():
    """The original reads whatever lies there."""
    w = matrix(4, 6, 0.9)
    w.indices[2] = 77
    with pytest.raises(ValueError, match=r"indices must be in \[0, 6\); got indices\[2\]=77"):
        tvm.sparse_dense(torch.randn(1, 6), *arrays(w))


@pytest.mark.parametrize("kernel", [0, 1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_convert_stores_the_blocks_that_are_not_zero(kernel, last):
    """The original's cases: relu → layer → relu; dense with (32, 1), 1×1 with (8, 1), 3×3 with (16, 1).

    Its sizes, density, threshold and tolerance; and a layer whose zeros are spread, which it converts.
    """
    torch.manual_seed(0)
    block = {0: (32, 1), 1: (8, 1), 3: (16, 1)}[kernel]
    if kernel == 0:
        layer, other, x = nn.Linear(128, 768, bias=False), nn.Linear(768, 64), torch.randn(1, 128)
        convert, sparse_kind = tvm.bsr_dense.convert, rarefy.BlockSparseLinear
    else:
        layer = nn.Conv2d(64, 128, kernel, padding=kernel // 2, bias=False)
        other, x = nn.Conv2d(128, 32, 1), torch.randn(1, 64, 32, 32)
        x = x.to(memory_format=torch.channels_last) if last else x
        convert, sparse_kind = tvm.bsr_conv2d.convert, rarefy.BlockSparseConv2d
    layers = nn.Sequential(nn.ReLU(), layer, nn.ReLU())
    with torch.no_grad():
        nn.init.normal_(layer.weight)
        kept = torch.rand(len(layer.weight) // block[0], *layer.weight.shape[1:]) < 0.1
        layer.weight *= kept.repeat_interleave(block[0], 0)
        other.weight *= torch.rand_like(other.weight) < 0.3  # spread: 70 % of the elements, few blocks
    want = layers(x)
    model = nn.Sequential(*layers, other)
    first, second = convert(model, block, 0.2).rows
    assert isinstance(model[1], sparse_kind)
    assert first.density == pytest.approx(float(kept.float().mean()), abs=1e-6)
    assert second.reason == "filter_fn declined it"
    torch.testing.assert_close(model[:3](x), want, rtol=1e-5, atol=1e-5)


def test_convert_refuses_what_is_no_threshold():
    with pytest.raises(ValueError, match=r"\[bsr_dense.convert\] sparsity_threshold must be in \[0, 1\]; g"):
        tvm.bsr_dense.convert(nn.Sequential(nn.Linear(4, 4)), (1, 1), 1.5)
    with pytest.raises(TypeError, match=r"\[bsr_conv2d.convert\] sparsity_threshold must be a number"):
        tvm.bsr_conv2d.convert(nn.Sequential(nn.Conv2d(4, 4, 1)), (1, 1), "0.5")
    with pytest.raises(ValueError, match=r"\[bsr_conv2d.convert\] block_shape"):
        tvm.bsr_conv2d.convert(nn.Sequential(nn.Conv2d(4, 4, 1)), (0, 1), 0.5)


def test_a_threshold_that_is_just_met_converts():
    model = nn.Sequential(nn.Linear(10, 1))
    with torch.no_grad():
        model[0].weight[:, 1:] = 0
    tvm.bsr_dense.convert(model, (1, 1), 0.9)
    assert isinstance(model[0], rarefy.BlockSparseLinear)


def test_convert_leaves_layers_of_the_other_kind():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4))
    tvm.bsr_conv2d.convert(model, (1, 1), 0)
    assert isinstance(model[0], rarefy.BlockSparseConv2d)
    tvm.bsr_dense.convert(model, (1, 1), 0)
    assert isinstance(model[1], rarefy.BlockSparseLinear)
