"""XᵀX made positive definite: more dampening where it is singular, and a warning that says so."""

from __future__ import annotations

import warnings

import torch

from ..checks import fail


def damped(gram: torch.Tensor, dampening: float, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """XᵀX + λI and its inverse in float64, λ = dampening · mean of the diagonal.

    A matrix that is singular even so gets ten times more, up to 10⁶ times, and a RuntimeWarning says it.

    Raises ValueError for a matrix that is not finite, or singular still.
    """
    op = "reconstruct"
    gram = gram.double()
    if not bool(torch.isfinite(gram).all()):
        fail(op, f"XᵀX of {name} must be finite", "NaN or infinity")
    mean = float(gram.diagonal().mean()) if len(gram) else 0.0
    used = dampening
    for attempt in range(7):
        made = gram.clone()
        made.diagonal().add_(used * (mean or 1.0))
        factor, info = torch.linalg.cholesky_ex(made)
        inverse = torch.cholesky_inverse(factor)
        if int(info) == 0 and bool(torch.isfinite(inverse).all()):
            if attempt:
                what = f"XᵀX of {name} is singular"
                text = f"[{op}] {what}; dampening raised from {dampening:g} to {used:g}"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            return made.contiguous(), inverse.contiguous()
        used = max(used, 1e-6) * 10
    return fail(op, f"XᵀX of {name} must be positive definite after dampening", f"dampening {used / 10:g}")
