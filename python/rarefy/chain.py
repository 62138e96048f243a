"""Feed-forward networks of sparse layers as one op, whatever the model's code around them looks like.

`fuse` (fusing.py) marks the layers that an activation and another sparse layer may follow. A marked layer
returns a Hidden: a tensor that knows its layer and x, and computes nothing yet. Activations, dropout that is
off and the product with a gate are noted; the next sparse layer then runs bsr_feed_forward on x. Whatever
else is done with a Hidden, it first becomes the tensor it stands for. docs/design/pytorch.md says why it is
so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from . import _torch_private
from ._torch_private import PLAIN, raw_stream
from .activations import NONE
from .feed_forward import copy_by_feature, op_derived
from .feed_forward import op as network
from .feed_forward import run as run_network
from .int8 import Int8Weight
from .int8_ops import feed_forward as int8_feed_forward
from .pattern_weight import PatternWeight

# Blocks of fewer rows, and fewer tokens, gain nothing: their kernels go layer by layer. Below so many
# products of the dense layer, to wait costs what it saves, some microseconds.
_ROWS, _TOKENS, _WORK = 4, 5, {"cpu": 1 << 19, "cuda": 1 << 35}
_STORED = (torch.bfloat16, torch.float16)


class Hidden(torch.Tensor):
    """act(x Wᵀ + b) of a sparse layer, times that of a gate, not computed until something looks."""

    _up: nn.Module
    _gate: nn.Module | None
    _activation: str
    _given: torch.Tensor  # x as it was given, and what holds its values
    _x: torch.Tensor
    _x_version: int
    _stream: int  # of CUDA, that x was given on
    _states: tuple[tuple, ...]  # of the layers, up's and then a gate's
    _value: torch.Tensor | None

    @staticmethod
    def of(up: nn.Module, x: torch.Tensor) -> Hidden:
        """What `up` would return for x; see may_wait."""
        # Nothing counts the writes to an inference tensor: a copy, which costs a hundredth of the product.
        held = _copy(up, x) if x.is_inference() else x
        given = (x, held, _version(held), raw_stream(x) if x.is_cuda else 0)
        return Hidden._of(up, None, NONE, given, (_state(up),))

    @staticmethod
    def _of(
        up: nn.Module, gate: nn.Module | None, activation: str, x: tuple, states: tuple[tuple, ...]
    ) -> Hidden:
        given = x[0]
        size = (*given.shape[:-1], up.out_features)
        hidden = _torch_private.wrapper_tensor(Hidden, size, given.dtype, given.device)
        hidden._up, hidden._gate, hidden._activation, hidden._value = up, gate, activation, None
        hidden._given, hidden._x, hidden._x_version, hidden._stream = x
        hidden._states = states
        return hidden

    def noted(self, activation: str, gate: Hidden | None = None) -> Hidden:
        """This one with an activation, or times an activated one."""
        x = (self._given, self._unchanged_x(False), self._x_version, self._stream)
        if gate is None:
            return Hidden._of(self._up, None, activation, x, self._states)
        return Hidden._of(self._up, gate._up, activation, x, (*self._states, *gate._states))

    def same_x(self, other: Hidden) -> bool:
        """Whether both layers saw one x with the same values."""
        if self._given is not other._given or self._x_version != other._x_version:
            return False
        return self._x is other._x or (not self._x.is_cuda and torch.equal(self._x, other._x))

    def value(self) -> torch.Tensor:
        """The tensor that this one stands for, computed once, layer by layer."""
        if self._value is None:
            x = self._unchanged_x()
            with torch.no_grad():  # only what nothing records waits
                if self._gate is None:
                    self._value = _activated(self._up, x, self._activation)
                else:
                    self._value = _activated(self._gate, x, self._activation) * _activated(self._up, x, NONE)
            self._given = self._x = None
        return self._value

    def through(self, down: nn.Module) -> torch.Tensor:
        """What `down` makes of it: the whole network in one op where that can be, else of the value."""
        if self._value is not None or not runs(down, self._x):
            return down.forward(self.value())
        derived = _derived(self._up, self._gate, down, self._x)
        if derived is None:
            return down.forward(self.value())
        rest = (down.out_features, down.in_features, self._up.in_features, self._activation)
        if is_int8(down):
            gate = (None,) * 4 if self._gate is None else _scaled(self._gate)
            layers = (*_scaled(self._up), *gate, *_scaled(down))
            return int8_feed_forward(self._unchanged_x(), *layers, *rest, *derived)
        up, gate = _operands(self._up), (None,) * 3 if self._gate is None else _operands(self._gate)
        held = op_derived(derived, rounds(self._up, self._gate, down))
        args = (self._unchanged_x(), *up, *gate, *_operands(down), *rest, *held)
        return run_network(*args) if _torch_private.eager() else network(*args)

    def _unchanged_x(self, used: bool = True) -> torch.Tensor:
        if _version(self._x) != self._x_version:
            raise RuntimeError(
                "[BlockSparseLinear] x must stay as it is until the layer's output is used "
                "(rarefy.fuse(model, False) lets layers compute at once); got an x that was written to"
            )
        # What is only noted keeps the states, which its use compares.
        layers = (self._up,) if self._gate is None else (self._up, self._gate)
        if used and not all(map(_is_still, layers, self._states)):
            raise RuntimeError(
                "[BlockSparseLinear] a layer must stay as it is until its output is used (rarefy.fuse(model, "
                "False) lets layers compute at once); got one whose weight or bias was written to"
            )
        if self._x.is_cuda and raw_stream(self._x) != self._stream:
            self._x.record_stream(torch.cuda.current_stream(self._x.device))  # its memory is read there
        return self._x

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with _torch_private.without_torch_function():
                return func(*args, **kwargs)
        noted = _NOTED.get(func)
        result = noted(*args, **kwargs) if noted is not None else None
        if result is not None:
            return result
        args, kwargs = tree_map_only(Hidden, Hidden.value, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: D105
        args, kwargs = tree_map_only(Hidden, Hidden.value, (args, kwargs or {}))
        return func(*args, **kwargs)


def _copy(up: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Copy x: by feature where the kernel of a GPU would first turn it."""
    if not x.is_cuda or x.element_size() != 2:
        return x.clone()
    weight = up._modules["weight"]
    rows, columns = weight.block_shape
    aligned = x.is_contiguous() and x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0
    if columns != 1 or rows % 64 or not aligned or not weight.derived(x):
        return x.clone()
    return copy_by_feature(x)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _state(layer: nn.Module) -> tuple:
    """Values, bias and scales of a layer, where they lie, and what moves when somebody writes to them."""
    weight, bias = layer._modules["weight"], layer._parameters.get("bias")
    values, scales = weight._parameters["values"], weight._buffers.get("scales")
    try:
        written = values._version
        if bias is not None:
            written += bias._version  # versions only grow, and so does their sum
        if scales is not None:
            written += scales._version
    except RuntimeError:  # an inference tensor, the writes to which nothing counts
        written = -1
    # `.data = …` moves no version, but the memory.
    return values, values.data_ptr(), bias, 0 if bias is None else bias.data_ptr(), scales, written


def _is_still(layer: nn.Module, state: tuple) -> bool:
    values, at, bias, bias_at, scales, written = _state(layer)
    return (
        values is state[0]
        and at == state[1]
        and bias is state[2]
        and bias_at == state[3]
        and scales is state[4]
        and written == state[5]
    )


# When a layer may wait, and when the chain may run -----------------------------------------------


def may_wait(layer: nn.Module, x: torch.Tensor) -> bool:
    """Whether a marked layer's product with x can wait for what follows: nothing sees or records it."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or torch.jit.is_tracing():
        return False
    if x.is_nested or x.layout is not torch.strided:
        return False
    tokens, wanted = x.shape[:-1].numel(), layer.in_features
    if tokens < _TOKENS or x.shape[-1] != wanted or x.device.type not in _WORK:
        return False
    return tokens * wanted * layer.out_features >= _WORK[x.device.type] and runs(layer, x)


def runs(layer: nn.Module, x: torch.Tensor) -> bool:
    """Whether the op takes this layer for x."""
    weight, bias = layer._modules["weight"], layer.bias
    if not fits(weight) or x.device.type not in _WORK or not _torch_private.plain():
        return False
    values, int8 = weight._parameters["values"], is_int8(layer)
    if values.device != x.device or (x.is_cuda and values.dtype != x.dtype):
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, values, bias)):
        return False
    wide = weight.x_dtype == x.dtype == torch.float32 and values.dtype in _STORED
    if not (wide or int8 or values.dtype == x.dtype):
        return False
    if x.dtype == torch.float64 or (int8 and x.dtype == torch.float16):
        return False
    return bias is None or (bias.dtype == x.dtype and bias.is_contiguous())


def _derived(up: nn.Module, gate: nn.Module | None, down: nn.Module, x: torch.Tensor) -> tuple | None:
    """What kernels hold of a network's weights, as the op takes it; None: they are faster layer by layer.

    Without any, its kernels are those for weights as they are. Where each layer holds what one kernel
    derives, a kernel of the op reads the same (of gates on the CPU, in floats with blocks as up's); in int8
    each must.
    """
    layers = [layer for layer in (up, gate, down) if layer is not None]
    held = [layer._modules["weight"].derived(x) for layer in layers]
    int8 = {is_int8(layer) for layer in layers}
    if not any(held) and int8 == {False}:
        return ()
    if len(int8) > 1 or not all(held) or len({derived[2:] for derived in held}) > 1:
        return None
    gates: tuple = ()
    if gate is not None:
        blocks = {layer._modules["weight"].block_shape for layer in (up, gate)}
        if x.is_cuda or (int8 == {False} and len(blocks) > 1):
            return None
        gates = held[1][:2]
    return (*held[0][:2], *held[-1][:2], held[0][2], *gates)


def network_key(
    up: nn.Module, gate: nn.Module | None, down: nn.Module, x: torch.Tensor
) -> tuple[int, str | None]:
    """The key of what the network's op holds of its weights (0: nothing), or why layers run one by one."""
    with torch.no_grad():
        if not may_wait(up, x):
            return 0, f"layers run one by one: {_WAITS}"
        if getattr(down, "activation", None) is not None:
            return 0, "layers run one by one: the last one has an activation"
        if not all(runs(layer, x) for layer in (gate, down) if layer is not None):
            return 0, f"layers run one by one: all of them must fit, {_WAITS}"
        try:
            derived = _derived(up, gate, down, x)
        except RuntimeError:  # of no kernel that is allowed, as the op will say
            return 0, None
    if derived is None:
        return 0, "layers run one by one: their kernels have weights that no kernel of the network reads"
    return (derived[4] if derived else 0), None


_WAITS = (
    f"blocks of {_ROWS} rows or more, {_TOKENS} tokens or more, {_WORK['cpu']} products or more "
    f"({_WORK['cuda']} on CUDA), x and values of one dtype, or on the CPU int8 that rounds x"
)


def fits(weight: Any) -> bool:
    """Whether products with a weight may be part of a network's op."""
    if not isinstance(weight, PatternWeight) or type(weight._parameters.get("values")) not in PLAIN:
        return False
    kind = type(weight).linear  # another one multiplies in a way of its own
    if kind is Int8Weight.linear:
        return weight.dynamic
    return kind is PatternWeight.linear and weight.block_shape[0] >= _ROWS


def is_int8(layer: nn.Module) -> bool:
    """Whether a layer holds scaled int8 values."""
    return isinstance(layer._modules["weight"], Int8Weight)


def rounds(up: nn.Module, gate: nn.Module | None, down: nn.Module) -> bool:
    """Whether x and hidden features may be rounded to bfloat16."""
    return all(layer._modules["weight"].rounds_x for layer in (up, gate, down) if layer is not None)


def _operands(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    weight = layer._modules["weight"]
    plan = weight.pattern.plan  # first: it settles the padding of values
    return weight.blocks(weight._parameters["values"]), plan, layer.bias


def _scaled(layer: nn.Module) -> tuple[torch.Tensor, ...]:
    """The same of an int8 layer."""
    weight = layer._modules["weight"]
    plan = weight.pattern.plan
    return weight._parameters["values"], weight._buffers["scales"], plan, layer.bias


def _activated(layer: nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    weight = layer._modules["weight"]
    return weight.linear(x, layer.bias, None if activation == NONE else activation)


# What is noted instead of computed ---------------------------------------------------------------


def _activation(name: str) -> Callable[..., Any]:
    def note(input: Any, inplace: bool = False) -> Any:  # noqa: A002 (torch's name)
        waits = isinstance(input, Hidden) and input._value is None
        if not waits or input._gate is not None or input._activation != NONE:
            return None
        if not inplace:
            return input.noted(name)
        input._activation = name
        return input

    return note


def _gelu(input: Any, *, approximate: str = "none") -> Any:  # noqa: A002 (torch's name)
    name = {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    return None if name is None else _activation(name)(input)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
    return input if isinstance(input, Hidden) and not (training and p > 0) else None


def _times(a: Any, b: Any, **more: Any) -> Any:
    """act(gate) * up, in either order."""
    if more or not (type(a) is Hidden and type(b) is Hidden) or a is b:
        return None
    if any(h._value is not None or h._gate is not None for h in (a, b)) or not a.same_x(b):
        return None
    gate, up = (a, b) if b._activation == NONE else (b, a)
    if up._activation != NONE:
        return None
    return up.noted(gate._activation, gate)


_NOTED: dict[Any, Callable[..., Any]] = {
    functional.gelu: _gelu,
    functional.dropout: _dropout,
    **dict.fromkeys((torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.__mul__), _times),
    **dict.fromkeys((functional.relu, torch.relu, torch.Tensor.relu), _activation("relu")),
    **dict.fromkeys((torch.relu_, torch.Tensor.relu_), lambda x: _activation("relu")(x, True)),
    functional.silu: _activation("silu"),
}

_OF_SHAPE = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_nested")),
}
