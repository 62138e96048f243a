"""What a Sparsifier accepts: settings, models, configs and data; errors name what is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rarefy
from prune_models import Net, batch
from rarefy.prune import (
    LowRankConv2d,
    LowRankLinear,
    Mask,
    Scores,
    Sparsifier,
    allocate_global,
    arrange_hidden,
    gradient_norms,
    layer_error,
    make_mask,
)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"criterion": "magnitud"}, r"criterion must be a known one; got 'magnitud'; near names: magnitude"),
        ({"pattern": "blok:4x4"}, r"pattern must be a known one; got 'blok:4x4'; near names: block:16x16"),
        ({"pattern": "5:4"}, r"\[NM\] n must be at most m; got 5:4"),
        ({"pattern": "block:0x4"}, r"\[Block\] r must be at least 1; got 0"),
        ({"pattern": "block:4x6+2:4"}, "c must be a multiple of m"),
        ({"pattern": "diagonal:2"}, "nearliness must be odd; got 2"),
        ({"schedule": "cubical"}, "schedule must be a known one; got 'cubical'; near names: cubic"),
        ({"schedule": "cubic:5:1"}, "end must not be before begin; got begin=5, end=1"),
        ({"scope": "globall"}, "scope must be a known one; got 'globall'; near names: global"),
        ({"allocation": "erq"}, "allocation must be a known one; got 'erq'; near names: er"),
        ({"sparsity": 1.5}, r"sparsity must be in \[0, 1\]; got 1.5"),
        ({"sparsity": float("nan")}, r"sparsity must be in \[0, 1\]; got nan"),
        ({"sparsity": 0.6, "pattern": "2:4"}, "sparsity must be at most 0.5 with the pattern 2:4; got 0.6"),
        ({"scope": "global", "allocation": "erk"}, "allocation must be uniform"),
        ({"ste": "ste", "in_place": True}, "in_place must be False"),
        ({"ste": "est"}, 'ste must be None, "ste" or "sr-ste"'),
    ],
)
def test_bad_settings(options, text):
    with pytest.raises(ValueError, match=text):
        Sparsifier(**options)


def test_bad_models_and_configs():
    def message(config=None, model=None, **options):
        sparsifier = Sparsifier(**options)
        with pytest.raises((ValueError, TypeError)) as error:
            sparsifier.prepare(model if model is not None else Net(), config)
        return str(error.value)

    assert "near names: up.weight" in message([{"tensor_fqn": "upp.weight"}])
    assert "must have a tensor_fqn" in message([{"sparsity_level": 0.5}])
    assert "module_fqn must be that of tensor_fqn" in message(
        [{"tensor_fqn": "up.weight", "module_fqn": "down"}]
    )
    assert "which matches none; near names: up" in message({"upp": {}})
    assert "must be regular expressions" in message({"(": {}})
    assert "blocks must not be larger than down.weight, 10x30; got 16x16" in message(
        {"down": {}}, pattern="block:16x16"
    )
    assert "must have a weight to prune" in message(model=nn.Sequential(nn.ReLU()))
    assert "sparsity_level must be in [0, 1]; got 2" in message({"up": {"sparsity": 2}})
    assert "a global scope needs units of whole layers" in message(pattern="row_balanced", scope="global")
    assert "must have a multiple of 7 rows; got 12" in message(pattern="head:7")
    model = Net()
    sparsifier = Sparsifier()
    sparsifier.prepare(model)
    with pytest.raises(ValueError, match=r"must be prepared once \(make another one\); got a second call"):
        sparsifier.prepare(model)
    assert "a weight must not be parametrized" in message(model=model)
    assert len(model.up.parametrizations.weight) == 1


def test_config_of_torch_ao_and_by_name():
    model = Net()
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(
        model,
        [{"tensor_fqn": ".up.weight", "sparsity_level": 0.25}, {"module_fqn": "down", "pattern": "2:4"}],
    )
    sparsifier.step()
    assert [(r.name, r.pattern) for r in sparsifier.report()] == [
        ("up.weight", "unstructured"),
        ("down.weight", "2:4"),
    ]
    assert sparsifier.report()["up.weight"].nnz == 270
    other = Sparsifier(0.5)
    other.prepare(Net(), {"up|down": {"sparsity": 0.9}}, filter_fn=lambda name, _: name != "down")
    assert [g["tensor_fqn"] for g in other.groups] == ["up.weight"]


def test_bad_calls():
    with pytest.raises(ValueError, match=r"prepare\(model\) must be called first"):
        Sparsifier().step()
    sparsifier = Sparsifier(criterion="wanda")
    sparsifier.prepare(Net())
    with pytest.raises(ValueError, match=r"needs observations \(run data through the model"):
        sparsifier.step()
    with pytest.raises(ValueError, match="data must run through the model; got none"):
        sparsifier.calibrate([])
    with pytest.raises(ValueError, match=r"the inputs of conv\.weight must be finite; got NaN or infinity"):
        sparsifier.calibrate([batch() * torch.inf])
    with pytest.raises(TypeError, match="optimizer must be"):
        sparsifier.attach("sgd")
    needs_gradient = Sparsifier(criterion="taylor")
    needs_gradient.prepare(Net())
    with pytest.raises(ValueError, match=r"call loss\.backward\(\)"):
        needs_gradient.step()
    user = Sparsifier(criterion={"up.weigth": torch.ones(30, 12)})
    user.prepare(Net(), {"up": {}})
    with pytest.raises(
        ValueError, match=r"scores must have an entry for up\.weight; got near names: up\.weigth"
    ):
        user.step()


@pytest.mark.parametrize("config", [{"up": {"sparsty": 0.3}}, [{"tensor_fqn": "up.weight", "patern": "2:4"}]])
def test_options_that_are_misspelt_are_refused(config):
    model = Net()
    with pytest.raises(ValueError, match=r"only resemble '(sparsity|pattern)'"):
        Sparsifier(0.5).prepare(model, config)
    assert type(model.up.weight) is nn.Parameter
    kept = Sparsifier(0.5)
    kept.prepare(model, [{"tensor_fqn": "up.weight", "note": 3}])  # as torch.ao, which keeps others
    assert kept.groups[0]["note"] == 3


def test_calibration_data_of_another_width_or_kind_is_refused():
    linear, conv = nn.Sequential(nn.Linear(16, 8)), nn.Sequential(nn.Conv2d(3, 4, 3))
    for model, x, text in (
        (linear, torch.randn(4, 15), r"inputs of 0\.weight must have 16 features; got \(4, 15\)"),
        (conv, torch.randn(4, 5, 8, 8), r"inputs of 0\.weight must have 3 channels; got \(4, 5, 8, 8\)"),
        (conv, torch.randn(8, 8), r"inputs of 0\.weight must have 3 channels"),
    ):
        sparsifier = Sparsifier(0.5, "wanda")
        sparsifier.prepare(copy.deepcopy(model))
        with pytest.raises(ValueError, match=text):
            sparsifier.calibrate([x])
        with pytest.raises(ValueError, match=text):
            rarefy.prune.reconstruct(model, [x], "unstructured", 0.5)
        with pytest.raises(TypeError, match="data must be an iterable of batches; got NoneType"):
            sparsifier.calibrate(None)
    with pytest.raises(TypeError, match="data must be an iterable of batches; got int"):
        rarefy.prune.reconstruct(linear, 3, "unstructured", 0.5)
    with pytest.raises(ValueError, match="memory must be at least 0; got -1"):
        rarefy.prune.reconstruct(linear, [torch.randn(4, 16)], "unstructured", 0.5, memory=-1)


def test_scores_and_masks_of_other_kinds_are_refused():
    integers, floats = Scores(torch.ones(4, 4, dtype=torch.int32)), Scores(torch.rand(4, 4))
    one, all_of_it = (1, 1, 0, 0), [(0, 16)]
    with pytest.raises(TypeError, match=r"\[prune_mask\] scores must be float64, .*; got int32"):
        make_mask(integers, one, 1)
    with pytest.raises(TypeError, match=r"\[allocate_global\] scores must be float64, .*; got int32"):
        allocate_global([integers], [one], all_of_it, 1)
    with pytest.raises(ValueError, match=r"\[prune_mask\] remove must be in \[0, 16\].*; got 17"):
        make_mask(floats, one, 17)
    with pytest.raises(ValueError, match=r"limits must satisfy .*; got 9 and 3 for layer 0"):
        allocate_global([floats], [one], [(9, 3)], 5)
    with pytest.raises(ValueError, match=r"\[allocate_global\] scores must have a matrix; got none"):
        allocate_global([], [], [], 0)
    with pytest.raises(TypeError, match=r"\[apply_mask\] x must be float64, .*; got int32"):
        Mask.pack(torch.ones(3, 4, dtype=torch.bool)).apply_(torch.ones(3, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\[Mask.pack\] mask must be a bool matrix; got \(3,\)"):
        Mask.pack(torch.ones(3))


def test_matrices_that_do_not_fit_each_other_are_refused():
    with pytest.raises(ValueError, match=r"\[layer_error\] .*; got \(4, 4\), \(4, 3\) and \(4, 4\)"):
        layer_error(torch.rand(4, 4), torch.rand(4, 3), torch.eye(4))
    with pytest.raises(ValueError, match=r"\[gradient_norms\] .*; got \(5, 4\) and \(6, 4\)"):
        gradient_norms(torch.rand(5, 4), torch.rand(6, 4), (2, 2))
    with pytest.raises(ValueError, match=r"gram must be of shape \(4, 4\); got \(5, 5\)"):
        arrange_hidden(nn.Linear(4, 8), nn.Linear(8, 3), torch.eye(5), 2, 0.5)
    with pytest.raises(ValueError, match=r"\[LowRankLinear\] bias must be of shape \(3,\); got \(7,\)"):
        LowRankLinear(torch.rand(3, 2), torch.rand(2, 4), torch.rand(7))
    with pytest.raises(ValueError, match=r"u must be \(3, r\) and v \(r, 18\); got \(3, 2\) and \(2, 5\)"):
        LowRankConv2d(torch.rand(3, 2), torch.rand(2, 5), nn.Conv2d(2, 3, 3))
