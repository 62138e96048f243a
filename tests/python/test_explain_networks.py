"""What explain and reports say of networks that run as one op, or layer by layer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import rarefy
from networks import NETWORKS, SPEC, Between, Llama, Ops
from rarefy import fusing
from rarefy.chain import Hidden
from rarefy.modules import BlockSparseLinear

pytestmark = pytest.mark.usefixtures("small_networks_wait")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_explain_says_what_a_network_runs_as(dtype, gated):
    up, gate, down = (
        BlockSparseLinear(*s, block_shape=(16, 1), density=0.5) for s in ((64, 96),) * 2 + ((96, 64),)
    )
    layers = [layer.to(dtype).requires_grad_(False) for layer in ((up, gate, down) if gated else (up, down))]
    x = torch.randn(40, 64, dtype=dtype)
    for layer in layers:
        layer(torch.randn(40, layer.in_features, dtype=dtype))  # packs what kernels pack
    found = rarefy.explain(layers, x, activation="gelu")
    hidden = Hidden.of(up, x)
    hidden = functional.gelu(Hidden.of(gate, x)) * hidden if gated else functional.gelu(hidden)
    with Ops() as ran:
        hidden.through(down)
    if found["kernel"] is None:
        assert "layers run one by one" in found["why_none"] and "bsr_feed_forward" not in ran.names
        assert not any(candidate["chosen"] for candidate in found["candidates"])
    else:
        assert found["kernel"].partition("(")[0].endswith(("_feed_forward", "_feed_forward_apart"))
        assert ran.names == ["bsr_feed_forward"]
        assert ("gate" in found["problem"]) == gated and "gelu_erf" in found["problem"]
        assert "down bsr 64x96 block 16x1" in found["problem"]


def test_explain_says_why_a_network_runs_layer_by_layer():
    up, down = BlockSparseLinear(16, 24, block_shape=(4, 1)), BlockSparseLinear(24, 16, block_shape=(4, 1))
    few = rarefy.explain((up, down), torch.randn(3, 16))
    assert few["kernel"] is None and "5 tokens or more" in few["why_none"] and few["candidates"]
    assert rarefy.explain((up, down), torch.randn(9, 16))["kernel"].endswith(("_feed_forward", "_apart"))
    assert "relu" in rarefy.explain(up, torch.randn(9, 16), activation="relu")["problem"]
    for bad, kind, message in (
        ({"layer": (up,)}, TypeError, r"\[explain\] layer must be a BlockSparseLinear, or a network's"),
        ({"layer": (nn.Linear(16, 24), down)}, TypeError, r"got \['Linear', 'BlockSparseLinear'\]"),
        ({"layer": (down, down)}, ValueError, r"x's last dimension must be in_features=24; got \(9, 16\)"),
        ({"layer": (up, up)}, ValueError, "down must take what they make"),
        ({"op": "grad_input"}, ValueError, r"op must be \"linear\" for a network; got 'grad_input'"),
        ({"activation": "tanh"}, ValueError, r"\[explain\] activation must be"),
    ):
        with pytest.raises(kind, match=message):
            rarefy.explain(**{"layer": (up, down), "x": torch.randn(9, 16)} | bad)


def test_a_report_names_networks():
    net = nn.Sequential(Between(nn.GELU()), Between(nn.ReLU()))
    names = [("0.fc1", "0.fc2"), ("1.fc1", "1.fc2")]
    assert rarefy.sparsify(copy.deepcopy(net), {".*": SPEC}, measure=False, dry_run=True).networks == []
    assert rarefy.sparsify(copy.deepcopy(net), {".*": SPEC}, measure=False, fuse=False).networks == []
    report = rarefy.sparsify(net, {".*": SPEC}, measure=False)
    assert report.networks == names == [tuple(n) for n in report.to_dict()["networks"]]
    assert "may run as one op: 2 (0.fc1 > 0.fc2, …)" in report.summary()


class Squared(nn.Module):
    """ReLU², as transformers' "relu2" computes it."""

    __module__ = "transformers.activations"

    def forward(self, x):
        return functional.relu(x).square()


class Counted(TorchDispatchMode):
    """How often a network's op ran."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs += "feed_forward" in func._opname
        return func(*args, **(kwargs or {}))


def _gated(act):
    net = Llama()
    net.act_fn = act
    return net


BESIDE = {
    "sigmoid": nn.Sigmoid,
    "relu6": nn.ReLU6,
    "softplus": nn.Softplus,
    "relu2": Squared,
    "rrelu": nn.RReLU,
    "gelu": nn.GELU,
    "relu in place": lambda: nn.ReLU(inplace=True),
}
MAKES = {
    "between": Between,
    "gated": _gated,
    "in a row": lambda a: nn.Sequential(nn.Linear(16, 24), a, nn.Linear(24, 16)),
}
FLOATS = ("block:4x1@0.5", "block:2x2@0.5")
SPECS = {
    torch.float32: (*FLOATS, "block:4x1@0.5:bf16x", "block:16x1@0.5:int8", "block:16x1@0.5:w8"),
    torch.bfloat16: (*FLOATS, "block:16x1@0.5", "block:16x1@0.5:int8"),
    torch.float64: FLOATS,
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("act", BESIDE)
def test_a_report_names_the_networks_that_run_as_one_op_and_no_others(make, act):
    for dtype, spec in ((dtype, spec) for dtype, specs in SPECS.items() for spec in specs):
        model = nn.ModuleDict({"net": MAKES[make](BESIDE[act]())}).to(dtype)
        state = torch.random.get_rng_state()
        report = rarefy.sparsify(model, {".*": spec}, measure=False)
        assert torch.equal(torch.random.get_rng_state(), state)
        x = torch.randn(40, 16, dtype=dtype)
        with torch.no_grad(), Counted() as seen:
            for _ in range(2):  # packed for the second one
                model["net"](x)
        assert bool(report.networks) == bool(seen.runs), (spec, dtype)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_report_names_every_network_as_models_write_them(name):
    model = nn.ModuleDict({"net": NETWORKS[name]()})
    assert len(rarefy.sparsify(model, {".*": SPEC}, measure=False).networks) == 1


def test_a_report_minds_activations_of_layers_and_other_blocks():
    up, down = BlockSparseLinear(16, 24, block_shape=(4, 1)), BlockSparseLinear(24, 16, block_shape=(4, 1))
    net = nn.Sequential(up, down)
    assert fusing.networks(net) == [("0", "1")]
    up.activation = "silu"
    assert fusing.networks(net) == [("0", "1")]
    assert fusing.networks(nn.Sequential(up, nn.ReLU(), down)) == []
    down.activation = "relu"
    assert fusing.networks(net) == []
    few = BlockSparseLinear(24, 16, block_shape=(2, 1))
    assert fusing.networks(nn.Sequential(up, few)) == []
