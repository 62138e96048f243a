"""Predicted times: the fit, the file, what advise and "auto" make of them, by a clock that is made up."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rarefy
from rarefy import __main__ as command
from rarefy import predictor
from rarefy.advice import Auto
from rarefy.predictor import Case, Predictor, calibration, fitted, terms


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """A machine whose times follow from the terms exactly; the list has every case that was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(predictor, "_known", {})
    measured = []

    def measure(case: Case) -> float:
        measured.append(case)
        # A dense product costs 1 ps, one of a sparse layer 1.5 ps, anything else 0.01 ps, a call 5 µs.
        first, work, *rest = terms(case, torch.get_num_threads())
        return 5e-6 * first + (1e-12 if case.block is None else 1.5e-12) * work + 1e-14 * sum(rest)

    monkeypatch.setattr(predictor, "measure", measure)
    monkeypatch.setattr(predictor, "queued", lambda: 0.0)
    return measured


CASES = [
    Case(m, n, k, dtype, block, density)
    for m in (1, 7, 100, 600)
    for n, k in ((960, 640), (512, 2048))
    for dtype in (torch.float32, torch.bfloat16)
    for block, density in ((None, 1.0), ((4, 1), 0.3), ((32, 1), 0.3), ((16, 16), 0.05))
] + [
    Case(m, 960, 640, torch.float32, block, density, int8=block != (1, 1))
    for m in (1, 7, 100, 600)
    for block, density in (((4, 1), 0.3), ((32, 1), 0.3), ((16, 16), 0.05), ((1, 1), 0.2))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_terms_are_what_a_call_takes(case: Case) -> None:
    one, two = terms(case, 1), terms(case, 2)
    assert one[0] == two[0] == 1 and all(0 <= t < math.inf for t in one + two)
    products = case.tokens * case.out_features * case.in_features
    if case.block is not None:
        products = case.tokens * case.blocks * math.prod(case.block)
    work = max(one[1:])
    assert products <= 1.01 * work < 3 * products + 64 * case.out_features * (32 + case.in_features)
    assert max(two[1:]) <= work  # two threads: no thread does more than one would


@pytest.mark.parametrize("block", [(4, 1), (32, 1), (16, 16), (1, 16)])
def test_terms_grow_with_the_density(block: tuple[int, int]) -> None:
    found = [terms(Case(512, 768, 768, torch.float32, block, d), 1)[1] for d in (0.05, 0.1, 0.3, 0.6, 1.0)]
    assert found == sorted(found) and found[0] < found[-1] / 10


def test_fit_finds_costs_and_none_is_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(12, 4, generator=generator, dtype=torch.float64) * torch.tensor([1, 1e9, 1e6, 1e5])
    costs = torch.tensor([5e-6, 1e-12, 0.0, 1e-11], dtype=torch.float64)
    found = fitted(rows.tolist(), (rows @ costs).tolist())
    assert found == pytest.approx(costs.tolist(), rel=1e-6, abs=1e-16)
    # Times that fall as the last term grows: its cost is 0, not less.
    odd = fitted([[1, 1.0], [1, 2.0], [1, 3.0]], [3.0, 2.0, 1.0])
    assert odd[1] == 0 and 1 <= odd[0] <= 3


def test_fit_weighs_relative_errors() -> None:
    """A microsecond at a short call counts as much as a millisecond at one a thousand times as long."""
    (cost,) = fitted([[1.0], [1000.0]], [1.0, 2000.0])
    assert cost == pytest.approx((1 + 0.5) / (1 + 0.25))


def test_what_is_predicted_is_what_was_measured(clock: list[Case]) -> None:
    found = Predictor()
    for case in CASES:
        assert found.seconds(case) == pytest.approx(predictor.measure(case), rel=1e-3)


def test_more_work_takes_longer(clock: list[Case]) -> None:
    found = Predictor()
    for block in (None, (4, 1), (32, 1), (16, 16)):
        for dtype in (torch.float32, torch.bfloat16):
            by_tokens = [found.seconds(Case(m, 768, 768, dtype, block)) for m in (64, 128, 256, 1024)]
            assert by_tokens == sorted(by_tokens) and by_tokens[-1] > 3 * by_tokens[0]
            if block is not None:
                by_density = [found.seconds(Case(512, 768, 768, dtype, block, d)) for d in (0.1, 0.2, 0.5, 1)]
                assert by_density == sorted(by_density)


def test_each_group_is_measured_once_and_kept(clock: list[Case], tmp_path: Path) -> None:
    case = Case(512, 256, 256, torch.float32, (32, 1), 0.5)
    first = Predictor()
    seconds = first.seconds(case)
    assert clock == list(calibration(case)) and len(clock) > 10
    first.seconds(Case(64, 999, 320, torch.float32, (32, 1), 0.2))
    assert len(clock) == len(list(calibration(case)))
    assert [path.parent.name for path in tmp_path.rglob("speed-*.json")] == ["rarefy"]
    again = Predictor()
    assert again.seconds(case) == seconds and len(clock) == len(list(calibration(case)))
    again.seconds(Case(1, 256, 256, torch.float32, (32, 1), 0.5))  # few tokens: another group
    assert len(clock) > len(list(calibration(case)))
    few, many = sorted(Predictor().costs)
    assert few.startswith("f32 32x1 few ") and many.startswith("f32 32x1 many ")


def test_what_was_measured_while_threads_waited_is_not_kept(
    clock: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, other = Case(512, 256, 256), Case(512, 256, 256, torch.float32, (32, 1), 0.5)
    Predictor().seconds(case)
    with monkeypatch.context() as busy:
        busy.setattr(predictor, "queued", lambda: float(len(clock)))  # a second for each measurement
        first = Predictor()
        seconds, count = first.seconds(other), len(clock)
        assert first.seconds(other) == seconds and len(clock) == count
    again = Predictor()
    assert set(again.costs) == {case.group}
    again.seconds(other)
    assert len(clock) > count and set(Predictor().costs) == {case.group, other.group}


def test_calls_are_many_while_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(predictor, "layer_of", lambda _: calls.append)
    monkeypatch.setattr(predictor, "queued", lambda: float(len(calls)))
    predictor.measure(Case(1, 4, 4), seconds=0.001)
    assert len(calls) > 100  # for as long as it has patience: 8 ms
    calls.clear()
    monkeypatch.setattr(predictor, "queued", lambda: 0.0)
    predictor.measure(Case(1, 4, 4), seconds=0.0)
    assert len(calls) == 2 + 5


def test_a_group_is_measured_where_its_kernel_runs(clock: list[Case]) -> None:
    """Of 9 tokens lanes are empty, of rows with a block each little is left to do: other kernels, maybe."""
    for case in (
        Case(9, 512, 512, torch.float32, (32, 1), 0.3),
        Case(512, 512, 512, torch.float32, (32, 32), 0.05),
        Case(512, 512, 512, torch.float32, (1, 1), 0.01),
        Case(512, 512, 512, torch.float32, (32, 1), 0.3, int8=True),
    ):
        points = calibration(case)
        assert {point.group for point in points} == {case.group}
        assert points == [case] or len(points) >= len(terms(case, 1))


def test_a_panel_that_is_partly_full_streams_all_weights() -> None:
    for block, int8 in (((32, 1), True), ((4, 1), False)):
        found = [terms(Case(m, 512, 512, block=block, density=0.3, int8=int8), 1) for m in (8, 16, 520)]
        few, most, two = found
        assert few[4] == most[4] < two[4] and two[1] > 4 * most[1]


def damaged(kept: dict) -> dict[str, str]:
    """Contents that no predictor wrote, or one of another machine."""
    costs = {"f32 dense many": [1.0, 2.0]}
    return {
        "empty": "",
        "cut": json.dumps(kept)[:-20],
        "binary": "\x00\x01",
        "list": "[]",
        "no costs": json.dumps({"key": kept["key"]}),
        "text": json.dumps(kept | {"costs": "fast"}),
        "negative": json.dumps(kept | {"costs": {"f32 dense many": [1.0, -2.0]}}),
        "nan": json.dumps(kept | {"costs": {"f32 dense many": [math.nan]}}),
        "zeros": json.dumps(kept | {"costs": {"f32 dense many": [0.0, 0.0]}}),
        "words": json.dumps(kept | {"costs": {"f32 dense many": ["1"]}}),
        "other key": json.dumps({"key": kept["key"] | {"threads": 99}, "costs": costs}),
    }


@pytest.mark.parametrize("how", list(damaged({"key": {}, "costs": {}})))
def test_a_damaged_file_is_measured_anew(how: str, clock: list[Case]) -> None:
    first, case = Predictor(), Case(512, 256, 256)
    seconds = first.seconds(case)
    first.path.write_text(damaged(json.loads(first.path.read_text()))[how])
    clock.clear()
    again = Predictor()
    assert again.costs == {} and again.seconds(case) == seconds and clock
    assert Predictor().costs == again.costs != {}


def test_costs_of_the_wrong_length_are_not_used(clock: list[Case]) -> None:
    first, case = Predictor(), Case(512, 256, 256)
    first.seconds(case)
    kept = json.loads(first.path.read_text())
    kept["costs"][case.group] = kept["costs"][case.group][:2]
    first.path.write_text(json.dumps(kept))
    assert Predictor().seconds(case) == pytest.approx(first.seconds(case))


def test_a_folder_that_cannot_be_written_is_done_without(clock: list[Case], tmp_path: Path) -> None:
    (tmp_path / "rarefy").write_text("a file where the folder should be")
    assert Predictor().seconds(Case(512, 256, 256)) > 0


def test_other_threads_are_another_machine(clock: list[Case]) -> None:
    before = torch.get_num_threads()
    try:
        paths = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            paths.append(predictor.predictor().path)
        assert paths[0] != paths[1]
    finally:
        torch.set_num_threads(before)


def test_break_even_is_where_both_take_as_long(clock: list[Case]) -> None:
    sparse = Case(512, 1024, 1024, torch.float32, (32, 1))
    dense = predictor.predictor().seconds(Case(512, 1024, 1024))
    density = predictor.break_even(sparse, dense)
    assert 0.5 < density < 0.75  # products at 1.5 times the price, less what dense saves elsewhere
    at = predictor.predictor().seconds(Case(512, 1024, 1024, torch.float32, (32, 1), density))
    assert at == pytest.approx(dense, rel=0.01)
    assert predictor.break_even(sparse, 1e-9) is None and predictor.break_even(sparse, 1.0) == 1.0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "up": nn.Linear(128, 512),
            "down": nn.Linear(512, 128),
            "same": nn.Linear(128, 512),
            "odd": nn.Linear(7, 5),
        }
    )


def test_advice_names_blocks_and_dtype(clock: list[Case]) -> None:
    found = rarefy.advise(network(), tokens=512, density=0.5)
    assert {row.dtype for row in found} == {"f32", "bf16x", "bf16"} and len(found.rows) == 9
    assert [row.dtype for row in found][:3] == [found.dtype] * 3
    up = next(row for row in found if "up" in row.names)
    assert up.names == ("up", "same") and up.shape == (512, 128) and up.tokens == 512
    assert (
        up.spec.endswith("@0.5:bf16x" if found.dtype == "bf16x" else "@0.5")
        and up.speedup == up.dense_ms / up.sparse_ms > 1
    )
    assert up.break_even > 0.5 and up.best_ms == up.sparse_ms
    odd = next(row for row in found if "odd" in row.names)
    assert odd.spec is None and odd.break_even is None and odd.best_ms == odd.dense_ms
    assert found.total_ms("f32") < found.total_ms("f32", dense=True)
    text = str(found)
    assert "up and 1 more" in text and "stays dense" in text and f"Recommended: {found.dtype}" in text
    assert json.loads(json.dumps(found.to_dict()))["layers"][0]["names"]
    report = rarefy.sparsify(network(), found.patterns(), measure=False)
    assert {row.name for row in report.replaced} == {"up", "down", "same"}


def test_layers_that_round_x_are_compared_with_dense_float32(clock: list[Case]) -> None:
    rows = {row.dtype: row for row in rarefy.advise({"a": (512, 512)}, dtypes=("f32", "bf16x"))}
    assert rows["bf16x"].spec.endswith("@0.5:bf16x") and rows["bf16x"].dense_ms == rows["f32"].dense_ms
    measured = [case for case in clock if case.rounds_x and case.block is not None]
    assert measured and {case.group.split()[0] for case in measured} == {"bf16x"}
    weight = predictor.layer_of(measured[0]).weight
    assert weight.rounds_x and (weight.dtype, weight.x_dtype) == (torch.bfloat16, torch.float32)


def test_the_finest_block_that_is_about_as_fast_is_named(clock: list[Case], monkeypatch) -> None:
    seconds = {None: 1.0, (4, 1): 0.60, (16, 1): 0.52, (32, 1): 0.5, (16, 16): 0.5, (32, 32): 0.5}
    monkeypatch.setattr(Predictor, "seconds", lambda _self, case: seconds[case.block])
    (row,) = rarefy.advise({"a": (64, 64)}, dtypes=("f32",))
    assert row.spec == "block:16x1@0.5" and row.sparse_ms == 520


def test_what_dense_does_faster_stays_dense(clock: list[Case]) -> None:
    row = next(iter(rarefy.advise({"a": (512, 512)}, density=0.9, dtypes=("f32",))))
    assert row.spec is None and row.speedup < 1 and row.best_ms == row.dense_ms and row.break_even < 0.9
    assert rarefy.advise({"a": (512, 512)}, density=0.9).patterns() == {}


def test_an_input_says_how_many_tokens_each_layer_sees(clock: list[Case]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.first = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return scale * self.first(self.each(x)[:, 0])

    x, net = torch.randn(6, 10, 64), Net()
    for given in (x, (x,), {"x": x, "scale": 2.0}):
        found = rarefy.advise(net, given, dtypes=("f32",))
        assert {row.names[0]: row.tokens for row in found} == {"each": 60, "first": 6}
    assert not net.each._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": 3}, TypeError, r"\[advise\] model must be an nn.Module, or shapes by name; got int"),
        (
            {"model": nn.ReLU()},
            ValueError,
            r"\[advise\] model must have layers that can become sparse; got none",
        ),
        ({"model": {}}, ValueError, r"must have layers"),
        ({"tokens": 0}, ValueError, r"\[advise\] tokens must be at least 1; got 0"),
        ({"tokens": 1.5}, TypeError, r"\[advise\] tokens must be an int; got 1.5"),
        ({"density": 1.5}, ValueError, r"\[advise\] .*density.*; got 1.5"),
        ({"density": math.nan}, ValueError, r"\[advise\] .*density.*; got nan"),
        (
            {"dtypes": ("f64",)},
            ValueError,
            r"\[advise\] dtypes must be some of f32, bf16x, bf16; got \['f64'\]",
        ),
        ({"dtypes": ()}, ValueError, r"\[advise\] dtypes must be some of f32, bf16x, bf16; got \(\)"),
        ({"model": {"a": (-1, 4)}}, ValueError, r"\[advise\] .*shape"),
    ],
)
def test_bad_arguments_are_refused(clock: list[Case], arguments: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        rarefy.advise(**{"model": {"a": (64, 64)}} | arguments)
    assert not clock


def test_auto_chooses_or_leaves_dense_and_says_so(clock: list[Case]) -> None:
    net = network()
    report = rarefy.sparsify(
        net, {"up": "auto@0.25", "down|odd": "auto@0.9", "same": "csr@0.1"}, measure=False
    )
    assert report["up"].format in ("block:4x1", "block:16x1", "block:32x1", "block:16x16", "block:32x32")
    assert report["up"].density == pytest.approx(0.25) and isinstance(net["up"], rarefy.BlockSparseLinear)
    assert isinstance(net["down"], nn.Linear)
    assert (
        "dense is predicted to be faster" in report["down"].reason and "512 tokens" in report["down"].reason
    )
    assert report["odd"].reason == "no block shape that auto knows divides it"
    dense, sparse = report["up"].to_dict()["predicted_ms"]
    assert 0 < sparse < dense and report["same"].to_dict()["predicted_ms"] is None
    assert "stays: dense is predicted to be faster" in str(report)
    again = rarefy.sparsify(net, {"up": "auto@0.1"}, measure=False)
    assert again["up"].reason == "already block-sparse: auto chooses for dense layers"


def test_auto_keeps_what_is_not_zero(clock: list[Case]) -> None:
    """By the fill of blocks: 16×16 where zeros come in these, 4×1 where they are thin, else elements."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(256, 256) for name in ("squares", "thin", "spread", "whole")})
    with torch.no_grad():
        net["squares"].weight *= (torch.rand(16, 16) < 0.2).repeat_interleave(16, 0).repeat_interleave(16, 1)
        net["thin"].weight *= (torch.rand(64, 256) < 0.2).repeat_interleave(4, 0)
        net["spread"].weight *= torch.rand(256, 256) < 0.45
    before = {name: layer.weight.detach().clone() for name, layer in net.items()}
    report = rarefy.sparsify(net, "auto", measure=False)
    assert report["squares"].density == pytest.approx(0.2, abs=0.07)
    assert report["thin"].format == "block:4x1"
    assert report["spread"].format == "block:1x1"
    for name in ("squares", "thin", "spread"):
        assert torch.equal(net[name].weight.to_dense(), before[name])
    assert report["whole"].density in (None, pytest.approx(0.5))
    net["whole"] = nn.Linear(256, 256)
    again = rarefy.sparsify(net, {"whole": "auto@nonzero"}, measure=False)
    assert "dense is predicted to be faster" in again["whole"].reason


def test_auto_chooses_for_convolutions_without_groups(clock: list[Case]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(32, 64, 3, padding="same"),
        nn.Conv2d(64, 64, 1, groups=2),
        nn.Conv2d(64, 32, 1),
        nn.Conv2d(32, 5, 1),
    )
    with torch.no_grad():
        net[0].weight *= (torch.rand(4, 32, 3, 3) < 0.2).repeat_interleave(16, 0)
    x = torch.randn(1, 32, 6, 6)
    want = net[0](x)
    report = rarefy.sparsify(net, "auto", measure=False)
    assert report["0"].format in ("block:4x1", "block:16x1") and report["0"].density < 0.25
    assert clock and report["0"].predicted[1] < report["0"].predicted[0]
    torch.testing.assert_close(net[0](x), want)
    assert report["1"].reason == "auto chooses for convolutions without groups"
    assert report["2"].density == pytest.approx(0.5) and isinstance(net[2], rarefy.BlockSparseConv2d)
    assert report["3"].reason == "no block shape that auto knows divides it"


def test_auto_predicts_nothing_for_other_dtypes(clock: list[Case]) -> None:
    reason, times = Auto(0.5).chosen(nn.Linear(64, 64, dtype=torch.float64), 512)
    assert reason == "auto predicts for the CPU, in float32 and bfloat16" and times is None and not clock


@pytest.mark.parametrize(
    "spec", ["auto@", "auto@x", "auto@none", "auto@1.5", "auto@0.5:bf16", "automatic@0.5"]
)
def test_bad_auto_specs_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"\[add_pattern\]"):
        rarefy.sparsify(network(), {"up": spec})


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    before = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["rarefy", "advise", *arguments])
    try:
        return command.main()
    finally:
        torch.set_num_threads(before)


def test_command_line(clock: list[Case], monkeypatch, capsys, tmp_path: Path) -> None:
    assert run(monkeypatch, "--shape", "256x128", "--density", "0.25", "--dtype", "f32", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["layers"]
    assert row["names"] == ["256x128"] and row["spec"].endswith("@0.25")
    file = tmp_path / "model.safetensors"
    rarefy.save_file(network(), file)
    assert run(monkeypatch, str(file), "--tokens", "64", "--threads", "1") == 0
    assert "same and 1 more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "[advise] model must have layers"),
        (["--shape", "3"], "[advise] --shape must look like 1536x384; got '3'"),
        (["--shape", "8x8", "--tokens", "0"], "[advise] tokens must be at least 1"),
        (["--shape", "8x8", "--threads", "0"], "[advise] --threads must be at least 1"),
        (["--shape", "8x8", "--density", "2"], "got 2.0"),
        (["missing.safetensors"], "missing.safetensors"),
        ([__file__], "[advise] file must be a safetensors file"),
    ],
)
def test_command_line_refuses(
    clock: list[Case], monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 1
    assert message in capsys.readouterr().err and not clock


def test_a_real_measurement_is_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (Case(4, 64, 64), Case(70, 64, 64, torch.bfloat16, (32, 1), 0.5)):
        assert 1e-7 < predictor.measure(case, seconds=0.001) < 5.0


def test_what_is_measured_has_its_weights_packed() -> None:
    """Beside values of inference mode nothing is kept: each call would pack them again."""
    case = Case(70, 64, 64, torch.bfloat16, (32, 1), 0.5)
    with torch.inference_mode():
        predictor.measure(case, seconds=0.001)
    assert not predictor.layer_of(case).weight.values.is_inference()
