"""BlockSparseConv2d on random sizes, groups and strides of images, exact on integers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BlockSparseConv2d
from test_conv import integers_, whole


def images_as(how: str, b: int, c: int, h: int, w: int) -> torch.Tensor:
    """Integers, (b, c, h, w), that lie in memory as images do, or as views of something else do."""
    if how == "by step":
        return whole(b, 2 * c, 2 * h, w + 3)[:, ::2, ::2, 2 : w + 2]
    if how == "permuted":
        return whole(w, b, h, c).permute(1, 3, 2, 0)
    if how == "expanded":
        return whole(1, c, h, 1).expand(b, c, h, w)
    return whole(b, c, h, w).contiguous(memory_format=getattr(torch, how))


@pytest.mark.parametrize("seed", range(40))
def test_random_convolutions_and_images_are_those_of_the_dense_twin(device, seed):
    """Kernels, steps, zeros, dilations, groups, densities and strides of x that no list names together."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    g, into, out = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4, 8])
    kernel, step = draw.choice([1, (3, 3), (2, 3), (1, 5)]), draw.choice([1, 2, (3, 1)])
    pad, dilation = draw.choice([0, 1, (2, 0), (0, 3)]), draw.choice([1, (2, 1), (2, 3)])
    conv = integers_(nn.Conv2d(g * into, g * out, kernel, step, pad, dilation, g, bias=draw.random() < 0.5))
    block = (draw.choice([r for r in (1, 4, 8) if out % r == 0]), draw.choice([1, into]))
    density = draw.choice([0.0, 0.3, 1.0])
    layer = BlockSparseConv2d.from_dense(conv.to(device), block_shape=block, density=density)
    twin = layer.to_dense()
    how = draw.choice(["contiguous_format", "channels_last", "by step", "permuted", "expanded"])
    x = images_as(how, draw.choice([0, 1, 3]), g * into, draw.randint(7, 12), draw.randint(13, 16)).to(device)
    ours, theirs = x.detach().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(ours), twin(theirs)
    dy = whole(*want.shape, device=device)
    y.backward(dy)
    want.backward(dy)
    assert torch.equal(y, want)
    assert torch.equal(ours.grad, theirs.grad)
    assert layer.bias is None or torch.equal(layer.bias.grad, twin.bias.grad)
    blocks = layer.weight.block_mask()
    dense = BlockSparseConv2d.from_dense(twin, block_shape=block)._matrix(twin.weight.grad)
    stored = rarefy.BsrWeight.from_dense(dense, block_shape=block, mask=blocks).values
    assert torch.equal(layer.weight.values.grad, stored)
