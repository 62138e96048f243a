"""BlockSparseLinear(activation=…): the activation of its product, fused where a kernel fuses it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import rarefy
from networks import ran, sparse
from rarefy.compat import pytorch_block_sparse
from rarefy.prune import LowRankLinear
from rarefy.prune.growth import Watch

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def layer_of(activation, **more):
    torch.manual_seed(0)
    options = {"density": 0.5, "block_shape": (4, 4)} | more
    return rarefy.BlockSparseLinear(24, 32, activation=activation, **options)


def plain(layer, x):
    return functional.linear(x, layer.weight.to_dense(), layer.bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_it_is_the_activation_of_the_product(device, activation, tokens):
    layer, x = layer_of(activation).to(device), torch.randn(tokens, 24, device=device)
    want = ACTIVATIONS[activation](plain(layer, x))
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-6)
    assert f"activation='{activation}'" in repr(layer)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    layer, x = layer_of(activation, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64)

    def call(x, values, bias):
        return torch.func.functional_call(layer, {"weight.values": values, "bias": bias}, (x,))

    inputs = [t.detach().requires_grad_() for t in (x, layer.weight.values, layer.bias)]
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("spec", ["block:4x1@0.5:bf16", "csr@0.3", "block:16x16@0.5:int8", "bitmap@0.5"])
def test_every_format_has_it(spec):
    torch.manual_seed(0)
    dense = nn.Linear(64, 32)
    layer = rarefy.BlockSparseLinear.from_dense(dense, spec=spec, activation="silu").eval()
    x = torch.randn(9, 64)
    without = rarefy.BlockSparseLinear.from_weight(layer.weight, layer.bias).eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), functional.silu(without(x)), rtol=1e-4, atol=1e-5)


def test_it_goes_where_the_layer_goes():
    layer, x = layer_of("gelu"), torch.randn(3, 24)
    assert layer.state_dict().keys() == layer_of(None).state_dict().keys()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.activation == "gelu" and torch.equal(other(x), layer(x))
    dense = layer.to_dense()
    assert isinstance(dense, nn.Sequential) and dense.training
    torch.testing.assert_close(dense(x), layer(x), rtol=1e-5, atol=1e-6)
    assert isinstance(layer_of(None).to_dense(), nn.Linear)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        exported = torch.export.export(layer, (x,))
        torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=2**-5, atol=2**-5)


def test_a_model_becomes_dense_with_it():
    model = nn.ModuleDict({"a": layer_of("relu"), "b": layer_of(None)})
    x = torch.randn(3, 24)
    want = [model[name](x) for name in "ab"]
    assert rarefy.desparsify(model) == ["a", "b"]
    assert isinstance(model["a"], nn.Sequential) and isinstance(model["b"], nn.Linear)
    for name, y in zip("ab", want, strict=True):
        torch.testing.assert_close(model[name](x), y, rtol=1e-5, atol=1e-6)


def test_a_sparser_pattern_keeps_it():
    model = nn.ModuleDict({"a": layer_of("relu", density=1.0)})
    rarefy.sparsify(model, {"a": "block:4x4@0.25"}, measure=False)
    x = torch.randn(3, 24)
    assert model["a"].activation == "relu" and model["a"].density == 0.25
    torch.testing.assert_close(model["a"](x), functional.relu(plain(model["a"], x)), rtol=1e-5, atol=1e-6)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return self.down(self.up(x))


def test_a_network_of_such_layers_is_one_op():
    net, x = sparse(Network, fuse=False), torch.randn(64, 128)
    net.up.activation = "gelu"
    with torch.no_grad():
        want, names = ran(lambda: net(x))
        assert names == ["bsr_linear"] * 2
        assert rarefy.explain(net.up, x)["problem"] == rarefy.explain(net.up, x, activation="gelu")["problem"]
        assert rarefy.fuse(nn.ModuleDict({"net": net})) == ["net.up"]
        y, names = ran(lambda: net(x))
        assert names == ["bsr_feed_forward"] and torch.equal(y, want)
        found = rarefy.explain((net.up, net.down), x)
        assert found["kernel"].endswith("_feed_forward") and found["problem"].count("gelu") == 1
        net.down.activation = "relu"  # none that the op has
        assert "the last one has an activation" in rarefy.explain((net.up, net.down), x)["why_none"]
        y, names = ran(lambda: net(x))
        assert "bsr_feed_forward" not in names and torch.equal(y, functional.relu(want))


@pytest.mark.parametrize("activation", ["tanh", 3])
def test_others_are_refused(activation):
    message = r"\[BlockSparseLinear.*\] activation must be None, relu, gelu, gelu_tanh, silu; got "
    with pytest.raises(ValueError, match=message):
        layer_of(activation)
    with pytest.raises(ValueError, match=message):
        rarefy.BlockSparseLinear.from_dense(nn.Linear(8, 8), block_shape=(4, 4), activation=activation)
    with pytest.raises(ValueError, match="layer must have no activation; got 'relu'"):
        rarefy.PseudoBlockSparseLinear.from_sparse(layer_of("relu"))


def test_gradients_compiled_and_under_autocast():
    layer, x = layer_of("gelu"), torch.randn(7, 24)
    compiled = copy.deepcopy(layer)
    torch.compile(compiled, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    narrow = copy.deepcopy(layer)
    with torch.autocast("cpu", torch.bfloat16):
        y = narrow(x)
    y.float().square().sum().backward()
    layer(x).square().sum().backward()
    want = layer.weight.values.grad
    torch.testing.assert_close(compiled.weight.values.grad, want, rtol=1e-5, atol=1e-6)
    assert narrow.weight.values.grad.dtype == torch.float32
    scale = float(want.abs().max())
    torch.testing.assert_close(narrow.weight.values.grad, want, rtol=2**-5, atol=2**-6 * scale)


@pytest.mark.parametrize("spec", ["block:4x4@0.5", "csr@0.2", "block:8x1@0.5:bf16"])
def test_files_leave_it_to_the_model(tmp_path, spec):
    """As they leave every other layer's: they hold weights."""
    x, path = torch.randn(3, 24), tmp_path / "a.safetensors"
    model = nn.ModuleDict(
        {"a": rarefy.BlockSparseLinear.from_dense(nn.Linear(24, 32), spec, activation="silu")}
    )
    rarefy.save_file(model, path)
    other = nn.ModuleDict({"a": layer_of("silu")})  # in another format
    rarefy.load_file(other, path)
    assert other["a"].activation == "silu" and torch.equal(other["a"](x), model["a"](x))
    rarefy.load_state_dict(other, model.state_dict())
    assert other["a"].activation == "silu" and torch.equal(other["a"](x), model["a"](x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_blocks_grow_by_the_gradient_of_the_product(activation):
    """RigL looks at the gradient of the whole weight, which an activation lies behind."""
    layer = layer_of(activation, dtype=torch.float64)
    linear, x = layer.to_linear(), torch.randn(9, 24, dtype=torch.float64)
    watch = Watch([(0, layer)])
    layer(x).square().sum().backward()
    dy, seen = watch.pairs(0)
    watch.close()
    ACTIVATIONS[activation](linear(x)).square().sum().backward()
    torch.testing.assert_close(dy.mT @ seen, linear.weight.grad)


def test_blocks_grow_under_autocast_and_in_bfloat16():
    for dtype, cast in ((torch.float32, True), (torch.bfloat16, False)):
        layer = layer_of("gelu").to(dtype)
        watch = Watch([(0, layer)])
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = layer(torch.randn(9, 24).to(dtype))
        y.float().square().sum().backward()
        dy, _ = watch.pairs(0)
        watch.close()
        assert dy.shape == (9, 32) and bool(dy.isfinite().all())


def test_layers_whose_output_is_a_summand_are_refused():
    layer = layer_of("gelu")
    with pytest.raises(ValueError, match=r"\[LowRankLinear\] sparse must have no activation; got 'gelu'"):
        LowRankLinear(torch.randn(32, 2), torch.randn(2, 24), None, layer)
    message = r"\[PseudoBlockSparseLinear\] block_sparse_linear must have no activation; got 'gelu'"
    with pytest.raises(ValueError, match=message):
        pytorch_block_sparse.PseudoBlockSparseLinear(layer)
