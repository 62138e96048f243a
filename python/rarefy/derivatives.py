"""Derivatives of the three products, which are each other's, and what vmap does with them.

Each product is linear in both operands. So its tangent is two calls of itself, its gradients are calls of
the other two, and derivatives of any order follow:

    y       = linear(x, values)         dx  = grad_input(dy, values)   dvalues = grad_weight(dy, x)
    dx      = grad_input(dy, values)    ddy = linear(ddx, values)      dvalues = grad_weight(dy, ddx)
    dvalues = grad_weight(dy, x)        ddy = linear(x, ddvalues)      dx      = grad_input(dy, ddvalues)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from . import _load, _torch_private
from ._torch_private import Function, below_autograd, eager_call, entry
from .activations import NONE, activate

linear, grad_input, grad_weight = map(_load.op, ("bsr_linear", "bsr_grad_input", "bsr_grad_weight"))
linear_rounded = _load.op("bsr_linear_rounded")
run_linear, run_grad_input, run_grad_weight = map(below_autograd, (linear, grad_input, grad_weight))
run_rounded = below_autograd(linear_rounded)
run_backward = eager_call(_load.op("_bsr_linear_backward"))
_alone, _held = map(entry, map(_load.op, ("_bsr_linear", "_bsr_linear_held")))


def run_eagerly(x: Tensor, values: Tensor, bias: Tensor | None, call: tuple) -> Tensor:
    """The product of an eager call below autograd; `call`: the plan, both sizes, and what is derived."""
    try:  # as eager_call, which takes 0.1 µs more
        if len(call) == 3:
            plan, n, k = call
            return _alone(x, values, plan, bias, n, k)
        plan, n, k, prepared, packed, key = call
        return _held(x, values, plan, bias, n, k, prepared, packed, key)
    except IndexError as error:
        raise TypeError(*error.args) from None


def _save(ctx: Any, first: Tensor, second: Tensor, plan: Tensor) -> None:
    """Keep each operand, but only if the other one needs a gradient.

    The plan is kept as it is, not by save_for_backward: it never changes, and a copy over itself (DDP
    broadcasts buffers before every forward) must not count as a change.
    """
    ctx.plan = plan
    needs = ctx.needs_input_grad
    ctx.save_for_backward(first if needs[1] else None, second if needs[0] else None)
    if _torch_private.forward_mode():
        ctx.save_for_forward(first, second)
        ctx.set_materialize_grads(False)


def _tangent(ctx: Any, product: Any, d_first: Tensor | None, d_second: Tensor | None, d_bias=None) -> Any:
    """The tangent of a product that is linear in both operands, of those of their tangents that are given."""
    # torch.func nests: what is computed here may have tangents of outer levels, though no more of this one.
    with _torch_private.forward_mode_enabled():
        first, second = (unpack_dual(tensor).primal for tensor in ctx.saved_tensors)
        terms = [] if d_first is None else [product(d_first, second)]
        if d_second is not None:
            terms.append(product(first, d_second))
        if d_bias is not None:
            terms.append(d_bias.expand(*first.shape[:-1], -1))
        return sum(terms[1:], start=terms[0]) if terms else None


def compact(values: Tensor) -> Tensor:
    """Contiguous values. A tensor of torch.func may call itself contiguous where the one inside is not."""
    if _torch_private.plain() and values.is_contiguous():
        return values
    return values.clone(memory_format=torch.contiguous_format)


def _of_pattern(rest: Sequence[Any]) -> Sequence[Any]:
    """A product's last arguments, both sizes and maybe prepared, packed, key, for other values."""
    return rest if len(rest) == 2 or rest[3] is None else rest[:2]


def _for_weight_gradient(rest: Sequence[Any]) -> Sequence[Any]:
    """Of the same what bsr_grad_weight takes: prepared and key."""
    return (rest[2], rest[4]) if len(_of_pattern(rest)) == 5 else ()


def over_tokens(dy: Tensor) -> Tensor:
    """The gradient of a bias: the sum over tokens, which a single one has not."""
    return dy.sum(tuple(range(dy.dim() - 1))) if dy.dim() > 1 else dy


def _gradients(ctx: Any, dy: Tensor, needs: Sequence[bool], plan: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Gradients of linear to x, values and bias, as far as needed; `rest`: sizes, and what is derived."""
    x, values = ctx.saved_tensors
    several = dy.dim() > 1  # a single token has no sum
    r, c = ctx.block_shape
    if not torch.is_grad_enabled() and type(dy) is Tensor and _torch_private.plain():
        # Nothing records these calls: one op does what three would.
        n, k, *derived = rest
        sums, dtype = needs[2] and several, None if ctx.stored is dy.dtype else ctx.stored  # 0.7 µs to box
        dx, dvalues, dbias = run_backward(dy, x, values, plan, r, c, n, k, sums, dtype, *derived)
        dbias = dbias if several else dy
        return dx if needs[0] else None, dvalues if needs[1] else None, dbias if needs[2] else None
    dx = dvalues = dbias = None
    if needs[0]:
        dx = grad_input(dy, values, plan, *rest)
    if needs[1]:
        dvalues = grad_weight(dy, x, plan, r, c, *rest[:2], ctx.stored, *_for_weight_gradient(rest))
    if needs[2]:
        dbias = over_tokens(dy)
    return dx, dvalues, dbias


class EagerLinear(Function):
    """Linear for eager calls: autograd takes 0.1 µs for each argument; modes that are off are not asked."""

    @staticmethod
    def forward(ctx, x, values, bias, call):  # noqa: D102
        y = run_eagerly(x, values, bias, call)
        ctx.call, ctx.values = call, values  # for its shape and dtype, which take 0.3 µs to ask for
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, values if needs[0] else None)
        return y

    @staticmethod
    def backward(ctx, dy):  # noqa: D102
        ctx.block_shape, ctx.stored = ctx.values.shape[1:], ctx.values.dtype
        return *_gradients(ctx, dy, ctx.needs_input_grad, *ctx.call), None


record_linear = EagerLinear.apply


class Linear(Function):
    """The kernel of bsr_linear for autograd."""

    @staticmethod
    def forward(ctx, x, values, plan, bias, *rest):  # noqa: D102
        y = run_linear(x, values, plan, bias, *rest)
        Linear.save(ctx, (x, values, plan, bias, *rest, NONE), y)
        ctx.trailing = len(rest)  # both sizes, and what is derived
        return y

    @staticmethod
    def save(ctx, inputs, output):  # noqa: D102
        x, values, plan, _, *ctx.rest, activation = inputs
        if activation != NONE:
            raise NotImplementedError("[bsr_linear] activation must be None; got a torch that lacks names")
        ctx.trailing = len(ctx.rest) + 1
        ctx.block_shape, ctx.stored = values.shape[1:], values.dtype
        _save(ctx, x, values, plan)

    @staticmethod
    def backward(ctx, dy):  # noqa: D102
        nothing = (None,) * ctx.trailing
        if dy is None:
            return None, None, None, None, *nothing
        x, values, _, bias, *_ = ctx.needs_input_grad
        dx, dvalues, dbias = _gradients(ctx, dy, (x, values, bias), ctx.plan, *ctx.rest)
        return dx, dvalues, None, dbias, *nothing

    @staticmethod
    def jvp(ctx, dx, dvalues, _plan, dbias, *_rest):  # noqa: D102
        def product(x: Tensor, values: Tensor) -> Tensor:
            return linear(x, compact(values), ctx.plan, None, *_of_pattern(ctx.rest))

        return _tangent(ctx, product, dx, dvalues, dbias)


class LinearRounded(Linear):
    """The kernel of bsr_linear_rounded: derivatives are those of linear, straight through the rounding."""

    @staticmethod
    def forward(ctx, x, values, plan, bias, *rest):  # noqa: D102
        y = run_rounded(x, values, plan, bias, *rest)
        Linear.save(ctx, (x, values, plan, bias, *rest, NONE), y)
        ctx.trailing = len(rest)
        return y


class GradInput(Function):
    """The kernel of bsr_grad_input for autograd."""

    @staticmethod
    def forward(ctx, dy, values, plan, *rest):  # noqa: D102
        dx = run_grad_input(dy, values, plan, *rest)
        GradInput.save(ctx, (dy, values, plan, *rest), dx)
        return dx

    @staticmethod
    def save(ctx, inputs, output):  # noqa: D102
        dy, values, plan, *ctx.rest = inputs
        ctx.values_shape, ctx.values_dtype = values.shape, values.dtype
        _save(ctx, dy, values, plan)

    @staticmethod
    def backward(ctx, ddx):  # noqa: D102
        ddy = dvalues = None
        if ddx is not None:
            dy, values = ctx.saved_tensors
            needs, rest = ctx.needs_input_grad, ctx.rest
            if needs[0]:
                ddy = linear(ddx, values, ctx.plan, None, *rest)
            if needs[1]:
                sizes = (*ctx.values_shape[1:], *rest[:2], ctx.values_dtype)
                dvalues = grad_weight(dy, ddx, ctx.plan, *sizes, *_for_weight_gradient(rest))
        return ddy, dvalues, *(None,) * (1 + len(ctx.rest))

    @staticmethod
    def jvp(ctx, ddy, dvalues, *_):  # noqa: D102
        def product(dy: Tensor, values: Tensor) -> Tensor:
            return grad_input(dy, compact(values), ctx.plan, *_of_pattern(ctx.rest))

        return _tangent(ctx, product, ddy, dvalues)


class GradWeight(Function):
    """The kernel of bsr_grad_weight for autograd."""

    @staticmethod
    def forward(ctx, dy, x, plan, *sizes):  # noqa: D102
        dvalues = run_grad_weight(dy, x, plan, *sizes)
        GradWeight.save(ctx, (dy, x, plan, *sizes), dvalues)
        return dvalues

    @staticmethod
    def save(ctx, inputs, output):  # noqa: D102
        dy, x, plan, *ctx.sizes = inputs
        _save(ctx, dy, x, plan)

    @staticmethod
    def backward(ctx, ddvalues):  # noqa: D102
        ddy = dx = None
        if ddvalues is not None:
            dy, x = ctx.saved_tensors
            ddvalues, needs = compact(ddvalues), ctx.needs_input_grad
            if needs[0]:
                ddy = linear(x, ddvalues, ctx.plan, None, *ctx.sizes[2:4])
            if needs[1]:
                dx = grad_input(dy, ddvalues, ctx.plan, *ctx.sizes[2:4])
        return ddy, dx, *(None,) * (1 + len(ctx.sizes))

    @staticmethod
    def jvp(ctx, ddy, dx, *_):  # noqa: D102
        def product(dy: Tensor, x: Tensor) -> Tensor:
            return grad_weight(dy, x, ctx.plan, *ctx.sizes)

        return _tangent(ctx, product, ddy, dx)


def kernel(function: type[Function], op: Any) -> Any:
    """The kernel of an op for the dispatcher's Autograd key."""
    below = below_autograd(op)

    def autograd(*args: Any) -> Tensor:
        if torch.is_grad_enabled() or _torch_private.forward_mode():
            with _torch_private.allow_function():
                return function.apply(*args)
        return below(*args)

    return autograd


def linear_kernel(
    function: type[Function], op: Any, arguments: int = 10, tracked: Sequence[int] = (0, 1, 3)
) -> Any:
    """The same of a linear layer, whose activation is torch's own where anything records it.

    arguments: how many the op has, the activation last; bsr_linear's. The dispatcher leaves out trailing ones
    that are their defaults. tracked: where those are that may want a gradient.
    """
    below, without = below_autograd(op), kernel(function, op)

    def autograd(*args: Any) -> Tensor:
        *args, activation = args if len(args) == arguments else (*args, NONE)
        if activation == NONE:
            return without(*args)
        recorded = any(args[at] is not None and args[at].requires_grad for at in tracked)
        if (torch.is_grad_enabled() and recorded) or _torch_private.forward_mode():
            return activate(op(*args), activation)
        return below(*args, activation)

    return autograd


# vmap --------------------------------------------------------------------------------------------


def vmap_linear(info, dims, x, values, plan, bias, *rest, product=linear):
    """A batch dimension of x is more tokens; batched values or biases are a call each."""
    check_plan("bsr_linear", dims[2])
    if len(rest) == 6:
        y, dim = vmap_linear(info, dims, x, values, plan, bias, *rest[:5], product=product)
        return activate(y, rest[5]), dim
    if dims[1] is None and dims[3] is None:
        return product(x.movedim(dims[0], 0), values, plan, bias, *rest), 0
    return batched(
        lambda x, w, b: product(x, compact(w), plan, b, *_of_pattern(rest)),
        info,
        (dims[0], dims[1], dims[3]),
        x,
        values,
        bias,
    )


def vmap_rounded(info, dims, *args):
    """As vmap_linear."""
    return vmap_linear(info, dims, *args, product=linear_rounded)


def vmap_grad_input(info, dims, dy, values, plan, *rest):
    """As vmap_linear."""
    check_plan("bsr_grad_input", dims[2])
    if dims[1] is None:
        return grad_input(dy.movedim(dims[0], 0), values, plan, *rest), 0
    rest = _of_pattern(rest)
    return batched(lambda dy, w: grad_input(dy, compact(w), plan, *rest), info, dims[:2], dy, values)


def vmap_grad_weight(info, dims, dy, x, plan, *sizes):
    """A gradient for each sample is a call for each."""
    check_plan("bsr_grad_weight", dims[2])
    return batched(lambda dy, x: grad_weight(dy, x, plan, *sizes), info, dims[:2], dy, x)


def check_plan(op: str, dim: int | None) -> None:
    """Raise unless a plan has no batch dimension."""
    if dim is not None:
        raise ValueError(f"[{op}] plan must be one for the whole batch of a vmap; got batch dimension {dim}")


def batched(call: Any, info: Any, dims: tuple, *tensors: Tensor | None) -> tuple[Tensor, int]:
    """Stack the results of one call for each element of the batch."""
    parts = (
        [tensor] * info.batch_size if dim is None else tensor.unbind(dim)
        for tensor, dim in zip(tensors, dims, strict=True)
    )
    return torch.stack([call(*part) for part in zip(*parts, strict=True)]), 0


RULES = (
    ("bsr_linear", Linear, vmap_linear),
    ("bsr_linear_rounded", LinearRounded, vmap_rounded),
    ("bsr_grad_input", GradInput, vmap_grad_input),
    ("bsr_grad_weight", GradWeight, vmap_grad_weight),
)
