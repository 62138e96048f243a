"""Sparse convolutions in whole models: sparsify, files, reports, and what stays dense."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BlockSparseConv2d


class Residual(nn.Module):
    """A block as ResNets have it, one with groups, and a classifier."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.down = nn.Conv2d(8, 16, 1, stride=2)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        y = self.conv2(self.bn(self.conv1(x)).relu()) + self.down(x)
        return self.head(y.relu().mean((2, 3)))


PATTERNS = {r"conv\d": "block:8x1@0.3", "down": "block:4x4@0.5", "head": "block:4x1@0.5"}


def residual():
    torch.manual_seed(0)
    return Residual().eval()


def test_sparsify_makes_convolutions_sparse_and_desparsify_gives_them_back():
    model, x = residual(), torch.randn(3, 8, 12, 10)
    biases = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
    report = rarefy.sparsify(model, PATTERNS, tokens=16)
    rows = {row.name: row for row in report.rows}
    assert rows["conv1"].format == "block:8x1"
    assert rows["conv1"].shape == (16, 72)
    assert rows["conv2"].density == pytest.approx(0.3, abs=0.01)  # of the blocks within the groups
    assert rows["conv1"].dense_bytes == 16 * 8 * 9 * 4
    assert all(row.times is not None for row in report.rows if row.reason is None)
    assert "Convolutions were timed on channels_last images" in report.summary()
    assert isinstance(model.conv2, rarefy.BlockSparseConv2d)
    assert all(biases[name] is p for name, p in model.named_parameters() if name in biases)
    y = model(x)
    assert sorted(rarefy.desparsify(model)) == ["conv1", "conv2", "down", "head"]
    assert type(model.conv2) is nn.Conv2d
    assert model.conv2.groups == 2
    assert (model.conv1.weight == 0).float().mean() == pytest.approx(0.7, abs=0.01)
    torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_files_and_state_dicts_with_convolutions(tmp_path, dense, state):
    model, x = residual(), torch.randn(3, 8, 12, 10)
    rarefy.sparsify(model, PATTERNS, measure=False)
    other = Residual().eval()
    if not dense:
        rarefy.sparsify(other, {r"conv\d|down": "block:8x1@0.9"}, measure=False)
    if state:
        rarefy.load_state_dict(other, model.state_dict())
    else:
        rarefy.save_file(model, tmp_path / "model.safetensors")
        rarefy.load_file(other, tmp_path / "model.safetensors")
    assert isinstance(other.conv2, rarefy.BlockSparseConv2d)
    assert other.conv2.weight.pattern == model.conv2.weight.pattern
    assert torch.equal(other(x), model(x))


def test_a_file_cannot_put_blocks_outside_of_groups():
    wide = Residual()
    wide.conv2 = nn.Conv2d(16, 16, 3, padding=1)
    rarefy.sparsify(wide, {"conv2": "block:8x1@0.9"}, measure=False)
    for spec in (None, "block:8x1@0.9"):
        other = residual()
        if spec is not None:
            rarefy.sparsify(other, {"conv2": spec}, measure=False)
        before = {k: v.clone() for k, v in other.state_dict().items()}
        with pytest.raises(ValueError, match="outside of the groups"):
            rarefy.load_state_dict(other, wide.state_dict())
        assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())


def test_sparser_again_with_the_optimizer():
    model = residual()
    rarefy.sparsify(model, {"conv2": "block:4x2@0.8", "conv1": "block:8x1@0.5"}, measure=False)
    values, optimizer = model.conv2.weight.values, torch.optim.Adam(model.parameters())
    model(torch.randn(2, 8, 12, 10)).sum().backward()
    optimizer.step()
    rarefy.sparsify(model, {"conv2": "block:4x2@0.4"}, measure=False, optimizer=optimizer)
    assert model.conv2.weight.values is values
    assert model.conv2.density == pytest.approx(0.4, abs=0.02)
    assert optimizer.state[values]["exp_avg"].shape == values.shape
    rarefy.sparsify(model, {"conv1": "block:4x1@0.3"}, measure=False)
    assert model.conv1.weight.block_shape == (4, 1)
    assert model(torch.randn(2, 8, 12, 10)).isfinite().all()


def test_scores_and_values_of_convolutions():
    model = residual()
    scores = torch.zeros_like(model.conv1.weight)
    scores[8:, 3] = 1
    rarefy.sparsify(model, {"conv1": "block:8x1@nonzero"}, measure=False)
    assert model.conv1.density == 1
    model = residual()
    rarefy.sparsify(model, {"conv1": "block:8x1@0.0625:bf16"}, scores={"conv1": scores}, measure=False)
    kept = model.conv1.to_dense().weight.detach() != 0
    assert torch.equal(kept, scores != 0)
    assert model.conv1.weight.values.dtype == torch.bfloat16
    assert model(torch.randn(2, 8, 12, 10)).dtype == torch.float32


def test_convolutions_that_stay_say_why():
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)), nn.Conv1d(8, 8, 3),
    )  # fmt: skip
    report = rarefy.sparsify(model, "block:4x1@0.5", measure=False)
    reasons = {row.name: row.reason for row in report.rows}
    assert reasons["0"] is reasons["1"] is None
    assert "parametrized" in reasons["2"]
    assert "3" not in reasons
    for spec, kept in (("csr@0.1", "csr@0.1"), ("block:4x4@0.5:int8", "int8")):
        model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Linear(8, 8))
        report = rarefy.sparsify(model, spec, measure=False)
        assert report.rows[0].reason.startswith("a convolution takes block:ROWSxCOLUMNS@DENSITY, not ")
        assert kept in report.rows[0].reason
    depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1))
    report = rarefy.sparsify(depthwise, "block:4x1@0.5", measure=False)
    assert report.rows[0].reason == "block_shape must divide the 1 × 1 channels of a group"
    assert isinstance(depthwise[1], rarefy.BlockSparseConv2d)


def test_from_dense_and_from_weight_refuse_what_convolutions_have_not():
    conv = residual().conv2
    for spec in ("csr@0.1", "block:8x1@0.5:int8"):
        with pytest.raises(ValueError, match="must be blocks"):
            BlockSparseConv2d.from_dense(conv, spec)
    with pytest.raises(ValueError, match="excludes block_shape"):
        BlockSparseConv2d.from_dense(conv, "block:8x1@0.5", density=0.5)
    with pytest.raises(TypeError, match="block_shape or a spec"):
        BlockSparseConv2d.from_dense(conv)
    with pytest.raises(ValueError, match="must divide the 8 × 8 channels"):
        BlockSparseConv2d.from_dense(conv, "block:3x1@0.5")
    weight = BlockSparseConv2d.from_dense(conv, "block:8x1@0.5").weight
    assert torch.equal(BlockSparseConv2d.from_weight(weight, conv).bias, conv.bias)
    with pytest.raises(ValueError, match=r"must be of shape \(16, 72\)"):
        BlockSparseConv2d.from_weight(weight, residual().conv1)
    csr = rarefy.BlockSparseLinear.from_dense(nn.Linear(144, 16), "csr@0.1").weight
    with pytest.raises(ValueError, match="must be of format bsr"):
        BlockSparseConv2d.from_weight(csr, conv)


def test_only_convolutions_of_single_places_let_x_be_rounded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 16, 1, padding=1))
    dense = copy.deepcopy(model[0])
    report = rarefy.sparsify(model, "block:16x1@0.5:bf16x", measure=False)
    reason = "x may be rounded (:bf16x) before convolutions of 1×1 without padding alone"
    assert [row.reason for row in report.rows] == [None, reason, reason]
    assert model[0].weight.rounds_x
    x = torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last)
    linear = rarefy.BlockSparseLinear.from_weight(model[0].weight, model[0].bias)
    assert torch.equal(model[0](x), linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
    assert not BlockSparseConv2d.from_dense(dense, "block:16x1@0.5:bf16").weight.rounds_x
    with pytest.raises(ValueError, match=r"x may be rounded \(:bf16x\)"):
        BlockSparseConv2d.from_dense(model[1], "block:16x1@0.5:bf16x")
