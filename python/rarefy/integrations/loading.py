"""Sparse weights of a transformers folder: the skeleton's layers wait for their pieces, then become sparse.

transformers reads, renames, shards and places the pieces as any other tensors. The last piece of a weight to
arrive makes it, with the checks of a file; so nothing is in memory twice, and an error stops the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..checks import fail
from ..layers import SPARSE, Layer
from ..serialization import format_of, weight_of
from ..sparse_weight import SparseWeight
from .mapped import forget_pages

OP = "from_pretrained"


class _Undrawn(SparseWeight):
    """A weight that is not there yet: what transformers 4 draws of it, before it reads it, draws nothing."""

    @property
    def data(self) -> torch.Tensor:
        """A tensor of the shape, for what is drawn in vain."""
        return torch.empty(self.shape, device="meta")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func is torch.eye:
            return None
        return super().__torch_function__(func, types, args, kwargs)

    # What the initialisers of torch.nn.init call on a matrix that are no overridable functions themselves.
    def _same(self, *_: Any, **__: Any) -> _Undrawn:
        return self

    uniform_ = normal_ = zero_ = fill_ = mul_ = add_ = clamp_ = erfinv_ = copy_ = view_as = _same

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keeps nothing."""

    def ndimension(self) -> int:
        """2, as of any matrix."""
        return 2

    def new_empty(self, size: tuple[int, ...]) -> torch.Tensor:
        """A tensor without memory."""
        return torch.empty(size, device="meta")


class Pending(_Undrawn):
    """The place of a sparse weight: its pieces on the meta device, until the tensors of a file come.

    Attributes:
        name: in the model; `source`, in the file.
        wanted: the dtype that the weight is to be multiplied with; `widens`, whether x comes in another one.
    """

    format = "pending"

    def __init__(
        self,
        name: str,
        source: str,
        entry: Any,
        found: Mapping[str, Any],
        wanted: torch.dtype,
        widens: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.source, self.wanted, self.widens = name, source, wanted, widens
        self.kind, self.entry = format_of(OP, source, entry)
        self.pieces = self.kind.pieces
        self.arrived: set[str] = set()
        self.places: list[Layer] = []
        self.stored: dict[str, torch.dtype] = {}
        self.files: dict[str, str] = {}
        shape = self.entry.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int for n in shape):
            fail(OP, f"shape in config.json of {source} must be two ints", shape)
        self.shape = torch.Size(shape)
        for piece in self.pieces:
            key = f"{source}.{piece}"
            if key not in found:
                files = sorted({Path(file).name for file, _, _ in found.values()})
                fail(OP, f"{', '.join(files) or 'the checkpoint'} must have {key}", "no tensor of that name")
            self.files[piece], size, dtype = found[key]
            self.stored[piece] = dtype
            empty = torch.empty(size, dtype=dtype, device="meta")
            if piece == self.pieces[0]:
                self.register_parameter(piece, nn.Parameter(empty, requires_grad=dtype.is_floating_point))
            else:
                self.register_buffer(piece, empty)
        self.waits = True

    def put(self, layers: Mapping[str, Layer], name: str) -> Pending:
        """Makes the weight `name` of a skeleton, with layers by the names of their weights, wait for this."""
        layer = layers.get(name)
        if layer is None or layer.shape is None:
            fail(OP, f"{self.source} must belong to a layer of the model that can be sparse", name)
        module = layer.module
        if any(layer is place for place in self.places):  # one module under two names
            return self
        if layer.reason is not None and not isinstance(module, SPARSE):
            fail(OP, f"{layer.name} must be a layer that can become sparse", layer.reason)
        if tuple(layer.shape) != tuple(self.shape):
            fail(OP, f"{self.source} must be of shape {tuple(layer.shape)}", tuple(self.shape))
        weight = _StandIn(self.shape) if self.places else self
        if not isinstance(module, SPARSE):
            sparse = layer.around(weight)
            layer.replace(sparse)
            layer.module = sparse
        layer.put(weight)
        self.places.append(layer)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Takes a piece in; the last one makes the weight."""
        super().__setattr__(name, value)
        # transformers marks what it has read: what it makes up for a missing tensor has no mark.
        if name in self.__dict__.get("pieces", ()) and getattr(value, "_is_hf_initialized", False):
            self.arrived.add(name)
            if self.waits and len(self.arrived) == len(self.pieces):
                self._make({piece: getattr(self, piece) for piece in self.pieces})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], prefix: str, *_: Any, **__: Any
    ) -> None:
        """As transformers 4 puts a tensor into a module; in the file's dtype, which it may have widened."""
        for piece in self.pieces:
            tensor = state_dict.get(prefix + piece)
            if tensor is not None and not tensor.is_meta:
                tensor = tensor.to(self.stored[piece])
                if piece in self._parameters:
                    tensor = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
                tensor._is_hf_initialized = True
                setattr(self, piece, tensor)

    def _make(self, pieces: dict[str, torch.Tensor]) -> None:
        aligned = {piece: _aligned(tensor) for piece, tensor in pieces.items()}
        weight = weight_of(OP, self.source, aligned, self.kind, self.entry)
        if (weight.x_dtype or weight.dtype) != self.wanted:
            weight.to(self.wanted)
        for layer in self.places:
            layer.put(weight)
            if self.widens:
                layer.module.register_forward_pre_hook(_widen)
        for module in (weight, *(layer.module for layer in self.places)):
            module._is_hf_initialized = True  # transformers must not draw anything here
        self.waits = False

    def finish(self) -> None:
        """Makes a weight that a device_map leaves on disk: its indices are read, its values stay there.

        accelerate then brings the values in for each product, as it does for dense layers.
        """
        if not self.waits:
            return
        pieces = {}
        for piece in self.pieces:
            with safe_open(self.files[piece], framework="pt") as file:
                pieces[piece] = file.get_tensor(f"{self.source}.{piece}")
        self._make(pieces)
        (weight,) = {id(place.module.weight): place.module.weight for place in self.places}.values()
        for name, parameter in list(weight._parameters.items()):
            away = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            away._is_hf_initialized = True
            weight._parameters[name] = away

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> NoReturn:
        """Raises: there is nothing to multiply by yet."""
        fail(OP, f"{self.name} must be loaded before it is used", "a weight that still waits", RuntimeError)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it lies askew in a mapped file: kernels read whole cache lines."""
    if tensor.device.type != "cpu" or tensor.data_ptr() % 64 == 0:
        return tensor
    copy = tensor.clone()
    forget_pages(tensor)
    return copy


class _StandIn(_Undrawn):
    """Where a weight is tied to one that still waits: without tensors, which would count as missing."""

    format, pieces = "stand-in", ()

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape


def _widen(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """T5 keeps a layer in float32 in a model of float16, and casts x for it if its weight is a tensor."""
    weight = layer.weight
    return (args[0].to(weight.x_dtype or weight.dtype), *args[1:])


def headers(files: Iterable[str] | None) -> dict[str, tuple[str, list[int], torch.dtype]]:
    """File, shape and dtype of each tensor of a checkpoint's files, of which only the headers are read."""
    found = {}
    for path in files or ():
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (no mapping)
                    piece = file.get_slice(key)
                    dtype = _DTYPES.get(piece.get_dtype(), torch.uint8)
                    found[key] = (str(path), piece.get_shape(), dtype)
        except SafetensorError as error:
            fail(OP, "sparse weights must be in safetensors files", f"{path}: {error}")
    return found


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
