"""Top-KAST: a part of the stored blocks computes, and all of them learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..activations import activate
from ..checks import check_density, fail
from ..csr import CsrWeight
from ..masks import block_count
from ..ops import bsr_grad_input, bsr_grad_weight, bsr_linear
from ..pattern import BsrPattern
from ..values import dense_of
from ..weight import BsrWeight
from .checkpoint import check_entries
from .movable import Movable, Stored
from .moving import Move, MovingPattern, top


class _LinearOfPart(torch.autograd.Function):
    """y = x W_Aᵀ + b; dx of W_A too; the gradient of the values of all blocks, those outside A included."""

    @staticmethod
    def forward(ctx, x, blocks, bias, weight):
        part = blocks[weight.active]
        ctx.set = (weight.active_pattern.plan, weight.pattern.plan, *weight.shape)
        ctx.block_shape, ctx.stored = blocks.shape[1:], blocks.dtype
        ctx.save_for_backward(x, part)
        return bsr_linear(x, part, ctx.set[0], bias, *weight.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, part = ctx.saved_tensors
        active, whole, n, k = ctx.set
        dx = dvalues = dbias = None
        if ctx.needs_input_grad[0]:
            dx = bsr_grad_input(dy, part, active, n, k)
        if ctx.needs_input_grad[1]:
            dvalues = bsr_grad_weight(dy, x, whole, *ctx.block_shape, n, k, ctx.stored)
        if ctx.needs_input_grad[2]:
            dbias = dy.reshape(-1, n).sum(0)
        return dx, dvalues, dbias, None


class _Part:
    """Of a weight: only the blocks `active` (positions in values, ascending) are multiplied by.

    No kernel derives anything for it, and no network of it runs as one op.
    """

    active: torch.Tensor
    active_pattern: BsrPattern

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        blocks = self.blocks(self.values)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, blocks, bias = x.to(dtype), blocks.to(dtype), None if bias is None else bias.to(dtype)
        y = _LinearOfPart.apply(x, blocks.to(x.dtype), bias, self)
        return y if activation is None else activate(y, activation)

    def to_dense(self) -> torch.Tensor:
        """The (N, K) tensor that it multiplies by, zeros for what is not active; differentiable."""
        return dense_of(self.blocks(self.values)[self.active], self.active_pattern)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.active_pattern, self.active = self.active_pattern.to(self.device), self.active.to(self.device)
        return self

    def set_active(self, mask: torch.Tensor) -> None:
        """The blocks of a bool mask, (block rows, block columns), all of which must be stored."""
        pattern = BsrPattern.from_mask(mask, shape=tuple(self.shape), block_shape=self.block_shape)
        self.active_pattern = pattern.to(self.device)
        stored = self.pattern.positions()
        self.active = torch.searchsorted(stored, self.active_pattern.positions())


class PartOfBsr(_Part, BsrWeight):
    """A BsrWeight that computes with a part of its blocks."""


class PartOfCsr(_Part, CsrWeight):
    """A CsrWeight that computes with a part of its elements."""


_KINDS: dict[type, type] = {BsrWeight: PartOfBsr, CsrWeight: PartOfCsr}


class TopKAST(MovingPattern):
    """The largest blocks compute, more learn (Jayakumar et al. 2020): forward set A inside backward set B.

    B are the stored blocks, A the part `forward` of them with the largest L2 norms, chosen anew every `every`
    steps. The layer and its input's gradient are those of A alone, at the speed of A; the values' gradient is
    that of B. Where the paper keeps all weights and B is the next largest of them, nothing outside B is
    stored here: with each choice a part `fraction` of B outside A, the smallest, gives way to blocks
    anywhere, with values as `init` draws them.

    Add `penalty(strength)` to the loss: without decay blocks outside A that learnt once never give way.
    `finish()` leaves ordinary layers with A.

    Args:
        forward: |A| / |B|, in [0, 1].
        others: see MovingPattern; the model must have stored blocks, no twins. `init` is "uniform".
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, *, forward: float = 0.5, **others: Any):
        self.forward = check_density("TopKAST", forward)
        super().__init__(model, optimizer, **{"init": "uniform", **others})
        for layer in self.layers:
            kinds = {type(module.weight) for module in layer.modules}
            if not isinstance(layer, Stored) or not kinds <= _KINDS.keys():
                got = f"{layer.name}: {', '.join(kind.__name__ for kind in kinds)}"
                fail("TopKAST", "weights must be a BsrWeight or a CsrWeight", got, TypeError)
            if any(module.weight.x_dtype is not None for module in layer.modules):
                fail("TopKAST", "values must be of the dtype they compute in", layer.name, TypeError)
        for layer in self.layers:
            active = self._largest(layer)
            for module in layer.modules:
                weight = module.weight
                module.weight = _KINDS[type(weight)].from_pattern(weight.values, weight.pattern)
                module.weight.train(module.training).set_active(active)

    def penalty(self, strength: float) -> torch.Tensor:
        """For the loss: strength / 2 · (Σ_A w² + Σ_(B without A) w² / d), d the density of A."""
        total: Any = 0.0
        for layer in self.layers:
            weight = layer.weight
            squares = weight.blocks(weight.values).square().flatten(1).sum(1)
            inside = squares[weight.active].sum()
            density = len(weight.active) / max(1, layer.grid[0] * layer.grid[1])
            total = total + inside + (squares.sum() - inside) / max(density, 1e-12)
        return strength / 2 * total

    def active(self, name: str) -> torch.Tensor:
        """(block rows, block columns) bool: the blocks of A of this layer."""
        layer = next((x for x in self.layers if name in x.names), None)
        if layer is None:
            fail("TopKAST", "name must be that of a layer", repr(name))
        return layer.weight.active_pattern.mask().cpu()

    def finish(self) -> None:
        """Ordinary weights that store A alone, with its values and its optimizer's state."""
        for layer in self.layers:
            pattern, optimizer = layer.weight.active_pattern, self._optimizer_of(layer)
            layer.weight.change_pattern(pattern, optimizer)
            for module in layer.modules:
                part = module.weight
                kind = next(plain for plain, mine in _KINDS.items() if type(part) is mine)
                module.weight = kind.from_pattern(part.values, part.pattern).train(module.training)
        self.layers = []

    def _largest(self, layer: Movable) -> torch.Tensor:
        return top(layer.norms(), block_count(self.forward, layer.nnzb))

    def _next(self, layer: Movable, fraction: float, gradient: torch.Tensor | None) -> torch.Tensor:
        nnzb, computing = layer.nnzb, block_count(self.forward, layer.nnzb)
        kept = top(layer.norms(), nnzb - round(fraction * (nnzb - computing)))  # all of A among them
        wanted = torch.rand(layer.grid, generator=self.random)
        return top(wanted.masked_fill_(kept, torch.inf), nnzb)

    def _change(self, layer: Movable, mask: torch.Tensor) -> Move:
        active = self._largest(layer)
        move = super()._change(layer, mask)
        for module in layer.modules:
            module.weight.set_active(active)
        return move

    def settings(self) -> dict[str, str]:  # noqa: D102
        return super().settings() | {"forward": str(self.forward)}

    def state_dict(self) -> dict[str, Any]:
        """As of every method, and the blocks of A."""
        active = {layer.name: layer.weight.active.clone() for layer in self.layers}
        return super().state_dict() | {"active": active}

    def _check_state(self, op: str, state_dict: Mapping[str, Any]) -> None:
        super()._check_state(op, state_dict)
        check_entries(op, state_dict, {"active": Mapping})
        check_entries(op, state_dict["active"], {x.name: torch.Tensor for x in self.layers}, "active")
        for layer in self.layers:
            at, nnzb = state_dict["active"][layer.name], layer.nnzb
            if at.ndim != 1 or at.dtype != torch.int64 or bool(((at < 0) | (at >= nnzb)).any()):
                requirement = f"the active blocks of {layer.name} must be int64 positions below {nnzb}"
                fail(op, requirement, f"{tuple(at.shape)} of {at.dtype}")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As of every method."""
        super().load_state_dict(state_dict, strict)
        for layer in self.layers:
            pattern, at = layer.weight.pattern, state_dict["active"][layer.name]
            mask = torch.zeros(layer.grid[0] * layer.grid[1], dtype=torch.bool)
            mask[pattern.positions().cpu()[at.cpu()]] = True
            for module in layer.modules:
                module.weight.set_active(mask.view(layer.grid))
