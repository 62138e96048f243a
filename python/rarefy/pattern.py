"""BsrPattern: which blocks of a matrix are stored. Immutable, checked once, shared by all who use it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _load
from .checks import (
    check_block_fits,
    check_block_shape,
    check_int,
    check_shape,
    check_tensor,
    fail,
    first_position,
)
from .masks import grid_of, pattern_of
from .ops import bsr_plan

_INT32 = torch.iinfo(torch.int32)
_row_plan, _transposed = map(_load.op, ("_row_plan", "_transposed"))
HEADER = 8  # words of a plan before its copy of the indices (src/core/plan_layout.h)


def row_plan_size(block_rows: int, nnzb: int) -> int:
    """Words of a row plan: the header, and the indices by row."""
    return HEADER + block_rows + 1 + nnzb


def as_index(op: str, name: str, value: Any) -> torch.Tensor:
    """An index tensor as contiguous int32; int64 is accepted when it fits."""
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
    return value.detach().to(torch.int32).contiguous()


def digest(crow: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
    """64 bits that tell patterns of equal size apart, as (2,) int32 on the indices' device; not a secret.

    Sums of products with odd weights modulo 2⁶⁴, mixed before they are added: whoever averages indices,
    or writes a few of them, does not arrive at the digest of what he wrote.
    """
    total = torch.zeros((), dtype=torch.int64, device=crow.device)
    for index, seed in ((crow, 0x2545F4914F6CDD1D), (col, 0x1B873593CC9E2D51)):
        position = torch.arange(len(index), dtype=torch.int64, device=index.device)
        mixed = (index.long() + 1) * ((position * seed) | 1)
        total = total * seed + ((mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D).sum()
    return total.reshape(1).view(torch.int32)


def _when_made(kept: torch.Tensor) -> torch.Tensor:
    """What a pattern keeps, once a GPU has made it: others may read it in other streams."""
    if kept.is_cuda and type(kept) is torch.Tensor:  # none of a FakeTensorMode
        torch.cuda.current_stream(kept.device).synchronize()
    return kept


def _is_of_a_graph(plan: torch.Tensor) -> bool:
    """Whether a graph made this, which a pattern that is there before and after it must not keep."""
    return torch.compiler.is_compiling() or type(plan) is not torch.Tensor


class BsrPattern:
    """Which blocks of an (N, K) matrix are stored.

    Args:
        crow_indices: (ceil(N/R) + 1,) int32 or int64: block row i is blocks crow[i] … crow[i+1].
        col_indices: (nnzb,) int32 or int64: block columns, sorted and distinct in each block row.
        shape: (N, K). Sizes that are no multiple of the block are padded in the last block.
        block_shape: (R, C), at most the shape rounded up to multiples of 256.

    Indices are copied into the plan and checked there, once; from then on nothing changes, so weights, their
    copies and tied layers share one pattern. `deepcopy` returns the pattern itself, pickle stores the indices
    alone, `to` gives its twin on another device, one and the same for all who ask. What kernels derive
    from a pattern, the `plan`, belongs to it. Patterns are equal if they store the same blocks.

    On the meta device a pattern has sizes and no indices.

    Raises:
        ValueError: an index or a size is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """

    shape: torch.Size
    block_shape: tuple[int, int]
    nnzb: int
    is_padded: bool  # whether blocks at the edge reach past the matrix
    # 1-D int32, with its own copy of the indices: all of the plan, or the first part of it, which is what
    # products by rows read on the CPU. Whoever has raw arrays for one product pays for no more.
    row_plan: torch.Tensor
    plan: torch.Tensor  # all that kernels read; made when it is first asked for, if there is a row plan alone

    def __init__(
        self,
        crow_indices: torch.Tensor,
        col_indices: torch.Tensor,
        *,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
        op: str = "BsrPattern",
    ) -> None:
        n, k = check_shape(op, shape)
        block_shape = check_block_fits(op, (n, k), check_block_shape(op, block_shape))
        # A plan may be made under inference_mode and used for training later.
        with torch.inference_mode(False):
            crow = as_index(op, "crow_indices", crow_indices)
            col = as_index(op, "col_indices", col_indices)
            if col.device != crow.device:
                requirement = f"col_indices must be on the device of crow_indices, {crow.device}"
                fail(op, requirement, col.device, TypeError)
            self.plan = bsr_plan(crow, col, n, k, *block_shape, op)
        self._set(torch.Size((n, k)), block_shape, len(col), self.plan, {})

    def _set(
        self, shape: torch.Size, block_shape: tuple[int, int], nnzb: int, plan: torch.Tensor, family: dict
    ) -> None:
        self.shape, self.block_shape, self.nnzb, self.row_plan = shape, block_shape, nnzb, plan
        self.is_padded = any(size % block for size, block in zip(shape, block_shape, strict=True))
        self._prepared: dict[int, torch.Tensor] = {}  # by the key of the kernels that want it
        self._family = family  # the twins by device, as weak references: who moves away frees his plan
        if not plan.is_meta:
            family[plan.device] = weakref.ref(self)

    def __getattr__(self, name: str) -> Any:  # noqa: D105
        # A cached_property has a lock, which torch.compile cannot take; a property costs layers time.
        if name != "plan":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with torch.inference_mode(False):
            plan = bsr_plan(*self.indices(), *self.shape, *self.block_shape)
        if not _is_of_a_graph(plan):
            self.plan = plan
        return plan

    @classmethod
    def by_rows(
        cls,
        crow_indices: torch.Tensor,
        col_indices: torch.Tensor,
        *,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> BsrPattern | None:
        """The pattern of indices on the CPU, int32 or int64, with a row plan; None if they are not valid.

        At about the speed of memory: whoever gets None asks the constructor what is wrong.
        """
        with torch.inference_mode(False):
            plan = _row_plan(crow_indices, col_indices, [*shape, *block_shape])
        return cls._of_rows(plan, shape, block_shape, len(col_indices)) if len(plan) else None

    @classmethod
    def _of_rows(
        cls, plan: torch.Tensor, shape: tuple[int, int], block_shape: tuple[int, int], nnzb: int
    ) -> BsrPattern:
        pattern = object.__new__(cls)
        pattern._set(torch.Size(shape), block_shape, nnzb, plan, {})
        return pattern

    @classmethod
    def from_mask(
        cls,
        block_mask: torch.Tensor,
        *,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> BsrPattern:
        """The pattern of a bool mask of blocks, (ceil(N/R), ceil(K/C)); on the mask's device by default."""
        crow, col = (index.to(device or block_mask.device) for index in pattern_of(block_mask))
        return cls(crow, col, shape=shape, block_shape=block_shape)

    @classmethod
    def from_positions(
        cls, positions: torch.Tensor, *, shape: tuple[int, int], block_shape: tuple[int, int]
    ) -> BsrPattern:
        """The pattern of blocks at ascending, distinct places of the grid, row-major; see `positions`."""
        rows, columns = grid_of(shape, block_shape)
        crow = torch.searchsorted(positions, torch.arange(rows + 1, device=positions.device) * columns)
        return cls(crow, positions % max(1, columns), shape=shape, block_shape=block_shape)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Of the plan."""
        return self.row_plan.device

    @property
    def is_meta(self) -> bool:
        """Whether there are sizes only."""
        return self.row_plan.is_meta

    @property
    def sizes(self) -> list[int]:
        """N, K, R and C, as ops take them beside a plan."""
        return [*self.shape, *self.block_shape]

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
    def plan_by_rows(self) -> torch.Tensor:
        """What products by rows read: all where blocks are wider than tall, as some kernels sort those."""
        r, c = self.block_shape
        return self.plan if c > r else self.row_plan

    def indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """crow_indices and col_indices as views of the plan, for reading only."""
        first = HEADER + self.grid[0] + 1
        # In one slice: inductor knows no size of a slice of a slice, where nnzb follows from indices.
        return self.row_plan[HEADER:first], self.row_plan[first : first + self.nnzb]

    @property
    def crow_indices(self) -> torch.Tensor:
        """(ceil(N/R) + 1,) int32, a copy."""
        return self.indices()[0].clone()

    @property
    def col_indices(self) -> torch.Tensor:
        """(nnzb,) int32, a copy."""
        return self.indices()[1].clone()

    def block_rows(self) -> torch.Tensor:
        """(nnzb,) int64: the block row of each stored block."""
        rows = torch.arange(self.grid[0], device=self.device)
        return rows.repeat_interleave(self.indices()[0].diff(), output_size=self.nnzb)

    def positions(self) -> torch.Tensor:
        """(nnzb,) int64: the place of each stored block in the grid, row-major; ascending."""
        return self.block_rows() * self.grid[1] + self.indices()[1]

    def mask(self) -> torch.Tensor:
        """(block rows, block columns) bool: which blocks are stored."""
        mask = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.bool, device=self.device)
        mask[self.positions()] = True
        return mask.reshape(self.grid)

    def last_column(self) -> torch.Tensor:
        """int64: which stored blocks lie in the last block column; found once."""
        if "_last_column" not in self.__dict__:
            self._last_column = (self.indices()[1] == self.grid[1] - 1).nonzero().flatten()
        return self._last_column

    def last_row(self) -> tuple[int, int]:
        """First and end of the stored blocks in the last block row; read once."""
        if "_last_row" not in self.__dict__:
            self._last_row = (int(self.indices()[0][-2]), self.nnzb) if self.grid[0] else (0, 0)
        return self._last_row

    def prepared(self, key: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What kernels of this key derive from the pattern, made by the first who asks; see derived.py."""
        if key not in self._prepared:
            self._prepared[key] = _when_made(make())
        return self._prepared[key]

    def forget_prepared(self) -> None:
        """Drops it, when the choice of kernels changes: those of the gradients have no key of their own."""
        self._prepared = {}

    def transposed(self, values: torch.Tensor) -> tuple[BsrPattern, torch.Tensor]:
        """The pattern of the transposed matrix, and values, (nnz,) or (nnzb, R, C), of its blocks there.

        Not differentiable; see `transposition`.
        """
        shape, block = tuple(reversed(self.shape)), tuple(reversed(self.block_shape))
        if self.device.type != "cpu":
            known, perm = self.transposition()
            moved = values.index_select(0, perm)
            return known, moved if moved.ndim == 1 else moved.transpose(1, 2).contiguous()
        known = self.__dict__.get("plan", self.row_plan)
        with torch.inference_mode(False):
            moved, plan = _transposed(values.contiguous(), known, self.sizes)
        return BsrPattern._of_rows(plan, shape, block, self.nnzb), moved

    def on_diagonal(self, copies: int) -> BsrPattern:
        """The pattern of a matrix with so many of this one on its diagonal; the last two are kept.

        Raises ValueError unless blocks end where the matrix does, or where there would be 2³¹ blocks.
        """
        op = "BsrPattern.on_diagonal"
        if self.is_padded and copies > 1:
            fail(op, f"{tuple(self.shape)} must be multiples of the block {self.block_shape}", copies)
        if copies == 1:
            return self
        known = self.__dict__.setdefault("_diagonals", {})
        if copies not in known:
            crow, col = (index.long() for index in self.indices())
            turn = torch.arange(copies, device=self.device)[:, None]
            crow = torch.cat(((crow[:-1] + turn * self.nnzb).flatten(), crow[-1:] * copies))
            col = (col + turn * self.grid[1]).flatten()
            shape = (self.shape[0] * copies, self.shape[1] * copies)
            made = BsrPattern(crow, col, shape=shape, block_shape=self.block_shape, op=op)
            if not _is_of_a_graph(made.row_plan):
                if len(known) > 1:  # each takes the memory of a plan so many times as large
                    del known[next(iter(known))]
                known[copies] = made
            return made
        return known[copies]

    def in_groups(self, groups: int, places: int = 1) -> BsrPattern:
        """The pattern of a matrix, (N, K · groups), of which each group of rows has columns of its own.

        Rows are in equal groups, columns at equal places. At each place of the result the columns of all
        groups lie one group after the other, and a block is at those of its row's. Blocks keep their order,
        so values are the same. The last one is kept.

        Raises ValueError for blocks that reach over a group or a place, and for 2³¹ columns.
        """
        op, (n, k), (r, c) = "BsrPattern.in_groups", self.shape, self.block_shape
        groups, places = check_int(op, "groups", groups, 1), check_int(op, "places", places, 1)
        if groups == 1:
            return self
        if n % (groups * r) or k % (places * c):
            requirement = f"{groups} groups of rows and {places} places must be cut by blocks of {(r, c)}"
            fail(op, requirement, f"shape {(n, k)}")
        known = self.__dict__.get("_in_groups")
        if known is not None and known[:2] == (groups, places):
            return known[2]
        shape = torch.Size(check_shape(op, (n, k * groups)))
        with torch.inference_mode(False):
            crow, col = self.indices()
            group = self.block_rows() // max(1, n // (groups * r))
            width = max(1, k // (places * c))  # block columns of a group at a place
            # All are less than 2³¹, and valid: nothing is looked at, which a graph could not do.
            col = ((col // width * groups + group) * width + col % width).to(torch.int32)
            plan = bsr_plan(crow, col, *shape, r, c, op)
        made = BsrPattern._of_rows(plan, shape, (r, c), self.nnzb)
        made.plan = plan
        if not _is_of_a_graph(plan):
            _when_made(plan)
            self._in_groups = groups, places, made
        return made

    def transposition(self) -> tuple[BsrPattern, torch.Tensor]:
        """The pattern of the transposed matrix, made once, and which block each of its blocks is, int32.

        Both are parts of the plan in another order, so nothing is sorted or checked again.
        """
        perm = self.plan[len(self.plan) - self.nnzb :]
        known = self.__dict__.get("_transposed")
        if known is None:
            with torch.inference_mode(False):
                known = self._transpose(perm)
            if not _is_of_a_graph(known.row_plan):
                self._transposed = known
        return known, perm

    def _transpose(self, perm: torch.Tensor) -> BsrPattern:
        shape, block = torch.Size(reversed(self.shape)), (self.block_shape[1], self.block_shape[0])
        rows, columns = self.grid
        sizes = (HEADER, rows + 1, self.nnzb, columns + 1, self.nnzb, self.nnzb)
        header, crow, col, ccol, row, _ = self.plan.split(sizes)
        mine = (header[[0, 2, 1, 4, 3, *range(5, HEADER)]], ccol, row)
        if self.device.type == "cpu":
            return BsrPattern._of_rows(torch.cat(mine), shape, block, self.nnzb)
        back = torch.empty_like(perm)
        back[perm.long()] = torch.arange(self.nnzb, dtype=perm.dtype, device=perm.device)
        plan = _when_made(torch.cat((*mine, crow, col, back)))
        known = BsrPattern._of_rows(plan, shape, block, self.nnzb)
        known.plan = known.row_plan
        return known

    # -- moving and comparing -------------------------------------------------------------------

    def to(self, device: torch.device | str) -> BsrPattern:
        """This pattern on a device: itself, or its twin there."""
        device = torch.empty(0, device=device).device  # with its number
        if device == self.device:
            return self
        if self.is_meta:
            fail("BsrPattern.to", "a pattern must hold indices to move", "one on the meta device", TypeError)
        known = self._family.get(device)
        twin = known() if known is not None else None
        if twin is None:
            twin = object.__new__(BsrPattern)
            with torch.inference_mode(False):
                twin.plan = _when_made(self.plan.to(device))
                twin._set(self.shape, self.block_shape, self.nnzb, twin.plan, self._family)
        return twin

    def same_sizes(self, other: BsrPattern) -> bool:
        """Whether shape, block shape and the number of blocks agree."""
        mine = (self.shape, self.block_shape, self.nnzb)
        return mine == (other.shape, other.block_shape, other.nnzb)

    def __eq__(self, other: object) -> bool:
        """Whether the same blocks of the same matrix are stored, on whatever device; False on meta."""
        if not isinstance(other, BsrPattern):
            return NotImplemented
        if self is other:
            return True
        if not self.same_sizes(other) or self.is_meta or other.is_meta:
            return False
        if self._family is other._family:
            return True
        pairs = zip(self.indices(), other.indices(), strict=True)
        return all(torch.equal(a, b.to(a.device)) for a, b in pairs)

    def __hash__(self) -> int:  # noqa: D105
        return hash((self.shape, self.block_shape, self.nnzb))

    def __copy__(self) -> BsrPattern:  # noqa: D105
        return self

    def __deepcopy__(self, memo: dict) -> BsrPattern:  # noqa: D105
        return self

    def __reduce__(self) -> tuple:  # noqa: D105
        return _rebuild, (self.crow_indices, self.col_indices, tuple(self.shape), self.block_shape)

    def __repr__(self) -> str:  # noqa: D105
        return (
            f"BsrPattern(shape={tuple(self.shape)}, block_shape={self.block_shape}, nnzb={self.nnzb}, "
            f"density={self.density:.4g}, device={self.device})"
        )


def _rebuild(crow: torch.Tensor, col: torch.Tensor, shape: tuple, block_shape: tuple) -> BsrPattern:
    return BsrPattern(crow, col, shape=shape, block_shape=block_shape)
