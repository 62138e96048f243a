"""Pruning while a model trains: tied weights, attention, hidden originals, optimizers; straight-through."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from prune_models import Net, batch
from rarefy.prune import Sparsifier
from tiny import Tiny, ids


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
