"""Pruning wherever the weights are: the same masks as on the CPU, and results on the weights' device."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

import rarefy
from rarefy.compat import nn_prune, torch_ao_pruning, torchao_sparsity
from rarefy.prune import (
    SET,
    Elimination,
    MagnitudeRegrow,
    Moments,
    RigL,
    Sparsifier,
    SRigL,
    TopKAST,
    factorize,
    reconstruct,
    reconstruct_layer,
    sensitivity,
    shrink,
    sparse_start,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()


def inputs(device: str, tokens: int = 200) -> torch.Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).to(device)


def both(device: str) -> tuple[nn.Sequential, nn.Sequential]:
    return net(), net().to(device)


@pytest.mark.parametrize(
    "criterion", ["magnitude", "random", "wanda", "hessian", "fisher", "block_fisher", "movement", "snip"]
)
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "block:8x4"])
def test_masks_are_those_of_the_cpu(criterion, pattern, device):
    found = []
    for model in both(device):
        here = next(model.parameters()).device
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sparsifier = Sparsifier(0.5, criterion, pattern)
        sparsifier.prepare(model)
        sparsifier.attach(optimizer)
        sparsifier.calibrate([inputs(here)])
        model(inputs(here)).square().mean().backward()
        optimizer.step()
        sparsifier.step()
        sparsifier.squash_mask()
        assert all(p.device == here for p in model.parameters())
        found.append([(model[i].weight != 0).cpu() for i in (0, 2)])
    for mine, theirs in zip(*found, strict=True):
        assert int(mine.sum()) == int(theirs.sum())
        # Sums on another device differ in the last place, so neighbours at the border may change places.
        assert float((mine != theirs).double().mean()) <= (
            0.0 if criterion in ("magnitude", "random") else 0.02
        )


def test_what_was_observed_goes_on_where_the_weights_are(device):
    """A state_dict that was loaded on the CPU."""
    model, found = net().to(device), []
    for stops in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sparsifier = Sparsifier(0.5, "fisher", in_place=True, schedule="periodic:2:3:1")
        sparsifier.prepare(copy.deepcopy(model))
        sparsifier.attach(optimizer)
        for step in range(3):
            sparsifier._model.zero_grad()
            sparsifier._model(inputs(device)[step:]).square().mean().backward()
            sparsifier.observe()
            assert sparsifier.state["0.weight"]["gradient"].device.type == torch.device(device).type
            if stops and step == 1:
                file = io.BytesIO()
                torch.save(sparsifier.state_dict(), file)
                file.seek(0)
                other = Sparsifier(0.5, "fisher", in_place=True, schedule="periodic:2:3:1")
                other.prepare(sparsifier._model)
                other.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
                sparsifier = other
            sparsifier.step()
        found.append(sparsifier.masks()["0.weight"])
    assert torch.equal(*found) and int(found[0].sum()) == 64 * 96 // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_of_four_is_stored(dtype, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)).to(device, dtype)
    torchao_sparsity.apply_fake_sparsity(model)
    sparsifier = Sparsifier(pattern="2:4", in_place=True)
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    x = torch.randn(64, 128, device=device, dtype=dtype)
    want, fast = model(x), sparsifier.convert(model, measure=False)
    assert [fast[i].weight.spec_format() for i in (0, 2)] == ["2:4", "2:4"]
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(fast(x), want, **close)
    if device == "cuda" and dtype == torch.float32:
        with pytest.warns(UserWarning, match="stay dense"):
            torchao_sparsity.sparsify_(model, torchao_sparsity.SemiSparseWeightConfig())
    else:
        torchao_sparsity.sparsify_(model, torchao_sparsity.SemiSparseWeightConfig())
        assert type(model[0].weight) is not nn.Parameter
    torch.testing.assert_close(model(x), want, **close)


def test_nothing_comes_back_in_training(device):
    model = net().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    sparsifier = Sparsifier(0.75, "magnitude", "block:8x4", schedule="cubic:2:10:2", in_place=True)
    sparsifier.prepare(model)
    sparsifier.attach(optimizer)
    for _ in range(30):
        optimizer.zero_grad()
        model(inputs(device)).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    for i in (0, 2):
        blocks = rarefy.masks.to_blocks(model[i].weight != 0, (8, 4)).flatten(2).any(2)
        assert int((~blocks).sum()) == round(0.75 * blocks.numel())
    sparsifier.squash_mask()
    fast = sparsifier.convert(model)
    torch.testing.assert_close(fast(inputs(device)), model(inputs(device)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("pattern", "method"),
    [("2:4", "sparsegpt"), ("block:16x1", "obs"), ("row_balanced:16x1", "obs"), ("unstructured", "wanda")],
)
def test_reconstruction(pattern, method, device):
    errors = []
    for model in both(device):
        here = next(model.parameters()).device
        dense = copy.deepcopy(model)
        result = reconstruct(model, [inputs(here)], pattern, 0.5, method)
        assert all(p.device == here for p in model.parameters())
        assert [m.kept for m in result.masks.values()] == [64 * 96 // 2, 96 * 32 // 2]
        with torch.no_grad():
            errors.append(float((model(inputs(here)) - dense(inputs(here))).norm()))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def test_layers_fitted_to_what_is_wanted(device):
    x, layer = inputs(device), net()[0].to(device)
    moments = Moments(64, 96)
    moments.add(x, layer(x) + 1)
    before = layer.weight.detach().clone()
    mask = reconstruct_layer(layer, moments, "block:16x1", 0.5, int8=True)
    assert layer.weight.device == x.device and not (layer.weight.cpu()[~mask.unpack()] != 0).any()
    assert float((layer(x) - functional.linear(x, before, layer.bias)).detach().mean().abs()) < 0.1
    weight, _ = Elimination(before, (x.T @ x), "block:16x1").prune(0.5)
    assert weight.device == x.device and weight.dtype == torch.float32


METHODS = {
    "set": SET,
    "rigl": RigL,
    "rigl of candidates": lambda *a, **k: RigL(*a, candidates=1.0, **k),
    "srigl": SRigL,
    "magnitude": MagnitudeRegrow,
    "top_kast": lambda model, optimizer, every, end: TopKAST(
        model, optimizer, every=every, forward=0.5, end=end
    ),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("form", ["block:8x4", "block:16x16"])
def test_patterns_move_where_the_layers_are(name, form, device):
    model = net().to(device)
    sparse_start(model, form, 0.5, layers=["0", "2"])
    x, target = inputs(device), net()(inputs("cpu")).detach().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moving = METHODS[name](model, optimizer, every=3, end=30)
    before = [model[i].weight.nnzb for i in (0, 2)]
    values = [model[i].weight.values for i in (0, 2)]
    losses = []
    for _ in range(36):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        moving.step()
        losses.append(float(loss))
    assert [model[i].weight.nnzb for i in (0, 2)] == before
    assert all(
        model[i].weight.values is v and v.device == x.device for i, v in zip((0, 2), values, strict=True)
    )
    assert losses[-1] < 0.6 * losses[0]
    if name != "top_kast":
        assert all(move.grown > 0 for move in moving.report())


def test_sensitivity_shrink_and_factorize(device):
    model, x = net().to(device), inputs(device)
    with torch.no_grad():
        want = model(x)
    report = sensitivity(
        model, lambda m: (m(x) - want).square().mean().item(), "block:8x4", (0.5,), time=False
    )
    assert torch.equal(model(x), want) and all(point.loss > 0 for point in report if point.sparsity)
    thin = copy.deepcopy(model)
    factorize(thin, ratio=0.5, data=[x])
    assert thin(x).device == x.device
    shrink(model, 0.25)
    assert model(x).shape == want.shape and model[0].out_features == 72


def test_compat_layers_take_weights_anywhere(device):
    masks = []
    for model in both(device):
        nn_prune.l1_unstructured(model[0], "weight", 0.5)
        nn_prune.LnStructured.apply(model[2], "weight", 3, 2, 0)
        masks.append([(model[i].weight != 0).cpu() for i in (0, 2)])
        other = net().to(next(model.parameters()).device)
        sparsifier = torch_ao_pruning.WeightNormSparsifier(0.5, (1, 4), 4)
        sparsifier.prepare(other, None)
        sparsifier.step()
        masks[-1] += [(other[i].weight != 0).cpu() for i in (0, 2)]
    assert all(map(torch.equal, *masks))
    model = net().to(device)
    torchao_sparsity.sparsify_(model, torchao_sparsity.BlockSparseWeightConfig(blocksize=32))
    assert model(inputs(device)).device.type == device
