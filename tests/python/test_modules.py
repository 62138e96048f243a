"""BlockSparseLinear as a drop-in for nn.Linear, and PseudoBlockSparseLinear as its oracle."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import rarefy
from helpers import ROUNDOFF, assert_within_bound
from rarefy import BlockSparseLinear, PseudoBlockSparseLinear, masks, values

SIZES = [
    (16, 8, (4, 4)),
    (10, 7, (4, 3)),
    (33, 65, (16, 16)),
    (5, 9, (1, 1)),
    (64, 64, (32, 32)),
]  # K, N, block
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def twins(k=10, n=7, block_shape=(4, 3), **kwargs) -> tuple[BlockSparseLinear, PseudoBlockSparseLinear]:
    sparse = BlockSparseLinear(k, n, block_shape=block_shape, **kwargs)
    return sparse, PseudoBlockSparseLinear.from_sparse(sparse)


# Conversion ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n", "block_shape"), SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_density_one_is_the_same_layer_bit_for_bit(k, n, block_shape, dtype, bias):
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    back = BlockSparseLinear.from_dense(linear, block_shape=block_shape).to_dense()
    assert type(back) is nn.Linear
    assert back.state_dict().keys() == linear.state_dict().keys()
    for key, tensor in linear.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key


@pytest.mark.parametrize(("k", "n", "block_shape"), SIZES)
@pytest.mark.parametrize("density", [0.0, 0.25, 0.5, 0.9])
def test_lower_density_is_the_masked_dense_layer(k, n, block_shape, density, device):
    linear = nn.Linear(k, n, device=device)
    with torch.no_grad():  # integers: sums are exact in any order
        linear.weight.copy_(torch.randint(-2, 3, (n, k)))
        linear.bias.copy_(torch.randint(-2, 3, (n,)))
    sparse = BlockSparseLinear.from_dense(linear, block_shape=block_shape, density=density)
    kept = masks.expand_mask(sparse.weight.block_mask(), (n, k), block_shape)
    x = torch.randint(-2, 3, (6, k), device=device).float()
    assert torch.equal(sparse(x), nn.functional.linear(x, linear.weight * kept, linear.bias))
    assert torch.equal(sparse.to_dense().weight, linear.weight * kept)


def test_conversion_carries_device_dtype_mode_and_requires_grad_and_copies():
    linear = nn.Linear(10, 7, dtype=torch.float64).eval()
    linear.weight.requires_grad_(False)
    sparse = BlockSparseLinear.from_dense(linear, block_shape=(4, 3), density=0.5)
    assert not sparse.training and not sparse.weight.training
    assert not sparse.weight.values.requires_grad and sparse.bias.requires_grad
    assert sparse.weight.dtype == sparse.bias.dtype == torch.float64
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
    assert sparse.weight.values.any() and sparse.bias.any()
    back = sparse.to_dense()
    assert not back.training and not back.weight.requires_grad and back.bias.requires_grad


@pytest.mark.parametrize(("k", "n", "block_shape"), SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sparse_and_pseudo_agree_within_the_bound(k, n, block_shape, dtype, device):
    sparse, pseudo = twins(k, n, block_shape, dtype=dtype, device=device)
    x = torch.randn(3, 5, k, dtype=dtype, device=device)
    dense, bias = sparse.weight.to_dense().detach().double(), sparse.bias.detach().double()
    expected = x.double() @ dense.T + bias
    magnitude = x.double().abs() @ dense.abs().T + bias.abs()
    for layer in (sparse, pseudo):
        assert_within_bound(layer(x).detach().cpu(), expected.cpu(), magnitude.cpu(), k + 1)


def test_pseudo_and_sparse_convert_into_each_other_exactly():
    sparse, pseudo = twins(density=0.4)
    again = pseudo.to_sparse()
    assert torch.equal(again.weight.crow_indices, sparse.weight.crow_indices)
    assert torch.equal(again.weight.col_indices, sparse.weight.col_indices)
    assert torch.equal(again.weight.values, sparse.weight.values) and torch.equal(again.bias, sparse.bias)
    assert pseudo.density == sparse.density and pseudo.block_shape == sparse.block_shape
    assert torch.equal(pseudo.to_dense().weight, sparse.to_dense().weight)


def test_pseudo_masks_even_what_was_written_outside_its_pattern():
    sparse, pseudo = twins()
    with torch.no_grad():
        pseudo.weight[~pseudo.element_mask()] = float("nan")
    x = torch.randn(4, 10)
    torch.testing.assert_close(pseudo(x), sparse(x))
    pseudo(x).sum().backward()
    assert not pseudo.weight.grad[~pseudo.element_mask()].any()


def test_pseudo_from_dense_chooses_the_same_blocks():
    linear = nn.Linear(10, 7)
    arguments = {"block_shape": (4, 3), "density": 0.5}
    sparse = BlockSparseLinear.from_dense(linear, **arguments)
    pseudo = PseudoBlockSparseLinear.from_dense(linear, **arguments)
    assert torch.equal(sparse.weight.block_mask(), pseudo.block_mask)
    assert torch.equal(sparse.to_dense().weight, pseudo.to_dense().weight)


# Construction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [BlockSparseLinear, PseudoBlockSparseLinear])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_the_number_of_blocks_is_exact(layer, density):
    made = layer(100, 60, density=density, block_shape=(8, 8))
    assert made.density == round(density * 13 * 8) / (13 * 8)


def test_patterns_are_fair():
    """Each block is stored equally often: 4000 draws of half of 12 blocks, within 5 standard deviations."""
    generator = torch.Generator().manual_seed(1)
    counts = sum(masks.random_blocks((3, 4), 0.5, generator).long() for _ in range(4000))
    assert (counts - 2000).abs().max() < 5 * math.sqrt(4000 * 0.25)


def test_generator_makes_layers_repeatable_and_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    a, b = (BlockSparseLinear(30, 20, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a.to_dense().weight, b.to_dense().weight) and torch.equal(a.bias, b.bias)


def test_a_generator_of_the_host_draws_the_same_layer_on_every_device(device):
    options = {"density": 0.5, "block_shape": (4, 2)}
    here, there = (
        BlockSparseLinear(30, 20, generator=torch.Generator().manual_seed(3), device=d, **options)
        for d in ("cpu", device)
    )
    assert torch.equal(here.to_dense().weight, there.to_dense().weight.cpu())
    assert torch.equal(here.bias, there.bias.cpu())


@pytest.mark.parametrize("layer", [BlockSparseLinear, PseudoBlockSparseLinear])
@pytest.mark.parametrize("density", [0.25, 1.0])
def test_initial_values_have_the_bound_of_the_stored_fan_in(layer, density):
    made = layer(1000, 640, density=density, block_shape=(16, 7))
    dense = made.to_dense().weight.detach()
    stored = (dense != 0).sum(1)
    bound = stored.double().rsqrt()
    assert (dense.abs().max(1).values <= bound * (1 + 4 * ROUNDOFF[torch.float32])).all()
    # Uniform in ±b has the variance b²/3; 640 rows of hundreds of values estimate it to 1 %.
    variance = (dense.double().square().sum(1) / stored) / (bound**2 / 3)
    assert abs(variance.mean() - 1) < 0.01
    assert made.bias.abs().max() <= 1 / math.sqrt(1000)


def test_bounds_count_the_features_inside_the_matrix():
    """Blocks 3 wide on 7 columns: the last one has 1 of them."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 0, 0]]).bool()
    stored = torch.tensor([7, 4, 1]).double()
    assert torch.equal(values.init_bounds(mask, 7, 3), torch.cat([stored.rsqrt(), torch.zeros(1).double()]))


def test_reset_parameters_keeps_pattern_and_padding():
    layer = BlockSparseLinear(10, 7, block_shape=(4, 3))
    mask, values = layer.weight.block_mask(), layer.weight.values.detach().clone()
    layer.reset_parameters()
    assert torch.equal(layer.weight.block_mask(), mask) and not torch.equal(layer.weight.values, values)
    rarefy.BsrWeight(
        layer.weight.values,
        layer.weight.crow_indices,
        layer.weight.col_indices,
        shape=(7, 10),
        block_shape=(4, 3),
    )


def test_default_device_and_dtype_are_followed():
    with torch.device("meta"):
        layer = BlockSparseLinear(64, 32, dtype=torch.bfloat16)
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    assert layer.weight.dtype == torch.bfloat16 and layer.density == 0.5
    real = layer.to_empty(device="cpu")
    real.reset_parameters()
    assert real(torch.ones(2, 64, dtype=torch.bfloat16)).isfinite().all()


def test_attributes_are_those_of_nn_linear():
    layer = BlockSparseLinear(10, 7, bias=False, density=0.5, block_shape=(4, 3))
    assert (layer.in_features, layer.out_features, layer.bias) == (10, 7, None)
    assert layer.weight.shape == torch.Size((7, 10)) and layer.weight.dtype == torch.float32
    assert "in_features=10, out_features=7, bias=False, density=0.5, block_shape=(4, 3)" in repr(layer)
    assert sum(p.numel() for p in BlockSparseLinear(10, 7, block_shape=(4, 3)).parameters()) == 4 * 12 + 7


# Forward and backward ------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 0, 4), (1, 1, 1, 5)])
def test_any_leading_dimensions(leading):
    sparse, pseudo = twins()
    x = torch.randn(*leading, 10)
    assert sparse(x).shape == (*leading, 7)
    torch.testing.assert_close(sparse(x), pseudo(x))


@pytest.mark.parametrize("layout", ["transposed", "strided", "broadcast", "reversed"])
def test_layouts_of_x(layout):
    sparse, _ = twins()
    x = {
        "transposed": lambda: torch.randn(10, 6).T,
        "strided": lambda: torch.randn(6, 20)[:, ::2],
        "broadcast": lambda: torch.randn(10).expand(6, 10),
        "reversed": lambda: torch.randn(3, 6, 10).transpose(0, 1),
    }[layout]()
    assert not x.is_contiguous()
    assert torch.equal(sparse(x), sparse(x.contiguous()))


def test_layers_without_blocks_or_features():
    x = torch.randn(3, 10)
    empty = BlockSparseLinear(10, 7, density=0.0, block_shape=(4, 3))
    assert empty.weight.nnzb == 0 and torch.equal(empty(x), empty.bias.expand(3, 7))
    assert BlockSparseLinear(10, 0, block_shape=(4, 3))(x).shape == (3, 0)
    no_input = BlockSparseLinear(0, 7, block_shape=(4, 3))
    assert torch.equal(no_input(torch.randn(3, 0)), no_input.bias.expand(3, 7))


def test_gradients_are_those_of_the_oracle():
    sparse, pseudo = twins(33, 65, (16, 16), density=0.4, dtype=torch.float64)
    x = torch.randn(6, 33, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    upstream = torch.randn(6, 65, dtype=torch.float64)
    for layer, leaf in zip((sparse, pseudo), inputs, strict=True):
        layer(leaf).backward(upstream)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(sparse.bias.grad, pseudo.bias.grad)
    blocks = masks.to_blocks(pseudo.weight.grad, (16, 16))[pseudo.block_mask]
    torch.testing.assert_close(sparse.weight.values.grad, blocks)


def test_training_follows_the_oracle_step_by_step():
    sparse, pseudo = twins(16, 8, (4, 4), dtype=torch.float64)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (sparse, pseudo)]
    for _ in range(10):
        x = torch.randn(12, 16, dtype=torch.float64)
        for layer, optimizer in zip((sparse, pseudo), optimizers, strict=True):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(sparse.to_dense().weight, pseudo.to_dense().weight)


def test_autocast_casts_as_for_nn_linear():
    sparse, pseudo = twins()
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse(torch.randn(2, 10)).dtype == pseudo(torch.randn(2, 10)).dtype == torch.bfloat16


def test_compiles_and_exports_whole():
    sparse, _ = twins()
    x = torch.randn(4, 10)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), sparse(x))
    exported = torch.export.export(sparse, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert torch.equal(exported.module()(torch.cat([x, x])), sparse(torch.cat([x, x])))


def test_fused_encoder_layers_in_eval_do_not_bypass_the_sparse_ones():
    """nn.TransformerEncoderLayer reads linear1.weight itself on its fast path, which must stand back."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 16)
    expected = encoder(x)
    rarefy.sparsify(encoder, {r".*linear\d": "block:4x4@1"}, measure=False)
    with torch.inference_mode():
        torch.testing.assert_close(encoder(x), expected)


# Copies and state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(clone):
    sparse, _ = twins()
    x = torch.randn(3, 10)
    assert torch.equal(clone(sparse)(x), sparse(x))


MADE = {
    "constructed": lambda: BlockSparseLinear(24, 32, density=0.5, block_shape=(8, 4)),
    "from dense": lambda: BlockSparseLinear.from_dense(nn.Linear(24, 32), block_shape=(8, 4), density=0.5),
    "int8": lambda: sparsified("block:8x4@0.5:int8"),
    "bf16": lambda: sparsified("block:8x4@0.5:bf16"),
    "csr": lambda: sparsified("csr@0.5"),
    "bitmap": lambda: sparsified("bitmap@0.5"),
    "2:4": lambda: sparsified("2:4"),
    "copied": lambda: copy.deepcopy(sparsified("block:8x4@0.5:int8")),
    "loaded": lambda: pickle.loads(pickle.dumps(sparsified("bitmap@0.5"))),
    "cast": lambda: BlockSparseLinear(24, 32, density=0.5, block_shape=(8, 4)).bfloat16().float(),
    "from meta": lambda: filled(BlockSparseLinear(24, 32, block_shape=(8, 4), device="meta")),
}


def filled(layer):
    """On the CPU; memory that nothing has written holds NaNs at times."""
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    return layer


def sparsified(spec):
    model = nn.Sequential(nn.Linear(24, 32))
    rarefy.sparsify(model, {".*": spec}, measure=False)
    return model[0]


@pytest.mark.parametrize("made", MADE)
def test_what_inference_mode_makes_counts_its_writes(made):
    """Else all that is derived of it would be made in every call: int8 was 20 to 80 times as slow."""
    with torch.inference_mode():
        sparse = MADE[made]()
        tensors = dict(sparse.weight.named_parameters())
        tensors |= {name: b for name, b in sparse.weight.named_buffers() if name == "scales"}
        assert "values" in tensors
        for name, tensor in tensors.items():
            before = tensor._version  # raises for tensors of inference mode
            tensor.mul_(1)
            assert tensor._version == before + 1, name
        x = torch.randn(3, 24, dtype=torch.float32)
        torch.testing.assert_close(
            sparse(x), x @ sparse.weight.to_dense().float().T + sparse.bias, rtol=0.05, atol=0.05
        )


def test_moves_in_inference_mode_keep_parameters_and_ties():
    sparse = BlockSparseLinear(24, 32, density=0.5, block_shape=(8, 4))
    values = sparse.weight.values
    with torch.inference_mode():
        sparse.double()
    assert sparse.weight.values is values and values.dtype == torch.float64 and values._version >= 0
    sparse(torch.randn(3, 24, dtype=torch.float64)).sum().backward()
    assert values.grad is not None


@pytest.mark.parametrize("move", ["half", "bfloat16", "double"])
def test_dtype_moves(move):
    sparse, _ = twins()
    moved = getattr(sparse, move)()
    x = torch.randn(3, 10).to(moved.weight.dtype)
    assert moved(x).dtype == moved.weight.dtype == moved.bias.dtype


def test_state_dict_keys_and_round_trip():
    sparse, _ = twins()
    state = sparse.state_dict()
    assert sorted(state) == ["bias", "weight.col_indices", "weight.crow_indices", "weight.values"]
    assert all(t.layout == torch.strided and t.is_contiguous() for t in state.values())
    other = copy.deepcopy(sparse)
    other.reset_parameters()
    other.load_state_dict(state)
    x = torch.randn(3, 10)
    assert torch.equal(other(x), sparse(x))


def test_a_pattern_can_be_taken_over_explicitly():
    sparse, _ = twins(density=0.25)
    other = BlockSparseLinear(10, 7, density=0.75, block_shape=(2, 2))
    rarefy.load_state_dict(other, sparse.state_dict())
    x = torch.randn(3, 10)
    assert other.block_shape == (4, 3) and torch.equal(other(x), sparse(x))


def test_functional_call_swaps_parameters():
    sparse, _ = twins()
    zeros = {name: torch.zeros_like(p) for name, p in sparse.named_parameters()}
    assert not torch.func.functional_call(sparse, zeros, (torch.randn(3, 10),)).any()
