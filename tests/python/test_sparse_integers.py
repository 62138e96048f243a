"""Products of integers on every device; what a GPU runs against the core's kernels, on the CPU too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rarefy import BsrPattern, sparse
from rarefy.sparse import SparseMatrix, expanded, integers, products
from sparse_matrices import INTEGERS, random_blocks


def any_integers(shape, dtype):
    """Of all that the dtype holds, its ends more often than others."""
    info = torch.iinfo(dtype)
    drawn = torch.randint(info.min, info.max, shape, dtype=dtype)
    ends = torch.tensor([info.min, info.min + 1, info.max, -1, 0], dtype=dtype)
    return torch.where(torch.rand(shape) < 0.4, ends[torch.randint(0, 5, shape)], drawn)


def random_pattern(draw, shape, block):
    grid = [-(-size // side) for size, side in zip(shape, block, strict=True)]
    bits = draw(st.integers(0, 2 ** (grid[0] * grid[1]) - 1))
    mask = torch.tensor([bits >> i & 1 for i in range(grid[0] * grid[1])]).bool().reshape(grid)
    return BsrPattern.from_mask(mask, shape=shape, block_shape=block)


def core_sampled(x, y, pattern):
    return products._integer_sampled(x.contiguous(), y.contiguous(), *products._plan(pattern), pattern.nnzb)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("elements", [1, 40, 1 << 26])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_sorted_pairs_of_integers_are_the_products_by_rows(device, monkeypatch, elements, dtype, data):
    """Patterns, values, values on a pattern; whatever lies in the padding."""
    monkeypatch.setattr(expanded, "_ELEMENTS", elements)
    r, s, c = (data.draw(st.integers(1, 3)) for _ in range(3))
    m, k, n = (data.draw(st.integers(1, 7)) for _ in range(3))
    pa, pb, pc = (
        random_pattern(data.draw, *sizes) for sizes in (((m, k), (r, s)), ((k, n), (s, c)), ((m, n), (r, c)))
    )
    a, b = (any_integers((p.nnzb, *p.block_shape), dtype) for p in (pa, pb))
    moved = a.to(device), pa.to(device), b.to(device), pb.to(device)
    blocks, pattern = expanded.product(*moved)
    want, found = products._product(a, pa, b, pb)
    assert blocks.dtype == dtype and torch.equal(blocks.cpu(), want) and pattern.to("cpu") == found
    want = products._SampledProduct.apply(a, b, (pa, pb, pc))
    assert torch.equal(expanded.sampled(*moved, pc.to(device)).cpu(), want)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("elements", [1, 200, 1 << 25])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_rows_in_parts_are_multiplied_as_the_core_does(device, monkeypatch, elements, dtype, data):
    monkeypatch.setattr(integers, "_ELEMENTS", elements)
    shape = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    block = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    pattern = random_pattern(data.draw, shape, block)
    depth = data.draw(st.sampled_from([0, 1, 2, 37]))
    x, y = any_integers((depth, shape[0]), dtype).t(), any_integers((shape[1], 2 * depth), dtype)[:, ::2]
    blocks = integers.sampled(x.to(device), y.to(device), pattern.to(device))
    assert blocks.dtype == dtype and torch.equal(blocks.cpu(), core_sampled(x, y, pattern))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("ends", ["min min", "min max", "max max", "-1 max", "-1 -1"])
def test_sums_of_the_largest_products_are_exact(device, dtype, ends):
    info = torch.iinfo(dtype)
    values = [{"min": info.min, "max": info.max, "-1": -1}[end] for end in ends.split()]
    depth, bits = 3001, info.bits
    want = (values[0] * values[1] * depth + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    pattern = BsrPattern.from_mask(torch.ones(1, 1).bool(), shape=(2, 3), block_shape=(2, 3)).to(device)
    x, y = (
        torch.full((n, depth), value, dtype=dtype, device=device)
        for n, value in zip((2, 3), values, strict=True)
    )
    assert integers.sampled(x, y, pattern).unique().tolist() == [want]
    pairs = torch.full((depth, 2, 1), values[0]), torch.full((depth, 1, 3), values[1])
    pairs = [pair.to(device, integers.widened(dtype)) for pair in pairs]
    counts = torch.tensor([depth], device=device)
    sums = integers.summed(integers.multiplied(*pairs), counts)
    assert sums.shape == (1, 2, 3) and sums.to(dtype).unique().tolist() == [want]


def test_as_many_terms_as_float64_adds_up():
    """Of 16 bits that are all set; one product more is added up by the next call."""
    pattern = BsrPattern.from_mask(torch.ones(1, 1).bool(), shape=(1, 1), block_shape=(1, 1))
    for extra in (0, 1, 3):
        x = torch.full((1, integers._MOST_TERMS + extra), 0xFFFF, dtype=torch.int32)
        want = (0xFFFF**2 * x.numel() + 2**31) % 2**32 - 2**31
        assert integers.sampled(x, x, pattern).item() == want
    assert integers._MOST_TERMS * 0xFFFF**2 < 2**53


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(
    "blocks", [((1, 1), (1, 1)), ((2, 3), (3, 5)), ((1, 4), (4, 1)), ((3, 1), (1, 1)), ((16, 16), (16, 32))]
)
def test_sparse_products_of_integers_wrap_around_as_in_numpy(device, blocks, dtype):
    (r, s), (_, c) = blocks
    (left, left_col, left_row), _ = random_blocks(9, 7, r, s, 0.4)
    (right, right_col, right_row), _ = random_blocks(7, 8, s, c, 0.4)
    left, right = any_integers(left.shape, dtype), any_integers(right.shape, dtype)
    if blocks == ((1, 1), (1, 1)):
        left, right = left.flatten(), right.flatten()
    a = SparseMatrix(left, left_col, left_row, shape=(9 * r, 7 * s)).to(device)
    b = SparseMatrix(right, right_col, right_row, shape=(7 * s, 8 * c)).to(device)
    want = a.to_dense().cpu().numpy() @ b.to_dense().cpu().numpy()
    product = sparse.sparse_matmul(a, b)
    assert product.dtype == dtype and product.device.type == device
    assert product.format == a.format and product.block_shape == (r, c)
    assert np.array_equal(product.to_dense().cpu().numpy(), want)
    assert np.array_equal(sparse.sparse_matmul(a, b, dense=True).cpu().numpy(), want)
    assert torch.equal(product.data, (a @ b).data)
    if product.format == "csr":
        assert np.array_equal((a.to_scipy() @ b.to_scipy()).toarray(), want)
    nothing = SparseMatrix(right[:0], right_col[:0], right_row * 0, shape=(7 * s, 8 * c)).to(device)
    assert (a @ nothing).nnz == 0 and int(sparse.sparse_matmul(a, nothing, dense=True).count_nonzero()) == 0


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (1, 4), (16, 16)])
@pytest.mark.parametrize("depth", [0, 1, 37, 1500])
def test_sddmm_of_integers_wraps_around_as_in_numpy(device, depth, block, dtype):
    (data, indices, indptr), _ = random_blocks(8, 6, *block, 0.5)
    data, shape = any_integers(data.shape, dtype), (8 * block[0] - (block[0] > 1), 6 * block[1])
    if block[0] > 1:  # the last row is padding
        data[indptr[-2] :, -1] = 0
    x, y = any_integers((depth, shape[0]), dtype).t(), any_integers((shape[1], depth), dtype)
    a = SparseMatrix(data, indices, indptr, shape=shape)
    stored = SparseMatrix(torch.ones_like(data), indices, indptr, shape=shape, check="trusted").to_dense()
    want = (x.numpy() @ y.numpy().T) * stored.numpy()
    moved = a.to(device)
    got = sparse.sddmm(moved, x.to(device), y.to(device))
    assert got.dtype == dtype and got.device.type == device and got.pattern is moved.pattern
    assert np.array_equal(got.to_dense().cpu().numpy(), want)
    assert int(got.data.count_nonzero()) == np.count_nonzero(want), "padding is not zero"
    weighted = sparse.sddmm(moved, x.to(device), y.to(device), weighted=True)
    assert np.array_equal(weighted.to_dense().cpu().numpy(), want * a.to_dense().numpy())


def test_sparse_products_of_integers_say_what_they_want(device):
    data, index, rows = torch.ones(1, dtype=torch.int8), torch.tensor([0]), torch.tensor([0, 1])
    a = SparseMatrix(data, index, rows, shape=(1, 1)).to(device)
    b = SparseMatrix(data.short(), index, rows, shape=(1, 1)).to(device)
    with pytest.raises(TypeError, match=r"\[sparse_matmul\] a and b must have one dtype"):
        sparse.sparse_matmul(a, b)
    wide = SparseMatrix(torch.ones(1, 2, 2, dtype=torch.int8), index, rows, shape=(2, 2)).to(device)
    with pytest.raises(ValueError, match=r"\[sparse_matmul\] b must have 1 rows, as a has columns; got 2"):
        sparse.sparse_matmul(a, wide)
    tall = SparseMatrix(torch.ones(1, 1, 2, dtype=torch.int8), index, rows, shape=(1, 2)).to(device)
    rows_of_one = SparseMatrix(data, index, torch.tensor([0, 1, 1]), shape=(2, 1)).to(device)
    product = sparse.sparse_matmul(tall, rows_of_one)  # whose blocks do not meet
    assert product.format == "csr" and product.to_dense().tolist() == [[1]]
    x = torch.ones(1, 3, dtype=torch.int16, device=device)
    with pytest.raises(
        TypeError, match=r"\[sddmm\] data must be of the dtype of x, torch.int16; got torch.int8"
    ):
        sparse.sddmm(a, x, x, weighted=True)
    with pytest.raises(TypeError, match=r"\[sddmm\] y must be of torch.int16 on"):
        sparse.sddmm(a, x, x.int())
    with pytest.raises(TypeError, match=r"\[sddmm\] x must be of a dtype of floats or of signed integers"):
        sparse.sddmm(a, x.to(torch.uint8), x.to(torch.uint8))
    with pytest.raises(ValueError, match=r"\[sddmm\] x and y must have as many columns; got 3 and 2"):
        sparse.sddmm(a, x, x[:, :2])
    with pytest.raises(ValueError, match=r"\[sddmm\] x and y must have 1 and 1 rows; got 1 and 2"):
        sparse.sddmm(a, x, x.expand(2, 3))
