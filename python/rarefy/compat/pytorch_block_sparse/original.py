"""state_dicts of pytorch_block_sparse as Rarefy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...checks import fail

# What a state_dict of the original has of a matrix.
ORIGINAL = ("data", "cols_a", "row_start_ends_a", "rows_b", "col_start_ends_b", "blocks")


def from_original(state: Mapping[str, Any], prefix: str, block_shape: tuple[int, int]) -> dict[str, Any]:
    """A state_dict whose tensors of a matrix are Rarefy's: blocks in order, and not transposed."""
    pieces = {name: state[prefix + name] for name in ORIGINAL if prefix + name in state}
    cols, starts = pieces["cols_a"].long(), pieces["row_start_ends_a"]
    if cols.ndim == 1:
        cols = torch.stack([cols, torch.arange(len(cols), device=cols.device)], 1)
    r, c = block_shape
    values = pieces["data"].reshape(-1, c, r).transpose(1, 2)[cols[:, 1]].contiguous()
    rows = torch.arange(len(starts) - 1, device=cols.device).repeat_interleave(starts.diff().long())
    order = (rows * 2**31 + cols[:, 0]).argsort()
    new = {key: value for key, value in state.items() if key not in {prefix + name for name in ORIGINAL}}
    new[prefix + "values"] = values[order]
    new[prefix + "crow_indices"], new[prefix + "col_indices"] = starts.int(), cols[order, 0].int()
    return new


def check_indices(cols: torch.Tensor, row_end: torch.Tensor, grid: tuple[int, int]) -> None:
    """Raises ValueError unless cols, (blocks, 2) int32, and row ends, (rows,) int32, fit a grid."""
    op, (rows, width) = "sanity_check", grid
    if cols.ndim != 2 or cols.dtype != torch.int32 or row_end.ndim != 1 or row_end.dtype != torch.int32:
        fail(op, "cols must be (blocks, 2) int32, row_end (rows,) int32", f"{cols.dtype}, {row_end.dtype}")
    if bool(((cols[:, 0] < 0) | (cols[:, 0] >= width)).any()):
        fail(op, f"columns must be in [0, {width})", f"{int(cols[:, 0].min())} … {int(cols[:, 0].max())}")
    if len(row_end) != rows or bool((row_end.diff() < 0).any()):
        fail(op, f"row_end must have {rows} ends that do not fall", f"{len(row_end)}")
    if rows and int(row_end[-1]) != len(cols):
        fail(op, f"the last row must end at {len(cols)}", int(row_end[-1]))
