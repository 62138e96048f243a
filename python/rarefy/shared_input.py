"""Layers that see one x, as q, k and v do, in one op: x is packed once, and the way to a kernel is gone once.

`fuse` gives neighbours that take as many features a SharedInput. It watches which of them are called with
one x; from the next x on the first of these computes for all, and the others find their result. Who sees
another x, or weights that changed meanwhile, computes for itself, as does everything that is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import _load
from ._torch_private import PLAIN, eager_call, unrecorded
from .derived import reads_itself
from .int8 import Int8Weight
from .pattern_weight import PatternWeight, meets_nothing

_linears = eager_call(_load.op("_linears"))

_MOST = 8  # weights of an op
# Elements of x from which one packing for all pays: 0.1 to 0.2 ns an element and weight, against 15 µs that
# one op takes more than the layers' own short way from Python.
_ELEMENTS = 1 << 18


class _Member(NamedTuple):
    """What a layer's result follows from, beside x. Modules weakly: they hold what holds this."""

    layer: weakref.ref
    weight: weakref.ref
    kept: dict  # another one once the weight has another pattern or mode
    rounds_x: bool
    values: Tensor
    bias: Tensor | None
    scales: Tensor | None
    written: tuple | None

    def holds(self, x: Tensor) -> bool:
        """Whether all of it is as it was, and a call with x meets nothing on its way."""
        layer, weight, values, bias = self.layer(), self.weight(), self.values, self.bias
        return (
            layer is not None
            and layer._modules["weight"] is weight
            and weight._parameters.get("values") is values
            and layer.bias is bias
            and weight._buffers.get("scales") is self.scales
            and weight._kept is self.kept
            and meets_nothing(weight, x, values, bias)
            and weight.rounds_x == self.rounds_x
            and self.written is not None
            and self.written == _written(values, bias, self.scales)
            and not (
                torch.is_grad_enabled()
                and (values.requires_grad or (bias is not None and bias.requires_grad))
            )
        )


def _written(*tensors: Tensor | None) -> tuple | None:
    """What moves when someone writes to one of them; None if nothing counts that, as in inference mode."""
    if any(t is not None and t.is_inference() for t in tensors):
        return None
    return tuple((t.data_ptr(), t._version) for t in tensors if t is not None)


class _Call(NamedTuple):
    """One op for several layers."""

    numbers: tuple[int, ...]
    dtype: torch.dtype
    features: int
    members: tuple[_Member, ...]
    arguments: tuple  # of the op after x

    def holds(self, x: Tensor) -> bool:
        fits = x.dtype == self.dtype and x.shape[-1] == self.features
        return fits and all(member.holds(x) for member in self.members)


class _Round(NamedTuple):
    """The calls with one x."""

    x: weakref.ref
    version: int
    called: dict[int, None]  # who, in order
    ready: dict[int, tuple[_Member, Tensor]]

    def is_of(self, x: Tensor) -> bool:
        return self.x() is x and self.version == x._version

    @property
    def first(self) -> int:
        return next(iter(self.called))


class SharedInput:
    """What neighbours know of each other's x. Layers enrol as they run: a copy of a model has its own."""

    def __init__(self) -> None:
        self._layers: dict[int, weakref.ref] = {}
        self._followers: dict[int, tuple[int, ...]] = {}  # who saw the same x as the one that was first
        self._calls: dict[int, _Call] = {}  # by who is first
        self._round: _Round | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:  # noqa: D105
        return SharedInput()

    def __reduce__(self) -> tuple:  # noqa: D105 (weak references cannot be saved)
        return SharedInput, ()

    def result(self, at: int, layer: nn.Module, x: Tensor) -> Tensor | None:
        """The product of layer number `at` with x, or None: it is to compute it for itself."""
        if torch.compiler.is_compiling() or type(x) not in PLAIN or torch.jit.is_tracing():
            return None
        if x.is_nested or x.dim() == 0 or x.numel() < _ELEMENTS or x.layout is not torch.strided:
            return None
        if x.device.type != "cpu" or x.is_inference() or (x.requires_grad and torch.is_grad_enabled()):
            return None  # nothing counts the writes to an inference tensor
        known = self._layers.get(at)
        if known is None or known() is not layer:
            self._layers[at] = weakref.ref(layer)
        now = self._round  # other threads may put theirs in its place
        if now is None or not now.is_of(x):
            if now is not None:
                self._followers[now.first] = tuple(now.called)
            now = self._round = _Round(weakref.ref(x), x._version, {at: None}, {})
            return self._together(now, at, x)
        if at == now.first:  # x comes anew, as a buffer may that something else than torch fills
            now.ready.clear()
        now.called[at] = None
        member, y = now.ready.pop(at, (None, None))
        if y is None or member.layer() is not layer or not member.holds(x):
            return None
        return y if y.is_inference() == torch.is_inference_mode_enabled() else None

    def _together(self, now: _Round, first: int, x: Tensor) -> Tensor | None:
        numbers = self._followers.get(first, ())
        if not 1 < len(numbers) <= _MOST:
            return None
        call = self._calls.get(first)
        if call is None or call.numbers != numbers or not call.holds(x):
            layers = [known() if (known := self._layers.get(at)) is not None else None for at in numbers]
            call = None if None in layers else _call_of(numbers, layers, x)
            if call is None:
                self._calls.pop(first, None)
                return None
            self._calls[first] = call
        y, *rest = _linears(x, *call.arguments)
        now.ready.update(zip(numbers[1:], zip(call.members[1:], rest, strict=True), strict=True))
        return y


def _call_of(numbers: tuple[int, ...], layers: list[nn.Module], x: Tensor) -> _Call | None:
    """None where layers differ in more than rows, or one has a way of its own."""
    operands = [_operand(layer, x) for layer in layers]
    if None in operands or len({operand[0] for operand in operands}) > 1:
        return None
    dynamic, rounds_x, key, *_ = operands[0][0]
    members, values, plans, prepared, packed = zip(*(operand[1:] for operand in operands), strict=True)
    scales = [] if members[0].scales is None else [member.scales for member in members]
    biases, rows = [member.bias for member in members], [layer.out_features for layer in layers]
    lists = (list(values), scales, list(plans), biases, rows, x.shape[-1], list(prepared), list(packed))
    return _Call(numbers, x.dtype, x.shape[-1], members, (*lists, key, dynamic, rounds_x))


def _operand(layer: nn.Module, x: Tensor) -> tuple | None:
    """What must be the same in all layers, and what each brings."""
    weight, bias = layer._modules["weight"], layer.bias
    kind = type(weight).linear
    values, scales = weight._parameters.get("values"), weight._buffers.get("scales")
    if kind not in (PatternWeight.linear, Int8Weight.linear) or type(values) is not nn.Parameter:
        return None
    plan, written = weight.plan, _written(values, bias, scales)  # plan first: it settles the pattern
    kept, modules = weight._kept, (weakref.ref(layer), weakref.ref(weight))
    member = _Member(*modules, kept, weight.rounds_x, values, bias, scales, written)
    if x.shape[-1] != layer.in_features or not member.holds(x):
        return None
    int8 = kind is Int8Weight.linear
    widened = weight.x_dtype == x.dtype and reads_itself(values, x.dtype)
    if not (int8 or widened or values.dtype == x.dtype):
        return None
    if (bias is not None and bias.dtype != x.dtype) or not unrecorded(x, values, bias):
        return None
    weight.prepare(x.dtype)  # packs at once, as this is kept: `derived` would wait for a second call
    prepared, packed, key = weight.derived(x) or (None, None, 0)
    same = (int8 and weight.dynamic, weight.rounds_x, key, values.dtype, *weight.block_shape)
    return same, member, weight.blocks(values), plan, prepared, packed


def mark(layers: Iterable[nn.Module]) -> None:
    """Lets these, children of one module, look for others of them with the same x."""
    alike: dict[tuple, list[nn.Module]] = {}
    for layer in layers:
        weight = layer._modules["weight"]
        alike.setdefault((layer.in_features, weight.format, getattr(weight, "block_shape", None)), []).append(
            layer
        )
    for members in alike.values():
        shared = SharedInput()
        for at, layer in enumerate(members if len(members) > 1 else ()):
            layer.shares = (shared, at)
