"""BsrWeight: a block-sparse weight, and BlockSpec, how a layer's weight is asked to become one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from . import foreign
from .checks import (
    DTYPE_NAMES,
    check_block_fits,
    check_block_shape,
    check_devices,
    check_tensor,
    fail,
)
from .pattern import BsrPattern
from .pattern_weight import PatternWeight
from .sparse_weight import check_metadata, register_format
from .spec import KEPT, Spec, kept_text, read_kept, why_no_block
from .values import choose_from_dense


class BsrWeight(PatternWeight):
    """A weight W of shape (N, K) = (out_features, in_features), stored as blocks of R × C.

    Args:
        values: (nnzb, R, C), float64, float32, bfloat16, float16, or int8 (frozen), row-major inside a
            block. A Parameter is used as it is; another tensor becomes one (trainable if floating),
            with the same memory.
        crow_indices: (ceil(N/R) + 1,) int32 or int64: block row i is blocks crow[i] … crow[i+1].
        col_indices: (nnzb,) int32 or int64: block columns, sorted and distinct in each block row.
        shape: (N, K). Sizes that are no multiple of the block are padded with zeros in the last block.
        block_shape: (R, C), at most the shape rounded up to multiples of 256.
        x_dtype: the dtype of x and of the result, if not that of the values.
        rounds_x: let kernels that multiply in bfloat16 round an x in float32, for bfloat16 values.

    `values` is the one Parameter and trains as any other; its padding receives zero gradients, so
    optimizers keep it zero, and what something else writes there is zeroed before it is used or saved.
    `pattern` is the BsrPattern; the int32 buffers `crow_indices` and `col_indices` are copies of it.
    As for any weight of a module, `.to()`, `deepcopy`, `pickle` and `state_dict` work.

    Raises:
        ValueError: a pattern, a shape or a padding that is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """

    format = "bsr"

    def __init__(
        self,
        values: torch.Tensor,
        crow_indices: torch.Tensor,
        col_indices: torch.Tensor,
        *,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
        x_dtype: torch.dtype | None = None,
        rounds_x: bool = False,
    ) -> None:
        op = "BsrWeight"
        check_tensor(op, "values", values)
        check_devices(op, values, crow_indices=crow_indices, col_indices=col_indices)
        pattern = BsrPattern(crow_indices, col_indices, shape=shape, block_shape=block_shape, op=op)
        self._check_values(op, values, pattern)
        if rounds_x and (values.dtype, x_dtype) != (torch.bfloat16, torch.float32):
            got = f"{values.dtype} and {x_dtype}"
            fail(op, "rounds_x must go with values in bfloat16 and an x_dtype of float32", got)
        self._init(values, pattern, x_dtype)
        self.rounds_x = rounds_x

    # -- construction ---------------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        dense: torch.Tensor,
        *,
        block_shape: tuple[int, int],
        mask: torch.Tensor | None = None,
        density: float | str | None = None,
        scores: torch.Tensor | None = None,
    ) -> BsrWeight:
        """Stores the chosen blocks of a dense (N, K) tensor, bit for bit.

        Args:
            dense: (N, K), of a dtype that weights can have.
            block_shape: (R, C).
            mask: which elements (N, K) or blocks (ceil(N/R), ceil(K/C)) to keep, bool or 0/1;
                element-wise it must be constant inside each block.
            density: keep the round(density · blocks) blocks of largest L2 norm; ties keep the earlier.
                "nonzero": every block that is not all zeros.
            scores: with `density`, keep those of largest score instead; (N, K), which is summed over
                each block, or block-wise.

        Without any of them every block is kept. Raises as the constructor does; also for a mask
        together with density or scores, and for scores without a density.
        """
        op = "BsrWeight.from_dense"
        block_shape = check_block_shape(op, block_shape)
        weight = cls.__new__(cls)
        weight._init(*choose_from_dense(op, dense, block_shape, mask, density, scores))
        return weight

    @classmethod
    def from_torch(cls, tensor: torch.Tensor, *, shape: tuple[int, int] | None = None) -> BsrWeight:
        """Takes a copy of a torch.sparse_bsr or (as 1×1 blocks) torch.sparse_csr matrix.

        Args:
            tensor: (N, K), without batch or dense dimensions.
            shape: the true (N, K) where `tensor` is padded to multiples of its block; default: its own.
        """
        arrays = foreign.from_torch("BsrWeight.from_torch", tensor, (torch.sparse_bsr, torch.sparse_csr))
        return cls._from_foreign("BsrWeight.from_torch", arrays, tuple(tensor.shape), shape)

    @classmethod
    def from_scipy(
        cls, matrix: Any, *, block_shape: tuple[int, int] | None = None, shape: tuple[int, int] | None = None
    ) -> BsrWeight:
        """Takes a copy of a scipy.sparse BSR or CSR matrix or array; duplicates are summed, as in scipy.

        Args:
            matrix: (N, K), of a dtype that weights can have.
            block_shape: cut a CSR matrix into these blocks (default 1×1); a BSR matrix has its own.
            shape: the true (N, K) where a BSR matrix is padded to multiples of its block.
        """
        op = "BsrWeight.from_scipy"
        kind = foreign.check_scipy(op, matrix, ("bsr", "csr"))
        if kind == "csr":
            block_shape = check_block_shape(op, block_shape if block_shape is not None else (1, 1))
            if shape is not None:
                fail(op, "shape goes with a BSR matrix; a CSR matrix has its own", shape)
            shape = tuple(int(size) for size in matrix.shape)
            check_block_fits(op, shape, block_shape)
            matrix = foreign.cut_into_blocks(matrix, block_shape)
        elif block_shape is not None and tuple(block_shape) != matrix.blocksize:
            fail(op, f"block_shape must be that of the matrix, {matrix.blocksize}", tuple(block_shape))
        return cls._from_foreign(op, foreign.from_scipy(op, matrix), matrix.shape, shape)

    @classmethod
    def _from_foreign(
        cls, op: str, arrays: tuple[torch.Tensor, ...], padded: tuple[int, int], shape: Any
    ) -> BsrWeight:
        values, crow, col = arrays
        if values.ndim == 1:
            values = values.reshape(-1, 1, 1)
        block_shape = tuple(values.shape[1:])
        shape = foreign.unpadded(op, shape, padded, block_shape)
        return cls(values, crow, col, shape=shape, block_shape=block_shape)

    def to_torch(self, *, pad: bool = False) -> torch.Tensor:
        """A torch.sparse_bsr tensor with copies of values and indices.

        torch needs sizes that are multiples of the block; with `pad=True` others are rounded up.
        """
        shape = foreign.padded_shape("BsrWeight.to_torch", self.shape, self.block_shape, pad)
        arrays = (*self.pattern.indices(), self.values.detach())
        return torch.sparse_bsr_tensor(
            *(a.clone() for a in arrays), size=shape, device=self.device, check_invariants=True
        )

    def to_scipy(self, *, pad: bool = False) -> Any:
        """A scipy.sparse.bsr_array with copies of values and indices; float64, float32 and int8 only.

        scipy needs sizes that are multiples of the block; with `pad=True` others are rounded up.
        """
        op = "BsrWeight.to_scipy"
        arrays = foreign.scipy_arrays(op, self.values, self.pattern)
        from scipy.sparse import bsr_array

        shape = foreign.padded_shape(op, self.shape, self.block_shape, pad)
        return bsr_array(arrays, shape=shape, blocksize=self.block_shape)

    # -- files ----------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """shape, block_shape, nnzb and dtype; x_dtype where it differs, activations if x may be rounded."""
        entry = {
            "shape": list(self.shape),
            "block_shape": list(self.block_shape),
            "nnzb": self.nnzb,
            "dtype": DTYPE_NAMES[self.dtype],
        }
        entry |= {"x_dtype": DTYPE_NAMES[self.x_dtype]} if self.x_dtype is not None else {}
        return entry | ({"activations": "bf16"} if self.rounds_x else {})

    @classmethod
    def from_pieces(cls, pieces: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> BsrWeight:
        """The weight of a file's tensors; see SparseWeight."""
        op = "BsrWeight"
        entry = dict(metadata) if isinstance(metadata, Mapping) else metadata
        activations = entry.pop("activations", None) if isinstance(entry, dict) else None
        if activations not in (None, "bf16"):
            fail(op, "activations in the metadata must be bf16", repr(activations))
        entry = check_metadata(op, entry, "shape", "block_shape", "nnzb", "dtype")
        nnzb, dtype = entry.pop("nnzb"), entry.pop("dtype")
        weight = cls(**pieces, **entry, rounds_x=activations is not None)
        if (weight.nnzb, weight.dtype) != (nnzb, dtype):
            got = f"{weight.nnzb} blocks of {DTYPE_NAMES[weight.dtype]}"
            fail(op, f"there must be {nnzb} blocks of {DTYPE_NAMES[dtype]}, as the metadata says", got)
        return weight

    @classmethod
    def infer(cls, pieces: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, Any] | None:
        """Metadata of values with 3 dimensions."""
        values = pieces.get("values")
        if values is None or values.ndim != 3 or values.dtype not in DTYPE_NAMES:
            return None
        nnzb, *block_shape = values.shape
        return {
            "shape": list(shape), "block_shape": block_shape, "nnzb": nnzb, "dtype": DTYPE_NAMES[values.dtype]
        }  # fmt: skip

    # -- text -----------------------------------------------------------------------------------

    def spec_format(self) -> str:
        """Such as "block:16x16"."""
        return f"block:{self.block_shape[0]}x{self.block_shape[1]}"

    def options_repr(self) -> str:
        """The arguments of BlockSparseLinear."""
        r, c = self.block_shape
        rounds = ", rounds_x=True" if self.rounds_x else ""
        return f"density={self.density:.4g}, block_shape=({r}, {c}){rounds}"

    def extra_repr(self) -> str:
        """Shapes, density and dtype."""
        n, k = self.shape
        r, c = self.block_shape
        return (
            f"shape=({n}, {k}), block_shape=({r}, {c}), density={self.density:.4g}, "
            f"nnzb={self.nnzb}, dtype={str(self.dtype).removeprefix('torch.')}"
        )


@dataclass(frozen=True)
class BlockSpec(Spec):
    """What a layer becomes: blocks of `block_shape` at `density`, values in `dtype` (None: the layer's).

    Numbers are checked where the text or mapping is read and where a weight is made: ValueError for a density
    outside [0, 1] (or "nonzero") and a block dimension below 1. With `rounds_x` see Spec.
    """

    block_shape: tuple[int, int]
    density: float | str

    pattern: ClassVar = re.compile(rf"block:([0-9]+)x([0-9]+)@{KEPT}")
    example: ClassVar = '"block:16x16@0.5" (block:ROWSxCOLUMNS@DENSITY)'
    keys: ClassVar = ("block_shape", "density")
    may_round: ClassVar = True

    @classmethod
    def from_match(cls, op: str, match: re.Match[str], dtype: torch.dtype | None) -> BlockSpec:
        """Reads "block:16x16@0.5"."""
        density = read_kept(op, match[3])
        return cls(check_block_shape(op, (int(match[1]), int(match[2]))), density, dtype=dtype)

    @classmethod
    def from_keys(cls, op: str, dtype: torch.dtype | None, block_shape: Any, density: Any) -> BlockSpec:
        """Reads {"block_shape": (16, 16), "density": 0.5}."""
        return cls(check_block_shape(op, block_shape), read_kept(op, density), dtype=dtype)

    def __str__(self) -> str:  # noqa: D105
        return f"{self.format}@{kept_text(self.density)}{self.suffix}"

    @property
    def format(self) -> str:
        """The format without density and dtype: "block:16x16"."""
        return f"block:{self.block_shape[0]}x{self.block_shape[1]}"

    def why_not(self, shape: tuple[int, int]) -> str | None:
        """A block must not be larger than the matrix."""
        return why_no_block(shape, self.block_shape)

    def make(
        self, dense: torch.Tensor, *, mask: torch.Tensor | None = None, scores: torch.Tensor | None = None
    ) -> BsrWeight:
        """BsrWeight.from_dense, then values in `dtype`."""
        density = self.density if mask is None else None
        return BsrWeight.from_dense(
            dense, block_shape=self.block_shape, mask=mask, density=density, scores=scores
        ).stored_as(self.dtype, rounds_x=self.rounds_x)


register_format(BsrWeight, BlockSpec)
