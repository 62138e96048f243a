"""bitmap_linear: the op of weights with a bit for each element, and its derivatives.

The forward product is a kernel's. Derivatives are the ops of 1×1 blocks on the same values, whose plan
takes 12 bytes a stored element: who trains gives it along.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from . import _load, _torch_private
from ._torch_private import Function, below_autograd
from .activations import NONE, check_activation
from .derivatives import (
    batched,
    check_plan,
    compact,
    grad_input,
    grad_weight,
    linear_kernel,
    over_tokens,
)
from .op_rules import fake_rows_like, register_autocast, register_fake
from .ops import bsr_plan

_op, _make_plan, _columns = map(_load.op, ("bitmap_linear", "bitmap_plan", "bitmap_columns"))
_run = below_autograd(_op)
HEADER = 8  # words of a plan before the rows (src/core/bitmap.cc)


def bitmap_plan(bitmap: Tensor, out_features: int, in_features: int, caller: str = "bitmap_plan") -> Tensor:
    """Check a bitmap and return its plan: all that kernels read of it, as a 1-D int32 tensor on the CPU.

    Args:
        bitmap: (out_features, ceil(in_features / 8)) uint8, contiguous: bit k % 8 of byte k / 8 of a row says
            whether column k is stored; bits past the last column are 0.
        out_features: rows of W.
        in_features: columns of W.
        caller: whom errors speak of, "[caller] …".

    Returns:
        The plan, which has its own copy of the bits. Where two of each four columns are stored it holds
        their positions instead, which take as much. Never save it: rebuild it.

    Raises:
        ValueError: bits outside the matrix, with the position; another shape.
        TypeError: another dtype.
    """
    return _make_plan(bitmap, out_features, in_features, caller)


def bitmap_columns(plan: Tensor, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Return crow_indices and col_indices, int32, of the same elements in CSR, whose values are the same."""
    rows = plan[HEADER : HEADER + out_features + 1]
    return rows, _columns(plan, out_features, in_features)


def bitmap_linear(
    x: Tensor,
    values: Tensor,
    plan: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    blocks: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Return ``x @ W.T + bias``, or its activation, for a W of which single elements are stored.

    Args:
        x: (..., in_features); any leading dimensions and strides; float64, float32, bfloat16 or float16.
        values: (nnz,), contiguous: the stored elements by row, and in it by column. Of x's dtype; or
            bfloat16 or float16 for an x of 16 or 32 bits.
        plan: what :func:`bitmap_plan` returned.
        bias: (out_features,) of x's dtype, or None.
        out_features: rows of W.
        in_features: columns of W.
        blocks: :func:`rarefy.ops.bsr_plan`'s plan of the same elements as 1×1 blocks, which derivatives use;
            without it each backward makes one.
        activation: as for :func:`rarefy.ops.bsr_linear`.

    Returns:
        (..., out_features), contiguous, of x's dtype. What is not stored is multiplied with nothing.

    Raises:
        ValueError: a shape, a plan or a layout does not fit; the message names the argument.
        TypeError: a dtype does not fit.
        RuntimeError: tensors on another device than the CPU.
        ImportError: the compiled library is missing.
    """
    name = check_activation("bitmap_linear", activation)
    return _op(x, values, plan, bias, out_features, in_features, blocks, name)


class BitmapLinear(Function):
    """The kernel of bitmap_linear for autograd; without an activation."""

    @staticmethod
    def forward(ctx, *args):  # noqa: D102
        y = _run(*args)
        BitmapLinear.save(ctx, args, y)
        return y

    @staticmethod
    def save(ctx, inputs, output):  # noqa: D102
        # The dispatcher leaves out trailing arguments that are their defaults.
        x, values, plan, _, n, k, blocks, activation = (*inputs, *(None, NONE)[len(inputs) - 6 :])
        if activation != NONE:
            raise NotImplementedError("[bitmap_linear] activation must be None; got a torch that lacks names")
        # Plans never change: kept as they are, as in derivatives.py.
        ctx.plan, ctx.blocks, ctx.sizes, ctx.count = plan, blocks, (n, k), len(inputs)
        ctx.stored = values.dtype
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, values if needs[0] else None)
        if _torch_private.forward_mode():
            ctx.save_for_forward(x, values)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy):  # noqa: D102
        grads: list[Tensor | None] = [None] * ctx.count
        if dy is None:
            return tuple(grads)
        (x, values), needs = ctx.saved_tensors, ctx.needs_input_grad
        blocks = ctx.blocks
        if blocks is None and (needs[0] or needs[1]):
            blocks = bsr_plan(*bitmap_columns(ctx.plan, *ctx.sizes), *ctx.sizes, 1, 1, "bitmap_linear")
        if needs[0]:
            grads[0] = grad_input(dy, compact(values).view(-1, 1, 1), blocks, *ctx.sizes)
        if needs[1]:
            grads[1] = grad_weight(dy, x, blocks, 1, 1, *ctx.sizes, ctx.stored).view(-1)
        if needs[3]:
            grads[3] = over_tokens(dy)
        return tuple(grads)

    @staticmethod
    def jvp(ctx, dx, dvalues, _plan, dbias, *_rest):  # noqa: D102
        def product(x: Tensor, values: Tensor) -> Tensor:
            return _op(x, compact(values), ctx.plan, None, *ctx.sizes, ctx.blocks)

        with _torch_private.forward_mode_enabled():
            x, values = (unpack_dual(tensor).primal for tensor in ctx.saved_tensors)
            terms = [] if dx is None else [product(dx, values)]
            if dvalues is not None:
                terms.append(product(x, dvalues))
            if dbias is not None:
                terms.append(dbias.expand(*x.shape[:-1], -1))
            return sum(terms[1:], start=terms[0]) if terms else None


def _vmap(info, dims, x, values, plan, bias, n, k, blocks=None, activation=NONE):
    """A batch dimension of x is more tokens; batched values or biases are a call each."""
    check_plan("bitmap_linear", dims[2])
    if dims[1] is None and dims[3] is None:
        return _op(x.movedim(dims[0], 0), values, plan, bias, n, k, blocks, activation), 0

    def call(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return _op(x, compact(w), plan, b, n, k, blocks, activation)

    return batched(call, info, (dims[0], dims[1], dims[3]), x, values, bias)


def _fake(x, values, plan, bias, out_features, in_features, blocks=None, activation=NONE):
    return fake_rows_like("bitmap_linear", "x", x, in_features, "in_features", out_features)


def _fake_plan(bitmap, out_features, in_features, caller="bitmap_plan"):
    words = (HEADER + out_features + 2) // 2 * 2 + out_features * ((in_features + 63) // 64 * 2)
    return bitmap.new_empty((words,), dtype=torch.int32)


def _register() -> torch.library.Library:
    library = torch.library.Library("rarefy", "IMPL")
    register_fake("bitmap_linear", _fake)
    register_fake("bitmap_plan", _fake_plan)
    for name in ("bitmap_linear", "bitmap_plan", "bitmap_columns"):
        _torch_private.rename_type_errors(getattr(torch.ops.rarefy, name))
    if _torch_private.autograd_kernels:
        library.impl("bitmap_linear", linear_kernel(BitmapLinear, _op, 8), "Autograd")
    else:
        function = BitmapLinear
        torch.library.register_autograd(
            "rarefy::bitmap_linear", function.backward, setup_context=function.save
        )
    torch.library.register_vmap("rarefy::bitmap_linear", _vmap)
    register_autocast(library, "bitmap_linear", _op, (0, 1, 3))
    return library  # kernels live as long as this object


if _load.problem is None:
    _library = _register()
