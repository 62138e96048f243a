"""Saves and loads models with block-sparse layers: bsr-v1 in safetensors, and plain state_dicts.

A weight M.weight is three tensors (M.weight.values, .crow_indices, .col_indices) and an entry of the
metadata "rarefy" with its true shape, so that any safetensors reader can open the file.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file as save_tensors
from torch import nn

from .backend import __version__
from .checks import DTYPE_NAMES, check_tensor, fail
from .files import replacing
from .modules import BlockSparseLinear
from .patcher import Layer, find_layers
from .weight import BsrWeight

FORMAT = "bsr-v1"
_KEY = "rarefy"
_PIECES = ("values", "crow_indices", "col_indices")
_INDICES = (".crow_indices", ".col_indices")  # names that only pieces of a weight may end in


# Saving ------------------------------------------------------------------------------------------


def save_file(
    model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the state_dict of a model, dense or with block-sparse layers, as a safetensors file.

    Tensors that share memory (tied weights) are stored once; the metadata says which name stands for
    which, as safetensors' own save_model does. Padding is written as zeros. The file appears in one
    step: a crash leaves the old one.

    Args:
        model: any module whose state_dict holds tensors.
        path: where to.
        metadata: further entries, text to text; "rarefy" is taken.

    Raises:
        TypeError: the state_dict holds something else than tensors with data, or metadata that is not text.
        ValueError: metadata has the key "rarefy"; a tensor outside a BsrWeight is named like its indices.
        OSError: the file cannot be written.
    """
    op = "save_file"
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            fail(op, "metadata must map str to str", f"{key!r}: {text!r}", TypeError)
    if _KEY in (metadata or {}):
        fail(op, 'metadata must leave "rarefy" to save_file', "a value of its own")
    state = model.state_dict()
    for key, tensor in state.items():
        check_tensor(op, key, tensor)
        if tensor.is_meta:
            fail(op, f"{key} must hold data", "a tensor on the meta device", TypeError)

    weights = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, BsrWeight)}
    if "" in weights:
        fail(op, "model must be a module around a BsrWeight", "a BsrWeight alone", TypeError)
    pieces = {f"{name}.{piece}" for name in weights for piece in _PIECES}
    for key in state:
        if key.endswith(_INDICES) and key not in pieces:
            fail(op, f"names that end in {' or '.join(_INDICES)} must belong to a BsrWeight", key)

    kept, aliases = _without_shared({k: t for k, t in state.items() if k not in pieces})
    modules: dict[str, dict[str, Any]] = {}
    stored: dict[BsrWeight, str] = {}
    for name, weight in weights.items():
        first = stored.setdefault(weight, name)
        if first != name:
            aliases |= {f"{name}.{piece}": f"{first}.{piece}" for piece in _PIECES}
            continue
        kept |= {f"{name}.{piece}": tensor for piece, tensor in _clean_pieces(weight).items()}
        modules[name] = {
            "shape": list(weight.shape),
            "block_shape": list(weight.block_shape),
            "nnzb": weight.nnzb,
            "dtype": DTYPE_NAMES[weight.dtype],
        }
    entry = json.dumps({"format": FORMAT, "version": __version__, "modules": modules})
    _write(kept, {**aliases, **(metadata or {}), _KEY: entry}, Path(path))


def _without_shared(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors to store, contiguous and each with memory of its own, and which name stands for which."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        storage = tensor.untyped_storage()._cdata
        view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in seen:
            aliases[name] = seen[view]
            continue
        seen[view] = name
        # Views of one storage that differ cannot stand for each other: each gets a copy.
        tensor = tensor.detach().clone() if storage in storages else tensor.detach()
        storages.add(storage)
        kept[name] = tensor.contiguous().cpu()
    return kept, aliases


def _clean_pieces(weight: BsrWeight) -> dict[str, torch.Tensor]:
    """The tensors of a weight with zero padding; indices are copies, for weights may share a pattern."""
    if weight.shape[0] % weight.block_shape[0] or weight.shape[1] % weight.block_shape[1]:
        weight = copy.deepcopy(weight).zero_padding_()
    values, *indices = (getattr(weight, piece).detach().cpu() for piece in _PIECES)
    return dict(zip(_PIECES, (values.contiguous(), *(index.clone() for index in indices)), strict=True))


def _write(tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: Path) -> None:
    try:
        with replacing(path) as temporary:
            save_tensors(tensors, temporary, metadata=metadata)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"[save_file] path must be writable; got {path}: {error}") from None


# Loading -----------------------------------------------------------------------------------------


def load_file(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads a file of save_file, in place; linear layers that the file has as sparse become sparse.

    `model` is a skeleton of the same architecture: its layers may be dense, sparse with any pattern,
    or on the meta device (then the file's tensors take their place, on the CPU). Devices, training
    mode and requires_grad stay those of the model. Everything is checked before the model changes.

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
    modules = _entries(op, metadata)
    places = _Places(op, model)
    weights = {}
    for name, entry in modules.items():
        shape, block_shape = _check_entry(op, name, entry)
        places.check_shape(name, shape)  # before a plan is made, whose size grows with the shape
        weights[name] = _build(op, name, tensors, shape, block_shape)
        if (weights[name].nnzb, DTYPE_NAMES[weights[name].dtype]) != (entry["nnzb"], entry["dtype"]):
            got = f"{weights[name].nnzb} blocks of {DTYPE_NAMES[weights[name].dtype]}"
            fail(
                op, f"{name} must have {entry['nnzb']} blocks of {entry['dtype']}, as its metadata says", got
            )
    for key in tensors:
        if key.endswith(_INDICES):
            fail(op, f'metadata "rarefy" must describe the weight of {key}', "no entry for it")
    aliases = {k: v for k, v in metadata.items() if k != _KEY and k not in tensors and v in tensors}
    _restore(op, model, tensors, weights, aliases)


def load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Loads a state_dict in place and takes its patterns over, where model.load_state_dict refuses others.

    Layers may change their pattern and block shape, and dense ones become sparse, as in load_file, with
    the same checks and errors. Values are copied. A layer whose pattern is the same keeps its Parameter;
    others get a new one: make the optimizer afterwards.
    """
    op = "load_state_dict"
    _check_model(op, model)
    if not isinstance(state_dict, Mapping):
        fail(op, "state_dict must be a mapping", type(state_dict).__name__, TypeError)
    tensors = dict(state_dict)
    for key, tensor in tensors.items():
        check_tensor(op, key, tensor)
    places = _Places(op, model)
    weights = {}
    for key in [k for k in tensors if k.endswith(".crow_indices")]:
        name = key.removesuffix(".crow_indices")
        values = tensors.get(f"{name}.values")
        if values is None or values.ndim != 3:
            got = "none" if values is None else f"{values.ndim} dimensions"
            fail(op, f"{name}.values must be there, with 3 dimensions", got)
        for piece in _PIECES:
            if f"{name}.{piece}" in tensors:
                tensors[f"{name}.{piece}"] = tensors[f"{name}.{piece}"].detach().clone()
        shape = tuple(places.weight_at(name).shape)
        weights[name] = _build(op, name, tensors, shape, tuple(values.shape[1:]))
    _restore(op, model, tensors, weights, {})


def _check_model(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)


def _entries(op: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The modules that the metadata declares."""
    if _KEY not in metadata:
        fail(
            op,
            'file must have the metadata "rarefy" (load a dense file with safetensors.torch.load_model)',
            "none",
        )
    try:
        root = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as error:
        raise ValueError(f'[{op}] metadata "rarefy" must be JSON; got {error}') from None
    if not isinstance(root, dict) or root.get("format") != FORMAT:
        got = root.get("format") if isinstance(root, dict) else type(root).__name__
        fail(op, f'metadata "rarefy" must be of format "{FORMAT}"', repr(got))
    if not isinstance(root.get("modules"), dict):
        fail(op, 'metadata "rarefy" must have an object "modules"', type(root.get("modules")).__name__)
    return root["modules"]


def _check_entry(op: str, name: str, entry: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    if not isinstance(entry, dict) or set(entry) != {"shape", "block_shape", "nnzb", "dtype"}:
        got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        fail(op, f"the metadata of {name} must have shape, block_shape, nnzb and dtype", got)
    for key in ("shape", "block_shape"):
        pair = entry[key]
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) is int and n >= 0 for n in pair):
            fail(op, f"{key} in the metadata of {name} must be two non-negative ints", pair)
    if type(entry["nnzb"]) is not int or type(entry["dtype"]) is not str:
        got = f"{entry['nnzb']!r} and {entry['dtype']!r}"
        fail(op, f"nnzb and dtype in the metadata of {name} must be an int and a str", got)
    return tuple(entry["shape"]), tuple(entry["block_shape"])


def _build(
    op: str, name: str, tensors: dict[str, torch.Tensor], shape: tuple[int, ...], block_shape: tuple[int, ...]
) -> BsrWeight:
    """The weight of three tensors, validated; takes them out of `tensors`."""
    missing = [p for p in _PIECES if f"{name}.{p}" not in tensors]
    if missing:
        fail(op, f"{name} must have values, crow_indices and col_indices", f"no {' and no '.join(missing)}")
    pieces = [tensors.pop(f"{name}.{p}") for p in _PIECES]
    try:
        return BsrWeight(*pieces, shape=shape, block_shape=block_shape)
    except (ValueError, TypeError) as error:
        raise type(error)(f"[{op}] {name}: {str(error).removeprefix('[BsrWeight] ')}") from None


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class _Places:
    """Where in a model a block-sparse weight can go: containers, and dense layers that can become sparse."""

    def __init__(self, op: str, model: nn.Module) -> None:
        self.op = op
        self.layers = {name: layer for layer in find_layers(model) for name in layer.names}
        modules = list(model.named_modules(remove_duplicate=False))
        self.containers = {name: module for name, module in modules if isinstance(module, BsrWeight)}

    def layer_at(self, name: str) -> Layer:
        """The dense layer whose weight is called `name`; raises if there is none that can become sparse."""
        layer = self.layers.get(name.removesuffix("weight").removesuffix("."))
        if layer is None or not name.endswith("weight") or not isinstance(layer.module, nn.Linear):
            fail(self.op, "a block-sparse weight must belong to a linear layer of the model", repr(name))
        if layer.reason is not None:
            fail(self.op, f"{layer.name} must be a layer that can become sparse", layer.reason)
        return layer

    def weight_at(self, name: str) -> BsrWeight | nn.Parameter:
        """The weight called `name`, sparse or dense."""
        return self.containers[name] if name in self.containers else self.layer_at(name).module.weight

    def keys_at(self, name: str) -> set[str]:
        """Keys of the state_dict that a new weight at `name` replaces, under all names of its module."""
        if name in self.containers:
            same = [n for n, m in self.containers.items() if m is self.containers[name]]
            return {f"{n}.{piece}" for n in same for piece in _PIECES}
        return {f"{n}.weight".lstrip(".") for n in self.layer_at(name).names}

    def check_shape(self, name: str, shape: Iterable[int]) -> None:
        """Raises unless the model's weight called `name` is of this shape."""
        mine = tuple(self.weight_at(name).shape)
        if mine != tuple(shape):
            fail(self.op, f"{name} must be of shape {mine}", tuple(shape))

    def change(self, name: str, weight: BsrWeight) -> Callable[[], None]:
        """A function that puts `weight` at `name`; raises if it does not fit there."""
        self.check_shape(name, weight.shape)
        old = self.weight_at(name)
        _check_same_dtype(self.op, name, old.dtype, weight.dtype)
        if old.device.type != "meta":
            weight = weight.to(old.device)
        trains = old.values.requires_grad if isinstance(old, BsrWeight) else old.requires_grad
        weight.values.requires_grad_(trains)
        if isinstance(old, BsrWeight):
            return lambda: old.assign_(weight)
        layer = self.layer_at(name)
        sparse = BlockSparseLinear.from_weight(weight).train(layer.module.training)
        sparse.bias = layer.module.bias  # the same Parameter: its value comes with the other tensors
        return lambda: layer.replace(sparse)


def _check_same_dtype(op: str, name: str, mine: torch.dtype, theirs: torch.dtype) -> None:
    if mine != theirs:
        names = [str(dtype).removeprefix("torch.") for dtype in (mine, theirs)]
        advice = "as in the model (model.to(dtype) changes that)"
        fail(op, f"{name} must be {names[0]}, {advice}", names[1], TypeError)


def _restore(
    op: str,
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    weights: dict[str, BsrWeight],
    aliases: Mapping[str, str],
) -> None:
    """Puts weights and tensors into the model, after checking all of them."""
    places = _Places(op, model)
    changes = [places.change(name, weight) for name, weight in weights.items()]
    state = model.state_dict(keep_vars=True)
    expected = set(state).difference(*(places.keys_at(name) for name in weights))
    tensors = tensors | {k: tensors[v] for k, v in aliases.items() if k in expected and v in tensors}
    if missing := expected - set(tensors):
        fail(op, "every tensor of the model must be there", f"none for {_some(missing)}")
    if unexpected := set(tensors) - expected:
        fail(op, "every tensor must have a place in the model", f"no place for {_some(unexpected)}")
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
            nn.Parameter(data, target.requires_grad) if isinstance(target, nn.Parameter) else data
        )
    setattr(module, attribute, fresh[id(target)])
