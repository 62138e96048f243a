"""What kernels derive from a weight, beyond its plan: asked for, made and kept for one weight and dtype of x.

`prepared` follows from the pattern, which keeps it; `packed` from the values too, and is kept with the data
pointer and version that it was made of. Both are never saved. One of each serves all products and any number
of tokens: a kernel that they are not for ignores them. `packed` is linear's; on a GPU, where calls that
record a gradient of x meet values that stay, grad_input's lies behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import _load
from ._torch_private import PLAIN, in_autocast, raw_stream
from .log import logger

Derived = tuple[Tensor | None, Tensor | None, int]  # prepared, packed, key: the last arguments of a product

TF32 = "tf32"  # what is kept for float32 that may be rounded lies beside what is kept for float32

FEW_TOKENS = 4  # up to which kernels of their own read a weight (kFewTokens)
_WORTH = 4  # products with a few tokens that gain what packing their matrix costs

_sizes, _prepare, _pack = map(_load.op, ("bsr_derived_sizes", "bsr_prepare", "bsr_pack"))


def is_few(x: Tensor, in_features: int) -> bool:
    """Whether x has so few tokens."""
    return x.numel() <= FEW_TOKENS * in_features


class Kept:
    """What is derived from one weight for x of one dtype."""

    __slots__ = (
        "_arguments",
        "_held",
        "_made",
        "_packed",
        "_packs_in_calls",
        "_uses",
        "call",
        "gradient_bytes",
        "key",
        "may_round",
        "packed_bytes",
        "prepared",
    )

    def __init__(
        self,
        pattern: Any,
        values: Tensor,
        x_dtype: torch.dtype,
        stored: bool = True,
        tf32: bool = False,
        few: bool = False,
    ) -> None:
        """Asks what the best kernel wants and prepares; `values` as (nnzb, R, C). Packs nothing yet.

        With `stored` False the product does not read values as they are but cast to x_dtype in each call.
        With `tf32` calls that are given this may round float32 to it. `few`: for a few tokens alone, of CSR
        on the CPU, which takes no more than its row plan; values are packed at once, and no more after they
        changed too often.
        """
        n, k = pattern.shape
        with torch.inference_mode(False), torch.no_grad():
            if not stored:
                values = torch.empty_like(values, dtype=x_dtype)
            tokens = (1,) if few else ()
            self._ask(
                pattern, _sizes, _prepare, lambda plan: (values, plan, n, k, x_dtype, tf32, *tokens), stored
            )
        packs = self.packed_bytes or self.gradient_bytes
        plan = (pattern.row_plan if few else pattern.plan) if packs else None
        self._arguments = (plan, self.prepared, n, k, x_dtype, tf32, *tokens)
        self.may_round = self._packs_in_calls and x_dtype == torch.float32 and not tf32
        if few:
            self._uses = _WORTH

    def _ask(self, pattern: Any, sizes: Any, prepare: Any, arguments: Any, stored: bool = True) -> None:
        """Asks the op `sizes` what the best kernel wants, and has the pattern keep what `prepare` makes.

        `arguments` gives theirs for a plan: a row plan first, so that none is made for nothing.
        """
        asked = arguments(pattern.row_plan)
        # Packed for linear, and for both linear and grad_input, 0 where that packs nothing.
        self.key, prepared_bytes, self.packed_bytes, self.gradient_bytes = sizes(*asked)
        # CUDA's kernels have their calls pack what is not given; on the CPU others are faster then.
        self._packs_in_calls = asked[0].is_cuda
        self.may_round = False  # whether calls that allow tf32 want something else
        if not stored:
            if self.packed_bytes and not self._packs_in_calls:
                self.key = 0
            self.packed_bytes = self.gradient_bytes = 0
        self.prepared = None

        def make() -> Tensor:
            if len(made := prepare(*asked)) == 0:  # of the rows alone it cannot
                made = prepare(*arguments(pattern.plan))
            return made

        if self.key and prepared_bytes:
            self.prepared = pattern.prepared(self.key, make)
        self._packed: tuple[tuple[int, ...] | None, Tensor | None] = (None, None)  # of what, or seen once
        self._made: tuple[int, torch.cuda.Event] | None = None  # the stream that packs, and when it has
        self._uses: int | None = None  # of values before, then of these; None: not counted
        # What calls have beside their tensors: while values are what they were, or whatever they are.
        self._held: tuple[tuple[int, ...], tuple] | None = None
        self.call: tuple | None = None

    def call_with(self, pattern: Any, parameter: Tensor, values: Tensor, gradient: bool = False) -> tuple:
        """What an eager call with these values has beside its tensors: plan, sizes, and what is derived.

        gradient: of x is recorded.
        """
        held = self._held
        if held is not None and not parameter.is_inference() and held[0] == self._at(parameter):
            return held[1]
        derived = self.current(parameter, values, gradient=gradient)
        call = (pattern.plan, *pattern.shape, *derived)
        if not (self.packed_bytes or self.gradient_bytes):
            self.call = call
        elif derived and derived[1] is not None and not (parameter.is_cuda or self.gradient_bytes):
            # On a GPU captures want nothing packed, and calls that record a gradient of x more.
            self._held = (self._packed[0], call)
        return call

    def current(
        self, parameter: Tensor, values: Tensor, now: bool = False, gradient: bool = False
    ) -> Derived | tuple[()]:
        """What a call with these values may use; gradient: a call that records that of x.

        Values that changed are packed at once where no gradients are recorded, so that equal calls have equal
        bits; else at the second call with them, as a training step changes them after each. `now`: at once.
        """
        wanted = (self.gradient_bytes if gradient else 0) or self.packed_bytes
        if not wanted or parameter.is_inference() or capturing(parameter):
            return self.unpacked()  # nothing counts the changes of such values, nor those between replays
        at = self._at(parameter)
        seen, packed = self._packed
        if seen != at:
            packed = None
        if self._uses is not None:
            return self._current_of_few(at, seen, packed, values)
        less = packed is None or packed.numel() < wanted
        if less and (now or seen == at or not torch.is_grad_enabled()):
            with torch.inference_mode(False), torch.no_grad():
                self._held = packed = None  # before this is made: what it has may be as large
                self._packed = (at, None)
                packed = self._make(values.detach(), wanted > self.packed_bytes)
        self._packed = (at, packed)
        if packed is None:
            return self.unpacked()
        if self._made is not None and self._made[0] != raw_stream(packed):
            torch.cuda.current_stream(packed.device).wait_event(self._made[1])
        return self.prepared, packed, self.key

    def _current_of_few(
        self, at: tuple[int, ...], seen: Any, packed: Tensor | None, values: Tensor
    ) -> Derived | tuple[()]:
        """The same where what is packed gives other bits (docs/numerics.md).

        All calls with the same values have it, or none: where the values before were used so little that
        packing them cost more than it gave.
        """
        if seen != at:
            if self._uses >= _WORTH:
                with torch.inference_mode(False), torch.no_grad():
                    packed = self._make(values.detach(), False)
            self._packed, self._uses = (at, packed), 0
        self._uses += 1
        return () if packed is None else (self.prepared, packed, self.key)

    def _at(self, parameter: Tensor) -> tuple[int, ...]:
        """What `packed` is made of: it holds as long as this stays the same."""
        return parameter.data_ptr(), parameter._version

    def _make(self, values: Tensor, gradient: bool) -> Tensor:
        size = self.gradient_bytes if gradient else self.packed_bytes
        logger.debug("packing %d bytes for kernels of key %x", size, self.key)
        packed = _pack(values, *self._arguments, gradient=gradient)
        if packed.is_cuda:
            self._made = raw_stream(packed), torch.cuda.current_stream(packed.device).record_event()
        return packed

    def unpacked(self) -> Derived | tuple[()]:
        """What a call may use whatever the values are."""
        usable = self.key and (self._packs_in_calls or not self.packed_bytes)
        return (self.prepared, None, self.key) if usable else ()

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return sum(t.numel() for t in (self.prepared, self._packed[1]) if t is not None)


def reads_itself(values: torch.Tensor, x_dtype: torch.dtype) -> bool:
    """Whether products with x of this dtype read such values as they are stored: 16 bits, on the CPU."""
    return values.device.type == "cpu" and x_dtype == torch.float32 and values.dtype.itemsize == 2


@torch.compiler.assume_constant_result  # a graph is made anew when the switch moves: torch guards it
def tf32_allowed() -> bool:
    """What torch says of its own products: torch.backends.cuda.matmul.allow_tf32, or fp32_precision."""
    return torch.backends.cuda.matmul.fp32_precision == TF32


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what is made then belongs to the graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def dtype_of_product(x: Tensor) -> torch.dtype:
    """The dtype that a product computes in: that of x, or autocast's."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


class HoldsDerived:
    """What a weight with `pattern`, `values` and `blocks` holds for its kernels; a base class of it."""

    _kept: dict[torch.dtype | str, Kept]  # by the dtype of x that kernels multiply, or TF32
    rounds_x: bool = False

    def derived(self, x: torch.Tensor) -> Derived | tuple[()]:
        """What kernels for x want of this weight beside values and plan: the last arguments of the ops.

        Nothing where they want nothing. Made when it is first asked for; see derived.py.
        """
        # torch.jit.trace would write down the ops that ask and prepare, whose results are numbers: it cannot.
        tracing = type(x) not in PLAIN or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if tracing and not isinstance(x, torch.Tensor):
            return ()  # the op says what is wrong
        dtype = self._multiplied(dtype_of_product(x) if in_autocast() else x.dtype)
        kept = self._kept.get(dtype)
        if kept is None and not tracing:
            kept = self._ask(dtype)
        if kept is not None and kept.may_round and tf32_allowed():
            kept = self._kept.get(TF32)
            if kept is None and not tracing:
                kept = self._ask(dtype, tf32=True)
        if kept is None or not kept.key:
            return ()
        values = self._parameters.get("values")
        if tracing or values is None:  # a graph sees no versions; a parametrization has new values each time
            return kept.unpacked()
        gradient = kept.gradient_bytes > 0 and torch.is_grad_enabled() and x.requires_grad
        return kept.current(values, self.blocks(values), gradient=gradient)

    def _multiplied(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an x of this one may meet values: rounded, it finds what bf16 does."""
        return torch.bfloat16 if self.rounds_x and dtype == torch.float32 else dtype

    def _ask(self, dtype: torch.dtype, tf32: bool = False) -> Kept | None:
        values = self._parameters.get("values")
        if type(values) is not nn.Parameter or values.is_meta or capturing(values):
            return None
        if not dtype.is_floating_point or not values.is_floating_point():
            return None  # for the op to refuse
        stored = values.dtype == dtype or (reads_itself(values, dtype) and not in_autocast())
        kept = Kept(self.pattern, self.blocks(values.detach()), dtype, stored, tf32)
        self._kept[TF32 if tf32 else dtype] = kept
        return kept

    def prepare(self, *x_dtypes: torch.dtype) -> HoldsDerived:
        """Makes what kernels derive from this weight now, not in the first calls, for inputs of these dtypes.

        Without any: of the layer's own, and of autocast where it is on. Ahead of a CUDA graph's capture, or
        of a server's first request; `derived_nbytes` says what is held. Nothing else changes.
        """
        device = self.device.type
        for dtype in x_dtypes or {
            self.x_dtype or self.dtype,
            *([torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []),
        }:
            dtype = self._multiplied(dtype)
            kept = self._kept.get(dtype) or self._ask(dtype)
            if kept is not None and kept.may_round and tf32_allowed():
                kept = self._kept.get(TF32) or self._ask(dtype, tf32=True)
            if kept is not None and kept.packed_bytes:
                kept.current(self.values, self.blocks(self.values), now=True)
        return self

    @property
    def derived_nbytes(self) -> int:
        """Bytes that are held of what kernels derived from this weight, beside `nbytes` and the plan."""
        return sum(kept.nbytes for kept in self._kept.values())
