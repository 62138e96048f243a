"""What docs/numerics.md says against torch's dense ops, and the initialisation's bounds."""

import itertools

import numpy as np
import pytest
import torch

import rarefy
from helpers import random_bsr
from rarefy import ops

# out, in, block, density: at most 128 stored elements in a row or column of W.
SHAPES = [
    ((128, 256), (16, 16), 0.25),
    ((256, 256), (4, 1), 0.4),
    ((200, 200), (1, 1), 0.3),
    ((96, 160), (3, 5), 0.5),
    ((128, 250), (16, 1), 0.4),
    ((128, 250), (2, 2), 0.4),
]
LONG = [((96, 3000), (16, 1), 1.0), ((2048, 96), (4, 4), 0.5), ((96, 3000), (12, 1), 1.0)]
# Long sums of f32, where torch and we both keep partial sums: gather and scatter, both directions.
LONGER = [
    ((160, 575), (4, 1), 0.75),
    ((160, 1024), (16, 16), 0.75),
    ((96, 3072), (1, 16), 0.9),
    ((4096, 64), (4, 1), 0.75),
    ((64, 12288), (16, 32), 1.0),
    ((96, 4096), (8, 512), 1.0),
]
CASES = [
    *((torch.float64, *case) for case in SHAPES),
    *((torch.float32, *case) for case in SHAPES + LONG + LONGER),
    *((dtype, *case) for dtype in (torch.bfloat16, torch.float16) for case in SHAPES + LONG),
]


def _exact(tensor):
    """As numbers of which products are exact enough: in long double (slow) for float64."""
    exact = tensor.double().cpu().numpy()
    return exact.astype(np.longdouble) if tensor.dtype == torch.float64 else exact


def _error(got, exact, magnitude, stored):
    """The error that 99 of 100 elements stay below, relative to their magnitudes."""
    error = np.abs(_exact(got) - exact)[stored] / magnitude[stored]
    return np.quantile(error, 0.99)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block_shape", [(12, 1), (3, 1), (40, 1), (3, 5), (5, 7)])
def test_infinite_blocks_reach_their_own_rows_alone(block_shape, rows):
    layer = rarefy.BlockSparseLinear.from_dense(
        torch.nn.Linear(20 * block_shape[1], 9 * block_shape[0]), block_shape=block_shape, density=0.6
    ).requires_grad_(False)
    x = torch.randn(rows, layer.in_features)
    finite = layer(x)
    layer.weight.values[7] = torch.inf
    got = layer(x)
    reached = ~got.isfinite()
    assert reached.any(0).sum() == block_shape[0] and torch.equal(got[~reached], finite[~reached])


@pytest.mark.parametrize("rows", [3, 96])
@pytest.mark.parametrize(("dtype", "shape", "block_shape", "density"), CASES)
def test_errors_are_at_most_twice_those_of_torch(dtype, shape, block_shape, density, rows):
    bsr = random_bsr(shape, block_shape, density, dtype=dtype)
    (n, k), dense = shape, bsr.dense().to(dtype)
    x, dy, bias = (torch.randn(size, dtype=dtype) for size in [(rows, k), (rows, n), (n,)])
    results = {
        "linear": (
            ops.bsr_linear(x, *bsr.operands, bias, n, k),
            torch.nn.functional.linear(x, dense, bias),
            lambda w, x, dy, b: x @ w.T + b,
        ),
        "grad_input": (
            ops.bsr_grad_input(dy, *bsr.operands, n, k),
            dy @ dense,
            lambda w, x, dy, b: dy @ w,
        ),
        "grad_weight": (
            bsr.scatter(ops.bsr_grad_weight(dy, x, bsr.plan, *block_shape, n, k)),
            dy.T @ x,
            lambda w, x, dy, b: dy.T @ x,
        ),
    }
    operands = [_exact(tensor) for tensor in (dense, x, dy, bias)]
    for name, (ours, torchs, product) in results.items():
        exact, magnitude = product(*operands), product(*map(np.abs, operands))
        stored = magnitude > 0
        if name == "grad_weight":  # torch's gradient has elements outside the pattern, too
            stored &= bsr.scatter(torch.ones_like(bsr.values)).bool().numpy()
        theirs = _error(torchs, exact, magnitude, stored)
        assert theirs > 0, "a comparison with nothing"
        assert _error(ours, exact, magnitude, stored) <= 2 * theirs, name


@pytest.mark.parametrize("rows", [3, 96])
@pytest.mark.parametrize("block_shape", [(1, 1), (4, 1), (1, 16), (16, 16)])
@pytest.mark.parametrize(("k", "density"), [(4096, 0.1), (1536, 0.25), (860, 0.5), (65536, 0.05)])
def test_sparse_sums_are_as_good_as_dense_ones_of_as_many_terms(k, density, block_shape, rows):
    """A masked dense weight adds zeros exactly: torch's error is then smaller than that of its length."""
    n = 96
    bsr = random_bsr((n, k), block_shape, density)
    x, dense = torch.randn(rows, k), bsr.dense()
    exact, magnitude = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    stored = (magnitude > 0).numpy()
    ours = _error(ops.bsr_linear(x, *bsr.operands, None, n, k), exact.numpy(), magnitude.numpy(), stored)
    terms = round(density * k)
    x, dense = torch.randn(rows, terms), torch.randn(n, terms)
    exact, magnitude = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    assert ours <= 2 * _error(x @ dense.T, exact.numpy(), magnitude.numpy(), magnitude.numpy() > 0)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("block_shape", [(1, 1), (4, 1), (32, 1), (2, 2), (3, 5), (10, 17), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_have_the_bits_of_the_same_values_in_float32(dtype, block_shape, rows):
    n, k = 96, 2048
    bsr = random_bsr((n, k), block_shape, 0.5)
    x, (_, *rest) = torch.randn(rows, k), bsr.operands
    narrow = bsr.values.to(dtype)
    y = ops.bsr_linear(x, narrow, *rest, None, n, k)
    assert torch.equal(y, ops.bsr_linear(x, narrow.float(), *rest, None, n, k))


@pytest.mark.parametrize("block_shape", [(4, 32), (1, 7), (40, 1), (64, 64)])
def test_initial_values_fill_the_bounds_of_their_rows(block_shape):
    """In every block row ±1/√(stored inputs), where the last block column may reach past the edge."""
    k, n = 40, 400
    layer = rarefy.BlockSparseLinear(k, n, density=0.6, block_shape=block_shape)
    weight = layer.weight.to_dense().detach()
    stored = torch.zeros(n, k)
    crow, col = layer.weight.crow_indices.tolist(), layer.weight.col_indices.tolist()
    (r, c) = block_shape
    for i, (begin, end) in enumerate(itertools.pairwise(crow)):
        for j in col[begin:end]:
            stored[i * r : (i + 1) * r, j * c : (j + 1) * c] = 1
    inputs = stored.sum(1)
    for count in inputs.unique().tolist():
        rows = weight[inputs == count]
        if count == 0:
            assert not rows.any()
            continue
        largest = rows.abs().max().item() * count**0.5
        assert largest <= 1 + 1e-6
        assert largest > 0.5 ** (8 / (len(rows) * count)), f"{len(rows)} rows of {count} inputs"


def test_gradients_of_edge_blocks_are_zero_beside_nan():
    """Padding stays zero whatever the gradient holds: NaN times a zero of padding is none of it."""
    bsr = random_bsr((7, 10), (4, 4), 1.0)
    x, dy = torch.ones(3, 10), torch.full((3, 7), float("nan"))
    dvalues = ops.bsr_grad_weight(dy, x, bsr.plan, 4, 4, 7, 10)
    inside = bsr.gather(torch.ones(7, 10)).bool()
    assert dvalues[inside].isnan().all()
    assert torch.equal(dvalues[~inside], torch.zeros(int((~inside).sum())))
