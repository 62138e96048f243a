"""Softmax of sparse matrices and attention on them, against masked dense ones."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BsrPattern, sparse
from rarefy.sparse import SparseMatrix, softmax
from sparse_matrices import FLOATS


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [(1, 1), (4, 8)])
def test_softmax_is_that_of_a_masked_dense_matrix(device, dtype, block):
    """Ragged edges, a row that stores nothing, −∞ inside a block, and a whole row of it."""
    shape = (14, 29)
    mask = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) < 0.4
    mask[1], mask[0, -1] = False, True
    pattern = BsrPattern.from_mask(mask, shape=shape, block_shape=block)
    dense = (torch.randn(shape) * 4).to(dtype)
    dense[0], dense[2, ::3] = -torch.inf, -torch.inf
    finite = dense.float().nan_to_num(neginf=-1e30)
    weight = rarefy.BsrWeight.from_dense(finite, block_shape=block, mask=mask)
    data = weight.values.detach().where(weight.values > -1e29, -torch.inf).to(dtype)
    got = sparse.sparse_softmax(SparseMatrix.on_pattern(data.to(device), pattern.to(device)))
    stored = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    want = dense.double().masked_fill(~stored, -torch.inf).softmax(1).nan_to_num(0)
    accuracy = {torch.float64: 1e-14, torch.float32: 2e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}
    torch.testing.assert_close(
        got.to_dense().cpu().double(), want, rtol=2 * accuracy[dtype], atol=accuracy[dtype] * 1e-2
    )
    assert got.dtype == dtype


def test_softmax_of_nan_is_nan():
    data = torch.tensor([1.0, float("nan"), 2.0])
    matrix = SparseMatrix(data, torch.tensor([0, 1, 0]), torch.tensor([0, 2, 3]), shape=(2, 2))
    assert sparse.sparse_softmax(matrix).data.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "heads_at_once"), [(24, None), (24, 4), (21, None)], ids=["all", "some", "ragged"]
)
def test_attention_is_masked_dense_attention(device, causal, length, heads_at_once, monkeypatch):
    keys, block = 40, 8
    mask = torch.rand(-(-length // block), keys // block) < 0.5
    mask[:, 0] = True
    pattern = BsrPattern.from_mask(mask, shape=(length, keys), block_shape=(block, block), device=device)
    if heads_at_once:
        bytes_ = heads_at_once * pattern.nnzb * block * block * 4
        monkeypatch.setitem(softmax._SCORES, torch.device(device).type, bytes_)
    elements = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)[:length]
    if causal:
        elements &= torch.ones(length, keys, dtype=torch.bool).tril()
    sizes = ((2, 3, length, 16), (2, 3, keys, 16), (2, 3, keys, 12))
    ours = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
    theirs = [tensor.detach().cpu().double().requires_grad_() for tensor in ours]
    got = sparse.sparse_attention(*ours, pattern, causal=causal)
    want = nn.functional.scaled_dot_product_attention(*theirs, attn_mask=elements)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-6)
    weights = torch.randn(want.shape, dtype=torch.float64)
    (want * weights).sum().backward()
    (got * weights.to(got)).sum().backward()
    for mine, oracle in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), oracle.grad, rtol=1e-4, atol=1e-5)


def test_patterns_on_a_diagonal():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]) > 0
    pattern = BsrPattern.from_mask(mask, shape=(8, 6), block_shape=(4, 2))
    thrice = pattern.on_diagonal(3)
    assert thrice == BsrPattern.from_mask(
        torch.block_diag(*[mask] * 3) > 0, shape=(24, 18), block_shape=(4, 2)
    )
    assert pattern.on_diagonal(3) is thrice
    assert pattern.on_diagonal(1) is pattern
    for copies in range(4, 9):  # numbers of heads come and go: their plans do, too
        assert pattern.on_diagonal(copies).shape == (pattern.shape[0] * copies, pattern.shape[1] * copies)
    assert len(pattern._diagonals) == 2 and pattern.on_diagonal(8) is pattern.on_diagonal(8)
    padded = BsrPattern.from_mask(mask, shape=(7, 6), block_shape=(4, 2))
    assert padded.on_diagonal(1) is padded
    with pytest.raises(
        ValueError, match=r"\[BsrPattern.on_diagonal\] \(7, 6\) must be multiples of the block"
    ):
        padded.on_diagonal(2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [12, 10], ids=["heads at once", "ragged"])
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_of_attention(causal, length, learned):
    """To all that it takes, by differences in float64; a row stores nothing."""
    mask = torch.tensor([[1, 0], [0, 0], [1, 1]]) > 0
    pattern = BsrPattern.from_mask(mask, shape=(length, 8), block_shape=(4, 4))
    sizes = ((2, 2, length, 3), (2, 2, 8, 3), (2, 2, 8, 2)) + (((),) if learned else ())
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]

    def attention(q, k, v, scale=None):
        return sparse.sparse_attention(q, k, v, pattern, scale=scale, causal=causal)

    assert torch.autograd.gradcheck(attention, given)


def test_attention_takes_arrays_of_numpy():
    pattern = BsrPattern.from_mask(torch.ones(2, 2) > 0, shape=(8, 8), block_shape=(4, 4))
    q = torch.randn(2, 8, 3)
    got = sparse.sparse_attention(q.numpy(), q.numpy(), q.numpy(), pattern)
    assert torch.equal(got, sparse.sparse_attention(q, q, q, pattern))


def test_what_attention_refuses_is_named():
    pattern = BsrPattern.from_mask(torch.ones(2, 2) > 0, shape=(8, 8), block_shape=(4, 4))
    q = torch.randn(2, 8, 3)
    matrix = SparseMatrix.on_pattern(torch.ones(4, 4, 4), pattern)
    wrong = [
        ((q, q, q, "x"), TypeError, "pattern must be a BsrPattern; got str"),
        ((q, q, q, matrix), TypeError, "pattern must be a BsrPattern; got SparseMatrix"),
        ((q, q, q, pattern.on_diagonal(2)), ValueError, "pattern must be of 8 × 8 scores; got (16, 16)"),
        ((q, "k", q, pattern), TypeError, "key must be a torch.Tensor; got str"),
        ((q[0, 0], q, q, pattern), ValueError, "query must have at least 2 dimensions; got 1"),
        ((q, q[0], q, pattern), ValueError, "query, key and value must have equal leading dimensions"),
        ((q[..., :0], q[..., :0], q, pattern), ValueError, "query must have at least 1 column where"),
        ((q, q[..., :2], q, pattern), ValueError, "key must have 3 columns, as query has; got 2"),
        ((q.int(), q, q, pattern), TypeError, "query must be of a floating-point dtype; got torch.int32"),
        ((q, q.double(), q, pattern), TypeError, "key must be of the dtype of query, torch.float32; g"),
        ((q, q, q.double(), pattern), TypeError, "value must be of the dtype of query, torch.float32; got"),
        ((q, q, q.to("meta"), pattern), TypeError, "value must be on the device of query, cpu; got meta"),
        ((*[q.to("meta")] * 3, pattern), TypeError, "pattern must be on the device of query, meta; got cpu"),
    ]
    for given, error, text in wrong:
        with pytest.raises(error, match=rf"^\[sparse_attention\] {re.escape(text)}"):
            sparse.sparse_attention(*given)
    with pytest.raises(TypeError, match=r"\[sparse_attention\] scale must be a number; got 'x'"):
        sparse.sparse_attention(q, q, q, pattern, scale="x")


def test_attention_on_nothing_is_a_mean():
    """Without columns all scores are zero, once somebody says what their scale is."""
    pattern = BsrPattern.from_mask(torch.eye(2) > 0, shape=(8, 8), block_shape=(4, 4))
    q, v = torch.ones(2, 8, 0), torch.randn(2, 8, 3)
    got = sparse.sparse_attention(q, q, v, pattern, scale=1)
    torch.testing.assert_close(got, v.view(2, 2, 4, 3).mean(2, keepdim=True).expand(2, 2, 4, 3).flatten(1, 2))
    assert sparse.sparse_attention(v, v, v[..., :0], pattern).shape == (2, 8, 0)


def test_attention_without_heads():
    pattern = BsrPattern.from_mask(torch.ones(2, 2) > 0, shape=(8, 8), block_shape=(4, 4))
    q = torch.randn(2, 0, 8, 3)
    assert sparse.sparse_attention(q, q, q, pattern).shape == (2, 0, 8, 3)
