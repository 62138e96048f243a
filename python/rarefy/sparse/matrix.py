"""SparseMatrix: a matrix in scipy's arrays, checked once, with the plan that kernels read."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .. import _load, foreign
from .._torch_private import PLAIN, eager, entry, unrecorded
from ..checks import check_shape, fail
from ..derivatives import run_eagerly
from ..derived import Derived, Kept, is_few, reads_itself
from ..op_rules import meets_nothing
from ..pattern import BsrPattern
from ..values import check_padding, dense_of
from .arrays import (
    CHECKS,
    FLOATS,
    INTEGERS,
    as_tensor,
    callers_level,
    check_ascent,
    check_dtype,
    check_index,
    check_ranges,
    is_dense,
    refuse_check,
)
from .order import ascends, gathered, in_order
from .recent import Recent, can_keep

rows_product = entry(_load.op("_rows_product"))


class SparseMatrix:
    """A sparse matrix of shape (N, K) as `scipy.sparse.csr_matrix` and `bsr_matrix` have it.

    Args:
        data: (nnz,) for CSR, or (nnzb, R, C) for BSR; float64, float32, bfloat16, float16, int64, int32,
            int16 or int8; a tensor or a NumPy array, not copied. It may require gradients, which flow through
            every product; values that are written to later are those of the next product.
        indices: (nnz,) or (nnzb,) int32 or int64: the column, or block column, of each entry.
        indptr: (N + 1,) or (N / R + 1,) int32 or int64: row i is entries indptr[i] … indptr[i + 1].
        shape: (N, K). Sizes that are no multiple of the block are padded in the last block, where `data` must
            be zero.
        check: "once": indices are validated here, and copied. Unsorted ones are sorted, with a warning;
            those that occur twice in a row are summed, as in scipy. "always": the same again before each
            product with indices that were written to since, through NumPy too: they are compared with copies.
            "trusted": sorted and distinct, or an error.

    Whatever `check` says, kernels read the plan's own copy of the indices and stay within the matrix.

    Raises:
        ValueError: an index, a size or a shape is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """

    data: Tensor
    indices: Tensor
    indptr: Tensor
    pattern: BsrPattern
    _keeps = True  # what kernels derive of it, for the products to come
    _recent: Recent | None = (
        None  # whose arrays are this matrix's: what it keeps is used, of the pattern alone
    )

    def __init__(
        self,
        data: Any,
        indices: Any,
        indptr: Any,
        *,
        shape: tuple[int, int],
        check: str = "once",
        op: str = "SparseMatrix",
    ) -> None:
        if check not in CHECKS:
            refuse_check(op, check)
        self.check = check
        self.data = as_tensor(op, "data", data)
        self.indices = as_tensor(op, "indices", indices)
        self.indptr = as_tensor(op, "indptr", indptr)
        check_dtype(op, "data must be of dtype", self.data.dtype)
        if self.data.ndim not in (1, 3):
            fail(
                op,
                "data must have 1 dimension (CSR) or 3 (BSR)",
                f"{self.data.ndim}: {tuple(self.data.shape)}",
            )
        if 0 in self.data.shape[1:]:
            fail(op, "blocks of data must have sides of at least 1", tuple(self.data.shape))
        self.shape = torch.Size(check_shape(op, shape))
        self._op = op
        self._read_indices()

    def _read_indices(self) -> None:
        """Validates the arrays as they are now and makes the pattern of them."""
        op, data, indices, indptr = self._op, self.data, self.indices, self.indptr
        for name, index in (("indices", indices), ("indptr", indptr)):
            check_index(op, name, index, data.device)
        r, c = self.block_shape
        rows, columns = (-(-size // block) for size, block in zip(self.shape, (r, c), strict=True))
        if len(indptr) != rows + 1:
            fail(op, f"indptr must have {rows + 1} elements, one more than rows of blocks", len(indptr))
        if len(indices) != len(data):
            fail(op, f"indices must have {len(data)} elements, as many as data", len(indices))
        self._slot = self._order = self._recent = None
        sizes = {"shape": tuple(self.shape), "block_shape": (r, c)}
        pattern = self._by_rows(indptr, indices, sizes)
        if pattern is None and self.check == "trusted":
            pattern = self._trusted(columns, sizes)
        elif pattern is None:
            check_ranges(op, indices, indptr, columns)
            if not ascends(indices, indptr):
                indptr, indices = self._sort(columns)
                pattern = self._by_rows(indptr, indices, sizes)
            pattern = BsrPattern(indptr, indices, **sizes, op=op) if pattern is None else pattern
        self.pattern = pattern
        if self.pattern.is_padded and self.check != "trusted":
            check_padding(op, self.blocks().detach(), self.pattern)
        self._remember()
        self._forget()

    def _by_rows(
        self, indptr: Tensor, indices: Tensor, sizes: dict[str, tuple[int, int]]
    ) -> BsrPattern | None:
        """The pattern of valid indices that ascend, on the CPU; None of others."""
        return BsrPattern.by_rows(indptr, indices, **sizes) if self.data.device.type == "cpu" else None

    def _trusted(self, columns: int, sizes: dict[str, tuple[int, int]]) -> BsrPattern:
        """The pattern of indices that ascend; what is wrong with others is said by scipy's names."""
        op, indices, indptr = self._op, self.indices, self.indptr
        try:
            return BsrPattern(indptr, indices, **sizes, op=op)
        except ValueError as error:
            refused = error
        check_ranges(op, indices, indptr, columns)
        check_ascent(op, indices, indptr)
        raise refused  # of sizes

    def _remember(self) -> None:
        """Keeps what the indices are, for `check` "always"."""
        self._read = None
        if self.check == "always":
            self._read = self.indices.clone(), self.indptr.clone()

    def _is_as_read(self) -> bool:
        """Whether nobody wrote to the indices; NumPy does so without torch's counters."""
        if self._read is None or torch.compiler.is_compiling():  # a graph compares nothing
            return True
        return torch.equal(self.indptr, self._read[1]) and torch.equal(self.indices, self._read[0])

    def _sort(self, columns: int) -> tuple[Tensor, Tensor]:
        """Indptr and indices that ascend; says so, unless some are repeated."""
        indptr, indices, self._order, self._slot = in_order(self.indices, self.indptr, columns)
        if self._order is not None:
            if self._op.startswith("SparseMatrix"):
                how = "sorted once"
            elif can_keep(self.data, self.indices, self.indptr):
                how = "sorted once, as long as they stay as they are"
            else:
                how = "sorted in this call, once by SparseMatrix.of"
            warnings.warn(
                f"[{self._op}] indices are not sorted in each row: {how}", stacklevel=callers_level()
            )
        return indptr, indices

    @property
    def _moves(self) -> bool:
        """Whether values are data in another order, or sums of them."""
        return self._order is not None or self._slot is not None

    @classmethod
    def of(cls, value: Any, *, check: str = "once") -> SparseMatrix:
        """A matrix of another library, or a layer's weight, checked and planned once for many products.

        `value` is what `sparse_dense` takes as its weight: a matrix of scipy.sparse or torch in any format,
        a SparseWeight of blocks or CSR, a SparseMatrix. CSR and BSR share their arrays with it.
        """
        from .kinds import as_matrix

        matrix = as_matrix("SparseMatrix.of", "value", value, check=check)
        matrix._keeps = True
        matrix._remember()
        return matrix

    @classmethod
    def on_pattern(cls, data: Tensor, pattern: BsrPattern) -> SparseMatrix:
        """Values, (nnzb, R, C), or (nnz,) for a pattern of single elements, on a pattern that is shared."""
        matrix = cls.__new__(cls)
        matrix.data, matrix.pattern, matrix.shape = data, pattern, pattern.shape
        matrix.indptr, matrix.indices = pattern.indices()
        matrix.check, matrix._op, matrix._slot, matrix._order = "once", "SparseMatrix", None, None
        matrix._forget()
        return matrix

    @classmethod
    def of_recent(
        cls, arrays: tuple[Tensor, Tensor, Tensor], recent: Recent, check: str, op: str
    ) -> SparseMatrix | None:
        """Values on a pattern whose arrays came again; None if those are for the constructor to refuse."""
        data, indices, indptr = arrays
        if data.dtype not in FLOATS + INTEGERS or data.device.type != "cpu" or check not in CHECKS:
            return None
        matrix = cls.on_pattern(data, recent.pattern)
        matrix.indices, matrix.indptr = indices, indptr
        matrix._order, matrix._slot = recent.order, recent.slot
        matrix._recent, matrix.check, matrix._op = recent, check, op
        matrix._read = None  # the next call compares its arrays with the pattern
        if recent.pattern.is_padded and check != "trusted":
            check_padding(op, matrix.blocks().detach(), recent.pattern)
        return matrix

    @classmethod
    def of_blocks(cls, blocks: Tensor, pattern: BsrPattern, *like: SparseMatrix) -> SparseMatrix:
        """The same of values as blocks; CSR if all the matrices that they came of are."""
        csr = all(matrix.format == "csr" for matrix in like)
        return cls.on_pattern(blocks.flatten() if csr else blocks, pattern)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def format(self) -> str:
        """The name that scipy has for it: csr or bsr."""
        return "csr" if self.data.ndim == 1 else "bsr"

    @property
    def block_shape(self) -> tuple[int, int]:
        """(R, C); (1, 1) for CSR."""
        return (1, 1) if self.data.ndim == 1 else (self.data.shape[1], self.data.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        """Of data."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Of all arrays."""
        return self.data.device

    @property
    def nnz(self) -> int:
        """Stored elements, zeros and duplicates too, as in scipy."""
        return self.data.numel()

    @property
    def T(self) -> SparseMatrix:  # noqa: N802
        """The transposed matrix; see sparse_transpose."""
        from .structure import sparse_transpose

        return sparse_transpose(self)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SparseMatrix:
        """This matrix on a device, its data of a dtype; itself if it is so already. Differentiable.

        Otherwise `data` and indices are new: sorted, duplicates summed. TypeError for a dtype of no matrix.
        """
        pattern = self.pattern if device is None else self.pattern.to(device)
        dtype = self.dtype if dtype is None else dtype
        check_dtype("SparseMatrix.to", "dtype must be", dtype)
        if (pattern.device, dtype) == (self.device, self.dtype):
            return self
        values = self.settled().values().to(device=pattern.device, dtype=dtype)
        return SparseMatrix.on_pattern(values, self.pattern.to(pattern.device))

    def settled(self) -> SparseMatrix:
        """This matrix, its indices looked at again if `check` is "always" and they were written to."""
        if self.check == "always" and not self._is_as_read():
            self._read_indices()
        return self

    def values(self) -> Tensor:
        """`data` on the pattern: sorted, duplicates summed, contiguous; differentiable."""
        return gathered(self.data, self.pattern.nnzb, self._order, self._slot).contiguous()

    def blocks(self) -> Tensor:
        """`values()` as (nnzb, R, C)."""
        values = self.values()
        return values.view(-1, 1, 1) if values.ndim == 1 else values

    def _forget(self) -> None:
        """Holds nothing that kernels derive, and no calls."""
        self._kept: dict[Any, Kept] = {}  # by the dtype of x, and ("few" beside it) for a few tokens alone
        # The same, by data that they are for, and these as blocks.
        self._calls: dict[Any, tuple[Tensor, Tensor, tuple | None, Kept]] = {}
        # Data and plan, and how many columns b had whose product was made of them as they lie.
        self._in_place: tuple[Tensor | None, Tensor | None, set[int]] = None, None, set()
        self._in_groups: SparseMatrix | None = None  # the matrix of a convolution in groups; see groups.py

    def _is_few(self, x: Tensor) -> bool:
        """Whether single elements meet a few tokens, for which what kernels derive is another thing."""
        return self.data.ndim == 1 and is_few(x, self.shape[1])

    def derived(self, x: Tensor, blocks: Tensor) -> Derived | tuple[()]:
        """What kernels for x want of this matrix beside values and plan, as a weight holds it."""
        if self._recent is not None:
            return self._recent.derived(x, blocks)
        if not self._keeps or self._moves:
            return ()
        if not x.dtype.is_floating_point or not blocks.is_floating_point():
            return ()
        few = self._is_few(x) and x.device.type == "cpu" and unrecorded(x, blocks)
        name = (x.dtype, "few") if few else x.dtype
        kept = self._kept.get(name)
        if (
            type(x) not in PLAIN or torch.compiler.is_compiling()
        ):  # a graph makes nothing, and sees no versions
            return () if kept is None else kept.unpacked()
        if kept is None:
            stored = blocks.dtype == x.dtype or reads_itself(blocks, x.dtype)
            kept = Kept(self.pattern, blocks.detach(), x.dtype, stored, few=few)
            self._kept[name] = kept
        derived = kept.current(self.data, blocks) if kept.key else ()
        if self.check != "always" and self.data.is_contiguous() and type(self.data) in PLAIN:
            call = None if kept.packed_bytes else (self.pattern.plan_by_rows, *self.shape, *derived)
            self._calls[name] = self.data, blocks.detach(), call, kept
        return derived

    def at_once(self, x: Any, bias: Any) -> Tensor | None:
        """The product of a call that meets nothing and is not recorded, if one like it was here before.

        What the long way takes 3 µs to find, an eighth of a product with one token.
        """
        if type(x) not in PLAIN or torch.compiler.is_compiling():
            return None
        known = self._calls.get((x.dtype, "few") if self._is_few(x) else x.dtype)
        if known is None:
            return None
        data, blocks, call, kept = known
        if (
            data is not self.data
            or data.data_ptr() != blocks.data_ptr()  # data.data = … leaves it the same
            or not meets_nothing(x, data, bias)
            or x.ndim == 0
            or x.shape[-1] != self.shape[1]
            or not (bias is None or (bias.is_contiguous() and bias.numel() == self.shape[0]))
        ):
            return None
        if call is None:
            plan = self.pattern.row_plan if data.ndim == 1 else self.pattern.plan
            call = (plan, *self.shape, *kept.current(data, blocks))
        return run_eagerly(x, blocks, bias, call)

    def in_place(self, b: Tensor) -> Tensor | None:
        """The product of `spmm` if one like it was here before: the op, and half a microsecond."""
        data, plan, columns = self._in_place
        if (
            data is not self.data
            or not eager()
            or b.ndim != 2
            or b.shape[1] not in columns
            or (torch.is_grad_enabled() and (b.requires_grad or data.requires_grad))
        ):
            return None
        return rows_product(b, data, plan)

    def remember_in_place(self, columns: int, plan: Tensor) -> None:
        """Lets products with so many columns come in by `in_place`, if `data` are what the op reads."""
        if self.check == "always" or self._moves or type(self.data) not in PLAIN:
            return
        if self._in_place[0] is not self.data:
            self._in_place = self.data, plan, set()
        if self.data.is_contiguous():
            self._in_place[2].add(columns)

    # -- other kinds ----------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """(N, K), zeros where nothing is stored; differentiable."""
        return dense_of(self.settled().blocks(), self.pattern)

    def to_csr(self) -> SparseMatrix:
        """Every element of the stored blocks, (nnz,), zeros too, but no padding; itself if it is CSR.

        Differentiable; as `tocsr` of scipy. ValueError for 2³¹ elements and more.
        """
        from .blocks import to_csr

        return to_csr(self)

    def to_bsr(self, block_shape: tuple[int, int]) -> SparseMatrix:
        """Every (R, C) block that holds a stored element, zeros elsewhere; itself if it is in such blocks.

        Differentiable; as `tobsr` of scipy, and of sizes that are no multiple of the block, too. ValueError
        or TypeError for what is no block shape of such a matrix, as of BsrPattern.
        """
        from .blocks import to_bsr

        return to_bsr(self, block_shape)

    def to_scipy(self) -> Any:
        """A scipy.sparse.csr_array or bsr_array with copies of the arrays, sorted and without duplicates."""
        from scipy import sparse

        op = "SparseMatrix.to_scipy"
        foreign.padded_shape(op, tuple(self.shape), self.block_shape, False)
        arrays = foreign.scipy_arrays(op, self.settled().values(), self.pattern)
        kind = sparse.csr_array if self.format == "csr" else sparse.bsr_array
        return kind(arrays, shape=tuple(self.shape))

    def __matmul__(self, other: Any) -> Any:
        """`spmm` with a dense matrix, `spmv` with a vector, `sparse_matmul` with a sparse matrix."""
        if type(other) is Tensor:
            y = self.at_once(other, None) if other.ndim == 1 else self.in_place(other)
            if y is not None:
                return y
        from . import products

        if is_dense(other):
            return (products.spmv if other.ndim == 1 else products.spmm)(self, other)
        return products.sparse_matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        """A dense (…, N) times this matrix, (…, K)."""
        from .products import times_matrix

        return times_matrix(other, self)

    def __add__(self, other: Any) -> Any:
        """`sparse_add`."""
        from .structure import sparse_add

        return sparse_add(self, other)

    __radd__ = __add__
    __array_ufunc__ = None  # NumPy's operators leave theirs to these

    def __getitem__(self, key: Any) -> SparseMatrix:
        """`sparse_slice`: rows, or rows and columns, as slices with step 1."""
        from .structure import sparse_slice

        if not isinstance(key, tuple):
            return sparse_slice(self, key)
        if len(key) != 2:
            fail("sparse_slice", "a tuple must have 2 slices, rows and columns", len(key), IndexError)
        return sparse_slice(self, *key)

    def __repr__(self) -> str:  # noqa: D105
        block = "" if self.format == "csr" else f", block_shape={self.block_shape}"
        return (
            f"SparseMatrix({self.format}, shape={tuple(self.shape)}{block}, nnz={self.nnz}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}, device={self.device})"
        )
