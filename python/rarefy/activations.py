"""The activations that products can fuse, as torch computes them, with their derivatives.

A recorded call computes them by torch from the sums that its derivative needs anyway; see
docs/design/pytorch.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .checks import fail

NONE = "none"
NAMES = ("relu", "gelu", "gelu_tanh", "silu")  # "gelu" is the exact one, by erf


def check_activation(op: str, activation: Any) -> str:
    """The name that ops take; None means none."""
    if activation is None:
        return NONE
    if activation not in (NONE, *NAMES):
        fail(op, f"activation must be None, {', '.join(NAMES)}", repr(activation))
    return activation


def activate(x: Tensor, activation: str) -> Tensor:
    """act(x), differentiable to any order."""
    if activation == "relu":
        return functional.relu(x)
    if activation == "silu":
        return functional.silu(x)
    if activation in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return x


def module_of(activation: str) -> nn.Module:
    """The module of torch that does the same."""
    if activation in ("gelu", "gelu_tanh"):
        return nn.GELU(approximate="tanh" if activation == "gelu_tanh" else "none")
    return {"relu": nn.ReLU, "silu": nn.SiLU}[activation]()


def with_activation(linear: nn.Module, activation: str) -> nn.Sequential:
    """A layer and its activation, in the mode of the layer."""
    return nn.Sequential(linear, module_of(activation)).train(linear.training)


def activation_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """act'(x) · grad."""
    aten = torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(grad, x, 0)
    if activation == "silu":
        return aten.silu_backward(grad, x)
    if activation in ("gelu", "gelu_tanh"):
        return aten.gelu_backward(grad, x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return grad
