"""load_file and load_state_dict: sparse weights with their patterns into a model, after all checks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ._torch_private import storage_of
from .checks import check_tensor, fail
from .experts import unpacked
from .fusing import fuse as fuse_networks
from .layers import SPARSE, Layer, find_layers
from .log import logger
from .serialization import FORMAT, KEY, build, format_of
from .sparse_weight import SparseWeight, formats, reserved_endings
from .values import new_values


def load_file(
    model: nn.Module, path: str | os.PathLike[str], *, mmap: bool = False, fuse: bool = True
) -> None:
    """Loads a file of save_file, in place; linear layers that the file has as sparse become sparse.

    Args:
        model: a skeleton of the same architecture: its layers may be dense, sparse with any pattern and
            format, or on the meta device (then the file's tensors take their place, on the CPU).
        path: the file.
        mmap: leave values of new weights on the CPU in the file, mapped into memory: quick, and read as
            they are used, but the file must neither change nor shrink as long as the model lives.
        fuse: whether feed-forward networks run as one op where nothing is recorded; see rarefy.fuse.

    Devices, training mode, requires_grad and activations stay those of the model. Everything is checked
    before the model changes.

    Raises:
        ValueError: not such a file, a pattern, shape or padding that is not valid, names that the file
            or the model lacks.
        TypeError: a dtype that is not the model's.
        OSError: the file cannot be read.
    """
    op = "load_file"
    _check_model(op, model)
    if not Path(path).is_file():
        raise FileNotFoundError(f"[{op}] path must be a file; got {os.fspath(path)}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"[{op}] path must be a safetensors file; got {os.fspath(path)}: {error}") from None
    modules = entries_in(op, metadata)
    with unpacked(model, modules):
        _load(op, model, tensors, metadata, modules, mmap)
    fuse_networks(model, fuse)
    logger.info("load_file: %s, %d sparse weights", path, len(modules))


def _load(
    op: str,
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    metadata: Mapping[str, str],
    modules: Mapping[str, Any],
    mmap: bool,
) -> None:
    """Puts what a file has into a model."""
    places = _Places(op, model, () if mmap else tensors.values())
    weights = {}
    for name, value in modules.items():
        kind, entry = format_of(op, name, value)
        shape = entry.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int for n in shape):
            fail(op, f"shape in the metadata of {name} must be two ints", shape)
        places.check_shape(name, shape)  # before a plan is made, whose size grows with the shape
        weights[name] = build(op, name, tensors, kind, entry)
    for key in tensors:
        if key.endswith(reserved_endings()):
            fail(op, f'metadata "rarefy" must describe the weight of {key}', "no entry for it")
    aliases = {k: v for k, v in metadata.items() if k != KEY and k not in tensors}
    _add_tied(weights, aliases, places)
    aliases = {k: v for k, v in aliases.items() if v in tensors}
    _restore(op, model, tensors, weights, aliases, places)


def restore(
    op: str, model: nn.Module, tensors: dict[str, torch.Tensor], weights: dict[str, SparseWeight]
) -> None:
    """Puts tensors and sparse weights into a model, as load_state_dict does, after checking all of them."""
    _restore(op, model, tensors, weights, {}, _Places(op, model, tensors.values()))


def _add_tied(weights: dict[str, SparseWeight], aliases: Mapping[str, str], places: _Places) -> None:
    """Weights that stand for others by the file's aliases of their pieces, unless it is the same module."""
    for alias, target in aliases.items():
        name, _, piece = alias.rpartition(".")
        source, _, other = target.rpartition(".")
        if piece != other or source not in weights or piece not in weights[source].pieces:
            continue
        if name not in weights and name not in places.names_at(source):
            weights[name] = weights[source]


def load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Loads a state_dict in place and takes its patterns over, where model.load_state_dict refuses others.

    Layers may change their pattern, block shape and format, and dense ones become sparse, as in load_file,
    with the same checks and errors. Values are copied. A layer that stays in its format keeps its Parameter,
    whose data may become larger or smaller; others get a new one: make the optimizer afterwards.

    Raises ValueError for tensors that are lacking, left over or do not fit their layer, TypeError for another
    kind of object; the model is then as it was.
    """
    op = "load_state_dict"
    _check_model(op, model)
    if not isinstance(state_dict, Mapping):
        fail(op, "state_dict must be a mapping", type(state_dict).__name__, TypeError)
    tensors = dict(state_dict)
    for key, tensor in tensors.items():
        check_tensor(op, key, tensor)
    names = sorted({key.rpartition(".")[0] for key in tensors if key.endswith(reserved_endings())})
    with unpacked(model, names):
        places = _Places(op, model, tensors.values())
        weights = {}
        for name in names:
            shape = places.shape_at(name)
            kind, entry = _infer(op, name, tensors, shape)
            weights[name] = build(op, name, tensors, kind, entry)
        _restore(op, model, tensors, weights, {}, places)


def set_strict_pattern(model: nn.Module, strict: bool) -> None:
    """Says for all sparse weights of a model whether model.load_state_dict refuses other patterns.

    They do by default. With False a weight takes the pattern of a state_dict over, in blocks of its own
    shape, and its Parameter stays the same object: for code that loads checkpoints by itself, as a Trainer
    does when it resumes. It is `weight.strict_pattern` of each of them.

    Raises TypeError for what is no nn.Module.
    """
    _check_model("set_strict_pattern", model)
    for module in model.modules():
        if isinstance(module, SparseWeight):
            module.strict_pattern = bool(strict)


def _infer(
    op: str, name: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> tuple[type[SparseWeight], dict[str, Any]]:
    """The format whose tensors `name` has, and the metadata that they have in no state_dict."""
    found = {}
    for kind in sorted(formats().values(), key=lambda kind: -len(kind.pieces)):  # what has more says more
        pieces = {p: tensors[f"{name}.{p}"] for p in kind.pieces if f"{name}.{p}" in tensors}
        found |= {piece: tuple(tensor.shape) for piece, tensor in pieces.items()}
        if (entry := kind.infer(pieces, shape)) is not None:
            break
    else:
        fail(op, f"{name}.values must be there, with the dtype and dimensions of a format", found)
    return kind, entry


def _check_model(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)


def entries_in(op: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The modules that a file's metadata declares."""
    if KEY not in metadata:
        fail(
            op,
            'file must have the metadata "rarefy" (load a dense file with safetensors.torch.load_model)',
            "none",
        )
    try:
        root = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise ValueError(f'[{op}] metadata "rarefy" must be JSON; got {error}') from None
    if not isinstance(root, dict) or root.get("format") != FORMAT:
        got = root.get("format") if isinstance(root, dict) else type(root).__name__
        fail(op, f'metadata "rarefy" must be of format "{FORMAT}"', repr(got))
    if not isinstance(root.get("modules"), dict):
        fail(op, 'metadata "rarefy" must have an object "modules"', type(root.get("modules")).__name__)
    return root["modules"]


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class _Places:
    """Where in a model a sparse weight can go: containers, and dense layers that can become sparse."""

    def __init__(self, op: str, model: nn.Module, foreign: Iterable[torch.Tensor]) -> None:
        self.op = op
        # Memory that new weights must not keep: the file's, which is mapped, or the state_dict's.
        self.foreign = {storage_of(tensor) for tensor in foreign}
        self.layers = {n: layer for layer in find_layers(model, rewritten=True) for n in layer.weight_names}
        modules = list(model.named_modules(remove_duplicate=False))
        self.containers = {name: module for name, module in modules if isinstance(module, SparseWeight)}

    def layer_at(self, name: str) -> Layer:
        """The layer whose weight is called `name`; raises if there is none that can become sparse."""
        layer = self.layers.get(name)
        fits = layer is not None and isinstance(layer.linear(), nn.Linear | nn.Conv2d | SPARSE)
        if not fits:
            requirement = "a block-sparse weight must belong to a linear layer or a convolution of the model"
            fail(self.op, requirement, repr(name))
        if layer.reason is not None and not isinstance(layer.module, SPARSE):
            fail(self.op, f"{layer.name} must be a layer that can become sparse", layer.reason)
        return layer

    def weight_at(self, name: str) -> SparseWeight | nn.Parameter:
        """The weight called `name`, sparse or dense."""
        return self.containers[name] if name in self.containers else self.layer_at(name).module.weight

    def shape_at(self, name: str) -> tuple[int, ...]:
        """(N, K) of the weight called `name`."""
        return tuple(self.containers[name].shape if name in self.containers else self.layer_at(name).shape)

    def names_at(self, name: str) -> list[str]:
        """All names of the weight called `name`, as names of weights."""
        if name in self.containers:
            return [n for n, m in self.containers.items() if m is self.containers[name]]
        return self.layer_at(name).weight_names

    def keys_at(self, name: str) -> set[str]:
        """Keys of the state_dict that a new weight at `name` replaces, under all names of its module."""
        names = self.names_at(name)
        if name not in self.containers:
            return set(names)
        return {f"{n}.{piece}" for n in names for piece in self.containers[name].pieces}

    def check_shape(self, name: str, shape: Iterable[int]) -> None:
        """Raises unless the model's weight called `name` is of this shape."""
        mine = self.shape_at(name)
        if mine != tuple(shape):
            fail(self.op, f"{name} must be of shape {mine}", tuple(shape))

    def change(self, name: str, weight: SparseWeight) -> Callable[[], None]:
        """A function that puts `weight` at `name`; raises if it does not fit there."""
        self.check_shape(name, weight.shape)
        old = self.weight_at(name)
        sparse = isinstance(old, SparseWeight)
        if sparse and weight.x_dtype is None and weight.dtype == old.dtype:
            weight.x_dtype = old.x_dtype  # which a state_dict does not say
            weight.rounds_x = old.rounds_x and weight.format == old.format
        elif weight.x_dtype is None and weight.computes_in_x_dtype:
            weight.x_dtype = old.x_dtype or old.dtype if sparse else old.dtype
        computes = [w.x_dtype or w.dtype if isinstance(w, SparseWeight) else w.dtype for w in (old, weight)]
        _check_same_dtype(self.op, name, *computes)
        if old.device.type not in ("meta", weight.device.type):
            weight = weight.to(old.device)
        weight.requires_grad_(old.requires_grad)
        if name in self.layers:
            self.layers[name].check(weight)
        if sparse and isinstance(old, type(weight)):
            return lambda: (old.assign_(weight), self._own(old))
        layer = self.layer_at(name)
        if sparse:
            return lambda: layer.put(self._own(weight).train(layer.module.training))
        module = layer.around(weight)  # with the same bias, whose value comes with the other tensors
        return lambda: (self._own(weight), layer.replace(module))

    def _own(self, weight: SparseWeight) -> SparseWeight:
        """`weight`, whose Parameters get memory of their own where they have the file's or state_dict's."""
        for parameter in weight.parameters():
            if storage_of(parameter) in self.foreign:
                parameter.data = parameter.data.clone()
        return weight


def _check_same_dtype(op: str, name: str, mine: torch.dtype, theirs: torch.dtype) -> None:
    if mine != theirs:
        names = [str(dtype).removeprefix("torch.") for dtype in (mine, theirs)]
        advice = "as in the model (model.to(dtype) changes that)"
        fail(op, f"{name} must be {names[0]}, {advice}", names[1], TypeError)


def _restore(
    op: str,
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    weights: dict[str, SparseWeight],
    aliases: Mapping[str, str],
    places: _Places,
) -> None:
    """Puts weights and tensors into the model, after checking all of them."""
    changes = [places.change(name, weight) for name, weight in weights.items()]
    state = model.state_dict(keep_vars=True)
    expected = set(state).difference(*(places.keys_at(name) for name in weights))
    tensors = tensors | {k: tensors[v] for k, v in aliases.items() if k in expected and v in tensors}
    if missing := expected - set(tensors):
        fail(op, "every tensor of the model must be there", f"none for {_some(missing)}")
    if unexpected := set(tensors) - expected:
        fail(op, "every tensor must have a place in the model", f"no place for {_some(unexpected)}")
    extra = {key: tensors.pop(key) for key in list(tensors) if key.endswith(_EXTRA_STATE)}
    slots = [_slot(op, model, key, tensor) for key, tensor in tensors.items()]
    first: dict[int, str] = {}
    for key, tensor in tensors.items():
        twin = first.setdefault(id(state[key]), key)
        if not _same_bits(tensor, tensors[twin]):
            fail(op, f"{key} must equal {twin}, to which the model ties it", "other values")

    for apply in changes:
        apply()
    fresh: dict[int, torch.Tensor] = {}
    for (path, attribute), tensor in zip(slots, tensors.values(), strict=True):
        _fill(model.get_submodule(path), attribute, tensor, fresh)
    for key, tensor in extra.items():
        module = model.get_submodule(key.removesuffix(_EXTRA_STATE).removesuffix("."))
        module.set_extra_state(tensor.detach().clone())


_EXTRA_STATE = "_extra_state"  # what nn.Module calls the entry of get_extra_state


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = [t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


def _slot(op: str, model: nn.Module, key: str, tensor: torch.Tensor) -> tuple[str, str]:
    """Module path and attribute of a tensor of the state_dict, after checking shape and dtype."""
    path, _, attribute = key.rpartition(".")
    try:
        target = getattr(model.get_submodule(path), attribute)
    except AttributeError:
        target = None
    if not isinstance(target, torch.Tensor):
        fail(op, f"{key} must be a parameter or buffer of the model", type(target).__name__)
    if target.shape != tensor.shape:
        fail(op, f"{key} must be of shape {tuple(target.shape)}", tuple(tensor.shape))
    _check_same_dtype(op, key, target.dtype, tensor.dtype)
    expanded = any(n > 1 and step == 0 for n, step in zip(target.shape, target.stride(), strict=True))
    if expanded and not target.is_meta:
        fail(op, f"{key} must have memory for each element in the model", f"strides {target.stride()}")
    return path, attribute


@torch.no_grad()
def _fill(module: nn.Module, attribute: str, tensor: torch.Tensor, fresh: dict[int, torch.Tensor]) -> None:
    """Copies a tensor into its slot. `fresh` holds what took the place of meta tensors, so that ties stay."""
    target = getattr(module, attribute)
    if not target.is_meta:
        target.copy_(tensor)
        return
    if id(target) not in fresh:
        data = tensor.detach().clone()
        fresh[id(target)] = (
            new_values(data, target.requires_grad) if isinstance(target, nn.Parameter) else data
        )
    setattr(module, attribute, fresh[id(target)])
