"""Sparse × sparse on a GPU: all pairs of blocks that meet, sorted by where they belong, and summed.

"Expand, sort, compress" (Bell, Dalton and Olson, 2012) in torch's operations, so on any device. A block is
the sum of its pairs in a's order, in float32 (products of blocks in tf32 where torch's may) or float64: equal
calls have equal bits. Integers are exact modulo 2 to their bits. Rows of a are taken in ranges, whose pairs
bound the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..pattern import BsrPattern
from . import integers

_ELEMENTS = 1 << 26  # of operands and products at a time: a quarter of a gigabyte in float32


def product(a: Tensor, pa: BsrPattern, b: Tensor, pb: BsrPattern) -> tuple[Tensor, BsrPattern]:
    """The blocks of A B that may differ from zero, as values and pattern."""
    values, positions, columns = [], [], pb.grid[1]
    a, b = _without_padding(a, pa), _without_padding(b, pb)
    # Half of the digits, where they are enough, are sorted in half of the time.
    dtype = torch.int32 if pa.grid[0] * columns <= torch.iinfo(torch.int32).max else torch.int64
    for left, right, rows in _ranges(pa, pb):
        key, order = (rows * columns + pb.indices()[1][right]).to(dtype).sort(stable=True)
        key, counts = torch.unique_consecutive(key, return_counts=True)
        values.append(_sums(a[left[order]], b[right[order]], counts))
        positions.append(key.long())
    shape, block = (pa.shape[0], pb.shape[1]), (pa.block_shape[0], pb.block_shape[1])
    pattern = BsrPattern.from_positions(torch.cat(positions), shape=shape, block_shape=block)
    return _without_padding(torch.cat(values), pattern), pattern


def sampled(a: Tensor, pa: BsrPattern, b: Tensor, pb: BsrPattern, pc: BsrPattern) -> Tensor:
    """The blocks of A B that a pattern stores."""
    positions, columns = pc.positions(), pb.grid[1]
    a, b = _without_padding(a, pa), _without_padding(b, pb)
    blocks = a.new_zeros((pc.nnzb, *pc.block_shape))
    for left, right, rows in _ranges(pa, pb):
        key = rows * columns + pb.indices()[1][right]
        slot = torch.searchsorted(positions, key)
        met = (positions.index_select(0, slot.clamp_(max=max(0, pc.nnzb - 1))) == key) if pc.nnzb else key < 0
        chosen = met.nonzero().flatten()
        slot, order = slot[chosen].sort(stable=True)
        chosen = chosen[order]
        slot, counts = torch.unique_consecutive(slot, return_counts=True)
        blocks[slot] = _sums(a[left[chosen]], b[right[chosen]], counts)
    return _without_padding(blocks, pc)


def _ranges(pa: BsrPattern, pb: BsrPattern) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For ranges of rows: which blocks of a and b are pairs, and in which block row, in a's order."""
    (crow, col), (crow_b, _) = ([index.long() for index in p.indices()] for p in (pa, pb))
    counts = crow_b.diff().index_select(0, col)  # pairs of each block of a
    before = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    by_row = before[crow]
    (r, s), c = pa.block_shape, pb.block_shape[1]
    most = max(1, _ELEMENTS // (r * s + s * c + r * c))
    # The last is beyond all pairs.
    cuts = torch.arange(most, int(by_row[-1]) + most + 1, most, device=col.device)
    rows = torch.searchsorted(by_row, cuts).clamp_(max=pa.grid[0]).unique()
    bounds = torch.stack((crow[rows], by_row[rows])).T.tolist()
    block_rows = pa.block_rows()
    for (first, start), (end, stop) in zip([(0, 0), *bounds[:-1]], bounds, strict=True):
        own = torch.arange(first, end, device=col.device)
        left = own.repeat_interleave(counts[first:end], output_size=stop - start)
        place = torch.arange(start, stop, device=col.device) - before[left]
        yield left, crow_b[col[left]] + place, block_rows[left]


def _sums(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Of the products of pairs of blocks, so many one after another each."""
    floats = x.dtype.is_floating_point
    wide = torch.promote_types(x.dtype, torch.float32) if floats else integers.widened(x.dtype)
    multiply = torch.bmm if floats else integers.multiplied
    if x.shape[1:] == y.shape[1:] == (1, 1):
        multiply = torch.mul
    products = multiply(x.to(wide), y.to(wide))
    if len(counts) == 0:
        return products.to(x.dtype)
    if not floats:
        return integers.summed(products, counts).to(x.dtype)
    return torch.segment_reduce(products, "sum", lengths=counts, unsafe=True).to(
        x.dtype
    )  # not looked at: no wait


def _without_padding(blocks: Tensor, pattern: BsrPattern) -> Tensor:
    """Blocks with zeros where they reach past the matrix, whatever is stored there."""
    if not pattern.is_padded:
        return blocks
    blocks = blocks.clone()
    rows, columns = (-size % block for size, block in zip(pattern.shape, pattern.block_shape, strict=True))
    first, end = pattern.last_row()
    blocks[first:end, pattern.block_shape[0] - rows :] = 0
    blocks[pattern.last_column()[:, None], :, pattern.block_shape[1] - columns :] = 0
    return blocks
