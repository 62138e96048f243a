"""TVM's own cases under its names, and what it got wrong, by name."""

from __future__ import annotations

import copy
import warnings

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


def blocks_of(o: int, columns: int, block: tuple[int, int], density: float = 0.9) -> sp.bsr_matrix:
    kept = np.random.default_rng(5).random((o // block[0], columns // block[1])) < density
    dense = np.random.default_rng(6).standard_normal((o, columns)).astype("f4") * np.kron(
        kept, np.ones(block)
    )
    return sp.bsr_matrix(dense.astype("f4"), blocksize=block)


@pytest.mark.parametrize(("block", "layout"), [((8, 16), "NHWC"), ((8, 16), "NCHW"), ((8, 1), "NHWC")])
def test_sparse_conv2d(block, layout):
    """The original's cases and tolerance: 1×32×32×64 with 128 outputs; one column in two dimensions."""
    w = blocks_of(128, 64, block)
    x = np.random.default_rng(7).standard_normal((1, 32, 32, 64)).astype("f4")
    data = w.data.reshape(-1, 8) if block[1] == 1 else w.data
    given = x if layout == "NHWC" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    got = tvm.sparse_conv2d(given, data, w.indices, w.indptr, layout)
    got = got if layout == "NHWC" else got.permute(0, 2, 3, 1)
    np.testing.assert_allclose(got.numpy(), x @ w.toarray().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layout", "block"), [("NHWC", (16, 1)), ("NHWC", (4, 8)), ("NCHW", (16, 1))])
@pytest.mark.parametrize("flat", [False, True])
def test_sparse_conv2d_of_3_by_3(layout, block, flat):
    """Its kernels: stride 1, a zero around the images; columns are a weight's of HWIO, or of OIHW, flattened.

    So `process_params` made them: w.reshape(-1, O).T for NHWC, w.reshape(O, -1) for NCHW.
    """
    w = blocks_of(32, 9 * 16, block, 0.3)
    x = torch.from_numpy(np.random.default_rng(7).standard_normal((2, 16, 7, 6)).astype("f4"))
    dense = torch.from_numpy(w.toarray())
    kernel = dense.reshape(32, 16, 3, 3)
    if layout == "NHWC":
        kernel = dense.reshape(32, 3, 3, 16).permute(0, 3, 1, 2)
    want = nn.functional.conv2d(x, kernel, padding=1)
    given = x if layout == "NCHW" else x.permute(0, 2, 3, 1)
    flat = flat and block[1] == 1
    data = torch.from_numpy(w.data.reshape(-1, block[0]) if flat else w.data).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = tvm.sparse_conv2d(given, data, w.indices, w.indptr, layout, 3)
    got = got if layout == "NCHW" else got.permute(0, 3, 1, 2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(want)
    (grad,) = torch.autograd.grad(got, data, dy)
    wanted = torch.nn.grad.conv2d_weight(x, kernel.shape, dy, padding=1)
    wanted = wanted.permute(0, 2, 3, 1) if layout == "NHWC" else wanted
    rows, columns = np.repeat(np.arange(len(w.indptr) - 1), np.diff(w.indptr)), torch.from_numpy(w.indices)
    blocks = wanted.reshape(32 // block[0], block[0], -1, block[1])[rows, :, columns.long()]
    torch.testing.assert_close(grad.view(blocks.shape), blocks, rtol=1e-4, atol=1e-3)


def test_sparse_conv2d_of_single_elements_and_larger_kernels():
    """Beyond the original's: CSR, kernels of 5×5, indices of int64."""
    w = matrix(6, 25 * 4, 0.3)
    x = torch.randn(2, 4, 8, 9)
    dense = torch.from_numpy(w.toarray())
    want = nn.functional.conv2d(x, dense.reshape(6, 4, 5, 5), padding=2)
    got = tvm.sparse_conv2d(x, w.data, w.indices.astype("i8"), w.indptr.astype("i8"), "NCHW", 5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


def test_what_sparse_conv2d_refuses_is_named():
    x, w = torch.randn(1, 16, 7, 6), blocks_of(32, 9 * 16, (4, 2), 0.3)
    operands = (x, *arrays(w))
    wrong = w.indices.copy()
    wrong[3] = 99
    for call, kind, text in (
        (lambda: tvm.sparse_conv2d(*operands, "NCHW", 2), ValueError, "kernel_size must be odd; got 2"),
        (lambda: tvm.sparse_conv2d(*operands, "NCHW", 0), ValueError, "kernel_size must be at least 1"),
        (lambda: tvm.sparse_conv2d(*operands, "NCHW", (3, 3)), TypeError, "kernel_size must be an int"),
        (lambda: tvm.sparse_conv2d(*operands, "HWIO", 3), ValueError, "layout must be .*; got 'HWIO'"),
        (lambda: tvm.sparse_conv2d(*operands, "NCHW", 3), ValueError, r"blocks must have one col.*, 4, 2\)"),
        (lambda: tvm.sparse_conv2d(x[0], *arrays(w), "NCHW", 3), ValueError, "x must have 4 dimensions"),
        (
            lambda: tvm.sparse_conv2d(x.permute(0, 2, 3, 1), w.data, wrong, w.indptr, "NHWC", 3),
            ValueError,
            r"indices must be in \[0, 72\); got indices\[3\]=99",
        ),
        (
            lambda: tvm.sparse_conv2d(x, w.data[:, :, :1], wrong + 100, w.indptr, "NCHW", 3),
            ValueError,
            r"indices must be in \[0, 144\); got indices",
        ),
        (lambda: tvm.sparse_conv2d("x", *arrays(w)), TypeError, "dense_data must be a torch.Tensor; got str"),
        (lambda: tvm.sparse_conv2d(x, 1, 2, 3), TypeError, "sparse_data must be a torch.Tensor; got int"),
    ):
        with pytest.raises(kind, match=rf"^\[sparse_conv2d\] {text}"):
            call()


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
        sparse_kind = rarefy.BlockSparseConv2d

        def convert(*arguments):
            return tvm.bsr_conv2d.convert(*arguments, "NHWC" if last else "NCHW", kernel)

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


def test_convert_takes_layers_of_one_kernel():
    """By position, as the original's last argument; all by default, of which it took 1×1."""
    layers = [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, (1, 3)), nn.Conv2d(4, 4, 3, groups=2)]
    for kernel, which in ((None, [0, 1, 2, 3]), (1, [0]), (3, [1, 3]), (5, [])):
        for layout in ("NHWC", "NCHW"):
            model = nn.Sequential(*copy.deepcopy(layers))
            tvm.bsr_conv2d.convert(model, (2, 1), 0, layout, kernel)
            assert [i for i in range(4) if isinstance(model[i], rarefy.BlockSparseConv2d)] == which
            x = torch.randn(1, 4, 9, 9)
            torch.testing.assert_close(model(x), nn.Sequential(*layers)(x))


def test_convert_refuses_other_layouts_and_kernels():
    model = nn.Sequential(nn.Conv2d(4, 4, 1))
    for layout in ("HWIO", 3, None):
        with pytest.raises(ValueError, match=r'\[bsr_conv2d.convert\] layout must be "NHWC" or "NCHW"; got'):
            tvm.bsr_conv2d.convert(model, (1, 1), 0, layout)
    for kernel, kind, text in ((0, ValueError, "at least 1; got 0"), ((3, 3), TypeError, "an int; got")):
        with pytest.raises(kind, match=rf"\[bsr_conv2d.convert\] kernel_size must be {text}"):
            tvm.bsr_conv2d.convert(model, (1, 1), 0, "NHWC", kernel)
    assert type(model[0]) is nn.Conv2d


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
