"""Which blocks to store: block grids, norms and scores, masks and random patterns, all as plain tensors."""

from __future__ import annotations

import torch
from torch.nn import functional

from .checks import check_density, check_tensor, fail, first_position

NONZERO = "nonzero"  # a density: every block that is not all zeros


def grid_of(shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """Block rows and columns of a matrix of `shape` in blocks of `block_shape`, padded ones included."""
    return -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])


def to_blocks(dense: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """(N, K) as (block rows, block columns, R, C), padded with zeros; a view where nothing is padded."""
    (rows, cols), (r, c) = dense.shape, block_shape
    grid = grid_of((rows, cols), block_shape)
    pad_rows, pad_cols = grid[0] * r - rows, grid[1] * c - cols
    if pad_rows or pad_cols:
        dense = functional.pad(dense, (0, pad_cols, 0, pad_rows))
    return dense.reshape(grid[0], r, grid[1], c).transpose(1, 2)


def from_blocks(blocks: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The inverse of to_blocks: (block rows, block columns, R, C) as (N, K), padding dropped."""
    grid_rows, grid_cols, r, c = blocks.shape
    dense = blocks.transpose(1, 2).reshape(grid_rows * r, grid_cols * c)
    return dense[: shape[0], : shape[1]].contiguous()


def expand_mask(
    block_mask: torch.Tensor, shape: tuple[int, int], block_shape: tuple[int, int]
) -> torch.Tensor:
    """A mask of (block rows, block columns), of any dtype, as an element-wise one of `shape` (N, K)."""
    mask = block_mask.repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)
    return mask[: shape[0], : shape[1]].contiguous()


def groups_of_four(matrix: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """(N, K) as (N, ⌈K/4⌉, 4), with `fill` past the last column."""
    return functional.pad(matrix, (0, -matrix.shape[1] % 4), value=fill).unflatten(1, (-1, 4))


def beyond_two_of_four(mask: torch.Tensor) -> torch.Tensor:
    """(N, ⌈K/4⌉) bool: which groups of four neighbours of a bool matrix have more than two."""
    return groups_of_four(mask.to(torch.uint8)).sum(2) > 2


def block_norms(dense: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """L2 norm of each block of a dense (N, K) matrix: (block rows, block columns) in float64."""
    return torch.linalg.vector_norm(to_blocks(dense.double(), block_shape), dim=(2, 3))


def block_count(density: float, blocks: int) -> int:
    """round(density · blocks), halves to even, as in the C++ core."""
    return round(density * blocks)


def top_blocks(scores: torch.Tensor, density: float) -> torch.Tensor:
    """Block mask of the round(density · blocks) largest scores; ties keep the earlier, NaN is largest."""
    order = scores.flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[order[: block_count(density, scores.numel())]] = True
    return mask.reshape(scores.shape)


def random_blocks(
    grid: tuple[int, int], density: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Block mask of exactly round(density · blocks) blocks; every such set is equally likely."""
    blocks = grid[0] * grid[1]
    device = generator.device if generator is not None else torch.device("cpu")
    order = torch.randperm(blocks, generator=generator, device=device)
    mask = torch.zeros(blocks, dtype=torch.bool, device=device)
    mask[order[: block_count(density, blocks)]] = True
    return mask.reshape(grid)


def aligned_block_mask(
    op: str, mask: torch.Tensor, shape: tuple[int, int], block_shape: tuple[int, int]
) -> torch.Tensor:
    """Checks a mask (bool, or numbers 0 and 1), element-wise (N, K) or block-wise; returns it block-wise."""
    check_tensor(op, "mask", mask)
    grid = grid_of(shape, block_shape)
    if tuple(mask.shape) not in (tuple(shape), grid):
        fail(op, f"mask must be of shape {tuple(shape)} or, block-wise, {grid}", tuple(mask.shape))
    if mask.dtype != torch.bool:
        other = (mask != 0) & (mask != 1)
        if bool(other.any()):
            at = first_position(other)
            fail(op, "mask must hold only 0 and 1", f"mask[{at[0]}, {at[1]}]={mask[at].item()}")
        mask = mask != 0
    if tuple(mask.shape) == grid:
        return mask
    # Inside the matrix a block must be all or nothing; its padding counts as neither.
    kept = (
        to_blocks(mask.to(torch.uint8), block_shape).amax(dim=(2, 3))
        if mask.numel()
        else mask.new_zeros(grid)
    )
    kept = kept.bool()
    torn = expand_mask(kept, shape, block_shape) & ~mask
    if bool(torn.any()):
        row, col = first_position(torn)
        block = (row // block_shape[0], col // block_shape[1])
        fail(
            op,
            f"mask must be constant inside each {block_shape[0]}x{block_shape[1]} block",
            f"mask[{row}, {col}]=0 in block {block}, which also has ones",
        )
    return kept


def nonzero_blocks(dense: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """Which blocks of a dense (N, K) matrix are not all zeros: (block rows, block columns), bool."""
    return (to_blocks(dense, block_shape) != 0).flatten(2).any(2)


def choose_blocks(
    op: str,
    dense: torch.Tensor,
    block_shape: tuple[int, int],
    mask: torch.Tensor | None,
    density: float | str | None,
    scores: torch.Tensor | None,
) -> torch.Tensor:
    """The block mask that `from_dense` asks for: a mask, or a density ranked by L2 norm or by scores.

    "nonzero" as a density keeps every block that is not all zeros.

    Without any of the three, every block is kept. `scores` rank the blocks that `density` keeps, so
    they come with a density; a mask says everything by itself and takes neither.
    """
    shape = (dense.shape[0], dense.shape[1])
    given = [n for n, v in (("mask", mask), ("density", density), ("scores", scores)) if v is not None]
    if mask is not None and len(given) > 1:
        fail(op, "mask excludes density and scores", " and ".join(given))
    if scores is not None and density is None:
        fail(op, "scores rank the blocks that density keeps and need a density", "scores alone")
    if mask is not None:
        return aligned_block_mask(op, mask, shape, block_shape).to(dense.device)
    grid = grid_of(shape, block_shape)
    if density is None:
        return torch.ones(grid, dtype=torch.bool, device=dense.device)
    if density == NONZERO:
        if scores is not None:
            fail(op, "scores rank what a number of blocks keeps", f"scores and density {NONZERO!r}")
        return nonzero_blocks(dense, block_shape)
    density = check_density(op, density)
    if scores is None:
        return top_blocks(block_norms(dense, block_shape), density)
    check_tensor(op, "scores", scores)
    if tuple(scores.shape) not in (shape, grid):
        fail(op, f"scores must be of shape {shape} or, block-wise, {grid}", tuple(scores.shape))
    if scores.is_complex():
        fail(op, "scores must be real", scores.dtype, TypeError)
    if bool(scores.isnan().any()):
        at = first_position(scores.isnan())
        fail(op, "scores must not be NaN", f"scores[{at[0]}, {at[1]}]=nan")
    scores = scores.detach().double().to(dense.device)
    if tuple(scores.shape) != grid:
        scores = to_blocks(scores, block_shape).sum(dim=(2, 3))
    return top_blocks(scores, density)


def pattern_of(block_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """crow_indices and col_indices (int32) of a bool mask of (block rows, block columns)."""
    counts = block_mask.sum(dim=1)
    crow = torch.zeros(block_mask.shape[0] + 1, dtype=torch.int32, device=block_mask.device)
    crow[1:] = counts.cumsum(0)
    return crow, block_mask.nonzero()[:, 1].to(torch.int32)
