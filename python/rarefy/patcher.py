"""Finds a model's linear layers, says which can become block-sparse and why others cannot, and swaps them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from .checks import check_int, fail
from .modules import BlockSparseLinear
from .pseudo import PseudoBlockSparseLinear
from .report import Report, environment
from .report_data import LayerRow
from .sparse_weight import Spec
from .timing import time_layers

FilterFn = Callable[[str, nn.Module], bool]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS += ("_state_dict_hooks", "_state_dict_pre_hooks")
_HOOKS += ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


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
        return None if weight is None or lazy else tuple(weight.shape)

    def replace(self, module: nn.Module) -> None:
        """Puts `module` wherever this layer is used."""
        for parent, key in self.places:
            setattr(parent, key, module)


def _storage(tensor: torch.Tensor) -> int | None:
    """The same number for tensors that share memory; None for those without memory of their own."""
    lazy = isinstance(tensor, nn.parameter.UninitializedTensorMixin)
    return None if lazy or tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def _storage_owners(model: nn.Module) -> dict[int | None, list[str]]:
    """Names of the parameters and buffers in each storage; those of one module count once."""
    owners: dict[int | None, list[str]] = {}
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(_storage(tensor), []).append(f"{name}.{key}".lstrip("."))
    return owners


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is registered on this module that a new one in its place would lose."""
    return any(getattr(module, hooks, None) for hooks in _HOOKS)


def _why_not(
    module: nn.Module, names: list[str], parents: list[nn.Module], owners: dict[int | None, list[str]]
) -> str | None:
    """Why this module cannot become block-sparse without changing what the model computes, or None."""
    kind = type(module).__name__
    if isinstance(module, BlockSparseLinear | PseudoBlockSparseLinear):
        return "already block-sparse"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding looks rows up instead of multiplying"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by its parameters itself"
    if any(isinstance(parent, nn.MultiheadAttention) for parent in parents):
        return "nn.MultiheadAttention reads this weight directly and never calls the layer"
    if not isinstance(module, nn.Linear):
        return f"{kind} is not an nn.Linear"
    if is_parametrized(module):
        return "its parameters are parametrized (torch.nn.utils.parametrize)"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters (weight norm, torch pruning)"
    if isinstance(weight, nn.parameter.UninitializedTensorMixin):
        return "a lazy layer without a shape yet: run the model once"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"{kind}: its parent reads the weight directly"
    if type(module) is not nn.Linear or "forward" in vars(module):
        return f"{kind} with a forward of its own may compute something else than nn.Linear"
    if has_hooks(module) or weight._backward_hooks:
        return "it has hooks, which a new layer would lose"
    if _storage(weight) is None or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, {weight.layout}"
    # All names that the weight has as part of this module are its own, whatever the module is called.
    own = {f"{name}.weight".lstrip(".") for name in names}
    if others := [name for name in owners[_storage(weight)] if name not in own]:
        return f"its weight is tied to {', '.join(others)}"
    if "" in names:
        return "it is the model itself: use BlockSparseLinear.from_dense"
    return None


def find_layers(model: nn.Module) -> list[Layer]:
    """Every module with a weight matrix, in order, with the reason why it cannot be replaced, or None."""
    if not isinstance(model, nn.Module):
        fail("find_layers", "model must be an nn.Module", type(model).__name__, TypeError)
    layers: dict[int, Layer] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParametrizationList):  # part of a layer that is listed itself
            continue
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2
        if is_matrix or isinstance(module, nn.Linear | nn.MultiheadAttention | BlockSparseLinear):
            layer = layers.setdefault(id(module), Layer([], module))
            layer.names.append(name)
            parent, _, key = name.rpartition(".")
            if name:
                layer.places.append((model.get_submodule(parent), key))
    owners = _storage_owners(model)
    for layer in layers.values():
        layer.reason = _why_not(layer.module, layer.names, [p for p, _ in layer.places], owners)
    return list(layers.values())


def _near(name: str, names: Iterable[str]) -> str:
    """The names most like this one, for an error message."""
    names = list(names)
    close = difflib.get_close_matches(name.replace("\\", ""), names, n=5, cutoff=0.3) or names[:5]
    return ", ".join(close) or "none"


class BlockSparseModelPatcher:
    r"""Replaces the linear layers whose qualified names match a pattern by BlockSparseLinear, values kept.

    patcher = BlockSparseModelPatcher()
    patcher.add_pattern(r"encoder\.layer\.\d+\.output\.dense", "block:16x16@0.5")
    report = patcher.patch_model(model)

    Patterns must match the whole name. Where two match a layer, the one that was added first counts.
    """

    def __init__(self) -> None:
        self.patterns: list[tuple[re.Pattern[str], Spec]] = []

    def add_pattern(self, pattern: str | re.Pattern[str], spec: Any) -> None:
        """Adds a regular expression and what its layers become.

        Args:
            pattern: matched against the whole qualified name of a layer.
            spec: "block:16x16@0.5", "csr@0.1", {"block_shape": (16, 16), "density": 0.5} or a Spec.

        Raises:
            ValueError: an expression or a spec that cannot be read.
            TypeError: another kind of object.
        """
        op = "add_pattern"
        if not isinstance(pattern, str | re.Pattern):
            fail(op, "pattern must be a str", type(pattern).__name__, TypeError)
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            fail(op, "pattern must be a regular expression", f"{pattern!r}: {error}")
        self.patterns.append((compiled, Spec.parse(spec, op)))

    def get_patchable_layers(self, model: nn.Module) -> list[Layer]:
        """The layers of `model` that can become block-sparse, whatever the patterns."""
        return [layer for layer in find_layers(model) if layer.reason is None]

    def patch_model(
        self,
        model: nn.Module,
        *,
        scores: Mapping[str, torch.Tensor] | None = None,
        filter_fn: FilterFn | None = None,
        dry_run: bool = False,
        measure: bool = True,
        tokens: int = 512,
    ) -> Report:
        """Replaces the matching layers in place and reports on every layer; see rarefy.sparsify."""
        op = "patch_model"
        check_int(op, "tokens", tokens, 1)
        layers = find_layers(model)
        specs = self._assign(op, layers)
        scores = {} if scores is None else scores
        if not isinstance(scores, Mapping):
            fail(op, "scores must be a mapping of layer names to tensors", type(scores).__name__, TypeError)
        names = [name for layer in layers if layer.name in specs for name in layer.names]
        for name in scores:
            if name not in names:
                got = f"{name!r}; near names: {_near(str(name), names)}"
                fail(op, "scores must be for layers that a pattern matches", got)

        rows: list[LayerRow] = []
        replacements: list[tuple[Layer, BlockSparseLinear]] = []
        measured: list[tuple[LayerRow, nn.Linear, BlockSparseLinear]] = []
        for layer in layers:
            spec = specs.get(layer.name)
            row = LayerRow(layer.name, layer.names[1:], layer.shape, matched=spec is not None)
            rows.append(row)
            row.reason = _why_stays(layer, spec, filter_fn)
            if row.reason is not None:
                continue
            given = next((scores[name] for name in layer.names if name in scores), None)
            sparse = _sparse_copy(op, layer, spec, given)
            replacements.append((layer, sparse))
            row.format, row.density = spec.format + spec.suffix, sparse.density
            row.dense_bytes = layer.module.weight.numel() * layer.module.weight.element_size()
            row.sparse_bytes = sparse.weight.nbytes
            measured.append((row, layer.module, sparse))
        if measure:
            time_layers(measured, tokens)
        # Nothing has changed so far; from here on nothing can fail.
        if not dry_run:
            for layer, sparse in replacements:
                layer.replace(sparse)
        return Report(rows, tokens=tokens, dry_run=dry_run, environment=environment())

    def _assign(self, op: str, layers: list[Layer]) -> dict[str, Spec]:
        """The spec of each matched layer; every pattern must have at least one layer of its own."""
        if not self.patterns:
            fail(op, "there must be at least one pattern", "none")
        specs: dict[str, Spec] = {}
        for pattern, spec in self.patterns:
            matched = [layer for layer in layers if any(map(pattern.fullmatch, layer.names))]
            if not matched:
                near = _near(pattern.pattern, [name for layer in layers for name in layer.names])
                got = f"{pattern.pattern!r}, which matches none; near names: {near}"
                fail(op, "a pattern must match the whole name of a layer", got)
            own = [layer for layer in matched if layer.name not in specs]
            if not own:
                taken = _near(pattern.pattern, [layer.name for layer in matched])
                got = f"{pattern.pattern!r}, which only matches {taken}"
                fail(op, "a pattern must match a layer that no earlier pattern took", got)
            specs |= {layer.name: spec for layer in own}
        return specs


def _why_stays(layer: Layer, spec: Spec | None, filter_fn: FilterFn | None) -> str | None:
    if spec is None:
        return "no pattern matches"
    if layer.reason is not None:
        return layer.reason
    if layer.module.weight.is_meta:
        return "its weight is on the meta device and holds no values"
    if (reason := spec.why_not(layer.shape)) is not None:
        return reason
    if filter_fn is not None and not filter_fn(layer.name, layer.module):
        return "filter_fn declined it"
    return None


def _sparse_copy(op: str, layer: Layer, spec: Spec, scores: torch.Tensor | None) -> BlockSparseLinear:
    try:
        sparse = BlockSparseLinear.from_dense(layer.module, spec=spec, scores=scores)
    except (ValueError, TypeError) as error:
        raise type(error)(f"[{op}] layer {layer.name}: {error}") from None
    sparse.bias = layer.module.bias  # the same Parameter: a tie to it stays a tie
    return sparse
