"""Sums, parts and joins of matrices, each as blocks, (nnzb, R, C), and a pattern: differentiable.

On the CPU ops of the core. Where a derivative may be asked for, the same ops say which block goes where, and
torch moves the values, so that every order and mode of its derivatives is there; so it is on a GPU, whose
blocks are found by sorting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _load
from .._torch_private import unrecorded
from ..masks import from_blocks, grid_of, to_blocks
from ..op_rules import register_fake
from ..pattern import BsrPattern, row_plan_size

_sum, _sum_with_dense, _slice, _joined, _on_pattern = map(
    _load.op, ("_sparse_sum", "_sum_with_dense", "_sparse_slice", "_sparse_joined", "_on_pattern")
)

Blocks = tuple[Tensor, BsrPattern]
Span = tuple[int, int]  # begin and end


def add(a: Tensor, pa: BsrPattern, b: Tensor, pb: BsrPattern) -> Blocks:
    """A + B of one shape in equal blocks: what either stores."""
    if _on_host(pa) and unrecorded(a, b):
        return _sum_on_host(a, pa, b, pb)
    pattern, mine, theirs = _slots(pa, pb)
    sums = a.new_zeros((pattern.nnzb, *pa.block_shape)).index_copy(0, mine, a)
    return sums.index_copy(0, theirs, sums.index_select(0, theirs) + b), pattern


def _sum_on_host(a: Tensor, pa: BsrPattern, b: Tensor, pb: BsrPattern) -> Blocks:
    matrices = (a.contiguous(), pa.row_plan, pa.sizes, b.contiguous(), pb.row_plan, pb.sizes)
    return _made(_sum(*matrices), tuple(pa.shape), pa.block_shape)


def add_dense(dense: Tensor, blocks: Tensor, pattern: BsrPattern) -> Tensor:
    """D + W, dense, (N, K)."""
    if _on_host(pattern) and unrecorded(dense, blocks):
        return _sum_with_dense(dense, blocks.contiguous(), pattern.row_plan, pattern.sizes)
    grid, positions = to_blocks(dense, pattern.block_shape), pattern.positions()
    result = grid.flatten(0, 1)
    result = result.index_copy(0, positions, result[positions] + blocks)
    return from_blocks(result.view(grid.shape), tuple(pattern.shape))


def part(blocks: Tensor, pattern: BsrPattern, rows: Span, columns: Span) -> Blocks:
    """The matrix of some rows and columns, which begin and end at edges of blocks."""
    shape, block = (rows[1] - rows[0], columns[1] - columns[0]), pattern.block_shape
    if not _on_host(pattern):
        return _part_by_masks(blocks, pattern, rows, columns)
    span = [*rows, *columns]
    if unrecorded(blocks):
        return _made(_slice(blocks.contiguous(), pattern.row_plan, pattern.sizes, span), shape, block)
    made = _slice(_numbers(pattern), pattern.row_plan, pattern.sizes, span)
    kept, part_of = _made(made, shape, block)
    return blocks.index_select(0, _slot(kept)), part_of


def joined(blocks: Sequence[Tensor], patterns: Sequence[BsrPattern], dim: int) -> Blocks:
    """Matrices below one another (dim 0) or side by side (dim 1), of equal blocks, that fit."""
    shape = [sum(p.shape[dim] for p in patterns)] * 2
    shape[1 - dim] = patterns[0].shape[1 - dim]
    block = patterns[0].block_shape
    if not _on_host(patterns[0]):
        return _joined_by_sorting(blocks, patterns, tuple(shape), dim)
    plans, sizes = [p.row_plan for p in patterns], [size for p in patterns for size in p.sizes]
    if unrecorded(*blocks):
        made = _joined([b.contiguous() for b in blocks], plans, sizes, dim == 1)
        return _made(made, tuple(shape), block)
    numbers, first = [], 0
    for pattern in patterns:
        numbers.append(_numbers(pattern, first))
        first += pattern.nnzb
    order, pattern = _made(_joined(numbers, plans, sizes, dim == 1), tuple(shape), block)
    return torch.cat(list(blocks)).index_select(0, _slot(order)), pattern


# Which block goes where --------------------------------------------------------------------------------


def _on_host(pattern: BsrPattern) -> bool:
    return pattern.device.type == "cpu"


def _made(made: tuple[Tensor, Tensor], shape: tuple[int, int], block: tuple[int, int]) -> Blocks:
    blocks, plan = made
    return blocks, BsrPattern._of_rows(plan, shape, block, blocks.shape[0])


def _numbers(pattern: BsrPattern, first: int = 0) -> Tensor:
    """Blocks, each of its own number: an op that moves them says which one goes where."""
    numbers = torch.arange(first, first + pattern.nnzb, dtype=torch.int32)
    return numbers[:, None, None].expand(-1, *pattern.block_shape).contiguous()


def _slot(numbers: Tensor) -> Tensor:
    return numbers[:, 0, 0].long()


def _slots(pa: BsrPattern, pb: BsrPattern) -> tuple[BsrPattern, Tensor, Tensor]:
    """The pattern of a sum, and where it has the blocks of both."""
    if _on_host(pa):
        nothing = [torch.empty((p.nnzb, *p.block_shape), dtype=torch.int8) for p in (pa, pb)]
        _, pattern = _sum_on_host(nothing[0], pa, nothing[1], pb)
        held = _numbers(pattern), pattern.row_plan, pattern.sizes
        mine, theirs = (_slot(_on_pattern(*held, p.row_plan, p.nnzb)) for p in (pa, pb))
        return pattern, mine, theirs
    mine, theirs = pa.positions(), pb.positions()
    positions = torch.unique(torch.cat((mine, theirs)))
    pattern = BsrPattern.from_positions(positions, shape=tuple(pa.shape), block_shape=pa.block_shape)
    return pattern, torch.searchsorted(positions, mine), torch.searchsorted(positions, theirs)


def _part_by_masks(blocks: Tensor, pattern: BsrPattern, rows: Span, columns: Span) -> Blocks:
    (r, c), crow, col = pattern.block_shape, *pattern.indices()
    (top, bottom), (left, right) = (
        (-(-rows[0] // r), -(-rows[1] // r)),
        (-(-columns[0] // c), -(-columns[1] // c)),
    )
    first, end = (int(i) for i in crow[[top, bottom]])
    crow, col, blocks = crow[top : bottom + 1] - first, col[first:end], blocks[first:end]
    if (left, right) != (0, pattern.grid[1]):
        kept = (col >= left) & (col < right)
        counts = torch.zeros(len(kept) + 1, dtype=torch.int64, device=col.device)
        counts[1:] = kept.cumsum(0)
        crow, col, blocks = counts[crow.long()], col[kept] - left, blocks[kept]
    shape = (rows[1] - rows[0], columns[1] - columns[0])
    return blocks, BsrPattern(crow, col, shape=shape, block_shape=(r, c), op="sparse_slice")


def _joined_by_sorting(
    blocks: Sequence[Tensor], patterns: Sequence[BsrPattern], shape: tuple[int, int], dim: int
) -> Blocks:
    block, positions, start = patterns[0].block_shape, [], 0
    columns = grid_of(shape, block)[1]
    for pattern in patterns:
        rows, cols = pattern.block_rows(), pattern.indices()[1]
        positions.append((rows + (0 if dim else start)) * columns + cols + (start if dim else 0))
        start += pattern.grid[dim]
    ascending, order = torch.sort(torch.cat(positions))
    pattern = BsrPattern.from_positions(ascending, shape=shape, block_shape=block)
    return torch.cat(list(blocks)).index_select(0, order), pattern


# Fake kernels ------------------------------------------------------------------------------------------


def _fake(like: Tensor, plan: Tensor, sizes: list[int], rows: int, blocks: int) -> tuple[Tensor, Tensor]:
    words = row_plan_size(-(-rows // sizes[2]), blocks)
    return like.new_empty((blocks, *sizes[2:4])), plan.new_empty((words,))


def _fake_sum(a: Tensor, a_plan: Tensor, a_sizes: list[int], b: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _fake(a, a_plan, a_sizes, a_sizes[0], torch.library.get_ctx().new_dynamic_size())


def _fake_slice(values: Tensor, plan: Tensor, sizes: list[int], span: list[int]) -> tuple[Tensor, Tensor]:
    return _fake(values, plan, sizes, span[1] - span[0], torch.library.get_ctx().new_dynamic_size())


def _fake_joined(
    values: list[Tensor], plans: list[Tensor], sizes: list[int], beside: bool
) -> tuple[Tensor, Tensor]:
    rows = sizes[0] if beside else sum(sizes[::4])
    return _fake(values[0], plans[0], sizes, rows, sum(v.shape[0] for v in values))


if _load.problem is None:
    register_fake("_sparse_sum", _fake_sum)
    register_fake("_sparse_slice", _fake_slice)
    torch.library.register_fake("rarefy::_sparse_joined", _fake_joined)
    register_fake("_sum_with_dense", lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
    register_fake("_on_pattern", lambda v, p, s, o, blocks: v.new_empty((blocks, *v.shape[1:])))
