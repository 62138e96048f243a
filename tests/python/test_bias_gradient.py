"""The gradient of a bias, which on Hopper comes out of the weight gradient's pass over dY."""

from __future__ import annotations

import copy

import pytest
import torch

import helpers
import rarefy

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def layer_of(
    n: int, k: int, block: tuple[int, int], density: float, dtype: torch.dtype, device: str
) -> rarefy.BlockSparseLinear:
    """A layer with a bias, whose first block row stores nothing, nor do others with few blocks."""
    mask = torch.rand(-(-n // block[0]), -(-k // block[1])) < density
    mask[0] = False
    weight = rarefy.BsrWeight.from_dense(torch.randn(n, k), block_shape=block, mask=mask)
    layer = rarefy.BlockSparseLinear.from_weight(weight, bias=torch.zeros(n))
    return layer.to(device, dtype).requires_grad_()


def check(layer: rarefy.BlockSparseLinear, tokens: int, *, integers: bool) -> None:
    n, k = layer.out_features, layer.in_features
    dtype, device = layer.bias.dtype, layer.bias.device
    x = torch.randn(tokens, k).to(device, dtype)
    dy = (helpers.small_integers(tokens, n) if integers else torch.randn(tokens, n)).to(device, dtype)
    layer.zero_grad()
    layer(x).backward(dy)
    want = dy.double().sum(0)
    if integers:
        assert torch.equal(layer.bias.grad, want.to(dtype))
    helpers.assert_within_bound(layer.bias.grad, want, dy.double().abs().sum(0), tokens)
    size = dy.double().abs().t() @ x.double().abs()
    weight = copy.deepcopy(layer.weight)
    with torch.no_grad():
        weight.values.fill_(1)
        stored = weight.to_dense() != 0
        weight.values.copy_(layer.weight.values.grad)
        helpers.assert_within_bound(
            weight.to_dense(), dy.double().t() @ x.double() * stored, size * stored, tokens
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "block", [(128, 128), (64, 64), (32, 32), (16, 16), (128, 64), (192, 64), (48, 32)], ids=str
)
def test_is_the_sum_over_the_tokens(device, block, dtype):
    """All widths of tiles, shares of the tokens, rows that store nothing, ragged sides and tokens."""
    torch.manual_seed(0)
    r, c = block
    for n, k, tokens, density in [
        (4 * r, 6 * c, 257, 0.4),
        (5 * r - 8, 4 * c - 8, 64, 0.2),
        (9 * r, 3 * c, 520, 0.1),
        (8 * r, 12 * c, 17, 0.9),
    ]:
        layer = layer_of(n, k, block, density, dtype, device)
        check(layer, tokens, integers=True)
        check(layer, tokens, integers=False)


def test_of_a_layer_without_blocks(device):
    layer = layer_of(128, 128, (64, 64), 0.0, torch.bfloat16, device)
    check(layer, 100, integers=True)


@pytest.mark.parametrize("needs", ["bias", "x bias", "values bias", "x values bias", "x values"])
@pytest.mark.parametrize("rows", [(), (0,), (1,), (3, 50)], ids=str)
def test_beside_any_other_gradients(device, needs, rows):
    """What is not asked for is not there; dY as it comes: whole, one row for all, one number, with gaps."""
    layer = layer_of(256, 192, (64, 64), 0.4, torch.bfloat16, device)
    x = torch.randn(*rows, 192, device=device).bfloat16()
    leaves = {"x": x, "values": layer.weight.values, "bias": layer.bias}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needs.split())
    y, wide = layer(x), helpers.small_integers(max(1, x.numel() // 192), 264).to(device, torch.bfloat16)
    gaps = wide[: x.numel() // 192, :256].view(*rows, 256) if rows else wide[0, :256]
    for dy in (gaps, gaps.contiguous(), wide[0, :256].expand_as(y), wide[0, 0].expand_as(y)):
        for create_graph in (False, True):
            got = torch.autograd.grad(
                y, [leaves[n] for n in needs.split()], dy, retain_graph=True, create_graph=create_graph
            )
            assert [g.shape for g in got] == [leaves[n].shape for n in needs.split()]
            if "bias" in needs:
                assert torch.equal(got[-1], dy.double().reshape(-1, 256).sum(0).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (16, 16)], ids=str)
def test_nan_and_overflow_stay_in_their_features(device, block, dtype):
    """Also where a row stores nothing: the first one, and most of these."""
    layer = layer_of(520, 256, block, 0.15, dtype, device)
    dy = torch.ones(130, 520)
    dy[129, ::7], dy[64, 5::11], dy[:, 519] = torch.nan, torch.inf, 60000
    layer(torch.randn(130, 256).to(device, dtype)).backward(dy.to(device, dtype))
    want = dy.to(dtype).double().sum(0).to(dtype)
    assert dtype == torch.bfloat16 or want[519].isinf()
    torch.testing.assert_close(layer.bias.grad.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dy_is_read_once_on_hopper(dtype):
    """Torch's kernel for the sum is there for f32 alone, which comes rounded to tf32 at best."""
    layer = layer_of(256, 256, (64, 64), 0.5, dtype, "cuda")
    x, dy = (torch.randn(512, 256, device="cuda", dtype=dtype) for _ in range(2))
    for _ in range(2):  # what records kernels may miss the first ones of a process
        y = layer(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            y.backward(dy)
            torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages()]
    if not any("gradient" in kernel for kernel in kernels):
        pytest.skip(f"the profiler has seen no gradient here, but {kernels}")
    assert any("reduce" in kernel for kernel in kernels) == (dtype == torch.float32), kernels


@pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")
def test_equal_runs_give_equal_bits():
    torch.manual_seed(0)
    for block in [(128, 128), (32, 32)]:
        layer = layer_of(1024, 1024, block, 0.2, torch.bfloat16, "cuda")
        x, dy = (torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        gradients = set()
        for _ in range(100):
            layer.zero_grad()
            layer(x).backward(dy)
            gradients.add(layer.bias.grad.cpu().view(torch.int16).numpy().tobytes())
        assert len(gradients) == 1
