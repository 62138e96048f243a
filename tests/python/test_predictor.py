"""Predicted times: the fit, the file, what advise and "auto" make of them, by a clock that is made up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rarefy import predictor
from rarefy.advice import break_even
from rarefy.predictor import Case, Predictor, calibration, fitted, terms

CASES = (
    [
        Case(m, n, k, dtype, block, density)
        for m in (1, 7, 100, 600)
        for n, k in ((960, 640), (512, 2048))
        for dtype in (torch.float32, torch.bfloat16)
        for block, density in ((None, 1.0), ((4, 1), 0.3), ((32, 1), 0.3), ((16, 16), 0.05))
    ]
    + [
        Case(m, 1024, 2048, torch.float32, block, 0.3, weight_only=True)
        for m in (1, 7, 100)
        for block in ((4, 1), (32, 1), (16, 16))
    ]
    + [
        Case(m, 960, 640, torch.float32, block, density, int8=block != (1, 1))
        for m in (1, 7, 100, 600)
        for block, density in (((4, 1), 0.3), ((32, 1), 0.3), ((16, 16), 0.05), ((1, 1), 0.2))
    ]
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_terms_are_what_a_call_takes(case: Case) -> None:
    one, two = terms(case, 1), terms(case, 2)
    assert one[0] == two[0] == 1 and all(0 <= t < math.inf for t in one + two)
    products = case.tokens * case.out_features * case.in_features
    if case.block is not None:
        products = case.tokens * case.blocks * math.prod(case.block)
    work = max(one[1:])
    most, all_stored = 3 * products, case.tokens * case.out_features * case.in_features
    if case.int8 and case.kernel.endswith("_tokens"):
        most = all_stored
    elif case.block == (4, 1) and case.kernel == "amx_linear":  # joined by 16: nearly all is stored then
        most = max(most, all_stored)
    assert products <= 1.01 * work < most + 64 * case.out_features * (32 + case.in_features)
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


@pytest.mark.parametrize(("least", "most"), [(0.2, 0.4), (0.29, 0.31), (0.5, 0.6)])
def test_a_kernel_for_some_densities_alone_is_measured_at_these(
    monkeypatch: pytest.MonkeyPatch, least: float, most: float
) -> None:
    monkeypatch.setattr(Case, "group", property(lambda case: str(least <= case.density <= most)))
    case = Case(512, 512, 512, torch.float32, (32, 1), (least + most) / 2)
    found = calibration(case)
    assert {point.group for point in found} == {"True"} and len(found) >= 9
    # As int8 by token on AMX, from some tokens and densities on, in some sizes.
    few = property(lambda case: str(case.density >= 0.4 and case.tokens > 100 and case.out_features < 800))
    monkeypatch.setattr(Case, "group", few)
    found = calibration(replace(case, density=0.42))
    assert len(found) == len(set(found)) >= 6 and {point.group for point in found} == {"True"}


def test_a_panel_that_is_partly_full_streams_all_weights() -> None:
    for block, int8 in (((32, 1), True), ((4, 1), False)):
        found = [terms(Case(m, 512, 512, block=block, density=0.3, int8=int8), 1) for m in (8, 16, 520)]
        few, most, two = found
        assert few[4] == most[4] < two[4] and two[1] > 4 * most[1]


def test_products_in_pairs_have_all_columns_of_the_rows_that_they_meet(forced: Callable[[str], str]) -> None:
    forced("cpu:pairs")  # products of 32 outputs
    half_a_group = 16 / 768  # of columns: the last one of each row's
    for block, met in (((16, 1), 1), ((24, 1), 2), ((6, 1), 6), ((4, 1), 8)):
        products = terms(Case(512, 768, 768, torch.bfloat16, block, 0.25), 1, "cpu:pairs")[1]
        of_dense = products / (512 * 768 * 768)
        assert of_dense == pytest.approx(1 - 0.75**met + half_a_group, rel=1e-3), block


def test_products_in_int8_have_all_columns_of_the_rows_that_they_meet(forced: Callable[[str], str]) -> None:
    forced("cpu:scalar")  # products of 16 outputs, and panels of which any part counts as whole
    half_a_group = 32 / 768
    for block, met in (((16, 1), 1), ((24, 1), 4 / 3), ((12, 1), 2), ((8, 1), 2)):
        case = Case(512, 768, 768, torch.float32, block, 0.25, int8=True)
        of_dense = terms(case, 1, "cpu:scalar")[1] / (512 * 768 * 768)
        assert of_dense == pytest.approx(1 - 0.75**met + half_a_group, rel=1e-3), block
    for block in ((4, 1), (1, 1), (3, 5)):  # nearly all, and so all
        case = Case(512, 768, 768, torch.float32, block, 0.25, int8=True)
        assert terms(case, 1, "cpu:scalar")[1] == 512 * 768 * 768, block


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


def test_large_weights_take_as_long_as_they_are_read(clock: list[Case]) -> None:
    found = Predictor()
    small, block = Case(1, 1024, 1024), (32, 1)
    large = [Case(1, 4096, 4096), Case(1, 16384, 4096, torch.float32, block, 0.5)]  # 64 and 132 MB
    assert small.reading is None and Case(17, 4096, 4096).reading is None
    assert large[0].reading == "reading f32 dense 1" and large[1].reading == "reading"
    for case, seconds in zip(large, (3e-11 * 2**26, 4e-11 * (2**27 + 2**22)), strict=True):
        assert found.seconds(case) == pytest.approx(seconds)
    many = Case(512, 16384, 4096, torch.float32, block, 0.5)  # products, and what is slower than out of L3
    waits = (4e-11 - 1e-11) * many.weight_bytes
    assert found.seconds(many) == pytest.approx(predictor.measure(many) + waits, rel=1e-3)
    assert {"reading", "reading f32 dense 1"} < set(Predictor().costs)


def test_reading_costs_are_times() -> None:
    costs = predictor._reading_costs(Case(2, 64, 64, torch.bfloat16))
    assert len(costs) == 3 and all(1e-13 < cost < 1e-8 for cost in costs)


def test_break_even_is_where_both_take_as_long(clock: list[Case]) -> None:
    sparse = Case(512, 1024, 1024, torch.float32, (32, 1))
    dense = predictor.predictor().seconds(Case(512, 1024, 1024))
    density = break_even(sparse, dense)
    assert 0.5 < density < 0.75  # products at 1.5 times the price, less what dense saves elsewhere
    at = predictor.predictor().seconds(Case(512, 1024, 1024, torch.float32, (32, 1), density))
    assert at == pytest.approx(dense, rel=0.01)
    assert break_even(sparse, 1e-9) is None and break_even(sparse, 1.0) == 1.0


def test_a_real_measurement_is_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (Case(4, 64, 64), Case(70, 64, 64, torch.bfloat16, (32, 1), 0.5)):
        assert 1e-7 < predictor.measure(case, seconds=0.001) < 5.0


def test_what_is_measured_has_its_weights_packed() -> None:
    """Beside values of inference mode nothing is kept: each call would pack them again."""
    case = Case(70, 64, 64, torch.bfloat16, (32, 1), 0.5)
    with torch.inference_mode():
        predictor.measure(case, seconds=0.001)
    assert not predictor.layer_of(case).weight.values.is_inference()
