"""Sensitivity curves, their files, and sparsities under a budget."""

from __future__ import annotations

import csv
import io
import itertools
import math

import pytest
import torch
from torch import nn

import rarefy
from rarefy import predictor
from rarefy.prune import Sensitivity, Sparsifier, reconstruct_weight, sensitivity
from rarefy.prune.budget import choose


@pytest.fixture
def _seconds(monkeypatch):
    """A predictor without measurements: a nanosecond for each product, sparse ones 1.2 times as long each."""

    class Formula:
        def seconds(self, case):
            work = 1e-9 * case.tokens * case.out_features * case.in_features
            return work if case.block is None else 1.2 * work * case.density

    monkeypatch.setattr(predictor, "predictor", Formula)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def loss_of(model) -> float:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    target = net()(x)
    return float((model(x) - target).square().mean().detach())


@pytest.mark.usefixtures("_seconds")
def test_each_layer_alone_is_pruned_evaluated_and_put_back():
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = sensitivity(model, loss_of, "block:4x4", (0.25, 0.75), tokens=100)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.sparsity for p in report] == [0.0, 0.25, 0.75] * 3 and list(report.groups()) == ["0", "2", "4"]
    assert report.loss == 0.0
    for name, points in report.groups().items():
        weight = model.get_submodule(name).weight
        for point in points:
            other = net()
            if point.sparsity:
                sparsifier = Sparsifier(point.sparsity, pattern="block:4x4", in_place=True)
                sparsifier.prepare(other, {name: {}})
                sparsifier.step()
            assert point.loss == loss_of(other) and point.layers == (f"{name}.weight",)
            blocks = weight.numel() // 16 - round(point.sparsity * (weight.numel() // 16))
            assert point.parameters == 16 * blocks
            index = 4 * (blocks + len(weight) // 4 + 1) if point.sparsity else 0
            assert point.bytes == 64 * blocks + index
            part = 1.2 * (1 - point.sparsity) if point.sparsity else 1.0
            assert point.milliseconds == pytest.approx(1e-6 * 100 * weight.numel() * part)


def test_predictions_are_those_of_rarefys_predictor(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = sensitivity(net(), loss_of, "block:16x1", (0.5,), tokens=64, config={"2": {}})
    dense, sparse = report.points
    case = predictor.Case(64, 32, 32)
    assert dense.milliseconds == 1e3 * predictor.predictor().seconds(case)
    case = predictor.Case(64, 32, 32, block=(16, 1), density=0.5)
    assert sparse.milliseconds == 1e3 * predictor.predictor().seconds(case)
    report = sensitivity(net().double(), lambda m: 0.0, "2:4", (0.5,))
    assert {p.milliseconds for p in report} == {None}


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_n_of_m_counts_with_a_bit_for_each_weight(pattern):
    report = sensitivity(net(), loss_of, pattern, (0.25, 0.5), config={"2": {}}, time=False)
    for point in report:
        values = round(32 * 32 * (1 - point.sparsity))
        assert point.parameters == values
        assert point.bytes == 4 * values + (32 * 4 if point.sparsity else 0)


@pytest.mark.usefixtures("_seconds")
@pytest.mark.parametrize("kind", ["parameters", "bytes", "milliseconds"])
@pytest.mark.parametrize("part", [0.3, 0.5, 0.77, 1.0])
def test_allocations_keep_to_the_budget_and_lose_least(kind, part):
    report = sensitivity(net(), loss_of, "block:4x4", (0.25, 0.5, 0.9))
    rows = list(report.groups().values())
    whole = sum(getattr(row[0], kind) for row in rows)
    plan = report.allocate(**{kind: part * whole})
    assert getattr(plan, kind) <= part * whole and list(plan.sparsities) == ["0", "2", "4"]
    possible = [
        sum(p.loss for p in picked)
        for picked in itertools.product(*rows)
        if sum(getattr(p, kind) for p in picked) <= part * whole
    ]
    assert plan.loss == pytest.approx(min(possible), abs=1e-12)
    if part == 1.0:
        assert plan.loss == 0 and set(plan.sparsities.values()) == {0.0} and plan.config == {}


@pytest.mark.usefixtures("_seconds")
def test_a_plan_is_a_config_of_the_sparsifier():
    report = sensitivity(net(), loss_of, "block:4x4", (0.25, 0.5, 0.75))
    plan = report.allocate(parameters=900)
    model = net()
    sparsifier = Sparsifier(pattern="block:4x4")
    sparsifier.prepare(model, plan.config)
    sparsifier.step()
    sparsifier.squash_mask()
    assert (
        sum(int((m.weight != 0).sum()) for m in model if isinstance(m, nn.Linear)) == plan.parameters <= 900
    )
    assert plan.milliseconds is not None and isinstance(sparsifier.convert(model), nn.Module)
    assert any(isinstance(m, rarefy.BlockSparseLinear) for m in sparsifier.convert(model))


def test_budgets_that_cannot_be_met_say_the_nearest():
    report = sensitivity(net(), loss_of, "block:4x4", (0.5,), time=False)
    least = sum(min(p.parameters for p in row) for row in report.groups().values())
    with pytest.raises(ValueError, match=f"at least {least:g} parameters, the least that can be; got 10"):
        report.allocate(parameters=10)
    assert report.allocate(parameters=least).parameters == least
    with pytest.raises(ValueError, match="predicted times"):
        report.allocate(milliseconds=1.0)
    with pytest.raises(ValueError, match="at least"):
        report.allocate(parameters=math.nan)
    for wrong in ({}, {"parameters": 1, "bytes": 1}):
        with pytest.raises(ValueError, match="one budget"):
            report.allocate(**wrong)


def test_choices_against_all_of_them():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.randint(1, 40, (4, 5), generator=generator).double().tolist()
        losses = torch.rand(4, 5, generator=generator).tolist()
        least, most = (sum(map(f, costs)) for f in (min, max))
        budget = least + (most - least) * float(torch.rand(1, generator=generator))
        at = choose(costs, losses, budget, "units")

        def total(rows, picked):
            return sum(row[i] for row, i in zip(rows, picked, strict=True))

        fit = [x for x in itertools.product(range(5), repeat=4) if total(costs, x) <= budget]
        assert at in map(list, fit) and total(losses, at) == pytest.approx(min(total(losses, x) for x in fit))


def test_groups_of_layers_go_together():
    report = sensitivity(net(), loss_of, "block:4x4", (0.5,), by={"first": "0|2", "last": "4"}, time=False)
    assert list(report.groups()) == ["first", "last"]
    assert report.points[0].layers == ("0.weight", "2.weight")
    model = nn.ModuleDict({"a": net(), "b": net()})
    both = sensitivity(model, lambda m: loss_of(m["a"]), "unstructured", (0.5,), by="module", time=False)
    assert list(both.groups()) == ["a", "b"] and len(both.points[0].layers) == 3
    assert both.groups()["b"][1].loss == 0 < both.groups()["a"][1].loss
    with pytest.raises(ValueError, match="4 must match one expression of by; got 0"):
        sensitivity(net(), loss_of, by={"first": "0|2"})
    with pytest.raises(ValueError, match="near names: layer"):
        sensitivity(net(), loss_of, by="layers")


def test_other_ways_to_prune():
    gram = torch.eye(32, dtype=torch.float64)

    def prune(name, weight, sparsity):
        return reconstruct_weight(weight, gram[: weight.shape[1], : weight.shape[1]], "block:4x4", sparsity)[
            0
        ]

    report = sensitivity(net(), loss_of, "block:4x4", (0.5,), prune=prune, time=False)
    assert all(p.loss > 0 for p in report if p.sparsity)


@pytest.mark.usefixtures("_seconds")
def test_files(tmp_path):
    report = sensitivity(net(), loss_of, "block:4x4", (0.25, 0.75))
    for name in ("r.csv", "r.json", "r.html"):
        report.write(tmp_path / name)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text(encoding="utf-8"))))
    assert [float(row["loss"]) for row in rows] == [p.loss for p in report]
    assert Sensitivity.from_json((tmp_path / "r.json").read_text(encoding="utf-8")) == report
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count("<polyline") == 6 and page.count("<tr>") == 10 and "block:4x4" in page
    pytest.importorskip("matplotlib")
    report.write(tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="must end in"):
        report.write(tmp_path / "r.xlsx")
    with pytest.raises(ValueError, match="to_json"):
        Sensitivity.from_json("{}")


def test_an_interruption_costs_the_group_in_progress(tmp_path):
    model, calls = net(), []
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def stops(m):
        calls.append(1)
        if len(calls) == 6:  # in the third group of the second layer's points
            raise KeyboardInterrupt
        return loss_of(m)

    path = tmp_path / "part.json"
    with pytest.raises(KeyboardInterrupt):
        sensitivity(model, stops, "block:4x4", (0.25, 0.75), time=False, path=path)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    part = Sensitivity.from_json(path.read_text(encoding="utf-8"))
    assert list(part.groups()) == ["0", "2"]
    calls.clear()
    whole = sensitivity(
        model, lambda m: (calls.append(1), loss_of(m))[1], "block:4x4", (0.25, 0.75), time=False, resume=part
    )
    assert len(calls) == 2 and whole == sensitivity(net(), loss_of, "block:4x4", (0.25, 0.75), time=False)
    with pytest.raises(ValueError, match="resume must be of block:8x8"):
        sensitivity(net(), loss_of, "block:8x8", resume=part)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sparsities": (1.5,)}, r"in \[0, 1\]"),
        ({"pattern": "2:4", "sparsities": (0.75,)}, "at most 0.5"),
        ({"criterion": "wanda"}, "needs no data"),
        ({"pattern": "blok:4x4"}, "near names"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"config": {"layer9": {}}}, "matches none"),
    ],
)
def test_bad_arguments_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        sensitivity(net(), loss_of, **options)


def test_a_loss_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite number; got nan"):
        sensitivity(net(), lambda m: math.nan, "unstructured")


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="sparsities must hold one or more; got none"):
        sensitivity(net(), loss_of, "block:8x1", (), time=False)
    with pytest.raises(TypeError, match="evaluate must return a number; got 'good'"):
        sensitivity(net(), lambda model: "good", "block:8x1", (0.5,), time=False)
