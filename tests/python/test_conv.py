"""sparse_conv2d and BlockSparseConv2d against torch's convolutions on the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import rarefy
from rarefy import BlockSparseConv2d, sparse
from rarefy import conv as layers
from rarefy.sparse import conv as pieces

GEOMETRIES = {
    "1x1": {},
    "1x1 with steps": {"stride": 2},
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3 without zeros": {"kernel_size": 3},
    "3x3 with steps": {"kernel_size": 3, "stride": (2, 1), "padding": (0, 2)},
    "dilated": {"kernel_size": (2, 3), "dilation": (3, 2), "padding": (1, 3), "stride": (1, 3)},
    "5x1": {"kernel_size": (5, 1), "padding": (2, 0)},
}


@pytest.fixture(params=GEOMETRIES.values(), ids=GEOMETRIES.keys())
def geometry(request):
    return {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1} | request.param


@pytest.fixture(params=["one piece", "small pieces"])
def size_of_pieces(request, monkeypatch):
    """Pieces of a row or two, as large images have them."""
    if request.param == "small pieces":
        monkeypatch.setattr(pieces, "_PIECE_BYTES", 1)  # of a GPU; the host's are convolution_test.cc's
        monkeypatch.setattr(pieces, "_LEAST_ROWS", 10)


def whole(*shape: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    return torch.randint(-4, 5, shape).to(device, dtype)


def integers_(module: nn.Module) -> nn.Module:
    """Parameters that make every sum exact."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(whole(*parameter.shape))
    return module


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_sparse_conv2d_is_conv2d(device, geometry, layout, size_of_pieces):
    kh, kw = nn.Conv2d(1, 1, geometry["kernel_size"]).kernel_size
    dense = whole(12, kh * kw * 6)
    weight = rarefy.BsrWeight.from_dense(dense, block_shape=(4, 3), density=0.5).to(device)
    kernel = weight.to_dense().detach().reshape(12, kh, kw, 6).permute(0, 3, 1, 2)
    x, bias = whole(3, 6, 11, 13, device=device), whole(12, device=device)
    options = {name: value for name, value in geometry.items() if name != "kernel_size"}
    want = functional.conv2d(x, kernel, bias, **options).relu()
    given = x if layout == "NCHW" else x.permute(0, 2, 3, 1).contiguous()
    got = sparse.sparse_conv2d(given, weight, bias, layout=layout, activation="relu", **geometry)
    assert torch.equal(got if layout == "NCHW" else got.permute(0, 3, 1, 2), want)


@pytest.mark.parametrize("block", [(8, 16), (8, 1)])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_tvms_own_cases(block, layout):
    """1×32×32×64 with 128 outputs; blocks of one column may come as 2 dimensions."""
    weight = rarefy.BsrWeight.from_dense(torch.randn(128, 64), block_shape=block, density=0.9)
    crow, col = weight.pattern.indices()
    data = weight.values.detach()
    x = torch.randn(1, 32, 32, 64)
    want = x @ weight.to_dense().T
    arrays = (data.flatten(1) if block[1] == 1 else data, col, crow)
    given = x if layout == "NHWC" else x.permute(0, 3, 1, 2).contiguous()
    got = sparse.sparse_conv2d(given, arrays, layout=layout)
    got = got if layout == "NHWC" else got.permute(0, 2, 3, 1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_module_is_its_dense_twin(device, geometry, groups, memory_format):
    conv = integers_(nn.Conv2d(12, 24, groups=groups, **geometry)).to(device)
    layer = BlockSparseConv2d.from_dense(conv, block_shape=(4, 2), density=0.5)
    twin = layer.to_dense()
    kept = (twin.weight != 0) & (twin.weight != conv.weight)
    assert not bool(kept.any())
    assert layer.density == pytest.approx(0.5, abs=0.02)
    x = whole(2, 12, 9, 10, device=device).to(memory_format=memory_format)
    y, want = layer(x), twin(x)
    assert torch.equal(y, want)
    assert y.is_contiguous(memory_format=memory_format)
    assert want.is_contiguous(memory_format=memory_format) and twin.weight.is_contiguous()
    assert torch.equal(layer(x[0]), want[0])


def test_contiguous_images_stay_as_they_lie(monkeypatch):
    """1×1 in float32 without gradients: by channel, in and out; all else goes the other way."""
    taken = []
    by_channel = layers.pointwise_by_channel
    monkeypatch.setattr(layers, "pointwise_by_channel", lambda *a: taken.append(1) or by_channel(*a))
    x = whole(3, 12, 7, 5)
    for stride, bias, block in ((1, True, (4, 1)), (2, False, (4, 1)), (1, True, (1, 1)), (1, False, (3, 4))):
        conv = integers_(nn.Conv2d(12, 24, 1, stride, bias=bias))
        layer = BlockSparseConv2d.from_dense(conv, block_shape=block, density=0.5)
        want = layer.to_dense()(x)
        with torch.no_grad():
            for images, wanted in ((x, want), (x[0], want[0]), (x[1:], want[1:])):
                y = layer(images)
                assert torch.equal(y, wanted) and y.is_contiguous()
                assert taken.pop() and not taken
            for other in (x.to(memory_format=torch.channels_last), x[..., 1:], x[:, :, :3, :5].contiguous()):
                assert torch.equal(layer(other), layer.to_dense()(other))
            assert torch.equal(layer(x[:0]), want[:0])
            assert not taken  # 15 places fill no vector
        assert torch.equal(layer(x), want) and not taken  # gradients are recorded
        assert torch.equal(layer.bfloat16()(x.bfloat16()).float(), want.bfloat16().float()) and not taken


@torch.no_grad()
def test_sparse_conv2d_gives_channels_as_it_got_them():
    x, conv = whole(2, 12, 7, 5), integers_(nn.Conv2d(12, 24, 1))
    weight = rarefy.BsrWeight.from_dense(conv.weight.detach().flatten(1), block_shape=(4, 1))
    want = functional.relu(conv(x)).detach()
    y = sparse.sparse_conv2d(x, weight, conv.bias.detach(), layout="NCHW", activation="relu")
    assert torch.equal(y, want) and y.is_contiguous()
    channels_last = x.to(memory_format=torch.channels_last)
    y = sparse.sparse_conv2d(channels_last, weight, conv.bias.detach(), layout="NCHW", activation="relu")
    assert torch.equal(y, want) and y.is_contiguous(memory_format=torch.channels_last)


def test_from_dense_keeps_the_largest_blocks_of_each_group():
    conv = nn.Conv2d(8, 8, 3, groups=2)
    layer = BlockSparseConv2d.from_dense(conv, block_shape=(2, 4), density=0.25)
    norms = conv.weight.detach().reshape(2, 2, 2, 4, 3, 3).square().sum((2, 3)).flatten()
    stored = layer.to_dense().weight.detach().reshape(2, 2, 2, 4, 3, 3).square().sum((2, 3)).flatten()
    assert torch.equal(stored != 0, norms >= norms.sort(descending=True).values[round(0.25 * 36) - 1])
    everything = BlockSparseConv2d.from_dense(conv, block_shape=(2, 4))
    assert torch.equal(everything.to_dense().weight, conv.weight)


def test_gradients_are_those_of_the_dense_twin(device, geometry, size_of_pieces):
    conv = integers_(nn.Conv2d(6, 8, groups=2, **geometry)).double().to(device)
    layer = BlockSparseConv2d.from_dense(conv, block_shape=(2, 3), density=0.5)
    twin = layer.to_dense()
    x = whole(3, 6, 8, 9, dtype=torch.float64, device=device)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(ours), twin(theirs)
    weights = whole(*want.shape, dtype=torch.float64, device=device)
    (y * weights).sum().backward()
    (want * weights).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(layer.bias.grad, twin.bias.grad)
    dense = layer._matrix(twin.weight.grad)
    blocks = rarefy.BsrWeight.from_dense(dense, block_shape=(2, 3), mask=layer.weight.block_mask()).values
    assert torch.equal(layer.weight.values.grad, blocks)


def test_derivatives_of_any_order(device):
    layer = BlockSparseConv2d(3, 4, 3, padding=1, block_shape=(2, 1), dtype=torch.float64).to(device)
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64, device=device, requires_grad=True)
    values, bias = layer.weight.values, layer.bias

    def call(x, values, bias):
        weight = sparse.SparseMatrix.on_pattern(values, layer.weight.pattern)
        options = {"kernel_size": 3, "padding": 1, "layout": "NCHW"}
        return sparse.sparse_conv2d(x, weight, bias, activation="gelu", **options)

    assert torch.autograd.gradcheck(call, (x, values, bias))
    assert torch.autograd.gradgradcheck(call, (x, values, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_ops_behind(dtype):
    """Schemas and fake kernels."""
    conv = nn.Conv2d(8, 12, (3, 2), padding=1, stride=(2, 1)).to(dtype)
    layer = BlockSparseConv2d.from_dense(conv, block_shape=(4, 2), density=0.5)
    weight, ops, words = layer.weight, torch.ops.rarefy, layer._geometry.words()
    values, plan, shape = weight.values.detach(), weight.pattern.plan, layer.weight.shape
    x = torch.randn(2, 5, 6, 8).to(dtype)
    call = (x, values, plan, layer.bias.detach(), *shape, words, None, None, 0, "relu")
    torch.library.opcheck(ops._conv2d.default, call)
    dy = torch.randn_like(ops._conv2d(*call))
    torch.library.opcheck(ops._conv2d_grad_input.default, (dy, values, plan, *shape, words, 5, 6))
    torch.library.opcheck(ops._conv2d_grad_weight.default, (dy, x, plan, [4, 2], *shape, words))
    with pytest.raises(ValueError, match=r"\[sparse_conv2d\] geometry must be 10 numbers; got 3"):
        ops._conv2d(*call[:6], words[:3])
    with pytest.raises(
        ValueError, match=r"\[sparse_conv2d\] grad_output must be \(2, 3, 7, 12\); got 336 el"
    ):
        ops._conv2d_grad_weight(dy[:, :2], x, plan, [4, 2], *shape, words)
    with pytest.raises(ValueError, match=r"\[sparse_conv2d\] weight must have 42 columns, .*; got 48"):
        ops._conv2d(x[..., :7], *call[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(device, dtype):
    """Pieces of a weight gradient are added up in float32."""
    conv = nn.Conv2d(32, 32, 3, padding=1).to(device, dtype)
    layer = BlockSparseConv2d.from_dense(conv, block_shape=(16, 16), density=0.5)
    twin = copy.deepcopy(layer).double().to_dense()
    x = torch.randn(4, 32, 24, 24, device=device, dtype=dtype)
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    y, want = layer(x), twin(x.double())
    torch.testing.assert_close(y.double(), want, rtol=2 * unit, atol=unit)
    g = torch.randn_like(y)
    y.backward(g)
    want.backward(g.double())
    dense = layer._matrix(twin.weight.grad)
    mask = layer.weight.block_mask()
    blocks = rarefy.BsrWeight.from_dense(dense, block_shape=(16, 16), mask=mask).values
    torch.testing.assert_close(layer.weight.values.grad.double(), blocks, rtol=2 * unit, atol=0.01)


def test_training_and_state(device, tmp_path):
    layer = BlockSparseConv2d(8, 16, 3, padding=1, block_shape=(4, 2), density=0.4).to(device)
    assert layer.weight.pattern.nnzb == round(0.4 * 4 * 36)
    other = BlockSparseConv2d(8, 16, 3, padding=1, block_shape=(4, 2), density=0.4).to(device)
    rarefy.load_state_dict(other, layer.state_dict())
    x = torch.randn(2, 8, 5, 5, device=device)
    assert torch.equal(layer(x), other(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert "kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=True, density=0.4" in repr(layer)


def test_no_windows_as_a_whole():
    """What a forward and a backward allocate beyond images is a piece, not nine images."""
    layer = BlockSparseConv2d(16, 16, 3, padding=1, block_shape=(16, 1), bias=False)
    x = torch.randn(8, 16, 64, 64).to(memory_format=torch.channels_last).requires_grad_()
    largest = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            outs = out if isinstance(out, tuple | list) else (out,)
            own = (o for o in outs if isinstance(o, torch.Tensor) and o._base is None)
            largest.extend(o.untyped_storage().nbytes() for o in own)
            return out

    with Largest():
        layer(x).sum().backward()
    assert max(largest) < 1.2 * x.numel() * 4


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((6, 8, 3), {"groups": 4}, ValueError, "groups must divide 6 and 8 channels; got 4"),
        ((6, 8, 3), {"groups": 2, "block_shape": (3, 3)}, ValueError, "must divide the 4 × 3 channels"),
        ((6, 8, 0), {}, ValueError, r"kernel_size\[0\] must be at least 1"),
        ((6, 8, 3), {"padding": -1}, ValueError, r"padding\[0\] must be at least 0"),
        ((6, 8, 3), {"density": 1.5}, ValueError, r"density must be in \[0, 1\]"),
        ((0, 8, 3), {}, ValueError, "in_channels must be at least 1"),
        ((6, 8, 3), {"padding": "full"}, ValueError, 'must be an int, a pair, "same" or "valid"; got .full'),
        ((6, 8, 3), {"padding": "same", "stride": 2}, ValueError, 'stride must be 1 where padding is "same"'),
        ((6, 8, 3), {"padding_mode": "mirror"}, ValueError, "padding_mode must be one of zeros, reflect"),
        ((6, 8, "3"), {}, TypeError, "kernel_size"),
    ],
)
def test_wrong_sizes(arguments, options, error, text):
    with pytest.raises(error, match=rf"^\[BlockSparseConv2d\] .*{text}"):
        BlockSparseConv2d(*arguments, **({"block_shape": (2, 1)} | options))


def test_wrong_calls():
    layer = BlockSparseConv2d(6, 8, 3, block_shape=(2, 1))
    with pytest.raises(ValueError, match=r"x must be \(B, 6, H, W\) or \(6, H, W\); got \(1, 5, 9, 9\)"):
        layer(torch.randn(1, 5, 9, 9))
    with pytest.raises(ValueError, match=r"x must have at least \(3, 3\) rows and columns.*got \(2, 9\)"):
        layer(torch.randn(1, 6, 2, 9))
    weight = layer.weight
    x = torch.randn(1, 9, 9, 6)
    cases = [
        (lambda: sparse.sparse_conv2d(x, weight), ValueError, "weight must have 6 columns.*got 54 for 6"),
        (lambda: sparse.sparse_conv2d(x, weight, layout="HWIO"), ValueError, 'layout must be "NHWC"'),
        (lambda: sparse.sparse_conv2d(x.double(), weight, kernel_size=3), TypeError, "dtype of data"),
        (lambda: sparse.sparse_conv2d(x[0], weight, kernel_size=3), ValueError, "x must have 4 dimensions"),
        (
            lambda: sparse.sparse_conv2d(x.int(), weight, kernel_size=3),
            TypeError,
            "x must be of a floating-point dtype; got torch.int32",
        ),
        (lambda: BlockSparseConv2d.from_dense(nn.Linear(2, 2), block_shape=(1, 1)), TypeError, "nn.Conv2d"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    options = {"kernel_size": 3, "padding": "same"}
    with pytest.raises(ValueError, match='stride must be 1 where padding is "same"'):
        sparse.sparse_conv2d(x, weight, stride=2, **options)
    with pytest.raises(ValueError, match=r"\[sparse_conv2d\] bias must have shape \(8,\); got \(3,\)"):
        sparse.sparse_conv2d(x, weight, torch.ones(3), **options)
    with pytest.raises(
        ValueError, match=r"load_state_dict\] weight must be block-sparse.*got a dense tensor"
    ):
        layer.load_state_dict(nn.Conv2d(6, 8, 3).state_dict())
    grouped, mask = nn.Conv2d(4, 4, 1, groups=2), torch.ones(4, 4)
    with pytest.raises(ValueError, match="mask must keep nothing outside of the groups; got 8 blocks"):
        BlockSparseConv2d.from_dense(grouped, block_shape=(1, 1), mask=mask)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("train", [False, True])
def test_layers_compile_and_export_whole(kernel, train):
    torch.manual_seed(0)
    layer = BlockSparseConv2d(8, 16, kernel, padding=kernel // 2, stride=2, block_shape=(8, 1)).train(train)
    x = torch.randn(2, 8, 9, 7)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (layer, compiled):
        layer.zero_grad()
        with torch.set_grad_enabled(train):
            y = call(x)
        if train:
            y.square().sum().backward()
            gradients.append([p.grad for p in layer.parameters()])
        torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)
    if train:
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
        return
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-5, atol=1e-5)


# -- in sparsify, files and reports -----------------------------------------------------------------
