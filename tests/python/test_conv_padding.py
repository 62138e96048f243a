"""What is around the images of a sparse convolution, and autocast: as nn.Conv2d has both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BlockSparseConv2d, sparse
from test_conv import integers_, whole


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    ("padding", "kernel", "dilation"),
    [("same", 3, 1), ("same", (4, 2), (1, 3)), ("valid", 3, 2), ("same", 1, 1), ((2, 1), 3, 1)],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_padding_in_words_and_of_other_kinds(device, mode, padding, kernel, dilation, memory_format):
    """Even kernels have one more row or column below and right, as torch has it."""
    options = {"padding": padding, "dilation": dilation, "padding_mode": mode}
    conv = integers_(nn.Conv2d(6, 8, kernel, **options)).to(device)
    layer = BlockSparseConv2d.from_dense(conv, block_shape=(4, 2), density=0.5)
    twin = layer.to_dense()
    assert (twin.padding, twin.padding_mode) == (conv.padding, mode)
    x = whole(2, 6, 9, 10, device=device).to(memory_format=memory_format)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(ours), twin(theirs)
    assert torch.equal(y, want)
    assert torch.equal(layer(x[0]), want[0])
    dy = whole(*want.shape, device=device)
    y.backward(dy)
    want.backward(dy)
    assert torch.equal(ours.grad, theirs.grad)
    dense = layer._matrix(twin.weight.grad)
    blocks = rarefy.BsrWeight.from_dense(dense, block_shape=(4, 2), mask=layer.weight.block_mask()).values
    assert torch.equal(layer.weight.values.grad, blocks)
    made = BlockSparseConv2d(6, 8, kernel, 1, padding, dilation, 1, True, mode, block_shape=(4, 2)).to(device)
    assert made(x).shape == want.shape
    if mode == "zeros":
        given = x.permute(0, 2, 3, 1)
        sizes = {"kernel_size": kernel, "padding": padding, "dilation": dilation}
        places = sparse.sparse_conv2d(given, layer.weight, layer.bias, **sizes)
        assert torch.equal(places.permute(0, 3, 1, 2), want)


@pytest.mark.parametrize("kernel", [1, 3])
def test_autocast_gives_its_dtype(device, kernel):
    """As nn.Conv2d does: y in bfloat16, gradients in the dtype of parameters and x."""
    kind = torch.device(device).type
    layer = BlockSparseConv2d(16, 32, kernel, padding=kernel // 2, block_shape=(16, 1)).to(device)
    x = torch.randn(2, 16, 6, 6, device=device, requires_grad=True)
    with torch.autocast(kind, dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == layer.to_dense()(x).dtype == torch.bfloat16
    twin = copy.deepcopy(layer).bfloat16()
    rounded = x.detach().bfloat16().requires_grad_()
    want = twin(rounded)
    assert torch.equal(y, want)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (want_dx,) = torch.autograd.grad(want.sum(), rounded)
    assert dx.dtype == torch.float32
    assert torch.equal(dx, want_dx.float())
