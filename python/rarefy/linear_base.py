"""What BlockSparseLinear and its masked dense oracle share: checked arguments, biases, attributes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .checks import check_block_fits, check_block_shape, check_density, check_int, check_shape, fail
from .values import draw_uniform_, new_values


def check_sizes(
    op: str, in_features: Any, out_features: Any, density: Any, block_shape: Any, unnamed: tuple
) -> tuple[int, int, float, tuple[int, int]]:
    """The arguments of a constructor after checks; `unnamed` are those beyond bias, which it refuses."""
    if unnamed:
        got = ", ".join(map(repr, unnamed))
        requirement = "arguments after bias must be given by name: density=…, block_shape=…, device=…"
        fail(op, requirement, got, TypeError)
    k = check_int(op, "in_features", in_features)
    n = check_int(op, "out_features", out_features)
    density = check_density(op, density)
    n, k = check_shape(op, (n, k))
    return k, n, density, check_block_fits(op, (n, k), check_block_shape(op, block_shape))


def check_linear(op: str, linear: Any) -> nn.Linear:
    """Returns `linear` if it is an nn.Linear that holds data."""
    if not isinstance(linear, nn.Linear):
        fail(op, "linear must be an nn.Linear", type(linear).__name__, TypeError)
    if not isinstance(linear.weight, torch.Tensor) or linear.weight.is_meta:
        fail(op, "linear must hold data", "a weight on the meta device", TypeError)
    return linear


def check_state(op: str, layer: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Checks weight and bias before the first copy: on error nothing is half-loaded."""
    if isinstance(state_dict.get(prefix + "weight"), torch.Tensor):
        requirement = f"{prefix}weight must be block-sparse, {prefix}weight.values … (see from_dense)"
        fail(op, requirement, "a dense tensor")
    layer.weight.check_state(op, state_dict, prefix + "weight.")
    bias = state_dict.get(prefix + "bias")
    if layer.bias is not None and bias is not None and bias.shape != layer.bias.shape:
        fail(op, f"{prefix}bias must be of shape {tuple(layer.bias.shape)}", tuple(bias.shape))


def _parameter_like(data: torch.Tensor, source: torch.Tensor) -> nn.Parameter:
    return new_values(data, source.requires_grad and data.dtype.is_floating_point)


def copy_parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    """A Parameter with a copy of a tensor, which trains as that does; None for None."""
    return None if tensor is None else _parameter_like(tensor.detach().clone(), tensor)


def new_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, requires_grad: bool, training: bool
) -> nn.Linear:
    """An nn.Linear that holds these tensors, built without drawing an initialisation."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=requires_grad)
    linear.bias = copy_parameter(bias)
    return linear.train(training)


class LinearBase(nn.Module):
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
        self.bias = copy_parameter(bias)
        return self.train(training)

    @torch.no_grad()
    def _reset_bias(self, generator: torch.Generator | None) -> None:
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            draw_uniform_(self.bias, bound, generator)
