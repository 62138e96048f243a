"""The three products and bsr_plan: values, shapes, strides, errors, threads and forced implementations."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

import rarefy
from helpers import assert_within_bound, random_bsr, small_integers
from rarefy import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# out, in, block rows, block cols, density: whole blocks, odd edges, CSR, one huge block, no block, all.
CASES = [
    (64, 96, 16, 16, 0.4),
    (33, 47, 4, 1, 0.5),
    (37, 29, 5, 3, 0.5),
    (20, 30, 1, 1, 0.2),
    (7, 5, 32, 32, 1.0),
    (48, 64, 8, 4, 0.0),
    (40, 24, 4, 8, 1.0),
]
IDS = ["x".join(map(str, case)) for case in CASES]


def products(bsr, x, dy, bias):
    """All three ops on one weight."""
    return (
        ops.bsr_linear(x, *bsr.operands, bias, *bsr.shape),
        ops.bsr_grad_input(dy, *bsr.operands, *bsr.shape),
        ops.bsr_grad_weight(dy, x, bsr.plan, *bsr.block_shape, *bsr.shape),
    )


def expected(bsr, x, dy, bias):
    """(result, magnitude, terms) of each product, from dense float64 matrices."""
    w, x, dy, b = bsr.dense(), x.double(), dy.double(), bias.double()
    stored = bsr.scatter(torch.ones_like(bsr.values)).double()
    rows_x, rows_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dw = rows_dy.T @ rows_x
    dw_magnitude = rows_dy.abs().T @ rows_x.abs()
    return (
        (x @ w.T + b, x.abs() @ w.abs().T + b.abs(), stored.sum(1) + 1),
        (dy @ w, dy.abs() @ w.abs(), stored.sum(0)),
        (bsr.gather(dw), bsr.gather(dw_magnitude), len(rows_x)),
    )


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


# Plans -------------------------------------------------------------------------------------------


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


# Errors ------------------------------------------------------------------------------------------


def _int32(*items):
    return torch.tensor(items, dtype=torch.int32)


GOOD = {
    "x": torch.ones(2, 8),
    "values": torch.ones(3, 4, 4),
    "plan": ops.bsr_plan(_int32(0, 2, 3), _int32(0, 1, 1), 8, 8, 4, 4),
    "bias": torch.ones(8),
    "out_features": 8,
    "in_features": 8,
}
# What is wrong, the changed arguments, the error and what its message must say.
BAD = {
    "values 2-d": ({"values": torch.ones(3, 16)}, ValueError, r"values.*\(nnzb, .*; got shape \(3, 16\)"),
    "values 4-d": ({"values": torch.ones(3, 4, 4, 1)}, ValueError, r"values.*; got shape \(3, 4, 4, 1\)"),
    "values count": ({"values": torch.ones(2, 4, 4)}, ValueError, "plan must have 20 elements.*; got 23"),
    "values block of 0": ({"values": torch.ones(3, 0, 4)}, ValueError, "block_shape must be at least 1"),
    "values strided": ({"values": torch.ones(3, 4, 8)[..., ::2]}, ValueError, "values must be contiguous"),
    "values float64": (
        {"values": torch.ones(3, 4, 4).double()},
        TypeError,
        "values must have the dtype of x, float32, or be bfloat16 or float16; got float64",
    ),
    "values narrower than float64": (
        {"x": torch.ones(2, 8).double(), "values": torch.ones(3, 4, 4).half()},
        TypeError,
        "values must have the dtype of x, float64; got float16",
    ),
    "values int8": ({"values": torch.ones(3, 4, 4).char()}, TypeError, "values must be float.*; got int8"),
    "values None": ({"values": None}, TypeError, "values must be a tensor; got None"),
    "x columns": ({"x": torch.ones(2, 7)}, ValueError, r"x's last dim.*in_features=8; got shape \(2, 7\)"),
    "x 0-d": ({"x": torch.ones(())}, ValueError, r"x's last dimension.*got shape \(\)"),
    "x int64": ({"x": torch.ones(2, 8).long()}, TypeError, "x must be float64.*; got int64"),
    "x bfloat16": ({"x": torch.ones(2, 8).bfloat16()}, TypeError, "values.*bfloat16.*; got float32"),
    "x complex": ({"x": torch.ones(2, 8, dtype=torch.complex64)}, TypeError, "x must be float64.*; got"),
    "x None": ({"x": None}, TypeError, "x must be a tensor; got None"),
    "bias size": ({"bias": torch.ones(7)}, ValueError, r"bias.*out_features=8.*got shape \(7,\)"),
    "bias 2-d": ({"bias": torch.ones(1, 8)}, ValueError, r"bias.*got shape \(1, 8\)"),
    "bias dtype": ({"bias": torch.ones(8).half()}, TypeError, "bias.*float32; got float16"),
    "bias strided": ({"bias": torch.ones(16)[::2]}, ValueError, "bias must be contiguous"),
    "out_features": ({"out_features": 9, "bias": None}, ValueError, "plan must have 24 elements.*; got 23"),
    "out_features in the edge": (
        {"out_features": 7, "bias": None},
        ValueError,
        r"plan must be made by bsr_plan for shape \(7, 8\).*; got a plan for shape \(8, 8\)",
    ),
    "out_features negative": ({"out_features": -8, "bias": None}, ValueError, "must not be negative"),
    "in_features": ({"in_features": 9, "x": torch.ones(2, 9)}, ValueError, "plan must have 24 elements"),
    "in_features small": (
        {"in_features": 4, "x": torch.ones(2, 4)},
        ValueError,
        r"stored blocks must be in \[0, 2\]; got 3",
    ),
    "out_features huge": ({"out_features": 2**40, "bias": None}, ValueError, "at most 2147483647"),
    "plan float": ({"plan": torch.ones(23)}, TypeError, "plan must be int32; got float32"),
    "plan int64": ({"plan": torch.ones(23).long()}, TypeError, r"plan must be int32; got int64; convert"),
    "plan None": ({"plan": None}, TypeError, "plan must be a tensor; got None"),
    "plan 2-d": ({"plan": _int32(*range(23))[None]}, ValueError, r"plan .* 1 dim.*got shape \(1, 23\)"),
    "plan strided": ({"plan": _int32(*range(46))[::2]}, ValueError, "plan must be contiguous"),
    "plan empty": ({"plan": _int32()}, ValueError, "plan must have 23 elements for this pattern; got 0"),
    "plan length": ({"plan": _int32(*range(22))}, ValueError, "plan must have 23 elements.*; got 22"),
    "plan of zeros": ({"plan": torch.zeros(23, dtype=torch.int32)}, ValueError, "got something else"),
    "plan averaged": (
        {"plan": (ops.bsr_plan(_int32(0, 2, 3), _int32(0, 1, 1), 8, 8, 4, 4) * 0.5).int()},
        ValueError,
        "plan must be made by bsr_plan",
    ),
    "plan of another block shape": (
        {"plan": ops.bsr_plan(_int32(0, 2, 3), _int32(0, 1, 1), 8, 8, 5, 4)},
        ValueError,
        r"block_shape \(4, 4\), 3 blocks; got a plan .* block_shape \(5, 4\), 3 blocks",
    ),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
ENTRIES = {
    "module": ops.bsr_linear,
    "packet": torch.ops.rarefy.bsr_linear,
    "overload": torch.ops.rarefy.bsr_linear.default,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name, mode, entry):
    changed, error, message = BAD[name]
    arguments = GOOD | changed
    x = arguments["x"]
    if mode == "grad" and isinstance(x, torch.Tensor) and x.is_floating_point():
        arguments["x"] = x.clone().requires_grad_()
    with MODES[mode](), pytest.raises(error, match=message) as caught:
        ENTRIES[entry](**arguments)
    assert type(caught.value) is error and str(caught.value).startswith("[bsr_linear] ")


def _plan_error(crow=(0, 2, 3), col=(0, 1, 1), size=(8, 8), block_shape=(4, 4)):
    crow, col = (t if t is None or isinstance(t, torch.Tensor) else _int32(*t) for t in (crow, col))
    return lambda: ops.bsr_plan(crow, col, *size, *block_shape)


def _grad_weight_error(dy=GOOD["x"], x=GOOD["x"], plan=GOOD["plan"], block_shape=(4, 4)):
    return lambda: ops.bsr_grad_weight(dy, x, plan, *block_shape, 8, 8)


OTHER_ERRORS = {
    "bsr_grad_input": {
        "size": (
            lambda: ops.bsr_grad_input(torch.ones(2, 7), GOOD["values"], GOOD["plan"], 8, 8),
            ValueError,
            "grad_output's last dimension must be out_features=8",
        ),
        "dtype": (
            lambda: ops.bsr_grad_input(torch.ones(2, 8).double(), GOOD["values"], GOOD["plan"], 8, 8),
            TypeError,
            "values must have the dtype of grad_output, float64; got float32",
        ),
    },
    "bsr_grad_weight": {
        "rows": (_grad_weight_error(x=torch.ones(3, 8)), ValueError, r"x must have 2 rows.*; got 3"),
        "block": (_grad_weight_error(block_shape=(0, 4)), ValueError, "block_shape must be at least 1"),
        "dtype": (
            _grad_weight_error(x=torch.ones(2, 8).half()),
            TypeError,
            "x must have the dtype of grad_output, float32; got float16",
        ),
        "block beyond the matrix": (
            _grad_weight_error(plan=_int32(*range(15)), block_shape=(2**31 - 1, 2**31 - 1)),
            ValueError,
            r"block_shape must be at most \(256, 256\)",
        ),
        "plan": (_grad_weight_error(plan=GOOD["plan"][1:]), ValueError, "plan must have 20 elements.*got 22"),
        "narrow dtype": (
            lambda: ops.bsr_grad_weight(GOOD["x"], GOOD["x"], GOOD["plan"], 4, 4, 8, 8, torch.float64),
            TypeError,
            "values must have the dtype of x, float32, or be bfloat16 or float16; got float64",
        ),
        "dtype int8": (
            lambda: ops.bsr_grad_weight(GOOD["x"], GOOD["x"], GOOD["plan"], 4, 4, 8, 8, torch.int8),
            TypeError,
            "dtype must be float64, float32, bfloat16 or float16; got int8",
        ),
        "plan float": (_grad_weight_error(plan=torch.ones(23)), TypeError, "plan must be int32; got float32"),
    },
    "bsr_plan": {
        "crow first": (_plan_error((1, 2, 3)), ValueError, r"crow_indices\[0\] must be 0; got 1"),
        "crow last": (_plan_error((0, 2, 2)), ValueError, r"crow_indices\[2\].*3; got 2"),
        "crow decreases": (_plan_error((0, 2, 1)), ValueError, r"crow_indices\[2\]=1 after"),
        "crow negative": (_plan_error((0, -1, 3)), ValueError, r"crow_indices\[1\]=-1"),
        "crow short": (_plan_error((0, 3)), ValueError, "crow_indices must have 3 elements.*got 2"),
        "crow empty": (_plan_error(()), ValueError, "crow_indices must have 3 elements.*got 0"),
        "crow 2-d": (_plan_error(_int32(0, 2, 3)[None]), ValueError, r"crow_indices.*1 dim.*\(1, 3\)"),
        "crow int64": (_plan_error(torch.tensor([0, 2, 3])), TypeError, "crow_indices.*int64; convert"),
        "crow float": (_plan_error(torch.ones(3)), TypeError, "crow_indices must be int32; got float32"),
        "crow None": (_plan_error(None), TypeError, "crow_indices must be a tensor; got None"),
        "crow strided": (_plan_error(_int32(0, 9, 2, 9, 3)[::2]), ValueError, "crow_indices.*contiguous"),
        "col out of range": (_plan_error(col=(0, 2, 1)), ValueError, r"col_indices\[1\]=2 out of range"),
        "col negative": (_plan_error(col=(-1, 1, 1)), ValueError, r"col_indices\[0\]=-1 out of range"),
        "col unsorted": (_plan_error(col=(1, 0, 1)), ValueError, r"sorted.*col_indices\[1\]=0 after 1"),
        "col duplicate": (_plan_error(col=(1, 1, 1)), ValueError, r"distinct.*col_indices\[1\]=1 after 1"),
        "col short": (_plan_error(col=(0, 1)), ValueError, r"crow_indices\[2\].* 2; got 3"),
        "col int64": (_plan_error(col=torch.tensor([0, 1, 1])), TypeError, "col_indices.*int64"),
        "col None": (_plan_error(col=None), TypeError, "col_indices must be a tensor; got None"),
        "block": (
            _plan_error((0,), (), (0, 0), (1, -1)),
            ValueError,
            r"block_shape must be at least 1 in each dimension; got \(1, -1\)",
        ),
        "size": (_plan_error(size=(-8, 8)), ValueError, r"shape must not be negative; got \(-8, 8\)"),
    },
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OTHER_ERRORS for name in OTHER_ERRORS[op]])
def test_bad_input_of_the_other_ops_is_named(op, name):
    call, error, message = OTHER_ERRORS[op][name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error and str(caught.value).startswith(f"[{op}] ")


@pytest.mark.parametrize("x", [[1.0] * 8, np.ones(8, np.float32), 1.0], ids=["list", "array", "float"])
def test_what_is_no_tensor_is_a_type_error_as_for_dense_layers(x):
    layer = rarefy.BlockSparseLinear(8, 8, density=1.0, block_shape=(4, 4))
    for call in (lambda: ops.bsr_linear(**GOOD | {"x": x}), lambda: layer(x), lambda: layer.to_dense()(x)):
        with pytest.raises(TypeError):
            call()


def test_one_row_that_is_not_contiguous(device):
    """Its row stride says nothing: only the stride of its elements does."""
    bsr = random_bsr((12, 8), (4, 4), 1.0, device=device)
    wide_x, wide_dy = torch.randn(4, 16, device=device), torch.randn(4, 24, device=device)
    for rows in (slice(0, 1), 0):
        x, dy, bias = wide_x[rows, ::2], wide_dy[rows, ::2], torch.zeros(12, device=device)
        got, want = products(bsr, x, dy, bias), products(bsr, x.clone(), dy.clone(), bias)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)


def test_inputs_on_two_devices_are_refused():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    arguments = GOOD | {"x": GOOD["x"].cuda()}
    with pytest.raises((TypeError, RuntimeError), match=r"\[bsr_linear\] .*(same device|build with CUDA)"):
        ops.bsr_linear(**arguments)


# Threads and implementations ---------------------------------------------------------------------


def test_results_do_not_depend_on_the_number_of_threads():
    bsr = random_bsr((256, 192), (8, 8), 0.3)
    x, dy, bias = torch.randn(100, 192), torch.randn(100, 256), torch.randn(256)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert rarefy.backend_info()["threads"] == count
            results.append(products(bsr, x, dy, bias))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.fixture
def forced():
    """Forces families until the test ends."""
    before = rarefy.backend_info()["forced_impl"] or ""
    yield rarefy.force_impl
    rarefy.force_impl(before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_work_is_shared_between_the_threads_of_torch():
    bsr = random_bsr((512, 512), (16, 16), 0.5)
    x, threads = torch.randn(512, 512), torch.get_num_threads()
    shares = []
    try:
        torch.set_num_threads(2)
        for _ in range(20):  # a busy machine may not let the second thread run at once
            whole, own = time.process_time(), time.thread_time()
            for _ in range(20):
                ops.bsr_linear(x, *bsr.operands, None, *bsr.shape)
            whole, own = time.process_time() - whole, time.thread_time() - own
            shares.append((whole - own) / whole)
            if shares[-1] > 0.25:
                return
    finally:
        torch.set_num_threads(threads)
    raise AssertionError(f"CPU time of other threads / all CPU time: {shares}")


@pytest.mark.parametrize("kernel_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["ref", "scalar", "avx2", "avx512"])
def test_forced_implementations(impl, kernel_dtype, forced):
    """force_impl takes effect, is reported, and gives exact integers."""
    forced(f"cpu:{impl}")
    info = rarefy.backend_info((4, 4))
    names = {"f32": torch.float32, "bf16": torch.bfloat16}
    rows = [r for r in info["kernels"] if r["device"] == "cpu" and names.get(r["dtype"]) == kernel_dtype]
    if any(row["kernel"] is None for row in rows):
        pytest.skip(f"this machine has no {impl}: {rows[0]['why']}")
    assert info["forced_impl"] == f"cpu:{impl}"
    assert all(row["kernel"].startswith(impl) and impl in row["why"] for row in rows)
    bsr = random_bsr((36, 20), (4, 4), 0.5, dtype=kernel_dtype, integers=True)
    x, dy, bias = (small_integers(*s).to(kernel_dtype) for s in [(9, 20), (9, 36), (36,)])
    for got, (want, *_) in zip(products(bsr, x, dy, bias), expected(bsr, x, dy, bias), strict=True):
        assert torch.equal(got.double(), want)


def test_errors_of_a_plan_speak_of_the_caller():
    with pytest.raises(ValueError, match=r"^\[mine\] crow_indices\[0\] must be 0; got 1"):
        ops.bsr_plan(_int32(1, 2, 3), _int32(0, 1, 1), 8, 8, 4, 4, caller="mine")
    with pytest.raises(TypeError, match=r"^\[mine\] crow_indices must be int32"):
        ops.bsr_plan(torch.ones(3), _int32(0, 1, 1), 8, 8, 4, 4, caller="mine")


def test_an_unknown_implementation_is_an_error(forced):
    with pytest.raises(RuntimeError, match=r"\[force_impl\] RAREFY_FORCE_IMPL .*cpu:ref.*; got \"abacus\""):
        forced("abacus")
    assert forced("") in ("", rarefy.backend_info()["forced_impl"] or "")


def test_the_environment_is_read_at_the_first_call():
    """An unknown family there is an error of every call, not of the import."""
    program = (
        "import torch, rarefy\n"
        "layer = rarefy.BlockSparseLinear(8, 8, block_shape=(4, 4))\n"
        "print(rarefy.explain(layer, torch.ones(9, 8))['kernel'])\n"
        "layer(torch.ones(9, 8))\n"
    )
    run = partial(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True)
    good = run(env={**os.environ, "RAREFY_FORCE_IMPL": "cpu:scalar"})
    assert good.returncode == 0 and good.stdout.strip() == "scalar_linear", good.stderr
    bad = run(env={**os.environ, "RAREFY_FORCE_IMPL": "abacus"})
    assert bad.returncode == 1 and "RAREFY_FORCE_IMPL must name families" in bad.stderr, bad.stderr


def test_explain_names_what_runs(forced):
    """Every candidate with its reason, and the configuration of the chosen one."""
    forced("")
    layer = rarefy.BlockSparseLinear(64, 48, density=0.5, block_shape=(4, 4))
    many, few = (rarefy.explain(layer, torch.ones(m, 64)) for m in (512, 1))
    assert many["kernel"].endswith("_linear") and "vectors=" in many["config"] and many["workspace"] > 0
    assert "512 tokens, f32 -> f32, bias, cpu" in many["problem"] and "48x64 block 4x4" in many["problem"]
    assert [c["chosen"] for c in many["candidates"]].count(True) == 1
    assert many["candidates"][-1] == {
        "kernel": "ref_linear", "family": "ref", "chosen": False, "why_not": ""
    }  # fmt: skip
    assert few["kernel"] != many["kernel"] or "few" not in "".join(c["kernel"] for c in few["candidates"])
    assert rarefy.explain(layer.weight, torch.ones(3, 2, 64), op="grad_input")["kernel"].endswith(
        "_grad_input"
    )
    assert "stride 70" in rarefy.explain(layer, torch.ones(9, 70)[:, :64])["problem"]
    before = rarefy.force_impl("cpu:ref")
    try:  # which reads x by feature; the CPU's own kernels get a copy
        assert "by feature" in rarefy.explain(layer, torch.ones(64, 9).t())["problem"]
    finally:
        rarefy.force_impl(before)
    assert "by feature" not in rarefy.explain(layer, torch.ones(64, 9).t())["problem"]
    with pytest.raises(
        ValueError, match=r"\[explain\] x's last dimension must be in_features=64; got \(2, 3\)"
    ):
        rarefy.explain(layer, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\[explain\] op must be"):
        rarefy.explain(layer, torch.ones(2, 64), op="matmul")
    with pytest.raises(TypeError, match=r"\[explain\] layer must be a BlockSparseLinear"):
        rarefy.explain(torch.nn.Linear(64, 48), torch.ones(2, 64))


def test_calls_from_several_python_threads():
    from concurrent.futures import ThreadPoolExecutor

    bsr = random_bsr((128, 96), (8, 8), 0.4)
    inputs = [torch.randn(17, 96) for _ in range(16)]
    want = [ops.bsr_linear(x, *bsr.operands, None, *bsr.shape) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = pool.map(lambda x: ops.bsr_linear(x, *bsr.operands, None, *bsr.shape), inputs * 4)
        assert all(torch.equal(g, w) for g, w in zip(got, itertools.cycle(want), strict=False))


def test_scipy_agrees():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    bsr = random_bsr((24, 40), (4, 8), 0.4, dtype=torch.float64)
    w = scipy_sparse.bsr_array(tuple(t.numpy() for t in (bsr.values, bsr.col, bsr.crow)), shape=bsr.shape)
    x = np.random.default_rng(0).standard_normal((5, 40))
    y = ops.bsr_linear(torch.from_numpy(x), *bsr.operands, None, *bsr.shape)
    assert_within_bound(
        y, torch.from_numpy((w @ x.T).T.copy()), torch.from_numpy((abs(w) @ abs(x).T).T.copy()), 40
    )


@pytest.mark.parametrize("op", ["linear", "grad_input", "grad_weight", "backward"])
def test_freed_storage_is_an_error(op):
    bsr = random_bsr((8, 12), (4, 4), 0.5, dtype=torch.float32)
    dy, x, bias = torch.ones(5, 8), torch.ones(5, 12), torch.ones(8)
    values, plan = bsr.values.detach(), bsr.plan.clone()
    sizes = (8, 12)
    run, arguments = {
        "linear": (ops.bsr_linear, {"x": x, "values": values, "plan": plan, "bias": bias}),
        "grad_input": (ops.bsr_grad_input, {"grad_output": dy, "values": values, "plan": plan}),
        "grad_weight": (ops.bsr_grad_weight, {"grad_output": dy, "x": x, "plan": plan}),
        "backward": (
            torch.ops.rarefy._bsr_linear_backward,
            {"grad_output": dy, "x": x, "values": values, "plan": plan},
        ),
    }[op]
    rest = {"grad_weight": (4, 4, *sizes), "backward": (4, 4, *sizes, True)}.get(op, sizes)
    run(*arguments.values(), *rest)
    for name, tensor in arguments.items():
        freed = tensor.clone()
        freed.untyped_storage().resize_(0)
        call = arguments | {name: freed}
        with pytest.raises(ValueError, match=rf"{name} must point to its elements; got a null pointer"):
            run(*call.values(), *rest)


def test_gradients_want_as_many_rows_on_both_sides():
    bsr = random_bsr((8, 12), (4, 4), 0.5, dtype=torch.float32)
    x, dy = torch.ones(5, 12), torch.ones(4, 8)
    message = "x must have 4 rows, like grad_output; got 5"
    with pytest.raises(ValueError, match=rf"\[bsr_grad_weight\] {message}"):
        ops.bsr_grad_weight(dy, x, bsr.plan, 4, 4, 8, 12)
    with pytest.raises(ValueError, match=rf"\[bsr_linear_backward\] {message}"):
        torch.ops.rarefy._bsr_linear_backward(dy, x, None, bsr.plan, 4, 4, 8, 12, False)
