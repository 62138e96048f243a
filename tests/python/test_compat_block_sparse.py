"""rarefy.compat.pytorch_block_sparse: every public name, and one test for each defect of the original."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import rarefy
from rarefy.compat import pytorch_block_sparse as pbs
from rarefy.compat.pytorch_block_sparse import (
    AdamOptimizerStateUpdater,
    BlockSparseLinear,
    BlockSparseMatrix,
    BlockSparseMatrixEmulator,
    BlockSparseModelPatcher,
    MagnitudeSparseOptimizerStrategy,
    ModelPatcher,
    PseudoBlockSparseLinear,
    SparseOptimizer,
)

ROW = torch.zeros(1, 32)
KINDS = [BlockSparseMatrix, BlockSparseMatrixEmulator]
SHAPES = [((64, 96), (32, 32)), ((64, 64), (16, 32)), ((40, 70), (4, 3)), ((128, 64), (64, 1))]


def of(matrix) -> torch.Tensor:
    """The dense matrix by a plain loop over blocks."""
    (n, k), (r, c) = matrix.shape, matrix.block_shape
    dense = torch.zeros(-(-n // r) * r, -(-k // c) * c)
    for e, (i, j) in enumerate(matrix.block_mask().nonzero().tolist()):
        dense[i * r : (i + 1) * r, j * c : (j + 1) * c] = matrix.data.detach()[e * r : (e + 1) * r]
    return dense[:n, :k]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_matrices_multiply_as_the_dense_one_does(kind, shape, block, device):
    matrix = kind.randn(shape, n_blocks=5, block_shape=block).to(device)
    dense = of(matrix.cpu()).to(device)
    matrix = matrix.to(device)
    assert torch.equal(matrix.to_dense(), dense) and matrix.shape == shape
    x = torch.randn(2, 5, shape[1], device=device, requires_grad=True)
    dy = torch.randn(2, 5, shape[0], device=device)
    close = {"rtol": 1e-4, "atol": 1e-4}
    y = matrix.reverse_matmul(x, transpose=True)
    torch.testing.assert_close(y, x @ dense.T, **close)
    torch.testing.assert_close(matrix.reverse_matmul(dy, transpose=False), dy @ dense, **close)
    torch.testing.assert_close(matrix.reverse_matmul_(x[0]), x[0].detach() @ dense.T, **close)
    full = dy.reshape(10, -1).T @ x.detach().reshape(10, -1)
    mask = (dense != 0).to(device)
    blocks = matrix.matmul_with_output_sparse_support(dy, x)
    torch.testing.assert_close(matrix.to_dense(data_replace=blocks).detach(), full * mask, **close)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy @ dense, **close)
    torch.testing.assert_close(matrix.to_dense(matrix.values.grad.view_as(matrix.data)), full * mask, **close)
    flat, info = matrix.flatten_first_dims(x)
    assert torch.equal(matrix.unflatten_first_dims(flat, info), x)
    assert torch.equal(matrix.tensor_prepare(x, "x", True), x.mT)


@pytest.mark.parametrize("kind", KINDS)
def test_constructors_and_accessors(kind):
    shape, block = (64, 96), (32, 16)
    assert kind.blocks_count_(shape, block) == (2, 6)
    zeros = kind.zeros(shape, n_blocks=5, block_shape=block)
    assert zeros.blocks_count() == (2, 6) and zeros.nnzb == 5 and not zeros.data.any()
    ones = kind.ones(shape, blocks=[(0, 1), (1, 5)], block_shape=block)
    assert set(ones.data.unique().tolist()) == {-1.0, 1.0}
    assert ones.build_coo_block_index().tolist() == [[0, 1], [1, 5]]
    assert kind.ones(shape, n_blocks=2, block_shape=block, positive=True).data.unique().tolist() == [1.0]
    normal = kind.randn(shape, n_blocks=12, block_shape=block)
    assert (
        abs(float(normal.data.detach().std()) - 1) < 0.05
        and (kind.randn(shape, 3, positive=True).data >= 0).all()
    )
    torch.testing.assert_close(normal.block_norm(), normal.data.view(12, -1).norm(dim=1))
    torch.testing.assert_close(normal.block_norm(1), normal.data.view(12, -1).abs().sum(1))
    before = normal.to_dense()
    assert torch.equal(normal.multiply_(2.0).to_dense(), 2 * before)
    normal.data = normal.data / 2
    assert torch.equal(normal.to_dense(), before)
    coo = normal.to_sparse().to_dense().transpose(1, 2).reshape(shape)
    assert torch.equal(coo, before) and torch.equal(normal.updated_data(), normal.get_differentiable_data())
    normal.check_with_dense(before)
    with pytest.raises(ValueError, match="must be those of dense"):
        normal.check_with_dense(before + 1)
    assert torch.equal(normal.block_mask_build(None), torch.ones(2, 6, dtype=torch.bool))
    assert normal.block_mask_build(torch.tensor([[1, 2, 0]])).nonzero().tolist() == [[1, 2]]
    assert torch.equal(ones.cols_a, torch.tensor([[1, 0], [5, 1]], dtype=torch.int32))
    assert ones.row_start_ends_a.tolist() == [0, 1, 2] and ones.rows_b.tolist() == [[0, 0], [1, 1]]
    assert ones.col_start_ends_b.tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert ones.build_indices(ones.block_mask())["blocks"].tolist() == [1, 0, 5, 1]


def test_rebuild_takes_another_mask_and_order():
    matrix = BlockSparseMatrix.randn((8, 12), blocks=[(0, 0), (0, 2), (1, 1)], block_shape=(4, 4))
    data = matrix.data.detach().clone().view(3, 4, 4)
    mask = torch.tensor([[False, True, False], [True, False, True]])
    matrix.rebuild(mask, torch.tensor([[0, 2, 0], [0, 0, 1]]))
    assert torch.equal(matrix.block_mask(), mask)
    assert torch.equal(matrix.data.view(3, 4, 4), data[[2, 0, 1]])
    with pytest.raises(ValueError, match="must have 3 of"):
        matrix.rebuild(~mask.new_zeros(mask.shape))


# -- the original's defects -----------------------------------------------------------------------


def test_state_dicts_of_the_original_load():
    """Blocks lie transposed in its data, in any order that its index gives."""
    torch.manual_seed(0)
    dense = torch.randn(64, 96)
    places = [(1, 2), (0, 1), (1, 0)]  # as data holds them
    blocks = [dense[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] for i, j in places]
    state = {
        "weight.data": torch.cat([block.T for block in blocks]),
        "weight.cols_a": torch.tensor([[1, 1], [0, 2], [2, 0]], dtype=torch.int32),
        "weight.row_start_ends_a": torch.tensor([0, 1, 3], dtype=torch.int32),
        "weight.rows_b": torch.tensor([[1, 2], [0, 1], [1, 0]], dtype=torch.int32),
        "weight.col_start_ends_b": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        "weight.blocks": torch.tensor([1, 0, 0, 1, 2, 1], dtype=torch.int32),
        "bias": torch.randn(64),
    }
    layer = BlockSparseLinear(96, 64)
    layer.load_state_dict(state)
    expected = torch.zeros(64, 96)
    for (i, j), block in zip(places, blocks, strict=True):
        expected[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] = block
    assert torch.equal(layer.weight.to_dense(), expected) and torch.equal(layer.bias, state["bias"])


@pytest.mark.parametrize("block", [(32, 32), (64, 64), (128, 128), (4, 1), (7, 5)])
def test_any_block_shape_is_stored_and_any_size_fits(block):
    """Other shapes than 32×32 became dense emulators without a word, or gave wrong results (issues 9, 20)."""
    layer = BlockSparseLinear(130, 197, density=0.4, block_shape=block)
    assert type(layer.weight) is BlockSparseMatrix
    blocks = -(-197 // block[0]) * -(-130 // block[1])
    assert layer.block_count == layer.weight.nnzb == int(0.4 * blocks)
    x = torch.randn(5, 130)
    expected = functional.linear(x, of(layer.weight), layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_layers_of_dense_ones_and_their_twins():
    torch.manual_seed(0)
    dense = nn.Linear(64, 96, dtype=torch.float64).eval()
    layer = BlockSparseLinear(0, 0, torch_nn_linear=dense, density=0.25)
    assert (layer.in_features, layer.out_features, layer.block_count) == (64, 96, 1) and not layer.training
    best = max(
        (float(dense.weight[i : i + 32, j : j + 32].detach().norm()), i, j)
        for i in (0, 32, 64)
        for j in (0, 32)
    )
    block = dense.weight[best[1] : best[1] + 32, best[2] : best[2] + 32]
    assert torch.equal(layer.weight.data, block * 2) and torch.equal(layer.bias, dense.bias)
    twin = PseudoBlockSparseLinear(layer)
    x = torch.randn(4, 64, dtype=torch.float64)
    torch.testing.assert_close(twin(x), layer(x))
    assert twin.bias is layer.bias and twin.density == pytest.approx(1 / 6) and "fill_ratio" in repr(twin)
    twin(x).sum().backward()
    assert not twin.weight.grad[~twin.mask].any()
    assert isinstance(layer, rarefy.BlockSparseLinear) and not BlockSparseLinear(32, 32).bias.any()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.again = self.up

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x) + self.again(x))))


def test_the_patcher_replaces_what_names_begin_with():
    model, patcher = Net(), BlockSparseModelPatcher()
    layers = patcher.get_patchable_layers(model)
    assert [x["regexp"] for x in layers] == ["up", "down"] and layers[0]["layer"] is model.up
    patcher.add_pattern("u", {"density": 0.5})
    patcher.add_pattern("again", {"density": 0.5})
    patcher.add_pattern("down", {"density": 0.5, "pseudo_linear": True, "block_shape": (16, 16)})
    assert patcher.pattern_match("upper")[0] and patcher.pattern_match("xup") == (False, -1)
    patcher.patch_model(model)
    assert type(model.up) is BlockSparseLinear and model.again is model.up
    assert type(model.down) is PseudoBlockSparseLinear and model.down.mask.float().mean() == 0.5
    model(torch.randn(3, 32)).sum().backward()
    before = model.norm
    bad = BlockSparseModelPatcher()
    bad.add_pattern("norm", {"density": 0.5})
    with pytest.raises(TypeError, match=r"norm must be an nn\.Linear"):
        bad.patch_model(model)
    assert model.norm is before
    with pytest.raises(ValueError, match="must have a density"):
        bad.add_pattern("x", {"densty": 0.5})
    with pytest.raises(ValueError, match="regular expression"):
        bad.add_pattern("(", {"density": 0.5})
    with pytest.raises(NotImplementedError):
        ModelPatcher().new_child_module("x", model, {})


def test_groups_schedulers_and_checkpoints_of_the_optimizer():
    a, b = (BlockSparseMatrix.randn((64, 64), n_blocks=2) for _ in "ab")
    sparse = SparseOptimizer([a], lr=0.5)
    sparse.add_param_group({"sparse_objects": b, "lr": 0.0, "new_coefficients_distribution": "gaussian"})
    sparse.attach_optimizer(torch.optim.Adam([a.values, b.values]))
    schedule = torch.optim.lr_scheduler.StepLR(sparse, 1, gamma=0.0)
    before = b.to_dense()
    sparse.step()
    schedule.step()
    now = a.to_dense()
    sparse.step()  # at lr 0 nothing moves
    assert torch.equal(a.to_dense(), now) and torch.equal(b.to_dense(), before)
    other = SparseOptimizer([{"sparse_objects": [a]}, {"sparse_objects": [b]}])
    other.load_state_dict(sparse.state_dict())
    assert [g["lr"] for g in other.param_groups] == [0.0, 0.0]
    assert other.param_groups[1]["new_coefficients_distribution"] == "gaussian"
    for bad, text in (
        ({"sparse_objects": a}, "in one group, once"),
        ({"sparse_objects": [], "lr": 2.0}, r"in \[0, 1\]"),
        ({"sparse_objects": [], "rate": 1}, "keys of"),
        ({"sparse_objects": [], "method": "size"}, "near names: magnitude"),
        ({"sparse_objects": [], "new_coefficients_distribution": "normal"}, "known one"),
    ):
        with pytest.raises(ValueError, match=text):
            sparse.add_param_group(bad)
    with pytest.raises(TypeError, match="must be BlockSparseMatrix"):
        SparseOptimizer([nn.Linear(2, 2)])
    stranger = SparseOptimizer([a])
    stranger.attach_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))
    with pytest.raises(ValueError, match="must have the matrix's values"):
        stranger.step()
    assert AdamOptimizerStateUpdater.is_compatible(torch.optim.AdamW([a.values]))
    assert not AdamOptimizerStateUpdater.is_compatible(torch.optim.SGD([a.values], lr=0.1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BlockSparseMatrix.zeros((64, 64)), "either n_blocks or blocks"),
        (lambda: BlockSparseMatrix.zeros((64, 64), 5), "at most 4"),
        (lambda: BlockSparseMatrix.zeros((64, 64), blocks=[(2, 0)]), "must lie in"),
        (lambda: BlockSparseMatrix.from_dense(torch.zeros(64, 64), block_count=5), "at most 4"),
        (lambda: BlockSparseMatrix((64, 64), torch.ones(2, 3).bool(), ROW), "block_mask must be"),
        (lambda: BlockSparseMatrix((64, 64), torch.ones(2, 2).bool(), ROW), "data must be of shape"),
        (lambda: BlockSparseLinear(64, 64, density=1.5), r"in \[0, 1\]"),
        (lambda: MagnitudeSparseOptimizerStrategy(2.0), r"in \[0, 1\]"),
        (lambda: MagnitudeSparseOptimizerStrategy(0.2, "unifrom"), "near names: uniform"),
    ],
)
def test_bad_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_the_whole_public_surface_is_there():
    for name in pbs.__all__:
        assert getattr(pbs, name).__doc__
    methods = """updated_data get_differentiable_data rebuild blocks_count_ blocks_count build_indices_
        build_indices
        block_norm block_mask_build block_replace zeros ones randn from_dense multiply_ build_coo_block_index
        to_sparse to_dense sanity_check check_with_dense tensor_prepare reverse_matmul_ reverse_matmul
        flatten_first_dims unflatten_first_dims matmul_with_output_sparse_support_
        matmul_with_output_sparse_support"""
    for kind in KINDS:
        for method in methods.split():
            assert getattr(kind, method).__doc__, method


def test_training_with_a_moving_pattern_warns_of_nothing_and_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    patcher = BlockSparseModelPatcher()
    patcher.add_pattern("[02]", {"density": 0.5, "block_shape": (8, 8)})
    patcher.patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparse = SparseOptimizer(SparseOptimizer.sparse_objects(model), lr=0.1)
    sparse.attach_optimizer(optimizer)
    x = torch.randn(64, 32)
    target, losses = x.roll(1, 1), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(60):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                sparse.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
