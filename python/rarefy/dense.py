"""Layers of other libraries that multiply by a matrix as nn.Linear does: as one, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Kind:
    """A class whose layers compute x Wᵀ + b.

    Attributes:
        module, name: where the class is; it is not imported for this.
        as_linear: such a layer as an nn.Linear that shares its memory, and its bias as the same Parameter.
        from_linear: an nn.Linear as such a layer, with the same Parameters where they can be.
    """

    module: str
    name: str
    as_linear: Callable[[nn.Module], nn.Linear]
    from_linear: Callable[[type, nn.Linear], nn.Module]

    def type(self) -> type | None:
        """The class, None where its library is not in use."""
        return getattr(sys.modules.get(self.module), self.name, None)


def _linear_of(weight: torch.Tensor, bias: torch.Tensor | None, like: nn.Module) -> nn.Linear:
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=like.weight.requires_grad)
    linear.bias = bias
    return linear.train(like.training)


def _from_conv1d(module: nn.Module) -> nn.Linear:
    return _linear_of(module.weight.detach().t(), module.bias, module)


def _to_conv1d(kind: type, linear: nn.Linear) -> nn.Module:
    with torch.device("meta"):
        module = kind(linear.out_features, linear.in_features)
    weight = linear.weight.detach().t().contiguous()
    module.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    module.bias = linear.bias
    return module.train(linear.training)


def _to_out_proj(kind: type, linear: nn.Linear) -> nn.Module:
    with torch.device("meta"):
        module = kind(linear.in_features, linear.out_features, bias=linear.bias is not None)
    module.weight, module.bias = linear.weight, linear.bias
    return module.train(linear.training)


# GPT-2's layer, which stores W transposed; and the last one of nn.MultiheadAttention.
KINDS = {
    "conv1d": Kind("transformers.pytorch_utils", "Conv1D", _from_conv1d, _to_conv1d),
    "out_proj": Kind(
        "torch.nn.modules.linear", "NonDynamicallyQuantizableLinear", lambda layer: layer, _to_out_proj
    ),
}


def kind_of(module: nn.Module) -> str | None:
    """The name in KINDS of a layer that is exactly of one of these classes."""
    found = (name for name, kind in KINDS.items() if type(module) is kind.type())
    return next(found, None) if "forward" not in vars(module) else None
