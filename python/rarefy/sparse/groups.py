"""Groups of a convolution: channels in equal parts that see one another alone.

A weight that holds what the groups meet, (O, KH · KW · C / groups), and the whole matrix, (O, KH · KW · C),
store the same blocks in the same order: kernels multiply by the whole one, which stores nothing outside of
the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import BsrPattern
from .matrix import SparseMatrix


def why_not_in(groups: int, channels: tuple[int, int], block_shape: tuple[int, int]) -> str | None:
    """Why blocks would reach over the groups of a convolution of channels (O, C), or None."""
    out, into = (size // groups for size in channels)
    if groups == 1 or (out % block_shape[0] == 0 and into % block_shape[1] == 0):
        return None
    return f"block_shape must divide the {out} × {into} channels of a group"


def blocks_inside(shape: tuple[int, int], block_shape: tuple[int, int], groups: int, places: int) -> Tensor:
    """Which blocks of the whole matrix, of a shape, lie inside of a group; blocks reach over none.

    (block rows, block columns) bool; `places` are those of the kernel.
    """
    mine = shape[0], shape[1] // groups
    grid = tuple(-(-size // block) for size, block in zip(mine, block_shape, strict=True))
    full = torch.ones(grid, dtype=torch.bool)
    return BsrPattern.from_mask(full, shape=mine, block_shape=block_shape).in_groups(groups, places).mask()


def whole_matrix(matrix: SparseMatrix, groups: int, places: int) -> SparseMatrix:
    """The whole matrix of one that holds what the groups meet; blocks reach over none.

    On the same data, differentiably; `matrix` keeps it, and so what kernels derive of it.
    """
    if groups == 1:
        return matrix
    pattern, data = matrix.pattern.in_groups(groups, places), matrix.data
    if not matrix._keeps or matrix._moves:
        whole = SparseMatrix.on_pattern(matrix.values(), pattern)
        whole._keeps = False
        return whole
    whole = matrix._in_groups
    if whole is None or whole.data is not data or whole.pattern is not pattern:
        whole = SparseMatrix.on_pattern(data, pattern)
        if not torch.compiler.is_compiling():
            matrix._in_groups = whole
    return whole


def dense_to_whole(weight: Tensor, groups: int) -> Tensor:
    """A dense weight, (O, C / groups, KH, KW), as the whole matrix, zeros outside of the groups."""
    o, into, kh, kw = weight.shape
    if groups == 1:
        return weight.permute(0, 2, 3, 1).reshape(o, kh * kw * into)
    whole = weight.new_zeros((groups, o // groups, kh, kw, groups, into))
    group = torch.arange(groups, device=weight.device)
    parts = weight.reshape(groups, o // groups, into, kh, kw).permute(0, 1, 3, 4, 2)
    whole[group, :, :, :, group] = parts
    return whole.reshape(o, kh * kw * groups * into)


def dense_of_whole(whole: Tensor, groups: int, kernel: tuple[int, int]) -> Tensor:
    """The dense weight, (O, C / groups, KH, KW), of the whole matrix."""
    (o, columns), (kh, kw) = whole.shape, kernel
    into = columns // (kh * kw * groups)
    parts = whole.reshape(groups, o // groups, kh, kw, groups, into)
    group = torch.arange(groups, device=whole.device)
    return parts[group, :, :, :, group].permute(0, 1, 4, 2, 3).reshape(o, into, kh, kw)
