"""BsrWeight: the container of a block-sparse weight, which owns values, pattern and plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .checks import check_block_shape, check_dtype, check_pair, check_tensor, fail, first_position
from .masks import choose_blocks, from_blocks, grid_of, pattern_of, random_blocks, to_blocks
from .ops import bsr_linear, bsr_plan

_INT32 = torch.iinfo(torch.int32)
_INDICES = ("crow_indices", "col_indices", "plan")


def _index(op: str, name: str, value: Any) -> torch.Tensor:
    """A copy of an index tensor as contiguous int32; int64 is accepted when it fits."""
    check_tensor(op, name, value)
    if value.dtype not in (torch.int32, torch.int64):
        fail(op, f"{name} must be int32 or int64", str(value.dtype).removeprefix("torch."), TypeError)
    if value.ndim != 1:
        fail(op, f"{name} must have 1 dimension", f"{value.ndim}: {tuple(value.shape)}")
    if value.dtype == torch.int64 and not value.is_meta:
        wide = (value > _INT32.max) | (value < _INT32.min)
        if bool(wide.any()):
            (at,) = first_position(wide)
            fail(op, f"{name} must fit in int32", f"{name}[{at}]={value[at].item()}")
    return value.detach().to(torch.int32, copy=True, memory_format=torch.contiguous_format)


def make_plan(
    op: str, crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], block_shape: tuple[int, int]
) -> torch.Tensor:
    """Validates a pattern and returns its plan on the pattern's device. Errors carry the caller's `op`."""
    try:
        return bsr_plan(crow, col, *shape, *block_shape)
    except ValueError as error:
        raise ValueError(str(error).replace("[bsr_plan]", f"[{op}]", 1)) from None


def check_padding(
    op: str, values: torch.Tensor, crow: torch.Tensor, col: torch.Tensor, shape: tuple[int, int]
) -> None:
    """Raises ValueError where a stored block has something else than zero outside the matrix."""
    if values.is_meta:
        return
    _, r, c = values.shape
    rows, cols = shape
    for axis, inside in ((1, rows % r), (2, cols % c)):
        if not inside:
            continue
        if axis == 1:
            edge = torch.arange(int(crow[-2]), int(crow[-1]), device=values.device)
        else:
            edge = (col == cols // c).nonzero().flatten()
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


def _grid_shape(shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    grid = grid_of(shape, block_shape)
    return grid[0] * block_shape[0], grid[1] * block_shape[1]


class BsrWeight(nn.Module):
    """A weight W of shape (N, K) = (out_features, in_features), stored as blocks of R × C.

    Args:
        values: (nnzb, R, C), float64, float32, bfloat16, float16, or int8 (frozen), row-major inside a
            block. A Parameter is used as it is; another tensor becomes one (trainable if floating),
            with the same memory.
        crow_indices: (ceil(N/R) + 1,) int32 or int64: block row i is blocks crow[i] … crow[i+1].
        col_indices: (nnzb,) int32 or int64: block columns, sorted and distinct in each block row.
        shape: (N, K). Sizes that are no multiple of the block are padded with zeros in the last block.
        block_shape: (R, C).

    `values` is the one Parameter and trains as any other; its padding receives zero gradients, so
    optimizers keep it zero. `crow_indices` and `col_indices` are int32 buffers and never change in
    place; `plan` is what kernels derive from them, a buffer that is not saved. As for any weight of
    a module, `.to()`, `deepcopy`, `pickle` and `state_dict` work.

    Raises:
        ValueError: a pattern, a shape or a padding that is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """

    values: nn.Parameter
    crow_indices: torch.Tensor
    col_indices: torch.Tensor
    plan: torch.Tensor

    def __init__(
        self,
        values: torch.Tensor,
        crow_indices: torch.Tensor,
        col_indices: torch.Tensor,
        *,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> None:
        super().__init__()
        op = "BsrWeight"
        n, k = check_pair(op, "shape", shape, 0)
        block_shape = check_block_shape(op, block_shape)
        check_tensor(op, "values", values)
        check_dtype(op, "values", values.dtype)
        crow = _index(op, "crow_indices", crow_indices)
        col = _index(op, "col_indices", col_indices)
        for name, index in (("crow_indices", crow), ("col_indices", col)):
            if index.device != values.device:
                fail(op, f"{name} must be on the device of values, {values.device}", index.device, TypeError)
        plan = make_plan(op, crow, col, (n, k), block_shape)
        expected = (len(col), *block_shape)
        if tuple(values.shape) != expected:
            fail(op, f"values must be of shape {expected}", tuple(values.shape))
        if not values.is_contiguous():
            fail(op, "values must be contiguous", f"strides {values.stride()}")
        check_padding(op, values, crow, col, (n, k))

        self.shape = torch.Size((n, k))
        self.block_shape = block_shape
        # A pattern on the meta device holds nothing yet: the first one that is loaded is taken over.
        self._pattern_known = not crow.is_meta
        if not isinstance(values, nn.Parameter):
            values = nn.Parameter(values.detach(), requires_grad=values.dtype.is_floating_point)
        self.values = values
        self.register_buffer("crow_indices", crow)
        self.register_buffer("col_indices", col)
        self.register_buffer("plan", plan, persistent=False)

    # -- construction ---------------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        dense: torch.Tensor,
        *,
        block_shape: tuple[int, int],
        mask: torch.Tensor | None = None,
        density: float | None = None,
        scores: torch.Tensor | None = None,
    ) -> BsrWeight:
        """Stores the chosen blocks of a dense (N, K) tensor, bit for bit.

        Args:
            dense: (N, K), of a dtype that weights can have.
            block_shape: (R, C).
            mask: which elements (N, K) or blocks (ceil(N/R), ceil(K/C)) to keep, bool or 0/1;
                element-wise it must be constant inside each block.
            density: keep the round(density · blocks) blocks of largest L2 norm; ties keep the earlier.
            scores: with `density`, keep those of largest score instead; (N, K), which is summed over
                each block, or block-wise.

        Without any of them every block is kept. Raises as the constructor does; also for a mask
        together with density or scores, and for scores without a density.
        """
        op = "BsrWeight.from_dense"
        check_tensor(op, "dense", dense)
        if dense.ndim != 2:
            fail(op, "dense must have 2 dimensions", f"{dense.ndim}: {tuple(dense.shape)}")
        check_dtype(op, "dense", dense.dtype)
        block_shape = check_block_shape(op, block_shape)
        if dense.is_meta:
            fail(op, "dense must hold data", "a tensor on the meta device", TypeError)
        block_mask = choose_blocks(op, dense.detach(), block_shape, mask, density, scores)
        values = to_blocks(dense.detach(), block_shape)[block_mask].contiguous()
        return cls(values, *pattern_of(block_mask), shape=tuple(dense.shape), block_shape=block_shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor, *, shape: tuple[int, int] | None = None) -> BsrWeight:
        """Takes a copy of a torch.sparse_bsr or (as 1×1 blocks) torch.sparse_csr matrix.

        Args:
            tensor: (N, K), without batch or dense dimensions.
            shape: the true (N, K) where `tensor` is padded to multiples of its block; default: its own.
        """
        op = "BsrWeight.from_torch"
        if not isinstance(tensor, torch.Tensor) or tensor.layout not in (torch.sparse_bsr, torch.sparse_csr):
            got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            fail(op, "tensor must be a torch.sparse_bsr or torch.sparse_csr tensor", got, TypeError)
        values = tensor.values().detach().clone(memory_format=torch.contiguous_format)
        expected_ndim = 3 if tensor.layout == torch.sparse_bsr else 1
        if tensor.ndim != 2 or values.ndim != expected_ndim:
            fail(op, "tensor must be a matrix without batch or dense dimensions", tuple(tensor.shape))
        if tensor.layout == torch.sparse_csr:
            values = values.reshape(-1, 1, 1)
        block_shape = (values.shape[1], values.shape[2])
        shape = _unpadded(op, shape, tuple(tensor.shape), block_shape)
        return cls(
            values,
            tensor.crow_indices().clone(),
            tensor.col_indices().clone(),
            shape=shape,
            block_shape=block_shape,
        )

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
        kind = getattr(matrix, "format", type(matrix).__name__)
        if kind not in ("bsr", "csr") or not hasattr(matrix, "indptr"):
            fail(op, "matrix must be a scipy.sparse BSR or CSR matrix", kind, TypeError)
        matrix = matrix.copy()
        if kind == "csr":
            block_shape = check_block_shape(op, block_shape if block_shape is not None else (1, 1))
            if shape is not None:
                fail(op, "shape goes with a BSR matrix; a CSR matrix has its own", shape)
            shape = matrix.shape
            matrix.sum_duplicates()
            matrix.resize(_grid_shape(shape, block_shape))
            matrix = matrix.tobsr(blocksize=block_shape)
        elif block_shape is not None and tuple(block_shape) != matrix.blocksize:
            fail(op, f"block_shape must be that of the matrix, {matrix.blocksize}", tuple(block_shape))
        block_shape = tuple(int(b) for b in matrix.blocksize)
        shape = _unpadded(op, shape, matrix.shape, block_shape)
        matrix.sum_duplicates()
        matrix.sort_indices()
        try:
            values = torch.tensor(matrix.data)
        except TypeError:
            fail(op, "matrix must have a dtype that torch knows", matrix.dtype, TypeError)
        return cls(
            values,
            torch.tensor(matrix.indptr),
            torch.tensor(matrix.indices),
            shape=shape,
            block_shape=block_shape,
        )

    # -- properties -----------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Of values, indices and plan."""
        return self.values.device

    @property
    def nnzb(self) -> int:
        """How many blocks are stored."""
        return self.values.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of the whole matrix."""
        return grid_of(self.shape, self.block_shape)

    @property
    def density(self) -> float:
        """Stored blocks / all blocks; 0 for an empty matrix."""
        blocks = self.grid[0] * self.grid[1]
        return self.nnzb / blocks if blocks else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of values and indices, as they are saved (the plan is not)."""
        stored = (self.values, self.crow_indices, self.col_indices)
        return sum(t.numel() * t.element_size() for t in stored)

    @property
    def ndim(self) -> int:
        """2, as of any matrix."""
        return 2

    def extra_repr(self) -> str:
        """Shapes, density and dtype."""
        n, k = self.shape
        r, c = self.block_shape
        return (
            f"shape=({n}, {k}), block_shape=({r}, {c}), density={self.density:.4g}, "
            f"nnzb={self.nnzb}, dtype={str(self.dtype).removeprefix('torch.')}"
        )

    # -- use ------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x Wᵀ + bias, as F.linear does: x of shape (…, K) gives (…, N)."""
        return bsr_linear(x, self.values, self.plan, bias, *self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: D105
        # functional.linear(x, weight, bias) works with a BsrWeight. Being an overriding type also keeps fused
        # paths that read `.weight` of a linear layer (nn.TransformerEncoderLayer in eval) from taking it.
        if func is not functional.linear:
            return NotImplemented

        def linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> Any:  # noqa: A002
            return weight.linear(input, bias) if isinstance(weight, cls) else NotImplemented

        return linear(*args, **(kwargs or {}))

    def block_row_indices(self) -> torch.Tensor:
        """(nnzb,) int64: the block row of each stored block."""
        rows = torch.arange(self.grid[0], device=self.device)
        return rows.repeat_interleave(self.crow_indices.diff(), output_size=self.nnzb)

    def block_mask(self) -> torch.Tensor:
        """(block rows, block columns) bool: which blocks are stored."""
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.device)
        mask[self.block_row_indices(), self.col_indices.long()] = True
        return mask

    def to_dense(self) -> torch.Tensor:
        """The (N, K) tensor with zeros for the blocks that are not stored; differentiable, exact."""
        rows, cols = self.grid
        position = self.block_row_indices() * cols + self.col_indices
        blocks = self.values.new_zeros((rows * cols, *self.block_shape)).index_copy(0, position, self.values)
        return from_blocks(blocks.reshape(rows, cols, *self.block_shape), self.shape)

    def to_torch(self, *, pad: bool = False) -> torch.Tensor:
        """A torch.sparse_bsr tensor with copies of values and indices.

        torch needs sizes that are multiples of the block; with `pad=True` others are rounded up.
        """
        shape = self._foreign_shape("BsrWeight.to_torch", pad)
        return torch.sparse_bsr_tensor(
            self.crow_indices.clone(),
            self.col_indices.clone(),
            self.values.detach().clone(),
            size=shape,
            check_invariants=True,
        )

    def to_scipy(self, *, pad: bool = False) -> Any:
        """A scipy.sparse.bsr_array with copies of values and indices; float64, float32 and int8 only.

        scipy needs sizes that are multiples of the block; with `pad=True` others are rounded up.
        """
        op = "BsrWeight.to_scipy"
        if self.dtype in (torch.bfloat16, torch.float16):
            requirement = "values must have a dtype that scipy.sparse computes with (.float() converts)"
            fail(op, requirement, self.dtype, TypeError)
        from scipy.sparse import bsr_array

        shape = self._foreign_shape(op, pad)
        arrays = (self.values, self.col_indices, self.crow_indices)
        return bsr_array(
            tuple(a.detach().cpu().numpy().copy() for a in arrays), shape=shape, blocksize=self.block_shape
        )

    def _foreign_shape(self, op: str, pad: bool) -> tuple[int, int]:
        padded = _grid_shape(self.shape, self.block_shape)
        if padded != tuple(self.shape) and not pad:
            fail(
                op,
                f"shape must be a multiple of block_shape {self.block_shape}, or pad=True",
                tuple(self.shape),
            )
        return padded

    @torch.no_grad()
    def zero_padding_(self) -> BsrWeight:
        """Sets padding to zero again, after something other than training wrote to all of `values`."""
        n, k = self.shape
        r, c = self.block_shape
        if n % r:
            self.values[int(self.crow_indices[-2]) :, n % r :, :] = 0
        if k % c:
            self.values[self.col_indices == k // c, :, k % c :] = 0
        return self

    # -- moving, copying, loading ---------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> BsrWeight:
        before = {name: getattr(self, name) for name in _INDICES}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != old.dtype:  # module.type(dst) casts every buffer: indices only follow the device
                setattr(self, name, old.to(new.device))
        if before["crow_indices"].is_meta and not self.crow_indices.is_meta:
            # to_empty() gave memory without content; kernels must never see that as indices.
            self._set_pattern(*pattern_of(random_blocks(self.grid, self.density)))
            self._pattern_known = False
        return self

    def _set_pattern(self, crow: torch.Tensor, col: torch.Tensor) -> None:
        device = self.values.device
        self.plan = make_plan("BsrWeight", crow, col, tuple(self.shape), self.block_shape).to(device)
        self.crow_indices, self.col_indices = crow.to(device), col.to(device)

    @torch.no_grad()
    def assign_(self, other: BsrWeight) -> None:
        """Takes over values, pattern and block shape of a weight of the same shape.

        Where the pattern is the same, values are copied into the present Parameter; otherwise the
        other's Parameter takes its place.
        """
        if other.shape != self.shape:
            fail("BsrWeight.assign_", f"other must be of shape {tuple(self.shape)}", tuple(other.shape))
        same = self.block_shape == other.block_shape and self._pattern_known
        if same and all(
            torch.equal(getattr(self, n), getattr(other, n).to(self.device)) for n in _INDICES[:2]
        ):
            self.values.copy_(other.values)
            return
        self.block_shape = other.block_shape
        self.values = other.values
        for name in _INDICES:
            setattr(self, name, getattr(other, name))
        self._pattern_known = other._pattern_known

    def __getstate__(self) -> dict[str, Any]:  # noqa: D105
        state = self.__dict__.copy()
        state["_buffers"] = {name: b for name, b in self._buffers.items() if name != "plan"}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a pickle or a copy in; the plan is made anew, and the pattern checked."""
        super().__setstate__(state)
        crow, col = self.crow_indices, self.col_indices
        self.register_buffer(
            "plan", make_plan("BsrWeight", crow, col, tuple(self.shape), self.block_shape), persistent=False
        )

    def check_state(
        self, op: str, state_dict: dict[str, torch.Tensor], prefix: str
    ) -> dict[str, torch.Tensor]:
        """What `state_dict` holds for this weight, indices as int32, after all checks; changes nothing.

        Raises ValueError if it is of another pattern than this weight's.
        """
        state = {k: v for k, v in state_dict.items() if k.startswith(prefix)}
        advice = "rarefy.load_state_dict(model, state_dict) takes a pattern over"
        values = state.get(prefix + "values")
        for name in ("crow_indices", "col_indices"):
            if prefix + name not in state:
                continue
            index, mine = _index(op, prefix + name, state[prefix + name]), getattr(self, name)
            state[prefix + name] = index
            requirement = f"{prefix}{name} must be of this module's pattern"
            if index.shape != mine.shape:
                fail(op, f"{requirement}, {len(mine)} elements ({advice})", len(index))
            differs = index.to(mine.device) != mine
            if self._pattern_known and bool(differs.any()):
                (at,) = first_position(differs)
                requirement += f", whose {name}[{at}]={int(mine[at])} ({advice})"
                fail(op, requirement, f"{name}[{at}]={int(index[at])}")
        if values is not None:
            check_tensor(op, prefix + "values", values)
            if values.shape != self.values.shape:
                requirement = f"{prefix}values must be of shape {tuple(self.values.shape)} ({advice})"
                fail(op, requirement, tuple(values.shape))
        crow = state.get(prefix + "crow_indices", self.crow_indices)
        col = state.get(prefix + "col_indices", self.col_indices)
        if not (crow.is_meta or col.is_meta):
            if not self._pattern_known:
                make_plan(op, crow, col, tuple(self.shape), self.block_shape)
            if values is not None:
                check_padding(op, values, crow.to(values.device), col.to(values.device), tuple(self.shape))
        return state

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        state = self.check_state("BsrWeight.load_state_dict", state_dict, prefix)
        super()._load_from_state_dict(state, prefix, local_metadata, *args)
        if prefix + "crow_indices" in state and prefix + "col_indices" in state:
            self._set_pattern(self.crow_indices, self.col_indices)
            self._pattern_known = not self.crow_indices.is_meta


def _unpadded(
    op: str, shape: tuple[int, int] | None, padded: tuple[int, int], block_shape: tuple[int, int]
) -> tuple[int, int]:
    """The true shape of a matrix that came padded to multiples of its block."""
    if shape is None:
        return (int(padded[0]), int(padded[1]))
    shape = check_pair(op, "shape", shape, 0)
    if _grid_shape(shape, block_shape) != tuple(padded):
        fail(op, f"shape must be {tuple(padded)} before padding to blocks of {block_shape}", shape)
    return shape
