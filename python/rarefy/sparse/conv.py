"""Convolutions with a sparse weight: products of windows, some rows of output at a time.

The weight is a matrix (O, KH · KW · C), columns in the order (kernel row, kernel column, channel). A piece of
the output is `windows · Wᵀ`; pieces are small, so windows stay in cache and are never there as a whole, in
training neither. The three functions are each other's derivatives, as the three products of a layer are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _load, ops
from .._torch_private import in_autocast
from ..activations import NONE, activate, check_activation
from ..checks import check_int, check_pair, fail
from ..op_rules import autocast_to, meets_nothing, register_fake
from ..pattern import BsrPattern
from .arrays import FLOATS, as_tensor
from .groups import whole_matrix, why_not_in
from .kinds import as_matrix
from .matrix import SparseMatrix
from .products import checked_bias, product_in_place

_conv2d, _conv2d_grad_input, _conv2d_grad_weight = map(
    _load.op, ("_conv2d", "_conv2d_grad_input", "_conv2d_grad_weight")
)
_PIECE_BYTES = 256 << 20  # windows of a piece that fills a GPU
_LEAST_ROWS = 256  # of a product, so that its weights are worth reading


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution: all but images, and output size, follow from them."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]  # above and below, left and right
    dilation: tuple[int, int]

    def output(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the result for an input of rows and columns."""
        return tuple(
            (s + sum(p) - d * (k - 1) - 1) // t + 1
            for s, k, t, p, d in zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    def input(self, size: tuple[int, int]) -> tuple[int, int]:
        """The least rows and columns, 1 or more, of an input whose result has `size`."""
        return tuple(
            max(1, (s - 1) * t + d * (k - 1) + 1 - sum(p))
            for s, k, t, p, d in zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    def words(self) -> list[int]:
        """What the core's ops take: kernel, stride, dilation, and zeros above, below, left and right."""
        (above, below), (left, right) = self.padding
        return [*self.kernel, *self.stride, *self.dilation, above, below, left, right]

    @property
    def is_padded(self) -> bool:
        """Whether there is anything around the images."""
        return self.padding != ((0, 0), (0, 0))

    @property
    def is_pointwise(self) -> bool:
        """Whether a window is one place."""
        return self.kernel == (1, 1) and not self.is_padded

    def around(self) -> tuple[int, int, int, int]:
        """The padding as functional.pad takes it for (…, H, W): left, right, above, below."""
        return (*self.padding[1], *self.padding[0])

    def padded(self, x: Tensor) -> Tensor:
        """The input (B, H, W, C) with zeros around it."""
        return functional.pad(x, (0, 0, *self.around())) if self.is_padded else x

    def windows(self, padded: Tensor) -> Tensor:
        """A view of a padded input: (B, HO, WO, KH, KW, C)."""
        (b, h, w, c), (sb, sh, sw, sc) = padded.shape, padded.stride()
        rows, columns = replace(self, padding=((0, 0), (0, 0))).output((h, w))
        (th, tw), (dh, dw) = self.stride, self.dilation
        sizes = (b, rows, columns, *self.kernel, c)
        strides = (sb, sh * th, sw * tw, sh * dh, sw * dw, sc)
        return padded.as_strided(sizes, strides)  # from where `padded` begins


def _pieces(windows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Images and output rows of each piece."""
    b, rows, columns, *window = windows.shape
    line = max(1, columns * windows.element_size() * window[0] * window[1] * window[2])
    lines = max(1, _PIECE_BYTES // line, -(-_LEAST_ROWS // max(1, columns)))
    if lines >= rows > 0:
        images = max(1, lines // rows)
        for first in range(0, b, images):
            yield slice(first, first + images), slice(0, rows)
        return
    for image in range(b):
        for first in range(0, rows, lines):
            yield slice(image, image + 1), slice(first, first + lines)


def _forward(x: Tensor, values: Tensor, bias: Tensor | None, call: tuple) -> Tensor:
    geometry, pattern, derived, activation = call
    if x.device.type == "cpu":
        made = derived or (None, None, 0)
        return _conv2d(
            x, values, pattern.plan, bias, *pattern.shape, geometry.words(), *made, activation or NONE
        )
    windows = geometry.windows(geometry.padded(x))
    n, k = pattern.shape
    y = x.new_empty((*windows.shape[:3], n))
    for at in _pieces(windows):
        piece = windows[at].reshape(-1, k)
        product = ops.bsr_linear(piece, values, pattern.plan, bias, n, k, *derived, activation=activation)
        y[at] = product.view(y[at].shape)
    return y


def _grad_input(dy: Tensor, values: Tensor, size: tuple[int, ...], call: tuple) -> Tensor:
    geometry, pattern, _, _ = call
    n, k = pattern.shape
    if dy.device.type == "cpu":
        return _conv2d_grad_input(dy, values, pattern.plan, n, k, geometry.words(), *size[1:3])
    (b, h, w, c), (above, below), (left, right) = size, *geometry.padding
    padded = dy.new_zeros((b, above + h + below, left + w + right, c))
    windows = geometry.windows(padded)
    for at in _pieces(windows):
        dx = ops.bsr_grad_input(dy[at].reshape(-1, n), values, pattern.plan, n, k).view(windows[at].shape)
        for i in range(geometry.kernel[0]):
            for j in range(geometry.kernel[1]):  # windows of one place of the kernel do not overlap
                windows[at][:, :, :, i, j] += dx[:, :, :, i, j]
    return padded[:, above : above + h, left : left + w]


def _grad_weight(dy: Tensor, x: Tensor, call: tuple) -> Tensor:
    geometry, pattern, _, _ = call
    n, k = pattern.shape
    if x.device.type == "cpu":
        return _conv2d_grad_weight(dy, x, pattern.plan, list(pattern.block_shape), n, k, geometry.words())
    windows = geometry.windows(geometry.padded(x))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # of the pieces' sum
    total = torch.zeros((pattern.nnzb, *pattern.block_shape), dtype=wide, device=x.device)
    for at in _pieces(windows):
        sizes = (*pattern.block_shape, n, k)
        rows, piece = dy[at].reshape(-1, n), windows[at].reshape(-1, k)
        total += ops.bsr_grad_weight(rows, piece, pattern.plan, *sizes)
    return total.to(x.dtype)


def _geometry_of(words: list[int]) -> Geometry:
    kernel, stride, dilation, rows, columns = zip(words[::2], words[1::2], strict=True)
    return Geometry(kernel, stride, (rows, columns), dilation)


def _fake_conv2d(
    x: Tensor, values: Tensor, plan: Tensor, bias: Any, n: int, k: int, words: list[int], *_: Any
) -> Tensor:
    rows, columns = _geometry_of(words).output(tuple(x.shape[1:3]))
    return x.new_empty((x.shape[0], rows, columns, n))


def _fake_grad_input(
    dy: Tensor, values: Tensor, plan: Tensor, n: int, k: int, words: list[int], rows: int, columns: int
) -> Tensor:
    return dy.new_empty((dy.shape[0], rows, columns, k // (words[0] * words[1])))


def _fake_grad_weight(
    dy: Tensor, x: Tensor, plan: Tensor, block: list[int], n: int, k: int, words: list[int]
) -> Tensor:
    return x.new_empty((ops.blocks_of_plan(plan, n, k, *block), *block))


if _load.problem is None:
    register_fake("_conv2d", _fake_conv2d)
    register_fake("_conv2d_grad_input", _fake_grad_input)
    register_fake("_conv2d_grad_weight", _fake_grad_weight)


class _Conv(torch.autograd.Function):
    """The convolution of x with values; `call`: geometry, pattern, what is derived, activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, call: tuple) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, values)
        return _forward(x, values, bias, call)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, values = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            _ConvInput.apply(dy, values, x.shape, ctx.call) if needs[0] else None,
            _ConvWeight.apply(dy, x, ctx.call) if needs[1] else None,
            dy.sum((0, 1, 2)) if needs[2] else None,
            None,
        )


class _ConvInput(torch.autograd.Function):
    """Its gradient to x, linear in dy and values."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, values: Tensor, size: torch.Size, call: tuple) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(dy, values)
        return _grad_input(dy, values, size, call)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
        dy, values = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            _Conv.apply(ddx, values, None, ctx.call) if needs[0] else None,
            _ConvWeight.apply(dy, ddx, ctx.call) if needs[1] else None,
            None,
            None,
        )


class _ConvWeight(torch.autograd.Function):
    """Its gradient to values, linear in dy and x."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, call: tuple) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(dy, x)
        return _grad_weight(dy, x, call)

    @staticmethod
    def backward(ctx: Any, ddvalues: Tensor) -> tuple[Tensor | None, ...]:
        dy, x = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            _Conv.apply(x, ddvalues.contiguous(), None, ctx.call) if needs[0] else None,
            _ConvInput.apply(dy, ddvalues.contiguous(), x.shape, ctx.call) if needs[1] else None,
            None,
        )


def convolve(
    x: Tensor,
    values: Tensor,
    pattern: BsrPattern,
    bias: Tensor | None,
    geometry: Geometry,
    derived: tuple = (),
    activation: str | None = None,
) -> Tensor:
    """A checked convolution of x, (B, H, W, C); where gradients are recorded, without an activation."""
    n, k = pattern.shape
    if geometry.is_pointwise:
        th, tw = geometry.stride
        places = x[:, ::th, ::tw]
        return ops.bsr_linear(places, values, pattern.plan, bias, n, k, *derived, activation=activation)
    device = x.device.type
    if not in_autocast() or not torch.is_autocast_enabled(device):
        return _Conv.apply(x, values, bias, (geometry, pattern, derived, activation))
    x, values, bias = map(autocast_to(device), (x, values, bias))  # once, before the pieces
    with torch.autocast(device, enabled=False):
        return _Conv.apply(x, values, bias, (geometry, pattern, derived, activation))


_LEAST_PLACES = 16  # of an image: the lanes of the widest vectors


def may_lie_by_channel(images: Tensor, values: Tensor, bias: Tensor | None) -> bool:
    """Whether `pointwise_by_channel` takes these images, (B, C, H, W), and is the faster way for them."""
    return (
        images.device.type == "cpu"
        and images.dtype == values.dtype == torch.float32
        and images.shape[2] * images.shape[3] >= _LEAST_PLACES
        and (bias is None or bias.dtype == torch.float32)
        and meets_nothing(images, values, bias)
    )


def pointwise_by_channel(
    images: Tensor, values: Tensor, pattern: BsrPattern, bias: Tensor | None, activation: str = NONE
) -> Tensor:
    """A convolution of 1×1, (B, O, H, W), of images (B, C, H, W); channels lie apart in both."""
    (n, k), (r, c) = pattern.shape, pattern.block_shape
    plan = pattern.row_plan if c <= r else pattern.plan
    b, _, h, w = images.shape
    y = product_in_place(images.reshape(b, k, h * w), values, plan, [n, k, r, c], bias, activation)
    return y.view(b, n, h, w)


def sparse_conv2d(
    x: Tensor,
    weight: Any,
    bias: Tensor | None = None,
    *,
    kernel_size: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    layout: str = "NHWC",
    activation: str | None = None,
    check: str = "once",
) -> Tensor:
    """Return the convolution of images with a sparse weight, as ``F.conv2d`` computes it.

    Args:
        x: (B, H, W, C), or (B, C, H, W) with layout "NCHW"; any strides, of the dtype of data. Fastest where
            channels are contiguous (torch.channels_last for NCHW).
        weight: (O, KH · KW · C / groups), sparse, columns in the order (kernel row, kernel column, channel);
            see `sparse_dense`. Data of 2 dimensions, (nnzb, R), are blocks of one column, as TVM had them.
        bias: (O,) of x's dtype.
        kernel_size: an int, or one for rows and one for columns, as the next three.
        stride: places between windows.
        padding: zeros around the images; "valid" for none, "same" for an output of x's size (stride 1).
        dilation: places between those of a window.
        groups: input and output channels in so many parts that see one another alone, as F.conv2d has them;
            must divide both, and blocks the channels of a group. (The weight of a BlockSparseConv2d with
            groups is a matrix of all channels, which stores nothing outside of them: groups=1.)
        layout: "NHWC" or "NCHW".
        activation: "relu", "gelu", "gelu_tanh", "silu" or None.
        check: see SparseMatrix.

    Returns:
        (B, HO, WO, O), or (B, O, HO, WO), of x's dtype; channels contiguous, but for kernels of 1×1 in
        float32 on a CPU, without gradients, on images whose channels lie apart: there they do, too. Gradients
        flow to all three.

    Raises ValueError for sizes and indices that are not valid, TypeError for dtypes and devices.
    """
    op = "sparse_conv2d"
    x = as_tensor(op, "x", x)
    if layout not in ("NHWC", "NCHW"):
        fail(op, 'layout must be "NHWC" or "NCHW"', repr(layout))
    if x.ndim != 4:
        fail(op, "x must have 4 dimensions", f"{x.ndim}: {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        fail(op, "x must be of a floating-point dtype", x.dtype, TypeError)
    name = check_activation(op, activation)
    x = x.permute(0, 2, 3, 1) if layout == "NCHW" else x
    geometry = read_geometry(op, kernel_size, stride, padding, dilation)
    check_size(op, x, geometry)
    matrix = _read_weight(op, weight, x.shape[3], check_int(op, "groups", groups, 1), geometry, check)
    if matrix.dtype != x.dtype and not in_autocast():
        fail(op, f"x must be of the dtype of data, {matrix.dtype}", x.dtype, TypeError)
    blocks = matrix.blocks()
    bias = None if bias is None else checked_bias(op, bias, x, matrix.shape[0])
    images = x.permute(0, 3, 1, 2)
    apart = images.is_contiguous() and not x.is_contiguous() and x.numel() > 0
    if geometry.is_pointwise and apart and may_lie_by_channel(images, blocks, bias):
        th, tw = geometry.stride
        y = pointwise_by_channel(images[:, :, ::th, ::tw], blocks, matrix.pattern, bias, name)
        return y if layout == "NCHW" else y.permute(0, 2, 3, 1)
    derived = matrix.derived(x, blocks)
    y = _activated(x, blocks, matrix.pattern, bias, geometry, derived, name)
    return y.permute(0, 3, 1, 2) if layout == "NCHW" else y


def _read_weight(
    op: str, weight: Any, channels: int, groups: int, geometry: Geometry, check: str
) -> SparseMatrix:
    """The weight as a matrix of all channels."""
    if channels % groups:
        fail(op, f"groups must divide the {channels} channels of x", groups)
    places = geometry.kernel[0] * geometry.kernel[1]
    columns = places * (channels // groups)
    if isinstance(weight, tuple | list) and len(weight) == 3 and getattr(weight[0], "ndim", 0) == 2:
        weight = (weight[0][:, :, None], *weight[1:])
    matrix = as_matrix(op, "weight", weight, columns=columns, check=check)
    if matrix.shape[1] != columns:
        what = "channels" if groups == 1 else "channels of a group"
        got = f"{matrix.shape[1]} for {channels} channels"
        fail(op, f"weight must have {columns} columns, kernel places times {what}", got)
    if matrix.shape[0] % groups:
        fail(op, f"groups must divide the {matrix.shape[0]} rows of weight", groups)
    if (reason := why_not_in(groups, (matrix.shape[0], channels), matrix.block_shape)) is not None:
        fail(op, reason, matrix.block_shape)
    return whole_matrix(matrix, groups, places)


def _activated(x, blocks, pattern, bias, geometry, derived, name: str) -> Tensor:
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, blocks, bias))
    if recorded or name == NONE:
        return activate(convolve(x, blocks, pattern, bias, geometry, derived), name)
    return convolve(x, blocks, pattern, bias, geometry, derived, name)


def read_geometry(op: str, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Geometry:
    """Sizes as pairs, checked; padding also as torch's words for it."""

    def pair(name: str, value: Any, least: int) -> tuple[int, int]:
        return check_pair(op, name, (value, value) if isinstance(value, int) else value, least)

    kernel, stride = pair("kernel_size", kernel, 1), pair("stride", stride, 1)
    dilation = pair("dilation", dilation, 1)
    if not isinstance(padding, str):
        rows, columns = pair("padding", padding, 0)
        return Geometry(kernel, stride, ((rows, rows), (columns, columns)), dilation)
    if padding not in ("same", "valid"):
        fail(op, 'padding must be an int, a pair, "same" or "valid"', repr(padding))
    if padding == "same" and stride != (1, 1):
        fail(op, 'stride must be 1 where padding is "same"', stride)
    spans = (0, 0) if padding == "valid" else (d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    return Geometry(kernel, stride, tuple((span // 2, span - span // 2) for span in spans), dilation)


def check_size(op: str, x: Tensor, geometry: Geometry) -> None:
    """Raises unless a window fits into the padded images, (B, H, W, C)."""
    if min(geometry.output(tuple(x.shape[1:3]))) < 1:
        span = tuple(d * (k - 1) + 1 for k, d in zip(geometry.kernel, geometry.dilation, strict=True))
        fail(op, f"x must have at least {span} rows and columns with its padding", tuple(x.shape[1:3]))
