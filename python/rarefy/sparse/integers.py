"""Products of integers modulo 2 to their bits on a GPU, where torch multiplies no matrices of them.

Pairs of blocks are multiplied a column at a time. Rows of any length, of which a pattern samples the
products, are cut into parts of 16 bits, whose products the layers' kernels add up in float64: exactly, as
2²¹ terms below 2³² stay below 2⁵³. The rest is sums of integers, equal in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..pattern import BsrPattern

_BITS = 16
_MOST_TERMS = 1 << 21
_ELEMENTS = 1 << 25  # of all parts at a time: a quarter of a gigabyte


def widened(dtype: torch.dtype) -> torch.dtype:
    """What sums of products of these integers are kept in, whose low bits stay."""
    return torch.promote_types(dtype, torch.int32)


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    """(P, R, C), the products of pairs of blocks, (P, R, S) and (P, S, C), all of one widened dtype."""
    products = x.new_zeros((len(x), x.shape[1], y.shape[2]))
    for s in range(x.shape[2]):
        products.addcmul_(x[:, :, s : s + 1], y[:, s : s + 1])
    return products


def summed(products: Tensor, counts: Tensor) -> Tensor:
    """The sums, (len(counts), …), of so many products one after another each."""
    place = torch.arange(len(counts), device=counts.device)
    place = place.repeat_interleave(counts, output_size=len(products))
    return products.new_zeros((len(counts), *products.shape[1:])).index_add_(0, place, products)


def sampled(x: Tensor, y: Tensor, pattern: BsrPattern) -> Tensor:
    """The blocks, (nnzb, R, C), of x yᵀ that a pattern of (M, N) stores, of x, (M, D), and y, (N, D).

    Both of one dtype of signed integers, with any strides, on the pattern's device; padding is zero.
    """
    (rows, depth), columns = x.shape, len(y)
    total = torch.zeros((pattern.nnzb, *pattern.block_shape), dtype=torch.int64, device=x.device)
    count = -(-torch.iinfo(x.dtype).bits // _BITS)
    step = max(1, min(_MOST_TERMS, _ELEMENTS // (count * max(1, rows + columns))))
    sizes = (*pattern.block_shape, *pattern.shape)
    for first in range(0, depth, step):
        left, right = (_parts(z[:, first : first + step]) for z in (x, y))
        for i, low in enumerate(left):
            for j, high in enumerate(right[: count - i]):  # the others are multiples of 2 to the bits
                product = ops.bsr_grad_weight(low.t(), high.t(), pattern.plan, *sizes)
                total += product.long() << _BITS * (i + j)
    return total.to(x.dtype)


def _parts(x: Tensor) -> list[Tensor]:
    """16 bits each in float64, the lowest first: from zero on, but for the last, which has the sign."""
    last = max(0, torch.iinfo(x.dtype).bits - _BITS)
    lower = [((x >> at) & ((1 << _BITS) - 1)).double() for at in range(0, last, _BITS)]
    return [*lower, (x >> last).double()]
