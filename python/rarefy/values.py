"""What weights on a pattern do with values: choose them, draw them, keep their padding zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .checks import check_block_fits, check_dtype, check_tensor, fail, first_position
from .masks import choose_blocks, from_blocks, to_blocks
from .pattern import BsrPattern


def counted(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without its gradient; of one of inference mode a copy whose writes are counted.

    What is derived of a tensor holds until it is written to. Of one without a count it would be made in every
    call: 4096 → 11008 in int8 took 31 ms a token, where .4 are needed.
    """
    with torch.inference_mode(False):
        return tensor.detach().clone() if tensor.is_inference() else tensor.detach()


def new_values(values: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """A Parameter of these values, in whatever mode, that counts its writes."""
    with torch.inference_mode(False):
        return nn.Parameter(counted(values), requires_grad=requires_grad)


def check_dense(op: str, dense: Any) -> None:
    """Raises unless `dense` is a matrix that holds data, of a dtype that weights can have."""
    check_tensor(op, "dense", dense)
    if dense.ndim != 2:
        fail(op, "dense must have 2 dimensions", f"{dense.ndim}: {tuple(dense.shape)}")
    check_dtype(op, "dense", dense.dtype)
    if dense.is_meta:
        fail(op, "dense must hold data", "a tensor on the meta device", TypeError)


def choose_from_dense(
    op: str,
    dense: torch.Tensor,
    block_shape: tuple[int, int],
    mask: torch.Tensor | None,
    density: float | None,
    scores: torch.Tensor | None,
) -> tuple[torch.Tensor, BsrPattern]:
    """The chosen blocks of a dense matrix, (nnzb, R, C), and their pattern; see BsrWeight.from_dense."""
    check_dense(op, dense)
    dense, shape = dense.detach(), (dense.shape[0], dense.shape[1])
    check_block_fits(op, shape, block_shape)
    block_mask = choose_blocks(op, dense, block_shape, mask, density, scores)
    pattern = BsrPattern.from_mask(block_mask, shape=shape, block_shape=block_shape)
    return to_blocks(dense, block_shape)[block_mask].contiguous(), pattern


def dense_of(blocks: torch.Tensor, pattern: BsrPattern) -> torch.Tensor:
    """(N, K) of the stored blocks, (nnzb, R, C), zeros for the others; differentiable, exact."""
    (rows, cols), shape = pattern.grid, pattern.block_shape
    grid = blocks.new_zeros((rows * cols, *shape)).index_copy(0, pattern.positions(), blocks)
    return from_blocks(grid.reshape(rows, cols, *shape), pattern.shape)


def init_bounds(block_mask: torch.Tensor, in_features: int, block_cols: int) -> torch.Tensor:
    """1 / √(stored inputs) of each block row; 0 for an empty one."""
    widths = torch.full((block_mask.shape[1],), block_cols, device=block_mask.device)
    if in_features % block_cols:
        widths[-1] = in_features % block_cols
    stored = (block_mask * widths).sum(dim=1).double()
    return torch.where(stored > 0, stored.rsqrt(), torch.zeros_like(stored))


def draw_uniform_(tensor: torch.Tensor, bound: float, generator: torch.Generator | None) -> None:
    """Uniform numbers in ±bound; a generator of another device draws the same ones wherever the tensor is."""
    if generator is None or generator.device.type == tensor.device.type:
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        drawn = torch.empty(tensor.shape, dtype=tensor.dtype, device=generator.device)
        tensor.copy_(drawn.uniform_(-bound, bound, generator=generator))


def check_padding(op: str, values: torch.Tensor, pattern: BsrPattern) -> None:
    """Raises ValueError where a stored block has something else than zero outside the matrix."""
    if values.is_meta or values.ndim != 3 or not pattern.is_padded:
        return
    rows, cols = pattern.shape
    for axis, inside in ((1, rows % values.shape[1]), (2, cols % values.shape[2])):
        if not inside:
            continue
        first, end = pattern.last_row()
        edge = pattern.last_column() if axis == 2 else torch.arange(first, end, device=values.device)
        bad = values.detach()[edge].narrow(axis, inside, values.shape[axis] - inside) != 0
        if bool(bad.any()):
            at = list(first_position(bad))
            at[0] = int(edge[at[0]])
            at[axis] += inside
            fail(
                op,
                f"values outside the shape ({rows}, {cols}) must be zero padding",
                f"values[{at[0]}, {at[1]}, {at[2]}]={values[tuple(at)].item()}",
            )


def zero_padding(blocks: torch.Tensor, pattern: BsrPattern) -> None:
    """Writes zeros where stored blocks reach past the matrix."""
    rows, cols = (size % block for size, block in zip(pattern.shape, pattern.block_shape, strict=True))
    if rows:
        first, end = pattern.last_row()
        blocks[first:end, rows:, :] = 0
    if cols:
        blocks[:, :, cols:].index_fill_(0, pattern.last_column(), 0)
