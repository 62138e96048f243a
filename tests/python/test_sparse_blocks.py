"""Matrices in other blocks: `to_csr`, `to_bsr`, and what mixes blocks; scipy, derivatives, graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse as sp

import rarefy
from rarefy import BsrPattern, sparse
from rarefy.masks import to_blocks
from rarefy.sparse import SparseMatrix, blocks
from sparse_matrices import FLOATS, INTEGERS, NUMPY, random_blocks, whole

SHAPES = [((8, 12), (4, 2)), ((7, 11), (4, 2)), ((7, 11), (2, 3)), ((12, 9), None), ((5, 1), (1, 4))]
WANTED = [None, (1, 1), (2, 1), (4, 2), (4, 4), (3, 5), (8, 4)]


def matrix_of(shape, block, density=0.5, dtype=torch.float32):
    """A matrix, some of whose stored elements are zero, and the same dense; its blocks are padded."""
    grid = [-(-size // side) for size, side in zip(shape, block or (1, 1), strict=True)]
    pattern = BsrPattern.from_mask(torch.rand(*grid) < density, shape=shape, block_shape=block or (1, 1))
    dense = whole(*shape, dtype=dtype)
    data = to_blocks(dense, pattern.block_shape)[pattern.mask()].contiguous()
    matrix = SparseMatrix.on_pattern(data if block else data.flatten(), pattern)
    return matrix, matrix.to_dense()


def in_blocks(matrix, block):
    return matrix.to_csr() if block is None else matrix.to_bsr(block)


def stored(matrix):
    """Which elements of the matrix lie in stored blocks."""
    r, c = matrix.block_shape
    cells = matrix.pattern.mask().repeat_interleave(r, 0).repeat_interleave(c, 1)
    return cells[: matrix.shape[0], : matrix.shape[1]].cpu()


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_blocks_that_hold_something_stored_are_stored(device, shape, block, wanted):
    """Zeros that are stored stay, padding becomes no element, and what is padded is zero."""
    for density in (0.0, 0.3, 1.0):
        matrix, dense = matrix_of(shape, block, density)
        matrix.data.mul_(torch.rand_like(matrix.data) < 0.7)
        dense = matrix.to_dense()
        matrix = matrix.to(device)
        got = in_blocks(matrix, wanted)
        assert got.format == ("csr" if wanted is None else "bsr") and got.block_shape == (wanted or (1, 1))
        assert torch.equal(got.to_dense().cpu(), dense)
        elements = stored(matrix)
        mask = to_blocks(elements, got.block_shape).flatten(2).any(2)
        assert torch.equal(got.pattern.mask().cpu(), mask)
        assert (got.pattern.device, got.data.device) == (matrix.device,) * 2
        assert got.data.is_contiguous() and len(got.data) == got.pattern.nnzb
        # The plan that is made of indices, whole, is that of indices which were read and checked.
        read = BsrPattern(*got.pattern.indices(), shape=shape, block_shape=got.block_shape)
        assert torch.equal(got.pattern.plan, read.plan)
        checked = SparseMatrix(got.data, got.indices, got.indptr, shape=shape, check="trusted")
        assert torch.equal(checked.to_dense().cpu(), dense)
        if wanted is None:
            assert got.nnz == int(elements.sum())


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_dtype_moves_as_it_is(device, dtype):
    for block, wanted in (((4, 2), None), (None, (4, 2)), ((4, 2), (6, 4))):
        matrix, dense = matrix_of((9, 10), block, dtype=dtype)
        got = in_blocks(matrix.to(device), wanted)
        assert got.dtype == dtype and torch.equal(got.to_dense().cpu(), dense)


def test_a_matrix_in_such_blocks_is_itself(device):
    csr, bsr = (matrix_of((8, 12), block)[0].to(device) for block in (None, (4, 2)))
    assert csr.to_csr() is csr and bsr.to_bsr((4, 2)) is bsr and bsr.to_bsr([4, np.int64(2)]) is bsr
    single = csr.to_bsr((1, 1))
    assert single.format == "bsr" and single.pattern is csr.pattern
    assert single.to_csr().pattern is csr.pattern and torch.equal(single.to_csr().data, csr.data)


@pytest.mark.filterwarnings("ignore:.*not sorted")
def test_unsorted_repeated_and_rewritten_indices():
    data, indices = torch.arange(1.0, 6), torch.tensor([2, 0, 1, 1, 3])
    matrix = SparseMatrix(data, indices, torch.tensor([0, 2, 5]), shape=(2, 4), check="always")
    dense = torch.tensor([[2.0, 0, 1, 0], [0, 7, 0, 5]])
    for _ in range(2):
        got = matrix.to_bsr((2, 2))
        assert torch.equal(got.to_dense(), dense) and got.indices.tolist() == [0, 1]
        assert torch.equal(got.to_csr().to_bsr((1, 4)).to_dense(), dense)
        data.mul_(2)
        dense *= 2
    indices[:] = torch.tensor([0, 1, 0, 1, 1])
    assert torch.equal(matrix.to_bsr((2, 2)).to_dense()[:, 2:], torch.zeros(2, 2))
    assert matrix.to_bsr((2, 2)).indices.tolist() == [0]


def test_patterns_keep_where_blocks_go_of_the_last_two_shapes(monkeypatch):
    matrix, dense = matrix_of((8, 12), (4, 2))
    first = [matrix.to_csr().pattern, matrix.to_bsr((8, 4)).pattern]
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "_split", None)
        patched.setattr(blocks, "_merged", None)
        other = SparseMatrix.on_pattern(matrix.data * 2, matrix.pattern)
        again = other.to_csr(), other.to_bsr((8, 4))
    assert [each.pattern for each in again] == first
    assert all(a.pattern is b for a, b in zip(again, first, strict=True))
    assert all(torch.equal(each.to_dense(), 2 * dense) for each in again)
    with torch.inference_mode():  # what is found there serves gradients, too
        matrix.to_bsr((2, 2))
    leaf = matrix.data.clone().requires_grad_()
    SparseMatrix.on_pattern(leaf, matrix.pattern).to_bsr((2, 2)).data.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))
    assert list(matrix.pattern._in_other_blocks) == [(8, 4), (2, 2)]


def test_patterns_of_arrays_that_come_again_keep_nothing_more():
    """They are kept in so many bytes."""
    sparse.forget_arrays()
    (data, indices, indptr), dense = random_blocks(30, 40, 2, 2, 0.6)
    for _ in range(4):
        total = sparse.sparse_add((data, indices, indptr), SparseMatrix.of(sp.csr_array(dense.numpy())))
        assert torch.equal(total.to_dense(), 2 * dense)
    known = [each.pattern for each in sparse.recent._seen.values() if not isinstance(each, list)]
    assert known and not any("_in_other_blocks" in pattern.__dict__ for pattern in known)


@pytest.mark.parametrize("cells", [0, 1 << 40])
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_marked_and_sorted_places_are_the_same(monkeypatch, cells, shape, block):
    """Of grids that are small and large beside what is stored."""
    monkeypatch.setattr(blocks, "_CELLS", cells)
    for wanted in ((4, 4), (3, 5), (8, 1)):
        matrix, dense = matrix_of(shape, block)
        got = matrix.to_bsr(wanted)
        assert torch.equal(got.to_dense(), dense)
        assert torch.equal(got.pattern.mask(), to_blocks(stored(matrix), wanted).flatten(2).any(2))


def test_a_matrix_that_is_wide_and_almost_empty():
    """Neither memory nor time for its columns, nor for the places of its grid."""
    data, most = torch.tensor([1.0, 2, 3]), 2**31 - 1
    indices, indptr = torch.tensor([0, most - 1, most - 2]), torch.tensor([0, 2, 3])
    matrix = SparseMatrix(data, indices, indptr, shape=(2, most))
    got = matrix.to_bsr((2, 3))
    assert got.indices.tolist() == [0, (most - 2) // 3, (most - 1) // 3]
    back = got.to_csr()
    kept = back.data != 0
    assert back.data[kept].tolist() == [1, 2, 3] and back.indices[kept].tolist() == indices.tolist()


@pytest.mark.parametrize("dtype", ["f8", "f4", "i4", "i2", "i1"])
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_scipy_agrees_on_mixed_formats(dtype, data):
    """Whole numbers, exact; integers that wrap. Sizes may be none, blocks need not divide them."""
    n, k, m = (data.draw(st.integers(0, 9)) for _ in range(3))
    sides = st.tuples(st.integers(1, 4), st.integers(1, 4))
    formats = [data.draw(st.none() | sides) for _ in range(3)]
    seed, density = data.draw(st.integers(0, 99)), data.draw(st.sampled_from((0.0, 0.2, 0.7, 1.0)))
    wanted, dim = data.draw(sides), data.draw(st.integers(0, 1))
    (top, bottom), (left, right) = (sorted(data.draw(st.integers(0, z)) for _ in range(2)) for z in (n, k))
    torch.manual_seed(seed)
    kind = {name: dtype_ for dtype_, name in NUMPY.items()}[dtype]
    scale = 1 if dtype[0] == "f" else 15  # of numbers up to 8: products do not fit into int8
    ours = []
    for shape, block in zip(((n, k), (n, k), (k, m)), formats, strict=True):
        matrix, _ = matrix_of(shape, block, density, kind)
        ours.append(SparseMatrix.on_pattern(matrix.data * scale, matrix.pattern))
    a, b, c = ours
    theirs = [sp.csr_array(each.to_dense().numpy()) for each in ours]
    for matrix, want in zip(ours, theirs, strict=True):
        agree(matrix.to_csr(), want, "csr")
        agree(matrix.to_bsr(wanted), want, wanted)
        agree(matrix.to_bsr(wanted).to_csr().to_bsr(formats[0] or (1, 1)), want, formats[0] or (1, 1))
    agree(a + b, theirs[0] + theirs[1], kind_of(formats[0], formats[1]))
    joined = sparse.sparse_concat([a, b], dim)
    cut = formats[0] and a.shape[dim] % formats[0][dim]
    cut = (formats[0] or (1, 1))[dim]
    agree(joined, (sp.vstack, sp.hstack)[dim](theirs[:2]),
          "csr" if a.shape[dim] % cut else kind_of(formats[0], formats[1]))  # fmt: skip
    (r, s), (t, u) = formats[0] or (1, 1), formats[2] or (1, 1)
    outer = (r, u) if s == t and (formats[0] or formats[2]) else "csr"
    agree(a @ c, theirs[0] @ theirs[2], outer)
    part = a[top:bottom, left:right]
    agree(part, theirs[0][top:bottom, left:right], part.format if part.format == "csr" else a.block_shape)
    x = whole(k, 3, dtype=kind)
    assert np.array_equal(
        (part @ x[left:right]).numpy(), theirs[0][top:bottom, left:right] @ x[left:right].numpy()
    )


def kind_of(one, other):
    """What a sum of matrices in such blocks is in; None is CSR."""
    same = (one or (1, 1)) == (other or (1, 1))
    return (one or other or "csr") if same else "csr"


def agree(got, want, kind) -> None:
    """The same elements, in a format: "csr" or a block shape."""
    assert (got.format if got.format == "csr" else got.block_shape) == kind
    assert np.array_equal(got.to_dense().numpy(), want.toarray())


@pytest.mark.parametrize("blocky", [(4, 2), (3, 3)])
def test_scipys_own_blocks_are_the_same_arrays(blocky):
    """Where blocks divide the matrix, which scipy asks for: indices, pointers and data, zeros too."""
    rng = np.random.default_rng(0)
    w = sp.random_array((24, 36), density=0.1, format="csr", dtype="f4", rng=rng)
    w.data[::5] = 0
    theirs = w.tobsr(blocky)
    theirs.sort_indices()
    ours = SparseMatrix.of(w).to_bsr(blocky)
    for got, want in ((ours.to_scipy(), theirs), (ours.to_csr().to_scipy(), theirs.tocsr())):
        assert got.format == want.format
        for name in ("data", "indices", "indptr"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


# Sums, products, joins and slices ----------------------------------------------------------------------


def test_slices_that_cut_blocks_read_the_blocks_that_they_meet(device):
    matrix, dense = matrix_of((11, 14), (4, 3), 0.6)
    matrix = matrix.to(device)
    for rows in (slice(0, 4), slice(4, None), slice(1, 9), slice(2, 3), slice(5, 5), slice(-3, None)):
        for columns in (slice(None), slice(3, 12), slice(2, -1), slice(13, 14), slice(4, 4)):
            got = matrix[rows, columns]
            whole_blocks = all(
                at % side == 0 or at == size
                for piece, size, side in ((rows, 11, 4), (columns, 14, 3))
                for at in piece.indices(size)[:2]
            )
            assert got.format == ("bsr" if whole_blocks else "csr")
            assert torch.equal(got.to_dense().cpu(), dense[rows, columns])


def test_whatever_users_hold_mixes():
    a, b = (matrix_of((12, 8), block)[1] for block in (None, (4, 2)))
    weight = rarefy.BsrWeight.from_dense(a, block_shape=(4, 4), density=1.0)
    held = sp.csr_array(b.numpy())
    assert torch.equal(sparse.sparse_add(weight, held).to_dense(), a + b)
    assert torch.equal(sparse.sparse_add(held.tobsr((2, 2)), weight).to_dense(), a + b)
    assert torch.equal(sparse.sparse_concat([weight, held.tocoo()], 1).to_dense(), torch.cat((a, b), 1))
    assert torch.equal(sparse.sparse_matmul(weight, held.T).to_dense(), a @ b.T)
    assert torch.equal((SparseMatrix.of(held) + SparseMatrix.of(weight)).to_dense(), a + b)


def mixed(a, b):
    """Of a in blocks and b of other blocks, of one shape: all that mixes, but for products."""
    return [
        a.to_csr(),
        a.to_bsr((3, 4)),
        b.to_bsr((2, 2)),
        a + b,
        sparse.sparse_concat([a, b, a]),
        a[1:, 1:5],
    ]


@pytest.mark.parametrize("other", [None, (2, 1), (3, 3)])
def test_derivatives_of_all_orders_and_modes(device, other):
    a = matrix_of((7, 6), (4, 2), dtype=torch.float64)[0].to(device)
    b = matrix_of((7, 6), other, dtype=torch.float64)[0].to(device)
    # Padding is zero, whatever is tried.
    inside = []
    for matrix in (a, b):
        ones = SparseMatrix.on_pattern(torch.ones_like(matrix.data), matrix.pattern).to_csr()
        inside.append(in_blocks(ones, None if matrix.format == "csr" else matrix.block_shape).data)

    def matrices(*datas):
        triples = zip(datas, inside, (a, b), strict=True)
        return [SparseMatrix.on_pattern(data * ones, matrix.pattern) for data, ones, matrix in triples]

    def losses(x, y):
        return [matrix.data.square().sum() for matrix in mixed(*matrices(x, y))]

    def product(x, y):
        left, right = matrices(x, y)
        return (left @ right.T).data  # no forward mode, in equal blocks neither

    leaves = tuple(torch.randn_like(m.data).requires_grad_() for m in (a, b))
    for function in (losses, product):
        assert torch.autograd.gradcheck(function, leaves, check_forward_ad=function is losses)
        assert torch.autograd.gradgradcheck(function, leaves)
    point, tangents = tuple(v.detach() for v in leaves), tuple(torch.randn_like(v) for v in leaves)
    pushed = torch.func.jvp(losses, point, tangents)[1]
    pulled = torch.func.jacrev(losses, (0, 1))(*point)
    for got, row in zip(pushed, pulled, strict=True):
        torch.testing.assert_close(got, sum((g * t).sum() for g, t in zip(row, tangents, strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_16_bits_are_moved_alone(dtype):
    matrix, _ = matrix_of((9, 10), (4, 2), dtype=dtype)
    data = matrix.data.clone().requires_grad_()
    got = SparseMatrix.on_pattern(data, matrix.pattern).to_csr()
    got.to_bsr((3, 5)).data.backward(torch.ones_like(got.to_bsr((3, 5)).data))
    ones = SparseMatrix.on_pattern(torch.ones_like(got.data), got.pattern).to_bsr((4, 2)).data
    assert torch.equal(data.grad, ones)  # zero in the padding


# Graphs ------------------------------------------------------------------------------------------------


class Moves(torch.nn.Module):
    """Products with a matrix in other blocks, and with a sum of two in different ones."""

    def __init__(self, shape, block, wanted):
        super().__init__()
        self.a, self.b, self.wanted = matrix_of(shape, block)[0], matrix_of(shape, (2, 2))[0], wanted

    def forward(self, x):
        moved = self.a.to_csr() if self.wanted is None else self.a.to_bsr(self.wanted)
        return sparse.spmm(moved, x), sparse.spmm(sparse.sparse_add(moved, self.b), x)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("shape", "block", "wanted"),
    [((8, 12), (4, 2), None), ((7, 11), (4, 2), None), ((7, 11), None, (4, 2)), ((7, 11), (4, 2), (3, 4))],
)
def test_matrices_change_blocks_in_graphs(shape, block, wanted, before):
    """Whether a pattern knows where blocks go, or the graph finds it; it leaves nothing on the pattern."""
    model, x = Moves(shape, block, wanted), torch.randn(shape[1], 3)
    with torch.no_grad():
        want = model(x)
        if not before:
            for matrix in (model.a, model.b):
                matrix.pattern.__dict__.pop("_in_other_blocks", None)
        known = {id(m): m.pattern.__dict__.get("_in_other_blocks") for m in (model.a, model.b)}
        exported = [torch.export.export(model, (x,), strict=strict) for strict in (False, True)]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for got in (*(each.module()(x) for each in exported), compiled(x)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert known == {id(m): m.pattern.__dict__.get("_in_other_blocks") for m in (model.a, model.b)}
        torch.testing.assert_close(model(x), want)
    model.a.data.requires_grad_()
    gradients = [torch.autograd.grad(sum(y.sum() for y in f(x)), model.a.data) for f in (model, compiled)]
    torch.testing.assert_close(*gradients)


def test_the_default_backend_compiles_changes_of_blocks():
    model, x = Moves((7, 11), (4, 2), None), torch.randn(11, 3)
    with torch.no_grad():
        want = torch.compile(model, fullgraph=True)(x)  # first: nothing is known of the patterns
        torch.testing.assert_close(want, model(x))


# What is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "error", "text"),
    [
        ((0, 2), ValueError, r"block_shape\[0\] must be at least 1; got 0"),
        ((2, -1), ValueError, r"block_shape\[1\] must be at least 1; got -1"),
        ((2, 2.0), TypeError, r"block_shape\[1\] must be an int; got 2.0"),
        ((True, 2), TypeError, r"block_shape\[0\] must be an int; got True"),
        (4, TypeError, "block_shape must be a pair of ints; got 4"),
        ("44", TypeError, "block_shape must be a pair of ints; got '44'"),
        (None, TypeError, "block_shape must be a pair of ints; got None"),
        ((2, 2, 2), ValueError, r"block_shape must have 2 elements; got 3: \(2, 2, 2\)"),
        (
            (257, 1),
            ValueError,
            r"block_shape must be at most \(256, 256\), the shape rounded up .*\(257, 1\)",
        ),
        ((1, 2**31), ValueError, "shape and block_shape must be at most 2147483647"),
    ],
)
def test_wrong_block_shapes_are_named(block, error, text):
    for mine in (None, (4, 2)):
        with pytest.raises(error, match=rf"^\[SparseMatrix.to_bsr\] {text}"):
            matrix_of((8, 12), mine)[0].to_bsr(block)


def test_what_no_pattern_can_store_is_refused():
    """Before anything of that size is made."""
    n, k = 1 << 17, 1 << 15
    data = torch.zeros(1, dtype=torch.int8).expand(1, n, k)
    matrix = SparseMatrix(data, torch.tensor([0]), torch.tensor([0, 1]), shape=(n, k))
    with pytest.raises(
        ValueError, match=r"to_csr\] the matrix must store at most 2147483647 elements; got 42949"
    ):
        matrix.to_csr()
    with pytest.raises(
        ValueError, match=r"to_bsr\] .* at most 2147483647 blocks of \(2, 1\); got 2147483648"
    ):
        matrix.to_bsr((2, 1))


def test_a_matrix_without_indices_is_refused():
    weight = rarefy.BsrWeight.from_dense(torch.randn(8, 8), block_shape=(4, 4), density=0.5).to("meta")
    with pytest.raises(TypeError, match=r"\[SparseMatrix.to_csr\] the matrix must hold indices; got one on"):
        SparseMatrix.of(weight).to_csr()


def test_other_dtypes_and_sizes_do_not_mix():
    a, b = matrix_of((8, 12), (4, 2))[0], matrix_of((8, 12), None)[0]
    with pytest.raises(
        ValueError, match=r"\[sparse_concat\] matrices\[1\] must be of torch.float32 on cpu; got tor"
    ):
        sparse.sparse_concat([a, b.to(dtype=torch.float64)])
    with pytest.raises(
        TypeError, match=r"\[sparse_add\] both must be of torch.float32 on cpu; got torch.int32"
    ):
        sparse.sparse_add(a, b.to(dtype=torch.int32))
    with pytest.raises(
        ValueError, match=r"\[sparse_add\] both must be of one shape, \(8, 12\); got \(12, 8\)"
    ):
        sparse.sparse_add(a, b.T)
    with pytest.raises(ValueError, match=r"\[sparse_concat\] matrices\[1\] must have 12 columns; got 8"):
        sparse.sparse_concat([a, b.T])
    with pytest.raises(ValueError, match=r"\[sparse_matmul\] b must have 12 rows, as a has columns; got 8"):
        sparse.sparse_matmul(a, b)
    with pytest.raises(TypeError, match=r"\[sparse_slice\] rows must be a slice with step 1"):
        a[1:7:2]
