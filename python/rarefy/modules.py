"""BlockSparseLinear, the drop-in for nn.Linear: one layer for every sparse format."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .activations import NONE, check_activation, with_activation
from .chain import Hidden, may_wait
from .checks import check_dtype, check_tensor, fail
from .linear_base import LinearBase, check_linear, check_sizes, check_state, new_linear
from .masks import grid_of, random_blocks
from .pattern import BsrPattern
from .shared_input import SharedInput
from .sparse_weight import SparseWeight
from .spec import Spec
from .weight import BsrWeight


class BlockSparseLinear(LinearBase):
    """y = x Wᵀ + b with a block-sparse W; a drop-in for nn.Linear that stores only chosen blocks.

    Args:
        in_features, out_features: K and N; x of shape (…, K) gives y of shape (…, N). Any sizes: those
            that are no multiple of the block are padded inside the last block.
        bias: add a learned bias of shape (N,).
        density: stored blocks / all blocks, in [0, 1]. Exactly round(density · blocks) blocks are
            stored, every such set equally likely.
        block_shape: (R, C), rows (outputs) and columns (inputs) of a block, each ≥ 1.
        activation: "relu", "gelu" (by erf), "gelu_tanh" or "silu": the layer gives that of y, from the
            product's kernel. Default: none, as nn.Linear.
        generator: a torch.Generator for pattern and values; default: torch's global one.

    `weight` is a BsrWeight; its `values` are the Parameter. Values start uniform in ±1/√f, where f is
    the number of *stored* inputs of the row: nn.Linear's initialisation (He et al. 2015, fan-in, with
    a = √5) with the fan-in of the sparse layer, as in Evci et al., "Gradient Flow in Sparse Neural
    Networks and How Lottery Tickets Win", 2022. At density 1 it is nn.Linear's. The bias starts
    uniform in ±1/√K.

    Raises:
        ValueError: density outside [0, 1], a block dimension below 1, a negative size, an unknown activation.
        TypeError: arguments of the wrong kind.
    """

    weight: SparseWeight
    activation: str | None = None
    stands_for: str | None = None  # the kind of dense.py that desparsify turns it into; None: nn.Linear
    waits: bool = False  # whether the product may wait for what follows it; see chain.py
    shares: tuple[SharedInput, int] | None = None  # with layers that may see the same x; shared_input.py

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *unnamed: Any,
        density: float = 0.5,
        block_shape: tuple[int, int] = (32, 32),
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        op = "BlockSparseLinear"
        k, n, density, block_shape = check_sizes(op, in_features, out_features, density, block_shape, unnamed)
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        check_dtype(op, "dtype", dtype)
        if not dtype.is_floating_point:
            fail(op, "dtype must be floating point", dtype, TypeError)
        self.in_features, self.out_features = k, n
        self._set_activation(op, activation)
        # Where a tensor made here would go: `device`, or torch.device(…) as a context, or the default.
        device = torch.empty(0, device=device).device
        block_mask = random_blocks(grid_of((n, k), block_shape), density, generator)
        pattern = BsrPattern.from_mask(block_mask, shape=(n, k), block_shape=block_shape, device=device)
        values = torch.zeros((pattern.nnzb, *block_shape), device=device, dtype=dtype)
        self.weight = BsrWeight.from_pattern(values, pattern)
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

    def extra_repr(self) -> str:
        """The arguments that made the layer, density as it is."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        active = "" if self.activation is None else f", activation={self.activation!r}"
        return f"{sizes}, bias={self.bias is not None}, {self.weight.options_repr()}{active}"

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values and bias anew on the same pattern (see the class for the distribution)."""
        self.weight.reset_parameters(generator)
        self._reset_bias(generator)

    @classmethod
    def from_weight(
        cls, weight: SparseWeight, bias: torch.Tensor | None = None, *, activation: str | None = None
    ) -> BlockSparseLinear:
        """A layer around an existing weight of any format, which it takes as it is; the bias is copied.

        `activation` is the constructor's.
        """
        op = "BlockSparseLinear.from_weight"
        if not isinstance(weight, SparseWeight):
            fail(op, "weight must be a SparseWeight", type(weight).__name__, TypeError)
        if bias is not None:
            check_tensor(op, "bias", bias)
            if tuple(bias.shape) != (weight.shape[0],):
                fail(op, f"bias must be of shape ({weight.shape[0]},)", tuple(bias.shape))
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.out_features, layer.in_features = weight.shape
        layer.weight = weight
        layer._set_activation(op, activation)
        return layer._finish(bias, True)

    def _set_activation(self, op: str, activation: str | None) -> None:
        if (name := check_activation(op, activation)) != NONE:
            self.activation = name

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        spec: str | Spec | None = None,
        *,
        block_shape: tuple[int, int] | None = None,
        mask: torch.Tensor | None = None,
        density: float | None = None,
        scores: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> BlockSparseLinear:
        """Keeps the trained values of the chosen part of an nn.Linear, bit for bit, and its bias.

        The format is a `spec` ("block:32x32@0.25", "csr@0.1"; see rarefy.sparsify), or blocks of
        `block_shape`. `mask`, `density` and `scores` are those of BsrWeight.from_dense; without any, all
        blocks are kept; a spec has its own density, unless a mask says what to keep. Copies: `linear` stays
        as it is. Device, dtype, requires_grad and training mode carry over. `activation` is the
        constructor's: what follows `linear` is to be left out then.
        """
        op = "BlockSparseLinear.from_dense"
        dense = check_linear(op, linear).weight
        options = {"mask": mask, "scores": scores}
        if spec is None:
            if block_shape is None:
                fail(op, "block_shape or a spec must be given", "neither", TypeError)
            weight = BsrWeight.from_dense(dense, block_shape=block_shape, density=density, **options)
        else:
            if block_shape is not None or density is not None:
                fail(op, "a spec excludes block_shape and density", (block_shape, density))
            weight = Spec.parse(spec, op).make(dense, **options)
        weight.requires_grad_(dense.requires_grad)
        layer = cls.from_weight(weight.train(linear.training), linear.bias)
        layer._set_activation(op, activation)
        return layer.train(linear.training)

    def to_dense(self) -> nn.Module:
        """The same layer as an nn.Linear, exactly, of x's dtype: zeros where nothing is stored. Copies.

        With an activation an nn.Sequential of nn.Linear and the activation.
        """
        linear = self.to_linear()
        return linear if self.activation is None else with_activation(linear, self.activation)

    def to_linear(self) -> nn.Linear:
        """What `to_dense` gives, without the activation."""
        with torch.no_grad():
            dense = self.weight.to_dense().to(self.weight.x_dtype or self.weight.dtype)
        return new_linear(dense, self.bias, self.weight.requires_grad, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        activation = self.activation
        if type(x) is Hidden:
            if activation is None:
                return x.through(self)
            x = x.value()
        if self.waits and may_wait(self, x):
            hidden = Hidden.of(self, x)
            return hidden if activation is None else hidden.noted(activation)
        if self.shares is not None and activation is None:
            shared, at = self.shares
            if (y := shared.result(at, self, x)) is not None:
                return y
        # From their dicts: nn.Module's lookup of both takes a tenth of the time of a small layer.
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 (evaluates both)
        weight = self._modules["weight"]
        return weight.linear(x, bias) if activation is None else weight.linear(x, bias, activation)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        check_state("BlockSparseLinear.load_state_dict", self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
