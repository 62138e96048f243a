"""sparse_conv2d in groups against F.conv2d, in every form of a weight; patterns in groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse as sp
from torch.nn import functional

import rarefy
from rarefy import BlockSparseConv2d, BsrPattern, sparse
from test_conv import geometry, size_of_pieces, whole  # noqa: F401

# (O, C, groups, block): few groups, many, depthwise, depthwise with four outputs of a channel.
CASES = [(8, 12, 2, (4, 3)), (8, 12, 4, (1, 1)), (12, 12, 3, (2, 4)), (6, 6, 6, (1, 1)), (24, 6, 6, (4, 1))]


def weight_of(
    o: int, c: int, groups: int, block: tuple[int, int], kernel=(1, 1), dtype=torch.float32, device="cpu"
) -> tuple[rarefy.BsrWeight, torch.Tensor]:
    """A weight of integers, (O, KH · KW · C / groups), half of it stored, and F.conv2d's."""
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    dense = whole(o, kernel[0] * kernel[1] * c // groups, dtype=dtype)
    weight = rarefy.BsrWeight.from_dense(dense, block_shape=block, density=0.5).to(device)
    return weight, dense_of(weight.to_dense().detach(), c // groups, kernel)


def dense_of(matrix: torch.Tensor, channels: int, kernel=(1, 1)) -> torch.Tensor:
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    return matrix.reshape(len(matrix), *kernel, channels).permute(0, 3, 1, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_groups_are_those_of_conv2d(device, geometry, case, layout, size_of_pieces):  # noqa: F811
    o, c, groups, _ = case
    weight, kernel = weight_of(*case, geometry["kernel_size"], device=device)
    x, bias = whole(2, c, 11, 13, device=device), whole(o, device=device)
    options = {name: value for name, value in geometry.items() if name != "kernel_size"} | {"groups": groups}
    want = functional.conv2d(x, kernel, bias, **options).relu()
    given = x if layout == "NCHW" else x.permute(0, 2, 3, 1).contiguous()
    options |= {"kernel_size": geometry["kernel_size"], "layout": layout, "activation": "relu"}
    with torch.no_grad():
        first = sparse.sparse_conv2d(given, weight, bias, **options)
    got = sparse.sparse_conv2d(given, weight, bias, **options)
    assert torch.equal(first, got) and got.requires_grad
    assert torch.equal(got if layout == "NCHW" else got.permute(0, 3, 1, 2), want)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_in_groups(device, case, kernel):
    o, c, groups, block = case
    weight, dense = weight_of(*case, kernel, torch.float64, device)
    matrix = sparse.SparseMatrix.on_pattern(weight.values, weight.pattern)
    x, bias = whole(2, c, 5, 6, dtype=torch.float64, device=device), whole(o, dtype=torch.float64)
    ours = [x.clone().requires_grad_(), weight.values, bias.to(device).requires_grad_()]
    theirs = [x.clone().requires_grad_(), dense.clone().requires_grad_(), bias.to(device).requires_grad_()]
    options = {"kernel_size": kernel, "padding": kernel // 2, "stride": 2, "groups": groups}
    y = sparse.sparse_conv2d(ours[0], matrix, ours[2], layout="NCHW", **options)
    del options["kernel_size"]
    want = functional.conv2d(*theirs, **options)
    assert torch.equal(y, want)
    dy = whole(*want.shape, dtype=torch.float64, device=device)
    (dx, values, db) = torch.autograd.grad(y, ours, dy)
    (want_dx, wanted, want_db) = torch.autograd.grad(want, theirs, dy)
    assert torch.equal(dx, want_dx) and torch.equal(db, want_db)
    wanted = wanted.permute(0, 2, 3, 1).flatten(1)
    mask = weight.block_mask()
    assert torch.equal(values, rarefy.BsrWeight.from_dense(wanted, block_shape=block, mask=mask).values)


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_derivatives_of_any_order_in_groups(device, case):
    weight, _ = weight_of(*case, 2, torch.float64, device)
    x = torch.randn(1, case[1], 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(case[0], dtype=torch.float64, device=device, requires_grad=True)

    def call(x, values, bias):
        matrix = sparse.SparseMatrix.on_pattern(values, weight.pattern)
        options = {"kernel_size": 2, "padding": 1, "groups": case[2], "layout": "NCHW"}
        return sparse.sparse_conv2d(x, matrix, bias, activation="gelu", **options)

    values = weight.values.detach()[:].requires_grad_()
    assert torch.autograd.gradcheck(call, (x, values, bias))
    assert torch.autograd.gradgradcheck(call, (x, values, bias))


@pytest.mark.filterwarnings("ignore:.*indices are not sorted")
def test_every_form_of_a_weight_in_groups():
    """Scipy's and torch's matrices, raw arrays in any order, blocks of one column in two dimensions."""
    weight, kernel = weight_of(12, 6, 3, (2, 1), 3)
    dense = weight.to_dense().detach()
    x = whole(2, 6, 7, 5)
    want = functional.conv2d(x, kernel, groups=3, padding=1)
    crow, col = weight.pattern.indices()
    values = weight.values.detach()
    csr, bsr = sp.csr_matrix(dense.numpy()), sp.bsr_matrix(dense.numpy(), blocksize=(4, 2))
    backwards = sp.csr_matrix((csr.data.copy(), csr.indices.copy(), csr.indptr), csr.shape)
    for first, end in zip(csr.indptr[:-1], csr.indptr[1:], strict=True):
        backwards.data[first:end] = csr.data[first:end][::-1]
        backwards.indices[first:end] = csr.indices[first:end][::-1]
    twice = (np.repeat(csr.data / 2, 2), np.repeat(csr.indices, 2), csr.indptr * 2)
    unsorted = (backwards.data, backwards.indices, backwards.indptr)
    forms = {
        "a matrix": sparse.SparseMatrix.on_pattern(values, weight.pattern),
        "a matrix that was not sorted": sparse.SparseMatrix(*unsorted, shape=csr.shape),
        "blocks": (values, col, crow),
        "blocks in two dimensions": (values.flatten(1), col.long(), crow.long()),
        "arrays": (csr.data, csr.indices, csr.indptr),
        "unsorted": unsorted,
        "twice": twice,
        "csr": csr,
        "bsr": bsr,
        "csc": csr.tocsc(),
        "coo": csr.tocoo(),
        "torch's csr": dense.to_sparse_csr(),
        "torch's bsr": dense.to_sparse_bsr((2, 2)),
    }
    for name, form in forms.items():
        for _ in range(3):  # arrays that come again
            y = sparse.sparse_conv2d(x, form, kernel_size=3, padding=1, groups=3, layout="NCHW")
            assert torch.equal(y, want), name


def test_a_matrix_keeps_what_its_groups_are():
    """One plan for all calls; values that are written to or replaced are those of the next call."""
    weight, _ = weight_of(8, 12, 2, (4, 3))
    matrix = sparse.SparseMatrix.on_pattern(weight.values.detach().clone(), weight.pattern)
    x = whole(2, 12, 5, 5)

    def check(matrix, groups=2):
        want = functional.conv2d(x, dense_of(matrix.to_dense(), 12 // groups), groups=groups)
        assert torch.equal(sparse.sparse_conv2d(x, matrix, groups=groups, layout="NCHW"), want)
        return matrix._in_groups

    with torch.no_grad():
        kept = check(matrix)
        assert kept is not None and kept.data is matrix.data and check(matrix) is kept
        assert kept.pattern is weight.pattern.in_groups(2)
        matrix.data.mul_(2)
        assert check(matrix) is kept
        matrix.data = matrix.data + 1
        assert check(matrix) is not kept
        assert (
            sparse.SparseMatrix.on_pattern(matrix.data, weight.pattern).pattern.in_groups(2) is kept.pattern
        )
        other, _ = weight_of(12, 12, 2, (1, 1))
        other = sparse.SparseMatrix.on_pattern(other.values.detach(), other.pattern)
        check(other)
        other.pattern.in_groups(3, 2)  # another convolution with the same matrix
        check(other)


def test_indices_that_are_written_to_in_groups():
    csr = sp.random(8, 6, 0.5, format="csr", dtype="f4", random_state=0)
    csr.sort_indices()
    matrix = sparse.SparseMatrix(csr.data, csr.indices, csr.indptr, shape=csr.shape, check="always")
    x = torch.randn(1, 4, 4, 12)
    before = sparse.sparse_conv2d(x, matrix, groups=2)
    csr.indices[:] = 5 - csr.indices
    with pytest.warns(UserWarning, match="not sorted"):
        after = sparse.sparse_conv2d(x, matrix, groups=2)
    want = functional.conv2d(x.permute(0, 3, 1, 2), dense_of(torch.from_numpy(csr.toarray()), 6), groups=2)
    torch.testing.assert_close(after.permute(0, 3, 1, 2), want)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("kernel", [1, 3])
def test_the_layers_weight_is_the_whole_matrix(kernel):
    """The layer stores all channels' columns: the same blocks in the same order."""
    weight, dense = weight_of(8, 12, 2, (4, 3), kernel)
    conv = torch.nn.Conv2d(12, 8, kernel, groups=2, bias=False)
    conv.weight.data = dense.contiguous()
    places = kernel * kernel
    pattern = weight.pattern.in_groups(2, places)
    layer = BlockSparseConv2d.from_dense(conv, block_shape=(4, 3), mask=pattern.mask())
    assert layer.weight.pattern == pattern and torch.equal(layer.weight.values, weight.values)
    x = whole(2, 12, 5, 5)
    whole_y = sparse.sparse_conv2d(x, layer.weight, kernel_size=kernel, layout="NCHW")
    assert torch.equal(sparse.sparse_conv2d(x, weight, kernel_size=kernel, groups=2, layout="NCHW"), whole_y)
    assert torch.equal(layer(x), whole_y)


def test_a_pattern_in_groups():
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    pattern = BsrPattern.from_mask(mask, shape=(8, 12), block_shape=(2, 3))
    assert pattern.in_groups(1) is pattern
    for places in (1, 2, 4):
        parts = mask.reshape(2, 2, places, 4 // places)
        want = torch.zeros(2, 2, places, 2, 4 // places, dtype=torch.bool)
        want[0, :, :, 0], want[1, :, :, 1] = parts[0], parts[1]
        got = pattern.in_groups(2, places)
        assert got.shape == (8, 24) and torch.equal(got.mask(), want.reshape(4, 8))
        assert pattern.in_groups(2, places) is got
        assert got == BsrPattern.from_mask(got.mask(), shape=(8, 24), block_shape=(2, 3))
    empty = BsrPattern.from_mask(torch.zeros(0, 4, dtype=torch.bool), shape=(0, 4), block_shape=(1, 1))
    assert empty.in_groups(2).shape == (0, 8)
    with pytest.raises(
        ValueError, match=r"\[BsrPattern.in_groups\] 3 groups of rows and 1 places must be cut"
    ):
        pattern.in_groups(3)
    with pytest.raises(ValueError, match=r"\[BsrPattern.in_groups\] groups must be at least 1; got 0"):
        pattern.in_groups(0)
    with pytest.raises(ValueError, match=r"places must be cut by blocks of \(2, 3\); got shape \(8, 12\)"):
        pattern.in_groups(2, 3)
    wide = BsrPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), shape=(2, 2**30), block_shape=(1, 2**29))
    with pytest.raises(ValueError, match="must be at most 2147483647"):
        wide.in_groups(2)


def test_autocast_in_groups(device):
    weight, dense = weight_of(8, 12, 2, (4, 3), 3, device=device)
    x = whole(2, 12, 5, 5, device=device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        y = sparse.sparse_conv2d(x, weight, kernel_size=3, groups=2, layout="NCHW")
    want = functional.conv2d(x, dense, groups=2)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("known", [False, True])
def test_groups_compile_and_export_whole(kernel, known):
    """Whether or not the matrix had its groups before; a graph leaves nothing behind."""
    weight, dense = weight_of(8, 12, 2, (4, 3), kernel)
    x = whole(2, 12, 6, 5)
    want = functional.conv2d(x, dense, groups=2)
    matrix = sparse.SparseMatrix.on_pattern(weight.values.detach(), weight.pattern)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sparse.sparse_conv2d(x, self.weight, kernel_size=kernel, groups=2, layout="NCHW")

    def call(x):
        return sparse.sparse_conv2d(x, matrix, kernel_size=kernel, groups=2, layout="NCHW")

    if known:
        assert torch.equal(call(x), want)
    for strict in (False, True):
        assert torch.equal(torch.export.export(Layer(), (x,), strict=strict).module()(x), want)
    for function in (call, Layer()):
        assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), want)
    given = x.clone().requires_grad_()
    y = torch.compile(Layer(), fullgraph=True, backend="aot_eager")(given)
    y.sum().backward()
    wanted = x.clone().requires_grad_()
    functional.conv2d(wanted, dense, groups=2).sum().backward()
    assert torch.equal(given.grad, wanted.grad)
    assert torch.equal(call(x), want) and torch.equal(Layer()(x), want)


@pytest.mark.parametrize(
    ("options", "shape", "block", "error", "text"),
    [
        ({"groups": 0}, (8, 6), (1, 1), ValueError, "groups must be at least 1; got 0"),
        ({"groups": 2.0}, (8, 6), (1, 1), TypeError, "groups must be an int; got 2.0"),
        ({"groups": True}, (8, 6), (1, 1), TypeError, "groups must be an int; got True"),
        ({"groups": 5}, (8, 6), (1, 1), ValueError, "groups must divide the 12 channels of x; got 5"),
        ({"groups": 3}, (8, 4), (1, 1), ValueError, "groups must divide the 8 rows of weight; got 3"),
        (
            {"groups": 2},
            (8, 12),
            (1, 1),
            ValueError,
            "weight must have 6 columns, kernel places times channels of a group; got 12 for 12 channels",
        ),
        (
            {"groups": 2},
            (16, 6),
            (16, 1),
            ValueError,
            r"block_shape must divide the 8 × 6 channels of a group; got \(16, 1\)",
        ),
        (
            {"groups": 2, "kernel_size": 2},
            (8, 24),
            (4, 4),
            ValueError,
            r"block_shape must divide the 4 × 6 channels of a group; got \(4, 4\)",
        ),
    ],
)
def test_wrong_groups(options, shape, block, error, text):
    mask = torch.ones(-(-shape[0] // block[0]), -(-shape[1] // block[1]), dtype=torch.bool)
    pattern = BsrPattern.from_mask(mask, shape=shape, block_shape=block)
    matrix = sparse.SparseMatrix.on_pattern(torch.ones(pattern.nnzb, *block), pattern)
    with pytest.raises(error, match=rf"^\[sparse_conv2d\] {text}$"):
        sparse.sparse_conv2d(torch.randn(1, 5, 5, 12), matrix, **options)


def test_indices_outside_of_a_group():
    """What an array may reach are the columns of a group."""
    arrays = (torch.ones(2), torch.tensor([1, 6]), torch.tensor([0, 1, 2]))
    with pytest.raises(
        ValueError, match=r"\[sparse_conv2d\] indices must be in \[0, 6\); got indices\[1\]=6"
    ):
        sparse.sparse_conv2d(torch.randn(1, 5, 5, 12), arrays, groups=2)
