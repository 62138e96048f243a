"""What leaves or stays as one: weights, N:M, blocks, rows, columns, channels, heads, bands, any mask."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_int, check_tensor, fail
from .masks import Mask, Scores, make_mask


def count_of(sparsity: float, units: int) -> int:
    """round(sparsity · units), halves to even: the exact number of units that leave."""
    return round(sparsity * units)


@dataclass(frozen=True)
class Pattern:
    """Base of all patterns; a weight of any number of dimensions counts as (shape[0], the rest) = (N, K).

    A pattern says how a sparsity becomes a number of units, and which unit an element belongs to.
    """

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """(R, C, n, m) as the core takes them: blocks R × C, with m > 0 also n:m."""
        raise NotImplementedError

    @property
    def each_row(self) -> bool:
        """Whether the same number leaves each row of units."""
        return False

    @property
    def most(self) -> float:
        """The largest sparsity that this pattern can have."""
        return 1.0

    @property
    def fixed(self) -> bool:
        """Whether the mask is given, whatever scores and sparsity say."""
        return False

    @property
    def spec(self) -> str | None:
        """The format of Rarefy's sparse weights that stores this pattern, or None if there is none."""
        return None

    def count(self, shape: torch.Size) -> int:
        """How many units a weight has; with `each_row`, how many a row of units has."""
        rows, cols = matrix_shape(shape)
        r, c, _, m = self.units(shape)
        across = -(-cols // (m if m and r == c == 1 else c))
        return across if self.each_row else -(-rows // r) * across

    def removed(self, shape: torch.Size, sparsity: float) -> int:
        """How many units leave at this sparsity."""
        return count_of(sparsity, self.count(shape))

    def check_sparsity(self, op: str, sparsity: float) -> None:
        """Raises ValueError for a sparsity that the pattern cannot have."""
        if sparsity > self.most:
            fail(op, f"sparsity must be at most {self.most:g} with the pattern {self}", sparsity)

    def check_shape(self, op: str, name: str, shape: torch.Size) -> None:
        """Raises ValueError for a weight that the pattern does not fit."""
        if len(shape) < 2:
            fail(op, f"{name} must have at least 2 dimensions", tuple(shape))

    def mask(self, scores: Scores, shape: torch.Size, sparsity: float, previous: Mask | None = None) -> Mask:
        """The mask at a sparsity: exactly removed(shape, sparsity) units of the lowest scores leave."""
        return self.mask_of_count(scores, shape, self.removed(shape, sparsity), previous)

    def mask_of_count(
        self, scores: Scores, shape: torch.Size, remove: int, previous: Mask | None = None
    ) -> Mask:
        """The same for a number of units."""
        units = self.units(shape)
        return make_mask(scores, units, remove, each_row=self.each_row, previous=previous)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(N, K) of a weight of two or more dimensions."""
    return shape[0], torch.Size(shape[1:]).numel()


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Single weights: "unstructured"."""

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return 1, 1, 0, 0

    @property
    def spec(self) -> str:  # noqa: D102
        return "csr"

    def __str__(self) -> str:  # noqa: D105
        return "unstructured"


@dataclass(frozen=True)
class NM(Pattern):
    """At most n of m neighbours in a row stay: "2:4". A shorter last group counts as padded.

    Below the sparsity 1 − n/m only a part of the groups becomes sparse: those that lose least.
    """

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:  # noqa: D105
        check_int("NM", "n", self.n, 0)
        check_int("NM", "m", self.m, 1)
        if self.n > self.m:
            fail("NM", "n must be at most m", f"{self.n}:{self.m}")

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return 1, 1, self.n, self.m

    @property
    def most(self) -> float:  # noqa: D102
        return 1 - self.n / self.m

    def removed(self, shape: torch.Size, sparsity: float) -> int:  # noqa: D102
        return count_of(sparsity / self.most, self.count(shape)) if self.most else 0

    @property
    def spec(self) -> str:  # noqa: D102
        return "2:4" if (self.n, self.m) == (2, 4) else "bitmap"

    def __str__(self) -> str:  # noqa: D105
        return f"{self.n}:{self.m}"


@dataclass(frozen=True)
class Block(Pattern):
    """Blocks of r × c weights: "block:16x16"; those at the edges are smaller and count as one."""

    r: int
    c: int

    def __post_init__(self) -> None:  # noqa: D105
        check_int("Block", "r", self.r, 1)
        check_int("Block", "c", self.c, 1)

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return self.r, self.c, 0, 0

    def check_shape(self, op: str, name: str, shape: torch.Size) -> None:  # noqa: D102
        super().check_shape(op, name, shape)
        rows, cols = matrix_shape(shape)
        if self.r > rows or self.c > cols:
            fail(op, f"blocks must not be larger than {name}, {rows}x{cols}", f"{self.r}x{self.c}")

    @property
    def spec(self) -> str:  # noqa: D102
        return f"block:{self.r}x{self.c}"

    def __str__(self) -> str:  # noqa: D105
        return f"block:{self.r}x{self.c}"


@dataclass(frozen=True)
class BlockNM(Block):
    """n:m inside the blocks that stay: "block:16x16+2:4". c must be a multiple of m.

    Up to the sparsity 1 − n/m groups become sparse as with NM; beyond, all are and whole blocks leave.
    """

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        NM(self.n, self.m)
        if self.c % self.m or self.n == 0:
            fail(
                "BlockNM",
                "c must be a multiple of m, and n at least 1",
                f"{self.r}x{self.c}, {self.n}:{self.m}",
            )

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return self.r, self.c, self.n, self.m

    def removed(self, shape: torch.Size, sparsity: float) -> int:  # noqa: D102
        return max(0, count_of(1 - (1 - sparsity) * self.m / self.n, self.count(shape)))

    def mask(  # noqa: D102
        self, scores: Scores, shape: torch.Size, sparsity: float, previous: Mask | None = None
    ) -> Mask:
        inside = NM(self.n, self.m)
        return (inside if sparsity < inside.most else super()).mask(scores, shape, sparsity, previous)

    @property
    def spec(self) -> str:  # noqa: D102
        return f"block:{self.r}x{self.c}"

    def __str__(self) -> str:  # noqa: D105
        return f"block:{self.r}x{self.c}+{self.n}:{self.m}"


@dataclass(frozen=True)
class RowBalanced(Block):
    """The same number of blocks leaves each block row: "row_balanced", "row_balanced:4x1"."""

    r: int = 1
    c: int = 1

    @property
    def each_row(self) -> bool:  # noqa: D102
        return True

    @property
    def spec(self) -> str:  # noqa: D102
        return "csr" if self.r == self.c == 1 else f"block:{self.r}x{self.c}"

    def __str__(self) -> str:  # noqa: D105
        return "row_balanced" if self.r == self.c == 1 else f"row_balanced:{self.r}x{self.c}"


@dataclass(frozen=True)
class EachRow(Pattern):
    """Another pattern, with the same number of units leaving each row of them: what the scope PerRow asks."""

    inner: Pattern

    @property
    def each_row(self) -> bool:  # noqa: D102
        return True

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return self.inner.units(shape)

    def removed(self, shape: torch.Size, sparsity: float) -> int:  # noqa: D102
        whole = self.inner.count(shape)
        return count_of(self.inner.removed(shape, sparsity) / whole, self.count(shape)) if whole else 0


@dataclass(frozen=True)
class Row(Pattern):
    """Whole rows, the weights of one output: "row". For a convolution, output channels."""

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return 1, max(1, matrix_shape(shape)[1]), 0, 0

    def __str__(self) -> str:  # noqa: D105
        return "row"


@dataclass(frozen=True)
class Column(Pattern):
    """Whole columns, the weights of one input: "column"."""

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return max(1, shape[0]), 1, 0, 0

    def __str__(self) -> str:  # noqa: D105
        return "column"


@dataclass(frozen=True)
class Channel(Pattern):
    """Input channels: shape[2:] columns together, for a linear layer one column: "channel"."""

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        return max(1, shape[0]), max(1, torch.Size(shape[2:]).numel()), 0, 0

    def __str__(self) -> str:  # noqa: D105
        return "channel"


@dataclass(frozen=True)
class Head(Pattern):
    """`dim` neighbouring rows, the outputs of one attention head: "head:64"; columns=True: its inputs."""

    dim: int
    columns: bool = False

    def __post_init__(self) -> None:  # noqa: D105
        check_int("Head", "dim", self.dim, 1)

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:  # noqa: D102
        rows, cols = matrix_shape(shape)
        return (max(1, rows), self.dim, 0, 0) if self.columns else (self.dim, max(1, cols), 0, 0)

    def check_shape(self, op: str, name: str, shape: torch.Size) -> None:  # noqa: D102
        super().check_shape(op, name, shape)
        size = matrix_shape(shape)[1 if self.columns else 0]
        if size % self.dim:
            fail(
                op, f"{name} must have a multiple of {self.dim} {'columns' if self.columns else 'rows'}", size
            )

    def __str__(self) -> str:  # noqa: D105
        return f"head:{self.dim}" + (":columns" if self.columns else "")


class _Fixed(Pattern):
    """A pattern that says which elements stay, whatever they are worth."""

    @property
    def fixed(self) -> bool:
        return True

    def units(self, shape: torch.Size) -> tuple[int, int, int, int]:
        return 1, 1, 0, 0

    @property
    def spec(self) -> str:
        return "csr"


@dataclass(frozen=True)
class Diagonal(_Fixed):
    """A band around the diagonal: (i, j) stays if |i − j| ≤ nearliness // 2. "diagonal:3"; odd only."""

    nearliness: int = 1

    def __post_init__(self) -> None:  # noqa: D105
        check_int("Diagonal", "nearliness", self.nearliness, 1)
        if self.nearliness % 2 == 0:
            fail("Diagonal", "nearliness must be odd", self.nearliness)

    def check_shape(self, op: str, name: str, shape: torch.Size) -> None:  # noqa: D102
        super().check_shape(op, name, shape)
        least = min(matrix_shape(shape))
        if self.nearliness >= 2 * least:
            fail(op, f"nearliness must be less than {2 * least} for {name}", self.nearliness)

    def mask_of_count(  # noqa: D102
        self, scores: Scores, shape: torch.Size, remove: int, previous: Mask | None = None
    ) -> Mask:
        rows, cols = matrix_shape(shape)
        apart = torch.arange(rows).unsqueeze(1) - torch.arange(cols)
        return Mask.pack(apart.abs() <= self.nearliness // 2)

    def __str__(self) -> str:  # noqa: D105
        return f"diagonal:{self.nearliness}"


@dataclass(frozen=True, eq=False)
class Custom(_Fixed):
    """A given mask, bool or 0 and 1, of the weight's shape."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:  # noqa: D105
        check_tensor("Custom", "mask", self.tensor)
        if bool(((self.tensor != 0) & (self.tensor != 1)).any()):
            fail("Custom", "mask must hold only 0 and 1", "other numbers")

    def check_shape(self, op: str, name: str, shape: torch.Size) -> None:  # noqa: D102
        super().check_shape(op, name, shape)
        if self.tensor.shape != shape:
            fail(op, f"mask must be of the shape of {name}, {tuple(shape)}", tuple(self.tensor.shape))

    def mask_of_count(  # noqa: D102
        self, scores: Scores, shape: torch.Size, remove: int, previous: Mask | None = None
    ) -> Mask:
        return Mask.pack(self.tensor.reshape(matrix_shape(shape)) != 0)

    def __str__(self) -> str:  # noqa: D105
        return "custom"


_WORDS = {
    "unstructured": Unstructured,
    "row_balanced": RowBalanced,
    "row": Row,
    "column": Column,
    "channel": Channel,
    "diagonal": Diagonal,
}
_EXAMPLES = [*_WORDS, "2:4", "block:16x16", "block:16x16+2:4", "row_balanced:4x1", "head:64", "diagonal:3"]


def parse_pattern(pattern: Any, op: str = "parse_pattern") -> Pattern:
    """A Pattern, or one of its names: "unstructured", "2:4", "block:16x16", "block:16x16+2:4".

    The others are "row_balanced", "row_balanced:4x1", "row", "column", "channel", "head:64",
    "head:64:columns" and "diagonal:3".

    Raises:
        ValueError: an unknown name; near ones are listed.
        TypeError: another kind of object.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if not isinstance(pattern, str):
        fail(op, "pattern must be a Pattern or a str", type(pattern).__name__, TypeError)
    if pattern in _WORDS:
        return _WORDS[pattern]()
    number = r"(\d+)"
    forms = [
        (rf"{number}:{number}", NM),
        (rf"block:{number}x{number}", Block),
        (rf"block:{number}x{number}\+{number}:{number}", BlockNM),
        (rf"row_balanced:{number}x{number}", RowBalanced),
        (rf"head:{number}", Head),
        (rf"head:{number}:columns", lambda dim: Head(dim, columns=True)),
        (rf"diagonal:{number}", Diagonal),
    ]
    for form, make in forms:
        if match := re.fullmatch(form, pattern):
            return make(*map(int, match.groups()))
    near = difflib.get_close_matches(pattern, _EXAMPLES, n=3, cutoff=0.3) or _EXAMPLES
    return fail(op, "pattern must be a known one", f"{pattern!r}; near names: {', '.join(near)}")
