"""fuse: networks of sparse layers run as one op, and nobody can tell but by the clock."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import rarefy
from networks import NETWORKS, SPEC, Bert, Between, H, K, Llama, T, ran, sparse
from rarefy import chain, ops
from rarefy.chain import Hidden
from rarefy.modules import BlockSparseLinear

pytestmark = pytest.mark.usefixtures("small_networks_wait")


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_recognised(name):
    net = sparse(NETWORKS[name])
    x = torch.randn(2, T, K)
    with torch.no_grad():
        y, names = ran(lambda: net(x))
        rarefy.fuse(net, False)
        apart, layers = ran(lambda: net(x))
    assert names == ["bsr_feed_forward"] and set(layers) == {"bsr_linear"}
    assert type(y) is torch.Tensor and not y.requires_grad
    torch.testing.assert_close(y, apart)
    assert not any(layer.waits for layer in net.modules() if isinstance(layer, BlockSparseLinear))


@pytest.mark.parametrize("inference", [False, True])
def test_transformers(inference):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    x = torch.randint(50, (2, 9))
    for config, patterns in (
        (transformers.BertConfig(vocab_size=50, **sizes), r".*(intermediate|output)\.dense"),
        (transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes), r".*mlp\..*_proj"),
        (
            transformers.DistilBertConfig(vocab_size=50, dim=32, hidden_dim=64, n_layers=2, n_heads=2),
            r".*lin\d",
        ),
    ):
        model = transformers.AutoModel.from_config(config).eval()
        names = list(model.state_dict())
        rarefy.sparsify(model, {patterns: SPEC}, measure=False)
        with torch.inference_mode() if inference else torch.no_grad():
            y, seen = ran(lambda model=model: model(x).last_hidden_state)
            again = copy.deepcopy(model)(x).last_hidden_state
            unfused = copy.deepcopy(model)
            assert len(rarefy.fuse(unfused, False)) == 0
            apart = unfused(x).last_hidden_state
        assert seen.count("bsr_feed_forward") == 2
        assert torch.equal(y, again)
        torch.testing.assert_close(y, apart)
        assert {n.replace("weight.values", "weight") for n in model.state_dict()} >= {
            n for n in names if "weight" in n
        }
        rarefy.desparsify(model)
        assert list(model.state_dict()) == names


def test_training_is_as_before():
    """Recorded calls go layer by layer, with the same bits and gradients."""
    one, two = sparse(NETWORKS["gelu"]), None
    two = copy.deepcopy(one)
    rarefy.fuse(two, False)
    x = torch.randn(T, K, requires_grad=True)
    results = []
    for net in (one, two):
        y, names = ran(lambda net=net: net(x))
        y.square().sum().backward()
        results.append([y, x.grad.clone(), *(p.grad for p in net.parameters())])
        x.grad = None
        assert names.count("bsr_linear") == 2
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    for p in one.parameters():
        p.requires_grad_(False)
    assert ran(lambda: one(x.detach()))[1] == ["bsr_feed_forward"]  # frozen: nothing to record
    assert ran(lambda: one(x))[1].count("bsr_linear") == 2


def hidden_of(net, x):
    with torch.no_grad():
        h = net.fc1(x)
        assert type(h) is Hidden
        return h, functional.linear(x, net.fc1.weight.to_dense(), net.fc1.bias)


def test_whatever_is_done_with_it_it_is_a_tensor():
    net = sparse(NETWORKS["gelu"])
    x = torch.randn(T, K)
    for f in (
        lambda h: h + 1,
        lambda h: 1 - h,
        lambda h: h[2:4, ::2],
        lambda h: h.view(-1, 2),
        lambda h: torch.cat([h, h]),
        lambda h: torch.from_numpy(h.numpy()),
        lambda h: h.double(),
        lambda h: copy.deepcopy(h),
        lambda h: pickle.loads(pickle.dumps(h)),
        lambda h: torch.tensor(h.tolist()),
        lambda h: torch.stack(list(h)),
        lambda h: h.detach().clone(),
        lambda h: functional.gelu(h).mul(2),
        lambda h: functional.gelu(functional.gelu(h)),
        lambda h: functional.gelu(h) * torch.sigmoid(h),
        lambda h: h * h,
        lambda h: functional.linear(functional.relu(h), torch.eye(H)),
        lambda h: torch.ops.aten.neg(h),
        lambda h: functional.dropout(h, 0.5, training=True).shape,
        lambda h: (h.shape, h.dtype, h.device, h.ndim, h.size(0), h.dim(), h.numel(), h.is_floating_point()),
        lambda h: (h.requires_grad, h.is_leaf, h.grad_fn, h.stride(), h.is_contiguous(), len(h)),
        lambda h: repr(h.mul(0).abs()),
    ):
        h, plain = hidden_of(net, x)
        got = f(h)
        wanted = f(plain)
        assert not isinstance(got, Hidden)
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(got, wanted)
        else:
            assert got == wanted


def test_writing_to_it_is_seen():
    net = sparse(NETWORKS["gelu"])
    h, plain = hidden_of(net, torch.randn(T, K))
    for t in (h, plain):
        t[0] = 5
        t.mul_(2)
        t += 1
    torch.testing.assert_close(h + 0, plain)
    with torch.no_grad():
        torch.testing.assert_close(
            net.fc2(h), functional.linear(plain, net.fc2.weight.to_dense(), net.fc2.bias)
        )


def test_x_that_is_written_to_is_an_error():
    net = sparse(NETWORKS["gelu"])
    x = torch.randn(T, K)
    h, _ = hidden_of(net, x)
    x.add_(1)
    for use in (lambda: h + 1, lambda: net.fc2(h), lambda: functional.gelu(h)):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"\[BlockSparseLinear\] x must stay as it is"),
        ):
            use()


@pytest.mark.parametrize("what", ["values", "bias", "another bias", "another memory", "gate"])
def test_layers_that_are_written_to_are_an_error(what):
    net = sparse(NETWORKS["llama" if what == "gate" else "gelu"])
    x = torch.randn(T, K)
    with torch.no_grad():
        if what == "gate":
            h = net.act_fn(net.gate(x)) * net.up(x)
            net.gate.weight.values.mul_(2)
        else:
            h, _ = hidden_of(net, x)
            if what == "another bias":
                net.fc1.bias = nn.Parameter(torch.zeros(H))
            elif what == "another memory":  # the version stays
                net.fc1.weight.values.data = net.fc1.weight.values.data.clone()
            else:
                (net.fc1.weight.values if what == "values" else net.fc1.bias).add_(1)
        down = net.down if what == "gate" else net.fc2
        for use in (lambda: h + 1, lambda: down(h), lambda: down(functional.gelu(h))):
            with pytest.raises(RuntimeError, match=r"\[BlockSparseLinear\] a layer must stay as it is"):
                use()


@pytest.mark.parametrize("kind", ["gelu", "gated"])
def test_in_inference_mode_x_may_be_written_to(kind):
    """Nothing counts such writes: the layer has kept what x was."""
    net = sparse(NETWORKS["gelu"])
    with torch.inference_mode():
        x = torch.randn(T, K)
        want = net.fc1(x.clone()) + 0
        h = net.fc1(x)
        x.add_(1)
        if kind == "gated":
            up = net.fc1(x)  # of another x, though the same tensor
            product = functional.gelu(h) * up
            torch.testing.assert_close(product + 0, functional.gelu(want) * (net.fc1(x.clone()) + 0))
        else:
            torch.testing.assert_close(functional.gelu(h) + 0, functional.gelu(want))


def test_used_twice_it_is_computed_once():
    net = sparse(NETWORKS["gelu"])
    with torch.no_grad():
        h = net.fc1(torch.randn(T, K))
        _, names = ran(lambda: (h + 1, h * 2, net.fc2(h)))
    assert names == ["bsr_linear", "bsr_linear"]


def test_when_layers_do_not_wait():
    net, x = sparse(NETWORKS["gelu"]), torch.randn(T, K)
    with torch.no_grad():
        wanted = net(x)
        for case in (
            lambda: net(x[:4]),  # few tokens
            lambda: net(x[0]),
            lambda: torch.func.vmap(net)(x),
            lambda: torch.jit.trace(net, x, check_trace=False)(x),
            lambda: copy.deepcopy(net).double()(x.double()),
        ):
            y, names = ran(case)
            assert "bsr_feed_forward" not in names
            torch.testing.assert_close(y.float().reshape(-1, K), wanted[: max(1, y.numel() // K)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "bsr_feed_forward" not in ran(lambda: net(x))[1]
        with pytest.raises(ValueError, match=r"x's last dimension must be in_features=16"):
            net(x[:, :3])
    flat = sparse(NETWORKS["gelu"], "block:1x4@0.5")
    csr = sparse(NETWORKS["gelu"], "csr@0.5")
    drops = sparse(lambda: Between(nn.GELU(), 0.5).train())
    with torch.no_grad():
        for other in (flat, csr, drops):
            assert "bsr_feed_forward" not in ran(lambda other=other: other(x))[1]


def test_small_work_does_not_wait(monkeypatch):
    net, x = sparse(NETWORKS["gelu"]), torch.randn(T, K)
    for work, name in ((T * K * H, "bsr_feed_forward"), (T * K * H + 1, "bsr_linear")):
        monkeypatch.setitem(chain._WORK, "cpu", work)
        with torch.no_grad():
            assert set(ran(lambda: net(x))[1]) == {name}


def test_compiled_layers_do_not_wait():
    net, x, seen = sparse(NETWORKS["gelu"]), torch.randn(T, K), []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        y = torch.compile(net, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(y, net(x))
    assert sum("bsr_linear" in name for name in seen) == 2


def test_narrow_values_and_other_specs():
    net, x = sparse(NETWORKS["gelu"], "block:8x2@0.5:bf16"), torch.randn(T, K)
    with torch.no_grad():
        y, names = ran(lambda: net(x))
        rarefy.fuse(net, False)
        torch.testing.assert_close(y, net(x))
    assert names in (["bsr_feed_forward"], ["bsr_linear"] * 2)  # the latter where kernels pack such values


def test_hooks_see_tensors():
    net, x = sparse(NETWORKS["gelu"]), torch.randn(T, K)
    seen = {}
    for key in ("fc1", "act", "fc2"):
        getattr(net, key).register_forward_hook(
            lambda m, i, o, key=key: seen.update({key: (i[0] + 0, o + 0)})
        )
    with torch.no_grad():
        y = net(x)
    h = functional.linear(x, net.fc1.weight.to_dense(), net.fc1.bias)
    torch.testing.assert_close(seen["fc1"][1], h)
    torch.testing.assert_close(seen["act"][1], functional.gelu(h))
    torch.testing.assert_close(seen["fc2"][0], functional.gelu(h))
    torch.testing.assert_close(seen["fc2"][1], y)


def test_hooks_may_replace_the_output():
    net, x = sparse(NETWORKS["gelu"]), torch.randn(T, K)
    net.fc1.register_forward_hook(lambda m, i, o: o * 0)
    with torch.no_grad():
        torch.testing.assert_close(net(x), net.fc2.bias.expand(T, K))


def test_which_layers_are_marked():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(K, K), nn.Linear(K, K)

    model = nn.ModuleDict(
        {"attention": Attention(), "bert": Bert(), "llama": Llama(), "one": nn.Linear(K, H)}
    )
    rarefy.sparsify(model, {".*": SPEC}, measure=False, fuse=False)
    assert rarefy.fuse(model) == ["bert.intermediate.dense", "llama.gate", "llama.up"]
    assert rarefy.fuse(model, False) == []
    assert rarefy.fuse(nn.Sequential(nn.GELU())) == []
    with pytest.raises(TypeError, match=r"\[fuse\] model must be an nn.Module; got str"):
        rarefy.fuse("model")


def test_files_and_copies(tmp_path):
    net, x = sparse(Bert), torch.randn(T, K)
    rarefy.save_file(net, tmp_path / "net.safetensors")
    loaded, unfused = Bert(), Bert()
    rarefy.load_file(loaded, tmp_path / "net.safetensors")
    rarefy.load_file(unfused, tmp_path / "net.safetensors", fuse=False)
    pickled = pickle.loads(pickle.dumps(net))
    assert list(loaded.state_dict()) == list(net.state_dict())
    with torch.no_grad():
        wanted = net(x)
        for other in (loaded, pickled, copy.deepcopy(net)):
            y, names = ran(lambda other=other: other(x))
            assert names == ["bsr_feed_forward"] and torch.equal(y, wanted)
        assert "bsr_feed_forward" not in ran(lambda: unfused(x))[1]


def test_values_that_change_are_used():
    net, x = sparse(NETWORKS["relu"]), torch.randn(T, K)
    with torch.no_grad():
        net(x)
        for layer in (net.fc1, net.fc2):
            layer.weight.values.mul_(2)
            layer.bias.mul_(0)
        dense = functional.relu(x @ net.fc1.weight.to_dense().T) @ net.fc2.weight.to_dense().T
        torch.testing.assert_close(net(x), dense)


def test_empty_patterns_and_nan():
    net, x = sparse(NETWORKS["gelu"], "block:4x1@0.0"), torch.full((T, K), torch.nan)
    with torch.no_grad():
        y, names = ran(lambda: net(x))
        assert names == ["bsr_feed_forward"]
        assert torch.equal(y, net.fc2.bias.expand(T, K))


def test_the_op_equals_what_the_front_calls():
    net, x = sparse(NETWORKS["gelu"]), torch.randn(T, K)
    up, down = net.fc1, net.fc2
    with torch.no_grad():
        direct = ops.bsr_feed_forward(
            x, up.weight.values, up.weight.plan, up.bias, None, None, None,
            down.weight.values, down.weight.plan, down.bias, K, H, K, "gelu",
        )  # fmt: skip
        assert torch.equal(direct, net(x))


@pytest.fixture
def pairs():
    before = rarefy.force_impl("cpu:pairs")
    yield
    rarefy.force_impl(before)


@pytest.mark.parametrize("spec", ["block:16x1@0.5", "block:16x2@0.5"])
def test_networks_in_bf16_pairs_have_the_bits_of_their_layers(pairs, spec):
    net, x = sparse(NETWORKS["gelu"], spec).to(torch.bfloat16), torch.randn(70, K).bfloat16()
    up, down = net.fc1, net.fc2
    with torch.no_grad():
        hidden = up.weight.prepare().linear(x, up.bias, "gelu")
        wanted = down.weight.prepare().linear(hidden, down.bias)
        y, names = ran(lambda: net(x))
        assert names == ["bsr_feed_forward"]
        assert torch.equal(y, wanted)
        up.weight.values.data.mul_(2)  # what torch does not count
        with pytest.raises(RuntimeError, match="its prepared or packed weight is not at hand"):
            net(x)  # `pairs` is forced, and has no other kernel
        up.weight.values.data.div_(2)
        held = (*up.weight.derived(x)[:2], *down.weight.derived(x))
        args = (
            x, up.weight.values, up.weight.plan, up.bias, None, None, None,
            down.weight.values, down.weight.plan, down.bias, K, H, K, "gelu",
        )  # fmt: skip
        assert torch.equal(ops.bsr_feed_forward(*args, *held), wanted)
        batched = torch.func.vmap(lambda x: ops.bsr_feed_forward(x, *args[1:], *held))(x.view(7, 10, K))
        assert torch.equal(batched.view(70, K), wanted)


def test_gated_networks_in_bf16_pairs_are_one_op_with_the_bits_of_their_layers(pairs):
    net, x = sparse(NETWORKS["llama"], "block:16x1@0.5").to(torch.bfloat16), torch.randn(70, K).bfloat16()
    layers = [layer for layer in net.modules() if isinstance(layer, BlockSparseLinear)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.prepare()
        y, names = ran(lambda: net(x))
        assert names == ["bsr_feed_forward"]
        assert rarefy.explain((net.up, net.gate, net.down), x)["kernel"] == "pairs_feed_forward"
        hidden = net.gate.weight.linear(x, None, "silu") * net.up.weight.linear(x, None)
        wanted = net.down.weight.linear(hidden, None)
        assert torch.equal(y, wanted)
        held = [layer.weight.derived(x) for layer in (net.up, net.down, net.gate)]
        args = [x]
        for layer in (net.up, net.gate, net.down):
            args += [layer.weight.values, layer.weight.plan, layer.bias]
        derived = (*held[0][:2], *held[1], *held[2][:2])
        assert torch.equal(ops.bsr_feed_forward(*args, K, H, K, "silu", *derived), wanted)
