"""Structured removal: a shrunken model computes what the whole one does without the removed columns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rarefy.prune import structured
from rarefy.prune.structured import Coupling, find_couplings, shrink, unit_norms


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


MODELS = [
    (residuals, (5, 3, 8, 8), 3),
    (mobile, (5, 4, 8, 8), 1),
    (mlp, (5, 10), 2),
    (cnn, (5, 3, 8, 8), 3),
    (lambda: Block().eval(), (5, 8), 1),
    (lambda: nn.TransformerEncoderLayer(8, 2, 24, batch_first=True, norm_first=True).eval(), (2, 5, 8), 1),
]


@pytest.mark.parametrize(("make", "shape", "count"), MODELS)
@pytest.mark.parametrize("sparsity", [0.25, 0.5, 1.0])
def test_what_stays_computes_what_it_did(make, shape, count, sparsity):
    model, x = make(), torch.randn(shape)
    masked, couplings = copy.deepcopy(model), find_couplings(model)
    assert len(couplings) == count
    gone = {}
    for coupling in couplings:
        norms = unit_norms(model, coupling)
        remove = min(round(sparsity * len(norms)), len(norms) - 1)
        gone[coupling.name] = norms.argsort()[:remove]
        for name in coupling.consumers:
            weight = masked.get_submodule(name).weight.detach()
            wide = weight.view(len(weight), len(norms), -1)
            wide[:, gone[coupling.name]] = 0
    before = sum(p.numel() for p in model.parameters())
    result = shrink(model, sparsity)
    with torch.no_grad():
        torch.testing.assert_close(model(x), masked(x), rtol=1e-5, atol=1e-5)
    for row, coupling in zip(result, couplings, strict=True):
        assert row.before - row.after == len(gone[coupling.name])
        for name in coupling.producers:
            layer = model.get_submodule(name)
            assert len(layer.weight) == row.after and (layer.bias is None or len(layer.bias) == row.after)
            assert getattr(layer, "out_features", getattr(layer, "out_channels", 0)) == row.after
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


def test_shared_and_grouped_layers_are_left_out():
    shared = nn.Linear(8, 8)
    assert find_couplings(nn.Sequential(shared, nn.ReLU(), shared)) == []
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    assert find_couplings(tied) == []
    assert find_couplings(nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 4, 3))) == []
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
    assert structured.__doc__
