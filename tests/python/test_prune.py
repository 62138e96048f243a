"""rarefy.prune: exact counts for every criterion, pattern and scope; training, checkpoints, conversion."""

from __future__ import annotations

import copy
import runpy
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.pruning import BaseSparsifier
from torch.ao.pruning.scheduler.lambda_scheduler import LambdaSL
from torch.nn.utils import parametrize

import rarefy
from rarefy.prune import (
    Mask,
    Scores,
    Sparsifier,
    criteria,
    make_mask,
    parse_pattern,
    patterns,
    schedules,
    scopes,
)
from rarefy.prune.choice import scores_of
from states import with_entry, without_entry
from tiny import Tiny, ids


class Net(nn.Module):
    """A convolution with groups, and two layers with ragged sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 12, 3, padding=1, groups=2)
        self.up = nn.Linear(12, 30)
        self.down = nn.Linear(30, 10)

    def forward(self, x):
        return self.down(torch.relu(self.up(torch.relu(self.conv(x)).mean((2, 3)))))


def batch() -> torch.Tensor:
    return torch.randn(16, 4, 6, 6, generator=torch.Generator().manual_seed(5))


CRITERIA = [
    "magnitude",
    "l1",
    "random",
    "gradient",
    "taylor",
    "movement",
    "snip",
    "fisher",
    "block_fisher",
    "wanda",
    "activation",
    "hessian",
    "fpgm",
]
PATTERNS = [
    "unstructured",
    "2:4",
    "3:5",
    "block:4x4",
    "block:4x1",
    "row_balanced",
    "row_balanced:2x3",
    "row",
    "column",
    "channel",
    "head:2",
]


def observed(sparsifier: Sparsifier, model: nn.Module) -> None:
    sparsifier.calibrate([batch()])
    model(batch()).square().mean().backward()
    sparsifier.observe()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_exactly_k_units_leave_whatever_criterion_and_pattern(criterion):
    for name in PATTERNS:
        pattern = parse_pattern(name)
        for sparsity in (0.0, 0.31, pattern.most):
            model = Net()
            sparsifier = Sparsifier(sparsity, criterion, pattern, scope="local")
            sparsifier.prepare(model)
            observed(sparsifier, model)
            sparsifier.step()
            for fqn, mask in sparsifier.masks().items():
                shape = model.get_parameter(fqn.replace(".weight", ".parametrizations.weight.original")).shape
                mask = mask.flatten(1)
                r, c, n, m = pattern.units(shape)
                rows, cols = mask.shape
                want = pattern.removed(shape, sparsity)
                if m:
                    groups = torch.nn.functional.pad(mask, (0, -cols % m)).view(rows, -1, m).sum(2)
                    lost = (
                        torch.nn.functional.pad(torch.ones_like(mask), (0, -cols % m))
                        .view(rows, -1, m)
                        .sum(2)
                        > groups
                    )
                    assert int((groups[lost] <= n).all())
                    assert int(lost.sum()) <= want
                    if sparsity == pattern.most:
                        assert int(groups.max()) <= n
                    continue
                blocks = rarefy.masks.to_blocks(mask, (r, c))
                kept = blocks.flatten(2).any(2)
                assert torch.equal(rarefy.masks.expand_mask(kept, (rows, cols), (r, c)), mask), name
                lost = (~kept).sum(1).tolist() if pattern.each_row else [int((~kept).sum())]
                assert set(lost) == {want}, (name, fqn)


def test_scores_against_plain_formulas():
    model = Net()
    weight = {n: p.detach().flatten(1).double().clone() for n, p in model.named_parameters() if p.ndim > 1}
    inputs = {}
    with torch.no_grad():
        x = batch()
        columns = torch.nn.functional.unfold(x.double(), 3, padding=1).view(16, 2, 18, 36)
        inputs["conv.weight"] = columns.permute(1, 0, 3, 2).flatten(1, 2)
        hidden = torch.relu(model.conv(x)).mean((2, 3))
        inputs["up.weight"] = hidden.double().unsqueeze(0)
        inputs["down.weight"] = torch.relu(model.up(hidden)).double().unsqueeze(0)
    model(batch()).square().mean().backward()
    gradient = {n: p.grad.flatten(1).double() for n, p in model.named_parameters() if p.ndim > 1}
    formulas = {
        "magnitude": lambda w, g, x: w**2,
        "l1": lambda w, g, x: w.abs(),
        "gradient": lambda w, g, x: 2 * g.abs(),
        "taylor": lambda w, g, x: 2 * (w * g).abs(),
        "movement": lambda w, g, x: -2 * w * g,
        "snip": lambda w, g, x: 2 * (w * g).abs(),
        "fisher": lambda w, g, x: w**2 * (2 * g**2) / 2,
        "block_fisher": lambda w, g, x: w**2 / (2 * _fisher_diagonal(g)),
        "wanda": lambda w, g, x: w.abs() * x.norm(dim=1).repeat_interleave(len(w) // len(x), 0),
        "activation": lambda w, g, x: x.norm(dim=1).repeat_interleave(len(w) // len(x), 0).expand_as(w),
        "hessian": lambda w, g, x: w**2 / _obs_diagonal(x).repeat_interleave(len(w) // len(x), 0),
        "fpgm": lambda w, g, x: (
            (w.unsqueeze(0) - w.unsqueeze(1)).norm(dim=2).sum(1, keepdim=True).expand_as(w) / w.shape[1]
        ),
    }
    for name, formula in formulas.items():
        same = copy.deepcopy(model)
        sparsifier = Sparsifier(0.5, name, in_place=True)
        sparsifier.prepare(same)
        sparsifier.calibrate([batch()])
        for (_, p), (_, q) in zip(same.named_parameters(), model.named_parameters(), strict=True):
            p.grad = q.grad.clone()
        sparsifier.observe()
        sparsifier.observe()  # observations add up
        for group in sparsifier.groups:
            fqn = group["tensor_fqn"]
            got = scores_of(sparsifier, group).dense()
            want = formula(weight[fqn], gradient[fqn], inputs[fqn])
            torch.testing.assert_close(
                got, want, rtol=2e-5, atol=1e-9, msg=lambda m, n=name, f=fqn: f"{n} {f}: {m}"
            )


def _fisher_diagonal(g: torch.Tensor, size: int = 16) -> torch.Tensor:
    """[(Σ gᵀg + λI)⁻¹]_qq of two steps of gradient g, row by row and 16 neighbours at a time."""
    out = torch.zeros_like(g)
    pull = 0.01 * 2 * g.square().sum() / g.numel()
    for row, into in zip(g, out, strict=True):
        for begin in range(0, len(row), size):
            part = row[begin : begin + size]
            fisher = 2 * torch.outer(part, part) + pull * torch.eye(len(part), dtype=g.dtype)
            into[begin : begin + size] = torch.linalg.inv(fisher).diagonal()
    return out


def _obs_diagonal(x: torch.Tensor) -> torch.Tensor:
    grams = x.mT @ x
    eye = torch.eye(grams.shape[1], dtype=torch.float64)
    return torch.stack([torch.linalg.inv(g + 0.01 * g.diagonal().mean() * eye).diagonal() for g in grams])


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_wanda_is_its_oracle(pattern):
    layer = nn.Linear(64, 48)
    data = torch.randn(100, 64) * torch.rand(64)
    sparsifier = Sparsifier(0.5, "wanda", pattern)
    sparsifier.prepare(model := nn.Sequential(layer))
    sparsifier.calibrate([data[:30], data[30:]])
    sparsifier.step()
    weight = layer.parametrizations.weight.original.detach().numpy()
    metric = np.abs(weight) * np.linalg.norm(data.numpy().astype(np.float64), axis=0)
    groups = metric.reshape(48, -1, 4 if pattern == "2:4" else 64)
    keep = np.argsort(np.argsort(groups, axis=2), axis=2) >= groups.shape[2] // 2
    np.testing.assert_array_equal(sparsifier.masks()["0.weight"].numpy(), keep.reshape(48, 64))
    assert model(data).isfinite().all()


def test_wanda_as_in_torchao_differs_where_the_paper_says_otherwise():
    def mask_of(weight, x, **options):
        layer = nn.Linear(len(weight[0]), len(weight), bias=False)
        layer.weight.data = torch.tensor(weight)
        sparsifier = Sparsifier(0.5, **options)
        sparsifier.prepare(nn.Sequential(layer))
        sparsifier.calibrate([torch.tensor(x)], forward=layer)
        sparsifier.step()
        return sparsifier.masks()["0.weight"].tolist()

    upstream = {"criterion": criteria.Wanda(squared=True), "scope": "local"}
    rows, ones = [[1.0] * 4, [10.0] * 4], [[1.0] * 4]
    assert mask_of(rows, ones, **upstream)[0] == [False] * 4
    assert [sum(row) for row in mask_of(rows, ones, criterion="wanda")] == [2, 2]
    assert mask_of([[3.0, 1.0]], [[1.0, 2.0]], **upstream) == [[False, True]]
    assert mask_of([[3.0, 1.0]], [[1.0, 2.0]], criterion="wanda") == [[True, False]]


def test_dtypes_on_the_cpu():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = Net().to(dtype)
        sparsifier = Sparsifier(0.5, "magnitude", "block:4x4")
        sparsifier.prepare(model)
        sparsifier.step()
        sparsifier.squash_mask()
        assert model.up.weight.dtype == dtype
        assert sparsifier.report()["up.weight"].actual == pytest.approx(0.5, abs=0.1)


def test_ties_take_no_whole_row():
    layer = nn.Linear(64, 64)
    nn.init.ones_(layer.weight)
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(nn.Sequential(layer))
    sparsifier.step()
    row = sparsifier.report()["0.weight"]
    assert row.nnz == 2048
    assert row.empty_rows == row.empty_columns == 0


def test_nan_is_lowest_and_said():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.data[3, 4] = torch.nan
    sparsifier = Sparsifier(1 / 64)
    sparsifier.prepare(model)
    with pytest.warns(RuntimeWarning, match=r"0\.weight has 1 scores that are NaN; they count as lowest"):
        sparsifier.step()
    assert model(torch.randn(2, 8)).isfinite().all()
    sparsifier.squash_mask()
    assert model[0].weight[3, 4] == 0


def test_nothing_regrows_unless_asked():
    def zeros(regrow):
        model = nn.Sequential(nn.Linear(16, 16))
        sparsifier = Sparsifier(0.5, regrow=regrow, schedule="periodic:0:10:1")
        sparsifier.prepare(model)
        sparsifier.step()
        before = sparsifier.masks()["0.weight"]
        model[0].parametrizations.weight.original.data[~before] *= 100
        sparsifier.step()
        return torch.equal(before, sparsifier.masks()["0.weight"])

    assert zeros(False)
    assert not zeros(True)


# -- scopes and allocations ---------------------------------------------------------------------------------


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


# -- schedules ----------------------------------------------------------------------------------------------


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


# -- models -------------------------------------------------------------------------------------------------


def test_tied_weights_are_one_group():
    model = Tiny()
    sparsifier = Sparsifier(0.5, pattern="block:2x2")
    sparsifier.prepare(model)
    names = [g["tensor_fqn"] for g in sparsifier.groups]
    tied = [g for g in sparsifier.groups if len(g["places"]) > 1]
    assert [len(g["places"]) for g in tied] == [
        2
    ]  # decoder and embeddings; `again` is the same module as `once`
    assert len(names) == len(set(names))
    sparsifier.step()
    assert torch.equal(model.decoder.weight, model.embeddings.weight)
    assert (model.decoder.weight == 0).float().mean() == pytest.approx(0.5, abs=0.02)
    model(ids()).sum().backward()
    sparsifier.squash_mask()
    assert model.decoder.weight is model.embeddings.weight
    assert type(model.decoder.weight) is nn.Parameter


def test_attention_is_pruned_and_runs():
    model = Tiny().eval()
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(model)
    assert {"attention.in_proj_weight", "attention.out_proj.weight"} <= {
        g["tensor_fqn"] for g in sparsifier.groups
    }
    sparsifier.step()
    want = model(ids())
    sparsifier.squash_mask()
    torch.testing.assert_close(model(ids()), want)


def test_originals_are_kept_until_squashed():
    model = Net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(model)
    sparsifier.step()
    assert torch.equal(model.up.parametrizations.weight.original, before["up.weight"])
    copied = copy.deepcopy(model)
    assert torch.equal(copied(batch()), model(batch()))
    mask = sparsifier.masks()["up.weight"]
    sparsifier.squash_mask(params_to_keep=("sparsity_level",))
    assert model.up.sparse_params == {"sparsity_level": 0.5}
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert torch.equal(model.up.weight, before["up.weight"] * mask)
    assert not parametrize.is_parametrized(model.up)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_thousand_steps_revive_nothing(optimizer, in_place, one_thread):
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4))
    make = OPTIMIZERS[optimizer](model.parameters())
    x, y = torch.randn(32, 12), torch.randn(32, 4)

    def train(steps):
        for _ in range(steps):
            make.zero_grad()
            (model(x) - y).square().mean().backward()
            make.step()

    train(20)  # with momentum in every weight
    sparsifier = Sparsifier(0.7, in_place=in_place)
    sparsifier.prepare(model)
    sparsifier.attach(make)
    sparsifier.step()
    masks = sparsifier.masks()
    train(500)
    if not in_place:
        sparsifier.squash_mask()
    train(500)
    for fqn, mask in masks.items():
        weight = model.get_parameter(fqn)
        assert (weight[~mask] == 0).all()
        assert not (weight[mask] == 0).any()
        for value in make.state[weight].values():
            assert value.shape != weight.shape or (value[~mask] == 0).all()


def test_attach_can_step_too():
    model = nn.Sequential(nn.Linear(12, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(0.5, "taylor", schedule="linear:0:4:1", in_place=True)
    sparsifier.prepare(model)
    sparsifier.attach(optimizer, step=True)
    for t in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().sum().backward()
        optimizer.step()
        assert sparsifier.report()["0.weight"].actual == pytest.approx(min(0.5, 0.125 * t), abs=1 / 480)
    sparsifier.detach()
    optimizer.step()
    assert sparsifier.clock == 6


def test_straight_through():
    for ste, decay in (("ste", 0.0), ("sr-ste", 2e-4)):
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        sparsifier = Sparsifier(pattern="2:4", ste=ste, regrow=True)
        sparsifier.prepare(model)
        sparsifier.step()
        x = torch.randn(5, 8)
        model(x).sum().backward()
        original = model[0].parametrizations.weight.original
        dense = x.sum(0).expand(8, 8)
        mask = sparsifier.masks()["0.weight"]
        torch.testing.assert_close(original.grad, dense + decay * (~mask) * original.detach())


# -- checkpoints --------------------------------------------------------------------------------------------

RUN = """
import sys, torch
from torch import nn
from rarefy.prune import Sparsifier

def start(criterion, in_place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier = Sparsifier(0.8, criterion, "block:3x2", schedule="cubic:2:30:3", in_place=in_place, seed=3)
    sparsifier.prepare(model)
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier

def run(parts, begin, end):
    model, optimizer, sparsifier = parts
    for t in range(begin, end):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    return [part.state_dict() for part in parts]

RUNS = [("random", True), ("movement", False)]
if __name__ == "__main__":
    results = []
    for settings, states in zip(RUNS, torch.load(sys.argv[1])):
        parts = start(*settings)
        for part, state in zip(parts, states):
            part.load_state_dict(state)
        results.append(run(parts, 17, 40))
    torch.save(results, sys.argv[2])
"""


def _same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@pytest.mark.timeout(300)  # a new process imports torch: a minute on a machine that is busy
def test_a_run_goes_on_bit_for_bit_in_a_new_process(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    here = runpy.run_path(str(script))
    whole = [here["run"](here["start"](*settings), 0, 40) for settings in here["RUNS"]]
    first = [here["run"](here["start"](*settings), 0, 17) for settings in here["RUNS"]]
    torch.save(first, tmp_path / "first.pt")
    arguments = [sys.executable, script, tmp_path / "first.pt", tmp_path / "second.pt"]
    subprocess.run(arguments, check=True, timeout=280)
    assert whole[0][2]["clock"] == 40
    assert _same(whole, torch.load(tmp_path / "second.pt"))


def test_a_state_dict_is_a_copy_and_is_not_changed():
    first, second = Sparsifier(0.5, "snip"), Sparsifier(0.5, "snip")
    a, b = Net(), Net()
    first.prepare(a)
    second.prepare(b)
    observed(first, a)
    first.step()
    state = first.state_dict()
    kept = copy.deepcopy(state)
    second.load_state_dict(state)
    assert _same(state, kept)
    state["state"]["up.weight"]["mask"]["bits"].zero_()
    assert first.masks()["up.weight"].any() and second.masks()["up.weight"].any()
    assert torch.equal(second.masks()["up.weight"], first.masks()["up.weight"])
    assert torch.equal(b.up.parametrizations.weight[0].mask, first.masks()["up.weight"])
    assert kept["state"]["up.weight"]["mask"]["bits"].numel() == 30 * 2  # a bit a weight
    assert second.defaults == first.defaults


def test_a_squashed_run_goes_on():
    first, second = (Sparsifier(0.5) for _ in range(2))
    first.prepare(a := Net())
    first.step()
    first.squash_mask()
    second.prepare(b := Net())
    second.load_state_dict(first.state_dict())
    b.load_state_dict(a.state_dict())
    optimizer = torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)
    second.attach(optimizer)
    b(batch()).sum().backward()
    optimizer.step()
    second.step()
    assert torch.equal(b.up.weight != 0, first.masks()["up.weight"])


def test_state_dicts_of_others_are_refused():
    one = Sparsifier(0.5)
    one.prepare(Net())
    state = one.state_dict()

    def load(model, state, **options):
        sparsifier = Sparsifier(0.5, **options)
        sparsifier.prepare(model)
        with pytest.raises(ValueError) as error:
            sparsifier.load_state_dict(state)
        return str(error.value)

    assert "must be of the same weights; got 0.weight" in load(nn.Sequential(nn.Linear(4, 4)), state)
    assert "pattern=unstructured instead of 2:4" in load(Net(), state, pattern="2:4")
    assert "must be of a Sparsifier, version 1; got version None" in load(Net(), {})
    other = Net()
    other.down = nn.Linear(40, 10)
    assert "the mask of down.weight must be 10x40; got 10x30" in load(other, state)
    with pytest.raises(ValueError, match=r"prepare\(model\) must be called first"):
        Sparsifier(0.5).load_state_dict(state)


def test_damaged_state_dicts_are_refused_before_anything_changes():
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(Net())
    sparsifier.step()
    state = sparsifier.state_dict()

    damaged, less = partial(with_entry, state), partial(without_entry, state)
    keeps = state["state"]["up.weight"]["mask"]["kept"]
    cases = [
        *((less(key), key) for key in state if key not in ("version", "observed")),
        (less("groups", 0, "tensor_fqn"), "'groups' of state_dict must have 'tensor_fqn', a str; got none"),
        (damaged(None, "groups", 0), "'groups' of state_dict must be a mapping; got NoneType"),
        (damaged(2.0, "groups", 0, "sparsity_level"), r"must be in \[0, 1\]; got 2.0"),
        (damaged(None, "state", "up.weight"), "must have a mask of up.weight; got NoneType"),
        (damaged("2", "settings", "unknown"), "unknown=2 instead of None"),
        (less("settings", "scope"), "scope=None instead of"),
        (damaged(torch.zeros(4, dtype=torch.uint8), "random"), "'random' of state_dict must be the state"),
        (damaged(keeps + 1, "state", "up.weight", "mask", "kept"), f"must keep {keeps} weights"),
        (damaged(-1, "clock"), "'clock' of state_dict must be at least 0; got -1"),
        (damaged(0.5, "levels", "else"), "'levels' of state_dict must be of the same weights; got 'else'"),
        (damaged(1, "observed"), "'observed' of state_dict must be a bool"),
        (damaged(None, "state", "up.weight", "mask", "bits"), "'bits'"),
    ]
    sparsifier.step()
    before = sparsifier.state_dict()
    for bad, text in cases:
        with pytest.raises(ValueError, match=rf"\[load_state_dict\] .*{text}"):
            sparsifier.load_state_dict(bad)
        assert sparsifier.clock == 2 and torch.equal(sparsifier.random.get_state(), before["random"])
    assert sparsifier.state_dict()["levels"] == before["levels"]
    sparsifier.load_state_dict(state)
    assert sparsifier.clock == 1


def test_a_sparsifier_copies():
    sparsifier = Sparsifier(0.5, "random")
    sparsifier.prepare(Net())
    sparsifier.attach(torch.optim.SGD(sparsifier._model.parameters(), lr=0.1))
    other = copy.deepcopy(sparsifier)
    sparsifier.step()
    other.step()
    assert _same(sparsifier.state_dict(), other.state_dict())


# -- conversion ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "stored"),
    [("block:4x2", "block:4x2"), ("unstructured", "csr"), ("row_balanced:2x2", "block:2x2")],
)
def test_masks_become_sparse_layers(pattern, stored):
    model = Net()
    sparsifier = Sparsifier(0.6, pattern=pattern)
    sparsifier.prepare(model)
    sparsifier.step()
    with pytest.raises(ValueError, match=r"squash_mask\(\) must be called first"):
        sparsifier.convert(model)
    sparsifier.squash_mask()
    fast = sparsifier.convert(model, measure=False)
    assert isinstance(fast.up, rarefy.BlockSparseLinear)
    assert isinstance(model.up, nn.Linear)
    assert fast.up.weight.spec_format() == stored
    assert torch.equal(fast.up.weight.to_dense(), model.up.weight)
    torch.testing.assert_close(fast(batch()), model(batch()))
    mask = sparsifier.masks()["up.weight"]
    blocks = (
        rarefy.masks.to_blocks(mask, (1, 1) if stored == "csr" else (int(stored[6]), 2)).flatten(2).any(2)
    )
    assert fast.up.weight.density == pytest.approx(float(blocks.float().mean()))
    assert len(sparsifier.conversion.replaced) == 2


def squashed(model: nn.Module, *args, **options) -> Sparsifier:
    sparsifier = Sparsifier(*args, **options)
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    return sparsifier


@pytest.mark.parametrize(
    ("pattern", "sparsity", "stored"),
    [("2:4", None, "2:4"), ("2:4", 0.2, "bitmap"), ("1:4", None, "bitmap"), ("4:8", None, "bitmap")],
)
@pytest.mark.parametrize("width", [40, 38, 37])
def test_n_of_m_becomes_a_bit_for_each_weight(pattern, sparsity, stored, width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 8))
    sparsifier = squashed(model, sparsity, pattern=pattern)
    fast = sparsifier.convert(model, measure=False)
    rows = {row.name: row.format for row in sparsifier.conversion.replaced}
    assert rows == {"0": stored, "2": stored}
    for i in (0, 2):
        assert type(fast[i].weight) is rarefy.BitmapWeight
        assert fast[i].weight.nnz == int(sparsifier.masks()[f"{i}.weight"].sum())
        assert torch.equal(fast[i].weight.to_dense(), model[i].weight)
    assert fast[2].weight.spec_format() == stored
    x = torch.randn(3, width)
    torch.testing.assert_close(fast(x), model(x))


def test_formats_that_convert_is_asked_for():
    model = Net()
    sparsifier = squashed(model, 0.6)
    bits = sparsifier.convert(model, format="bitmap", measure=False)
    assert type(bits.up.weight) is rarefy.BitmapWeight
    assert torch.equal(bits.up.weight.to_dense(), model.up.weight)
    with pytest.raises(ValueError, match="at most two of each four"):
        sparsifier.convert(model, format="2:4")
    with pytest.raises(ValueError, match='must be "csr", "bitmap", "2:4" or "block:RxC"'):
        sparsifier.convert(model, format="blocks")
    sixteenth = Net()
    sparsifier = squashed(sixteenth, pattern="1:16")
    two = sparsifier.convert(sixteenth, format="2:4", measure=False)
    assert torch.equal(two.up.weight.to_dense(), sixteenth.up.weight)


def test_attention_and_convolutions_are_converted():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(16, 2, batch_first=True),
            "conv": nn.Conv2d(4, 16, 3),
            "grouped": nn.Conv2d(16, 16, 3, groups=2),
            "point": nn.Conv2d(16, 8, 1),
        }
    ).eval()
    sparsifier = squashed(model, 0.5, pattern="block:4x1")
    fast = sparsifier.convert(model, measure=False)
    names = ["attention.in_proj", "attention.out_proj", "conv", "grouped", "point"]
    assert sorted(row.name for row in sparsifier.conversion.replaced) == names
    assert all(0.4 < row.density <= 0.5 for row in sparsifier.conversion.replaced if row.name != "grouped")
    x, images = torch.randn(2, 5, 16), torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(fast["attention"](x, x, x)[0], model["attention"](x, x, x)[0])
    given, wanted = images, images
    for name in ("conv", "grouped", "point"):
        given, wanted = fast[name](given), model[name](wanted)
    torch.testing.assert_close(given, wanted)

    squares = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1))
    sparsifier = squashed(squares, 0.5, pattern="block:4x4")
    sparsifier.convert(squares, measure=False)
    assert [row.name for row in sparsifier.conversion.replaced] == ["1"]  # the other's would be more
    whole = sparsifier.convert(squares, format="block:4x1", measure=False)
    x = torch.randn(1, 8, 6, 6)
    torch.testing.assert_close(whole(x), squares(x))
    assert len(sparsifier.conversion.replaced) == 2


def test_convert_as_in_torch_ao():
    model = nn.Sequential(nn.Linear(8, 8))
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()

    class Twice(nn.Module):
        @classmethod
        def from_dense(cls, linear):
            twice = cls()
            twice.weight = nn.Parameter(linear.weight * 2)
            return twice

    assert torch.equal(sparsifier.convert(model, {nn.Linear: Twice})[0].weight, model[0].weight * 2)
    with pytest.raises(ValueError, match="a pattern that a format stores"):
        columns = Sparsifier(0.5, pattern="column")
        columns.prepare(model)
        columns.squash_mask()
        columns.convert(model)


def test_report():
    sparsifier = Sparsifier(0.5, pattern="row")
    sparsifier.prepare(Net())
    sparsifier.step()
    report = sparsifier.report()
    assert report["up.weight"].empty_rows == 15
    assert report.sparsity == pytest.approx(0.5)
    assert "up.weight" in str(report) and "30x12" in str(report)
    assert report.to_csv().splitlines()[2].startswith("up.weight,30x12,row,0.5,0.5,180,15,0")


# -- patterns that are given --------------------------------------------------------------------------------


def test_diagonal_and_custom():
    layer = nn.Linear(6, 4)
    sparsifier = Sparsifier(pattern="diagonal:3")
    sparsifier.prepare(nn.Sequential(layer))
    sparsifier.step()
    want = torch.ones(4, 6).triu(-1).tril(1).bool()
    assert torch.equal(sparsifier.masks()["0.weight"], want)
    given = Sparsifier(pattern=patterns.Custom(want))
    given.prepare(nn.Sequential(nn.Linear(6, 4)))
    given.step()
    assert torch.equal(given.masks()["0.weight"], want)


@pytest.mark.parametrize("cols", [1, 8, 13, 40])
def test_masks_are_copied_into_buffers_of_any_strides(cols):
    mask = Mask.pack(torch.rand(5, cols) < 0.5)
    plain, turned = torch.ones(5, cols, dtype=torch.bool), torch.ones(cols, 5, dtype=torch.bool).T
    version = plain._version
    for buffer in (plain, turned, plain.view(5, cols, 1)):
        mask.copy_into(buffer)
        assert torch.equal(buffer.reshape(5, cols), mask.unpack())
    assert plain._version > version  # what was saved for backward is known to be old


def test_masks_are_numpys_packed_bits():
    mask = torch.rand(5, 19) < 0.5
    packed = Mask.pack(mask)
    assert np.array_equal(packed.bits.numpy(), np.packbits(mask.numpy(), axis=1, bitorder="little"))
    assert torch.equal(packed.unpack(), mask)
    x = torch.full((5, 19), torch.nan)
    assert torch.equal(packed.apply_(x).isnan(), mask)
    strided = torch.ones(19, 5).T
    assert torch.equal(packed.apply_(strided), mask.float())


# -- bad input ----------------------------------------------------------------------------------------------


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


def test_user_scores():
    scores = {"up.weight": torch.rand(30, 12)}
    for given in (scores, lambda name, weight: scores[name]):
        sparsifier = Sparsifier(0.5, given)
        sparsifier.prepare(Net(), {"up": {}})
        sparsifier.step()
        border = scores["up.weight"].flatten().sort().values[180]
        assert torch.equal(sparsifier.masks()["up.weight"], scores["up.weight"] >= border)


def test_a_mask_of_scores_alone():
    mask = make_mask(Scores(torch.arange(12.0).view(3, 4)), (1, 2, 0, 0), 2)
    assert mask.unpack().tolist() == [[False] * 4, [True] * 4, [True] * 4]
    assert mask.kept == 8 and mask.density == pytest.approx(2 / 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_mask(Scores(torch.zeros(0, 4)), (1, 1, 0, 0), 0).kept == 0


def test_state_dicts_that_are_damaged_are_refused():
    def damaged(change) -> str:
        first, second = Sparsifier(0.5), Sparsifier(0.5)
        model = Net()
        for sparsifier, net in ((first, Net()), (second, model)):
            sparsifier.prepare(net)
            sparsifier.step()
        before, state = second.state_dict(), first.state_dict()
        change(state)
        with pytest.raises((ValueError, TypeError)) as caught:
            second.load_state_dict(state)
        assert _same(second.state_dict(), before)
        return str(caught.value)

    assert "must have 'groups', a list; got none" in damaged(lambda s: s.pop("groups"))
    assert "must have 'random', a Tensor; got int" in damaged(lambda s: s.update(random=3))
    assert "must have a mask of up.weight" in damaged(lambda s: s["state"].pop("up.weight"))
    assert "must have a mask of up.weight" in damaged(lambda s: s["state"]["up.weight"].pop("mask"))
    mask = "up.weight"
    assert "must have 'bits'" in damaged(lambda s: s["state"][mask]["mask"].pop("bits"))

    def floats(state) -> None:
        state["state"][mask]["mask"]["bits"] = state["state"][mask]["mask"]["bits"].float()

    assert "the mask of up.weight must be uint8" in damaged(floats)


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
