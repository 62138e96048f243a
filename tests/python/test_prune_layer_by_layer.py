"""Whole models, reconstructed layer by layer: towards themselves or another, interrupted, refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rarefy.prune import Mask, Moments, reconstruct, reconstruct_layer, reconstruct_weight
from reconstruct_problems import Net, data, problem


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_a_whole_model(memory):
    dense, model = Net(), Net()
    model.load_state_dict(dense.state_dict())
    seen = []
    result = reconstruct(
        model, data(), "unstructured", 0.5, refit=True, memory=memory, on_layer=lambda *a: seen.append(a[0])
    )
    assert seen == list(result.masks) == ["conv.weight", "up.weight", "down.weight"]
    for name, mask in result.masks.items():
        weight = model.get_parameter(name).detach().flatten(1)
        assert torch.equal(weight == 0, ~mask.unpack())
        assert mask.density == pytest.approx(0.5, abs=0.01)
    plain = copy.deepcopy(dense)
    reconstruct(plain, data(), "unstructured", 0.5, "magnitude")
    x = data()[0]
    with torch.no_grad():
        want = dense(x)
        assert (model(x) - want).norm() < 0.5 * (plain(x) - want).norm()
    assert "conv.weight" in str(result)


def deep(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(4, 12, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 6, bias=False))


def test_towards_the_dense_model_layers_mend_what_came_before():
    dense = deep()
    lost, x = {}, torch.cat(data())
    held_out = torch.randn(200, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    for how in ("own", "dense", "all at once"):
        model = copy.deepcopy(dense)
        options = {} if how == "own" else {"towards": dense}
        memory = 0 if how != "all at once" else 1 << 30
        result = reconstruct(model, data(), "block:4x1", 0.6, "obs", memory=memory, **options)
        with torch.no_grad():
            lost[how] = float((model(held_out) - dense(held_out)).square().mean())
            if how == "dense":  # the last layer's error is the model's
                want = float((model(x) - dense(x)).square().sum() / dense(x).square().sum())
                assert result.errors["7.weight"] == pytest.approx(want, rel=1e-3)
        for name, mask in result.masks.items():
            assert torch.equal(model.get_parameter(name).flatten(1) != 0, mask.unpack())
    assert lost["dense"] < 0.95 * min(lost["own"], lost["all at once"])


def test_towards_is_reconstruct_layer_on_what_the_layers_give():
    dense = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    x, model = torch.randn(300, 16), copy.deepcopy(dense)
    reconstruct(
        model, [x[:100], x[100:]], "row_balanced:4x1", 0.5, "obs", towards=dense, memory=0, dampening=0.02
    )
    again = copy.deepcopy(dense)
    for here in (0, 2):
        moments = Moments(again[here].in_features, again[here].out_features)
        with torch.no_grad():
            moments.add(again[:here](x), dense[: here + 1](x))
        reconstruct_layer(again[here], moments, "row_balanced:4x1", 0.5, ridge=0.02)
        for name in ("weight", "bias"):
            torch.testing.assert_close(getattr(model[here], name), getattr(again[here], name))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"towards": nn.Linear(3, 3)}, "must have a layer conv of shape"),
        ({"towards": "same"}, "must be a copy of the model"),
        ({"towards": "copy", "forward": print}, "forward must be None"),
    ],
)
def test_towards_refuses_what_does_not_fit(options, text):
    model = Net()
    others = {"same": model, "copy": copy.deepcopy(model)}
    options = options | {"towards": others.get(options["towards"], options["towards"])}
    with pytest.raises(ValueError, match=text):
        reconstruct(model, data(), **options)


def test_towards_says_which_layer_does_not_fit():
    class Often(nn.Module):
        def __init__(self, times: int, rows: int, width: int = 6) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.times, self.rows, self.width = times, rows, width

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            for _ in range(self.times):
                x = self.two(x[: self.rows, : self.width])
            return x

    x = [torch.randn(20, 6)]
    with pytest.raises(TypeError, match=r"towards must be an nn\.Module; got int"):
        reconstruct(Often(1, 20), x, "2:4", towards=3)
    with pytest.raises(ValueError, match=r"the layer of two\.weight 2 times, as the model does; got 1 times"):
        reconstruct(Often(2, 20), x, "2:4", towards=Often(1, 20))
    with pytest.raises(ValueError, match=r"the layer of two\.weight 20 tokens in a call; got 7 of \(7, 6\)"):
        reconstruct(Often(1, 20), x, "2:4", towards=Often(1, 7))
    with pytest.raises(ValueError, match=r"the inputs of two\.weight must have 6 features; got \(20, 5\)"):
        reconstruct(Often(1, 20, 5), x, "2:4", towards=Often(1, 20))


def test_layers_of_their_own_and_those_done_before():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    config = {"up": {"sparsity": 0.75, "pattern": "block:4x4"}, "down|conv": {}}
    result = reconstruct(model, data(), "2:4", config=config, skip=["down.weight"])
    assert set(result.masks) == {"up.weight", "conv.weight"}
    assert result.masks["up.weight"].density == 0.25
    assert torch.equal(model.down.weight, before["down.weight"])


def test_an_interruption_costs_the_layer_in_progress_alone():
    whole, done = Net(), []
    model = copy.deepcopy(whole)
    expected = reconstruct(whole, data(), "2:4", memory=0)

    def interrupted():
        yield from data()
        if done:  # the second layer's data are collected
            raise KeyboardInterrupt

    class Batches:
        def __iter__(self):
            return interrupted()

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        reconstruct(model, Batches(), "2:4", memory=0, on_layer=lambda name, mask, error: done.append(name))
    first = next(iter(expected.masks))
    assert done == [first]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if k != first)
    assert not any(module._forward_pre_hooks for module in model.modules())
    rest = reconstruct(model, data(), "2:4", memory=0, skip=done)
    assert [*done, *rest.masks] == list(expected.masks)
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in model.state_dict().items())


def test_bad_input():
    weight, gram = problem()

    def message(*args, **options):
        with pytest.raises((ValueError, TypeError)) as error:
            reconstruct_weight(*args, **options)
        return str(error.value)

    assert "near names: sparsegpt" in message(weight, gram, "2:4", method="sparsgpt")
    assert "must be (N, K) and gram (K, K); got (48, 96) and (95, 96)" in message(weight, gram[1:], "2:4")
    assert "sparsity must be in [0, 1]; got -1" in message(weight, gram, "unstructured", -1)
    assert "at most 0.5 with the pattern 2:4" in message(weight, gram, "2:4", 0.7)
    assert 'counts in whole layers ("obs" in rows)' in message(weight, gram, "row_balanced", 0.5)
    assert 'the method "obs" is for blocks' in message(weight, gram, "2:4", method="obs")
    assert "blocks must not be larger than weight, 48x96; got 64x1" in message(weight, gram, "block:64x1")
    assert "panel must be at least 1; got 0" in message(weight, gram, "2:4", panel=0)
    assert "steps must be at least 1; got 0" in message(weight, gram, "block:4x1", method="obs", steps=0)
    assert "dampening must be finite and not negative; got -1" in message(weight, gram, "2:4", dampening=-1)
    assert 'mask needs the method "sparsegpt"' in message(
        weight, gram, "2:4", method="wanda", mask=Mask.pack(weight > 0)
    )
    with pytest.raises(ValueError, match=r"data must reach every layer; got none at conv\.weight"):
        reconstruct(Net(), [])
    with pytest.raises(ValueError, match=r"the inputs of conv\.weight must be finite"):
        reconstruct(Net(), [data()[0] * torch.nan])
