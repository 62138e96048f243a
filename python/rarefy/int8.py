"""Int8Weight: blocks of int8 with a scale for each row, and Int8Spec, "block:32x1@0.5:int8" and ":w8"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import is_grad_enabled, nn

from . import _load
from ._torch_private import PLAIN, eager
from .activations import activate
from .checks import (
    DTYPE_NAMES,
    check_block_shape,
    check_devices,
    check_tensor,
    fail,
    first_position,
)
from .derived import FEW_TOKENS, Derived, Kept, capturing
from .int8_ops import int8_linear, run_eagerly
from .nested import linear_of_nested
from .pattern import BsrPattern
from .pattern_weight import PatternWeight, meets_nothing
from .sparse_weight import check_metadata, register_format
from .spec import KEPT, Spec, kept_text, read_kept, why_no_block
from .values import choose_from_dense, counted, init_bounds

_sizes, _prepare, _pack = map(_load.op, ("int8_derived_sizes", "int8_prepare", "int8_pack"))
_packs_for_few = _load.op("_int8_packs_for_few")
_READS = (FEW_TOKENS, 8, 12)  # up to how many tokens calls may read int8 as it is (linear_few.cc)

X_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEVELS, _SMALLEST = 127, 2.0**-100  # as in src/core/quantize.h
_ACTIVATIONS = {True: "int8", False: "float"}  # in files


class Int8Weight(PatternWeight):
    """A frozen weight W of shape (N, K) in blocks of R × C: W[n, k] = scales[n] · values, int8.

    Args:
        values: (nnzb, R, C) int8 in −127 … 127, as for BsrWeight. They have no gradient.
        scales: (N,) float32, finite and above 0; 1 for a row of zeros.
        crow_indices, col_indices, shape, block_shape: as for BsrWeight.
        x_dtype: the dtype of x and of the result: float32, bfloat16 or float16.
        dynamic: round each token of x to int8, too, with a scale of its own, the largest |x| / 127, and sum
            in int32, exactly; a token with a NaN or an infinity is then all NaN. False: x stays as it is
            ("weight-only"). The attribute may be changed.

    `to_dense()` is scales · values, rounded to x_dtype. The gradient of x is that of this matrix, in both
    modes. `.half()`, `.bfloat16()` … change x_dtype; values and scales stay.

    Raises:
        ValueError: what BsrWeight refuses; values of −128, scales that are no positive numbers, with the
            position; a wrong number of scales.
        TypeError: a wrong dtype, device or kind of object.
    """

    format = "int8"
    pieces = ("values", "scales", "crow_indices", "col_indices")
    computes_in_x_dtype = True

    scales: torch.Tensor

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        crow_indices: torch.Tensor,
        col_indices: torch.Tensor,
        *,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
        x_dtype: torch.dtype | None = torch.float32,
        dynamic: bool | None = True,
    ) -> None:
        op = "Int8Weight"
        check_tensor(op, "values", values)
        check_tensor(op, "scales", scales)
        indices = {"crow_indices": crow_indices, "col_indices": col_indices}
        check_devices(op, values, scales=scales, **indices)
        pattern = BsrPattern(crow_indices, col_indices, shape=shape, block_shape=block_shape, op=op)
        self._check_values(op, values, pattern)
        check_scales(op, "scales", scales, pattern.shape[0])
        if x_dtype is not None and x_dtype not in X_DTYPES:
            fail(op, "x_dtype must be float32, bfloat16 or float16", x_dtype, TypeError)
        self._take(values, scales, pattern, x_dtype, dynamic)

    def _take(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        pattern: BsrPattern,
        x_dtype: torch.dtype | None,
        dynamic: bool | None,
    ) -> None:
        self._init(values, pattern, x_dtype)
        self.register_buffer("scales", counted(scales.contiguous()))
        self._dynamic = dynamic

    def _check_values(self, op: str, values: Any, pattern: BsrPattern) -> None:
        super()._check_values(op, values, pattern)
        check_int8(op, "values", values)

    @property
    def dynamic(self) -> bool:
        """Whether x is rounded to int8, too."""
        return self._dynamic is not False

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        self._dynamic, self._kept = bool(value), {}

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
        dynamic: bool = True,
    ) -> Int8Weight:
        """Rounds the chosen blocks of a dense (N, K) tensor to int8, half to even.

        The scale of a row is its largest stored |W| / 127, and 1 for a row of zeros. The other arguments are
        those of BsrWeight.from_dense and of the class. Raises as they do; ValueError for NaN and infinity.
        """
        op = "Int8Weight.from_dense"
        block_shape = check_block_shape(op, block_shape)
        values, pattern = choose_from_dense(op, dense, block_shape, mask, density, scores)
        if values.dtype not in X_DTYPES:
            fail(op, "dense must be float32, bfloat16 or float16", values.dtype, TypeError)
        weight = cls.__new__(cls)
        weight._take(*_rounded(op, values.float(), pattern), pattern, values.dtype, dynamic)
        return weight

    @classmethod
    def from_pattern(
        cls, values: torch.Tensor, pattern: BsrPattern, *, x_dtype: torch.dtype | None = None
    ) -> Int8Weight:
        """Float values on an existing pattern, which is shared, rounded as from_dense does."""
        op = "Int8Weight.from_pattern"
        weight = cls.__new__(cls)
        PatternWeight._check_values(weight, op, values, pattern)
        x_dtype = values.dtype if x_dtype is None else x_dtype
        if x_dtype not in X_DTYPES:
            fail(op, "x_dtype must be float32, bfloat16 or float16", x_dtype, TypeError)
        weight._take(*_rounded(op, values.detach().float(), pattern), pattern, x_dtype, True)
        return weight

    # -- use ------------------------------------------------------------------------------------

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        """Returns x Wᵀ + bias, as F.linear does: x of shape (…, K) gives (…, N); or an activation of it."""
        values = self._parameters.get("values")
        if (  # as in PatternWeight: what a small layer meets, in 5 µs less
            activation is None
            and meets_nothing(self, x, values, bias)
            and not (is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
            and (kept := self._kept.get(x.dtype)) is not None
        ):
            if kept.few is not None and x.numel() <= kept.few_inputs:
                call = kept.few
            else:
                call = kept.call or kept.call_with(self._pattern, values, values)
            return run_eagerly(x, values, self._buffers["scales"], bias, self._dynamic is not False, call)
        if getattr(x, "is_nested", False):
            y = linear_of_nested(self, x, bias)
            return y if activation is None else activate(y, activation)
        plan, values = self.pattern.plan, self.values
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        return int8_linear(
            x,
            values,
            self.scales,
            plan,
            bias,
            *self.shape,
            self.dynamic,
            *self.derived(x),
            activation=activation,
        )

    def to_dense(self) -> torch.Tensor:
        """The (N, K) tensor of scales · values, in x_dtype, zeros where nothing is stored; no gradient."""
        dense = super().to_dense().float() * self.scales[:, None]
        return dense.to(self.x_dtype or torch.float32)

    def stored_as(self, dtype: torch.dtype | None) -> Int8Weight:
        """This weight: its values are int8."""
        if dtype not in (None, torch.int8):
            fail("Int8Weight.stored_as", "dtype must be int8", dtype, TypeError)
        return self

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values anew: uniform in ±1/√f, f the stored inputs of the row; see BlockSparseLinear."""
        if self.values.is_meta:
            return
        bounds = init_bounds(self.block_mask(), self.shape[1], self.block_shape[1]).float()
        rows = (bounds / _LEVELS).repeat_interleave(self.block_shape[0])[: self.shape[0]]
        self.scales.copy_(torch.where(rows > 0, rows, 1))
        self.values.random_(-_LEVELS, _LEVELS + 1, generator=generator)
        self.zero_padding_()

    @property
    def core_dtype(self) -> str:
        """How the core's problems call values with scales."""
        return "i8 dynamic" if self.dynamic else "i8 scaled"

    def derived(self, x: torch.Tensor) -> Derived | tuple[()]:
        """As other weights'; nothing for a few tokens whose kernel reads values: none are packed then."""
        if type(x) in PLAIN and x.numel() <= _READS[-1] * self.shape[1] and eager():
            kept = self._kept.get(x.dtype) or self._ask(x.dtype)
            if kept is not None and kept.few is not None and x.numel() <= kept.few_inputs:
                return ()
        return super().derived(x)

    def _ask(self, dtype: torch.dtype) -> Kept | None:
        values = self._parameters.get("values")
        if type(values) is not nn.Parameter or values.is_meta or capturing(values) or dtype not in X_DTYPES:
            return None
        kept = self._kept[dtype] = _Int8Kept(self, dtype)
        return kept

    # -- moving and copying ---------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Weight:
        super()._apply(fn, recurse)  # which leaves buffers alone
        device, scales = self.values.device, self._buffers["scales"]
        if scales.device != device:
            new = torch.ones_like(scales, device=device) if scales.is_meta else scales.to(device)
            self._buffers["scales"] = counted(new)
        return self

    def is_tied_to(self, other: Any) -> bool:
        """Whether both are one weight: the same module, or the same Parameter, pattern and scales."""
        if self is other or not super().is_tied_to(other):
            return self is other
        return self.dynamic == other.dynamic and torch.equal(self.scales, other.scales)

    @torch.no_grad()
    def assign_(self, other: Int8Weight) -> None:
        """Takes over values, scales, pattern and mode of a weight of the same class and shape."""
        super().assign_(other)
        self._buffers["scales"] = counted(other.scales.to(self.values.device).clone())
        if other._dynamic is not None:
            self._dynamic = other._dynamic

    def check_state(self, op: str, state_dict: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Raises unless the tensors of a state_dict fit; see PatternWeight."""
        super().check_state(op, state_dict, prefix)
        if (values := state_dict.get(prefix + "values")) is not None:
            check_int8(op, prefix + "values", values)
        if (scales := state_dict.get(prefix + "scales")) is not None:
            check_tensor(op, prefix + "scales", scales)
            check_scales(op, prefix + "scales", scales, self.shape[0])

    # -- files and text -------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """shape, block_shape, nnzb, dtype, x_dtype, and activations: "int8" (dynamic) or "float"."""
        return {
            "shape": list(self.shape),
            "block_shape": list(self.block_shape),
            "nnzb": self.nnzb,
            "dtype": "i8",
            "x_dtype": DTYPE_NAMES[self.x_dtype or torch.float32],
            "activations": _ACTIVATIONS[self.dynamic],
        }

    @classmethod
    def from_pieces(cls, pieces: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Int8Weight:
        """The weight of a file's tensors; see SparseWeight."""
        op = "Int8Weight"
        entry = dict(metadata) if isinstance(metadata, Mapping) else metadata
        from_file = isinstance(entry, dict) and "activations" in entry
        activations = entry.pop("activations") if from_file else None
        entry = check_metadata(op, entry, "shape", "block_shape", "nnzb", "dtype")
        if from_file and activations not in _ACTIVATIONS.values():
            fail(op, "activations in the metadata must be int8 or float", repr(activations))
        if from_file and "x_dtype" not in entry:
            fail(op, "the metadata must have the key x_dtype", sorted(metadata))
        nnzb, dtype = entry.pop("nnzb"), entry.pop("dtype")
        if dtype != torch.int8:
            fail(op, "dtype in the metadata must be i8", DTYPE_NAMES[dtype])
        dynamic = None if activations is None else activations == "int8"
        weight = cls(**pieces, **{"x_dtype": None, **entry}, dynamic=dynamic)
        if weight.nnzb != nnzb:
            fail(op, f"there must be {nnzb} blocks, as the metadata says", weight.nnzb)
        return weight

    @classmethod
    def infer(cls, pieces: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, Any] | None:
        """Metadata of int8 values with 3 dimensions beside scales; x_dtype and mode stay open."""
        values = pieces.get("values")
        if "scales" not in pieces or values is None or values.ndim != 3 or values.dtype != torch.int8:
            return None
        nnzb, *block_shape = values.shape
        return {"shape": list(shape), "block_shape": block_shape, "nnzb": nnzb, "dtype": "i8"}

    def spec_format(self) -> str:
        """Such as "block:32x1:int8"."""
        return f"block:{self.block_shape[0]}x{self.block_shape[1]}:{'int8' if self.dynamic else 'w8'}"

    def extra_repr(self) -> str:
        """Shapes, density and mode."""
        return (
            f"shape={tuple(self.shape)}, block_shape={tuple(self.block_shape)}, density={self.density:.4g}, "
            f"nnzb={self.nnzb}, dynamic={self.dynamic}"
        )


class _Int8Kept(Kept):
    """What is derived from an Int8Weight for x of one dtype.

    `few`: what calls with up to `few_inputs` elements of x have, whose kernel reads int8 (linear_few.cc);
    None if they use this.
    """

    __slots__ = ("few", "few_inputs")

    def __init__(self, weight: Int8Weight, x_dtype: torch.dtype) -> None:
        pattern, values, scales = weight.pattern, weight.values.detach(), weight.scales
        n, k = pattern.shape
        with torch.inference_mode(False), torch.no_grad():
            fixed = (n, k, weight.dynamic, x_dtype)
            self._ask(pattern, _sizes, _prepare, lambda plan: (values, scales, plan, *fixed))
            most = 0  # tokens
            for tokens in _READS if self.packed_bytes else ():
                if not _packs_for_few(values, scales, pattern.plan, *fixed, tokens):
                    most = tokens
        self.few, self.few_inputs = ((pattern.plan, n, k) if most else None), most * k
        self._arguments = (scales, pattern.plan, self.prepared, *fixed)

    def _at(self, parameter: torch.Tensor) -> tuple[int, ...]:
        scales = self._arguments[0]
        return (*super()._at(parameter), -1 if scales.is_inference() else scales._version)

    def _make(self, values: torch.Tensor, gradient: bool) -> torch.Tensor:
        return _pack(values, *self._arguments)


def _rounded(op: str, values: torch.Tensor, pattern: BsrPattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Float blocks as int8, and the scale of each row of the matrix."""
    rows, (block_rows, block_cols) = pattern.block_rows(), pattern.block_shape
    bad = ~values.isfinite()
    if bool(bad.any()):
        e, r, c = first_position(bad)
        at = int(rows[e]) * block_rows + r, int(pattern.indices()[1][e]) * block_cols + c
        fail(op, "stored values must be finite", f"W[{at[0]}, {at[1]}]={values[e, r, c].item()}")
    grid_rows, grid_cols = pattern.grid
    most = values.new_zeros((grid_rows * grid_cols, block_rows))
    if values.numel():
        most.index_copy_(0, pattern.positions(), values.abs().amax(2))
    most = most.view(grid_rows, grid_cols, block_rows)
    most = most.amax(1) if grid_cols else most.new_zeros(grid_rows, block_rows)
    scales = most.clamp(min=_SMALLEST) / _LEVELS
    scales = torch.where(most > 0, scales, 1)
    rounded = (values / scales[rows][:, :, None]).round_().clamp_(-_LEVELS, _LEVELS)
    return rounded.to(torch.int8), scales.flatten()[: pattern.shape[0]].clone()


def check_int8(op: str, name: str, values: torch.Tensor) -> None:
    """Raises unless values are int8 in −127 … 127."""
    if values.dtype != torch.int8:
        fail(op, f"{name} must be int8", str(values.dtype).removeprefix("torch."), TypeError)
    if values.is_meta or not values.numel():
        return
    bad = values.detach() == -128
    if bool(bad.any()):
        at = ", ".join(map(str, first_position(bad)))
        fail(op, f"{name} must be in [-127, 127]", f"{name}[{at}]=-128")


def check_scales(op: str, name: str, scales: torch.Tensor, rows: int) -> None:
    """Raises unless scales are (rows,) float32, finite and above 0."""
    if scales.dtype != torch.float32:
        fail(op, f"{name} must be float32", str(scales.dtype).removeprefix("torch."), TypeError)
    if tuple(scales.shape) != (rows,):
        fail(op, f"{name} must be of shape ({rows},), one for each row", tuple(scales.shape))
    if scales.is_meta:
        return
    bad = ~(scales.isfinite() & (scales > 0))
    if bool(bad.any()):
        (at,) = first_position(bad)
        fail(op, f"{name} must be finite and above 0", f"{name}[{at}]={scales[at].item()}")


@dataclass(frozen=True)
class Int8Spec(Spec):
    """What a layer becomes: blocks of int8 at `density`, with x rounded too ("int8") or as it is ("w8").

    `block_shape` and `density` as in BlockSpec, with its errors; `dtype` is None, as int8 says it.
    """

    block_shape: tuple[int, int]
    density: float | str
    int8: str = "int8"

    pattern: ClassVar = re.compile(rf"block:([0-9]+)x([0-9]+)@{KEPT}:(int8|w8)")
    example: ClassVar = '"block:32x1@0.5:int8" (int8 rounds x as well, w8 the weight alone)'
    keys: ClassVar = ("block_shape", "density", "int8")

    @classmethod
    def from_match(cls, op: str, match: re.Match[str], dtype: torch.dtype | None) -> Int8Spec:
        """Reads "block:32x1@0.5:int8"."""
        if dtype is not None:
            fail(op, f"spec must look like {cls.example}", repr(f"{match[0]}:{DTYPE_NAMES[dtype]}"))
        density = read_kept(op, match[3])
        return cls(check_block_shape(op, (int(match[1]), int(match[2]))), density, match[4])

    @classmethod
    def from_keys(
        cls, op: str, dtype: torch.dtype | None, block_shape: Any, density: Any, int8: Any
    ) -> Int8Spec:
        """Reads {"block_shape": (32, 1), "density": 0.5, "int8": "w8"}."""
        if dtype not in (None, torch.int8):
            fail(op, "dtype must be int8 or left out", dtype, TypeError)
        if int8 not in ("int8", "w8"):
            fail(op, 'int8 must be "int8" or "w8"', repr(int8))
        return cls(check_block_shape(op, block_shape), read_kept(op, density), int8)

    def __str__(self) -> str:  # noqa: D105
        return f"block:{self.block_shape[0]}x{self.block_shape[1]}@{kept_text(self.density)}:{self.int8}"

    @property
    def format(self) -> str:
        """The format without density: "block:32x1:int8"."""
        return f"block:{self.block_shape[0]}x{self.block_shape[1]}:{self.int8}"

    def why_not(self, shape: tuple[int, int]) -> str | None:
        """A block must not be larger than the matrix."""
        return why_no_block(shape, self.block_shape)

    def make(
        self, dense: torch.Tensor, *, mask: torch.Tensor | None = None, scores: torch.Tensor | None = None
    ) -> Int8Weight:
        """Int8Weight.from_dense."""
        density = self.density if mask is None else None
        return Int8Weight.from_dense(
            dense,
            block_shape=self.block_shape,
            mask=mask,
            density=density,
            scores=scores,
            dynamic=self.int8 == "int8",
        )


register_format(Int8Weight, Int8Spec)
