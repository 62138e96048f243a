"""What weights of single stored elements have in common, CSR and bitmaps: files, text, specs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .checks import DTYPE_NAMES, fail
from .sparse_weight import SparseWeight, check_metadata
from .spec import Spec, kept_text, read_kept


class StoredElements:
    """A base class of such weights, before SparseWeight: `values` are (nnz,), by row and in it by column."""

    nnz: int

    def metadata(self) -> dict[str, Any]:
        """shape, nnz and dtype, and x_dtype where it differs."""
        entry = {"shape": list(self.shape), "nnz": self.nnz, "dtype": DTYPE_NAMES[self.dtype]}
        return entry | ({"x_dtype": DTYPE_NAMES[self.x_dtype]} if self.x_dtype is not None else {})

    @classmethod
    def from_pieces(cls, pieces: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> SparseWeight:
        """The weight of a file's tensors; see SparseWeight."""
        op = cls.__name__
        entry = check_metadata(op, metadata, "shape", "nnz", "dtype")
        nnz, dtype = entry.pop("nnz"), entry.pop("dtype")
        weight = cls(**pieces, **entry)
        if (weight.nnz, weight.dtype) != (nnz, dtype):
            got = f"{weight.nnz} elements of {DTYPE_NAMES[weight.dtype]}"
            fail(op, f"there must be {nnz} elements of {DTYPE_NAMES[dtype]}, as the metadata says", got)
        return weight

    @classmethod
    def infer(cls, pieces: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Any] | None:
        """Metadata of values with 1 dimension beside what says where they are."""
        values = pieces.get("values")
        if values is None or not cls._beside(pieces) or values.ndim != 1 or values.dtype not in DTYPE_NAMES:
            return None
        return {"shape": list(shape), "nnz": len(values), "dtype": DTYPE_NAMES[values.dtype]}

    @classmethod
    def _beside(cls, pieces: Mapping[str, Tensor]) -> bool:
        """Whether something of this format lies beside the values."""
        return any(name in pieces for name in cls.pieces[1:])

    def extra_repr(self) -> str:
        """Shape, density and dtype."""
        return (
            f"shape=({self.shape[0]}, {self.shape[1]}), density={self.density:.4g}, nnz={self.nnz}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}"
        )


@dataclass(frozen=True)
class ElementsSpec(Spec):
    """What a layer becomes: the `density` of single elements that matter most, values in `dtype`."""

    density: float | str

    weight: ClassVar[type]  # whose from_dense makes it

    @classmethod
    def from_match(cls, op: str, match: re.Match[str], dtype: torch.dtype | None) -> ElementsSpec:
        """Reads "csr@0.1", "bitmap@0.5"."""
        return cls(read_kept(op, match[1]), dtype=dtype)

    @classmethod
    def from_keys(cls, op: str, dtype: torch.dtype | None, **keys: Any) -> ElementsSpec:
        """Reads the density of a mapping."""
        return cls(read_kept(op, keys[cls.keys[0]]), dtype=dtype)

    def __str__(self) -> str:  # noqa: D105
        return f"{self.format}@{kept_text(self.density)}{self.suffix}"

    @property
    def format(self) -> str:
        """The weight's."""
        return self.weight.format

    def make(
        self, dense: Tensor, *, mask: Tensor | None = None, scores: Tensor | None = None
    ) -> SparseWeight:
        """The weight's from_dense, then values in `dtype`."""
        density = self.density if mask is None else None
        return self.weight.from_dense(dense, mask=mask, density=density, scores=scores).stored_as(self.dtype)
