"""BitmapWeight: single weights and a bit for each element, "bitmap@0.5" and "2:4", for few tokens.

Two of each four, or half of all, take 2.125 bytes a weight in float32 where CSR takes 4 and dense 4.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import ops
from .activations import activate
from .bitmap_ops import bitmap_linear
from .bitmap_pattern import BitmapPattern
from .checks import (
    DTYPE_NAMES,
    check_devices,
    check_dtype,
    check_tensor,
    fail,
    first_position,
)
from .derived import reads_itself
from .elements import ElementsSpec, StoredElements
from .masks import NONZERO, beyond_two_of_four, choose_blocks, groups_of_four
from .nested import linear_of_nested
from .pattern import digest
from .pattern_change import PatternChange
from .sparse_weight import SparseWeight, register_format, swap_data
from .spec import KEPT, Spec
from .values import check_dense, draw_uniform_, new_values


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _digest(bits: Tensor) -> Tensor:
    return digest(torch.tensor(bits.shape, device=bits.device), bits.flatten())


class BitmapWeight(StoredElements, SparseWeight):
    """A weight W of shape (N, K) = (out_features, in_features): its stored elements, and a bit for each.

    Args:
        values: (nnz,), float64, float32, bfloat16 or float16, by row and in it by column. A Parameter is used
            as it is; another tensor becomes one, with the same memory.
        bitmap: (N, ⌈K/8⌉) uint8: bit k % 8 of byte k / 8 of row n says whether W[n, k] is stored.
        shape: (N, K).
        x_dtype: the dtype of x and of the result, if not that of the values.

    For densities from about 0.1 up, N:M patterns among them, and for few tokens, where reading the weight is
    the work. Products are kernels' on the CPU. Gradients, and all products on a GPU, are those of 1×1 blocks
    on the same values: the first of them makes their indices and plan, 12 bytes for each stored element,
    and keeps them. `pattern` is the truth; the buffer `bitmap` is its copy, which is saved. A whole
    one with its digest, as DistributedDataParallel brings it, is taken over, and others are put back.

    Raises:
        ValueError: another shape or number of values, bits past the last column, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """

    format = "bitmap"
    pieces = ("values", "bitmap")
    reserved = ("bitmap",)

    values: nn.Parameter
    bitmap: Tensor
    _pattern_known: bool = True  # not after the meta device: the first pattern that is loaded is taken over

    def __init__(
        self, values: Tensor, bitmap: Tensor, *, shape: tuple[int, int], x_dtype: torch.dtype | None = None
    ) -> None:
        op = "BitmapWeight"
        check_tensor(op, "values", values)
        check_tensor(op, "bitmap", bitmap)
        check_devices(op, values, bitmap=bitmap)
        self._init(op, values, BitmapPattern(bitmap, shape=shape, op=op), x_dtype)

    def _init(
        self, op: str, values: Tensor, pattern: BitmapPattern, x_dtype: torch.dtype | None = None
    ) -> None:
        check_dtype(op, "values", values.dtype)
        if not values.dtype.is_floating_point:
            fail(op, "values must be floating point", values.dtype, TypeError)
        if tuple(values.shape) != (pattern.nnz,):
            fail(op, f"values must be of shape ({pattern.nnz},), as the bitmap says", tuple(values.shape))
        if not values.is_contiguous():
            fail(op, "values must be contiguous", f"strides {values.stride()}")
        super().__init__()
        self.shape = pattern.shape
        if x_dtype is not None and x_dtype != values.dtype:
            self.x_dtype = x_dtype
        self.values = values if isinstance(values, nn.Parameter) else new_values(values, True)
        self._set_pattern(pattern)

    # -- construction ---------------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        *,
        mask: Tensor | None = None,
        density: float | str | None = None,
        scores: Tensor | None = None,
    ) -> BitmapWeight:
        """Stores the chosen elements of a dense (N, K) tensor, bit for bit; arguments as CsrWeight's."""
        op = "BitmapWeight.from_dense"
        check_dense(op, dense)
        return cls._of_mask(op, dense, choose_blocks(op, dense, (1, 1), mask, density, scores))

    @classmethod
    def _of_mask(cls, op: str, dense: Tensor, mask: Tensor) -> BitmapWeight:
        weight = cls.__new__(cls)
        weight._init(op, dense.detach()[mask].contiguous(), BitmapPattern.from_mask(mask))
        return weight

    # -- use ------------------------------------------------------------------------------------

    @property
    def pattern(self) -> BitmapPattern:
        """Which elements are stored."""
        if not is_compiling():
            self._settle()
        return self._pattern

    @property
    def nnz(self) -> int:
        """How many elements are stored."""
        return self._pattern.nnz

    @property
    def density(self) -> float:
        """Stored elements / all; 0 for an empty matrix."""
        return self.nnz / self.numel() if self.numel() else 0.0

    def linear(self, x: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
        """Returns x Wᵀ + bias, as F.linear does: x of shape (…, K) gives (…, N); or an activation of it."""
        if getattr(x, "is_nested", False):
            y = linear_of_nested(self, x, bias)
            return y if activation is None else activate(y, activation)
        pattern, values = self.pattern, self.values
        on_cpu = values.device.type in ("cpu", "meta")
        if self.x_dtype is not None and not reads_itself(values, self.x_dtype):
            values = values.to(self.x_dtype)
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        tracked = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, values, bias)
        )
        blocks = pattern.blocks(values.device).plan if tracked or not on_cpu else None
        if on_cpu:
            return bitmap_linear(x, values, pattern.plan, bias, *self.shape, blocks, activation)
        return ops.bsr_linear(x, values.view(-1, 1, 1), blocks, bias, *self.shape, activation=activation)

    def to_dense(self) -> Tensor:
        """The (N, K) tensor with zeros for the elements that are not stored; differentiable, exact."""
        mask = self.pattern.mask().to(self.values.device)
        return self.values.new_zeros(tuple(self.shape)).masked_scatter(mask, self.values)

    def stored_as(self, dtype: torch.dtype | None) -> BitmapWeight:
        """This weight with values stored in a dtype, x and results staying as they are; None: no change."""
        if dtype is not None and dtype != self.dtype:
            self.x_dtype = self.dtype if self.x_dtype is None else self.x_dtype
            self.values = new_values(self.values.detach().to(dtype), self.values.requires_grad)
        return self

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values anew: uniform in ±1/√f, f the stored inputs of the row; see BlockSparseLinear."""
        if self.values.is_meta:
            return
        counts = self.pattern.counts()
        bounds = counts.double().clamp(min=1).rsqrt().repeat_interleave(counts)
        draw_uniform_(self.values, 1, generator)
        self.values.mul_(bounds.to(self.values))

    @property
    def core_dtype(self) -> str:
        """How the core's problems call such values."""
        return f"{DTYPE_NAMES[self.dtype]} {'2:4' if self._pattern.two_of_four else 'bitmap'}"

    @property
    def block_shape(self) -> tuple[int, int]:
        """(1, 1)."""
        return (1, 1)

    @property
    def nnzb(self) -> int:
        """How many elements are stored."""
        return self.nnz

    # -- the pattern and its copy ---------------------------------------------------------------

    def _set_pattern(self, pattern: BitmapPattern) -> None:
        """Makes `pattern` the truth, with a new copy of its bits as the buffer."""
        self._pattern = pattern
        device = self.values.device
        with torch.inference_mode(False):
            bits = pattern.bits.to(device, copy=True)
            self.register_buffer("bitmap", bits)
            self.register_buffer("bitmap_digest", _digest(pattern.bits).to(device), persistent=False)
        self._seen = (bits, _version(bits))

    def _settle(self) -> None:
        """Looks at the buffer if it was written to since the last look; see the class."""
        bits = self._buffers["bitmap"]
        seen, version = self._seen
        if bits is seen and _version(bits) == version:
            return
        if type(bits) is not Tensor or bits.is_meta:
            return  # a tracer's stand-in
        if bits.shape != self._pattern.bits.shape or not torch.equal(bits.cpu(), self._pattern.bits):
            if torch.equal(_digest(bits), self._buffers["bitmap_digest"].to(bits.device)):
                self._pattern = BitmapPattern(bits, shape=tuple(self.shape), op=type(self).__name__)
            else:
                self._set_pattern(self._pattern)
                text = f"[{type(self).__name__}] bitmap was written to and is put back: make another weight"
                warnings.warn(text, stacklevel=4)
                return
        self._seen = (bits, _version(bits))

    def _apply(self, fn: Any, recurse: bool = True) -> BitmapWeight:
        # `fn` is for values; the bits only follow the device.
        self._settle()
        buffers, before, device = self._buffers, self.values.dtype, self.values.device
        self._buffers = {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = buffers
        self._follow_x_dtype(fn, before, device)
        if self.values.device != device:
            self._pattern_known = self._pattern_known and not self.values.is_meta
            self._set_pattern(self._pattern)
        return self

    def is_tied_to(self, other: SparseWeight) -> bool:
        """Whether both are one weight: the same module, or the same Parameter on equal patterns."""
        if self is other:
            return True
        return type(self) is type(other) and self.values is other.values and self.pattern == other.pattern

    @torch.no_grad()
    def assign_(self, other: BitmapWeight) -> None:
        """Takes over values and pattern of a weight of the same shape; the Parameter stays."""
        pattern, theirs = other.pattern, other.values.detach()
        same = (self.values.shape, self.dtype) == (theirs.shape, theirs.dtype) and not self.values.is_meta
        self.values = self.values.copy_(theirs) if same else swap_data(self.values, theirs)
        self._set_pattern(pattern)
        self.x_dtype, self._pattern_known = other.x_dtype, other._pattern_known

    def __getstate__(self) -> dict[str, Any]:  # noqa: D105
        self._settle()
        state = {key: value for key, value in self.__dict__.items() if key != "_seen"}
        return state | {"_buffers": {}}  # made of the pattern again

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a pickle or a copy in."""
        super().__setstate__(state)
        self._set_pattern(self._pattern)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not is_compiling():
            self._settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def check_state(self, op: str, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Raises unless the tensors of a state_dict fit: ValueError for another pattern than this one."""
        self._read_state(op, state_dict, prefix)

    def _read_state(self, op: str, state_dict: Mapping[str, Tensor], prefix: str) -> BitmapPattern | None:
        """The pattern that a state_dict brings, None for the present one, after all checks."""
        own, pattern = self.pattern, None
        advice = "rarefy.load_state_dict(model, state_dict) takes a pattern over"
        bits, values = (state_dict.get(prefix + piece) for piece in ("bitmap", "values"))
        if bits is not None:
            check_tensor(op, f"{prefix}bitmap", bits)
            if bits.shape != own.bits.shape:
                requirement = f"{prefix}bitmap must be of shape {tuple(own.bits.shape)}"
                fail(op, requirement, tuple(bits.shape))
            same = bits.is_meta or (bits.dtype == own.bits.dtype and torch.equal(bits.cpu(), own.bits))
            if not same and self._pattern_known and self.strict_pattern:
                fail(op, f"{prefix}bitmap must be that of this module's pattern ({advice})", "another")
            pattern = None if same else BitmapPattern(bits, shape=tuple(self.shape), op=op)
        if values is not None:
            check_tensor(op, f"{prefix}values", values)
            expected = ((pattern or own).nnz,)
            if tuple(values.shape) != expected:
                fail(op, f"{prefix}values must be of shape {expected} ({advice})", tuple(values.shape))
        elif pattern is not None:
            fail(op, f"{prefix}values must come with another pattern", "none")
        return pattern

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        pattern = self._read_state(f"{type(self).__name__}.load_state_dict", state_dict, prefix)
        if not self.values.is_meta or local_metadata.get("assign_to_params_buffers", False):
            if pattern is not None:
                self._take_over(pattern)
            self._pattern_known = self._pattern_known or prefix + "bitmap" in state_dict
        # The pattern holds the bits now: the buffer takes the place of the one that came.
        state = dict(state_dict)
        state |= {prefix + "bitmap": self._buffers["bitmap"]} if prefix + "bitmap" in state_dict else {}
        super()._load_from_state_dict(state, prefix, local_metadata, *args)
        bits = self._buffers["bitmap"]
        if bits.device != self.values.device:
            self._set_pattern(self._pattern)
        else:
            self._seen = (bits, _version(bits))

    def _take_over(self, pattern: BitmapPattern) -> None:
        """Another pattern, whose values are about to come: the Parameter stays, its gradient moves along."""
        if self.values.is_meta:
            self.values = swap_data(self.values, self.values.new_empty(pattern.nnz))
        else:
            device = self.values.device
            PatternChange(self._pattern.blocks(device), pattern.blocks(device)).apply(self.values, None)
        self._set_pattern(pattern)

    # -- text -------------------------------------------------------------------------

    def spec_format(self) -> str:
        """Return "2:4" where exactly two of each four are stored, else "bitmap"."""
        return "2:4" if self._pattern.two_of_four else "bitmap"


class BitmapSpec(ElementsSpec):
    """What a layer becomes: the `density` of single elements that matter most, with a bit for each.

    `dtype` as in Spec. ValueError for a density outside [0, 1] (or "nonzero"), where it is read and where a
    weight is made.
    """

    weight: ClassVar = BitmapWeight
    pattern: ClassVar = re.compile(rf"bitmap@{KEPT}")
    example: ClassVar = '"bitmap@0.5" (for few tokens)'
    keys: ClassVar = ("bitmap_density",)


@dataclass(frozen=True)
class TwoOfFourSpec(Spec):
    """What a layer becomes: of each four neighbours in a row the two that matter most, as a bitmap.

    With `nonzero` a weight must have them already: more than two in a group that are not zero are an error.
    A last group of fewer than four keeps at most two.
    """

    nonzero: bool = False

    pattern: ClassVar = re.compile(rf"2:4(@{NONZERO})?")
    example: ClassVar = '"2:4" or "2:4@nonzero"'
    keys: ClassVar = ("two_of_four",)

    @classmethod
    def from_match(cls, op: str, match: re.Match[str], dtype: torch.dtype | None) -> TwoOfFourSpec:
        """Reads "2:4" and "2:4@nonzero"."""
        return cls(match[1] is not None, dtype=dtype)

    @classmethod
    def from_keys(cls, op: str, dtype: torch.dtype | None, two_of_four: Any) -> TwoOfFourSpec:
        """Reads {"two_of_four": True} and {"two_of_four": "nonzero"}."""
        if two_of_four not in (True, NONZERO):
            fail(op, f'two_of_four must be True or "{NONZERO}"', repr(two_of_four))
        return cls(two_of_four == NONZERO, dtype=dtype)

    def __str__(self) -> str:  # noqa: D105
        return f"2:4{f'@{NONZERO}' if self.nonzero else ''}{self.suffix}"

    @property
    def format(self) -> str:
        """Always "2:4"."""
        return "2:4"

    def make(
        self, dense: Tensor, *, mask: Tensor | None = None, scores: Tensor | None = None
    ) -> BitmapWeight:
        """The two of each four of largest magnitude, or largest score; ties keep the earlier. Or a mask's."""
        op = "TwoOfFourSpec.make"
        check_dense(op, dense)
        if scores is not None:
            check_tensor(op, "scores", scores)
            if self.nonzero and mask is None:
                fail(op, "scores rank what 2:4 keeps, not what 2:4@nonzero stores", "scores")
        rank = dense.detach().abs() if scores is None else scores.detach().to(dense.device)
        if mask is not None:
            kept = choose_blocks(op, dense, (1, 1), mask, None, None)
            _check_groups(op, kept, "mask")
            return BitmapWeight._of_mask(op, dense, kept).stored_as(self.dtype)
        if tuple(rank.shape) != tuple(dense.shape):
            fail(op, f"scores must be of shape {tuple(dense.shape)}", tuple(rank.shape))
        if self.nonzero:
            _check_groups(op, dense != 0, "a weight for 2:4@nonzero")
        return BitmapWeight._of_mask(op, dense, _two_of_four(rank)).stored_as(self.dtype)


def _check_groups(op: str, kept: Tensor, what: str) -> None:
    many = beyond_two_of_four(kept)
    if bool(many.any()):
        row, group = first_position(many)
        fail(op, f"{what} must have at most two of each four", f"more in row {row}, columns from {4 * group}")


def _two_of_four(rank: Tensor) -> Tensor:
    """The mask of the two highest of each four; ties keep the earlier, NaN is highest."""
    order = (
        groups_of_four(rank.double(), -torch.inf).sort(dim=2, descending=True, stable=True).indices[..., :2]
    )
    kept = torch.zeros((*order.shape[:2], 4), dtype=torch.bool, device=rank.device).scatter(2, order, True)
    return kept.flatten(1)[:, : rank.shape[1]]


register_format(BitmapWeight, BitmapSpec)
register_format(BitmapWeight, TwoOfFourSpec)
