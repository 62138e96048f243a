"""CsrWeight: single weights in compressed rows, and CsrSpec, "csr@0.1". Runs on the 1×1 block kernels."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch

from . import foreign
from .checks import check_devices, check_tensor
from .elements import ElementsSpec, StoredElements
from .pattern import BsrPattern
from .pattern_weight import PatternWeight
from .sparse_weight import register_format
from .spec import KEPT
from .values import choose_from_dense

_BLOCK = (1, 1)


class CsrWeight(StoredElements, PatternWeight):
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

    # -- text -----------------------------------------------------------------------------------

    def spec_format(self) -> str:
        """Always "csr"."""
        return "csr"


class CsrSpec(ElementsSpec):
    """What a layer becomes: the `density` of single elements that matter most, values in `dtype`.

    ValueError for a density outside [0, 1] (or "nonzero"), where it is read and where a weight is made.
    """

    weight: ClassVar = CsrWeight
    pattern: ClassVar = re.compile(rf"csr@{KEPT}")
    example: ClassVar = '"csr@0.1" (csr@DENSITY)'
    keys: ClassVar = ("density",)


register_format(CsrWeight, CsrSpec)
