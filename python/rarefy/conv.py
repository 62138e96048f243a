"""BlockSparseConv2d, the drop-in for nn.Conv2d with a block-sparse weight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .checks import check_density, check_dtype, check_int, check_tensor, fail
from .linear_base import check_state, copy_parameter
from .masks import block_count, block_norms, choose_blocks, grid_of, random_blocks, top_blocks
from .pattern import BsrPattern
from .sparse.conv import (
    Geometry,
    check_size,
    convolve,
    may_lie_by_channel,
    pointwise_by_channel,
    read_geometry,
)
from .sparse.groups import blocks_inside, dense_of_whole, dense_to_whole, why_not_in
from .sparse_weight import SparseWeight
from .spec import Spec
from .values import draw_uniform_
from .weight import BlockSpec, BsrWeight

_MODES = ("zeros", "reflect", "replicate", "circular")


class BlockSparseConv2d(nn.Module):
    """A convolution whose weight stores only chosen blocks; a drop-in for nn.Conv2d.

    Args:
        in_channels, out_channels: C and O.
        kernel_size, stride, padding, dilation: as for nn.Conv2d: an int or a pair; padding also "same" or
            "valid".
        groups: input and output channels in so many parts that see one another alone; must divide both, and
            blocks must not reach over them.
        bias: add a learned bias, (O,).
        padding_mode: what is around the images: "zeros", "reflect", "replicate" or "circular".
        density: stored blocks / all blocks within the groups.
        block_shape: (R, C'), output channels and input channels of a block, at one place of the kernel.
        generator: a torch.Generator for pattern and values.

    `weight` is a BsrWeight of shape (O, KH · KW · C), columns in the order (kernel row, kernel column,
    channel), so blocks lie within a place of the kernel where C' divides C. x is (B, C, H, W) or (C, H, W); y
    is (B, O, HO, WO), in x's memory format. channels_last is the fast one: others are copied, but for 1×1 in
    float32 on a CPU without gradients, which is as fast on contiguous images.

    Values start uniform in ±1/√f, f the stored inputs of an output channel; see BlockSparseLinear.

    Raises ValueError for sizes that are not valid, TypeError for arguments of the wrong kind.
    """

    weight: BsrWeight

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        density: float = 0.5,
        block_shape: tuple[int, int] = (16, 1),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        op = "BlockSparseConv2d"
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        self._set_sizes(op, *sizes)
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        check_dtype(op, "dtype", dtype)
        density = check_density(op, density)
        device = torch.empty(0, device=device).device
        inside = self._inside(op, block_shape)
        chosen = torch.zeros_like(inside)
        chosen[inside] = random_blocks((1, int(inside.sum())), density, generator).flatten()
        pattern = BsrPattern.from_mask(chosen, shape=self._shape, block_shape=block_shape, device=device)
        values = torch.zeros((pattern.nnzb, *block_shape), device=device, dtype=dtype)
        self.weight = BsrWeight.from_pattern(values, pattern)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        self.reset_parameters(generator)

    def _set_sizes(
        self, op: str, c: Any, o: Any, kernel: Any, stride: Any, pad: Any, dil: Any, g: Any, mode: Any
    ) -> None:
        self.in_channels = check_int(op, "in_channels", c, 1)
        self.out_channels = check_int(op, "out_channels", o, 1)
        self.groups = check_int(op, "groups", g, 1)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            fail(op, f"groups must divide {self.in_channels} and {self.out_channels} channels", self.groups)
        geometry = read_geometry(op, kernel, stride, pad, dil)
        self.kernel_size, self.stride = geometry.kernel, geometry.stride
        self.padding = pad if isinstance(pad, str) else tuple(p for p, _ in geometry.padding)
        self.dilation = geometry.dilation
        if mode not in _MODES:
            fail(op, f"padding_mode must be one of {', '.join(_MODES)}", repr(mode))
        self.padding_mode = mode

    @property
    def _geometry(self) -> Geometry:
        return geometry_of(self)

    @property
    def _shape(self) -> tuple[int, int]:
        return matrix_shape(self)

    def _inside(self, op: str, block_shape: Any) -> torch.Tensor:
        """Which blocks lie inside of a group: all, for one group."""
        rows, columns = grid_of(self._shape, block_shape)
        if self.groups == 1:
            return torch.ones(rows, columns, dtype=torch.bool)
        if (reason := why_no_groups(self, block_shape)) is not None:
            fail(op, reason, tuple(block_shape))
        places = self.kernel_size[0] * self.kernel_size[1]
        return blocks_inside(self._shape, tuple(block_shape), self.groups, places)

    # -- to and from nn.Conv2d ------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        conv: nn.Conv2d,
        spec: str | Spec | None = None,
        *,
        block_shape: tuple[int, int] | None = None,
        density: float | None = None,
        mask: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> BlockSparseConv2d:
        """Keeps the trained values of the chosen blocks of an nn.Conv2d, bit for bit, and its bias.

        Blocks are those of a `spec` ("block:8x1@0.3"), or of `block_shape`. `density`, `mask` and `scores`
        are those of BsrWeight.from_dense, of the weight as a matrix; scores may also have the shape of the
        convolution's own weight. Density counts the blocks within the groups. Without any, all of those are
        kept. Copies; `conv` stays.

        Raises ValueError for a spec of another format, and as BsrWeight.from_dense does.
        """
        op = "BlockSparseConv2d.from_dense"
        if not isinstance(conv, nn.Conv2d):
            fail(op, "conv must be an nn.Conv2d", type(conv).__name__, TypeError)
        dtype, rounds_x = None, False
        if spec is not None:
            if block_shape is not None or density is not None:
                fail(op, "a spec excludes block_shape and density", (block_shape, density))
            spec = Spec.parse(spec, op)
            if not isinstance(spec, BlockSpec):
                fail(op, "the spec of a convolution must be blocks (block:ROWSxCOLUMNS@DENSITY)", spec)
            if spec.rounds_x and (reason := why_no_rounding(conv)) is not None:
                fail(op, reason, spec)
            block_shape, dtype, rounds_x = spec.block_shape, spec.dtype, spec.rounds_x
            density = spec.density if mask is None else None
        elif block_shape is None:
            fail(op, "block_shape or a spec must be given", "neither", TypeError)
        layer = cls._like(op, conv)
        dense = layer._matrix(conv.weight.detach())
        if scores is not None and scores.shape == conv.weight.shape:
            scores = layer._matrix(scores)
        inside = layer._inside(op, block_shape).to(dense.device)
        kept = choose_blocks(op, dense, block_shape, mask, density, scores)
        if layer.groups > 1 and mask is not None and bool((kept & ~inside).any()):
            fail(op, "mask must keep nothing outside of the groups", f"{int((kept & ~inside).sum())} blocks")
        if layer.groups > 1 and mask is None and not isinstance(density, str):
            kept = _within(dense if scores is None else scores, inside, block_shape, density)
        weight = BsrWeight.from_dense(dense, block_shape=block_shape, mask=kept)
        weight.stored_as(dtype, rounds_x=rounds_x)
        weight.values.requires_grad_(conv.weight.requires_grad)
        layer.weight = weight.train(conv.training)
        layer.bias = copy_parameter(conv.bias)
        return layer.train(conv.training)

    @classmethod
    def from_weight(cls, weight: SparseWeight, conv: nn.Module) -> BlockSparseConv2d:
        """The layer of the sizes, and with the bias, of another one, nn.Conv2d or sparse, around a weight.

        The weight, (O, KH · KW · C) in blocks, is taken as it is. Raises ValueError for another shape or
        format, and for blocks outside of the groups.
        """
        op = "BlockSparseConv2d.from_weight"
        layer = cls._like(op, conv)
        if tuple(weight.shape) != layer._shape:
            fail(op, f"weight must be of shape {layer._shape}", tuple(weight.shape))
        if weight.format not in (BsrWeight.format, "pending"):
            fail(op, f"the weight of a convolution must be of format {BsrWeight.format}", weight.format)
        if layer.groups > 1 and isinstance(weight, BsrWeight):
            inside = layer._inside(op, weight.block_shape).to(weight.device)
            if outside := int((weight.pattern.mask() & ~inside).sum()):
                fail(op, "weight must store nothing outside of the groups", f"{outside} blocks")
        layer.weight, layer.bias = weight, copy_parameter(conv.bias)
        return layer.train(conv.training)

    @classmethod
    def _like(cls, op: str, conv: Any) -> BlockSparseConv2d:
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        sizes = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
        layer._set_sizes(op, conv.in_channels, conv.out_channels, *sizes)
        return layer

    def to_dense(self) -> nn.Conv2d:
        """The nn.Conv2d that computes the same, with zeros for what is not stored."""
        whole = self.weight.to_dense().detach().to(self.weight.x_dtype or self.weight.dtype)
        weight = dense_of_whole(whole, self.groups, self.kernel_size)
        options = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        options |= {"groups": self.groups, "padding_mode": self.padding_mode}
        sizes = (self.in_channels, self.out_channels, self.kernel_size)
        conv = nn.Conv2d(*sizes, bias=self.bias is not None, device="meta", **options)
        conv.weight = nn.Parameter(
            weight.clone(memory_format=torch.contiguous_format),
            requires_grad=self.weight.values.requires_grad,
        )
        conv.bias = copy_parameter(self.bias)
        return conv.train(self.training)

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """(O, C / groups, KH, KW) as the matrix (O, KH · KW · C), zeros outside of the groups."""
        return dense_to_whole(weight, self.groups)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        check_state("BlockSparseConv2d.load_state_dict", self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- what it is -----------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the convolution of images, (B, C, H, W) or (C, H, W)."""
        op = "BlockSparseConv2d"
        check_tensor(op, "x", x)
        # First what a small image meets: 1×1 on channels_last, of which nothing has to be copied or asked.
        if self.kernel_size == self.stride == (1, 1) and self.padding == (0, 0) and x.ndim == 4:
            places, parameters = x.permute(0, 2, 3, 1), self._parameters
            if (
                places.is_contiguous()
                and places.shape[3] == self.in_channels
                and places.numel() > 0
                and "bias" in parameters
            ):
                return self._modules["weight"].linear(places, parameters["bias"]).permute(0, 3, 1, 2)
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            requirement = f"x must be (B, {self.in_channels}, H, W) or ({self.in_channels}, H, W)"
            fail(op, requirement, tuple(x.shape))
        images = x if x.ndim == 4 else x[None]
        y = self._in_place(images)
        if y is not None:
            return y if x.ndim == 4 else y[0]
        y = self._at_places(images) if is_pointwise(self) else self._of_windows(images)
        y = y.permute(0, 3, 1, 2)
        if images.is_contiguous() and not images.is_contiguous(memory_format=torch.channels_last):
            y = y.contiguous()
        return y if x.ndim == 4 else y[0]

    def _in_place(self, images: torch.Tensor) -> torch.Tensor | None:
        """The product of contiguous images, channel by channel as they lie, or None where it is not for them.

        To transpose images and results took longer than the product: MobileNetV2's at 40 % zeros were slower
        than dense.
        """
        weight, bias = self._modules["weight"], self.bias
        if (
            not is_pointwise(self)
            or type(weight) is not BsrWeight
            or weight.rounds_x
            or not images.is_contiguous()
            or images.is_contiguous(memory_format=torch.channels_last)
            or images.numel() == 0
        ):
            return None
        values = weight.values
        if not may_lie_by_channel(images, values, bias):
            return None
        if self.stride != (1, 1):
            th, tw = self.stride
            images = images[:, :, ::th, ::tw]
        return pointwise_by_channel(images, values, weight.pattern, bias)

    def _at_places(self, images: torch.Tensor) -> torch.Tensor:
        """The product of a linear layer, (B, HO, WO, O): on small images Python is half of its time."""
        places = images.permute(0, 2, 3, 1)
        if 0 in places.shape:
            check_size("BlockSparseConv2d", places, self._geometry)
        if self.stride != (1, 1):
            th, tw = self.stride
            places = places[:, ::th, ::tw]
        return self._modules["weight"].linear(places, self.bias)

    def _of_windows(self, images: torch.Tensor) -> torch.Tensor:
        geometry = self._geometry
        if self.padding_mode != "zeros" and geometry.is_padded:
            images = functional.pad(images, geometry.around(), mode=self.padding_mode)
            geometry = replace(geometry, padding=((0, 0), (0, 0)))
        places = images.permute(0, 2, 3, 1)
        check_size("BlockSparseConv2d", places, geometry)
        if places.stride(3) != 1:
            places = places.contiguous()
        weight = self.weight
        return convolve(places, weight.values, weight.pattern, self.bias, geometry, weight.derived(images))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values and bias anew on the same pattern."""
        self.weight.reset_parameters(generator)
        if self.bias is not None:
            bound = 1 / math.sqrt(self._shape[1] / self.groups)
            draw_uniform_(self.bias, bound, generator)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(R, C')."""
        return self.weight.block_shape

    @property
    def density(self) -> float:
        """Stored blocks / all blocks within the groups."""
        return min(1.0, self.weight.density * self.groups)

    def extra_repr(self) -> str:
        """The arguments that made the layer, density as it is."""
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        )
        defaults = {"padding": (0, 0), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        text += f", bias={self.bias is not None}, density={self.density:.4g}"
        return f"{text}, block_shape={self.block_shape}"


def matrix_shape(conv: nn.Module) -> tuple[int, int]:
    """(O, KH · KW · C) of a convolution's weight as a matrix, zeros outside of the groups included."""
    return conv.out_channels, conv.kernel_size[0] * conv.kernel_size[1] * conv.in_channels


def geometry_of(conv: nn.Module) -> Geometry:
    """Sizes of a convolution, nn.Conv2d or sparse, as numbers."""
    return read_geometry("conv2d", conv.kernel_size, conv.stride, conv.padding, conv.dilation)


def is_pointwise(conv: nn.Module) -> bool:
    """Whether a convolution sees each place alone, so that it is the product of a linear layer."""
    return tuple(conv.kernel_size) == (1, 1) and (
        conv.padding in ("same", "valid") or tuple(conv.padding) == (0, 0)
    )


def why_no_rounding(conv: nn.Module) -> str | None:
    """Why x may not be rounded to bfloat16 before a convolution, or None."""
    if is_pointwise(conv):
        return None
    return "x may be rounded (:bf16x) before convolutions of 1×1 without padding alone"


def why_no_groups(conv: nn.Module, block_shape: tuple[int, int]) -> str | None:
    """Why blocks would reach over the groups of a convolution, or None."""
    return why_not_in(conv.groups, (conv.out_channels, conv.in_channels), block_shape)


def _within(
    scores: torch.Tensor, inside: torch.Tensor, block_shape: tuple[int, int], density: float | None
) -> torch.Tensor:
    """The blocks within the groups that score most: density · their number of them; None: all."""
    if density is None:
        return inside
    if scores.shape != inside.shape:
        scores = block_norms(scores, block_shape)
    share = block_count(density, int(inside.sum())) / max(1, inside.numel())
    return top_blocks(scores.double().to(inside.device).masked_fill(~inside, -math.inf), share)
