"""rarefy.prune: exact counts for every criterion and pattern; scores against plain formulas; masks."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rarefy
from prune_models import Net, batch, observed
from rarefy.prune import Mask, Scores, Sparsifier, criteria, make_mask, parse_pattern, patterns
from rarefy.prune.choice import scores_of

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


def test_report():
    sparsifier = Sparsifier(0.5, pattern="row")
    sparsifier.prepare(Net())
    sparsifier.step()
    report = sparsifier.report()
    assert report["up.weight"].empty_rows == 15
    assert report.sparsity == pytest.approx(0.5)
    assert "up.weight" in str(report) and "30x12" in str(report)
    assert report.to_csv().splitlines()[2].startswith("up.weight,30x12,row,0.5,0.5,180,15,0")


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
