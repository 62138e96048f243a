"""Defects of the original pytorch_block_sparse, each of which is right here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rarefy.compat.pytorch_block_sparse import (
    BlockSparseLinear,
    BlockSparseLinearFunction,
    BlockSparseMatrix,
    BlockSparseMatrixEmulator,
    BlockSparseModelPatcher,
    MagnitudeSparseOptimizerStrategy,
    OptimizerStateUpdater,
    SparseOptimizer,
)

KINDS = [BlockSparseMatrix, BlockSparseMatrixEmulator]


def test_defect_any_stream_and_device(device):
    """Kernels launched on stream 0 without a device guard, and error codes were ignored."""
    layer = BlockSparseLinear(64, 64, device=device)
    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            y = layer(torch.randn(4, 64, device=device))
        torch.cuda.synchronize()
        assert y.isfinite().all()
    with pytest.raises(ValueError, match="in_features=64"):
        layer(torch.randn(4, 63, device=device))


def test_defect_a_weight_gradient_of_zeros_is_no_crash():
    """Its backward asserted that the gradient is not zero everywhere, and waited for the GPU to know."""
    layer = BlockSparseLinear(64, 64)
    (layer(torch.randn(4, 64)) * 0).sum().backward()
    assert not layer.weight.values.grad.any()


def test_defect_plain_backward_of_a_layer_and_of_one_without_an_input_gradient():
    """Issue 14: AttributeError in loss.backward(); an input that needs no gradient met an assert, too."""
    layer, x = BlockSparseLinear(64, 96, density=0.3), torch.randn(3, 64, requires_grad=True)
    dense = layer.weight.to_dense().detach()
    y = BlockSparseLinearFunction.apply(x, layer.weight.data, layer.weight)
    torch.testing.assert_close(y, x @ dense.T)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x @ dense.T @ dense), rtol=1e-4, atol=1e-4)
    layer.zero_grad()
    layer(torch.randn(3, 64)).sum().backward()
    assert layer.weight.values.grad is not None


def test_defect_results_are_contiguous():
    """Results were transposed views of zeros, and biases a second pass."""
    layer = BlockSparseLinear(64, 96)
    x = torch.randn(2, 3, 64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.is_contiguous() and x.grad.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_defect_from_dense_keeps_the_largest_blocks_in_their_places(kind):
    """from_dense with a block_count put the first values of the matrix into random places."""
    dense = torch.randn(64, 96)
    dense[32:, :32] *= 3
    dense[:32, 64:] *= 2
    matrix = kind.from_dense(dense, (32, 32), block_count=2)
    assert matrix.block_mask().nonzero().tolist() == [[0, 2], [1, 0]]
    matrix.check_with_dense(dense)
    assert torch.equal(kind.from_dense(dense).to_dense(), dense)
    chosen = kind.from_dense(dense, blocks=[(1, 1)])
    assert torch.equal(chosen.data, dense[32:, 32:64])
    assert kind.from_dense(2 * dense, out=chosen) is chosen and torch.equal(
        chosen.data, 2 * dense[32:, 32:64]
    )


def test_defect_the_pattern_follows_torchs_seed():
    """Positions came from numpy's generator, whatever torch.manual_seed said."""
    masks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        masks.append(BlockSparseMatrix.zeros((320, 320), n_blocks=20).block_mask())
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    own = [BlockSparseMatrix.zeros((320, 320), 20, generator=torch.Generator().manual_seed(1)) for _ in "12"]
    assert torch.equal(own[0].block_mask(), own[1].block_mask())


@pytest.mark.parametrize("distribution", ["uniform", "gaussian"])
def test_defect_new_coefficients_are_random(distribution):
    """What it called uniform drew the integer 0 alone: every new value was −σ·scale."""
    matrix = BlockSparseMatrix.randn((256, 256), n_blocks=32)
    before, deviation = matrix.to_dense(), float(matrix.data.detach().std())
    keep = MagnitudeSparseOptimizerStrategy(0.25, distribution, 0.5).run(matrix)
    new = matrix.data.detach()[keep == 0] / (0.5 * deviation)
    assert len(new) == 8 * 1024 and len(new.unique()) > 7000 and abs(float(new.mean())) < 0.1
    assert abs(float(new.std()) - (3**-0.5 if distribution == "uniform" else 1)) < 0.05
    if distribution == "uniform":
        assert new.abs().max() <= 1
    kept = matrix.to_dense(keep).bool()
    assert torch.equal(matrix.to_dense()[kept], before[kept])


def test_defect_blocks_move_to_places_that_the_same_call_leaves():
    """block_replace looked at places that were about to be left, and called them taken."""
    matrix = BlockSparseMatrix.randn((8, 8), blocks=[(0, 0), (0, 1), (1, 1)], block_shape=(4, 4))
    data = matrix.data.detach().clone().view(3, 4, 4)
    optimizer = torch.optim.SGD(matrix.parameters(), lr=0.0, momentum=0.9)
    matrix.values.grad = torch.arange(48.0).view(3, 4, 4)
    optimizer.step()
    source = matrix.block_replace([(0, 1, 0), (0, 0, 1)], optimizer=optimizer)  # they change places
    assert source.tolist() == [1, 0, 2]
    assert torch.equal(matrix.data.view(3, 4, 4), data[[1, 0, 2]])
    moved = torch.arange(48.0).view(3, 4, 4)[[1, 0, 2]]
    assert torch.equal(optimizer.state[matrix.values]["momentum_buffer"], moved)
    assert torch.equal(matrix.values.grad, moved)
    matrix.block_replace(torch.tensor([[1, 0, 2]]))
    assert matrix.block_mask().tolist() == [[True, True], [True, False]]
    before = matrix.to_dense()
    for bad in ([(0, 1, 0)], [(2, 0, 0)], [(0, 0, 3)], [(1, 1, 0), (1, 1, 1)], [(1, 1, 0), (0, 0, 0)]):
        with pytest.raises(ValueError, match="block_replace"):
            matrix.block_replace(bad)
    assert torch.equal(matrix.to_dense(), before)


def test_defect_the_optimizer_works_at_high_density():
    """Where fewer places were free than blocks to move, sizes did not fit."""
    matrix = BlockSparseMatrix.randn((64, 64), n_blocks=15, block_shape=(16, 16))
    optimizer = torch.optim.Adam(matrix.parameters())
    sparse = SparseOptimizer([matrix], lr=0.5)
    sparse.attach_optimizer(optimizer)
    for _ in range(3):
        sparse.step()
        assert matrix.nnzb == 15
    full = BlockSparseMatrix.randn((64, 64), n_blocks=16, block_shape=(16, 16))
    before = full.to_dense()
    MagnitudeSparseOptimizerStrategy(0.5).run(full)
    assert torch.equal(full.to_dense(), before)


def test_defect_warnings_are_raised():
    """Warning objects were made and dropped."""
    matrix = BlockSparseMatrix.randn((64, 64), n_blocks=2)
    optimizer, sparse = torch.optim.Adam(matrix.parameters()), SparseOptimizer(matrix)
    with pytest.warns(UserWarning, match="no optimizer is attached"):
        sparse.step()
    sparse.attach_optimizer(optimizer)
    with pytest.warns(UserWarning, match="attached already"):
        sparse.attach_optimizer(optimizer)
    model = nn.Sequential(nn.Linear(32, 32))
    patcher = BlockSparseModelPatcher()
    patcher.add_pattern("nothing", {"density": 0.5})
    with pytest.warns(UserWarning, match="'nothing' matches no module"):
        patcher.patch_model(model)


def test_defect_sanity_check_knows_the_last_column():
    """A block column one past the matrix passed."""
    matrix = BlockSparseMatrix.randn((64, 96), n_blocks=4)
    cols, ends = matrix.cols_a, matrix.row_start_ends_a[1:]
    matrix.sanity_check(cols, ends, (64, 96), (32, 32))
    past = cols.clone()
    past[0, 0] = 3
    with pytest.raises(ValueError, match=r"columns must be in \[0, 3\)"):
        matrix.sanity_check(past, ends, (64, 96), (32, 32))
    for bad in (ends.flip(0), ends[:-1], ends + 1):
        with pytest.raises(ValueError, match="sanity_check"):
            matrix.sanity_check(cols, bad, (64, 96), (32, 32))


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_defect_all_of_an_optimizers_state_follows(optimizer_type, options):
    """The updater asked for max_exp_avg_sq under another name and failed, and knew Adam alone."""
    torch.manual_seed(0)
    layer = BlockSparseLinear(64, 64, block_shape=(16, 16))
    optimizer = optimizer_type(layer.parameters(), lr=0.01, **options)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    matrix, state = layer.weight, optimizer.state[layer.weight.values]
    keys = [k for k, t in state.items() if isinstance(t, torch.Tensor) and t.shape == matrix.values.shape]
    dense = {k: matrix.to_dense(state[k].reshape(matrix.data.shape)) for k in keys}
    old, values = matrix.block_mask(), matrix.to_dense().detach()
    sparse = SparseOptimizer(SparseOptimizer.sparse_objects(layer), lr=0.25)
    sparse.attach_optimizer(optimizer)
    sparse.step()
    both = matrix.block_mask() & old
    assert int(both.sum()) == matrix.nnzb - 2
    kept = both.repeat_interleave(16, 0).repeat_interleave(16, 1)
    for k in keys:
        assert torch.equal(matrix.to_dense(state[k].reshape(matrix.data.shape)), dense[k] * kept), k
    assert torch.equal(matrix.to_dense().detach()[kept], values[kept])
    assert keys and OptimizerStateUpdater(optimizer, matrix).update_state(torch.zeros_like(matrix.data))
    assert all(not state[k].any() for k in keys)


def test_defect_state_dicts_of_another_pattern_and_density_load():
    """load_state_dict failed unless the patterns' sizes agreed; the original's own test is switched off."""
    torch.manual_seed(0)
    first, second = BlockSparseLinear(64, 96, density=0.5), BlockSparseLinear(64, 96, density=0.3)
    x = torch.randn(3, 64)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), first(x)) and second.weight.nnzb == first.weight.nnzb
