"""CsrWeight: single weights in compressed rows, and CsrSpec, "csr@0.1". Runs on the 1×1 block kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from . import foreign
from .checks import DTYPE_NAMES, check_devices, check_tensor, fail
from .pattern import BsrPattern
from .pattern_weight import PatternWeight
from .sparse_weight import KEPT, Spec, check_metadata, kept_text, read_kept, register_format
from .values import choose_from_dense

_BLOCK = (1, 1)


class CsrWeight(PatternWeight):
    """A weight W of shape (N, K) = (out_features, in_features), of which single elements are stored.

    Args:
        values: (nnz,), float64, float32, bfloat16, float16, or int8 (frozen), by row and in it by column.
            A Parameter is used as it is; another tensor becomes one, with the same memory.
        crow_indices: (N + 1,) int32 or int64: row i is elements crow[i] … crow[i+1].
        col_indices: (nnz,) int32 or int64: columns, sorted and distinct in each row.
        shape: (N, K).
        x_dtype: the dtype of x and of the result, if not that of the values.

    The arrays are those of scipy.sparse.csr_array and torch.sparse_csr_tensor. Everything else is as for
    BsrWeight, whose 1×1 blocks hold the same numbers in three dimensions.

    Raises:
        ValueError: a pattern or a shape that is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """

    format = "csr"

    def __init__(
        self,
        values: torch.Tensor,
        crow_indices: torch.Tensor,
        col_indices: torch.Tensor,
        *,
        shape: tuple[int, int],
        x_dtype: torch.dtype | None = None,
    ) -> None:
        op = "CsrWeight"
        check_tensor(op, "values", values)
        check_devices(op, values, crow_indices=crow_indices, col_indices=col_indices)
        pattern = BsrPattern(crow_indices, col_indices, shape=shape, block_shape=_BLOCK, op=op)
        self._check_values(op, values, pattern)
        self._init(values, pattern, x_dtype)

    @staticmethod
    def values_shape(pattern: BsrPattern) -> tuple[int, ...]:
        """(nnz,)."""
        return (pattern.nnzb,)

    @staticmethod
    def blocks(values: torch.Tensor) -> torch.Tensor:
        """The values as 1×1 blocks, a view."""
        return values.view(-1, 1, 1)

    @property
    def nnz(self) -> int:
        """How many elements are stored."""
        return self.nnzb

    # -- construction and other libraries -------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        dense: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        density: float | None = None,
        scores: torch.Tensor | None = None,
    ) -> CsrWeight:
        """Stores the chosen elements of a dense (N, K) tensor, bit for bit.

        Args:
            dense: (N, K), of a dtype that weights can have.
            mask: which elements to keep, (N, K), bool or 0/1.
            density: keep the round(density · N · K) elements of largest magnitude; ties keep the earlier.
                "nonzero": every element that is not zero.
            scores: with `density`, keep those of largest score instead, (N, K).

        Without any of them every element is kept, zeros too.
        """
        op = "CsrWeight.from_dense"
        values, pattern = choose_from_dense(op, dense, _BLOCK, mask, density, scores)
        weight = cls.__new__(cls)
        weight._init(values.reshape(-1), pattern)
        return weight

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> CsrWeight:
        """Takes a copy of a torch.sparse_csr matrix, (N, K)."""
        arrays = foreign.from_torch("CsrWeight.from_torch", tensor, (torch.sparse_csr,))
        return cls(*arrays, shape=tuple(tensor.shape))

    @classmethod
    def from_scipy(cls, matrix: Any) -> CsrWeight:
        """Takes a copy of a scipy.sparse CSR matrix or array, (N, K); duplicates are summed, as in scipy."""
        op = "CsrWeight.from_scipy"
        foreign.check_scipy(op, matrix, ("csr",))
        return cls(*foreign.from_scipy(op, matrix), shape=tuple(int(size) for size in matrix.shape))

    def to_torch(self) -> torch.Tensor:
        """A torch.sparse_csr tensor with copies of values and indices."""
        arrays = (*self.pattern.indices(), self.values.detach())
        return torch.sparse_csr_tensor(
            *(a.clone() for a in arrays), size=self.shape, device=self.device, check_invariants=True
        )

    def to_scipy(self) -> Any:
        """A scipy.sparse.csr_array with copies of values and indices; float64, float32 and int8 only."""
        arrays = foreign.scipy_arrays("CsrWeight.to_scipy", self.values, self.pattern)
        from scipy.sparse import csr_array

        return csr_array(arrays, shape=tuple(self.shape))

    # -- files ----------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """shape, nnz and dtype, and x_dtype where it differs."""
        entry = {"shape": list(self.shape), "nnz": self.nnz, "dtype": DTYPE_NAMES[self.dtype]}
        return entry | ({"x_dtype": DTYPE_NAMES[self.x_dtype]} if self.x_dtype is not None else {})

    @classmethod
    def from_pieces(cls, pieces: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> CsrWeight:
        """The weight of a file's tensors; see SparseWeight."""
        op = "CsrWeight"
        entry = check_metadata(op, metadata, "shape", "nnz", "dtype")
        nnz, dtype = entry.pop("nnz"), entry.pop("dtype")
        weight = cls(**pieces, **entry)
        if (weight.nnz, weight.dtype) != (nnz, dtype):
            got = f"{weight.nnz} elements of {DTYPE_NAMES[weight.dtype]}"
            fail(op, f"there must be {nnz} elements of {DTYPE_NAMES[dtype]}, as the metadata says", got)
        return weight

    @classmethod
    def infer(cls, pieces: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, Any] | None:
        """Metadata of values with 1 dimension beside indices."""
        values = pieces.get("values")
        if values is None or len(pieces) == 1 or values.ndim != 1 or values.dtype not in DTYPE_NAMES:
            return None
        return {"shape": list(shape), "nnz": len(values), "dtype": DTYPE_NAMES[values.dtype]}

    # -- text -----------------------------------------------------------------------------------

    def spec_format(self) -> str:
        """Always "csr"."""
        return "csr"

    def extra_repr(self) -> str:
        """Shape, density and dtype."""
        return (
            f"shape=({self.shape[0]}, {self.shape[1]}), density={self.density:.4g}, nnz={self.nnz}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}"
        )


@dataclass(frozen=True)
class CsrSpec(Spec):
    """What a layer becomes: the `density` of single elements that matter most, values in `dtype`."""

    density: float | str

    pattern: ClassVar = re.compile(rf"csr@{KEPT}")
    example: ClassVar = '"csr@0.1" (csr@DENSITY)'
    keys: ClassVar = ("density",)

    @classmethod
    def from_match(cls, op: str, match: re.Match[str], dtype: torch.dtype | None) -> CsrSpec:
        """Reads "csr@0.1"."""
        return cls(read_kept(op, match[1]), dtype=dtype)

    @classmethod
    def from_keys(cls, op: str, dtype: torch.dtype | None, density: Any) -> CsrSpec:
        """Reads {"density": 0.1}."""
        return cls(read_kept(op, density), dtype=dtype)

    def __str__(self) -> str:  # noqa: D105
        return f"csr@{kept_text(self.density)}{self.suffix}"

    @property
    def format(self) -> str:
        """Always "csr"."""
        return "csr"

    def make(
        self, dense: torch.Tensor, *, mask: torch.Tensor | None = None, scores: torch.Tensor | None = None
    ) -> CsrWeight:
        """CsrWeight.from_dense, then values in `dtype`."""
        density = self.density if mask is None else None
        return CsrWeight.from_dense(dense, mask=mask, density=density, scores=scores).stored_as(self.dtype)


register_format(CsrWeight, CsrSpec)
