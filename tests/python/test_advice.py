"""advise and auto: what predicted times lead to, in Python and on the command line."""

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
from rarefy.auto import Auto
from rarefy.predictor import Case, Predictor


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
    assert {row.dtype for row in found} == {"f32", "bf16x", "bf16", "int8"} and len(found.rows) == 12
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


def test_int8_is_for_inference_and_compared_with_dense_float32(clock: list[Case]) -> None:
    found = rarefy.advise({"a": (512, 512)}, dtypes=("f32", "int8"))
    rows = {row.dtype: row for row in found}
    assert rows["int8"].spec.endswith("@0.5:int8") and rows["int8"].dense_ms == rows["f32"].dense_ms
    assert found.dtype == "f32" and found.patterns() == {"a": rows["f32"].spec}
    assert found.patterns("int8") == {"a": rows["int8"].spec}
    assert rarefy.advise({"a": (512, 512)}, dtypes=("int8",)).dtype == "int8"
    measured = [case for case in clock if case.int8 and case.block is not None]
    assert measured and isinstance(predictor.layer_of(measured[0]).weight, rarefy.Int8Weight)
    with pytest.raises(
        ValueError, match=r"\[advise\] dtype of patterns must be one of f32, int8; got 'bf16'"
    ):
        found.patterns("bf16")


def test_w8_is_asked_for(clock: list[Case]) -> None:
    found = rarefy.advise({"a": (1024, 1024)}, dtypes=("f32", "w8"))
    rows = {row.dtype: row for row in found}
    assert rows["w8"].spec.endswith("@0.5:w8") and rows["w8"].dense_ms == rows["f32"].dense_ms
    assert found.dtype == "f32" and found.patterns("w8") == {"a": rows["w8"].spec}
    measured = [case for case in clock if case.weight_only and case.block is not None]
    assert measured and all(case.stored == torch.int8 and not case.int8 for case in measured)


@pytest.mark.parametrize(("int8_s", "said"), [(0.2, "int8 (2.50x as fast)"), (0.9, "Recommended: f32. All")])
def test_advice_says_what_int8_brings_for_inference(monkeypatch, int8_s: float, said: str) -> None:
    def seconds(_self: Predictor, case: Case) -> float:
        return 1.0 if case.block is None else int8_s if case.int8 else 0.5

    monkeypatch.setattr(Predictor, "seconds", seconds)
    found = rarefy.advise({"a": (64, 64)}, dtypes=("f32", "int8"))
    assert found.dtype == "f32" and said in str(found)


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
            r"\[advise\] dtypes must be some of f32, bf16x, bf16, int8, w8; got \['f64'\]",
        ),
        (
            {"dtypes": ()},
            ValueError,
            r"\[advise\] dtypes must be some of f32, bf16x, bf16, int8, w8; got \(\)",
        ),
        (
            {"dtypes": ("int8",), "device": "cuda"},
            ValueError,
            r"dtypes must be some of bf16, f16; got \['int8'\]",
        ),
        ({"device": "meta"}, ValueError, r"\[advise\] device must be cpu or cuda; got 'meta'"),
        ({"device": 3.5}, ValueError, r"\[advise\] device must be cpu or cuda; got 3.5"),
        ({"model": {"a": (-1, 4)}}, ValueError, r"\[advise\] .*shape"),
        (
            {"model": {"a": (0, 5)}},
            ValueError,
            r"\[advise\] the shape of a must be at least \(1, 1\); got \(0, 5\)",
        ),
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
    head, *lines = str(report).splitlines()
    assert head.split()[4:6] == ["speedup", "predicted"]
    (line,) = (line for line in lines if line.startswith("up"))
    assert f" {dense / sparse:.2f}x " in line
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
    assert reason.startswith("auto predicts for the CPU in float32 and bfloat16, and for GPUs of compute")
    assert times is None and not clock


# GPUs: nothing is measured, kernels say what they take ----------------------------------------------


@pytest.fixture
def hopper(monkeypatch) -> list[Case]:
    """A GPU whose kernels take .6 of dense's 100 us at .5, 32x1 .62, 128x128 .5, but say nothing of 64x1."""
    asked: list[Case] = []

    def explain(case: Case) -> dict:
        asked.append(case)
        share = {(32, 1): 0.62, (128, 128): 0.5, (64, 1): None}.get(case.block, 0.6)
        us = None if share is None else 200 * share * case.density
        return {"kernel": "sm90", "config": "", "predicted_us": us, "dense_us": 100.0}

    monkeypatch.setattr(predictor, "_explain", explain)
    monkeypatch.setattr("rarefy.advice._is_predicted_gpu", lambda: True)
    return asked


def test_advice_for_a_gpu_is_what_its_kernels_say(clock: list[Case], hopper: list[Case]) -> None:
    shapes = {"a": (256, 256), "thin": (96, 96)}
    found = rarefy.advise(shapes, tokens=4096, device="cuda")
    a, thin = found
    assert found.dtype == a.dtype == "bf16" and not clock
    assert {case.device for case in hopper} == {"cuda"} and {case.tokens for case in hopper} == {4096}
    assert a.spec == "block:128x128@0.5" and a.speedup == pytest.approx(2)
    assert a.break_even == pytest.approx(1.0)
    assert thin.spec == "block:32x1@0.5"  # finest of those within 5 %
    assert [row.dtype for row in rarefy.advise(shapes, device="cuda", dtypes=("f16",))] == ["f16"] * 2


def test_blocks_that_nothing_is_said_of_are_not_named(monkeypatch, hopper: list[Case]) -> None:
    monkeypatch.setattr("rarefy.advice.BLOCKS", {"cuda": ((64, 1),)})
    (row,) = rarefy.advise({"a": (64, 64)}, device="cuda")
    assert row.spec is None and row.break_even is None and row.best_ms == row.dense_ms


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_advice_for_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"\[advise\] device must be a CPU, or a GPU of compute capability 9.0"
    ):
        rarefy.advise({"a": (64, 64)}, device="cuda")


def test_a_hopper_gpu_says_beforehand_how_much_faster_a_layer_is() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    layer = rarefy.BlockSparseLinear(4096, 4096, density=0.25, block_shape=(64, 64), device="cuda")
    layer = layer.to(torch.bfloat16).requires_grad_(False)
    dense, x = layer.to_dense(), torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def microseconds(called: nn.Module) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            called(x)
        start.record()
        for _ in range(20):
            called(x)
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / 20

    said = rarefy.explain(layer, x)
    assert said["predicted_us"] == pytest.approx(microseconds(layer), rel=0.4)
    assert said["dense_us"] == pytest.approx(microseconds(dense), rel=0.4)
    advised = next(iter(rarefy.advise(nn.Sequential(dense), x)))
    assert advised.dtype == "bf16" and advised.spec is not None and advised.speedup > 1


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
    assert run(monkeypatch, "--shape", "3x3", "--dtype", "f32", "--json") == 0  # smaller than any block
    text = capsys.readouterr().out
    assert "Infinity" not in text and json.loads(text)["layers"][0]["sparse_ms"] is None
    file = tmp_path / "model.safetensors"
    rarefy.save_file(network(), file)
    assert run(monkeypatch, str(file), "--tokens", "64", "--threads", "1") == 0
    assert "same and 1 more" in capsys.readouterr().out


def test_command_line_without_layers_says_its_usage(clock: list[Case], monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        run(monkeypatch)
    text = capsys.readouterr().err
    assert left.value.code == 2 and "usage:" in text and "a file or --shape is wanted" in text and not clock


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
