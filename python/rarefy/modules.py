"""BlockSparseLinear, the drop-in for nn.Linear, and PseudoBlockSparseLinear, its masked dense oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .checks import check_block_shape, check_density, check_dtype, check_int, check_tensor, fail
from .masks import choose_blocks, expand_mask, grid_of, pattern_of, random_blocks
from .weight import BsrWeight


def _check_sizes(
    op: str, in_features: Any, out_features: Any, density: Any, block_shape: Any
) -> tuple[int, int, float, tuple[int, int]]:
    return (
        check_int(op, "in_features", in_features),
        check_int(op, "out_features", out_features),
        check_density(op, density),
        check_block_shape(op, block_shape),
    )


def _check_linear(op: str, linear: Any) -> nn.Linear:
    if not isinstance(linear, nn.Linear):
        fail(op, "linear must be an nn.Linear", type(linear).__name__, TypeError)
    if not isinstance(linear.weight, torch.Tensor) or linear.weight.is_meta:
        fail(op, "linear must hold data", "a weight on the meta device", TypeError)
    return linear


def _parameter_like(data: torch.Tensor, source: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=source.requires_grad and data.dtype.is_floating_point)


def _copy(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else _parameter_like(tensor.detach().clone(), tensor)


def _init_bounds(block_mask: torch.Tensor, in_features: int, block_cols: int) -> torch.Tensor:
    """1 / √(stored inputs) of each block row; 0 for an empty one."""
    widths = torch.full((block_mask.shape[1],), block_cols, device=block_mask.device)
    if in_features % block_cols:
        widths[-1] = in_features % block_cols
    stored = (block_mask * widths).sum(dim=1).double()
    return torch.where(stored > 0, stored.rsqrt(), torch.zeros_like(stored))


def _new_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, requires_grad: bool, training: bool
) -> nn.Linear:
    """An nn.Linear that holds these tensors, built without drawing an initialisation."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=requires_grad)
    linear.bias = _copy(bias)
    return linear.train(training)


class _BlockLinear(nn.Module):
    """What the sparse layer and its oracle share: nn.Linear's attributes."""

    in_features: int
    out_features: int

    def extra_repr(self) -> str:
        """The arguments that made the layer, density as it is."""
        r, c = self.block_shape
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, density={self.density:.4g}, block_shape=({r}, {c})"
        )

    def _finish(self, bias: torch.Tensor | None, training: bool) -> Any:
        self.bias = _copy(bias)
        return self.train(training)

    @torch.no_grad()
    def _reset_bias(self, generator: torch.Generator | None) -> None:
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            self.bias.uniform_(-bound, bound, generator=generator)


class BlockSparseLinear(_BlockLinear):
    """y = x Wᵀ + b with a block-sparse W; a drop-in for nn.Linear that stores only chosen blocks.

    Args:
        in_features, out_features: K and N; x of shape (…, K) gives y of shape (…, N). Any sizes: those
            that are no multiple of the block are padded inside the last block.
        bias: add a learned bias of shape (N,).
        density: stored blocks / all blocks, in [0, 1]. Exactly round(density · blocks) blocks are
            stored, every such set equally likely.
        block_shape: (R, C), rows (outputs) and columns (inputs) of a block, each ≥ 1.
        generator: a torch.Generator for pattern and values; default: torch's global one.

    `weight` is a BsrWeight; its `values` are the Parameter. Values start uniform in ±1/√f, where f is
    the number of *stored* inputs of the row: nn.Linear's initialisation (He et al. 2015, fan-in, with
    a = √5) with the fan-in of the sparse layer, as in Evci et al., "Gradient Flow in Sparse Neural
    Networks and How Lottery Tickets Win", 2022. At density 1 it is nn.Linear's. The bias starts
    uniform in ±1/√K.

    Raises:
        ValueError: density outside [0, 1], a block dimension below 1, a negative size.
        TypeError: arguments of the wrong kind.
    """

    weight: BsrWeight

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        density: float = 0.5,
        block_shape: tuple[int, int] = (32, 32),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        op = "BlockSparseLinear"
        k, n, density, block_shape = _check_sizes(op, in_features, out_features, density, block_shape)
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        check_dtype(op, "dtype", dtype)
        if not dtype.is_floating_point:
            fail(op, "dtype must be floating point", dtype, TypeError)
        self.in_features, self.out_features = k, n
        # Where a tensor made here would go: `device`, or torch.device(…) as a context, or the default.
        device = torch.empty(0, device=device).device
        crow, col = pattern_of(random_blocks(grid_of((n, k), block_shape), density, generator))
        values = torch.zeros((len(col), *block_shape), device=device, dtype=dtype)
        self.weight = BsrWeight(
            values, crow.to(device), col.to(device), shape=(n, k), block_shape=block_shape
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(n, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters(generator)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(R, C)."""
        return self.weight.block_shape

    @property
    def density(self) -> float:
        """Stored blocks / all blocks."""
        return self.weight.density

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values and bias anew on the same pattern (see the class for the distribution)."""
        weight = self.weight
        if weight.device.type != "meta":
            bounds = _init_bounds(weight.block_mask(), self.in_features, weight.block_shape[1])
            weight.values.uniform_(-1, 1, generator=generator)
            weight.values.mul_(bounds[weight.block_row_indices()].to(weight.dtype)[:, None, None])
            weight.zero_padding_()
        self._reset_bias(generator)

    @classmethod
    def from_weight(cls, weight: BsrWeight, bias: torch.Tensor | None = None) -> BlockSparseLinear:
        """A layer around an existing weight, which it takes as it is; the bias is copied."""
        op = "BlockSparseLinear.from_weight"
        if not isinstance(weight, BsrWeight):
            fail(op, "weight must be a BsrWeight", type(weight).__name__, TypeError)
        if bias is not None:
            check_tensor(op, "bias", bias)
            if tuple(bias.shape) != (weight.shape[0],):
                fail(op, f"bias must be of shape ({weight.shape[0]},)", tuple(bias.shape))
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.out_features, layer.in_features = weight.shape
        layer.weight = weight
        return layer._finish(bias, True)

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        *,
        block_shape: tuple[int, int],
        mask: torch.Tensor | None = None,
        density: float | None = None,
        scores: torch.Tensor | None = None,
    ) -> BlockSparseLinear:
        """Keeps the trained values of the chosen blocks of an nn.Linear, bit for bit, and its bias.

        `mask`, `density` and `scores` are those of BsrWeight.from_dense; without any, all blocks are
        kept. Copies: `linear` stays as it is. Device, dtype, requires_grad and training mode carry over.
        """
        _check_linear("BlockSparseLinear.from_dense", linear)
        weight = BsrWeight.from_dense(
            linear.weight, block_shape=block_shape, mask=mask, density=density, scores=scores
        )
        weight.values.requires_grad_(linear.weight.requires_grad and weight.dtype.is_floating_point)
        return cls.from_weight(weight.train(linear.training), linear.bias).train(linear.training)

    def to_dense(self) -> nn.Linear:
        """The same layer as an nn.Linear, exactly: zeros where nothing is stored. Copies."""
        with torch.no_grad():
            dense = self.weight.to_dense()
        return _new_linear(dense, self.bias, self.weight.values.requires_grad, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        return self.weight.linear(x, self.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # All checks of weight and bias come before the first copy: on error nothing is half-loaded.
        op = "BlockSparseLinear.load_state_dict"
        if isinstance(state_dict.get(prefix + "weight"), torch.Tensor):
            requirement = f"{prefix}weight must be block-sparse, {prefix}weight.values … (see from_dense)"
            fail(op, requirement, "a dense tensor")
        self.weight.check_state(op, state_dict, prefix + "weight.")
        bias = state_dict.get(prefix + "bias")
        if self.bias is not None and bias is not None and bias.shape != self.bias.shape:
            fail(op, f"{prefix}bias must be of shape {tuple(self.bias.shape)}", tuple(bias.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


class PseudoBlockSparseLinear(_BlockLinear):
    """The masked dense oracle of BlockSparseLinear: an ordinary (N, K) weight, F.linear and a block mask.

    Same arguments, distribution and interface; runs anywhere torch does, no faster than dense. For
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
        *,
        density: float = 0.5,
        block_shape: tuple[int, int] = (32, 32),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        op = "PseudoBlockSparseLinear"
        k, n, density, block_shape = _check_sizes(op, in_features, out_features, density, block_shape)
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
            bounds = _init_bounds(self.block_mask, self.in_features, self.block_shape[1])
            rows = bounds.repeat_interleave(self.block_shape[0])[: self.out_features, None]
            self.weight.uniform_(-1, 1, generator=generator)
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
        weight = _check_linear(op, linear).weight.detach()
        block_shape = check_block_shape(op, block_shape)
        block_mask = choose_blocks(op, weight, block_shape, mask, density, scores)
        return cls._make(linear.weight, linear.bias, block_mask, block_shape, linear.training)

    @classmethod
    def from_sparse(cls, layer: BlockSparseLinear) -> PseudoBlockSparseLinear:
        """The oracle of a BlockSparseLinear: same values, same pattern. Copies."""
        if not isinstance(layer, BlockSparseLinear):
            op = "PseudoBlockSparseLinear.from_sparse"
            fail(op, "layer must be a BlockSparseLinear", type(layer).__name__, TypeError)
        dense = layer.to_dense()
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
        return _new_linear(dense, self.bias, self.weight.requires_grad, self.training)

    def element_mask(self) -> torch.Tensor:
        """(N, K) bool."""
        return expand_mask(self.block_mask, tuple(self.weight.shape), self.block_shape)

    def masked_weight(self) -> torch.Tensor:
        """(N, K): the weight with zeros outside the mask, where even NaN counts as zero."""
        return torch.where(self.element_mask(), self.weight, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        return functional.linear(x, self.masked_weight(), self.bias)
