"""Softmax over what a sparse matrix stores, and attention on a pattern of blocks made of it."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from .. import _load
from .._torch_private import eager, in_autocast
from ..checks import fail
from ..op_rules import register_fake
from ..pattern import BsrPattern
from .arrays import FLOATS, as_tensor
from .kinds import as_matrix
from .matrix import SparseMatrix
from .products import sddmm, spmm

# Bytes of scores at a time: of what the caches of a CPU hold; on a GPU what fills it.
_SCORES = {"cpu": 8 << 20}
_MANY_SCORES = 512 << 20

_softmax, _softmax_gradient = map(_load.op, ("_stored_softmax", "_stored_softmax_gradient"))


def sparse_softmax(a: Any, *, check: str = "once") -> SparseMatrix:
    """Return the softmax of each row over the elements that `a` stores, on the same pattern.

    What is not stored counts as −∞, and so does a stored −∞: a mask inside a block. A row that stores nothing
    else is zero. Gradients flow to a's data. `a`, `check` and errors are those of `sparse_dense`'s weight,
    but integers are a TypeError.
    """
    op = "sparse_softmax"
    matrix = as_matrix(op, "a", a, check=check)
    if matrix.dtype not in FLOATS:
        fail(op, "a must be of a floating-point dtype", matrix.dtype, TypeError)
    blocks = _Softmax.apply(matrix.blocks(), matrix.pattern)
    return SparseMatrix.of_blocks(blocks, matrix.pattern, matrix)


def _fake(values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(values)


if _load.problem is None:
    for _name in ("_stored_softmax", "_stored_softmax_gradient"):
        register_fake(_name, _fake)


class _Softmax(torch.autograd.Function):
    """One pass of the core on the host; torch's reductions over block rows elsewhere."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, pattern: BsrPattern) -> Tensor:
        ctx.pattern = pattern
        if blocks.device.type == "cpu":
            p = _softmax(blocks.contiguous(), pattern.row_plan, pattern.sizes)
        else:
            p = _softmax_by_reductions(blocks, pattern)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        if not torch.is_grad_enabled() and p.device.type == "cpu":
            sizes = ctx.pattern.sizes
            return _softmax_gradient(p, gradient.contiguous(), ctx.pattern.row_plan, sizes), None
        product = p * gradient
        rows = ctx.pattern.block_rows()
        sums = product.new_zeros((ctx.pattern.grid[0], p.shape[1])).index_add(0, rows, product.sum(2))
        return product - p * sums[rows][:, :, None], None


def _softmax_by_reductions(blocks: Tensor, pattern: BsrPattern) -> Tensor:
    rows, (r, c) = pattern.block_rows(), pattern.block_shape
    wide = blocks.to(torch.float64 if blocks.dtype == torch.float64 else torch.float32)
    outside = pattern.shape[1] % c
    if outside:
        wide = wide.clone()
        wide[pattern.last_column(), :, outside:] = -math.inf
    most = wide.new_full((pattern.grid[0], r), -math.inf)
    most = most.index_reduce(0, rows, wide.amax(2) if len(wide) else wide.new_empty((0, r)), "amax")
    e = (wide - most.clamp(min=torch.finfo(wide.dtype).min)[rows][:, :, None]).exp()
    sums = e.new_zeros((pattern.grid[0], r)).index_add(0, rows, e.sum(2))
    p = e / sums.clamp(min=torch.finfo(wide.dtype).tiny)[rows][:, :, None]
    if pattern.shape[0] % r:
        first, end = pattern.last_row()
        p[first:end, pattern.shape[0] % r :] = 0
    return p.to(blocks.dtype)


def sparse_attention(
    query: Any,
    key: Any,
    value: Any,
    pattern: BsrPattern,
    *,
    scale: float | Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return softmax(query keyᵀ · scale) value where `pattern` stores a score, and only there.

    The recipe `sddmm → sparse_softmax → spmm`, for each of the leading dimensions, with gradients to all.

    Args:
        query: (…, L, D), of any floating-point dtype.
        key: (…, S, D) of the same leading dimensions, and of query's dtype and device.
        value: (…, S, E), the same; or float32 and 16-bit scores, on the CPU.
        pattern: which blocks of the (L, S) scores there are, on the device of query.
        scale: 1 / √D by default, for D of at least 1; a tensor of no dimensions may require gradients.
        causal: scores right of the diagonal, inside the stored blocks, count as not stored.

    Returns:
        (…, L, E); rows for which nothing is stored are zero.

    Raises ValueError for shapes that do not fit, TypeError for dtypes or devices.
    """
    query, key, value = (
        as_tensor("sparse_attention", name, tensor)
        for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    scale = _check_attention(query, key, value, pattern, scale)
    lead = query.shape[:-2]
    if 0 in lead:
        return value.new_empty((*lead, query.shape[-2], value.shape[-1]))
    outside = _causal_mask(pattern) if causal else None
    flat = [tensor.reshape(math.prod(lead), *tensor.shape[-2:]) for tensor in (query, key, value)]
    parts = []
    for q, k, v in zip(*(tensor.split(_heads_at_once(query, pattern)) for tensor in flat), strict=True):
        heads = pattern.on_diagonal(len(q))
        here = SparseMatrix.on_pattern(query.new_empty((heads.nnzb, *heads.block_shape)), heads)
        scores = sddmm(here, q.flatten(0, 1) * scale, k.flatten(0, 1))
        if outside is not None:
            stored = scores.data.unflatten(0, (len(q), pattern.nnzb)).masked_fill(outside, -math.inf)
            scores = SparseMatrix.on_pattern(stored.flatten(0, 1), heads)
        parts.append(spmm(sparse_softmax(scores), v.flatten(0, 1)).unflatten(0, q.shape[:2]))
    return torch.cat(parts).reshape(*lead, query.shape[-2], value.shape[-1])


def _check_attention(query: Tensor, key: Tensor, value: Tensor, pattern: Any, scale: Any) -> float | Tensor:
    """Raises unless the arguments of `sparse_attention` fit each other; the scale."""
    op, named = "sparse_attention", {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if tensor.ndim < 2:
            fail(op, f"{name} must have at least 2 dimensions", tensor.ndim)
        if tensor.dtype not in FLOATS:
            fail(op, f"{name} must be of a floating-point dtype", tensor.dtype, TypeError)
        if tensor.device != query.device:
            fail(op, f"{name} must be on the device of query, {query.device}", tensor.device, TypeError)
    if not isinstance(pattern, BsrPattern):
        fail(op, "pattern must be a BsrPattern", type(pattern).__name__, TypeError)
    if pattern.device != query.device:
        fail(op, f"pattern must be on the device of query, {query.device}", pattern.device, TypeError)
    lead = query.shape[:-2]
    if key.shape[:-2] != lead or value.shape[:-2] != lead or key.shape[-2] != value.shape[-2]:
        requirement = "query, key and value must have equal leading dimensions, and key and value equal rows"
        fail(op, requirement, f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
    if query.shape[-1] != key.shape[-1]:
        fail(op, f"key must have {query.shape[-1]} columns, as query has", key.shape[-1])
    if (query.shape[-2], key.shape[-2]) != tuple(pattern.shape):
        fail(op, f"pattern must be of {query.shape[-2]} × {key.shape[-2]} scores", tuple(pattern.shape))
    if key.dtype != query.dtype:
        fail(op, f"key must be of the dtype of query, {query.dtype}", key.dtype, TypeError)
    halves = value.dtype == torch.float32 and query.dtype in (torch.bfloat16, torch.float16)
    if value.dtype != query.dtype and not halves and not in_autocast():
        fail(op, f"value must be of the dtype of query, {query.dtype}", value.dtype, TypeError)
    if scale is None:
        if query.shape[-1] == 0:
            fail(op, "query must have at least 1 column where no scale is given", tuple(query.shape))
        return query.shape[-1] ** -0.5
    if not isinstance(scale, numbers.Real | Tensor):
        fail(op, "scale must be a number", repr(scale), TypeError)
    return scale


def _heads_at_once(query: Tensor, pattern: BsrPattern) -> int:
    """How many heads are one matrix, with their scores on its diagonal: blocks must end where heads do."""
    if pattern.is_padded or not eager():
        return 1
    scores = pattern.nnzb * math.prod(pattern.block_shape) * query.element_size()
    return max(1, _SCORES.get(query.device.type, _MANY_SCORES) // max(1, scores))


def _causal_mask(pattern: BsrPattern) -> Tensor:
    """(nnzb, R, C) bool: which stored elements lie right of the diagonal."""
    r, c = pattern.block_shape
    row = pattern.block_rows()[:, None] * r + torch.arange(r, device=pattern.device)
    column = pattern.indices()[1][:, None] * c + torch.arange(c, device=pattern.device)
    return column[:, None, :] > row[:, :, None]
