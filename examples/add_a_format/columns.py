"""A weight format of its own, whole columns of W: what docs/add_a_format.md explains.

A layer that ignores inputs needs no block index: W is a dense (N, kept) matrix, and the list of the columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rarefy import SparseWeight, Spec, register_format
from rarefy.activations import activate
from rarefy.checks import DTYPE_NAMES, check_density, check_tensor, fail
from rarefy.sparse_weight import check_metadata
from rarefy.spec import NUMBER, read_density


class ColumnsWeight(SparseWeight):
    """W of shape (N, K), of which `values`, (N, kept), are the columns `column_indices`, int64, ascending."""

    format = "columns"
    pieces = ("values", "column_indices")
    reserved = ("column_indices",)

    def __init__(
        self,
        values: torch.Tensor,
        column_indices: torch.Tensor,
        *,
        shape: tuple[int, int],
        x_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "ColumnsWeight"
        check_tensor(op, "values", values)
        check_tensor(op, "column_indices", column_indices)
        if tuple(values.shape) != (shape[0], len(column_indices)):
            fail(op, f"values must be of shape ({shape[0]}, {len(column_indices)})", tuple(values.shape))
        inside = ((column_indices >= 0) & (column_indices < shape[1])).all()
        if not inside or not (column_indices.diff() > 0).all():
            fail(op, f"column_indices must ascend in [0, {shape[1]})", column_indices.tolist())
        self.shape, self.x_dtype = torch.Size(shape), x_dtype
        self.values = values if isinstance(values, nn.Parameter) else nn.Parameter(values)
        self.register_buffer("column_indices", column_indices)

    # What it computes ------------------------------------------------------------------------------

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        values = self.values if self.x_dtype is None else self.values.to(self.x_dtype)
        y = nn.functional.linear(x[..., self.column_indices], values, bias)
        return y if activation is None else activate(y, activation)

    def to_dense(self) -> torch.Tensor:
        zeros = self.values.new_zeros(tuple(self.shape))
        return zeros.index_copy(1, self.column_indices, self.values)

    @property
    def density(self) -> float:
        return len(self.column_indices) / self.shape[1] if self.shape[1] else 0.0

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        bound = max(len(self.column_indices), 1) ** -0.5
        self.values.uniform_(-bound, bound, generator=generator)

    # What files and state_dicts say of it ----------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        entry = {"shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype]}
        return entry | ({"x_dtype": DTYPE_NAMES[self.x_dtype]} if self.x_dtype is not None else {})

    @classmethod
    def from_pieces(cls, pieces: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> ColumnsWeight:
        entry = check_metadata("ColumnsWeight", metadata, "shape", "dtype")
        if (dtype := entry.pop("dtype")) != pieces["values"].dtype:
            fail("ColumnsWeight", f"values must be {dtype}, as the metadata says", pieces["values"].dtype)
        return cls(**pieces, **entry)

    @classmethod
    def infer(cls, pieces: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, Any] | None:
        if set(pieces) != set(cls.pieces):
            return None
        return {"shape": list(shape), "dtype": DTYPE_NAMES[pieces["values"].dtype]}

    def spec_format(self) -> str:
        return "columns"


@dataclass(frozen=True)
class ColumnsSpec(Spec):
    """Written "columns@0.25": the quarter of the columns with the largest norm, or largest sum of scores."""

    density: float

    pattern = re.compile(rf"columns@{NUMBER}")
    example = '"columns@0.25"'
    keys = ("column_density",)

    @classmethod
    def from_match(cls, op: str, match: re.Match[str], dtype: torch.dtype | None) -> ColumnsSpec:
        return cls(read_density(op, match[1]), dtype=dtype)

    @classmethod
    def from_keys(cls, op: str, dtype: torch.dtype | None, column_density: Any) -> ColumnsSpec:
        return cls(check_density(op, column_density), dtype=dtype)

    @property
    def format(self) -> str:
        return "columns"

    def __str__(self) -> str:
        return f"columns@{self.density:g}{self.suffix}"

    def make(
        self, dense: torch.Tensor, *, mask: torch.Tensor | None = None, scores: torch.Tensor | None = None
    ) -> ColumnsWeight:
        dense = dense.detach()
        if mask is not None:
            kept = mask.to(dense.device).bool().all(dim=0)
        else:
            rank = dense.double().norm(dim=0) if scores is None else scores.double().sum(dim=0)
            count = round(self.density * dense.shape[1])
            kept = torch.zeros(dense.shape[1], dtype=torch.bool, device=dense.device)
            kept[rank.argsort(descending=True, stable=True)[:count].to(dense.device)] = True
        values = dense[:, kept].to(self.dtype or dense.dtype)
        x_dtype = None if values.dtype == dense.dtype else dense.dtype
        columns = kept.nonzero().flatten()
        return ColumnsWeight(values, columns, shape=tuple(dense.shape), x_dtype=x_dtype)


register_format(ColumnsWeight, ColumnsSpec)
