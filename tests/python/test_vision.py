"""Networks of torchvision with random weights: sparse convolutions, forward, backward and in files."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn

import rarefy


def network(name: str) -> tuple[nn.Module, dict[str, str]]:
    """A small one, and what becomes sparse."""
    torch.manual_seed(0)
    if name == "mobilenet":
        model = torchvision.models.mobilenet_v2(width_mult=0.25, num_classes=10)
        return model, {r"features\..*": "block:4x1@0.6", "classifier.*": "block:2x1@0.5"}
    model = torchvision.models.resnet18(num_classes=12)
    return model, {r"layer[12]\..*": "block:8x1@0.3", "fc": "block:4x1@0.5"}


@pytest.mark.parametrize("name", ["mobilenet", "resnet"])
def test_networks_equal_their_dense_twins(name, tmp_path):
    model, patterns = network(name)
    dense = copy.deepcopy(model).state_dict()
    report = rarefy.sparsify(model, patterns, measure=False)
    kinds = [type(m) for m in model.modules()]
    assert kinds.count(rarefy.BlockSparseConv2d) >= (30 if name == "mobilenet" else 8)
    reasons = {row.reason for row in report.rows}
    if name == "mobilenet":  # its convolutions by channel
        assert "block_shape must divide the 1 × 1 channels of a group" in reasons
    twin = copy.deepcopy(model)
    rarefy.desparsify(twin)
    state = twin.state_dict()
    for key, tensor in state.items():
        assert torch.equal(tensor, torch.where(tensor != 0, dense[key], tensor)), key

    x = torch.randn(2, 3, 64, 48).to(memory_format=torch.channels_last)
    for training in (False, True):
        outputs = []
        for network_ in (model, twin):
            network_.train(training).zero_grad()
            torch.manual_seed(1)  # of the dropout
            y = network_(x)
            y.square().sum().backward()
            outputs.append(y)
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
    found, wanted = dict(model.named_parameters()), dict(twin.named_parameters())
    first = next(
        name for name, module in model.named_modules() if isinstance(module, rarefy.BlockSparseConv2d)
    )
    layer = model.get_submodule(first)
    gradient = layer._matrix(wanted[f"{first}.weight"].grad)
    weight = rarefy.BsrWeight.from_dense(
        gradient, block_shape=layer.block_shape, mask=layer.weight.pattern.mask()
    )
    scale = weight.values.abs().max().item()
    torch.testing.assert_close(
        found[f"{first}.weight.values"].grad, weight.values.detach(), rtol=1e-2, atol=1e-3 * scale
    )

    rarefy.save_file(model, tmp_path / "model.safetensors")
    other = network(name)[0]
    rarefy.load_file(other, tmp_path / "model.safetensors")
    assert torch.equal(other.eval()(x), model.eval()(x))
