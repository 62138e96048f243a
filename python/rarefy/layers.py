"""A model's layers with a weight matrix: which can become sparse, and why others cannot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from ._torch_private import has_hooks, has_tensor_hooks, storage_of
from .attention import projections, put_projection, settle
from .checks import fail
from .conv import BlockSparseConv2d, matrix_shape, why_no_groups, why_no_rounding
from .dense import KINDS, kind_of
from .experts import PARTS, is_dense_experts, linear_of, settle_expert, unpack
from .linear_base import new_linear
from .modules import BlockSparseLinear
from .pseudo import PseudoBlockSparseLinear
from .sparse_weight import SparseWeight
from .spec import Spec
from .weight import BlockSpec

SPARSE = BlockSparseLinear | BlockSparseConv2d  # layers around a SparseWeight


def dense_of(module: nn.Module) -> nn.Module:
    """The dense layer that a sparse one or its oracle stands for, without an activation."""
    return module.to_linear() if isinstance(module, BlockSparseLinear) else module.to_dense()


@dataclass
class Layer:
    """A module with a weight matrix, under all its names; `reason` says why it must stay, or is None."""

    names: list[str]
    module: nn.Module
    reason: str | None = None
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # (parent, attribute)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the weight, (N, K) for a linear layer; None where there is none (yet)."""
        weight = getattr(self.module, "weight", None)
        lazy = isinstance(weight, nn.parameter.UninitializedTensorMixin)
        if weight is None or lazy:
            return None
        return tuple(self.linear().weight.shape) if kind_of(self.module) else tuple(weight.shape)

    def linear(self) -> nn.Module:
        """The layer as an nn.Linear of the same memory, where it is one of another library; else itself."""
        kind = kind_of(self.module)
        return self.module if kind is None else KINDS[kind].as_linear(self.module)

    def as_product(self) -> nn.Module:
        """The nn.Linear whose time "auto" predicts, or a module that it does not know."""
        return self.linear()

    @property
    def weight_names(self) -> list[str]:
        """All names of its weight."""
        return [f"{name}.weight".lstrip(".") for name in self.names]

    @property
    def parameter_names(self) -> list[str]:
        """All names of the Parameter that the weight is, or is a part of."""
        return self.weight_names

    def replace(self, module: nn.Module) -> None:
        """Puts `module` wherever this layer is used."""
        for parent, key in self.places:
            setattr(parent, key, module)
            settle(parent)
            settle_expert(parent)

    def put(self, weight: SparseWeight) -> None:
        """Gives the layer, which is sparse, another weight."""
        self.module.weight = weight

    def why_not(self, spec: Any) -> str | None:
        """Why the layer cannot become what a Spec, or an Auto, says; or None."""
        return spec.why_not(self.shape) if isinstance(spec, Spec) else None

    def check(self, weight: SparseWeight) -> None:
        """Raises if the layer cannot be around a weight of its shape."""

    def from_dense(self, dense: nn.Module, spec: Spec, scores: torch.Tensor | None) -> nn.Module:
        """A sparse layer of what `dense`, this one or what it was, holds; with a copy of the bias."""
        return BlockSparseLinear.from_dense(dense, spec=spec, scores=scores)

    def around(self, weight: SparseWeight) -> nn.Module:
        """A sparse layer for the place of this one, around a weight; with the same bias: ties stay ties."""
        sparse = self._around(weight).train(self.module.training)
        sparse.bias = self.module.bias
        return sparse

    def _around(self, weight: SparseWeight) -> nn.Module:
        sparse = BlockSparseLinear.from_weight(weight)
        sparse.stands_for = kind_of(self.module)
        return sparse


@dataclass
class Convolution(Layer):
    """A convolution of images; its weight counts as the matrix (O, KH · KW · C)."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the weight as a matrix."""
        return matrix_shape(self.module)

    def as_product(self) -> nn.Module:
        """An nn.Linear of the weight as a matrix; with groups the convolution."""
        conv = self.module
        if not isinstance(conv, nn.Conv2d) or conv.groups > 1:
            return conv
        return new_linear(conv.weight.detach().permute(0, 2, 3, 1).flatten(1), None, False, conv.training)

    def why_not(self, spec: Any) -> str | None:
        """It takes blocks that do not reach over its groups, or "auto"."""
        if not isinstance(spec, Spec):
            return super().why_not(spec)
        if not isinstance(spec, BlockSpec):
            return f"a convolution takes block:ROWSxCOLUMNS@DENSITY, not {spec}"
        rounding = why_no_rounding(self.module) if spec.rounds_x else None
        return super().why_not(spec) or why_no_groups(self.module, spec.block_shape) or rounding

    def check(self, weight: SparseWeight) -> None:
        """Raises for a format or blocks that convolutions have not."""
        BlockSparseConv2d.from_weight(weight, self.module)

    def from_dense(self, dense: nn.Module, spec: Spec, scores: torch.Tensor | None) -> nn.Module:
        """A BlockSparseConv2d."""
        return BlockSparseConv2d.from_dense(dense, spec, scores=scores)

    def _around(self, weight: SparseWeight) -> nn.Module:
        return BlockSparseConv2d.from_weight(weight, self.module)


@dataclass
class Projection(Layer):
    """A weight of an nn.MultiheadAttention as a layer: `module` is one that holds it, without a bias."""

    holder: nn.Module | None = None
    attribute: str = ""

    @property
    def weight_names(self) -> list[str]:
        """All names of its weight: "attention.in_proj_weight" of the layer "attention.in_proj"."""
        return [f"{name}_weight" for name in self.names]

    def replace(self, module: nn.Module) -> None:
        """Puts the weight of `module` into the attention."""
        put_projection(self.holder, self.attribute, module.weight)

    def put(self, weight: SparseWeight) -> None:
        """Gives the attention another weight."""
        put_projection(self.holder, self.attribute, weight)


@dataclass
class ExpertLayer(Layer):
    """A part of an expert whose weights are two tensors for all of them; `module` shares their memory."""

    holder: nn.Module | None = None
    number: int = 0
    part: str = ""

    @property
    def parameter_names(self) -> list[str]:
        """Of the tensor for all: "experts.down_proj", where the layer is "experts.0.down_proj"."""
        end = f"{self.number}.{self.part}"
        return [name.removesuffix(end) + self.part for name in self.names]

    def replace(self, module: nn.Module) -> None:
        """Makes the experts layers, of which this is one."""
        unpack(self.holder)
        setattr(self.holder.get_submodule(str(self.number)), self.part, module)


def _projections(layer: Layer) -> list[Layer]:
    """The layers that a module's own projections are as; none if it has no such."""
    found = []
    for attribute in projections(layer.module):
        weight, short = getattr(layer.module, attribute), attribute.removesuffix("_weight")
        if isinstance(weight, SparseWeight):
            module = BlockSparseLinear.from_weight(weight)
        elif isinstance(weight, nn.Parameter):
            n, k = weight.shape
            module = nn.Linear(k, n, bias=False, device="meta")
            module.weight = weight
        else:
            return [layer]  # parametrized
        names = [f"{name}.{short}".lstrip(".") for name in layer.names]
        module.train(layer.module.training)
        found.append(Projection(names, module, holder=layer.module, attribute=attribute))
    return found or [layer]


# Where a tensor lies: its storage, and the first byte and the end of what it spans there.
Extent = tuple[int, int, int]


def _extent(tensor: torch.Tensor) -> Extent | None:
    """None for tensors without memory of their own: lazy, sparse, or of another library's making."""
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin) or tensor.layout != torch.strided:
        return None
    try:
        storage = storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return None
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.storage_offset() * tensor.element_size()
    return storage, begin, begin + (span * tensor.element_size() if tensor.numel() else 0)


def _owners(model: nn.Module) -> list[tuple[str, Extent]]:
    """Where the parameters and buffers lie, by name; those of one module count once."""
    owners = []
    for name, module in model.named_modules():
        own = {"recurse": False, "remove_duplicate": False}
        for key, tensor in (*module.named_parameters(**own), *module.named_buffers(**own)):
            if (extent := _extent(tensor)) is not None:
                owners.append((f"{name}.{key}".lstrip("."), extent))
    return owners


def _overlap(a: Extent, b: Extent) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _why_not(
    module: nn.Module,
    names: list[str],
    own: set[str],
    parents: list[nn.Module],
    owners: list[tuple[str, Extent]],
    rewritten: bool,
) -> str | None:
    """Why this module cannot become block-sparse without changing what the model computes, or None."""
    kind = type(module).__name__
    if isinstance(module, SPARSE | PseudoBlockSparseLinear):
        return "already block-sparse"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding looks rows up instead of multiplying"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by its parameters itself"
    held = [parent for parent in parents if isinstance(parent, nn.MultiheadAttention)]
    if held and not (rewritten and all(map(projections, held))):
        return "nn.MultiheadAttention reads this weight directly and never calls the layer"
    other = kind_of(module) if rewritten and (held or kind_of(module) != "out_proj") else None
    if not isinstance(module, nn.Linear | nn.Conv2d) and other is None:
        return f"{kind} is not an nn.Linear"
    if is_parametrized(module):
        return "its parameters are parametrized (torch.nn.utils.parametrize)"
    weight = dict(module.named_parameters(recurse=False, remove_duplicate=False)).get("weight")
    if weight is None:
        return "its weight is computed from other parameters (weight norm, torch pruning)"
    if isinstance(weight, nn.parameter.UninitializedTensorMixin):
        return "a lazy layer without a shape yet: run the model once"
    if isinstance(module, NonDynamicallyQuantizableLinear) and other is None:
        return f"{kind}: its parent reads the weight directly"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__} and no plain Parameter"
    if (type(module) not in (nn.Linear, nn.Conv2d) and other is None) or "forward" in vars(module):
        base = "nn.Conv2d" if isinstance(module, nn.Conv2d) else "nn.Linear"
        return f"{kind} with a forward of its own may compute something else than {base}"
    if has_hooks(module) or has_tensor_hooks(weight):
        return "it has hooks, which a new layer would lose"
    extent = _extent(weight)
    if extent is None or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, {weight.layout}"
    # All names that the weight has as part of this module are its own, whatever the module is called.
    if others := [name for name, other in owners if name not in own and _overlap(extent, other)]:
        return f"its weight is tied to {', '.join(others)}"
    if "" in names:
        layer = "BlockSparseConv2d" if isinstance(module, nn.Conv2d) else "BlockSparseLinear"
        return f"it is the model itself: use {layer}.from_dense"
    return None


def find_layers(model: nn.Module, *, rewritten: bool = False) -> list[Layer]:
    """Every module with a weight matrix, in order, with the reason why it cannot be replaced, or None.

    With `rewritten`, layers of other libraries that are nn.Linear in all but name can be, `Layer.linear()`,
    and the projections of nn.MultiheadAttention, experts in one tensor and the convolutions of images are
    layers, too.
    """
    if not isinstance(model, nn.Module):
        fail("find_layers", "model must be an nn.Module", type(model).__name__, TypeError)
    layers: dict[Any, Layer] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParametrizationList):  # part of a layer that is listed itself
            continue
        if rewritten and is_dense_experts(module):
            for number, part in itertools.product(range(len(getattr(module, PARTS[0]))), PARTS):
                key = (id(module), number, part)
                if key not in layers:
                    linear = linear_of(module, number, part)
                    layers[key] = ExpertLayer([], linear, holder=module, number=number, part=part)
                layers[key].names.append(f"{name}.{number}.{part}".lstrip("."))
            continue
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2
        is_conv = rewritten and isinstance(module, nn.Conv2d | BlockSparseConv2d)
        if is_matrix or is_conv or isinstance(module, nn.Linear | nn.MultiheadAttention | BlockSparseLinear):
            layer = layers.setdefault(id(module), (Convolution if is_conv else Layer)([], module))
            layer.names.append(name)
            parent, _, key = name.rpartition(".")
            if name:
                layer.places.append((model.get_submodule(parent), key))
    owners, found = _owners(model), list(layers.values())
    if rewritten:
        found = [part for layer in found for part in _projections(layer)]
    for layer in found:
        parents, own = [parent for parent, _ in layer.places], set(layer.parameter_names)
        layer.reason = _why_not(layer.module, layer.names, own, parents, owners, rewritten)
    return found
