"""Feed-forward networks on a GPU: as one op, from layers that wait, and as what explain says."""

import copy

import pytest
import torch
from torch import nn

import rarefy
from networks import Ops
from rarefy.chain import Hidden, copy_by_feature
from rarefy.modules import BlockSparseLinear

_INFO = rarefy.backend_info()
_GPUS = torch.cuda.device_count() if _INFO["problem"] is None and _INFO["cuda_built"] else 0
pytestmark = [
    pytest.mark.skipif(_GPUS == 0, reason="no GPU, or a build without CUDA"),
    pytest.mark.usefixtures("small_networks_wait"),
]
HOPPER = _GPUS > 0 and torch.cuda.get_device_capability() == (9, 0)
TOKENS, IN, WIDTH, OUT = 72, 256, 512, 384
TALL = "sm90_tall_feed_forward"

# Blocks of the first and of the second layer, and a dtype: tall ones alike, unlike, odd; strips, unions; f32.
CASES = [
    ((128, 1), (128, 1), torch.bfloat16),
    ((64, 1), (64, 1), torch.float16),
    ((128, 1), (64, 1), torch.bfloat16),
    ((32, 1), (32, 1), torch.bfloat16),
    ((64, 64), (64, 64), torch.bfloat16),
    ((16, 16), (16, 16), torch.float16),
    ((64, 64), (64, 1), torch.bfloat16),
    ((32, 32), (32, 32), torch.float32),
    ((4, 1), (4, 1), torch.float32),
]


class Network(nn.Module):
    """up, GELU and down, or with a gate in SiLU."""

    def __init__(self, up, down, dtype, gated=False):
        super().__init__()

        def layer(block, *sizes):
            return BlockSparseLinear(*sizes, block_shape=block, density=0.4).to("cuda", dtype)

        self.up = layer(up, IN, WIDTH)
        self.gate = layer(up, IN, WIDTH) if gated else None
        self.down = layer(down, WIDTH, OUT)
        self.act = nn.SiLU() if gated else nn.GELU()

    def forward(self, x):
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        return self.down(self.act(self.gate(x)) * self.up(x))

    def apart(self, x):
        """The same layer by layer, activations in the layers' kernels."""
        if self.gate is None:
            hidden = self.up.weight.linear(x, self.up.bias, "gelu")
        else:
            hidden = self.gate.weight.linear(x, self.gate.bias, "silu")
            hidden = hidden * self.up.weight.linear(x, self.up.bias)
        return self.down.weight.linear(hidden, self.down.bias)


def fused(*args):
    net = Network(*args)
    assert rarefy.fuse(net) == (["up", "gate"] if net.gate is not None else ["up"])
    return net.requires_grad_(False)


def inputs(dtype, tokens=TOKENS):
    return torch.randn(tokens, IN, device="cuda", dtype=dtype)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("up", "down", "dtype"), CASES)
def test_networks_have_the_bits_of_their_layers(up, down, dtype, gated):
    net = fused(up, down, dtype, gated)
    for x in (inputs(dtype), inputs(dtype, 1000), inputs(dtype)[5:], inputs(dtype).view(8, 9, IN)):
        assert type(net.up(x)) is Hidden
        y, want = net(x), net.apart(x)
        assert y.shape == (*x.shape[:-1], OUT) and torch.equal(y, want)
        with torch.inference_mode():
            assert torch.equal(net(x.clone()), want)
        dense = [layer.weight.to_dense().double() for layer in (net.up, net.gate, net.down) if layer]
        biases = [layer.bias.double() for layer in (net.up, net.gate, net.down) if layer]
        first = [nn.functional.linear(x.double(), w, b) for w, b in zip(dense[:-1], biases, strict=False)]
        hidden = first[0] * nn.functional.silu(first[1]) if gated else nn.functional.gelu(first[0])
        exact = nn.functional.linear(hidden, dense[-1], biases[-1])
        close = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(y.double(), exact, rtol=close, atol=close)


@pytest.mark.parametrize(("up", "down", "dtype"), CASES)
def test_two_layers_are_one_op_where_they_hold_the_same(up, down, dtype):
    net, x = fused(up, down, dtype), inputs(dtype)
    with Ops() as ran:
        net(x)
    found = rarefy.explain((net.up, net.down), x, activation="gelu")
    same = len({layer.weight.derived(x)[2:] for layer in (net.up, net.down)}) == 1
    assert same == (up == down) or up == (32, 1)  # of which some sizes hold W whole
    if same:
        assert ran.names == ["bsr_feed_forward"]
    else:
        assert ran.names == ["bsr_linear"] * 2 and "layers run one by one" in found["why_none"]
    tall = HOPPER and up == down and up[0] >= 64 and up[1] == 1
    assert found["kernel"] == (TALL if tall else None) and TALL in {c["kernel"] for c in found["candidates"]}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("up", "down", "dtype"), CASES)
def test_the_op_and_its_derivatives(up, down, dtype, gated):
    net, x = Network(up, down, dtype, gated), inputs(dtype)
    layers = [net.up, *([net.gate] if gated else []), net.down]
    operands = [(layer.weight.values, layer.weight.pattern.plan, layer.bias) for layer in layers]
    if not gated:
        operands.insert(1, (None,) * 3)
    args = [part for layer in operands for part in layer]
    run = rarefy.ops.bsr_feed_forward
    x.requires_grad_()
    y = run(x, *args, OUT, WIDTH, IN, "gelu")
    with torch.no_grad():
        close = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(run(x, *args, OUT, WIDTH, IN, "gelu"), y, rtol=close, atol=close)
    y.float().square().sum().backward()
    assert all(tensor.grad is not None for tensor in (x, *net.parameters()))


@pytest.mark.skipif(not HOPPER, reason="copies by feature are for kernels of Hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inference_tensors_are_copied_by_feature(dtype):
    net = fused((128, 1), (128, 1), dtype)
    for shape in ((TOKENS, IN), (3, 5, 7, IN), (1, 1000, IN)):
        given = torch.randn(shape, device="cuda", dtype=dtype)
        want = net.apart(given)
        with torch.inference_mode():
            x = given.clone()
            hidden = net.up(x)
            assert torch.equal(hidden._x, given) and hidden._x.stride(-1) > 1
            x.zero_()
            assert torch.equal(net.down(nn.functional.gelu(hidden)), want)
            odd = torch.empty(given.numel() + 1, device="cuda", dtype=dtype)[1:].view(shape).copy_(given)
            hidden = net.up(odd)
            assert hidden._x.stride(-1) == 1  # not aligned
            assert torch.equal(net.down(nn.functional.gelu(hidden)), want)
            assert torch.equal(net.up(x.copy_(given)).value(), net.up.weight.linear(given, net.up.bias))


@pytest.mark.skipif(not HOPPER, reason="copies by feature are for kernels of Hopper")
def test_what_is_not_copied_by_feature():
    x = inputs(torch.bfloat16)
    run = copy_by_feature
    # One by way of rows one after the other, one not aligned to 16 bytes.
    for given in (x, x.view(8, 9, IN), x[:, ::2], x[:, 1:9], x[:0], x[0]):
        assert torch.equal(run(given), given) and (given.numel() == 0 or run(given).stride(-1) > 1)
    with pytest.raises(IndexError, match=r"\[_copy_by_feature\] x must be of 16 bits; got f32"):
        run(x.float())
    with pytest.raises(ValueError, match=r"\[_copy_by_feature\] x must have a dimension; got none"):
        run(x[0, 0])


@pytest.mark.parametrize(("up", "down", "dtype"), CASES)
def test_a_network_is_captured(up, down, dtype):
    net, x = fused(up, down, dtype), inputs(dtype)
    net(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = net(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, net.apart(x))


@pytest.mark.parametrize(("up", "down", "dtype"), CASES)
def test_a_hidden_used_on_another_stream(up, down, dtype):
    """The memory of x, freed meanwhile where it was made, is not given away while that stream reads it."""
    net, other = fused(up, down, dtype), torch.cuda.Stream()
    given = inputs(dtype, 4096)
    want = net(given)
    for _ in range(5):
        x = given.clone()
        hidden = net.up(x)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)
            y = net.down(net.act(hidden))
        del x, hidden
        junk = [torch.full_like(given, float("nan")) for _ in range(4)]
        torch.cuda.synchronize()
        assert torch.equal(y, want)
        del junk, y


def test_what_must_not_wait_does_not(monkeypatch):
    net, x = fused((64, 1), (64, 1), torch.bfloat16), inputs(torch.bfloat16)
    assert type(net.up(x)) is Hidden
    for plain in (
        lambda: net.up(x[:4]),
        lambda: copy.deepcopy(net).requires_grad_().up(x),
        lambda: torch.func.vmap(net.up)(x[None]),
    ):
        assert type(plain()) is not Hidden
    with torch.autocast("cuda", torch.bfloat16):
        assert type(net.up(x)) is not Hidden
    hidden = net.up(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="x must stay as it is"):
        hidden + 1
    monkeypatch.undo()  # small work
    assert type(net.up(x)) is not Hidden and type(net.up(inputs(torch.bfloat16, 1 << 18))) is Hidden


@pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs")
def test_a_network_of_the_second_gpu():
    net = fused((128, 1), (128, 1), torch.bfloat16).to("cuda:1")
    x = inputs(torch.bfloat16).to("cuda:1")
    with torch.cuda.device(0):
        y = net(x)
        assert y.device == x.device and torch.equal(y, net.apart(x))
