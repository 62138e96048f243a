"""Bad input, each case by name: the error says "[op] requirement; got value", and nothing has changed."""

import copy

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn

from rarefy import BlockSparseLinear, BsrWeight, PseudoBlockSparseLinear
from refused import assert_refused
from tiny import assert_unchanged, snapshot

NAN, INF = float("nan"), float("inf")


def weight(values=None, crow=(0, 1, 3), col=(1, 0, 2), shape=(4, 6), block_shape=(2, 2), index=torch.int32):
    """A BsrWeight of 2×3 blocks, of which 3 are stored; any part of it may be replaced by something bad."""
    values = torch.ones(3, 2, 2) if values is None else values
    crow, col = (t if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=index) for t in (crow, col))
    return BsrWeight(values, crow, col, shape=shape, block_shape=block_shape)


def dense(**kwargs):
    """BlockSparseLinear.from_dense of 4×6 weights in 2×2 blocks."""
    return BlockSparseLinear.from_dense(nn.Linear(6, 4), **{"block_shape": (2, 2)} | kwargs)


def padded(at) -> torch.Tensor:
    values = torch.zeros(3, 2, 2)
    values[at] = 7
    return values


def torn_mask() -> torch.Tensor:
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[3, 2] = False
    return mask


def layer(**kwargs) -> BlockSparseLinear:
    return BlockSparseLinear(6, 4, **{"block_shape": (2, 2), "density": 0.5} | kwargs)


# name: (what is done, the error, a part of its text)
CASES = {
    # patterns
    "crow_decreases": (
        lambda: weight(crow=(0, 2, 1)),
        ValueError,
        "crow_indices[2]=1 after crow_indices[1]=2",
    ),
    "crow_too_short": (lambda: weight(crow=(0, 3)), ValueError, "crow_indices must have 3 elements"),
    "crow_too_long": (lambda: weight(crow=(0, 1, 3, 3)), ValueError, "crow_indices must have 3 elements"),
    "crow_empty": (lambda: weight(crow=()), ValueError, "crow_indices must have 3 elements"),
    "crow_starts_late": (lambda: weight(crow=(1, 2, 3)), ValueError, "crow_indices[0] must be 0; got 1"),
    "crow_ends_early": (lambda: weight(crow=(0, 1, 2)), ValueError, "crow_indices[2] must be"),
    "crow_ends_late": (lambda: weight(crow=(0, 1, 4)), ValueError, "crow_indices[2] must be"),
    "crow_negative": (lambda: weight(crow=(0, -1, 3)), ValueError, "crow_indices[1]=-1"),
    "crow_row_too_full": (lambda: weight(crow=(0, 4, 4)), ValueError, "at most 3 entries"),
    "crow_two_dimensions": (
        lambda: weight(crow=torch.zeros(1, 3, dtype=torch.int32)),
        ValueError,
        "crow_indices must have 1 dimension; got 2",
    ),
    "crow_float": (
        lambda: weight(crow=torch.tensor([0.0, 1, 3])),
        TypeError,
        "crow_indices must be int32 or int64",
    ),
    "crow_int16": (lambda: weight(index=torch.int16), TypeError, "int32 or int64; got int16"),
    "crow_list": (
        lambda: BsrWeight(torch.ones(3, 2, 2), [0, 1, 3], [1, 0, 2], shape=(4, 6), block_shape=(2, 2)),
        TypeError,
        "crow_indices must be a torch.Tensor; got list",
    ),
    "crow_beyond_int32": (
        lambda: weight(crow=(0, 1, 2**40), index=torch.int64),
        ValueError,
        f"crow_indices[2]={2**40}",
    ),
    "crow_on_another_device": (
        lambda: weight(crow=torch.zeros(3, dtype=torch.int32, device="meta")),
        TypeError,
        "crow_indices must be on the device of values, cpu; got meta",
    ),
    "col_out_of_range": (
        lambda: weight(col=(1, 0, 3)),
        ValueError,
        "col_indices[2]=3 out of range for 3 block columns",
    ),
    "col_negative": (lambda: weight(col=(-1, 0, 2)), ValueError, "col_indices[0]=-1"),
    "col_unsorted": (lambda: weight(col=(1, 2, 0)), ValueError, "col_indices[2]=0 after 2 in block row 1"),
    "col_duplicate": (lambda: weight(col=(1, 2, 2)), ValueError, "col_indices[2]=2 after 2 in block row 1"),
    "col_too_short": (lambda: weight(col=(1, 0)), ValueError, "crow_indices[2] must be"),
    "col_beyond_int32": (
        lambda: weight(col=(1, 0, 2**32 + 2), index=torch.int64),
        ValueError,
        f"col_indices must fit in int32; got col_indices[2]={2**32 + 2}",
    ),
    "col_below_int32": (  # which would wrap to 2
        lambda: weight(col=(1, 0, 2 - 2**32), index=torch.int64),
        ValueError,
        f"col_indices must fit in int32; got col_indices[2]={2 - 2**32}",
    ),
    "col_sparse_layout": (
        lambda: weight(col=torch.tensor([1, 0, 2]).to_sparse()),
        TypeError,
        "col_indices must be a strided (dense) tensor",
    ),
    # values
    "values_too_few": (
        lambda: weight(torch.ones(2, 2, 2)),
        ValueError,
        "values must be of shape (3, 2, 2); got (2, 2, 2)",
    ),
    "values_wrong_block": (
        lambda: weight(torch.ones(3, 2, 3)),
        ValueError,
        "values must be of shape (3, 2, 2)",
    ),
    "values_flat": (
        lambda: weight(torch.ones(12)),
        ValueError,
        "values must be of shape (3, 2, 2); got (12,)",
    ),
    "values_int64": (lambda: weight(torch.ones(3, 2, 2, dtype=torch.int64)), TypeError, "got int64"),
    "values_complex": (
        lambda: weight(torch.ones(3, 2, 2, dtype=torch.complex64)),
        TypeError,
        "got complex64",
    ),
    "values_bool": (lambda: weight(torch.ones(3, 2, 2, dtype=torch.bool)), TypeError, "got bool"),
    "values_numpy": (
        lambda: weight(np.ones((3, 2, 2))),
        TypeError,
        "values must be a torch.Tensor; got ndarray",
    ),
    "values_not_contiguous": (
        lambda: weight(torch.ones(3, 2, 2).transpose(0, 2).contiguous().transpose(0, 2)),
        ValueError,
        "values must be contiguous; got strides",
    ),
    "values_sparse_layout": (lambda: weight(torch.ones(3, 2, 2).to_sparse()), TypeError, "strided"),
    "padding_in_last_row": (
        lambda: weight(padded((2, 1, 0)), shape=(3, 6)),
        ValueError,
        "outside the shape (3, 6) must be zero padding; got values[2, 1, 0]=7.0",
    ),
    "padding_in_last_column": (
        lambda: weight(padded((2, 0, 1)), shape=(4, 5)),
        ValueError,
        "outside the shape (4, 5) must be zero padding; got values[2, 0, 1]=7.0",
    ),
    "padding_nan": (
        lambda: weight(padded((2, 0, 1)) * NAN, shape=(4, 5)),
        ValueError,
        "must be zero padding; got values[2, 0, 1]=nan",
    ),
    # sizes
    "shape_negative": (lambda: weight(shape=(-4, 6)), ValueError, "shape[0] must be at least 0; got -4"),
    "shape_three": (lambda: weight(shape=(4, 6, 1)), ValueError, "shape must have 2 elements; got 3"),
    "shape_float": (lambda: weight(shape=(4.0, 6)), TypeError, "shape[0] must be an int; got 4.0"),
    "shape_int": (lambda: weight(shape=4), TypeError, "shape must be a pair of ints; got 4"),
    "shape_overflows": (
        lambda: weight(shape=(2**40, 6)),
        ValueError,
        "shape and block_shape must be at most",
    ),
    "block_shape_zero": (
        lambda: weight(block_shape=(0, 2)),
        ValueError,
        "block_shape[0] must be at least 1; got 0",
    ),
    "block_shape_negative": (
        lambda: weight(block_shape=(2, -2)),
        ValueError,
        "block_shape[1] must be at least 1",
    ),
    "block_shape_bool": (
        lambda: weight(block_shape=(True, 2)),
        TypeError,
        "block_shape[0] must be an int; got True",
    ),
    "block_shape_text": (lambda: weight(block_shape="22"), TypeError, "block_shape must be a pair of ints"),
    "block_shape_too_many": (
        lambda: dense(block_shape=(2, 2, 2)),
        ValueError,
        "block_shape must have 2 elements",
    ),
    "block_product_overflows": (
        lambda: weight(torch.ones(0, 1, 1), (0, 0), (), shape=(1, 1), block_shape=(2**31 - 1, 2**31 - 1)),
        ValueError,
        "[BsrWeight]",
    ),
    "block_beyond_the_matrix": (  # without blocks it holds nothing, and its forward took a gigabyte
        lambda: weight(torch.ones(0, 2**28, 1), (0, 0), (), shape=(4, 4), block_shape=(2**28, 1)),
        ValueError,
        "block_shape must be at most (256, 256), the shape rounded up to multiples of 256",
    ),
    # choosing blocks
    "density_above_one": (lambda: dense(density=1.01), ValueError, "density must be in [0, 1]; got 1.01"),
    "density_negative": (lambda: dense(density=-0.1), ValueError, "density must be in [0, 1]; got -0.1"),
    "density_nan": (lambda: dense(density=NAN), ValueError, "density must be in [0, 1]; got nan"),
    "density_inf": (lambda: dense(density=INF), ValueError, "density must be in [0, 1]; got inf"),
    "density_text": (lambda: dense(density="0.5"), TypeError, "density must be a number; got '0.5'"),
    "density_bool": (lambda: dense(density=True), TypeError, "density must be a number; got True"),
    "mask_not_aligned": (lambda: dense(mask=torn_mask()), ValueError, "got mask[3, 2]=0 in block (1, 1)"),
    "mask_wrong_shape": (
        lambda: dense(mask=torch.ones(6, 4)),
        ValueError,
        "mask must be of shape (4, 6) or, block-wise, (2, 3)",
    ),
    "mask_not_binary": (
        lambda: dense(mask=torch.full((2, 3), 0.5)),
        ValueError,
        "only 0 and 1; got mask[0, 0]=0.5",
    ),
    "mask_nan": (lambda: dense(mask=torch.full((2, 3), NAN)), ValueError, "only 0 and 1; got mask[0, 0]=nan"),
    "mask_list": (
        lambda: dense(mask=[[1, 0, 1], [1, 1, 1]]),
        TypeError,
        "mask must be a torch.Tensor; got list",
    ),
    "mask_and_density": (
        lambda: dense(mask=torch.ones(2, 3), density=0.5),
        ValueError,
        "got mask and density",
    ),
    "mask_and_scores": (
        lambda: dense(mask=torch.ones(2, 3), scores=torch.ones(2, 3)),
        ValueError,
        "got mask and scores",
    ),
    "scores_alone": (lambda: dense(scores=torch.ones(2, 3)), ValueError, "need a density; got scores alone"),
    "scores_wrong_shape": (
        lambda: dense(scores=torch.ones(3, 2), density=0.5),
        ValueError,
        "scores must be of shape (4, 6)",
    ),
    "scores_nan": (
        lambda: dense(scores=torch.tensor([[1, 2, 3], [4, NAN, 6]]), density=0.5),
        ValueError,
        "scores must not be NaN; got scores[1, 1]=nan",
    ),
    "scores_complex": (
        lambda: dense(scores=torch.ones(2, 3) * 1j, density=0.5),
        TypeError,
        "scores must be real",
    ),
    "dense_one_dimension": (
        lambda: BsrWeight.from_dense(torch.ones(4), block_shape=(2, 2)),
        ValueError,
        "2 dimensions",
    ),
    "dense_int64": (
        lambda: BsrWeight.from_dense(torch.ones(4, 4).long(), block_shape=(2, 2)),
        TypeError,
        "got int64",
    ),
    "dense_meta": (
        lambda: BsrWeight.from_dense(torch.ones(4, 4, device="meta"), block_shape=(2, 2)),
        TypeError,
        "hold data",
    ),
    # layers
    "from_dense_of_a_tensor": (
        lambda: BlockSparseLinear.from_dense(torch.ones(4, 4), block_shape=(2, 2)),
        TypeError,
        "linear must be an nn.Linear; got Tensor",
    ),
    "from_dense_of_an_embedding": (
        lambda: PseudoBlockSparseLinear.from_dense(nn.Embedding(4, 4), block_shape=(2, 2)),
        TypeError,
        "linear must be an nn.Linear; got Embedding",
    ),
    "in_features_negative": (
        lambda: BlockSparseLinear(-1, 4),
        ValueError,
        "in_features must be at least 0; got -1",
    ),
    "out_features_float": (
        lambda: BlockSparseLinear(4, 4.5),
        TypeError,
        "out_features must be an int; got 4.5",
    ),
    "layer_density_nan": (
        lambda: layer(density=NAN),
        ValueError,
        "[BlockSparseLinear] density must be in [0, 1]",
    ),
    "pseudo_density": (
        lambda: PseudoBlockSparseLinear(6, 4, density=2),
        ValueError,
        "[PseudoBlockSparseLinear] density must be in [0, 1]; got 2",
    ),
    "layer_int_dtype": (lambda: layer(dtype=torch.int8), TypeError, "dtype must be floating point"),
    "layer_complex_dtype": (lambda: layer(dtype=torch.complex64), TypeError, "got complex64"),
    "bias_of_another_size": (
        lambda: BlockSparseLinear.from_weight(weight(), torch.ones(5)),
        ValueError,
        "bias must be of shape (4,); got (5,)",
    ),
    "from_weight_of_a_tensor": (
        lambda: BlockSparseLinear.from_weight(torch.ones(4, 4)),
        TypeError,
        "weight must be a SparseWeight; got Tensor",
    ),
    "x_of_another_width": (lambda: layer()(torch.ones(3, 5)), ValueError, "[bsr_linear]"),
    "x_scalar": (lambda: layer()(torch.tensor(1.0)), ValueError, "[bsr_linear]"),
    "x_of_another_dtype": (
        lambda: layer()(torch.ones(3, 6, dtype=torch.bfloat16)),
        TypeError,
        "[bsr_linear]",
    ),
    "x_int": (lambda: layer()(torch.ones(3, 6, dtype=torch.int64)), TypeError, "[bsr_linear]"),
    # other libraries
    "from_torch_of_a_dense_tensor": (
        lambda: BsrWeight.from_torch(torch.ones(4, 4)),
        TypeError,
        "got torch.strided",
    ),
    "from_torch_of_a_list": (lambda: BsrWeight.from_torch([[1.0]]), TypeError, "got list"),
    "from_torch_wrong_true_shape": (
        lambda: BsrWeight.from_torch(weight().to_torch(), shape=(2, 6)),
        ValueError,
        "shape must be (4, 6) before padding",
    ),
    "from_scipy_coo": (lambda: BsrWeight.from_scipy(scipy.sparse.coo_array(np.eye(3))), TypeError, "got coo"),
    "from_scipy_complex": (
        lambda: BsrWeight.from_scipy(scipy.sparse.csr_array(np.eye(3) * 1j)),
        TypeError,
        "complex128",
    ),
    "from_scipy_other_block": (
        lambda: BsrWeight.from_scipy(weight().to_scipy(), block_shape=(4, 2)),
        ValueError,
        "block_shape must be that of the matrix",
    ),
    "to_scipy_bfloat16": (lambda: weight().bfloat16().to_scipy(), TypeError, "[BsrWeight.to_scipy]"),
    "to_torch_not_a_multiple": (
        lambda: BsrWeight.from_dense(torch.ones(3, 5), block_shape=(2, 2)).to_torch(),
        ValueError,
        "multiple of block_shape (2, 2), or pad=True; got (3, 5)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    assert_refused(*CASES[name])


def other_pattern(state):
    state["weight.col_indices"] = state["weight.col_indices"].flip(0)


def moved_block(state):
    """The same number of blocks, elsewhere."""
    state["weight.crow_indices"] = torch.tensor([0, 0, 3], dtype=torch.int32)
    state["weight.col_indices"] = torch.tensor([0, 1, 2], dtype=torch.int32)


def fewer_blocks(state):
    state["weight.values"] = state["weight.values"][:2]
    state["weight.col_indices"] = state["weight.col_indices"][:2]
    state["weight.crow_indices"] = torch.tensor([0, 1, 2], dtype=torch.int32)


def change(key, value):
    return lambda state: state.update({key: value})


STATE_CASES = {
    "other_columns": (other_pattern, ValueError, "col_indices must be of this module's pattern"),
    "same_count_other_pattern": (moved_block, ValueError, "crow_indices[1]=0"),
    "fewer_blocks": (fewer_blocks, ValueError, "whose crow_indices[2]=3"),
    "values_of_another_block": (
        change("weight.values", torch.ones(3, 4, 1)),
        ValueError,
        "weight.values must be of shape",
    ),
    "values_are_text": (
        change("weight.values", "1"),
        TypeError,
        "weight.values must be a torch.Tensor; got str",
    ),
    "indices_are_floats": (
        change("weight.col_indices", torch.ones(3)),
        TypeError,
        "int32 or int64; got float32",
    ),
    "padding_not_zero": (change("weight.values", torch.ones(3, 2, 2)), ValueError, "must be zero padding"),
    "bias_of_another_size": (change("bias", torch.ones(5)), ValueError, "bias must be of shape (4,)"),
    "dense_weight": (change("weight", torch.ones(4, 5)), ValueError, "weight must be block-sparse"),
}


@pytest.mark.parametrize("name", STATE_CASES)
def test_state_dict_that_does_not_fit_leaves_the_layer_alone(name):
    edit, kind, part = STATE_CASES[name]
    index = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 0, 2], dtype=torch.int32)
    values = torch.rand(3, 2, 2)
    values[2, :, 1] = 0  # the last column of a 4×5 matrix in 2×2 blocks is padded
    module = BlockSparseLinear.from_weight(
        BsrWeight(values, *index, shape=(4, 5), block_shape=(2, 2)), torch.rand(4)
    )
    state = {key: tensor + (key == "bias") for key, tensor in copy.deepcopy(module.state_dict()).items()}
    edit(state)
    before, plan = snapshot(module), module.weight.plan.clone()
    assert_refused(lambda: module.load_state_dict(state), kind, part)
    assert_unchanged(module, before)
    assert torch.equal(module.weight.plan, plan)
