"""Specs: what a weight is to become, as text, as a mapping or as an object; formats bring their own.

"block:16x1@0.5:bf16" is a format with its options, a density, and the dtype of stored values. register_format
in sparse_weight.py makes a kind of them known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .checks import DTYPE_NAMES, DTYPES_BY_NAME, check_density, fail
from .masks import NONZERO

if TYPE_CHECKING:
    from .sparse_weight import SparseWeight

KINDS: list[type[Spec]] = []  # of all formats, as messages list them

NUMBER = r"([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|inf|nan))"  # a density in a spec, checked by read_density
# What stands after @ where what is not zero stays: as a density it is a number only for a given weight.
KEPT = rf"{NUMBER[:-1]}|{NONZERO})"


@dataclass(frozen=True)
class Spec:
    """How a layer's weight is to become sparse: a format, its options, and often a density.

    Subclasses say how the text looks and make the weight. `dtype` is that of the stored values, None
    for the dense weight's own: "block:16x1@0.5:bf16" stores bf16 under whatever the layer computes in. With
    `rounds_x`, "block:16x1@0.5:bf16x", an x in float32 may be rounded to bfloat16 as well.
    """

    dtype: torch.dtype | None = field(default=None, kw_only=True)
    rounds_x: bool = field(default=False, kw_only=True)

    pattern: ClassVar[re.Pattern[str]]  # of the text without the dtype at its end
    example: ClassVar[str]  # for messages: "block:16x16@0.5 (block:ROWSxCOLUMNS@DENSITY)"
    keys: ClassVar[tuple[str, ...]]  # a mapping with these keys is such a spec
    may_round: ClassVar[bool] = False  # whether `rounds_x` is for this format

    # -- to be defined by a format --------------------------------------------------------------

    @classmethod
    def from_match(cls, op: str, match: re.Match[str], dtype: torch.dtype | None) -> Spec:
        """The spec of a text that `pattern` matches; ValueError for numbers that cannot be read."""
        raise NotImplementedError

    @classmethod
    def from_keys(cls, op: str, dtype: torch.dtype | None, **keys: Any) -> Spec:
        """The spec of a mapping with `keys`, whose values are not checked yet."""
        raise NotImplementedError

    @property
    def format(self) -> str:
        """The format without density and dtype: "block:16x16"."""
        raise NotImplementedError

    def why_not(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of this shape cannot have the format, or None."""
        return None

    def make(
        self, dense: torch.Tensor, *, mask: torch.Tensor | None = None, scores: torch.Tensor | None = None
    ) -> SparseWeight:
        """The weight that keeps the chosen part of a dense (N, K) tensor, bit for bit but for `dtype`."""
        raise NotImplementedError

    # -- the same for every format --------------------------------------------------------------

    @property
    def suffix(self) -> str:
        """The end of the text where values are stored in a dtype of their own: ":bf16", ":bf16x", else ""."""
        return f":{DTYPE_NAMES[self.dtype]}{'x' if self.rounds_x else ''}" if self.dtype is not None else ""

    @staticmethod
    def parse(spec: Any, op: str = "Spec.parse") -> Spec:
        """Reads "block:16x16@0.5", "csr@0.1:bf16" …, or a mapping of a spec's arguments.

        Raises ValueError for another text, key or value, TypeError for another kind of object.
        """
        if isinstance(spec, Spec):
            return spec
        if isinstance(spec, Mapping):
            return _from_mapping(op, spec)
        if not isinstance(spec, str):
            fail(op, "spec must be a str or a mapping", type(spec).__name__, TypeError)
        found = None
        for kind in KINDS:
            for text, dtype, rounds_x in _readings(spec):
                match = kind.pattern.fullmatch(text)
                if match and found is None and (kind.may_round or not rounds_x):
                    found = kind.from_match(op, match, dtype)
                    found = replace(found, rounds_x=True) if rounds_x else found
        if found is None:
            fail(op, f"spec must look like {' or '.join(kind.example for kind in KINDS)}", repr(spec))
        return found


def _readings(text: str) -> Iterable[tuple[str, torch.dtype | None, bool]]:
    """The text as a whole, and without a value dtype at its end; whether that lets x be rounded."""
    yield text, None, False
    head, _, tail = text.rpartition(":")
    if tail == "bf16x":
        yield head, torch.bfloat16, True
    if tail in DTYPES_BY_NAME and DTYPES_BY_NAME[tail].is_floating_point:
        yield head, DTYPES_BY_NAME[tail], False


def _from_mapping(op: str, spec: Mapping[str, Any]) -> Spec:
    rounds_x = spec.get("rounds_x", False)
    if type(rounds_x) is not bool:
        fail(op, "rounds_x must be a bool", type(rounds_x).__name__, TypeError)
    spec = {key: value for key, value in spec.items() if key != "rounds_x"}
    kinds = [kind for kind in KINDS if set(spec) - {"dtype"} == set(kind.keys)]
    if not kinds:
        known = " or ".join(" and ".join(kind.keys) for kind in KINDS)
        fail(op, f"spec must have the keys {known}", sorted(map(str, spec)))
    found = kinds[0].from_keys(op, **{"dtype": None, **spec})
    if not rounds_x:
        return found
    if not found.may_round or found.dtype != torch.bfloat16:
        fail(op, "rounds_x must go with blocks of dtype bfloat16", found)
    return replace(found, rounds_x=True)


def why_no_block(shape: tuple[int, int], block_shape: tuple[int, int]) -> str | None:
    """Why a matrix of this shape has no blocks of that one, or None: it is smaller than one of them."""
    if any(size < block for size, block in zip(shape, block_shape, strict=True)):
        return f"smaller than a block of {block_shape[0]}x{block_shape[1]}"
    return None


def read_density(op: str, text: str) -> float:
    """The density of a spec, for from_match."""
    try:
        density = float(text)
    except ValueError:  # dots in the wrong places
        fail(op, "spec must look like a number after @", repr(text))
    return check_density(op, density)


def read_kept(op: str, value: Any) -> float | str:
    """The density of a spec or mapping, or "nonzero"; for formats whose from_dense takes both."""
    if value == NONZERO:
        return NONZERO
    return read_density(op, value) if isinstance(value, str) else check_density(op, value)


def kept_text(density: float | str) -> str:
    """What a spec has after @."""
    return density if isinstance(density, str) else f"{density:g}"
