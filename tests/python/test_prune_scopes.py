"""What is compared and when: scopes, allocations and schedules of rarefy.prune against their formulas."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.pruning import BaseSparsifier
from torch.ao.pruning.scheduler.lambda_scheduler import LambdaSL

import rarefy
from prune_models import Net, batch
from rarefy.prune import Sparsifier, schedules, scopes


def test_global_scope_has_floors():
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model[1].weight.data *= 1000

    def kept(scope):
        sparsifier = Sparsifier(0.5, scope=scope)
        sparsifier.prepare(same := copy.deepcopy(model))
        sparsifier.step()
        assert same is not model
        return [row.nnz for row in sparsifier.report()]

    assert kept("global")[0] < 20 and sum(kept("global")) == 1600
    assert kept(scopes.Global(min_density=0.25)) == [400, 1200]
    assert kept(scopes.Global(max_density=0.6)) == [640, 960]
    sparsifier = Sparsifier(0.9, scope=scopes.Global(min_density=0.25))
    sparsifier.prepare(copy.deepcopy(model))
    with pytest.raises(
        ValueError, match=r"every layer a density of 0\.25; got 0\.9; the most that can be is 0\.75"
    ):
        sparsifier.step()


def test_global_scope_compares_blocks_too():
    model = Net()
    sparsifier = Sparsifier(0.5, pattern="block:4x1", scope="global", in_place=True)
    sparsifier.prepare(model)
    norms = torch.cat(
        [
            rarefy.masks.block_norms(model.get_parameter(f"{n}.weight").detach().flatten(1), (4, 1)).flatten()
            for n in ("conv", "up", "down")
        ]
    )
    sparsifier.step()
    border = norms.sort().values[len(norms) // 2 - 1].item()
    for name in ("conv", "up", "down"):
        kept = rarefy.masks.block_norms(model.get_parameter(f"{name}.weight").detach().flatten(1), (4, 1))
        assert float(kept[kept > 0].min()) >= border * (1 - 1e-6)


def test_per_row():
    sparsifier = Sparsifier(0.3, scope="per_row")
    sparsifier.prepare(nn.Sequential(nn.Linear(50, 20)))
    sparsifier.step()
    assert set(sparsifier.masks()["0.weight"].sum(1).tolist()) == {35}


@pytest.mark.parametrize("allocation", ["uniform", "er", "erk", "owl", "lamp"])
def test_allocations_keep_the_whole_exact(allocation):
    for sparsity in (0.0, 0.3, 0.55, 0.9, 1.0):
        sparsifier = Sparsifier(sparsity, allocation=allocation, in_place=True)
        sparsifier.prepare(Net())
        sparsifier.calibrate([batch()])
        sparsifier.step()
        sizes = [216, 360, 300]
        lost = [n - row.nnz for n, row in zip(sizes, sparsifier.report(), strict=True)]
        whole = (
            sum(round(sparsity * n) for n in sizes)
            if allocation == "uniform"
            else round(sparsity * sum(sizes))
        )
        assert sum(lost) == whole


def test_erk_densities():
    shapes = [(64, 16, 3, 3), (128, 64, 3, 3), (10, 128)]
    layers = [scopes.LayerInfo(str(s), torch.zeros(s), torch.Size(s).numel()) for s in shapes]
    lost = scopes.ERK().removed(layers, 0.9)
    density = [1 - n / layer.units for n, layer in zip(lost, layers, strict=True)]
    raw = [sum(s) / torch.Size(s).numel() for s in shapes]
    factor = density[1] / raw[1]
    for d, r in zip(density, raw, strict=True):
        assert d == pytest.approx(min(1, factor * r), abs=2e-3)
    assert density[2] == 1  # more than its share is more than dense: the others share the rest


def test_lamp_is_its_oracle():
    layers = [torch.randn(20, 30) * s for s in (1, 5, 0.1)]
    infos = [scopes.LayerInfo(str(i), w, w.numel()) for i, w in enumerate(layers)]
    scores = []
    for i, w in enumerate(layers):
        squares = np.sort(w.double().numpy().ravel() ** 2)
        scores += [(s / squares[j:].sum(), i) for j, s in enumerate(squares)]
    lost = [i for _, i in sorted(scores)[: round(0.7 * 1800)]]
    assert scopes.LAMP().removed(infos, 0.7) == [lost.count(i) for i in range(3)]


def test_lamp_of_any_layer():
    """NaN weighed on every other weight of its layer; torch sorted copies of eight bytes."""
    conv, half = torch.randn(6, 4, 3, 3), torch.randn(20, 12).half()
    conv[0, 0, 0, 0] = torch.nan
    infos = [scopes.LayerInfo(str(i), w, w.numel()) for i, w in enumerate((conv, half, half.T))]
    lost = scopes.LAMP().removed(infos, 0.5)
    clean = conv.nan_to_num(0.0)
    same = [scopes.LayerInfo(str(i), w, w.numel()) for i, w in enumerate((clean, half, half.T))]
    assert lost == scopes.LAMP().removed(same, 0.5)
    assert sum(lost) == 348 and abs(lost[1] - lost[2]) <= 1


def test_owl_is_its_oracle():
    weights = [torch.randn(40, 30), torch.randn(20, 40) ** 3, torch.randn(10, 20)]
    inputs = [torch.rand(1, w.shape[1], dtype=torch.float64) for w in weights]
    infos = [
        scopes.LayerInfo(str(i), w, w.numel(), x)
        for i, (w, x) in enumerate(zip(weights, inputs, strict=True))
    ]
    outliers = []
    for w, x in zip(weights, inputs, strict=True):
        metric = np.abs(w.double().numpy()) * np.sqrt(x.numpy())
        outliers.append((metric > 3 * metric.mean()).mean())
    ratio = np.array(outliers)
    ratio = (ratio - ratio.min()) / (ratio.max() - ratio.min()) * 2 * 0.1
    sizes = np.array([w.numel() for w in weights])
    density = ratio - (ratio * sizes).sum() / sizes.sum() + 0.4
    lost = scopes.OWL(3, 0.1).removed(infos, 0.6)
    assert sum(lost) == round(0.6 * sizes.sum())
    assert np.abs(lost - (1 - density) * sizes).max() <= 1
    clipped = scopes.OWL(3, 0.5).removed(infos, 0.9)
    assert sum(clipped) == round(0.9 * sizes.sum())
    assert all(0 <= n <= size for n, size in zip(clipped, sizes, strict=True))


@pytest.mark.parametrize("name", ["one_shot", "cubic", "linear", "exponential", "cosine", "periodic"])
def test_schedules_end_exactly_and_only_grow(name):
    schedule = schedules.parse_schedule(f"{name}:10:47:5")
    course = [schedule.sparsity(t, 0.9) for t in range(80)]
    assert course[:10] == [0.0] * 10
    assert course[47:] == [0.9] * 33
    assert course == sorted(course)
    due = [t for t in range(80) if schedule.due(t)]
    assert due == ([10] if name == "one_shot" else [10, 15, 20, 25, 30, 35, 40, 45, 47])
    changes = [t for t in range(1, 80) if course[t] != course[t - 1]]
    assert set(changes) <= set(due)


def test_cubic_is_zhu_and_gupta():
    schedule = schedules.Cubic(0, 100, 10, initial=0.1)
    for t in range(0, 101, 10):
        assert schedule.sparsity(t, 0.8) == pytest.approx(0.8 + (0.1 - 0.8) * (1 - t / 100) ** 3)


def test_a_schedule_prunes_as_it_says():
    sparsifier = Sparsifier(0.8, schedule="cubic:2:12:2")
    sparsifier.prepare(nn.Sequential(nn.Linear(100, 100)))
    seen = []
    for _ in range(16):
        sparsifier.step()
        seen.append(10_000 - sparsifier.report()["0.weight"].nnz)
    assert seen == [round(sparsifier.schedule.sparsity(t, 0.8) * 10_000) for t in range(16)]


def test_n_of_m_on_its_way():
    sparsifier = Sparsifier(pattern="2:4", schedule="linear:0:4:1")
    sparsifier.prepare(nn.Sequential(nn.Linear(16, 8)))
    before = None
    for part in (0, 8, 16, 24, 32):
        sparsifier.step()
        mask = sparsifier.masks()["0.weight"]
        groups = mask.view(8, 4, 4).sum(2)
        assert (groups == 2).sum() == part and (groups == 4).sum() == 32 - part
        assert before is None or not (mask & ~before).any()
        before = mask


def test_blocks_with_n_of_m_inside():
    sparsifier = Sparsifier(0.75, pattern="block:4x8+2:4", schedule="linear:0:3:1")
    sparsifier.prepare(nn.Sequential(nn.Linear(64, 32)))
    lost = []
    for _ in range(4):
        sparsifier.step()
        lost.append(sparsifier.report()["0.weight"].actual)
    assert lost == [0.0, 0.25, 0.5, 0.75]


def test_torch_ao_schedulers_drive_it():
    sparsifier = Sparsifier(0.8)
    assert isinstance(sparsifier, BaseSparsifier)
    sparsifier.prepare(nn.Sequential(nn.Linear(20, 20)))
    scheduler = LambdaSL(sparsifier, lambda epoch: min(1.0, 0.25 * epoch))
    actual = []
    for _ in range(5):
        sparsifier.step()
        scheduler.step()
        actual.append(sparsifier.report()["0.weight"].actual)
    assert actual == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
