"""bsr_feed_forward: two sparse layers, or three with a gate, as one op, and its derivatives.

On the CPU the hidden activations of a few tokens stay in cache between the layers; on CUDA the layers run one
after the other, their activation within, and share more where both have tall blocks. What is recorded on
CUDA, under torch.func or in forward mode is its layers, and has their derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _load, _torch_private
from ._torch_private import Function, below_autograd
from .activations import activate, activation_gradient, check_activation
from .derivatives import batched, check_plan, compact, grad_input, grad_weight, linear, over_tokens
from .op_rules import fake_rows_like, register_autocast, register_fake

op, _op_hidden = map(_load.op, ("bsr_feed_forward", "_bsr_feed_forward_hidden"))
run, _run_hidden = map(below_autograd, (op, _op_hidden))
copy_by_feature = _load.op("_copy_by_feature")  # of x on Hopper, with x's shape

# Where the arguments of the op are: what has a gradient, the plans, and values of layers.
_TENSORS = (0, 1, 3, 4, 6, 7, 9)
_PLANS = (2, 5, 8)
_DERIVED = 14  # from here on


def bsr_feed_forward(
    x: Tensor,
    up_values: Tensor,
    up_plan: Tensor,
    up_bias: Tensor | None,
    gate_values: Tensor | None,
    gate_plan: Tensor | None,
    gate_bias: Tensor | None,
    down_values: Tensor,
    down_plan: Tensor,
    down_bias: Tensor | None,
    out_features: int,
    hidden_features: int,
    in_features: int,
    activation: str | None = None,
    *derived: Tensor | int | None,
    rounds_x: bool = False,
) -> Tensor:
    """Return ``act(up(x)) @ D.T + bd``; with a gate, ``(act(gate(x)) * up(x)) @ D.T + bd``.

    up is a layer of shape (hidden_features, in_features), gate one of the same shape or None, D is
    (out_features, hidden_features). Blocks may differ, and dtypes as far as :func:`bsr_linear` takes them.

    Args:
        x: (..., in_features), as for :func:`bsr_linear`.
        up_values: values of the up layer, as for :func:`bsr_linear`, like all of the next.
        up_plan: its plan.
        up_bias: its bias, or None.
        gate_values: values of the gate, or None.
        gate_plan: its plan, or None.
        gate_bias: its bias, or None.
        down_values: values of D.
        down_plan: its plan.
        down_bias: bd, or None.
        out_features: rows of D.
        hidden_features: rows of U and G, columns of D.
        in_features: columns of U and G.
        activation: "relu", "gelu" (by erf), "gelu_tanh", "silu", or None.
        derived: nothing, or up's prepared and packed, D's prepared and packed, the key that all have, as
            ``weight.derived(x)`` gives them, and a gate's prepared and packed. Packed values must be those of
            the layers.
        rounds_x: x and hidden features in float32 may be rounded to bfloat16, as values are; see
            :func:`bsr_linear_rounded`. Calls that are recorded round nothing.

    Returns:
        (..., out_features), contiguous, of x's dtype. Hidden activations are not rounded to it: in float32
        the result has the bits of bsr_linear with `activation` and bsr_linear, in 16 bits it is closer to the
        exact one; but a kernel on packed weights, and those of CUDA, round them and have the layers' bits. A
        call that is recorded keeps the hidden features before the activation, half of what its layers would.

    Raises:
        ValueError: a shape, a plan, a layout or a name does not fit.
        TypeError: a dtype or a device does not fit.
        ImportError: the compiled library is missing.
    """
    name = check_activation("bsr_feed_forward", activation)
    args = (
        x,
        up_values,
        up_plan,
        up_bias,
        gate_values,
        gate_plan,
        gate_bias,
        down_values,
        down_plan,
        down_bias,
    )
    sizes = (out_features, hidden_features, in_features)
    return op(*args, *sizes, name, *op_derived(derived, rounds_x))


def op_derived(derived: tuple, rounds_x: bool) -> tuple:
    """What layers hold, in the order of the op's arguments."""
    if not rounds_x and len(derived) < 7:
        return derived
    return (*(derived[:5] or (None, None, None, None, 0)), rounds_x, *derived[5:])


def layers(
    x: Tensor,
    up_values: Tensor,
    up_plan: Tensor,
    up_bias: Tensor | None,
    gate_values: Tensor | None,
    gate_plan: Tensor | None,
    gate_bias: Tensor | None,
    down_values: Tensor,
    down_plan: Tensor,
    down_bias: Tensor | None,
    n: int,
    h: int,
    k: int,
    activation: str,
    *_: Tensor | int | None,
) -> Tensor:
    """The same as ops that have derivatives of any order."""
    hidden = linear(x, up_values, up_plan, up_bias, h, k)
    if gate_values is None:
        hidden = activate(hidden, activation)
    else:
        hidden = activate(linear(x, gate_values, gate_plan, gate_bias, h, k), activation) * hidden
    return linear(hidden, down_values, down_plan, down_bias, n, h)


class FeedForward(Function):
    """The kernel of bsr_feed_forward for autograd, outside torch.func and forward mode."""

    @staticmethod
    def forward(ctx, *args):  # noqa: D102
        y, up, gate = _run_hidden(*args[:_DERIVED])
        _save(ctx, args, up, gate)
        return y

    @staticmethod
    def save(ctx, inputs, output):  # noqa: D102
        _save(ctx, inputs, None, None)

    @staticmethod
    def backward(ctx, dy):  # noqa: D102
        if dy is None:
            return (None,) * len(ctx.others)
        *tensors, up, gate = ctx.saved_tensors
        args = list(ctx.others[:_DERIVED])
        for at, tensor in zip(_TENSORS, tensors, strict=True):
            args[at] = tensor
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient's own gradient: by the layers
            grads = _recorded(args, needs, dy)
        else:
            grads = _gradients(args, needs, dy, up, gate)
        return tuple(grads.get(at) for at in range(len(ctx.others)))


def _save(ctx: Any, args: tuple, up: Tensor | None, gate: Tensor | None) -> None:
    # Plans are kept as they are, as in derivatives.py.
    ctx.others = [None if at in _TENSORS else arg for at, arg in enumerate(args)]
    ctx.save_for_backward(*(args[at] for at in _TENSORS), up, gate if args[4] is not None else None)


def _recorded(args: list, needs: tuple, dy: Tensor) -> dict[int, Tensor]:
    """The gradients as a graph. Of aliases, so that one argument's history does not lead to another's."""
    wanted = [at for at in _TENSORS if needs[at]]
    aliases = {at: args[at].view_as(args[at]) for at in wanted}
    y = layers(*(aliases.get(at, arg) for at, arg in enumerate(args)))
    return dict(zip(wanted, torch.autograd.grad(y, aliases.values(), dy, create_graph=True), strict=True))


def _gradients(
    args: list, needs: tuple, dy: Tensor, up: Tensor | None, gate: Tensor | None
) -> dict[int, Tensor]:
    """The gradients of the arguments that need one, from the saved sums of the first layers."""
    x, uv, up_plan, ub, gv, gate_plan, gb, dv, down_plan, _, n, h, k, activation = args
    gated = gv is not None
    if up is None:
        up = linear(x, uv, up_plan, ub, h, k)
        gate = linear(x, gv, gate_plan, gb, h, k) if gated else None
    grads: dict[int, Tensor] = {}
    active = activate(gate if gated else up, activation) if gated or needs[7] else None
    if needs[7]:
        hidden = active * up if gated else active
        grads[7] = grad_weight(dy, hidden, down_plan, *dv.shape[1:], n, h, dv.dtype)
    if needs[9]:
        grads[9] = over_tokens(dy)
    if not any(needs[:7]):
        return grads
    d_hidden = grad_input(dy, dv, down_plan, n, h)
    branches = [
        (d_hidden * active if gated else activation_gradient(d_hidden, up, activation), uv, up_plan, 1)
    ]
    if gated:
        branches.append((activation_gradient(d_hidden * up, gate, activation), gv, gate_plan, 4))
    for d, values, plan, at in branches:
        if needs[0]:
            dx = grad_input(d, values, plan, h, k)
            grads[0] = grads[0] + dx if 0 in grads else dx
        if needs[at]:
            grads[at] = grad_weight(d, x, plan, *values.shape[1:], h, k, values.dtype)
        if needs[at + 2]:
            grads[at + 2] = over_tokens(d)
    return grads


def _autograd(*args: Any) -> Tensor:
    """The kernel for the dispatcher's Autograd key."""
    recorded = torch.is_grad_enabled() and any(
        args[at] is not None and args[at].requires_grad for at in _TENSORS
    )
    if not recorded and not _torch_private.forward_mode():
        return run(*args)
    if _torch_private.forward_mode() or _torch_private.in_torch_func() or args[0].is_cuda:
        return layers(*args)
    with _torch_private.allow_function():
        return FeedForward.apply(*args)


def _vmap(info, dims, *args):
    """A batch dimension of x is more tokens; other batched arguments are a call each."""
    for at in _PLANS:
        check_plan("bsr_feed_forward", dims[at])
    if all(dims[at] is None for at in _TENSORS[1:]):
        return op(args[0].movedim(dims[0], 0), *args[1:]), 0

    def call(*tensors: Tensor | None) -> Tensor:
        mine = list(args[:_DERIVED])
        for at, tensor in zip(_TENSORS, tensors, strict=True):
            mine[at] = compact(tensor) if at in (1, 4, 7) and tensor is not None else tensor
        return op(*mine)

    return batched(call, info, [dims[at] for at in _TENSORS], *(args[at] for at in _TENSORS))


def _fake(
    x, uv, up, ub, gv, gate, gb, dv, down, db, out_features, hidden_features, in_features, activation, *_
):
    return fake_rows_like("bsr_feed_forward", "x", x, in_features, "in_features", out_features)


def _fake_hidden(x, uv, up, ub, gv, *rest):
    hidden = rest[6]
    y = _fake(x, uv, up, ub, gv, *rest)
    saved = x.new_empty((*x.shape[:-1], hidden))
    return y, saved, x.new_empty((0,)) if gv is None else torch.empty_like(saved)


def _register() -> torch.library.Library:
    register_fake("bsr_feed_forward", _fake)
    register_fake("_bsr_feed_forward_hidden", _fake_hidden)
    for name in ("bsr_feed_forward", "_bsr_feed_forward_hidden"):
        _torch_private.rename_type_errors(getattr(torch.ops.rarefy, name))
    library = torch.library.Library("rarefy", "IMPL")
    if _torch_private.autograd_kernels:
        library.impl("bsr_feed_forward", _autograd, "Autograd")
    else:
        torch.library.register_autograd(
            "rarefy::bsr_feed_forward", FeedForward.backward, setup_context=FeedForward.save
        )
    torch.library.register_vmap("rarefy::bsr_feed_forward", _vmap)
    register_autocast(library, "bsr_feed_forward", op, _TENSORS)
    return library


if _load.problem is None:
    _library = _register()
