"""The three products and bsr_plan: values, shapes, strides, layouts and dtypes."""

import contextlib
import threading

import numpy as np
import pytest
import torch

import rarefy
from helpers import assert_within_bound, random_bsr, small_integers
from op_cases import CASES, DTYPES, IDS, expected, products
from rarefy import ops


@pytest.mark.parametrize("rows", [0, 1, 13])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_products_are_within_the_bound(case, dtype, rows, device):
    n, k, r, c, density = case
    bsr = random_bsr((n, k), (r, c), density, dtype=dtype, device=device, empty_first_row=True)
    x, dy, bias = (
        torch.randn(size, dtype=dtype, device=device) for size in [(rows, 2, k), (rows, 2, n), (n,)]
    )
    for got, (want, magnitude, terms) in zip(
        products(bsr, x, dy, bias), expected(bsr, x, dy, bias), strict=True
    ):
        assert got.dtype == dtype and got.is_contiguous()
        assert_within_bound(got, want, magnitude, terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients_are_added_in_place(case, dtype, device):
    n, k, r, c, density = case
    bsr = random_bsr((n, k), (r, c), density, dtype=dtype, device=device)
    x = small_integers(7, k).to(device, dtype).requires_grad_()
    dy = small_integers(7, n).to(device, dtype)
    gradient = torch.ones_like(bsr.values)
    once = ops.bsr_grad_weight(dy, x.detach(), bsr.plan, *bsr.block_shape, *bsr.shape)
    for passes in (1, 2):
        assert ops.bsr_add_grad_weight(gradient, dy, x, bsr.plan, *bsr.shape) is None
        assert torch.equal(gradient, 1 + passes * once)
    assert not gradient.requires_grad and x.grad is None
    if case == CASES[0]:
        before = gradient.clone()
        with pytest.raises(ValueError, match="x must have 7 rows"):
            ops.bsr_add_grad_weight(gradient, dy, x[:6], bsr.plan, *bsr.shape)
        assert torch.equal(gradient, before)


def test_what_is_added_in_place_is_noticed_and_named():
    bsr = random_bsr((8, 12), (4, 3), 0.5)
    dy, x = torch.randn(5, 8), torch.randn(5, 12)
    args = (dy, x, bsr.plan, *bsr.shape)
    gradient = torch.ones_like(bsr.values)
    y = gradient.clone().requires_grad_().square() * gradient  # whose backward needs `gradient` as it is
    before = gradient._version
    ops.bsr_add_grad_weight(gradient, *args)
    assert gradient._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        kept = torch.ones_like(bsr.values)
        ops.bsr_add_grad_weight(kept, *args)
    assert torch.equal(kept, gradient)
    wrong = [
        (None, TypeError, r"gradient must be a torch\.Tensor; got NoneType"),
        (gradient.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "gradient must be contiguous"),
        (gradient.flatten(1), ValueError, r"gradient must have shape \(nnzb, block_rows, block_cols\)"),
        (gradient.double(), TypeError, r"gradient must be of dtype torch\.float32, as x, or narrower"),
    ]
    for tensor, error, text in wrong:
        with pytest.raises(error, match=rf"\[bsr_add_grad_weight\] {text}"):
            ops.bsr_add_grad_weight(tensor, *args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_integer_products_are_exact(case, dtype, device):
    n, k, r, c, density = case
    bsr = random_bsr((n, k), (r, c), density, dtype=dtype, device=device, integers=True)
    # Few enough terms that every sum is an integer that bfloat16 holds: |sum| <= 256.
    x, dy, bias = torch.zeros(9, k), torch.zeros(9, n), small_integers(n)
    x[:, :20], dy[:, :20] = small_integers(9, min(k, 20)), small_integers(9, min(n, 20))
    x, dy, bias = (t.to(device, dtype) for t in (x, dy, bias))
    for got, (want, *_) in zip(products(bsr, x, dy, bias), expected(bsr, x, dy, bias), strict=True):
        assert torch.equal(got.double(), want)


MIXED = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
]


@pytest.mark.parametrize(("dtype", "stored"), MIXED, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_values_may_be_narrower_than_x(case, dtype, stored):
    """Results have x's dtype, and the accuracy of values that were widened first; dvalues have theirs."""
    n, k, r, c, density = case
    bsr = random_bsr((n, k), (r, c), density, dtype=stored)
    x, dy, bias = (torch.randn(size, dtype=dtype) for size in [(13, k), (13, n), (n,)])
    got = (
        ops.bsr_linear(x, *bsr.operands, bias, n, k),
        ops.bsr_grad_input(dy, *bsr.operands, n, k),
        ops.bsr_grad_weight(dy, x, bsr.plan, r, c, n, k, stored),
    )
    assert [g.dtype for g in got] == [dtype, dtype, stored]
    for g, (want, magnitude, terms) in zip(got, expected(bsr, x, dy, bias), strict=True):
        assert_within_bound(g, want, magnitude, terms)


STRIDED = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns of a wider matrix": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every second row": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "last dimension strided": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "expanded rows": lambda t: t[:1, :1].expand(t.shape),
    "expanded columns": lambda t: t[..., :1].expand(t.shape),
    "expanded leading dimension": lambda t: t[:1].expand(t.shape),
    "permuted last dimension": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "negative view": lambda t: torch._neg_view(t),
    "sliced storage": lambda t: torch.nn.functional.pad(t, (3, 2, 1, 1))[:, 1:-1, 3:-2],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_inputs_equal_their_copies(name, dtype, device):
    bsr = random_bsr((19, 23), (4, 3), 0.5, dtype=dtype, device=device)
    x = STRIDED[name](torch.randn(3, 5, 23, dtype=dtype, device=device))
    dy = STRIDED[name](torch.randn(3, 5, 19, dtype=dtype, device=device))
    bias = torch.randn(19, dtype=dtype, device=device)
    for got, want in zip(
        products(bsr, x, dy, bias), products(bsr, x.contiguous(), dy.contiguous(), bias), strict=True
    ):
        assert got.is_contiguous() and torch.equal(got, want)


def test_rows_by_feature_that_are_not_even_are_copied(device):
    """(2, 3, K) out of 5 rows each: no one distance leads from row to row."""
    bsr = random_bsr((19, 23), (4, 3), 0.5, device=device)
    x = torch.randn(23, 10, device=device).t().as_strided((2, 3, 23), (5, 1, 10))
    before = rarefy.force_impl("cpu:ref,cuda:simt" if device == "cuda" else "cpu:ref")
    try:
        got, want = (ops.bsr_linear(i, *bsr.operands, None, *bsr.shape) for i in (x, x.contiguous()))
    finally:
        rarefy.force_impl(before)
    assert torch.equal(got, want)


def test_the_bias_gradient_of_strided_rows(device):
    bsr = random_bsr((8, 12), (4, 4), 0.5, device=device)
    dy = torch.randn(5, 11, device=device)[:, :8]
    backward = torch.ops.rarefy._bsr_linear_backward
    *_, dbias = backward(dy, None, None, bsr.plan, 4, 4, 8, 12, True)
    torch.testing.assert_close(dbias, dy.sum(0))


@pytest.mark.parametrize("block_shape", [(4, 4), (64, 64), (128, 1)])
@pytest.mark.parametrize("tokens", [5, 40])
def test_what_lies_between_rows_is_not_read(block_shape, tokens, device):
    """Copies of whole boxes end where rows do, not at the next multiple of 16 bytes."""
    layer = rarefy.BlockSparseLinear(
        236, 200, density=0.6, block_shape=block_shape, device=device, dtype=torch.bfloat16
    )
    wide = torch.full((tokens, 240), torch.nan, device=device, dtype=torch.bfloat16)
    x = wide[:, :236]
    x.normal_()
    x.requires_grad_()
    dy = torch.randn(tokens, 200, device=device, dtype=torch.bfloat16)
    y = layer(x)
    dx, dvalues = torch.autograd.grad(y, (x, layer.weight.values), dy)
    assert y.isfinite().all() and dx.isfinite().all() and dvalues.isfinite().all()
    want = x.double() @ layer.weight.to_dense().double().T + layer.bias.double()
    torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_by_feature_are_read_in_place(dtype, device):
    """A kernel of any layout reads x.t() as it is, with the bits of a copy: memory of a copy is not there."""
    rows, features = 64, 2048
    bsr = random_bsr((4, features), (4, 8), 0.5, dtype=dtype, device=device)
    x = torch.randn(features, rows + 3, dtype=dtype, device=device)[:, :rows].t()
    before = rarefy.force_impl("cpu:ref,cuda:simt" if device == "cuda" else "cpu:ref")
    try:
        want = ops.bsr_linear(x.contiguous(), *bsr.operands, None, *bsr.shape)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        got = ops.bsr_linear(x, *bsr.operands, None, *bsr.shape)
        if device == "cuda":
            assert torch.cuda.max_memory_allocated() - held < x.nbytes // 2
    finally:
        rarefy.force_impl(before)
    assert got.is_contiguous() and torch.equal(got, want)


@pytest.mark.parametrize("block_shape", [(64, 64), (16, 16), (8, 8), (32, 1), (128, 1), (1, 1)])
@pytest.mark.parametrize("tokens", [24, 200, 203])
def test_matrices_by_feature_for_kernels_by_token(block_shape, tokens, device):
    """Turned on their way in, in any number of leading dimensions: the bits of a copy by token."""
    bsr = random_bsr((256, 192), block_shape, 0.5, dtype=torch.bfloat16, device=device)
    x = torch.randn(192, 2 * tokens, device=device).bfloat16().t()
    dy = torch.randn(256, 2 * tokens, device=device).bfloat16().t()
    bias = torch.randn(256, device=device).bfloat16()
    want = products(bsr, x.contiguous(), dy.contiguous(), bias)
    for shape in ((2 * tokens,), (2, tokens), (2, 1, tokens)):
        got = products(bsr, x.view(*shape, 192), dy.view(*shape, 256), bias)
        for its, whole in zip(got, want, strict=True):
            assert its.is_contiguous() and torch.equal(its.view_as(whole), whole)


@pytest.mark.parametrize("block_shape", [(128, 1), (64, 1)])
@pytest.mark.parametrize("tokens", [1000, 1001, 1002, 1028])
def test_lines_by_feature_that_begin_anywhere(block_shape, tokens, device):
    """Whether they are gathered from where they lie or are copied first, as many rows of W make it worth."""
    layer = rarefy.BlockSparseLinear(
        200, 15360, density=0.9, block_shape=block_shape, device=device, dtype=torch.bfloat16
    )
    x = torch.randn(200, tokens, device=device).bfloat16().t()
    with torch.no_grad():
        want = layer(x.contiguous())
        for by_feature in (x, torch.randn(200, tokens + 3, device=device).bfloat16()[:, 3:].t().copy_(x)):
            assert by_feature.stride(0) == 1 and torch.equal(layer(by_feature), want)
        dense = x.double() @ layer.weight.to_dense().double().T + layer.bias.double()
    torch.testing.assert_close(want.double(), dense, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("block_shape", [(128, 1), (64, 1)])
def test_tall_vectors_take_both_layouts(block_shape, device):
    """Where a machine has a kernel of their own, layers get it, for x by token and by feature."""
    layer = rarefy.BlockSparseLinear(
        136, 256, density=0.4, block_shape=block_shape, device=device, dtype=torch.bfloat16
    )
    with torch.no_grad():
        for tokens in (1, 8, 300):
            x = torch.randn(136, (tokens + 7) // 8 * 8, device=device).bfloat16()[:, :tokens].t()
            y = layer(x)
            assert y.is_contiguous()
            torch.testing.assert_close(y, layer(x.contiguous()), rtol=2**-7, atol=2**-6)
            dense = x.double() @ layer.weight.to_dense().double().T + layer.bias.double()
            torch.testing.assert_close(y.double(), dense, rtol=2**-7, atol=2**-6)
            # So does the weight gradient, with the bits of a copy.
            dy = torch.randn(tokens, 256, device=device).bfloat16()
            gradients = [
                ops.bsr_grad_weight(dy, i, layer.weight.pattern.plan, *block_shape, 256, 136, torch.bfloat16)
                for i in (x, x.contiguous())
            ]
            assert torch.equal(*gradients)
        if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
            assert rarefy.explain(layer, x.contiguous())["kernel"] == "sm90_tall"


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 0, 3), (4, 1, 2), (1, 1, 1)])
def test_any_leading_dimensions(leading, device):
    bsr = random_bsr((6, 10), (2, 5), 0.5, device=device)
    x, dy = torch.randn(*leading, 10, device=device), torch.randn(*leading, 6, device=device)
    y, dx, dw = products(bsr, x, dy, torch.zeros(6, device=device))
    assert y.shape == (*leading, 6) and dx.shape == (*leading, 10) and dw.shape == bsr.values.shape


@pytest.mark.parametrize("size", [(0, 8), (8, 0), (0, 0)])
def test_empty_weights(size, device):
    bsr = random_bsr(size, (4, 4), 1.0, device=device)
    x, dy, bias = (torch.ones(s, device=device) for s in [(3, size[1]), (3, size[0]), (size[0],)])
    y, dx, dw = products(bsr, x, dy, bias)
    assert torch.equal(y, bias.expand(3, -1)) and not dx.any() and dw.shape == (0, 4, 4)


def test_nan_and_infinity_pass_through(device):
    bsr = random_bsr((8, 8), (4, 4), 1.0, device=device)
    x = torch.ones(3, 8, device=device)
    x[0, 0], x[1, 5] = float("nan"), float("inf")
    y = ops.bsr_linear(x, *bsr.operands, None, 8, 8)
    assert y[0].isnan().all() and not y[1].isfinite().any() and y[2].isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fake_plan_has_the_size_of_the_real_one(case, device):
    n, k, r, c, density = case
    bsr = random_bsr((n, k), (r, c), density, device=device)
    real = ops.bsr_plan(bsr.crow, bsr.col, n, k, r, c)
    fake = ops.bsr_plan(bsr.crow.to("meta"), bsr.col.to("meta"), n, k, r, c)
    assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
    assert real.device.type == device and fake.device.type == "meta"


def test_a_plan_keeps_its_own_indices(device):
    """Indices that are overwritten later cannot send a kernel out of bounds."""
    bsr = random_bsr((2048, 1024), (4, 4), 0.1, device=device)
    x = torch.randn(2, 1024, device=device)
    before = ops.bsr_linear(x, *bsr.operands, None, *bsr.shape)
    bsr.col[1] = 2**31 - 1
    assert torch.equal(ops.bsr_linear(x, *bsr.operands, None, *bsr.shape), before)


def test_indices_written_while_a_plan_is_made():
    """What is checked is what is planned: a plan, or an error, and never a crash or a wild index."""
    rows = 2**20  # long enough for writes between the check of an index and its use
    crow, col = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            col[0] = 2**31 - 1
            col[0] = 0

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            with contextlib.suppress(ValueError):
                plan = ops.bsr_plan(crow, col, rows, 1, 1, 1)
                assert int(plan[8 + rows + 1]) == 0
    finally:
        stop.set()
        writer.join()


def test_one_row_that_is_not_contiguous(device):
    """Its row stride says nothing: only the stride of its elements does."""
    bsr = random_bsr((12, 8), (4, 4), 1.0, device=device)
    wide_x, wide_dy = torch.randn(4, 16, device=device), torch.randn(4, 24, device=device)
    for rows in (slice(0, 1), 0):
        x, dy, bias = wide_x[rows, ::2], wide_dy[rows, ::2], torch.zeros(12, device=device)
        got, want = products(bsr, x, dy, bias), products(bsr, x.clone(), dy.clone(), bias)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)


def test_scipy_agrees():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    bsr = random_bsr((24, 40), (4, 8), 0.4, dtype=torch.float64)
    w = scipy_sparse.bsr_array(tuple(t.numpy() for t in (bsr.values, bsr.col, bsr.crow)), shape=bsr.shape)
    x = np.random.default_rng(0).standard_normal((5, 40))
    y = ops.bsr_linear(torch.from_numpy(x), *bsr.operands, None, *bsr.shape)
    assert_within_bound(
        y, torch.from_numpy((w @ x.T).T.copy()), torch.from_numpy((abs(w) @ abs(x).T).T.copy()), 40
    )
