"""Sums, slices and joins of matrices: recorded and not, in graphs, and in every mode of derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from rarefy import sparse
from rarefy.sparse import SparseMatrix
from sparse_matrices import FLOATS, INTEGERS, csr, random_blocks

BLOCKS = [None, (4, 2), (1, 3)]


def matrix_of(block, rows=6, columns=8, density=0.5, dtype=torch.float32):
    """A matrix of whole numbers, and the same dense."""
    if block is None:
        arrays, dense = csr(rows, columns, density, dtype)
    else:
        arrays, dense = random_blocks(rows, columns, *block, density, dtype)
    return SparseMatrix(*arrays, shape=tuple(dense.shape)), dense


def results(a, b):
    """Of all that changes where matrices store."""
    (n, k), (r, c) = a.shape, a.block_shape
    return [
        a + b,
        a[2 * r : n - r],
        a[r:, c : k - 2 * c],
        a[:, 3 * c :],
        a[n:],
        sparse.sparse_concat([a, b, a[:0]]),
        sparse.sparse_concat([a, b, a[:, :0]], dim=1),
    ]


def wanted(a, b, block):
    (n, k), (r, c) = a.shape, block or (1, 1)
    parts = [a + b, a[2 * r : n - r], a[r:, c : k - 2 * c], a[:, 3 * c :], a[n:]]
    return [*parts, torch.cat((a, b)), torch.cat((a, b), dim=1)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_results_are_exact_recorded_or_not(device, block, dtype):
    """Whole numbers, in every dtype; what autograd records goes another way, to the same bits and pattern."""
    torch.manual_seed(0)
    (a, dense_a), (b, dense_b) = (matrix_of(block, dtype=dtype) for _ in range(2))
    a, b = a.to(device), b.to(device)
    plain = results(a, b)
    for got, want in zip(plain, wanted(dense_a, dense_b, block), strict=True):
        assert got.dtype == dtype
        assert got.format == a.format
        assert torch.equal(got.to_dense().cpu(), want)
    assert torch.equal((a + dense_b.to(device)).cpu(), dense_a + dense_b)
    if dtype in FLOATS:
        recorded = results(SparseMatrix.on_pattern(a.data.clone().requires_grad_(), a.pattern), b)
        for got, want in zip(recorded, plain, strict=True):
            assert got.data.requires_grad
            assert torch.equal(got.data, want.data)
            assert got.pattern == want.pattern


@pytest.mark.parametrize("block", BLOCKS)
def test_derivatives_of_all_orders_and_modes(device, block):
    torch.manual_seed(0)
    a, b = (matrix_of(block, dtype=torch.float64)[0].to(device) for _ in range(2))
    dense = torch.randn(tuple(a.shape), dtype=torch.float64, device=device)

    def datas(x, y):
        left, right = SparseMatrix.on_pattern(x, a.pattern), SparseMatrix.on_pattern(y, b.pattern)
        return [m.data.square().sum() for m in results(left, right)] + [(left + dense).square().sum()]

    leaves = tuple(torch.randn_like(m.data).requires_grad_() for m in (a, b))
    assert torch.autograd.gradcheck(datas, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(datas, leaves)
    tangents = [torch.randn_like(leaf) for leaf in leaves]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(leaves, tangents, strict=True)]
        got = [forward_ad.unpack_dual(y).tangent for y in datas(*duals)]
    pushed = torch.func.jvp(datas, tuple(leaf.detach() for leaf in leaves), tuple(tangents))[1]
    torch.testing.assert_close(got, pushed)


class Builds(torch.nn.Module):
    """A product with matrices that a graph makes: sizes of all but the joined ones follow from indices."""

    def __init__(self, block):
        super().__init__()
        self.a, self.b = (matrix_of(block)[0] for _ in range(2))

    def forward(self, x):
        a, b = self.a, self.b
        n = a.shape[0]
        half = sparse.sparse_slice(a, slice(0, 2 * a.block_shape[0]))
        tall = sparse.sparse_concat([sparse.sparse_add(a, b), half])
        wide = sparse.sparse_concat([a, b], dim=1)
        return (
            sparse.spmm(tall, x),
            sparse.spmm(wide, torch.cat((x, x))),
            sparse.sparse_add(a, x[:1].new_ones(n, 1) @ x.T[:1]),
        )


@pytest.mark.parametrize("block", BLOCKS)
def test_sums_slices_and_joins_compile_and_export_whole(block):
    torch.manual_seed(0)
    model = Builds(block)
    x = torch.randn(model.a.shape[1], 3)
    with torch.no_grad():
        want = model(x)
        exported = torch.export.export(model, (x,))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for got in (exported.module()(x), compiled(x)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    model.a.data.requires_grad_()
    gradients = [torch.autograd.grad(sum(y.sum() for y in f(x)), model.a.data) for f in (model, compiled)]
    torch.testing.assert_close(*gradients)


def test_a_package_has_what_graphs_make(tmp_path):
    """AOTInductor's, whose sizes follow from indices that only its run sees."""
    torch.manual_seed(0)
    model = Builds((4, 2))
    x = torch.randn(model.a.shape[1], 3)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "sums.pt2"))
        got = torch._inductor.aoti_load_package(path)(x)
        torch.testing.assert_close(list(got), list(model(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [(1, 1), (4, 2)])
def test_opcheck_of_the_ops_behind(block):
    (a, _), (b, _) = (matrix_of(block) for _ in range(2))

    def of(matrix):
        return matrix.blocks(), matrix.pattern.row_plan, [*matrix.shape, *matrix.block_shape]

    ops, (n, k) = torch.ops.rarefy, a.shape
    torch.library.opcheck(ops._sparse_sum.default, (*of(a), *of(b)))
    torch.library.opcheck(ops._sum_with_dense.default, (torch.randn(n, k), *of(a)))
    torch.library.opcheck(ops._sparse_slice.default, (*of(a), [0, 2 * block[0], block[1], k]))
    for beside in (False, True):
        call = ([a.blocks(), b.blocks()], [of(m)[1] for m in (a, b)], of(a)[2] + of(b)[2], beside)
        torch.library.opcheck(ops._sparse_joined.default, call)
    torch.library.opcheck(ops._on_pattern.default, (*of(a), b.pattern.row_plan, b.pattern.nnzb))


def test_sums_keep_what_is_stored_alone():
    """NaN, infinities and the sign of zero; a stored zero stays stored."""
    alone = torch.tensor([-0.0, torch.inf, torch.nan, 0.0])
    a = SparseMatrix(alone, torch.tensor([0, 2, 4, 6]), torch.tensor([0, 4]), shape=(1, 8))
    b = SparseMatrix(alone, torch.tensor([1, 3, 5, 7]), torch.tensor([0, 4]), shape=(1, 8))
    assert (a + b).data.view(torch.int32).equal(alone.repeat_interleave(2).view(torch.int32))


def test_ops_refuse_plans_of_other_matrices():
    """The ops behind check what reaches them, whoever calls; what is a TypeError arrives as an IndexError."""
    (a, _), (b, _) = matrix_of(None), matrix_of(None, rows=5)
    ops = torch.ops.rarefy
    of_a, of_b = ((m.blocks(), m.pattern.row_plan, [*m.shape, 1, 1]) for m in (a, b))
    with pytest.raises(ValueError, match=r"\[sparse_add\] b must be 6 × 8 in blocks of 1 × 1.*; got 5 × 8"):
        ops._sparse_sum(*of_a, *of_b)
    with pytest.raises(IndexError, match="a and b must have one dtype"):
        ops._sparse_sum(*of_a, of_a[0].double(), *of_a[1:])
    with pytest.raises(ValueError, match=r"\[sparse_slice\] rows must be a range within 0 … 6; got 0 … 7"):
        ops._sparse_slice(*of_a, [0, 7, 0, 8])
    with pytest.raises(ValueError, match="range must be 4 numbers; got 3"):
        ops._sparse_slice(*of_a, [0, 6, 0])
    with pytest.raises(ValueError, match=r"\[sparse_concat\] matrices\[1\] must have 6 rows; got 5"):
        ops._sparse_joined([of_a[0], of_b[0]], [of_a[1], of_b[1]], of_a[2] + of_b[2], True)
    with pytest.raises(ValueError, match="as many plans as values; got 1"):
        ops._sparse_joined([of_a[0], of_b[0]], [of_a[1]], of_a[2], True)
    with pytest.raises(IndexError, match=r"matrices\[1\] must be of the first one's dtype"):
        ops._sparse_joined([of_a[0], of_a[0].double()], [of_a[1]] * 2, of_a[2] * 2, False)
    with pytest.raises(ValueError, match="dense must be 6 × 8, by rows; got 6 × 7"):
        ops._sum_with_dense(torch.ones(6, 7), *of_a)
    with pytest.raises(IndexError, match="dense must be of the dtype of values"):
        ops._sum_with_dense(torch.ones(6, 8).double(), *of_a)
    with pytest.raises(ValueError, match="blocks must be"):
        ops._on_pattern(*of_a, of_a[1], 3)
