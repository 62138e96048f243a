"""int8_linear: the op of scaled int8 weights, and its derivatives.

The weight is frozen: x and the bias have gradients, values and scales have none. The gradient of x is that of
the scaled values, straight through the rounding of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _load, _torch_private
from ._torch_private import Function, below_autograd, eager_call, entry
from .activations import activate, check_activation
from .derivatives import batched, check_plan, kernel, linear_kernel, over_tokens
from .op_rules import fake_rows_like, meets_nothing, register_autocast, register_fake

op, grad_input = map(_load.op, ("int8_linear", "int8_grad_input"))
run, _run_grad_input = map(below_autograd, (op, grad_input))
_held = entry(_load.op("_int8_linear_held"))
feed_forward = eager_call(_load.op("_int8_feed_forward"))  # of eager calls that nothing records; see chain.py


def run_eagerly(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, dynamic: bool, call: tuple
) -> Tensor:
    """The product of an eager call that nothing records; `call` as in derivatives.py."""
    plan, n, k, prepared, packed, key = call if len(call) > 3 else (*call, None, None, 0)
    try:
        return _held(x, values, scales, plan, bias, n, k, dynamic, prepared, packed, key)
    except IndexError as error:
        raise TypeError(*error.args) from None


def int8_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    plan: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    dynamic: bool = True,
    *derived: Tensor | int | None,
    activation: str | None = None,
) -> Tensor:
    """Return ``x @ W.T + bias``, or its activation, for a block-sparse W of scaled int8 values.

    Args:
        x: (..., in_features); any leading dimensions and strides; float32, bfloat16 or float16.
        values: (nnzb, block_rows, block_cols) int8, contiguous, as for :func:`rarefy.ops.bsr_linear`.
        scales: (out_features,) float32, finite and above 0, unchecked: row n of W is scales[n] · values.
        plan: what :func:`rarefy.ops.bsr_plan` returned for this pattern.
        bias: (out_features,) of x's dtype, or None.
        out_features: rows of W.
        in_features: columns of W.
        dynamic: round each token of x to int8, too, with a scale of its own, and sum in int32; a token with a
            NaN or an infinity is then all NaN. Else x stays as it is. docs/numerics.md has both exactly.
        derived: nothing, or what ``weight.derived(x)`` gives.
        activation: as for :func:`rarefy.ops.bsr_linear`.

    Returns:
        (..., out_features), contiguous, of x's dtype. Its gradient with respect to x is that of W, whether x
        is rounded or not; values and scales have none.

    Raises:
        ValueError: a shape, a plan or a layout does not fit; the message names the argument.
        TypeError: a dtype or a device does not fit.
        RuntimeError: no kernel, as on CUDA.
        ImportError: the compiled library is missing.
    """
    name = check_activation("int8_linear", activation)
    weight = (values, scales, plan, bias, out_features, in_features, dynamic)
    args = (x, *weight, *(derived or (None, None, 0)), name)
    return run(*args) if meets_nothing(x, bias) else op(*args)


class Int8Linear(Function):
    """The kernel of int8_linear for autograd; without an activation."""

    @staticmethod
    def forward(ctx, *args):  # noqa: D102
        y = run(*args)
        Int8Linear.save(ctx, args, y)
        return y

    @staticmethod
    def save(ctx, inputs, output):  # noqa: D102
        # Kept as they are, as plans are in derivatives.py: they are frozen.
        ctx.weight, ctx.sizes, ctx.count = inputs[1:4], inputs[5:7], len(inputs)
        ctx.leading = output.shape[:-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy):  # noqa: D102
        grads: list[Tensor | None] = [None] * ctx.count
        if dy is not None and ctx.needs_input_grad[0]:
            grads[0] = grad_input(dy, *ctx.weight, *ctx.sizes)
        if dy is not None and ctx.needs_input_grad[4]:
            grads[4] = over_tokens(dy)
        return tuple(grads)

    @staticmethod
    def jvp(ctx, dx, _values, _scales, _plan, dbias, *_rest):  # noqa: D102
        with _torch_private.forward_mode_enabled():
            terms = [] if dx is None else [op(dx, *ctx.weight, None, *ctx.sizes, False)]
            if dbias is not None:
                terms.append(dbias.expand(*ctx.leading, -1))
            return sum(terms[1:], start=terms[0]) if terms else None


class Int8GradInput(Function):
    """The kernel of int8_grad_input for autograd."""

    @staticmethod
    def forward(ctx, *args):  # noqa: D102
        dx = _run_grad_input(*args)
        Int8GradInput.save(ctx, args, dx)
        return dx

    @staticmethod
    def save(ctx, inputs, output):  # noqa: D102
        ctx.weight, ctx.sizes = inputs[1:4], inputs[4:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, ddx):  # noqa: D102
        ddy = None
        if ddx is not None and ctx.needs_input_grad[0]:
            ddy = op(ddx, *ctx.weight, None, *ctx.sizes, False)
        return ddy, None, None, None, None, None

    @staticmethod
    def jvp(ctx, ddy, *_):  # noqa: D102
        with _torch_private.forward_mode_enabled():
            return None if ddy is None else grad_input(ddy, *ctx.weight, *ctx.sizes)


def _vmap_linear(info, dims, x, values, scales, plan, bias, *rest):
    """A batch dimension of x is more tokens; anything else that is batched is a call each."""
    check_plan("int8_linear", dims[3])
    if all(dim is None for dim in dims[1:5]):
        return op(x.movedim(dims[0], 0), values, scales, plan, bias, *rest), 0

    def call(x: Tensor, w: Tensor, s: Tensor, b: Tensor | None) -> Tensor:
        return op(x, w, s, plan, b, *rest[:3])

    y, dim = batched(call, info, (dims[0], *dims[1:3], dims[4]), x, values, scales, bias)
    return activate(y, rest[6]) if len(rest) > 6 else y, dim


def _vmap_grad_input(info, dims, dy, values, scales, plan, *sizes):
    """As _vmap_linear."""
    check_plan("int8_grad_input", dims[3])
    if all(dim is None for dim in dims[1:4]):
        return grad_input(dy.movedim(dims[0], 0), values, scales, plan, *sizes), 0
    return batched(lambda dy, w, s: grad_input(dy, w, s, plan, *sizes), info, dims[:3], dy, values, scales)


def _fake_linear(x, values, scales, plan, bias, out_features, in_features, *rest):
    return fake_rows_like("int8_linear", "x", x, in_features, "in_features", out_features)


def _fake_grad_input(grad_output, values, scales, plan, out_features, in_features):
    return fake_rows_like(
        "int8_grad_input", "grad_output", grad_output, out_features, "out_features", in_features
    )


def _register() -> torch.library.Library:
    rules = (
        ("int8_linear", _fake_linear, _vmap_linear, Int8Linear),
        ("int8_grad_input", _fake_grad_input, _vmap_grad_input, Int8GradInput),
    )
    library = torch.library.Library("rarefy", "IMPL")
    for name, fake, vmap, function in rules:
        register_fake(name, fake)
        _torch_private.rename_type_errors(getattr(torch.ops.rarefy, name))
        if _torch_private.autograd_kernels:
            linear = function is Int8Linear
            autograd = linear_kernel(function, op, 12, (0, 4)) if linear else kernel(function, grad_input)
            library.impl(name, autograd, "Autograd")
        else:
            torch.library.register_autograd(f"rarefy::{name}", function.backward, setup_context=function.save)
        torch.library.register_vmap(f"rarefy::{name}", vmap)
    register_fake("_int8_linear_held", _fake_linear)
    names = "_int8_linear_held", "_int8_feed_forward", "int8_derived_sizes", "int8_prepare", "int8_pack"
    for name in names:
        _torch_private.rename_type_errors(getattr(torch.ops.rarefy, name))
    register_autocast(library, "int8_linear", op, (0, 4))
    return library  # kernels live as long as this object


if _load.problem is None:
    _library = _register()
