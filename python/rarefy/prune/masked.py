"""The parametrization of a weight whose originals are kept: mask · original, and what gradients pass it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _StraightThrough(torch.autograd.Function):
    """Masks forward; backward the gradient passes whole, and SR-STE adds decay · what is masked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, decay: float) -> torch.Tensor:
        ctx.decay = decay
        ctx.save_for_backward(x, mask) if decay else ctx.save_for_backward()
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.decay:
            x, mask = ctx.saved_tensors
            gradient = gradient + ctx.decay * torch.where(mask, torch.zeros((), dtype=x.dtype), x)
        return gradient, None, None


class Masked(nn.Module):
    """For torch.nn.utils.parametrize: the weight with zeros where `mask` is False, NaN or not.

    Attributes:
        mask: bool buffer of the weight's shape.
        ste: None; "ste": gradients reach masked originals as if nothing were masked (Bengio et al. 2013);
            "sr-ste": and pull them to zero (Zhou et al. 2021).
        decay: how strongly, for "sr-ste".
    """

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor, ste: str | None = None, decay: float = 2e-4) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.ste, self.decay = ste, decay

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        if self.ste is None:
            return torch.where(self.mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
        return _StraightThrough.apply(x, self.mask, self.decay if self.ste == "sr-ste" else 0.0)
