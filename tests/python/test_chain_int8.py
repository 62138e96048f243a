"""Feed-forward networks of int8 layers as one op: the bits of their layers, or a level beside them."""

import pytest
import torch
from torch import nn

import rarefy
from networks import NETWORKS, H, K, ran, sparse
from rarefy import chain, fusing

SPEC = "block:4x1@0.5:int8"

pytestmark = pytest.mark.usefixtures("small_networks_wait")

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "bert": "gelu"}


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    """How many networks ran as one op."""
    calls = []

    def counted(*args):
        calls.append(args)
        return run(*args)

    run = chain.int8_feed_forward
    monkeypatch.setattr(chain, "int8_feed_forward", counted)
    return calls


def layers(net):
    return [layer for layer in net.modules() if isinstance(layer, rarefy.BlockSparseLinear)]


def one_by_one(net, x, activation):
    """What a network of two layers keeps: float hidden features, activated sums."""
    up, down = layers(net)
    hidden = up.weight.linear(x.float(), up.bias.float(), activation)
    return down.weight.linear(hidden, down.bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("specs", [(SPEC, SPEC), ("block:16x1@0.5:int8", "block:8x8@0.3:int8")])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_gated_networks_are_those_of_their_layers(activation, specs, dtype, seen):
    """Bits with ReLU; with SiLU, made to 2⁻¹², a hidden feature's level may be the next."""
    net = NETWORKS["llama"]()
    net.act_fn = nn.ReLU() if activation == "relu" else nn.SiLU()
    rarefy.sparsify(net, {"up|down": specs[0], "gate": specs[1]}, measure=False)
    net = net.to(dtype)
    for tokens in (5, 33, 130):
        x = torch.randn(tokens, K).to(dtype)
        with torch.no_grad():
            y = net(x)
            gate = net.gate.weight.linear(x.float(), None, activation)
            hidden = net.up.weight.linear(x.float(), None) * gate
            expected = net.down.weight.linear(hidden, None).to(dtype)
        if activation == "relu":
            assert torch.equal(y, expected)
            continue
        level = hidden.abs().amax(1, keepdim=True) / 127 * net.down.weight.to_dense().float().abs().sum(1)
        last_place = 2**-7 if dtype == torch.bfloat16 else 2**-11
        error = (y - expected).float().abs()
        assert bool((error <= level + last_place * expected.float().abs() + 1e-6).all())
        assert float(error.mean()) < 0.02 * float(expected.float().abs().mean())
    assert len(seen) == 3


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_recognised(name, seen):
    net, x = sparse(NETWORKS[name], SPEC), torch.randn(2, 40, K)
    with torch.no_grad():
        y = net(x)
        assert len(seen) == 1 and type(y) is torch.Tensor
        rarefy.fuse(net, False)
        apart = net(x)
    assert len(seen) == 1
    torch.testing.assert_close(y, apart, rtol=1e-2, atol=1e-2)  # a hidden feature's level may be the next


def expect_close(net, x, activation, y):
    """Equal bits with ReLU; others are made to 2⁻¹², so that a hidden feature's level may be the next."""
    up, down = layers(net)
    expected = one_by_one(net, x, activation)
    if activation == "relu":
        assert torch.equal(y, expected)
        return
    most = up.weight.linear(x.float(), up.bias.float(), activation).abs().amax(1, keepdim=True)
    level = most / 127 * down.weight.to_dense().float().abs().sum(1)
    last_place = 2**-7 if x.dtype == torch.bfloat16 else 2**-11
    error = (y - expected).float().abs()
    assert bool((error <= level + last_place * expected.float().abs() + 1e-6).all())
    assert float(error.mean()) < 0.02 * float(expected.float().abs().mean())


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "silu"])
def test_tokens_of_any_size_and_those_that_are_not_finite(name, seen):
    """Activations to 2⁻¹² have exponents of their own; NaN and infinity stay in their token."""
    net = sparse(NETWORKS[name], SPEC)
    x = torch.randn(66, K) * torch.logspace(-6, 6, 66)[:, None]
    odd = {3: float("nan"), 20: float("inf"), 41: -float("inf")}
    for token, value in odd.items():
        x[token, 1] = value
    with torch.no_grad():
        y = net(x)
    assert len(seen) == 1
    rest = [m for m in range(66) if m not in odd]
    assert bool(y[rest].isfinite().all()) and not bool(y[list(odd)].isfinite().any())
    expect_close(net, x[rest], ACTIVATIONS[name], y[rest])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPEC, "block:16x1@0.5:int8", "block:8x8@0.3:int8", "block:1x1@0.2:int8"])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "silu"])
def test_results_are_those_of_the_layers(name, spec, dtype, seen):
    net = sparse(NETWORKS[name], spec).to(dtype)
    for tokens in (5, 33, 130):
        x = torch.randn(tokens, K).to(dtype)
        with torch.no_grad():
            expect_close(net, x, ACTIVATIONS[name], net(x))
    assert len(seen) == 3


@pytest.mark.parametrize("inference", [False, True])
def test_transformers_bert(inference, seen):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.AutoModel.from_config(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    rarefy.sparsify(model, {r".*(intermediate|output)\.dense": SPEC}, measure=False)
    ids = torch.randint(50, (2, 9))
    with torch.inference_mode() if inference else torch.no_grad():
        y = model(ids).last_hidden_state
        rarefy.fuse(model, False)
        apart = model(ids).last_hidden_state
    assert len(seen) == 2
    torch.testing.assert_close(y, apart, rtol=5e-2, atol=5e-2)


def test_bad_tokens_stay_alone(seen):
    net, x = sparse(NETWORKS["relu"], SPEC), torch.randn(40, K)
    x[3, 1], x[17, 0] = float("nan"), float("inf")
    with torch.no_grad():
        y = net(x)
    assert len(seen) == 1
    assert y.isnan().all(1).nonzero().flatten().tolist() == [3, 17]


def test_no_tokens_and_few(seen):
    net = sparse(NETWORKS["gelu"], SPEC)
    with torch.no_grad():
        assert net(torch.randn(0, K)).shape == (0, K)
        assert net(torch.randn(3, K)).shape == (3, K)
    assert not seen


@pytest.mark.parametrize(
    "why",
    ["w8", "mixed", "half", "gradient", "inference_weights", "off"],
)
def test_others_go_layer_by_layer(why, seen):
    net, x = sparse(NETWORKS["gelu"], SPEC), torch.randn(40, K)
    found = layers(net)
    if why == "w8":
        found[1].weight.dynamic = False
    elif why == "mixed":
        found[1].weight = rarefy.BsrWeight.from_dense(found[1].weight.to_dense(), block_shape=(4, 1))
    elif why == "half":
        net, x = net.half(), x.half()
    elif why == "inference_weights":
        with torch.inference_mode():
            for layer in found:
                layer.weight.values = nn.Parameter(layer.weight.values.clone(), requires_grad=False)
    elif why == "off":
        rarefy.fuse(net, False)
    elif why == "gradient":
        x.requires_grad_()
    if why == "half":  # int8 with rounding has no kernel for float16 on the CPU, or one that is no network
        with torch.no_grad():
            try:
                net(x)
            except RuntimeError as error:
                assert "kernel" in str(error)  # noqa: PT017
        assert not seen
        return
    with torch.set_grad_enabled(why == "gradient"):
        y = net(x)
        rarefy.fuse(net, False)
        apart = net(x)
    assert not seen
    torch.testing.assert_close(y, apart, rtol=1e-2, atol=1e-2)


def test_values_that_change_are_packed_anew(seen):
    net, x = sparse(NETWORKS["relu"], SPEC), torch.randn(40, K)
    with torch.no_grad():
        net(x)
        layers(net)[0].weight.values.copy_(layers(net)[0].weight.values.flip(0))
        assert torch.equal(net(x), one_by_one(net, x, "relu"))
    assert len(seen) == 2


def test_x_must_stay_until_it_is_used():
    net = sparse(NETWORKS["gelu"], SPEC)
    up, down = layers(net)
    x = torch.randn(40, K)
    with torch.no_grad():
        hidden = torch.nn.functional.gelu(up(x))
        x.add_(1)
        with pytest.raises(RuntimeError, match="x must stay as it is"):
            down(hidden)


def test_bad_arguments(one_thread):
    net, x = sparse(NETWORKS["gelu"], SPEC), torch.randn(40, K)
    up, down = layers(net)
    op = torch.ops.rarefy._int8_feed_forward
    with torch.no_grad():
        net(x)
        held = (*up.weight.derived(x)[:2], *down.weight.derived(x))
        scaled = [(w.values, w.scales, w.plan) for w in (up.weight, down.weight)]
        good = [x, *scaled[0], up.bias, *[None] * 4, *scaled[1], down.bias, K, H, K, "gelu", *held]
        assert torch.equal(op(*good), net(x))

        def bad(at, value):
            return op(*good[:at], value, *good[at + 1 :])

        with pytest.raises(ValueError, match=r"\[int8_feed_forward\] activation must be"):
            bad(16, "tanh")
        with pytest.raises(ValueError, match=r"the down layer's scales must be contiguous"):
            bad(10, down.weight.scales[:-1])
        with pytest.raises(TypeError, match=r"the up layer's values must be int8"):
            bad(1, up.weight.values.float())
        with pytest.raises(ValueError, match=r"\[int8_feed_forward\] .*in_features"):
            bad(0, x[:, :-1])
        with pytest.raises(ValueError, match=r"derived(\.prepared)? must have at least"):
            bad(17, None)
        with pytest.raises(ValueError, match="a gate's values, scales and plan must come together"):
            bad(5, up.weight.values)
        gated = [*good[:5], *scaled[0], None, *good[9:], *up.weight.derived(x)[:2]]
        assert op(*gated).shape == (40, K)
        with pytest.raises(ValueError, match=r"gate derived(\.prepared)? must have at least"):
            op(*gated[:-2], None, None)
        with pytest.raises(ValueError, match="the gate layer's scales must be contiguous"):
            op(*gated[:6], up.weight.scales[:-1], *gated[7:])


@pytest.mark.parametrize("what", ["in place", "another buffer"])
def test_scales_that_are_written_to_are_an_error(what):
    net, x = sparse(NETWORKS["gelu"], SPEC), torch.randn(40, K)
    up, down = layers(net)
    with torch.no_grad():
        h = up(x)
        if what == "in place":
            up.weight.scales.mul_(2)
        else:
            up.weight.scales = up.weight.scales * 2
        with pytest.raises(RuntimeError, match=r"\[BlockSparseLinear\] a layer must stay as it is"):
            down(h)


def test_explain_says_whether_it_is_one_op(one_thread):
    net, x = sparse(NETWORKS["gelu"], SPEC), torch.randn(40, K)
    assert fusing.networks(net) == [("fc1", "fc2")]
    up, down = layers(net)
    with torch.no_grad():
        key, why = chain.network_key(up, None, down, x)
    assert key != 0 and why is None
    assert "i8 dynamic" in rarefy.explain((up, down), x)["problem"]
    assert rarefy.explain((up, down), x)["kernel"].endswith("_feed_forward_int8")
    assert len(ran(lambda: net(x))[1]) == 0


def test_explain_of_a_gate(one_thread):
    net, x = sparse(NETWORKS["llama"], SPEC), torch.randn(40, K)
    assert [set(names) for names in fusing.networks(net)] == [{"up", "gate", "down"}]
    found = rarefy.explain((net.up, net.gate, net.down), x)
    assert found["kernel"].endswith("_feed_forward_int8")
