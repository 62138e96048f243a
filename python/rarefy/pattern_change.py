"""PatternChange: from one pattern to another, with values, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import _load
from .checks import check_tensor, fail
from .pattern import BsrPattern
from .sparse_weight import swap_data

_move = _load.op("_move_blocks")
_move_in_place = _load.op("_move_blocks_")


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(blocks, …) of any dtype as (blocks, bytes) uint8; shares memory if contiguous."""
    blocks, *block = tensor.shape
    return tensor.detach().reshape(blocks, math.prod(block)).contiguous().view(torch.uint8)


def move_blocks(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The blocks of `tensor` in another order: block i is tensor[source[i]], or zeros for -1.

    The one place where blocks move, at the speed of memory.

    Args:
        tensor: (blocks, …), of any dtype.
        source: int64, a position for each block of the result, on the tensor's device; those that are not -1
            ascend.
    """
    moved = _move(_as_bytes(tensor), source)
    return moved.view(tensor.dtype).reshape(len(source), *tensor.shape[1:])


def move_blocks_(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """The same in the tensor's memory, for as many blocks as it has."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        _move_in_place(_as_bytes(tensor), source)
        torch.autograd.graph.increment_version(tensor)  # a pending backward must notice
    else:
        tensor.copy_(move_blocks(tensor, source))


class PatternChange:
    """The way from one pattern of a matrix to another, in blocks of the same shape.

    Args:
        old: the pattern that tensors have.
        new: the pattern that they are to have.

    `source` says for each block of the new pattern which block of the old one it was, -1 if it is new. What
    a block held goes with it; blocks that are new start at zero, and those that are not in the new pattern
    are gone.

    Raises ValueError unless shape and block shape agree and both patterns hold indices.
    """

    def __init__(self, old: BsrPattern, new: BsrPattern) -> None:
        op = "PatternChange"
        for name, pattern in (("old", old), ("new", new)):
            if not isinstance(pattern, BsrPattern):
                fail(op, f"{name} must be a BsrPattern", type(pattern).__name__, TypeError)
            if pattern.is_meta:
                fail(op, f"{name} must hold indices", "a pattern on the meta device")
        if (old.shape, old.block_shape) != (new.shape, new.block_shape):
            requirement = f"new must be of shape {tuple(old.shape)} and block_shape {old.block_shape}"
            fail(op, requirement, f"{tuple(new.shape)} and {new.block_shape}")
        self.old, self.new = old, new.to(old.device)
        before, after = old.positions(), self.new.positions()
        at = torch.searchsorted(before, after).clamp_(max=max(len(before) - 1, 0))
        if len(before):
            self.source = torch.where(before[at] == after, at, -1)
        else:
            self.source = torch.full_like(after, -1)
        self._fresh = (self.source < 0).nonzero().flatten()

    @property
    def in_place(self) -> bool:
        """Whether both patterns have as many blocks, so that tensors can stay where they are."""
        return self.old.nnzb == self.new.nnzb

    def kept(self) -> int:
        """How many blocks are in both patterns."""
        return len(self.source) - len(self._fresh)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of one entry a block, (old.nnzb, …), as one for the new pattern; zeros where it is new."""
        check_tensor("PatternChange.move", "tensor", tensor)
        if tensor.ndim == 0 or tensor.shape[0] != self.old.nnzb:
            requirement = f"tensor must have an entry for each of {self.old.nnzb} blocks"
            fail("PatternChange.move", requirement, tuple(tensor.shape))
        return move_blocks(tensor, self.source.to(tensor.device))

    def check(self, parameter: nn.Parameter, optimizer: Optimizer | None) -> None:
        """Raises what `apply` would raise; changes nothing."""
        list(self._state(parameter, optimizer))

    @torch.no_grad()
    def apply(
        self,
        parameter: nn.Parameter,
        optimizer: Optimizer | None = None,
        *,
        values: torch.Tensor | None = None,
    ) -> None:
        """Moves a Parameter's data, its gradient, and what an optimizer keeps of it.

        The Parameter stays the same object, so the optimizer's groups stay right. With as many blocks as
        before all tensors stay in their memory; otherwise they get memory of the new size.

        Args:
            parameter: values of the old pattern, (old.nnzb, …).
            optimizer: moves each of its state tensors of the Parameter's shape (exp_avg, momentum_buffer …);
                counters stay.
            values: of the new pattern: what blocks that are new start with, instead of zero.

        Raises ValueError for state of another shape, before anything is changed.
        """
        states = list(self._state(parameter, optimizer))
        shape = (self.new.nnzb, *parameter.shape[1:])
        if values is not None and values.shape != shape:
            fail("PatternChange.apply", f"values must be of shape {tuple(shape)}", tuple(values.shape))
        if self.in_place:
            tensors = [parameter, parameter.grad, *(state[key] for state, key in states)]
            for tensor in {id(tensor): tensor for tensor in tensors if tensor is not None}.values():
                move_blocks_(tensor, self.source.to(tensor.device))
        else:
            data, grad = self.move(parameter.detach()), parameter.grad
            grad = None if grad is None else self.move(grad)
            moved = [self.move(state[key]) for state, key in states]
            swap_data(parameter, data, grad)
            for (state, key), tensor in zip(states, moved, strict=True):
                state[key] = tensor
        if values is not None:
            fresh = self._fresh.to(parameter.device)
            parameter.index_copy_(0, fresh, values.detach().to(parameter)[fresh])

    def _state(self, parameter: nn.Parameter, optimizer: Optimizer | None) -> Iterator[tuple[dict, Any]]:
        """The optimizer's tensors that must move with the Parameter, as (dict, key)."""
        op = "PatternChange.apply"
        if optimizer is None:
            return
        if not isinstance(optimizer, Optimizer):
            fail(op, "optimizer must be a torch.optim.Optimizer", type(optimizer).__name__, TypeError)
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                yield state, key
                continue
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, torch.Tensor) and part.numel() > 1:
                    requirement = f"the optimizer's {key!r} must be of the Parameter's shape to move with it"
                    fail(op, requirement, tuple(part.shape))
