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
    x: Tensor,
    values: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    plan: Tensor | None = None,
) -> Tensor:
    """Return ``x @ W.T + bias`` for a block-sparse W of shape (out_features, in_features).

    Args:
        x: (..., in_features); any leading dimensions and strides; float64, float32, bfloat16 or float16.
        values: (nnzb, block_rows, block_cols), contiguous, of x's dtype: the stored blocks, row-major.
        crow_indices: (ceil(out_features / block_rows) + 1,) int32: block row i is
            ``values[crow_indices[i]:crow_indices[i + 1]]``.
        col_indices: (nnzb,) int32, the block column of each block, sorted and distinct in a block row.
        bias: (out_features,) of x's dtype, or None.
        out_features: rows of W; no multiple of block_rows is needed, nor of block_cols below.
        in_features: columns of W.
        plan: what :func:`bsr_plan` returns for these indices. Without it the indices are validated and
            a plan is made on every call (on CUDA with a copy to the host: slow).

    Returns:
        (..., out_features), contiguous. Under autocast x, values and bias are cast as ``F.linear`` does.

    Raises:
        ValueError: a shape, an index or a layout does not fit; the message names argument and position.
        TypeError: a dtype or a device does not fit.
        ImportError: the compiled library is missing.
    """
    return _linear(x, values, crow_indices, col_indices, bias, out_features, in_features, plan)


def bsr_grad_input(
    grad_output: Tensor,
    values: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    out_features: int,
    in_features: int,
    plan: Tensor | None = None,
) -> Tensor:
    """Return ``grad_output @ W``, (..., in_features), for grad_output (..., out_features).

    The other arguments and the errors are those of :func:`bsr_linear`.
    """
    return _grad_input(grad_output, values, crow_indices, col_indices, out_features, in_features, plan)


def bsr_grad_weight(
    grad_output: Tensor,
    x: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    block_rows: int,
    block_cols: int,
    out_features: int,
    in_features: int,
    plan: Tensor | None = None,
) -> Tensor:
    """Return the stored blocks of ``grad_output.T @ x``, (nnzb, block_rows, block_cols).

    grad_output is (..., out_features) and x is (..., in_features), with the same leading dimensions.
    Elements of edge blocks that lie outside W get 0. The other arguments and the errors are those of
    :func:`bsr_linear`.
    """
    return _grad_weight(
        grad_output, x, crow_indices, col_indices, block_rows, block_cols, out_features, in_features, plan
    )


def bsr_plan(
    crow_indices: Tensor,
    col_indices: Tensor,
    out_features: int,
    in_features: int,
    block_rows: int,
    block_cols: int,
) -> Tensor:
    """Validate a pattern and return its plan: all that kernels read of it, as a 1-D int32 tensor.

    The plan is on the indices' device (made on the host and copied there) and holds its own copy of the
    indices, so later writes to them cannot make a kernel read out of bounds. Never save it: rebuild it.

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


def _fake_linear(x, values, crow_indices, col_indices, bias, out_features, in_features, plan=None):
    return _rows_like("bsr_linear", "x", x, in_features, "in_features", out_features)


def _fake_grad_input(grad_output, values, crow_indices, col_indices, out_features, in_features, plan=None):
    return _rows_like("bsr_grad_input", "grad_output", grad_output, out_features, "out_features", in_features)


def _fake_grad_weight(
    grad_output,
    x,
    crow_indices,
    col_indices,
    block_rows,
    block_cols,
    out_features,
    in_features,
    plan=None,
):
    return x.new_empty((col_indices.shape[0], block_rows, block_cols))


def _fake_plan(crow_indices, col_indices, out_features, in_features, block_rows, block_cols):
    # As plan_size() of the core: header, crow, col, and the transposed index (ccol, row, perm).
    row_count = (out_features + block_rows - 1) // block_rows
    col_count = (in_features + block_cols - 1) // block_cols
    return crow_indices.new_empty((8 + row_count + 1 + col_count + 1 + 3 * col_indices.shape[0],))


# Autograd ----------------------------------------------------------------------------------------


def _save_linear(ctx, inputs, output):
    x, values, crow_indices, col_indices, _, *ctx.features, plan = inputs
    ctx.block_shape = values.shape[1:]
    needs_x, needs_values = ctx.needs_input_grad[:2]
    ctx.save_for_backward(
        x if needs_values else None, values if needs_x else None, crow_indices, col_indices, plan
    )


def _backward_linear(ctx, grad):
    x, values, crow, col, plan = ctx.saved_tensors
    dx = dvalues = dbias = None
    if ctx.needs_input_grad[0]:
        dx = _grad_input(grad, values, crow, col, *ctx.features, plan)
    if ctx.needs_input_grad[1]:
        dvalues = _grad_weight(grad, x, crow, col, *ctx.block_shape, *ctx.features, plan)
    if ctx.needs_input_grad[4]:
        dbias = grad.sum(tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad
    return dx, dvalues, None, None, dbias, None, None, None


def _save_grad_input(ctx, inputs, output):
    grad_output, values, crow_indices, col_indices, *ctx.features, plan = inputs
    ctx.block_shape = values.shape[1:]
    ctx.save_for_backward(grad_output, values, crow_indices, col_indices, plan)


def _backward_grad_input(ctx, grad):
    grad_output, values, crow, col, plan = ctx.saved_tensors
    dgrad = dvalues = None
    if ctx.needs_input_grad[0]:
        dgrad = _linear(grad, values, crow, col, None, *ctx.features, plan)
    if ctx.needs_input_grad[1]:
        dvalues = _grad_weight(grad_output, grad, crow, col, *ctx.block_shape, *ctx.features, plan)
    return dgrad, dvalues, None, None, None, None, None


def _save_grad_weight(ctx, inputs, output):
    grad_output, x, crow_indices, col_indices, _, _, *ctx.features, plan = inputs
    ctx.save_for_backward(grad_output, x, crow_indices, col_indices, plan)


def _backward_grad_weight(ctx, grad):
    grad_output, x, crow, col, plan = ctx.saved_tensors
    grad = grad.contiguous()
    dgrad = dx = None
    if ctx.needs_input_grad[0]:
        dgrad = _linear(x, grad, crow, col, None, *ctx.features, plan)
    if ctx.needs_input_grad[1]:
        dx = _grad_input(grad_output, grad, crow, col, *ctx.features, plan)
    return dgrad, dx, None, None, None, None, None, None, None


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

    def kernel(x, values, crow_indices, col_indices, bias, out_features, in_features, plan=None):
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _linear(
                cast(x), cast(values), crow_indices, col_indices, cast(bias), out_features, in_features, plan
            )

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
