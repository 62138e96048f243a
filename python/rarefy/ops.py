"""The ops of ``torch.ops.rarefy`` in Python: fake kernels, autograd, autocast, and documented functions.

The kernels are in the compiled library, which checks every argument. The three products are each other's
derivatives, so gradients of any order are calls of the same three ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import _load

NAMES = ("bsr_linear", "bsr_grad_input", "bsr_grad_weight", "bsr_plan")


def _op(name: str) -> Callable[..., Tensor]:
    if _load.problem is None:
        return getattr(torch.ops.rarefy, name).default

    def missing(*_args: object) -> Tensor:
        raise ImportError(_load.problem)

    return missing


_linear, _grad_input, _grad_weight, _plan = map(_op, NAMES)


def bsr_linear(
    x: Tensor, values: Tensor, plan: Tensor, bias: Tensor | None, out_features: int, in_features: int
) -> Tensor:
    """Return ``x @ W.T + bias`` for a block-sparse W of shape (out_features, in_features).

    Args:
        x: (..., in_features); any leading dimensions and strides; float64, float32, bfloat16 or float16.
        values: (nnzb, block_rows, block_cols), contiguous, of x's dtype: the stored blocks, row-major,
            in the order of the indices that made the plan.
        plan: what :func:`bsr_plan` returned for this pattern, on x's device.
        bias: (out_features,) of x's dtype, or None.
        out_features: rows of W; no multiple of block_rows is needed, nor of block_cols below.
        in_features: columns of W.

    Returns:
        (..., out_features), contiguous. Under autocast x, values and bias are cast as ``F.linear`` does.

    Raises:
        ValueError: a shape, a plan or a layout does not fit; the message names the argument.
        TypeError: a dtype or a device does not fit.
        ImportError: the compiled library is missing.
    """
    return _linear(x, values, plan, bias, out_features, in_features)


def bsr_grad_input(
    grad_output: Tensor, values: Tensor, plan: Tensor, out_features: int, in_features: int
) -> Tensor:
    """Return ``grad_output @ W``, (..., in_features), for grad_output (..., out_features).

    The other arguments and the errors are those of :func:`bsr_linear`.
    """
    return _grad_input(grad_output, values, plan, out_features, in_features)


def bsr_grad_weight(
    grad_output: Tensor,
    x: Tensor,
    plan: Tensor,
    block_rows: int,
    block_cols: int,
    out_features: int,
    in_features: int,
) -> Tensor:
    """Return the stored blocks of ``grad_output.T @ x``, (nnzb, block_rows, block_cols).

    grad_output is (..., out_features) and x is (..., in_features), with the same leading dimensions.
    Elements of edge blocks that lie outside W get 0. The other arguments and the errors are those of
    :func:`bsr_linear`; nnzb follows from the plan's length.
    """
    return _grad_weight(grad_output, x, plan, block_rows, block_cols, out_features, in_features)


def bsr_plan(
    crow_indices: Tensor,
    col_indices: Tensor,
    out_features: int,
    in_features: int,
    block_rows: int,
    block_cols: int,
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

    Returns:
        The plan, on the indices' device (made on the host and copied there). It holds its own copy of the
        indices: neither writes to them during this call nor later ones can make a kernel read out of
        bounds. Its length follows from the shape and nnzb; its first words name both, and the products
        check them on every call on the CPU, and the length on CUDA. Never save it: rebuild it.

    Raises:
        ValueError: an index is wrong (the message names argument and position), or a size is.
        TypeError: the indices are not int32.
    """
    return _plan(crow_indices, col_indices, out_features, in_features, block_rows, block_cols)


# Fake kernels ------------------------------------------------------------------------------------


def _rows_like(op: str, argument: str, tensor: Tensor, columns: int, dimension: str, new: int) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[-1] != columns:
        got = tuple(tensor.shape)
        raise ValueError(f"[{op}] {argument}'s last dimension must be {dimension}={columns}; got shape {got}")
    return tensor.new_empty((*tensor.shape[:-1], new))


def _fake_linear(x, values, plan, bias, out_features, in_features):
    return _rows_like("bsr_linear", "x", x, in_features, "in_features", out_features)


def _fake_grad_input(grad_output, values, plan, out_features, in_features):
    return _rows_like("bsr_grad_input", "grad_output", grad_output, out_features, "out_features", in_features)


def _empty_plan_size(out_features, in_features, block_rows, block_cols):
    """As plan_size() of the core without a block: header, crow, and ccol of the transposed index."""
    row_count = (out_features + block_rows - 1) // block_rows
    col_count = (in_features + block_cols - 1) // block_cols
    return 8 + row_count + 1 + col_count + 1


def _fake_grad_weight(grad_output, x, plan, block_rows, block_cols, out_features, in_features):
    nnzb = (plan.shape[0] - _empty_plan_size(out_features, in_features, block_rows, block_cols)) // 3
    return x.new_empty((nnzb, block_rows, block_cols))


def _fake_plan(crow_indices, col_indices, out_features, in_features, block_rows, block_cols):
    # Each block has an entry in col, row and perm.
    size = _empty_plan_size(out_features, in_features, block_rows, block_cols) + 3 * col_indices.shape[0]
    return crow_indices.new_empty((size,))


# Autograd ----------------------------------------------------------------------------------------

# The plan is kept as it is, not by save_for_backward: it never changes, and a copy over itself (DDP
# broadcasts buffers before every forward) must not count as a change.


def _save_linear(ctx, inputs, output):
    x, values, ctx.plan, _, *ctx.features = inputs
    ctx.block_shape = values.shape[1:]
    needs_x, needs_values = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_values else None, values if needs_x else None)


def _backward_linear(ctx, grad):
    x, values = ctx.saved_tensors
    dx = dvalues = dbias = None
    if ctx.needs_input_grad[0]:
        dx = _grad_input(grad, values, ctx.plan, *ctx.features)
    if ctx.needs_input_grad[1]:
        dvalues = _grad_weight(grad, x, ctx.plan, *ctx.block_shape, *ctx.features)
    if ctx.needs_input_grad[3]:
        dbias = grad.sum(tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad
    return dx, dvalues, None, dbias, None, None


def _save_grad_input(ctx, inputs, output):
    grad_output, values, ctx.plan, *ctx.features = inputs
    ctx.block_shape = values.shape[1:]
    needs_grad_output, needs_values = ctx.needs_input_grad[:2]
    ctx.save_for_backward(grad_output if needs_values else None, values if needs_grad_output else None)


def _backward_grad_input(ctx, grad):
    grad_output, values = ctx.saved_tensors
    dgrad = dvalues = None
    if ctx.needs_input_grad[0]:
        dgrad = _linear(grad, values, ctx.plan, None, *ctx.features)
    if ctx.needs_input_grad[1]:
        dvalues = _grad_weight(grad_output, grad, ctx.plan, *ctx.block_shape, *ctx.features)
    return dgrad, dvalues, None, None, None


def _save_grad_weight(ctx, inputs, output):
    grad_output, x, ctx.plan, _, _, *ctx.features = inputs
    needs_grad_output, needs_x = ctx.needs_input_grad[:2]
    ctx.save_for_backward(grad_output if needs_x else None, x if needs_grad_output else None)


def _backward_grad_weight(ctx, grad):
    grad_output, x = ctx.saved_tensors
    grad = grad.contiguous()
    dgrad = dx = None
    if ctx.needs_input_grad[0]:
        dgrad = _linear(x, grad, ctx.plan, None, *ctx.features)
    if ctx.needs_input_grad[1]:
        dx = _grad_input(grad_output, grad, ctx.plan, *ctx.features)
    return dgrad, dx, None, None, None, None, None


# Autocast ----------------------------------------------------------------------------------------


def _autocast_linear(device_type: str, key: str) -> Callable[..., Tensor]:
    """The kernel that casts as F.linear does under autocast: floats of this device but float64."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if tensor.device.type != device_type:
            return tensor
        return tensor.to(torch.get_autocast_dtype(device_type))

    def kernel(x, values, plan, bias, out_features, in_features):
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _linear(cast(x), cast(values), plan, cast(bias), out_features, in_features)

    return kernel


# Registration ------------------------------------------------------------------------------------


def _with_type_errors(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The library cannot throw TypeError through torch: it throws what arrives as IndexError."""

    def checked(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except IndexError as error:
            raise TypeError(*error.args) from None

    return checked


def _register() -> torch.library.Library:
    fakes = (_fake_linear, _fake_grad_input, _fake_grad_weight, _fake_plan)
    for name, fake in zip(NAMES, fakes, strict=True):
        torch.library.register_fake(f"rarefy::{name}", fake)
        # Calls from Python enter by `_op`, whatever the mode (grad, no_grad, inference_mode, compiled):
        # renaming here costs 0.1 µs, where a Python kernel ahead of the C++ one costs 8.
        packet = getattr(torch.ops.rarefy, name)
        packet._op = _with_type_errors(packet._op)
        packet.default._op = _with_type_errors(packet.default._op)
    register_autograd = torch.library.register_autograd
    register_autograd("rarefy::bsr_linear", _backward_linear, setup_context=_save_linear)
    register_autograd("rarefy::bsr_grad_input", _backward_grad_input, setup_context=_save_grad_input)
    register_autograd("rarefy::bsr_grad_weight", _backward_grad_weight, setup_context=_save_grad_weight)
    library = torch.library.Library("rarefy", "IMPL")
    for device_type in ("cpu", "cuda"):
        key = f"Autocast{device_type.upper()}"
        library.impl("bsr_linear", _autocast_linear(device_type, key), key)
    return library  # kernels live as long as this object


if _load.problem is None:
    _library = _register()
