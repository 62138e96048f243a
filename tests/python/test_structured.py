"""Structured removal: a shrunken model computes what the whole one does without the removed columns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rarefy.prune import Coupling, find_couplings, shrink, trace_couplings
from rarefy.prune.structured import unit_norms


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = (nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.1)), (nn.GELU(), nn.Linear(16, 3))
    return nn.Sequential(*first, nn.Linear(24, 16, bias=False), *last).eval()


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3),
        nn.BatchNorm2d(12), nn.SiLU(), nn.Flatten(), nn.Linear(12 * 4, 20),
        nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 5),
    )  # fmt: skip
    model(torch.randn(16, 3, 8, 8))  # statistics
    return model.eval()


class Block(nn.Module):
    """A gated network by Llama's names, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict(
            {k: nn.Linear(8, 20) for k in ("gate_proj", "up_proj")} | {"down_proj": nn.Linear(20, 8)}
        )

    def forward(self, x):
        m = self.mlp
        return x + m["down_proj"](nn.functional.silu(m["gate_proj"](x)) * m["up_proj"](x))


class Residual(nn.Module):
    """A block of a residual network by torchvision's names; `first` says what stands before what."""

    def __init__(self, wide: int, widths: tuple[int, ...], first: str = "conv") -> None:
        super().__init__()
        for i, (k, n) in enumerate(zip((wide, *widths), (*widths, wide), strict=True), 1):
            layers = {f"conv{i}": nn.Conv2d(k, n, 3, padding=1, bias=False), f"bn{i}": nn.BatchNorm2d(n)}
            for name in sorted(layers, reverse=first == "conv"):
                self.add_module(name, layers[name])
        self.relu, self.count = nn.ReLU(inplace=True), len(widths) + 1

    def forward(self, x):
        y = x
        for i in range(1, self.count + 1):
            y = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(y))
            y = self.relu(y) if i < self.count else y
        return self.relu(x + y)


def residuals() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Residual(6, (10,)), Residual(6, (8, 12)))
    model(torch.randn(16, 3, 8, 8))
    return model.eval()


def mobile() -> nn.Sequential:
    """An inverted residual's convolutions as MobileNet nests them."""
    torch.manual_seed(0)
    norm = lambda n: (nn.BatchNorm2d(n), nn.ReLU6())  # noqa: E731
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(4, 24, 1, bias=False), *norm(24)),
        nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=24), *norm(24)),
        nn.Conv2d(24, 4, 1), nn.BatchNorm2d(4),
    )  # fmt: skip
    model(torch.randn(16, 4, 8, 8))
    return model.eval()


def grouped() -> nn.Sequential:
    """Convolutions in groups, two that make channels for three, and a last one that reads all."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 12, 3, groups=2), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 18, 3, groups=3),
        nn.SiLU(), nn.Conv2d(18, 6, 1), nn.Flatten(), nn.Linear(6 * 16, 5),
    )  # fmt: skip
    model(torch.randn(16, 4, 8, 8))
    return model.eval()


MODELS = [
    (grouped, (5, 4, 8, 8), 3),
    (residuals, (5, 3, 8, 8), 3),
    (mobile, (5, 4, 8, 8), 1),
    (mlp, (5, 10), 2),
    (cnn, (5, 3, 8, 8), 3),
    (lambda: Block().eval(), (5, 8), 1),
    (lambda: nn.TransformerEncoderLayer(8, 2, 24, batch_first=True, norm_first=True).eval(), (2, 5, 8), 2),
]


def without(model: nn.Module, couplings: list[Coupling], sparsity: float) -> tuple[nn.Module, dict[str, int]]:
    """A copy with the columns of the least units at zero in their consumers; how many units, by coupling."""
    masked, gone = copy.deepcopy(model), {}
    for coupling in couplings:
        norms = unit_norms(model, coupling)
        gone[coupling.name] = min(round(sparsity * len(norms)), len(norms) - 1)
        for name in coupling.consumers:
            layer = masked.get_submodule(name)
            parts = coupling.groups // getattr(layer, "groups", 1)
            wide = layer.weight.detach().view(len(layer.weight), parts, len(norms), -1)
            wide[:, :, norms.argsort()[: gone[coupling.name]]] = 0
    return masked, gone


@pytest.mark.parametrize(("make", "shape", "count"), MODELS)
@pytest.mark.parametrize("sparsity", [0.25, 0.5, 1.0])
def test_what_stays_computes_what_it_did(make, shape, count, sparsity):
    model, x, couplings = make(), torch.randn(shape), find_couplings(make())
    assert len(couplings) == count
    masked, gone = without(model, couplings, sparsity)
    before = sum(p.numel() for p in model.parameters())
    result = shrink(model, sparsity)
    with torch.no_grad():
        torch.testing.assert_close(model(x), masked(x), rtol=1e-5, atol=1e-5)
    for row, coupling in zip(result, couplings, strict=True):
        assert row.before - row.after == gone[coupling.name]
        for name in coupling.producers:
            layer = model.get_submodule(name)
            if isinstance(layer, nn.MultiheadAttention):
                assert layer.num_heads == row.after
                continue
            width = row.after * coupling.groups
            assert len(layer.weight) == width and (layer.bias is None or len(layer.bias) == width)
            assert getattr(layer, "out_features", getattr(layer, "out_channels", 0)) == width
    assert sum(p.numel() for p in model.parameters()) < before
    model.train()(x).sum().backward()


def test_heads_and_networks_of_bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    masked = copy.deepcopy(model)
    couplings = find_couplings(model)
    assert [c.unit for c in couplings].count(8) == 2 and len(couplings) == 4
    kept = {}
    for coupling in couplings:
        norms = unit_norms(model, coupling)
        kept[coupling.name] = norms.argsort()[len(norms) // 2 :]
        weight = masked.get_submodule(coupling.consumers[0]).weight.detach().view(32, len(norms), -1)
        weight[:, norms.argsort()[: len(norms) // 2]] = 0
    result = shrink(model, 0.5)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        got, expected = (m(ids).last_hidden_state for m in (model, masked))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert sorted((row.before, row.after) for row in result) == [(4, 2), (4, 2), (48, 24), (48, 24)]
    inner = model.encoder.layer[0].attention.self
    assert inner.num_attention_heads == 2 and inner.query.out_features == 16
    assert all(row.parameters_after < 0.6 * row.parameters_before for row in result)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 2), (8, 2)])
def test_grouped_query_heads_leave_together(queries, keys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=queries, head_dim=8,
        num_key_value_heads=keys, intermediate_size=48, attention_bias=True,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    masked = copy.deepcopy(model)
    couplings = [c for c in find_couplings(model) if c.heads]
    assert [c.unit for c in couplings] == [8 * queries // keys] * 2
    for coupling in couplings:
        norms = unit_norms(model, coupling)
        assert norms.shape == (keys,)
        weight = masked.get_submodule(coupling.consumers[0]).weight.detach().view(32, keys, -1)
        weight[:, norms.argsort()[: round(0.4 * keys)]] = 0
    result = shrink(model, 0.4, couplings=couplings)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        got, expected = (m(ids).last_hidden_state for m in (model, masked))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    left = keys - round(0.4 * keys)
    inner = model.layers[0].self_attn
    assert [(row.before, row.after) for row in result] == [(keys, left)] * 2
    assert (inner.q_proj.out_features, inner.k_proj.out_features) == (8 * left * queries // keys, 8 * left)


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True, "bias": False}, {"kdim": 12, "vdim": 20}, {"add_bias_kv": True}]
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_heads_of_torchs_attention_leave(options, mode):
    torch.manual_seed(0)
    model = nn.Module()
    model.attention = nn.MultiheadAttention(32, 4, **options)
    (coupling,) = find_couplings(model)
    assert (coupling.unit, coupling.heads) == (8, "attention")
    getattr(model, mode)()
    masked, _ = without(model, [coupling], 0.5)
    layer, whole = model.attention, masked.attention
    x, keys, values = (torch.randn(5, 3, n) for n in (32, layer.kdim, layer.vdim))
    (row,) = shrink(model, 0.5)
    assert (row.before, row.after, layer.num_heads, layer.head_dim) == (4, 2, 2, 8)
    assert layer.q_proj_weight.shape == (16, 32) and layer.out_proj.weight.shape == (32, 16)
    for need in (True, False):
        got, attention = layer(x, keys, values, need_weights=need)
        torch.testing.assert_close(got, whole(x, keys, values, need_weights=need)[0], rtol=1e-5, atol=1e-5)
        assert not need or torch.allclose(attention.sum(-1), torch.ones(()))
    again = copy.deepcopy(layer)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x, keys, values, need_weights=False)[0], got)
    got.sum().backward()
    assert layer.v_proj_weight.grad.shape == (16, layer.vdim)
    shrink(model, 0.5)
    assert layer.num_heads == 1 and layer(x, keys, values)[0].shape == x.shape


def test_an_encoder_with_fewer_heads_leaves_torchs_fused_path():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2).eval()
    masked, _ = without(encoder, find_couplings(encoder), 0.5)
    shrink(encoder, 0.5)
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.inference_mode():
        got, want = (m(x, src_key_padding_mask=padding) for m in (encoder, masked))
    torch.testing.assert_close(got[~padding], want[~padding], rtol=1e-5, atol=1e-5)


class Excited(nn.Module):
    """A residual block in groups with squeeze and excitation, and a shortcut where widths differ."""

    def __init__(self, wide: int, out: int, groups: int) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(wide, 12, 1, bias=False),
            nn.Conv2d(12, 12, 3, padding=1, groups=groups),
        )
        self.three, self.norm, self.last = nn.Conv2d(12, out, 1), nn.BatchNorm2d(12), nn.BatchNorm2d(out)
        self.squeeze, self.excite = nn.Conv2d(out, 4, 1), nn.Conv2d(4, out, 1)
        self.short = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x):
        y = self.last(self.three(nn.functional.relu(self.norm(self.two(self.one(x))))))
        gate = self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return torch.relu(self.short(x) + gate * y)


class Net(nn.Module):
    """Stages of such blocks; what goes from block to block leaves with all that add to it."""

    def __init__(self, flatten) -> None:
        super().__init__()
        self.stem, self.norm, self.flatten = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), flatten
        self.blocks = nn.Sequential(Excited(8, 8, 3), Excited(8, 16, 4), Excited(16, 16, 1))
        self.head = nn.Linear(16 * 4, 5)

    def forward(self, x):
        x = self.blocks(nn.functional.max_pool2d(self.norm(self.stem(x)), 2))
        return self.head(self.flatten(nn.functional.adaptive_avg_pool2d(x, 2)))


FLATTENS = [lambda x: x.flatten(1), lambda x: torch.flatten(x, 1), lambda x: x.view(x.size(0), -1),
            lambda x: x.reshape(x.shape[0], -1)]  # fmt: skip


@pytest.mark.parametrize("flatten", FLATTENS)
@pytest.mark.parametrize("sparsity", [0.25, 0.5, 1.0])
def test_residual_streams_leave_with_all_that_add_to_them(flatten, sparsity):
    torch.manual_seed(0)
    model, x = Net(flatten), torch.randn(4, 3, 12, 12)
    model(x)
    couplings = trace_couplings(model.eval())
    streams = [c for c in couplings if "head" in c.consumers or "blocks.1.short" in c.consumers]
    assert len(couplings) == 3 * 3 + 2 and len(streams) == 2
    stem, late = streams
    assert set(stem.producers) == {"stem", "blocks.0.three", "blocks.0.excite"}
    assert set(stem.consumers) == {"blocks.0.one", "blocks.0.squeeze", "blocks.1.one", "blocks.1.short"}
    assert {"norm", "blocks.0.last"} == set(stem.norms) and "blocks.1.short" in late.producers
    assert sorted(c.groups for c in couplings) == [1] * 7 + [3, 3, 4, 4]
    masked, _ = without(model, couplings, sparsity)
    shrink(model, sparsity, couplings=couplings)
    with torch.no_grad():
        torch.testing.assert_close(model(x), masked(x), rtol=1e-4, atol=1e-4)
    model.train()(x).sum().backward()


@pytest.mark.parametrize(
    ("name", "most"),
    [("resnet18", 0.35), ("mobilenet_v3_small", 0.45), ("regnet_x_400mf", 0.45), ("densenet121", 1)],
)
def test_torchvisions_networks_shrink_as_a_whole(name, most):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model, x = getattr(torchvision.models, name)(num_classes=10).eval(), torch.randn(2, 3, 64, 64)
    couplings, before = trace_couplings(model), sum(p.numel() for p in model.parameters())
    masked, _ = without(model, couplings, 0.5)
    shrink(model, 0.5, couplings=couplings)
    with torch.no_grad():
        torch.testing.assert_close(model(x), masked(x), rtol=1e-3, atol=1e-4)
    assert sum(p.numel() for p in model.parameters()) < most * before


def test_what_cannot_be_followed_stays_whole():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
            self.e, self.norm, self.bias = nn.Linear(6, 6), nn.LayerNorm(6), nn.Parameter(torch.zeros(6))

        def forward(self, x):
            a = self.b(self.a(x).softmax(-1))  # mixed
            c = self.c(self.norm(a)) + self.bias  # a mean of all; a Parameter
            d = self.d(c).T  # turned
            return self.e(self.e(d))  # twice, and an output

    assert trace_couplings(Odd()) == []

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match=r"\[trace_couplings\] .*torch.fx can trace; got TraceError"):
        trace_couplings(Branches())
    with pytest.raises(TypeError, match=r"nn\.Module"):
        trace_couplings("model")


def test_sparsities_and_scores_by_name():
    model = mlp()
    scores = torch.arange(24.0).flip(0)
    weight = model[0].weight.detach().clone()
    result = shrink(model, {"0": 0.5}, scores={"0": scores})
    assert [(row.name, row.after) for row in result] == [("0", 12), ("3", 16)]
    assert torch.equal(model[0].weight, weight[:12]) and model[3].in_features == 12


def test_blocks_whose_names_say_too_little_are_left_out():
    block = Residual(6, (6,))
    assert [c.name for c in find_couplings(block)] == ["conv1"]
    block.gate = nn.Conv2d(6, 6, 1)  # who knows what it reads
    assert find_couplings(block) == [] == find_couplings(Residual(6, (6,), first="bn"))

    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + self[0](x)

    assert find_couplings(Twice(nn.Linear(4, 4), nn.Linear(4, 4))) == []


def test_a_depthwise_convolution_shrinks_with_its_channels():
    model = mobile()
    (coupling,) = find_couplings(model)
    assert coupling.norms == ("0.1", "1.0", "1.1") and coupling.consumers == ("2",)
    shrink(model, 0.5)
    depthwise = model[1][0]
    assert depthwise.groups == depthwise.in_channels == depthwise.out_channels == 12
    assert depthwise.weight.shape == (12, 1, 3, 3) and depthwise.bias.shape == (12,)


def test_shared_and_mixed_layers_are_left_out():
    shared = nn.Linear(8, 8)
    assert find_couplings(nn.Sequential(shared, nn.ReLU(), shared)) == []
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    assert find_couplings(tied) == []
    assert find_couplings(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))) == []
    # Features that are mixed on the way: a token's are neighbours, and a picture's columns are no channels.
    assert find_couplings(nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(8, 4))) == []
    assert find_couplings(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(8, 4))) == []
    assert find_couplings(nn.Sequential(nn.Linear(4, 8), nn.MaxPool2d(2), nn.Linear(8, 4))) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1.5, {}), r"in \[0, 1\]"),
        (({"9": 0.5}, {}), "near names"),
        ((0.5, {"scores": {"0": torch.ones(3)}}), r"must be of shape \(24,\)"),
        ((0.5, {"couplings": [Coupling("0", ("0",), ("5",))]}), "same hidden features"),
        ((0.5, {"couplings": [Coupling("0", ("0",), ("1",))]}), "plain nn.Linear"),
        ((0.5, {"couplings": []}), "must have a coupling"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_changes(arguments, text):
    model = mlp()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=text):
        shrink(model, arguments[0], **arguments[1])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
