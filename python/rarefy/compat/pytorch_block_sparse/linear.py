"""BlockSparseLinear, its function and its masked dense twin, with the arguments of pytorch_block_sparse."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ... import modules, ops
from ...checks import check_density, fail
from ...linear_base import check_linear, check_sizes
from ...masks import expand_mask, grid_of
from .matrix import BlockSparseMatrix, BlockSparseMatrixBase

Shape = tuple[int, int]


class BlockSparseLinearFunction:
    """The product of a layer: BlockSparseLinearFunction.apply(input, weight_data, weight)."""

    @staticmethod
    def apply(input: torch.Tensor, weight_data: torch.Tensor, weight: BlockSparseMatrixBase) -> torch.Tensor:
        """Input @ Wᵀ, (…, N), where W has the pattern of `weight` and the values of `weight_data`.

        Args:
            input: (…, K).
            weight_data: (blocks · R, C), as weight.data; gradients of any order go to it and to `input`.
            weight: a BlockSparseMatrix.
        """
        values = weight_data.view(-1, *weight.block_shape)
        return ops.bsr_linear(input, values, weight.pattern.plan, None, *weight.shape)


class BlockSparseLinear(modules.BlockSparseLinear):
    """y = x Wᵀ + b with a BlockSparseMatrix as `weight`; a rarefy.BlockSparseLinear with other arguments.

    Args:
        in_features, out_features: K and N, of any size; of no effect beside `torch_nn_linear`.
        bias: whether there is one; it starts at zero.
        density: int(density · blocks) blocks are stored.
        torch_nn_linear: an nn.Linear whose blocks of largest L2 norm are taken, times 1/√density, so that
            outputs of weights that are still random keep their variance; and its bias, dtype and device.
        verbose: no effect.
        block_shape: (R, C), any.
        device, dtype: of the tensors, without `torch_nn_linear`.
        generator: of pattern and values; default: torch's global one.

    Without `torch_nn_linear` blocks are random and values uniform in ±1/√(stored inputs of the row), as
    those of rarefy.BlockSparseLinear.

    Raises ValueError for a density outside [0, 1] or a block that does not fit.
    """

    BLOCK_SIZE = 32

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        density: float = 0.5,
        torch_nn_linear: nn.Linear | None = None,
        verbose: bool = False,
        block_shape: Shape = (32, 32),
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        nn.Module.__init__(self)
        op = "BlockSparseLinear"
        density = check_density(op, density)
        if torch_nn_linear is not None:
            dense = check_linear(op, torch_nn_linear)
            in_features, out_features, bias = dense.in_features, dense.out_features, dense.bias is not None
            device, dtype = dense.weight.device, dense.weight.dtype
        k, n, density, block_shape = check_sizes(op, in_features, out_features, density, block_shape, ())
        self.in_features, self.out_features, self.verbose = k, n, verbose
        rows, cols = grid_of((n, k), block_shape)
        self.block_count = int(density * rows * cols)
        if torch_nn_linear is not None:
            weight = BlockSparseMatrix.from_dense(dense.weight, block_shape, self.block_count)
            if density:
                weight.multiply_(1 / math.sqrt(density))
            weight.requires_grad_(dense.weight.requires_grad)
        else:
            weight = BlockSparseMatrix.zeros(
                (n, k), self.block_count, block_shape=block_shape, device=device, generator=generator
            )
            if dtype is not None:
                weight = weight.to(dtype)
            weight.reset_parameters(generator)
        self.weight = weight
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(n, device=self.weight.device, dtype=self.weight.dtype))
            if torch_nn_linear is not None:
                with torch.no_grad():
                    self.bias.copy_(dense.bias)
                self.bias.requires_grad_(dense.bias.requires_grad)
        if torch_nn_linear is not None:
            self.train(dense.training)


class PseudoBlockSparseLinear(nn.Module):
    """The masked dense twin of a layer: the same values, and F.linear. Copies the weight, shares the bias.

    Args:
        block_sparse_linear: a BlockSparseLinear of this module, or rarefy's. On its device.

    `weight` is an (N, K) Parameter, `mask` an (N, K) bool buffer.
    """

    def __init__(self, block_sparse_linear: modules.BlockSparseLinear) -> None:
        super().__init__()
        if not isinstance(block_sparse_linear, modules.BlockSparseLinear):
            got = type(block_sparse_linear).__name__
            fail("PseudoBlockSparseLinear", "block_sparse_linear must be a BlockSparseLinear", got, TypeError)
        if block_sparse_linear.activation is not None:
            got = repr(block_sparse_linear.activation)
            fail("PseudoBlockSparseLinear", "block_sparse_linear must have no activation", got)
        matrix = block_sparse_linear.weight
        shape = tuple(matrix.shape)
        self.weight = nn.Parameter(matrix.to_dense().detach().clone(), requires_grad=matrix.requires_grad)
        self.bias = block_sparse_linear.bias
        self.register_buffer("mask", expand_mask(matrix.block_mask(), shape, matrix.block_shape))
        self.out_features, self.in_features = shape
        self.density = float(self.mask.double().mean()) if self.mask.numel() else 0.0
        self.train(block_sparse_linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        return functional.linear(input, self.weight * self.mask, self.bias)

    def extra_repr(self) -> str:
        """Sizes and the part that is stored."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, fill_ratio={self.density}"
