"""The ops of ``torch.ops.rarefy`` in Python: fake kernels, autograd, autocast, and documented functions.

The kernels are in the compiled library, which checks every argument. The three products are each other's
derivatives, so gradients of any order are calls of the same three ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _load, _torch_private, derivatives
from .activations import NONE, check_activation
from .checks import check_tensor, fail
from .derivatives import grad_input, grad_weight, linear, linear_rounded, run_rounded
from .feed_forward import bsr_feed_forward as bsr_feed_forward
from .int8_ops import int8_linear as int8_linear
from .op_rules import autocast_to, fake_rows_like, meets_nothing, register_fake

_plan, _add_grad_weight = map(_load.op, ("bsr_plan", "bsr_add_grad_weight"))


def bsr_linear(
    x: Tensor,
    values: Tensor,
    plan: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    *derived: Tensor | int | None,
    activation: str | None = None,
) -> Tensor:
    """Return ``x @ W.T + bias``, or its activation, for a block-sparse W, (out_features, in_features).

    Args:
        x: (..., in_features); any leading dimensions and strides; float64, float32, bfloat16 or float16.
        values: (nnzb, block_rows, block_cols), contiguous: the stored blocks, row-major, in the order of
            the indices that made the plan. Of x's dtype; or bfloat16 or float16 for an x of 16 or 32 bits
            (the CPU's kernels convert as they read; the CUDA ones do not take it).
        plan: what :func:`bsr_plan` returned for this pattern, on x's device.
        bias: (out_features,) of x's dtype, or None.
        out_features: rows of W; no multiple of block_rows is needed, nor of block_cols below.
        in_features: columns of W.
        derived: nothing, or prepared, packed and their key, as ``weight.derived(x)`` gives them; it makes
            calls faster and changes no result. Packed values must be those of `values`.
        activation: "relu", "gelu" (by erf), "gelu_tanh", "silu", or None; of the sums, in their dtype. A call
            that is recorded has torch's, of the rounded result, which its derivative needs.

    Returns:
        (..., out_features), contiguous, of x's dtype; sums are in float32 (float64 for float64). Under
        autocast x, values and bias are cast as ``F.linear`` does.

    Raises:
        ValueError: a shape, a plan or a layout does not fit; the message names the argument.
        TypeError: a dtype or a device does not fit.
        ImportError: the compiled library is missing.
    """
    if activation is not None:
        name = check_activation("bsr_linear", activation)
        return linear(x, values, plan, bias, out_features, in_features, *(derived or (None, None, 0)), name)
    if (
        type(x) not in _torch_private.PLAIN
        or type(values) not in _torch_private.PLAIN
        or not (bias is None or type(bias) in _torch_private.PLAIN)
        or not _torch_private.eager()
    ):
        if not isinstance(x, Tensor) and x is not None:  # torch would say RuntimeError of it
            fail("bsr_linear", "x must be a tensor", type(x).__name__, TypeError)
        return linear(x, values, plan, bias, out_features, in_features, *derived)
    return eager_linear(x, values, bias, (plan, out_features, in_features, *derived))


def bsr_linear_rounded(
    x: Tensor,
    values: Tensor,
    plan: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    *derived: Tensor | int | None,
    activation: str | None = None,
) -> Tensor:
    """As :func:`bsr_linear`, for an x in float32 that may be rounded to bfloat16 where values are.

    Kernels that multiply in bfloat16 round it on their way (more than 4 tokens, with what is derived or at
    least 64); others leave it as it is. docs/numerics.md has the bound. Gradients are those of
    bsr_linear, of the x that was given. On the CPU alone; `derived` is for x in bfloat16. The other
    arguments and the errors are those of bsr_linear.
    """
    name = check_activation("bsr_linear_rounded", activation)
    args = (x, values, plan, bias, out_features, in_features, *(derived or (None, None, 0)), name)
    if meets_nothing(x, values, bias):
        return run_rounded(*args)
    return linear_rounded(*(args[:-1] if name == NONE else args))


def eager_linear(x: Tensor, values: Tensor, bias: Tensor | None, call: tuple) -> Tensor:
    """bsr_linear for those who know: tensors, not of subclasses, and ``_torch_private.eager()``.

    The same as by the dispatcher, where Python kernels cost three times as much as the product of a small
    layer. `call` is the plan, out_features, in_features, and what is derived.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return derivatives.record_linear(x, values, bias, call)
    return derivatives.run_eagerly(x, values, bias, call)


def bsr_grad_input(
    grad_output: Tensor,
    values: Tensor,
    plan: Tensor,
    out_features: int,
    in_features: int,
    *derived: Tensor | int | None,
) -> Tensor:
    """Return ``grad_output @ W``, (..., in_features), for grad_output (..., out_features).

    The other arguments and the errors are those of :func:`bsr_linear`.
    """
    return grad_input(grad_output, values, plan, out_features, in_features, *derived)


def bsr_grad_weight(
    grad_output: Tensor,
    x: Tensor,
    plan: Tensor,
    block_rows: int,
    block_cols: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype | None = None,
    *derived: Tensor | int | None,
) -> Tensor:
    """Return the stored blocks of ``grad_output.T @ x``, (nnzb, block_rows, block_cols).

    grad_output is (..., out_features) and x is (..., in_features), with the same leading dimensions.
    Elements of edge blocks that lie outside W get 0. The other arguments and the errors are those of
    :func:`bsr_linear`; nnzb follows from the plan's length. The result has the dtype of x, or `dtype`,
    which must be one that values can have. `derived` is nothing, or prepared and its key.
    """
    sizes = (block_rows, block_cols, out_features, in_features)
    return grad_weight(grad_output, x, plan, *sizes, dtype, *derived)


def bsr_add_grad_weight(
    gradient: Tensor,
    grad_output: Tensor,
    x: Tensor,
    plan: Tensor,
    out_features: int,
    in_features: int,
    *derived: Tensor | int | None,
) -> None:
    """Add the stored blocks of ``grad_output.T @ x`` to `gradient`, (nnzb, block_rows, block_cols), in place.

    As ``gradient += bsr_grad_weight(…, dtype=gradient.dtype)`` for accumulation over several backward passes,
    without the gradient between and, where a kernel adds for itself (Hopper's), rounded once, not twice.
    The other arguments and the errors are those of :func:`bsr_grad_weight`. Nothing is recorded, but a graph
    that holds what `gradient` was notices, as of any operation in place.
    """
    op = "bsr_add_grad_weight"
    check_tensor(op, "gradient", gradient)
    check_tensor(op, "x", x)
    narrow = (torch.bfloat16, torch.float16) if x.dtype != torch.float64 else ()
    if gradient.dtype not in (x.dtype, *narrow):
        fail(op, f"gradient must be of dtype {x.dtype}, as x, or narrower", gradient.dtype, TypeError)
    if gradient.ndim != 3:
        fail(op, "gradient must have shape (nnzb, block_rows, block_cols)", tuple(gradient.shape))
    if not gradient.is_contiguous():
        fail(op, "gradient must be contiguous", f"strides {gradient.stride()}")
    with torch.no_grad():
        _add_grad_weight(gradient, grad_output, x, plan, out_features, in_features, *derived)
    if not is_compiling() and not gradient.is_inference():
        torch.autograd.graph.increment_version(gradient)


def bsr_plan(
    crow_indices: Tensor,
    col_indices: Tensor,
    out_features: int,
    in_features: int,
    block_rows: int,
    block_cols: int,
    caller: str = "bsr_plan",
) -> Tensor:
    """Validate a pattern and return its plan: all that kernels read of it, as a 1-D int32 tensor.

    Args:
        crow_indices: (ceil(out_features / block_rows) + 1,) int32: block row i is
            ``values[crow_indices[i]:crow_indices[i + 1]]``.
        col_indices: (nnzb,) int32, the block column of each block, sorted and distinct in a block row.
        out_features: rows of W.
        in_features: columns of W.
        block_rows: rows of a block.
        block_cols: columns of a block.
        caller: whom errors speak of, "[caller] …".

    Returns:
        The plan, on the indices' device (made on the host and copied there). It holds its own copy of the
        indices: neither writes to them during this call nor later ones can make a kernel read out of
        bounds. Its length follows from the shape and nnzb; its first words name both, and the products
        check them on every call on the CPU, and the length on CUDA. Never save it: rebuild it.

    Raises:
        ValueError: an index is wrong (the message names argument and position), or a size is.
        TypeError: the indices are not int32.
    """
    return _plan(crow_indices, col_indices, out_features, in_features, block_rows, block_cols, caller)


# Fake kernels ------------------------------------------------------------------------------------


def _fake_linear(x, values, plan, bias, out_features, in_features, *derived):
    return fake_rows_like("bsr_linear", "x", x, in_features, "in_features", out_features)


def _fake_grad_input(grad_output, values, plan, out_features, in_features, *derived):
    return fake_rows_like(
        "bsr_grad_input", "grad_output", grad_output, out_features, "out_features", in_features
    )


def _empty_plan_size(out_features, in_features, block_rows, block_cols):
    """As plan_size() of the core without a block: header, crow, and ccol of the transposed index."""
    row_count = (out_features + block_rows - 1) // block_rows
    col_count = (in_features + block_cols - 1) // block_cols
    return 8 + row_count + 1 + col_count + 1


def blocks_of_plan(
    plan: torch.Tensor, out_features: int, in_features: int, block_rows: int, block_cols: int
) -> int:
    """How many blocks a whole plan has, which its length says."""
    return (plan.shape[0] - _empty_plan_size(out_features, in_features, block_rows, block_cols)) // 3


def _fake_grad_weight(
    grad_output, x, plan, block_rows, block_cols, out_features, in_features, dtype=None, *derived
):
    nnzb = blocks_of_plan(plan, out_features, in_features, block_rows, block_cols)
    return x.new_empty((nnzb, block_rows, block_cols), dtype=dtype)


def _fake_add_grad_weight(gradient, grad_output, x, plan, out_features, in_features, *derived):
    return None


def _fake_backward(
    grad_output,
    x,
    values,
    plan,
    block_rows,
    block_cols,
    out_features,
    in_features,
    bias,
    dtype=None,
    *derived,
):
    sizes = (block_rows, block_cols, out_features, in_features)
    nothing = grad_output.new_empty((0,))
    return (
        nothing if values is None else grad_output.new_empty((*grad_output.shape[:-1], in_features)),
        nothing.clone() if x is None else _fake_grad_weight(grad_output, x, plan, *sizes, dtype),
        grad_output.new_empty((out_features,)) if bias else nothing.clone(),
    )


def _fake_plan(
    crow_indices, col_indices, out_features, in_features, block_rows, block_cols, caller="bsr_plan"
):
    # Each block has an entry in col, row and perm.
    size = _empty_plan_size(out_features, in_features, block_rows, block_cols) + 3 * col_indices.shape[0]
    return crow_indices.new_empty((size,))


# Autocast ----------------------------------------------------------------------------------------


def _autocast_linear(device_type: str) -> Callable[..., Tensor]:
    cast = autocast_to(device_type)

    def kernel(
        x,
        values,
        plan,
        bias,
        out_features,
        in_features,
        prepared=None,
        packed=None,
        derived=0,
        activation=NONE,
    ):
        arguments = (cast(x), cast(values), plan, cast(bias), out_features, in_features)
        keeps = packed is None and derived  # what is packed belongs to the values before the cast
        if keeps or activation != NONE:
            arguments += (prepared, None, derived) if keeps else (None, None, 0)
        if activation != NONE:
            arguments += (activation,)
        return _torch_private.without_autocast(device_type, linear, *arguments)

    return kernel


# Registration ------------------------------------------------------------------------------------


def _register() -> torch.library.Library:
    fakes = {
        "bsr_linear": _fake_linear,
        "bsr_linear_rounded": _fake_linear,
        "_bsr_linear": _fake_linear,
        "_bsr_linear_held": _fake_linear,
        "bsr_grad_input": _fake_grad_input,
        "bsr_grad_weight": _fake_grad_weight,
        "bsr_add_grad_weight": _fake_add_grad_weight,
        "_bsr_linear_backward": _fake_backward,
        "bsr_plan": _fake_plan,
    }
    for name, fake in fakes.items():
        register_fake(name, fake)
    for name in (*fakes, "bsr_derived_sizes", "bsr_prepare", "bsr_pack"):
        _torch_private.rename_type_errors(getattr(torch.ops.rarefy, name))
    library = torch.library.Library("rarefy", "IMPL")
    for name, function, vmap in derivatives.RULES:
        if _torch_private.autograd_kernels:
            op = _load.op(name)
            linear_like = issubclass(function, derivatives.Linear)
            kernel = derivatives.linear_kernel if linear_like else derivatives.kernel
            library.impl(name, kernel(function, op), "Autograd")
        else:
            torch.library.register_autograd(f"rarefy::{name}", function.backward, setup_context=function.save)
        torch.library.register_vmap(f"rarefy::{name}", vmap)
    for device_type in ("cpu", "cuda"):
        for name in ("bsr_linear", "bsr_linear_rounded"):  # what is cast is rounded
            library.impl(name, _autocast_linear(device_type), f"Autocast{device_type.upper()}")
    return library  # kernels live as long as this object


if _load.problem is None:
    _library = _register()
