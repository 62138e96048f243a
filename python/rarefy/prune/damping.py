"""XᵀX made positive definite: more dampening while it is singular, and a warning that says so."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch

from ..checks import fail


@dataclass(frozen=True)
class Damped:
    """XᵀX with λI added, and what is derived from it once; float64 on the CPU, (K, K) each.

    Attributes:
        gram: XᵀX.
        hessian: H = XᵀX + λI.
        lower: L with LLᵀ = H.
        inverse: H⁻¹.
    """

    gram: torch.Tensor
    hessian: torch.Tensor
    lower: torch.Tensor
    inverse: torch.Tensor

    @cached_property
    def sweep(self) -> torch.Tensor:
        """U with UᵀU = H⁻¹, upper triangular: what a sweep over the columns goes along."""
        return torch.linalg.cholesky(self.inverse, upper=True).contiguous()


def damped(op: str, gram: torch.Tensor | Damped, dampening: float, name: str) -> Damped:
    """XᵀX + λI, λ = dampening · mean of the diagonal; what is Damped already stays as it is.

    A matrix that is singular even so gets ten times more, up to 10⁶ times, and a RuntimeWarning says it.

    Raises ValueError for a dampening that is negative or not finite, and for a matrix that is not finite, or
    singular still.
    """
    if isinstance(gram, Damped):
        return gram
    if not 0 <= dampening < float("inf"):
        fail(op, "dampening must be finite and not negative", dampening)
    gram = gram.detach().cpu().double()
    if not bool(torch.isfinite(gram).all()):
        fail(op, f"XᵀX of {name} must be finite", "NaN or infinity")
    mean = float(gram.diagonal().mean()) if len(gram) else 0.0
    used = dampening
    for attempt in range(7):
        made = gram.clone()
        made.diagonal().add_(used * (mean or 1.0))
        lower, info = torch.linalg.cholesky_ex(made)
        # Of a factor with a zero or worse on its diagonal torch makes no inverse, it raises.
        inverse = torch.cholesky_inverse(lower) if int(info) == 0 else None
        if inverse is not None and bool(torch.isfinite(inverse).all()):
            if attempt:
                what = f"XᵀX of {name} is singular"
                text = f"[{op}] {what}; dampening raised from {dampening:g} to {used:g}"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            return Damped(gram, made.contiguous(), lower, inverse.contiguous())
        used = max(used, 1e-6) * 10
    return fail(op, f"XᵀX of {name} must be positive definite after dampening", f"dampening {used / 10:g}")
