"""GraNet: patterns that move and get sparser on the way, against a masked dense oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from moving_oracle import OPTIMIZERS, Oracle, best, block_norms, data, layer_of, mask_at
from rarefy.prune import GraNet


@pytest.mark.parametrize(("optimizer_type", "options"), OPTIMIZERS)
@pytest.mark.parametrize("form", ["block:4x3", "csr"])
def test_granet_is_its_oracle_and_ends_with_exactly_so_many(form, optimizer_type, options):
    layer = layer_of(form, 0.6)
    oracle, optimizer = Oracle(layer, optimizer_type, options), optimizer_type(layer.parameters(), **options)
    moving = GraNet(nn.Sequential(layer), optimizer, final=0.25, fraction=0.3, every=4, begin=2, end=15)
    values, first = layer.weight.values, layer.weight.nnzb
    for step in range(1, 21):
        x, target = data(step)
        optimizer.zero_grad()
        functional.mse_loss(layer(x), target).backward()
        optimizer.step()
        moves, whole = moving.step(), oracle.step(x, target)
        assert bool(moves) == (step in (4, 8, 12, 15))
        if moves:
            last = round(0.25 * first)
            count = last + round((first - last) * (1 - (step - 2) / 13) ** 3)
            norms = block_norms(oracle.linear.weight.detach(), oracle.block)
            kept = mask_at(best(norms, oracle.mask, count - round(0.3 * count)), oracle.mask)
            grown = best(block_norms(whole, oracle.block), ~kept, round(0.3 * count))
            new = kept | mask_at(grown, kept)
            old, oracle.mask = oracle.elements(), new
            with torch.no_grad():
                oracle.linear.weight *= old & oracle.elements()
                for state in oracle.optimizer.state[oracle.linear.weight].values():
                    if state.shape == oracle.linear.weight.shape:
                        state *= old & oracle.elements()
        assert torch.equal(layer.weight.block_mask(), oracle.mask), f"step {step}"
        torch.testing.assert_close(layer.weight.to_dense(), oracle.linear.weight, rtol=1e-9, atol=1e-12)
    assert layer.weight.nnzb == round(0.25 * first) and layer.weight.values is values
    assert moves == [] and moving.report()[0].nnzb == layer.weight.nnzb


def test_granet_gets_sparser_where_nothing_grows_too():
    layer = layer_of("block:4x3", 0.5)
    before, moving = (
        layer.weight.block_mask(),
        GraNet(nn.Sequential(layer), final=0.5, fraction=0.0, every=1, end=1),
    )
    functional.mse_loss(layer(data(1)[0]), data(1)[1]).backward()
    (move,) = moving.step()
    assert move.grown == 0 and move.nnzb == round(0.5 * int(before.sum()))
    assert bool((before | ~layer.weight.block_mask()).all())
    with pytest.raises(ValueError, match="end must be given"):
        GraNet(nn.Sequential(layer), final=0.5, fraction=0.3)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        GraNet(nn.Sequential(layer), final=1.5, fraction=0.3, end=4)
