"""Auto's dtypes: what is chosen by times that are made up, what stays, what comes out, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rarefy
from rarefy import predictor
from rarefy.auto import Auto
from rarefy.predictor import Case

KINDS = ("own", "bf16", "bf16x", "int8")
Times = Callable[..., list[Case]]


def kind_of(case: Case) -> str:
    if case.block is None:
        return "dense"
    return (
        "int8" if case.int8 else "bf16x" if case.rounds_x else "own" if case.stored == case.dtype else "bf16"
    )


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Says how many seconds 16×1 blocks take by what they store, a tenth more in other blocks; dense 1."""

    def say(**seconds: float) -> list[Case]:
        asked: list[Case] = []

        def predicted(case: Case) -> float:
            asked.append(case)
            by_block = 1.0 if case.block in (None, (16, 1)) else 1.1
            return by_block * ({"dense": 1.0} | seconds)[kind_of(case)]

        monkeypatch.setattr("rarefy.auto.predicted_seconds", predicted)
        return asked

    return say


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(dtype)


@pytest.mark.parametrize("fastest", KINDS)
def test_any_is_the_dtype_that_is_fastest(times: Times, fastest: str) -> None:
    times(**dict.fromkeys(KINDS, 0.8) | {fastest: 0.5})
    model = layers().eval()
    report = rarefy.sparsify(model, "auto@0.5:any", measure=False)
    end = "" if fastest == "own" else f":{fastest}"
    assert [row.format for row in report.replaced] == [f"block:16x1{end}"] * 2 and f"16x1{end} " in str(
        report
    )
    assert report["0"].density == 0.5 and report["0"].predicted == (1000, 500)
    weight = model[0].weight
    kept = {"own": torch.float32, "int8": torch.int8}.get(fastest, torch.bfloat16)
    assert weight.dtype == kept and bool(weight.rounds_x) == (fastest == "bf16x")


def test_of_what_is_about_as_fast_the_one_that_rounds_least(times: Times) -> None:
    for seconds, found in (
        ({"own": 0.52, "bf16": 0.5, "bf16x": 0.5, "int8": 0.5}, ""),
        ({"own": 0.6, "bf16": 0.52, "bf16x": 0.51, "int8": 0.5}, ":bf16"),
        ({"own": 0.6, "bf16": 0.6, "bf16x": 0.52, "int8": 0.5}, ":bf16x"),
        ({"own": 1.01, "bf16": 1.01, "bf16x": 1.01, "int8": 0.97}, ":int8"),  # the others lose to dense
    ):
        times(**seconds)
        spec, _ = Auto(0.5, "any").chosen(nn.Linear(64, 64).eval(), 512)
        assert str(spec) == f"block:16x1@0.5{found}"


def test_any_stores_int8_where_nothing_trains_and_all_is_finite(times: Times) -> None:
    asked = times(own=0.8, bf16=0.8, bf16x=0.7, int8=0.1)
    model = layers().eval()
    model[2].train()
    with torch.no_grad():
        model[0].weight[3, 5] = torch.nan
    report = rarefy.sparsify(model, "auto@nonzero:any", measure=False)
    assert [row.format for row in report.replaced] == ["block:16x1:bf16x"] * 2
    assert not any(case.int8 for case in asked)
    (row, _) = rarefy.sparsify(layers().eval(), "auto:any", measure=False).replaced
    assert row.format == "block:16x1:int8"


@pytest.mark.parametrize("values", ["f32", "bf16", "bf16x", "int8"])
def test_values_as_asked_for_and_no_others(times: Times, values: str) -> None:
    asked = times(**dict.fromkeys(KINDS, 0.5))
    model = layers()  # in training mode: int8 was asked for
    report = rarefy.sparsify(model, f"auto@0.25:{values}", measure=False)
    assert report["2"].format == f"block:16x1:{values}" and report["2"].density == 0.25
    assert {kind_of(case) for case in asked} == {"dense", "own" if values == "f32" else values}
    (same,) = rarefy.sparsify(layers()[:1], f"block:16x1@0.25:{values}", measure=False)
    assert (same.format, same.density) == (report["2"].format, 0.25)


def test_without_an_end_values_keep_their_dtype(times: Times) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        asked = times(own=0.5, bf16=0.1, bf16x=0.1, int8=0.1)
        model = layers(dtype).eval()
        report = rarefy.sparsify(model, "auto", measure=False)
        assert report["0"].format == "block:16x1" and model[0].weight.dtype == dtype
        assert {kind_of(case) for case in asked} == {"dense", "own"}


def test_what_dense_does_faster_stays_and_the_reason_names_the_dtype(times: Times) -> None:
    times(own=3.0, bf16=3.0, bf16x=2.0, int8=3.0)
    for spec in ("auto@0.5:any", "auto@0.5:bf16x"):
        report = rarefy.sparsify(layers().eval(), spec, measure=False, tokens=7)
        wanted = "dense is predicted to be faster: 1000.000 ms, block:16x1@0.5:bf16x 2000.000 ms at 7 tokens"
        assert report["0"].reason == wanted and report["0"].predicted == (1000, 2000)


def test_layers_in_bfloat16(times: Times) -> None:
    times(own=0.5, int8=0.4)
    report = rarefy.sparsify(
        layers(torch.bfloat16).eval(), {"0": "auto:any", "2": "auto:bf16x"}, measure=False
    )
    assert report["0"].format == "block:16x1:int8"
    assert report["2"].reason == "auto predicts bf16 or int8 for layers in bfloat16 on a CPU, not bf16x"
    assert Auto(0.5, "any").chosen(nn.Linear(8, 8, dtype=torch.float64), 8)[0].startswith("auto predicts for")


def test_layers_on_a_gpu_keep_their_dtype(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rarefy.advice._is_predicted_gpu", lambda: True)
    asked = times(own=0.5, bf16=0.1, bf16x=0.1, int8=0.1)
    with FakeTensorMode():
        layer = nn.Linear(64, 64, device="cuda", dtype=torch.float16).eval()
        found = [Auto(0.5, values).chosen(layer, 512)[0] for values in ("any", "f16", "int8")]
    assert list(map(str, found[:2])) == ["block:32x1@0.5", "block:32x1@0.5:f16"]
    assert found[2] == "auto predicts f16 for layers in float16 on a GPU, not int8"
    assert {kind_of(case) for case in asked} == {"dense", "own"}


def test_convolutions_have_what_convolutions_can_have(times: Times) -> None:
    times(own=0.8, bf16=0.7, bf16x=0.5, int8=0.1)
    net = nn.Sequential(nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 1)).eval()
    report = rarefy.sparsify(net, {"0|1": "auto:any", "2": "auto:int8"}, measure=False)
    assert [row.format for row in report.replaced] == ["block:16x1:bf16x", "block:16x1:bf16"]
    assert report["2"].reason.startswith("a convolution takes block:ROWSxCOLUMNS@DENSITY, not block:")


def test_what_only_the_reference_multiplies_is_not_measured(
    times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = times(own=0.8, bf16=0.8, bf16x=0.8, int8=0.1)
    wide = nn.Linear(2**17 + 16, 16).eval()  # sums of int8 would leave int32
    assert str(Auto(0.5, "any").chosen(wide, 8)[0]) == "block:16x1@0.5"
    reason, predicted = Auto(0.5, "int8").chosen(wide, 8)
    assert reason == "no kernel but the reference multiplies block:16x16:int8 here" and predicted is None
    assert not any(case.int8 for case in asked)
    monkeypatch.setattr(predictor, "_explain", lambda _case: {"kernel": None, "why_none": "forced"})
    assert str(Auto(0.5, "any").chosen(nn.Linear(64, 64).eval(), 8)[0]) == "block:16x1@0.5"


def test_a_layer_that_stores_bf16_is_measured_as_such(clock: list[Case]) -> None:
    case = Case(512, 256, 256, block=(16, 1), density=0.3, values=torch.bfloat16)
    assert predictor.predicted_seconds(case) > 0 and clock[0].values == torch.bfloat16
    assert case.group.startswith("f32 bf16 16x1 many ") and case.stored == torch.bfloat16
    assert case.weight_bytes < Case(512, 256, 256, block=(16, 1), density=0.3).weight_bytes
    weight = predictor.layer_of(case).weight
    assert (weight.dtype, weight.x_dtype, weight.rounds_x) == (torch.bfloat16, torch.float32, False)


def test_a_saved_model_is_reported_as_one_in_eval_mode(times: Times, tmp_path: Path) -> None:
    save_file({"a.weight": torch.randn(64, 64)}, tmp_path / "dense.safetensors")
    for seconds, end in ((0.1, ":int8"), (0.9, ":bf16x")):
        times(own=0.8, bf16=0.8, bf16x=0.5, int8=seconds)
        report = rarefy.report_folder(tmp_path, spec="auto:any")
        assert report["a"].format == f"block:16x1{end}" and report["a"].predicted[0] == 1000


# What comes out -----------------------------------------------------------------------------------


def bound(linear: nn.Linear, x: torch.Tensor, form: str) -> torch.Tensor:
    """Of |y − exact|, as docs/numerics.md has it, for a layer that stores all that is not zero."""
    w, b, magnitude = linear.weight.double(), linear.bias.double().abs(), x.double().abs()
    products = magnitude @ w.abs().t()
    end = form.rpartition(":")[2]
    if end == "int8":
        s_x = magnitude.amax(1, keepdim=True) / 127
        s_w = w.abs().amax(1) / 127
        stored = (w != 0).double()
        rounded = (
            s_x / 2 * w.abs().sum(1) + (magnitude @ stored.t()) * s_w / 2 + s_x * s_w / 4 * stored.sum(1)
        )
        return rounded + 5 * 2.0**-24 * (products + rounded + b)
    rounds = {"bf16": 2.0**-8, "bf16x": 2.0**-7 + 2.0**-16}.get(end, 0.0)
    gamma = (w.shape[1] + 1) * 2.0**-23
    return rounds * products + gamma * ((1 + rounds) * products + b)


def pruned() -> nn.Sequential:
    """Layers in eval mode, a tenth of whose 16×16 blocks is not zero."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(512, 256)).eval()
    with torch.no_grad():
        for linear in model:
            n, k = linear.weight.shape
            mask = torch.rand(n // 16, k // 16) < 0.1
            linear.weight *= mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return model


@pytest.mark.parametrize("fastest", [*KINDS, "as predicted here"])
def test_pruned_layers_keep_their_outputs(times: Times, fastest: str) -> None:
    """For each layer alone; what is fastest is made up for all but the last."""
    if fastest in KINDS:
        times(**dict.fromkeys(KINDS, 0.8) | {fastest: 0.5})
    model, x = pruned(), torch.randn(96, 512)
    dense = [(linear, linear(x)) for linear in model]
    report = rarefy.sparsify(model, "auto@nonzero:any", measure=False, tokens=96)
    assert fastest not in KINDS or len(report.replaced) == 2
    for row, layer, (linear, y) in zip(report.rows, model, dense, strict=True):
        if row.format is None:
            assert fastest not in KINDS and layer is linear
            continue
        assert row.format in str(report)
        stored = {"int8": torch.int8, "bf16": torch.bfloat16, "bf16x": torch.bfloat16}
        assert layer.weight.dtype == stored.get(row.format.rpartition(":")[2], torch.float32)
        exact = x.double() @ linear.weight.double().t() + linear.bias.double()
        with torch.inference_mode():
            found = layer(x)
        assert found.dtype == y.dtype
        assert ((found.double() - exact).abs() <= bound(linear, x, row.format)).all()


# Specs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["auto", "auto@0.5", "auto@nonzero", "auto:any", "auto@0.25:bf16x", "auto@nonzero:int8", "auto:f16"],
)
def test_specs_are_read_as_they_are_written(text: str) -> None:
    assert str(Auto.parse(text, "op")) == text


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("auto@", "spec must look like auto, auto@0.5, auto@nonzero, auto:bf16x or auto:any; got 'auto@'"),
        ("auto@x", "spec must look like auto.*; got 'auto@x'"),
        ("auto@none", "spec must look like auto.*; got 'auto@none'"),
        ("automatic@0.5", "spec must look like auto.*; got 'automatic@0.5'"),
        ("autoany", "spec must look like auto.*; got 'autoany'"),
        ("auto:any@0.5", "values of auto must be .* or any; got 'auto:any@0.5'"),
        ("auto@1.5", ".*density.*; got 1.5"),
        ("auto@2:bf16", ".*density.*; got 2.0"),
        ("auto@nan:any", ".*density.*; got nan"),
        ("auto:", "values of auto must be f32, bf16, bf16x, int8, f16 or any; got 'auto:'"),
        ("auto:f8", "values of auto must be f32, bf16, bf16x, int8, f16 or any; got 'auto:f8'"),
        ("auto@0.5:w8", "values of auto must be .* or any; got 'auto@0.5:w8'"),
        ("auto:ANY", "values of auto must be .* or any; got 'auto:ANY'"),
        ("auto:bf16\n", r"values of auto must be .* or any; got 'auto:bf16\\n'"),
        ("auto:bf16:any", "values of auto must be .* or any; got 'auto:bf16:any'"),
    ],
)
def test_bad_specs_are_refused(spec: str, said: str, tmp_path: Path) -> None:
    model = layers()
    with pytest.raises(ValueError, match=rf"^\[add_pattern\] {said}$"):
        rarefy.sparsify(model, spec)
    assert isinstance(model[0], nn.Linear)
    with pytest.raises(ValueError, match=rf"^\[report_folder\] {said}$"):
        rarefy.report_folder(tmp_path, spec=spec)
