"""Masks become sparse layers: Sparsifier.convert for every pattern, format and kind of layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rarefy
from prune_models import Net, batch, squashed
from rarefy.prune import Sparsifier


@pytest.mark.parametrize(
    ("pattern", "stored"),
    [("block:4x2", "block:4x2"), ("unstructured", "csr"), ("row_balanced:2x2", "block:2x2")],
)
def test_masks_become_sparse_layers(pattern, stored):
    model = Net()
    sparsifier = Sparsifier(0.6, pattern=pattern)
    sparsifier.prepare(model)
    sparsifier.step()
    with pytest.raises(ValueError, match=r"squash_mask\(\) must be called first"):
        sparsifier.convert(model)
    sparsifier.squash_mask()
    fast = sparsifier.convert(model, measure=False)
    assert isinstance(fast.up, rarefy.BlockSparseLinear)
    assert isinstance(model.up, nn.Linear)
    assert fast.up.weight.spec_format() == stored
    assert torch.equal(fast.up.weight.to_dense(), model.up.weight)
    torch.testing.assert_close(fast(batch()), model(batch()))
    mask = sparsifier.masks()["up.weight"]
    blocks = (
        rarefy.masks.to_blocks(mask, (1, 1) if stored == "csr" else (int(stored[6]), 2)).flatten(2).any(2)
    )
    assert fast.up.weight.density == pytest.approx(float(blocks.float().mean()))
    assert len(sparsifier.conversion.replaced) == 2


@pytest.mark.parametrize(
    ("pattern", "sparsity", "stored"),
    [("2:4", None, "2:4"), ("2:4", 0.2, "bitmap"), ("1:4", None, "bitmap"), ("4:8", None, "bitmap")],
)
@pytest.mark.parametrize("width", [40, 38, 37])
def test_n_of_m_becomes_a_bit_for_each_weight(pattern, sparsity, stored, width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 8))
    sparsifier = squashed(model, sparsity, pattern=pattern)
    fast = sparsifier.convert(model, measure=False)
    rows = {row.name: row.format for row in sparsifier.conversion.replaced}
    assert rows == {"0": stored, "2": stored}
    for i in (0, 2):
        assert type(fast[i].weight) is rarefy.BitmapWeight
        assert fast[i].weight.nnz == int(sparsifier.masks()[f"{i}.weight"].sum())
        assert torch.equal(fast[i].weight.to_dense(), model[i].weight)
    assert fast[2].weight.spec_format() == stored
    x = torch.randn(3, width)
    torch.testing.assert_close(fast(x), model(x))


def test_formats_that_convert_is_asked_for():
    model = Net()
    sparsifier = squashed(model, 0.6)
    bits = sparsifier.convert(model, format="bitmap", measure=False)
    assert type(bits.up.weight) is rarefy.BitmapWeight
    assert torch.equal(bits.up.weight.to_dense(), model.up.weight)
    with pytest.raises(ValueError, match="at most two of each four"):
        sparsifier.convert(model, format="2:4")
    with pytest.raises(ValueError, match='must be "csr", "bitmap", "2:4" or "block:RxC"'):
        sparsifier.convert(model, format="blocks")
    sixteenth = Net()
    sparsifier = squashed(sixteenth, pattern="1:16")
    two = sparsifier.convert(sixteenth, format="2:4", measure=False)
    assert torch.equal(two.up.weight.to_dense(), sixteenth.up.weight)


def test_attention_and_convolutions_are_converted():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(16, 2, batch_first=True),
            "conv": nn.Conv2d(4, 16, 3),
            "grouped": nn.Conv2d(16, 16, 3, groups=2),
            "point": nn.Conv2d(16, 8, 1),
        }
    ).eval()
    sparsifier = squashed(model, 0.5, pattern="block:4x1")
    fast = sparsifier.convert(model, measure=False)
    names = ["attention.in_proj", "attention.out_proj", "conv", "grouped", "point"]
    assert sorted(row.name for row in sparsifier.conversion.replaced) == names
    assert all(0.4 < row.density <= 0.5 for row in sparsifier.conversion.replaced if row.name != "grouped")
    x, images = torch.randn(2, 5, 16), torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(fast["attention"](x, x, x)[0], model["attention"](x, x, x)[0])
    given, wanted = images, images
    for name in ("conv", "grouped", "point"):
        given, wanted = fast[name](given), model[name](wanted)
    torch.testing.assert_close(given, wanted)

    squares = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1))
    sparsifier = squashed(squares, 0.5, pattern="block:4x4")
    sparsifier.convert(squares, measure=False)
    assert [row.name for row in sparsifier.conversion.replaced] == ["1"]  # the other's would be more
    whole = sparsifier.convert(squares, format="block:4x1", measure=False)
    x = torch.randn(1, 8, 6, 6)
    torch.testing.assert_close(whole(x), squares(x))
    assert len(sparsifier.conversion.replaced) == 2


def test_convert_as_in_torch_ao():
    model = nn.Sequential(nn.Linear(8, 8))
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()

    class Twice(nn.Module):
        @classmethod
        def from_dense(cls, linear):
            twice = cls()
            twice.weight = nn.Parameter(linear.weight * 2)
            return twice

    assert torch.equal(sparsifier.convert(model, {nn.Linear: Twice})[0].weight, model[0].weight * 2)
    with pytest.raises(ValueError, match="a pattern that a format stores"):
        columns = Sparsifier(0.5, pattern="column")
        columns.prepare(model)
        columns.squash_mask()
        columns.convert(model)
