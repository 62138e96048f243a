"""One matrix in other blocks: `to_csr` and `to_bsr`, differentiable, as blocks are only moved.

Blocks are split into parts that both shapes consist of, and these are put together: no single element is
looked at where one shape is made of the other. Where parts go follows from a pattern, which keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_block_fits, check_block_shape, fail
from ..masks import grid_of
from ..ops import bsr_plan
from ..pattern import BsrPattern, _is_of_a_graph, _when_made
from .matrix import SparseMatrix

_MOST = 2**31 - 1  # what a pattern can store
_CELLS = 8  # of the grid for each part, up to which marking all is faster than sorting the parts
_KEPT = 2

BlockShape = tuple[int, int]


class Moved(NamedTuple):
    """Where parts go, and the pattern that they are on then."""

    pattern: BsrPattern
    order: Tensor  # of blocks' pieces: which ones parts take (int32), or to which ones parts go (int64)
    piece: int  # elements that lie side by side in blocks as in parts


def to_csr(matrix: SparseMatrix) -> SparseMatrix:
    """All elements of stored blocks, as CSR; a CSR matrix itself. See SparseMatrix.to_csr."""
    matrix = matrix.settled()
    if matrix.format == "csr":
        return matrix
    blocks, pattern = _in_blocks("SparseMatrix.to_csr", matrix, (1, 1))
    return SparseMatrix.on_pattern(blocks.flatten(), pattern)


def to_bsr(matrix: SparseMatrix, block_shape: Any) -> SparseMatrix:
    """The blocks that hold something that is stored; itself, if they are its own. See SparseMatrix.to_bsr."""
    op = "SparseMatrix.to_bsr"
    wanted = check_block_fits(op, tuple(matrix.shape), check_block_shape(op, block_shape))
    matrix = matrix.settled()
    if matrix.format == "bsr" and matrix.block_shape == wanted:
        return matrix
    return SparseMatrix.on_pattern(*_in_blocks(op, matrix, wanted))


def _in_blocks(op: str, matrix: SparseMatrix, wanted: BlockShape) -> tuple[Tensor, BsrPattern]:
    """Blocks and pattern of a matrix in blocks of another shape."""
    pattern, mine = matrix.pattern, matrix.block_shape
    if pattern.is_meta:
        fail(op, "the matrix must hold indices", "one on the meta device", TypeError)
    part = math.gcd(mine[0], wanted[0]), math.gcd(mine[1], wanted[1])
    parts = pattern.nnzb * (mine[0] // part[0]) * (mine[1] // part[1])
    if not torch.compiler.is_compiling() and parts > _MOST:  # a graph may not know how many
        what = "elements" if part == (1, 1) else f"blocks of {part}"
        fail(op, f"the matrix must store at most {_MOST} {what}", parts)
    blocks, keeps = matrix.blocks(), matrix._recent is None  # whose patterns are kept in so many bytes
    if part != mine:
        moved = _known(pattern, part, _split, keeps)
        blocks, pattern = _apart(blocks, moved), moved.pattern
    if part != wanted:
        moved = _known(pattern, wanted, _merged, keeps)
        blocks, pattern = _together(blocks, moved), moved.pattern
    return blocks, pattern


def _known(
    pattern: BsrPattern, block: BlockShape, make: Callable[[BsrPattern, BlockShape], Moved], keeps: bool
) -> Moved:
    """How a pattern gets to blocks of a shape; the last two are kept, outside of graphs."""
    known = pattern.__dict__.get("_in_other_blocks")
    if known is not None and block in known:
        return known[block]
    with torch.inference_mode(False):
        made = make(pattern, block)
    if keeps and not _is_of_a_graph(made.order):
        _when_made(made.order)
        last = list((known or {}).items())[1 - _KEPT :]
        pattern._in_other_blocks = {**dict(last), block: made}
    return made


# Values ------------------------------------------------------------------------------------------------


def _apart(blocks: Tensor, moved: Moved) -> Tensor:
    """Blocks, (nnzb, R, C), as parts, (parts, r, c)."""
    pieces = blocks.flatten() if moved.piece == 1 else blocks.view(-1, moved.piece)
    return pieces.index_select(0, moved.order).view(moved.pattern.nnzb, *moved.pattern.block_shape)


def _together(parts: Tensor, moved: Moved) -> Tensor:
    """Parts, (parts, r, c), as blocks, (nnzb, R, C), with zeros where there are none."""
    (rows, columns), piece = moved.pattern.block_shape, moved.piece
    count = moved.pattern.nnzb * (rows * columns // piece)
    if piece == 1:  # half the time
        blocks = parts.new_zeros(count).scatter_(0, moved.order, parts.flatten())
    else:
        blocks = parts.new_zeros(count, piece).index_copy_(0, moved.order, parts.view(-1, piece))
    return blocks.view(moved.pattern.nnzb, rows, columns)


# Where they go -----------------------------------------------------------------------------------------


def _split(pattern: BsrPattern, part: BlockShape) -> Moved:
    """Parts of blocks, by rows of parts: their order is known, so nothing is sorted."""
    (crow, col), device = pattern.indices(), pattern.device
    p, q = (side // mine for side, mine in zip(pattern.block_shape, part, strict=True))
    rows, columns = grid_of(pattern.shape, part)
    row = torch.arange(rows, dtype=torch.int32, device=device)
    count = crow.diff().index_select(0, row // p)  # blocks that a row of parts meets
    first = _starts(count)
    # Rows of padding are the last ones of all, so without them there are fewer, and those the same.
    size = {"output_size": pattern.nnzb * p} if rows == pattern.grid[0] * p else {}
    block = (crow.index_select(0, row // p) - first[:-1]).repeat_interleave(count, **size)
    block = block + torch.arange(block.shape[0], dtype=torch.int32, device=device)
    # Rows of a block's parts, which are rows of the result, in its order.
    order = block * p + (row % p).repeat_interleave(count, output_size=block.shape[0])
    beside = torch.arange(q, dtype=torch.int32, device=device)
    column = (col.index_select(0, block)[:, None] * q + beside).flatten()
    cut, height = columns < pattern.grid[1] * q, _height(part, q)
    if height == 1 and not cut:
        return Moved(_on_parts(pattern, part, first * q, column), order, part[0] * q * part[1])
    order, crow = (order[:, None] * (height * q) + beside).flatten(), first * q
    if cut:
        inside = column < columns
        crow, inside = _starts(inside).index_select(0, crow), inside.nonzero().flatten()
        order, column = order.index_select(0, inside), column.index_select(0, inside)
    order = _lines(order, height, q)
    return Moved(_on_parts(pattern, part, crow, column), order, part[0] // height * part[1])


def _merged(pattern: BsrPattern, block: BlockShape) -> Moved:
    """Blocks that hold parts, and where in them each lies."""
    (crow, col), part = pattern.indices(), pattern.block_shape
    p, q = (side // mine for side, mine in zip(block, part, strict=True))
    rows, columns = grid_of(pattern.shape, block)
    row, count = torch.arange(pattern.grid[0], device=pattern.device), crow.diff()
    right, x = _divided(col.long(), q)
    place = right.add_((row // p * columns).repeat_interleave(count, output_size=pattern.nnzb))
    places, slot = _distinct(place, rows * columns, ascending=p == 1)
    height = _height(part, q)
    order = slot.mul_(p * height * q).add_(x)
    order.add_((row % p * (height * q)).repeat_interleave(count, output_size=pattern.nnzb))
    crow = torch.searchsorted(places, torch.arange(rows + 1, device=pattern.device) * columns)
    made = _on_parts(pattern, block, crow.int(), (places % max(1, columns)).int())
    return Moved(made, _lines(order, height, q), part[0] // height * part[1])


def _height(part: BlockShape, beside: int) -> int:
    """How many pieces a part is: its lines, if others lie beside it in a block."""
    return part[0] if beside > 1 else 1


def _lines(order: Tensor, height: int, apart: int) -> Tensor:
    """The pieces of each part, of which `order` are the first ones."""
    if height == 1:
        return order
    return (order[:, None] + torch.arange(height, dtype=order.dtype, device=order.device) * apart).flatten()


def _divided(index: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder; of powers of two, as most blocks are, in a twentieth of the time."""
    if by & (by - 1) == 0:
        return index >> (by.bit_length() - 1), index & (by - 1)
    quotient = index // by
    return quotient, index - quotient * by


def _distinct(place: Tensor, cells: int, ascending: bool) -> tuple[Tensor, Tensor]:
    """The places of a grid of so many cells that occur, ascending, and which of them each one is."""
    if ascending:
        return torch.unique_consecutive(place, return_inverse=True)
    if torch.compiler.is_compiling() or cells > _CELLS * len(place):
        return torch.unique(place, return_inverse=True)
    mask = torch.zeros(cells, dtype=torch.bool, device=place.device).index_fill_(0, place, True)
    return mask.nonzero().flatten(), mask.cumsum(0, dtype=torch.int32).index_select(0, place).long().sub_(1)


def _starts(count: Tensor) -> Tensor:
    """Where each of so many begins, and the end of all, int32."""
    begin = torch.zeros(1, dtype=torch.int32, device=count.device)
    return torch.cat((begin, count.cumsum(0, dtype=torch.int32)))


def _on_parts(pattern: BsrPattern, block: BlockShape, crow: Tensor, col: Tensor) -> BsrPattern:
    """The pattern of the same matrix in other blocks; indices that follow from valid ones."""
    shape, nnzb = pattern.shape, col.shape[0]
    if pattern.device.type == "cpu":
        sides = torch.tensor(block, dtype=torch.int32)
        header = pattern.row_plan[:3], sides, col.new_full((1,), nnzb), col.new_zeros(2)
        return BsrPattern._of_rows(torch.cat((*header, crow, col)), shape, block, nnzb)
    plan = bsr_plan(crow, col, *shape, *block)
    made = BsrPattern._of_rows(plan, shape, block, nnzb)
    made.plan = plan
    return made
