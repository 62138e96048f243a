"""PseudoBlockSparseLinear, the masked dense oracle of BlockSparseLinear."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .checks import check_block_shape, fail
from .linear_base import LinearBase, check_linear, check_sizes, new_linear
from .masks import choose_blocks, expand_mask, grid_of, random_blocks
from .modules import BlockSparseLinear
from .values import draw_uniform_, init_bounds


class PseudoBlockSparseLinear(LinearBase):
    """The masked dense oracle of BlockSparseLinear: an ordinary (N, K) weight, F.linear and a block mask.

    Same arguments, errors, distribution and interface; runs anywhere torch does, no faster than dense. For
    debugging, tests and experiments. Masked-out weights get no gradient and count as zero whatever
    they hold. `weight` is a plain Parameter, `block_mask` a bool buffer (block rows, block columns).
    """

    weight: nn.Parameter
    block_mask: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *unnamed: Any,
        density: float = 0.5,
        block_shape: tuple[int, int] = (32, 32),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        op = "PseudoBlockSparseLinear"
        k, n, density, block_shape = check_sizes(op, in_features, out_features, density, block_shape, unnamed)
        block_mask = random_blocks(grid_of((n, k), block_shape), density, generator)
        self._set(torch.empty((n, k), device=device, dtype=dtype), block_mask, block_shape)
        if bias:
            self.bias = nn.Parameter(torch.empty(n, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters(generator)

    def _set(self, weight: torch.Tensor, block_mask: torch.Tensor, block_shape: tuple[int, int]) -> None:
        self.out_features, self.in_features = weight.shape
        self.block_shape = block_shape
        self.weight = nn.Parameter(weight)
        self.register_buffer("block_mask", block_mask.to(weight.device))

    @property
    def density(self) -> float:
        """Kept blocks / all blocks."""
        blocks = self.block_mask.numel()
        return int(self.block_mask.sum()) / blocks if blocks else 0.0

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values and bias anew on the same mask."""
        if not self.weight.is_meta:
            bounds = init_bounds(self.block_mask, self.in_features, self.block_shape[1])
            rows = bounds.repeat_interleave(self.block_shape[0])[: self.out_features, None]
            draw_uniform_(self.weight, 1, generator)
            self.weight.copy_(self.masked_weight() * rows.to(self.weight.dtype))
        self._reset_bias(generator)

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        *,
        block_shape: tuple[int, int],
        mask: torch.Tensor | None = None,
        density: float | None = None,
        scores: torch.Tensor | None = None,
    ) -> PseudoBlockSparseLinear:
        """As BlockSparseLinear.from_dense, with the same choice of blocks."""
        op = "PseudoBlockSparseLinear.from_dense"
        weight = check_linear(op, linear).weight.detach()
        block_shape = check_block_shape(op, block_shape)
        block_mask = choose_blocks(op, weight, block_shape, mask, density, scores)
        return cls._make(linear.weight, linear.bias, block_mask, block_shape, linear.training)

    @classmethod
    def from_sparse(cls, layer: BlockSparseLinear) -> PseudoBlockSparseLinear:
        """The oracle of a BlockSparseLinear: same values, same pattern. Copies."""
        op = "PseudoBlockSparseLinear.from_sparse"
        if not isinstance(layer, BlockSparseLinear):
            fail(op, "layer must be a BlockSparseLinear", type(layer).__name__, TypeError)
        if layer.activation is not None:
            fail(op, "layer must have no activation", repr(layer.activation))
        dense = layer.to_linear()
        return cls._make(
            dense.weight, dense.bias, layer.weight.block_mask(), layer.block_shape, layer.training
        )

    @classmethod
    def _make(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, block_mask: torch.Tensor,
        block_shape: tuple[int, int], training: bool,
    ) -> PseudoBlockSparseLinear:  # fmt: skip
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        kept = expand_mask(block_mask, tuple(weight.shape), block_shape)
        layer._set(torch.where(kept, weight.detach(), 0), block_mask, block_shape)
        layer.weight.requires_grad_(weight.requires_grad)
        return layer._finish(bias, training)

    def to_sparse(self) -> BlockSparseLinear:
        """The BlockSparseLinear with these values and this pattern, exactly. Copies."""
        return BlockSparseLinear.from_dense(
            self.to_dense(), block_shape=self.block_shape, mask=self.element_mask()
        )

    def to_dense(self) -> nn.Linear:
        """The same layer as an nn.Linear: zeros where the mask is. Copies."""
        with torch.no_grad():
            dense = self.masked_weight()
        return new_linear(dense, self.bias, self.weight.requires_grad, self.training)

    def element_mask(self) -> torch.Tensor:
        """(N, K) bool."""
        return expand_mask(self.block_mask, tuple(self.weight.shape), self.block_shape)

    def masked_weight(self) -> torch.Tensor:
        """(N, K): the weight with zeros outside the mask, where even NaN counts as zero."""
        return torch.where(self.element_mask(), self.weight, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        return functional.linear(x, self.masked_weight(), self.bias)
