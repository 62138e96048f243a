"""BsrWeight: exact conversions, copies and moves, loading, and padding that stays zero."""

import copy
import io
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn
from torch.nn import functional

import rarefy
from helpers import assert_within_bound, random_bsr
from rarefy import BsrWeight, masks

SHAPES = [
    ((8, 12), (4, 3)),
    ((7, 10), (4, 3)),
    ((7, 9), (4, 3)),
    ((8, 10), (4, 3)),
    ((5, 1), (1, 1)),
    ((33, 65), (32, 32)),
    ((3, 4), (8, 8)),
    ((6, 9), (6, 9)),
    ((0, 5), (2, 2)),
    ((5, 0), (2, 2)),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]


def small(shape=(7, 10), block_shape=(4, 3), density=0.5, **kwargs) -> BsrWeight:
    dense = torch.randn(shape, **kwargs)
    return BsrWeight.from_dense(dense, block_shape=block_shape, density=density)


def assert_equal(a: BsrWeight, b: BsrWeight) -> None:
    assert a.shape == b.shape and a.block_shape == b.block_shape
    for name in ("values", "crow_indices", "col_indices", "plan"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and torch.equal(x, y), name


@pytest.mark.parametrize(("shape", "block_shape"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_blocks_of_a_dense_matrix_come_back_bit_for_bit(shape, block_shape, dtype):
    dense = (torch.randn(shape) * 50).to(dtype)
    weight = BsrWeight.from_dense(dense, block_shape=block_shape)
    assert weight.dtype == dtype and weight.shape == torch.Size(shape)
    assert weight.density == (1 if dense.numel() else 0)
    assert torch.equal(weight.to_dense(), dense)
    assert weight.values.requires_grad == dtype.is_floating_point


def test_special_values_keep_their_bits():
    dense = torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]])
    back = BsrWeight.from_dense(dense, block_shape=(2, 1)).to_dense()
    assert torch.equal(back.view(torch.int32), dense.view(torch.int32))


@pytest.mark.parametrize(("shape", "block_shape"), SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.3, 0.5, 1.0])
def test_density_keeps_the_blocks_of_largest_norm(shape, block_shape, density):
    dense = torch.randn(shape)
    weight = BsrWeight.from_dense(dense, block_shape=block_shape, density=density)
    rows, cols = weight.grid
    assert weight.nnzb == round(density * rows * cols)
    norms = masks.block_norms(dense, block_shape)
    kept = weight.block_mask()
    if 0 < weight.nnzb < rows * cols:
        assert norms[kept].min() >= norms[~kept].max()
    expected = torch.where(masks.expand_mask(kept, shape, block_shape), dense, 0)
    assert torch.equal(weight.to_dense(), expected)


def test_equal_norms_keep_the_earlier_blocks_and_halves_round_to_even():
    weight = BsrWeight.from_dense(torch.ones(2, 10), block_shape=(2, 2), density=0.5)  # 2.5 of 5 blocks
    assert weight.col_indices.tolist() == [0, 1]


@pytest.mark.parametrize("elementwise", [True, False])
def test_scores_rank_instead_of_norms(elementwise):
    dense = torch.randn(8, 6)
    scores = torch.randn(8, 6) if elementwise else torch.randn(4, 2)
    weight = BsrWeight.from_dense(dense, block_shape=(2, 3), density=0.5, scores=scores)
    sums = scores.double().reshape(4, 2, 2, 3).sum((1, 3)) if elementwise else scores
    kept = weight.block_mask()
    assert kept.sum() == 4 and sums[kept].min() > sums[~kept].max()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_masks_by_element_and_by_block_agree(dtype):
    dense = torch.randn(7, 10)
    block_mask = torch.rand(2, 4) < 0.5
    by_block = BsrWeight.from_dense(dense, block_shape=(4, 3), mask=block_mask.to(dtype))
    elements = masks.expand_mask(block_mask, (7, 10), (4, 3))
    by_element = BsrWeight.from_dense(dense, block_shape=(4, 3), mask=elements.to(dtype))
    assert_equal(by_block, by_element)
    assert torch.equal(by_block.to_dense(), dense * elements)


def test_int64_indices_become_int32_copies():
    crow, col = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    weight = BsrWeight(torch.randn(2, 2, 2), crow, col, shape=(4, 4), block_shape=(2, 2))
    assert weight.crow_indices.dtype == weight.col_indices.dtype == torch.int32
    col[0] = 99
    assert weight.col_indices.tolist() == [1, 0]


def test_a_parameter_is_used_as_it_is():
    values = nn.Parameter(torch.randn(1, 2, 2), requires_grad=False)
    index = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    weight = BsrWeight(values, *index, shape=(2, 2), block_shape=(2, 2))
    assert weight.values is values and not weight.values.requires_grad


def test_to_dense_is_differentiable():
    weight = small(dtype=torch.float64)
    upstream = torch.randn(7, 10, dtype=torch.float64)
    weight.to_dense().backward(upstream)
    expected = masks.to_blocks(upstream, (4, 3))[weight.block_mask()]
    assert torch.equal(weight.values.grad, expected)


# Other libraries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_round_trip(dtype):
    weight = BsrWeight.from_dense((torch.randn(8, 12) * 20).to(dtype), block_shape=(4, 3), density=0.5)
    tensor = weight.to_torch()
    assert tensor.layout == torch.sparse_bsr and tuple(tensor.shape) == (8, 12)
    assert_equal(BsrWeight.from_torch(tensor), weight)


def test_torch_padded_round_trip_and_refusal():
    weight = small((7, 10), (4, 3))
    with pytest.raises(ValueError, match=r"multiple of block_shape \(4, 3\), or pad=True; got \(7, 10\)"):
        weight.to_torch()
    padded = weight.to_torch(pad=True)
    assert tuple(padded.shape) == (8, 12)
    assert_equal(BsrWeight.from_torch(padded, shape=(7, 10)), weight)


def test_torch_csr_is_1x1_blocks():
    dense = torch.randn(4, 5) * (torch.rand(4, 5) < 0.5)
    weight = BsrWeight.from_torch(dense.to_sparse_csr())
    assert weight.block_shape == (1, 1) and torch.equal(weight.to_dense(), dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8])
def test_scipy_round_trip(dtype):
    weight = BsrWeight.from_dense((torch.randn(8, 12) * 20).to(dtype), block_shape=(4, 3), density=0.5)
    array = weight.to_scipy()
    assert np.array_equal(array.toarray(), weight.to_dense().detach().numpy())
    assert_equal(BsrWeight.from_scipy(array), weight)
    assert_equal(BsrWeight.from_scipy(scipy.sparse.bsr_matrix(array)), weight)


@pytest.mark.parametrize("block_shape", [(1, 1), (4, 3), (2, 5)])
def test_scipy_csr_of_any_size(block_shape):
    dense = np.random.default_rng(0).standard_normal((7, 10)) * (np.arange(70).reshape(7, 10) % 3 == 0)
    weight = BsrWeight.from_scipy(scipy.sparse.csr_array(dense), block_shape=block_shape)
    assert weight.shape == (7, 10) and weight.block_shape == block_shape
    assert np.array_equal(weight.to_dense().detach().numpy(), dense)


def test_scipy_duplicates_are_summed_and_sorted():
    matrix = scipy.sparse.csr_matrix(([1.0, 2.0, 4.0], [2, 0, 2], [0, 3]), shape=(1, 3))
    weight = BsrWeight.from_scipy(matrix)
    assert weight.to_dense().tolist() == [[2.0, 0.0, 5.0]]
    assert matrix.nnz == 3  # the caller's matrix is as it was


# Copies, moves, state ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda w: pickle.loads(pickle.dumps(w)),
        lambda w: torch.load(_saved(w), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_equal_and_independent(clone):
    weight = small()
    other = clone(weight)
    assert_equal(weight, other)
    with torch.no_grad():
        other.values.zero_()
    assert weight.values.abs().sum() > 0
    x = torch.randn(3, 10)
    assert torch.equal(other.linear(x), torch.zeros(3, 7))


def _saved(module: nn.Module) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return buffer


def test_the_plan_is_never_saved():
    weight = small()
    assert list(weight.state_dict()) == ["values", "crow_indices", "col_indices"]
    assert "plan" not in weight.__getstate__()["_buffers"]


@pytest.mark.parametrize("move", ["half", "bfloat16", "double", "type"])
def test_dtype_moves_leave_indices_alone(move):
    weight = small()
    before = {n: b.clone() for n, b in weight.named_buffers()}
    weight = weight.type(torch.float16) if move == "type" else getattr(weight, move)()
    assert weight.dtype == weight.values.dtype != torch.float32
    for name, buffer in weight.named_buffers():
        assert buffer.dtype == torch.int32 and torch.equal(buffer, before[name])


def test_moves_to_a_device_and_back(device):
    weight = small()
    moved = copy.deepcopy(weight).to(device)
    assert moved.device.type == moved.plan.device.type == device
    x = torch.randn(5, 10)
    magnitude = x.abs().double() @ weight.to_dense().detach().abs().double().T
    expected = x.double() @ weight.to_dense().detach().double().T
    assert_within_bound(moved.linear(x.to(device)).detach().cpu(), expected, magnitude, 10)
    assert_equal(moved.cpu(), weight)


def test_meta_weights_take_the_first_pattern_that_is_loaded():
    weight = small()
    meta = BsrWeight(
        *(t.to("meta") for t in (weight.values.detach(), weight.crow_indices, weight.col_indices)),
        shape=weight.shape,
        block_shape=weight.block_shape,
    )
    assert meta.plan.is_meta and meta.density == weight.density
    real = copy.deepcopy(meta).to_empty(device="cpu")
    real.linear(torch.randn(2, 10))  # memory without content is never seen as indices
    real.load_state_dict(weight.state_dict())
    assert_equal(real, weight)
    meta.load_state_dict(weight.state_dict(), assign=True)
    assert_equal(meta, weight)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_the_same_pattern_loads(assign):
    weight = small()
    other = copy.deepcopy(weight)
    with torch.no_grad():
        other.values.neg_()
    state = {k: v.long() if k.endswith("indices") else v for k, v in other.state_dict().items()}
    weight.load_state_dict(state, assign=assign)
    assert_equal(weight, other)


def test_linear_is_what_f_linear_does_with_it():
    weight, x, bias = small(), torch.randn(2, 3, 10), torch.randn(7)
    expected = weight.linear(x, bias)
    assert torch.equal(functional.linear(x, weight, bias), expected)
    assert torch.equal(functional.linear(x, weight=weight, bias=bias), expected)
    with pytest.raises(TypeError, match="BsrWeight"):
        torch.relu(weight)


def test_padding_stays_zero_through_training():
    weight = small((7, 10), (4, 3), density=1.0)
    optimizer = torch.optim.AdamW(weight.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        weight.linear(torch.randn(4, 10)).square().sum().backward()
        optimizer.step()
    before = weight.values.detach().clone()
    assert torch.equal(weight.zero_padding_().values, before)
    with torch.no_grad():
        weight.values.add_(1)
    pieces = weight.values, weight.crow_indices, weight.col_indices
    with pytest.raises(ValueError, match="must be zero padding"):
        BsrWeight(*pieces, shape=(7, 10), block_shape=(4, 3))
    weight.zero_padding_()
    BsrWeight(*pieces, shape=(7, 10), block_shape=(4, 3))
    weight.values.data.add_(1)  # which no version counts
    weight.zero_padding_()
    BsrWeight(*pieces, shape=(7, 10), block_shape=(4, 3))
    weight.reset_parameters()
    BsrWeight(*pieces, shape=(7, 10), block_shape=(4, 3))


def test_values_and_weights_that_do_not_fit_are_refused():
    weight = small((8, 12), (4, 3))
    meta = rarefy.BsrPattern(
        *(index.to("meta") for index in weight.pattern.indices()), shape=(8, 12), block_shape=(4, 3)
    )
    with pytest.raises(TypeError, match=r"^\[BsrWeight.from_pattern\] pattern must be on .*cpu; got meta"):
        BsrWeight.from_pattern(weight.values, meta)
    with pytest.raises(ValueError, match=r"^\[BsrWeight.assign_\] other must be of shape \(8, 12\); got "):
        weight.assign_(small((12, 8), (4, 3)))
    narrow = small((8, 12), (4, 3)).stored_as(torch.bfloat16)
    assert narrow.x_dtype == torch.float32
    weight.assign_(narrow)
    assert (weight.dtype, weight.x_dtype) == (torch.bfloat16, torch.float32)


def test_properties():
    weight = small((8, 12), (4, 3), density=0.5)
    assert (weight.nnzb, weight.grid, weight.density, weight.ndim) == (4, (2, 4), 0.5, 2)
    assert weight.nbytes == 4 * 12 * 4 + 3 * 4 + 4 * 4
    assert sum(p.numel() for p in weight.parameters()) == 4 * 12
    assert "block_shape=(4, 3), density=0.5" in repr(weight)


def test_matches_the_ops_on_random_patterns():
    bsr = random_bsr((21, 34), (5, 8), 0.4, integers=True, empty_first_row=True)
    weight = BsrWeight(bsr.values, bsr.crow, bsr.col, shape=bsr.shape, block_shape=bsr.block_shape)
    assert torch.equal(weight.plan, rarefy.ops.bsr_plan(bsr.crow, bsr.col, 21, 34, 5, 8))
    x = torch.randint(-2, 3, (6, 34)).float()
    assert torch.equal(weight.linear(x), (x.double() @ bsr.dense().T).float())
