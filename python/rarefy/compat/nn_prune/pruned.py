"""The parametrization that holds a mask, and the modules that have one."""

from __future__ import annotations

import functools
import numbers
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ...checks import check_known, check_tensor, fail


class Pruned(nn.Module):
    """The parametrization: the original times a mask, zero where the mask is, even of NaN.

    `mask`, of the tensor's shape and dtype, 1 stays: a buffer, so it is saved.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        """The pruned tensor."""
        return torch.where(self.mask != 0, original, 0)


def place(op: str, module: nn.Module, name: str) -> tuple[torch.Tensor, Pruned | None]:
    """The tensor under its masks, and its parametrization if there is one."""
    if not isinstance(module, nn.Module):
        fail(op, "module must be an nn.Module", type(module).__name__, TypeError)
    if parametrize.is_parametrized(module, name):
        for made in module.parametrizations[name]:
            if isinstance(made, Pruned):
                return getattr(module, name).detach(), made
        fail(
            op,
            f"{name} must have no parametrization of others",
            type(module.parametrizations[name][0]).__name__,
        )
    check_known(op, "name", name, [n for n, _ in module.named_parameters(recurse=False)])
    return getattr(module, name).detach(), None


def count_of(op: str, amount: Any, left: int) -> int:
    """Of so many that are left: an int is a number of them, a float the part round(amount · left)."""
    if isinstance(amount, numbers.Integral) and not isinstance(amount, bool):
        if not 0 <= amount <= left:
            fail(op, f"amount must be in [0, {left}], or a part in [0.0, 1.0]", amount)
        return int(amount)
    if not isinstance(amount, numbers.Real) or isinstance(amount, bool):
        fail(op, "amount must be a number", repr(amount), TypeError)
    if not 0.0 <= amount <= 1.0:
        fail(op, f"amount must be in [0.0, 1.0], or an int up to {left}", amount)
    return round(float(amount) * left)


def add_mask(op: str, module: nn.Module, name: str, keep: torch.Tensor) -> nn.Module:
    """Adds a mask, bool of the tensor's shape, to those there are."""
    tensor, made = place(op, module, name)
    if made is None:
        mask = keep.to(tensor.device).to(tensor.dtype)
        parametrize.register_parametrization(module, name, Pruned(mask))
        _name_parts(module, name)
    else:
        made.mask.mul_(keep.to(made.mask.device))
    return module


def _name_parts(module: nn.Module, name: str) -> None:
    """`module.weight_orig` and `module.weight_mask`, which code for the original reads."""

    def part(which: str, of: nn.Module) -> torch.Tensor:
        if parametrize.is_parametrized(of, name):
            made = [p for p in of.parametrizations[name] if isinstance(p, Pruned)]
            if made:
                return made[0].mask if which == "mask" else of.parametrizations[name].original
        raise AttributeError(f"{type(of).__name__!r} object has no attribute '{name}_{which}'")

    for which in ("orig", "mask"):  # of the class that parametrize made for this module and its copies
        setattr(type(module), f"{name}_{which}", property(functools.partial(part, which)))


def left_of(tensor: torch.Tensor, made: Pruned | None) -> torch.Tensor:
    """Bool: what no mask has removed so far, of what place gave."""
    return torch.ones_like(tensor, dtype=torch.bool) if made is None else made.mask != 0


def scores_of(op: str, tensor: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """The scores that were given, checked, on the tensor's device; or the tensor itself."""
    if given is None:
        return tensor.detach()
    check_tensor(op, "importance_scores", given)
    if given.shape != tensor.shape:
        fail(op, f"importance_scores must be of shape {tuple(tensor.shape)}", tuple(given.shape))
    return given.detach().to(tensor.device)


def remove(module: nn.Module, name: str, *, optimizer: Optimizer | None = None) -> nn.Module:
    """Makes pruning permanent: the tensor is a Parameter with zeros, the same one as before.

    Args:
        module: changed in place, and returned.
        name: of a pruned tensor.
        optimizer: keeps the zeros from now on: their gradients and state are zero, and so are they after
            each of its steps (there, and here without it, the next step fills them).

    Raises ValueError for a tensor that is not pruned, TypeError for another kind of optimizer.
    """
    made = place("remove", module, name)[1]
    if made is None:
        fail("remove", f"{name} must be pruned", "a plain parameter")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        fail("remove", "optimizer must be a torch.optim.Optimizer", kind, TypeError)
    original = module.parametrizations[name].original
    value = getattr(module, name).detach().clone()
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    with torch.no_grad():
        original.copy_(value)
    if optimizer is not None:
        _keep_zeros(optimizer, original, made.mask == 0)
    return module


def _keep_zeros(optimizer: Optimizer, parameter: nn.Parameter, gone: torch.Tensor) -> None:
    """Hooks by which what is `gone` stays away; the optimizer holds them."""

    def before(*_: Any) -> None:
        if parameter.grad is not None:
            parameter.grad.masked_fill_(gone.to(parameter.device), 0)

    @torch.no_grad()
    def after(*_: Any) -> None:
        parameter.masked_fill_(gone.to(parameter.device), 0)

    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            value.masked_fill_(gone.to(value.device), 0)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def is_pruned(module: nn.Module) -> bool:
    """Whether a tensor of the module, or of one inside it, is pruned here."""
    return any(isinstance(inner, Pruned) for inner in module.modules())
