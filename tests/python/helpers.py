"""Random block-sparse weights, their dense float64 twins, and the error bound that kernels must meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Half the distance from 1 to the next number: the relative error of one rounding.
ROUNDOFF = {torch.float64: 2**-53, torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# 16-bit floats are accumulated in float32.
ACCUMULATOR = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}


@dataclass
class Bsr:
    """A block-sparse weight as the ops take it."""

    values: Tensor
    crow: Tensor
    col: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        self.plan = torch.ops.rarefy.bsr_plan(self.crow, self.col, *self.shape, *self.block_shape)

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        return self.values, self.plan

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[2]

    def scatter(self, values: Tensor) -> Tensor:
        """Return values of this pattern as a dense (rows, cols) matrix, in values' dtype."""
        (rows, cols), (r, c) = self.shape, self.block_shape
        dense = values.new_zeros((-(-rows // r)) * r, (-(-cols // c)) * c)
        for i in range(len(self.crow) - 1):
            for e in range(int(self.crow[i]), int(self.crow[i + 1])):
                j = int(self.col[e])
                dense[i * r : (i + 1) * r, j * c : (j + 1) * c] = values[e]
        return dense[:rows, :cols]

    def gather(self, dense: Tensor) -> Tensor:
        """Return the stored blocks of a dense matrix, zero where they stick out of it."""
        (rows, cols), (r, c) = self.shape, self.block_shape
        padded = torch.nn.functional.pad(dense, (0, -cols % c, 0, -rows % r))
        blocks = [
            padded[i * r : (i + 1) * r, j * c : (j + 1) * c]
            for i in range(len(self.crow) - 1)
            for j in self.col[int(self.crow[i]) : int(self.crow[i + 1])].tolist()
        ]
        return torch.stack(blocks) if blocks else dense.new_zeros(0, r, c)

    def dense(self) -> Tensor:
        return self.scatter(self.values.double())


def random_bsr(
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    density: float,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    integers: bool = False,
    empty_first_row: bool = False,
) -> Bsr:
    """A random pattern with about `density` of its blocks; edge blocks have zero padding."""
    counts = [-(-n // b) for n, b in zip(shape, block_shape, strict=True)]
    mask = torch.rand(counts) < density
    if empty_first_row and counts[0] > 0:
        mask[0] = False
    crow = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)]).to(torch.int32)
    col = mask.nonzero()[:, 1].to(torch.int32)
    bsr = Bsr(torch.zeros(len(col), *block_shape, dtype=dtype), crow, col, shape)
    dense = small_integers(*shape) if integers else torch.randn(shape, dtype=torch.float64)
    bsr.values = bsr.gather(dense).to(dtype)
    return Bsr(bsr.values.to(device), crow.to(device), col.to(device), shape)


def small_integers(*shape: int) -> Tensor:
    """Integers in [-2, 2]: sums of a few hundred products are exact in every dtype's accumulator."""
    return torch.randint(-2, 3, shape).double()


def assert_within_bound(got: Tensor, expected: Tensor, magnitude: Tensor, terms: int | Tensor) -> None:
    """Check each element of a sum of `terms` products, one number for all or one for each.

    `expected` is the float64 result, `magnitude` the same sum over absolute values. The bound is the
    standard one for any order of summation, 2·terms·u_acc·magnitude, and one rounding to got's dtype.
    """
    assert got.shape == expected.shape, f"shape {tuple(got.shape)} is not {tuple(expected.shape)}"
    accumulated = 2 * terms * ROUNDOFF[ACCUMULATOR[got.dtype]] * magnitude
    rounded = ROUNDOFF[got.dtype] * (expected.abs() + accumulated) + torch.finfo(got.dtype).smallest_normal
    error, bound = (got.double() - expected).abs(), accumulated + rounded
    bad = (~(error <= bound)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise AssertionError(
            f"{len(bad)} of {got.numel()} elements out of bound; first at {at}: "
            f"got {got[at]}, expected {expected[at]}, bound {bound[at]}"
        )
