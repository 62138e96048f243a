"""Nested tensors as inputs of a sparse weight: nn.TransformerEncoder makes them of masked batches."""

from __future__ import annotations

from typing import Any

import torch


def linear_of_nested(weight: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X Wᵀ + bias for each tensor of a nested x, in one product; layout and autograd stay."""
    if x.layout == torch.jagged:
        y = weight.linear(x.values(), bias)
        return torch.nested.nested_tensor_from_jagged(y, offsets=x.offsets())
    parts = x.unbind()
    tokens = [part.numel() // part.shape[-1] for part in parts]
    y = weight.linear(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]), bias)
    pieces = [
        piece.reshape(*part.shape[:-1], y.shape[-1])
        for piece, part in zip(y.split(tokens), parts, strict=True)
    ]
    return torch.nested.as_nested_tensor(pieces)
