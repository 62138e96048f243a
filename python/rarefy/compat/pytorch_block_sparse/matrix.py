"""BlockSparseMatrix, a BsrWeight with the methods of pytorch_block_sparse, and its dense emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.optim import Optimizer

from ... import ops
from ...activations import activate
from ...checks import check_block_shape, check_int, check_shape, check_tensor, fail
from ...masks import block_norms, expand_mask, grid_of, to_blocks, top_blocks
from ...pattern import BsrPattern
from ...values import dense_of
from ...weight import BsrWeight
from .original import ORIGINAL, check_indices, from_original

Shape = tuple[int, int]


class BlockSparseMatrixBase(BsrWeight):
    """A block-sparse matrix of shape (N, K): what both kinds share.

    Args:
        shape: (N, K); multiples of the block or not.
        block_mask: (⌈N/R⌉, ⌈K/C⌉) bool: which blocks are stored.
        data: (blocks · R, C), of any float dtype: the blocks one below the other, row by row of the mask.
        block_shape: (R, C), any.

    strict_pattern is False: load_state_dict takes other patterns and densities over.

    `values` is the Parameter, (blocks, R, C), and `data` the same memory as (blocks · R, C). As a BsrWeight
    it moves, saves, changes its pattern and multiplies; a layer takes it as its weight.

    Raises ValueError or TypeError for shapes, dtypes and devices that do not fit.
    """

    strict_pattern = False

    def __init__(
        self, shape: Shape, block_mask: torch.Tensor, data: torch.Tensor, block_shape: Shape = (32, 32)
    ) -> None:
        op = type(self).__name__
        shape, block_shape = check_shape(op, shape), check_block_shape(op, block_shape)
        check_tensor(op, "block_mask", block_mask)
        check_tensor(op, "data", data)
        if tuple(block_mask.shape) != grid_of(shape, block_shape) or block_mask.dtype != torch.bool:
            requirement = f"block_mask must be bool, {grid_of(shape, block_shape)}"
            fail(op, requirement, f"{block_mask.dtype}, {tuple(block_mask.shape)}")
        if block_mask.device != data.device:
            fail(op, f"data must be on the device of block_mask, {block_mask.device}", data.device, TypeError)
        pattern = BsrPattern.from_mask(block_mask, shape=shape, block_shape=block_shape)
        expected = (pattern.nnzb * block_shape[0], block_shape[1])
        if tuple(data.shape) != expected:
            fail(op, f"data must be of shape {expected}", tuple(data.shape))
        values = data.detach().contiguous().view(-1, *block_shape)
        self._check_values(op, values, pattern)
        self._init(values, pattern)

    # -- making one -----------------------------------------------------------------------------------

    @classmethod
    def _with_blocks(
        cls, op: str, shape: Any, n_blocks: int | None, blocks: Any, block_shape: Any, device: Any,
        generator: torch.Generator | None,
    ) -> BlockSparseMatrixBase:  # fmt: skip
        """Zeros in so many random blocks, or in those given as (block row, block column)."""
        shape, block_shape = check_shape(op, shape), check_block_shape(op, block_shape)
        rows, cols = grid_of(shape, block_shape)
        mask = torch.zeros(rows * cols, dtype=torch.bool)
        if (n_blocks is None) == (blocks is None):
            fail(op, "either n_blocks or blocks must be given", "neither" if blocks is None else "both")
        if blocks is None:
            if check_int(op, "n_blocks", n_blocks) > rows * cols:
                fail(op, f"n_blocks must be at most {rows * cols}", n_blocks)
            where = generator.device if generator is not None else "cpu"
            mask[torch.randperm(rows * cols, generator=generator, device=where)[:n_blocks].cpu()] = True
        else:
            for row, col in blocks:
                if not (0 <= row < rows and 0 <= col < cols):
                    fail(op, f"blocks must lie in {(rows, cols)}", (row, col))
                mask[row * cols + col] = True
        device = torch.empty(0, device=device).device
        data = torch.zeros((int(mask.sum()) * block_shape[0], block_shape[1]), device=device)
        return cls(shape, mask.view(rows, cols).to(device), data, block_shape)

    @classmethod
    def zeros(
        cls, shape: Shape, n_blocks: int | None = None, blocks: Any = None, block_shape: Shape = (32, 32),
        device: Any = None, *, generator: torch.Generator | None = None,
    ) -> BlockSparseMatrixBase:  # fmt: skip
        """Zeros in `n_blocks` random blocks, or in `blocks`, (block row, block column) each.

        Positions come from `generator`, or from torch's global one.
        """
        return cls._with_blocks(
            f"{cls.__name__}.zeros", shape, n_blocks, blocks, block_shape, device, generator
        )

    @classmethod
    def ones(
        cls, shape: Shape, n_blocks: int | None = None, blocks: Any = None, block_shape: Shape = (32, 32),
        device: Any = None, positive: bool = False, *, generator: torch.Generator | None = None,
    ) -> BlockSparseMatrixBase:  # fmt: skip
        """Ones in such blocks; with `positive=False` each is 1 or −1 with the same probability."""
        matrix = cls._with_blocks(
            f"{cls.__name__}.ones", shape, n_blocks, blocks, block_shape, device, generator
        )
        with torch.no_grad():
            drawn = torch.randint(0, 2, matrix.values.shape, generator=generator)
            matrix.values.copy_(torch.ones_like(drawn) if positive else 2 * drawn - 1)
        return matrix.zero_padding_()

    @classmethod
    def randn(
        cls, shape: Shape, n_blocks: int | None = None, blocks: Any = None, block_shape: Shape = (32, 32),
        device: Any = None, positive: bool = False, *, generator: torch.Generator | None = None,
    ) -> BlockSparseMatrixBase:  # fmt: skip
        """Standard normal values in such blocks, or their magnitudes with `positive`."""
        matrix = cls._with_blocks(
            f"{cls.__name__}.randn", shape, n_blocks, blocks, block_shape, device, generator
        )
        with torch.no_grad():
            drawn = torch.randn(matrix.values.shape, generator=generator)
            matrix.values.copy_(drawn.abs() if positive else drawn)
        return matrix.zero_padding_()

    @classmethod
    def from_dense(
        cls, dense: torch.Tensor, block_shape: Shape = (32, 32), block_count: int | None = None,
        blocks: Any = None, slow: bool = False, out: BlockSparseMatrixBase | None = None,
    ) -> BlockSparseMatrixBase:  # fmt: skip
        """Blocks of a dense (N, K) matrix, bit for bit: all, `block_count` of largest L2 norm, or `blocks`.

        With `out` its values become those of its blocks in `dense`; its pattern stays. `slow` has no effect.
        """
        op = f"{cls.__name__}.from_dense"
        check_tensor(op, "dense", dense)
        if dense.ndim != 2:
            fail(op, "dense must have 2 dimensions", tuple(dense.shape))
        if out is not None:
            if out.shape != dense.shape:
                fail(op, f"dense must be of out's shape {tuple(out.shape)}", tuple(dense.shape))
            with torch.no_grad():
                out.values.copy_(
                    to_blocks(dense.detach(), out.block_shape)[out.block_mask().to(dense.device)]
                )
            return out
        block_shape, shape = check_block_shape(op, block_shape), (dense.shape[0], dense.shape[1])
        rows, cols = grid_of(shape, block_shape)
        if blocks is not None:
            mask = cls._with_blocks(op, shape, None, blocks, block_shape, "cpu", None).block_mask()
        elif block_count is None:
            mask = torch.ones(rows, cols, dtype=torch.bool)
        else:
            if check_int(op, "block_count", block_count) > rows * cols:
                fail(op, f"block_count must be at most {rows * cols}", block_count)
            mask = top_blocks(block_norms(dense.detach(), block_shape), block_count / max(1, rows * cols))
        mask = mask.to(dense.device)
        data = to_blocks(dense.detach(), block_shape)[mask].reshape(-1, block_shape[1])
        return cls(shape, mask, data.clone(), block_shape)

    # -- its data -------------------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """(blocks · R, C): the Parameter `values` in two dimensions, the same memory, differentiable."""
        return self.values.view(-1, self.block_shape[1])

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        with torch.no_grad():
            self.values.copy_(data.reshape(self.values.shape))

    def updated_data(self) -> torch.Tensor:
        """`data`."""
        return self.data

    def get_differentiable_data(self) -> torch.Tensor:
        """`data`."""
        return self.data

    def multiply_(self, factor: float) -> BlockSparseMatrixBase:
        """Multiplies all values, in place."""
        with torch.no_grad():
            self.values.mul_(factor)
        return self

    def block_norm(self, p: float = 2) -> torch.Tensor:
        """(blocks,): the p-norm of each block."""
        return torch.linalg.vector_norm(self.values.detach().flatten(1), ord=p, dim=1)

    def to_sparse(self, data_replace: torch.Tensor | None = None) -> torch.Tensor:
        """A torch COO tensor (⌈N/R⌉, ⌈K/C⌉, R, C) with dense blocks, of `data` or of what replaces it."""
        data = (self.data if data_replace is None else data_replace).reshape(-1, *self.block_shape)
        size = (*self.blocks_count(), *self.block_shape)
        return torch.sparse_coo_tensor(self.build_coo_block_index().long(), data, size, check_invariants=True)

    def to_dense(self, data_replace: torch.Tensor | None = None) -> torch.Tensor:
        """(N, K) with zeros where nothing is stored, of `data` or of what replaces it; differentiable."""
        if data_replace is None:
            return super().to_dense()
        return dense_of(data_replace.reshape(-1, *self.block_shape), self.pattern)

    def check_with_dense(self, dense: torch.Tensor) -> None:
        """Raises ValueError unless every stored block has exactly the values of a dense (N, K) matrix."""
        other = to_blocks(dense.detach(), self.block_shape)[self.block_mask()]
        if not torch.equal(other, self.values.detach()):
            at = (other != self.values.detach()).flatten(1).any(1).nonzero()[0].item()
            where = tuple(self.build_coo_block_index()[:, at].tolist())
            fail("check_with_dense", "stored blocks must be those of dense", f"another block at {where}")

    # -- its pattern ----------------------------------------------------------------------------------

    @staticmethod
    def blocks_count_(shape: Shape, block_shape: Shape) -> torch.Size:
        """Block rows and block columns of a matrix, the last ones padded."""
        return torch.Size(grid_of(shape, block_shape))

    def blocks_count(self) -> torch.Size:
        """Block rows and block columns."""
        return torch.Size(self.grid)

    def build_coo_block_index(self) -> torch.Tensor:
        """(2, blocks) int32: block row and block column of each stored block."""
        return torch.stack([self.block_row_indices().int(), self.pattern.col_indices])

    def build_indices_(
        self, block_mask: torch.Tensor, block_ptr: torch.Tensor | None, nnzt: Any, transpose_indices: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each stored block its column and place in data, (blocks, 2), and where rows begin, int32.

        With `transpose_indices` rows and columns change roles. `block_ptr`: places in data, as a grid.
        """
        places = torch.zeros(block_mask.shape, dtype=torch.int64, device=block_mask.device)
        if block_ptr is None:
            places[block_mask] = torch.arange(int(block_mask.sum()), device=block_mask.device)
        else:
            places.copy_(block_ptr)
        if transpose_indices:
            block_mask, places = block_mask.t(), places.t()
        starts = torch.zeros(len(block_mask) + 1, dtype=torch.int32, device=block_mask.device)
        starts[1:] = block_mask.sum(1).cumsum(0)
        return torch.stack([block_mask.nonzero()[:, 1], places[block_mask]], 1).int(), starts

    def build_indices(
        self, block_mask: torch.Tensor, block_ptr: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """The original's index arrays of a mask, by name: cols_a, row_start_ends_a, rows_b, …."""
        cols, rows = (self.build_indices_(block_mask, block_ptr, None, t) for t in (False, True))
        blocks = block_mask.nonzero().flip(-1).flatten().int()
        return dict(zip(ORIGINAL[1:], (*cols, *rows, blocks), strict=True))

    @property
    def cols_a(self) -> torch.Tensor:
        """(blocks, 2) int32: block column and place in data, by block row."""
        return self.build_indices(self.block_mask())["cols_a"]

    @property
    def row_start_ends_a(self) -> torch.Tensor:
        """(block rows + 1,) int32."""
        return self.pattern.crow_indices

    @property
    def rows_b(self) -> torch.Tensor:
        """(blocks, 2) int32: block row and place in data, by block column."""
        return self.build_indices(self.block_mask())["rows_b"]

    @property
    def col_start_ends_b(self) -> torch.Tensor:
        """(block columns + 1,) int32."""
        return self.build_indices(self.block_mask())["col_start_ends_b"]

    def block_mask_build(self, block_positions: torch.Tensor | None) -> torch.Tensor:
        """(block rows, block columns) bool of positions, (n, 2) or more columns; of its own for None."""
        if block_positions is None:
            return self.block_mask()
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.device)
        mask[block_positions[:, 0].long(), block_positions[:, 1].long()] = True
        return mask

    def rebuild(
        self, block_mask: torch.Tensor, block_ptr: torch.Tensor | None = None, callback: bool = True,
        *, optimizer: Optimizer | None = None,
    ) -> None:  # fmt: skip
        """Stores other blocks, as many as before: each takes the values at its place in data.

        Args:
            block_mask: (block rows, block columns) bool.
            block_ptr: (block rows, block columns): the place in data of each; None: in order of the mask.
            callback: no effect: there are no indices to rebuild.
            optimizer: whose state, of the Parameter's shape, goes along.
        """
        if int(block_mask.sum()) != self.nnzb or tuple(block_mask.shape) != self.grid:
            fail("rebuild", f"block_mask must have {self.nnzb} of {self.grid} blocks", int(block_mask.sum()))
        block_mask = block_mask.to(self.device)
        source = torch.arange(self.nnzb, device=self.device)
        if block_ptr is not None:
            source = block_ptr.to(self.device)[block_mask].long()
        self._rearrange(block_mask, source, optimizer)

    def block_replace(
        self,
        block_replacements: torch.Tensor | Sequence[Sequence[int]],
        *,
        optimizer: Optimizer | None = None,
    ) -> torch.Tensor:
        """Moves stored blocks, with their values and their optimizer's state, to other places.

        Args:
            block_replacements: (n, 3): block row and block column to move to, and the block's place in
                data now. Places that blocks of the same call leave are free.
            optimizer: see rebuild.

        Returns (blocks,) int64: for each block as they lie in data now, where it was.

        Raises ValueError for places outside the matrix, taken, or named twice; nothing has moved then.
        """
        op, (rows, cols) = "block_replace", self.grid
        moves = torch.as_tensor(block_replacements, device=self.device).long().reshape(-1, 3)
        to, which = moves[:, 0] * cols + moves[:, 1], moves[:, 2]
        outside = (moves < 0).any(1) | (moves[:, 0] >= rows) | (moves[:, 1] >= cols) | (which >= self.nnzb)
        if bool(outside.any()):
            requirement = f"places must lie in {(rows, cols)} and blocks in {self.nnzb}"
            fail(op, requirement, moves[outside][0].tolist())
        positions = self.pattern.positions()
        positions[which] = to
        order = positions.argsort()
        if len(which.unique()) != len(which) or bool((positions[order].diff() == 0).any()):
            fail(op, "each block must move once, to a place that is free", "one that is taken")
        mask = torch.zeros(rows * cols, dtype=torch.bool, device=self.device)
        mask[positions] = True
        self._rearrange(mask.view(rows, cols), order, optimizer)
        return order

    @torch.no_grad()
    def _rearrange(self, mask: torch.Tensor, source: torch.Tensor, optimizer: Optimizer | None) -> None:
        """Blocks of `mask` from now on; block i is what block source[i] was."""
        values = self.values
        state = optimizer.state.get(values, {}) if optimizer is not None else {}
        same = [t for t in state.values() if isinstance(t, torch.Tensor) and t.shape == values.shape]
        for tensor in (values, values.grad, *same):
            if tensor is not None:
                tensor.copy_(tensor[source])
        self._set_pattern(BsrPattern.from_mask(mask, shape=tuple(self.shape), block_shape=self.block_shape))
        self.zero_padding_()

    def sanity_check(
        self, cols: torch.Tensor, row_end: torch.Tensor, shape: Shape, block_shape: Shape
    ) -> None:
        """Raises ValueError unless cols, (blocks, 2) int32, and row ends, (rows,) int32, are a pattern."""
        check_indices(cols, row_end, grid_of(shape, block_shape))

    # -- products -------------------------------------------------------------------------------------

    @staticmethod
    def flatten_first_dims(dense_a: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        """(…, K) as (tokens, K), and its leading dimensions."""
        return dense_a.reshape(-1, dense_a.shape[-1]), dense_a.shape[:-1]

    @staticmethod
    def unflatten_first_dims(result: torch.Tensor, info: torch.Size) -> torch.Tensor:
        """The inverse."""
        return result.view(*info, result.shape[-1])

    def tensor_prepare(self, t: torch.Tensor, message: str, transpose: bool) -> torch.Tensor:
        """`t`, transposed where asked: kernels take any strides, nothing is copied."""
        return t.mT if transpose else t

    def reverse_matmul_(self, dense_a: torch.Tensor, transpose: bool = True) -> torch.Tensor:
        """dense_a @ Wᵀ, or with transpose=False dense_a @ W, as reverse_matmul; without a gradient."""
        with torch.no_grad():
            return self.reverse_matmul(dense_a, transpose)

    def reverse_matmul(self, dense_a: torch.Tensor, transpose: bool = True) -> torch.Tensor:
        """dense_a @ Wᵀ for dense_a (…, K), or with transpose=False dense_a @ W for (…, N); differentiable."""
        if transpose:
            return self.linear(dense_a)
        return ops.bsr_grad_input(dense_a, self.values, self.pattern.plan, *self.shape)

    def matmul_with_output_sparse_support_(
        self, dense_a: torch.Tensor, dense_b: torch.Tensor, overwrite_data: bool = False
    ) -> torch.Tensor:
        """The stored blocks of dense_aᵀ @ dense_b, for (tokens, N) and (tokens, K), as data; no gradient."""
        with torch.no_grad():
            result = self.matmul_with_output_sparse_support(dense_a, dense_b)
        if overwrite_data:
            self.data = result
        return result

    def matmul_with_output_sparse_support(self, dense_a: torch.Tensor, dense_b: torch.Tensor) -> torch.Tensor:
        """The same for (…, N) and (…, K); differentiable. What a weight's gradient is."""
        plan, sizes = self.pattern.plan, (*self.block_shape, *self.shape)
        return ops.bsr_grad_weight(dense_a, dense_b, plan, *sizes).view(-1, self.block_shape[1])

    # -- state_dicts ----------------------------------------------------------------------------------

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if prefix + "cols_a" in state_dict:
            state_dict = from_original(state_dict, prefix, self.block_shape)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def check_state(self, op: str, state_dict: Mapping[str, torch.Tensor], prefix: str) -> None:
        """As BsrWeight, also for state_dicts of the original."""
        if prefix + "cols_a" in state_dict:
            state_dict = from_original(state_dict, prefix, self.block_shape)
        super().check_state(op, state_dict, prefix)


class BlockSparseMatrix(BlockSparseMatrixBase):
    """The matrix on Rarefy's kernels."""


class BlockSparseMatrixEmulator(BlockSparseMatrixBase):
    """The same on torch's dense products: for checks, and where no kernel is wanted."""

    @property
    def _dense(self) -> torch.Tensor:
        """(N, K): the dense matrix that it multiplies by."""
        return self.to_dense()

    @property
    def _mask(self) -> torch.Tensor:
        """(N, K) bool: what is stored."""
        return expand_mask(self.block_mask(), tuple(self.shape), self.block_shape)

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        """As F.linear, with the dense matrix."""
        y = functional.linear(x, self.to_dense(), bias)
        return y if activation is None else activate(y, activation)

    def reverse_matmul(self, dense_a: torch.Tensor, transpose: bool = True) -> torch.Tensor:
        """As BlockSparseMatrix, by a dense product."""
        return self.linear(dense_a) if transpose else dense_a @ self.to_dense()

    def matmul_with_output_sparse_support(self, dense_a: torch.Tensor, dense_b: torch.Tensor) -> torch.Tensor:
        """As BlockSparseMatrix, by a dense product."""
        a, b = dense_a.reshape(-1, dense_a.shape[-1]), dense_b.reshape(-1, dense_b.shape[-1])
        return to_blocks(a.mT @ b, self.block_shape)[self.block_mask()].reshape(-1, self.block_shape[1])
