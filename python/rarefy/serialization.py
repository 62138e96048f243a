"""save_file: models with sparse layers as safetensors files; what a file says of its weights.

A weight M.weight is the tensors of its format (M.weight.values, M.weight.crow_indices …) and an entry of
the metadata "rarefy" with its true shape, so that any safetensors reader can open the file. loading.py
reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file as save_tensors
from torch import nn

from ._torch_private import storage_of
from .backend import __version__
from .checks import check_tensor, fail
from .files import replacing
from .log import growing, logger
from .sparse_weight import SparseWeight, formats, reserved_endings

FORMAT = "bsr-v1"
KEY = "rarefy"  # of the file's metadata
METHOD = "rarefy"  # the quant_method of a config.json
DEFAULT = "bsr"  # the format of an entry that names none


def save_file(
    model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the state_dict of a model, dense or with sparse layers, as a safetensors file.

    Tensors that share memory (tied weights) are stored once; the metadata says which name stands for
    which, as safetensors' own save_model does. Padding is written as zeros. The file appears in one
    step: a crash leaves the old one.

    Args:
        model: any module whose state_dict holds tensors.
        path: where to.
        metadata: further entries, text to text; "rarefy" and the names of tensors are taken.

    Raises:
        TypeError: the state_dict holds something else than tensors with data, or metadata that is not text.
        ValueError: metadata has a key that is taken; a tensor outside a sparse weight is named like
            its indices.
        OSError: the file cannot be written.
    """
    op = "save_file"
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
    state = model.state_dict()
    _check_metadata(op, metadata or {}, state)
    for key, tensor in state.items():
        check_tensor(op, key, tensor)
        if tensor.is_meta:
            fail(op, f"{key} must hold data", "a tensor on the meta device", TypeError)
    weights = _weights(op, model)
    pieces = {f"{name}.{piece}" for name, weight in weights.items() for piece in weight.pieces}
    for key in state:
        if key.endswith(reserved_endings()) and key not in pieces:
            endings = " or ".join(reserved_endings())
            fail(op, f"names that end in {endings} must belong to a sparse weight", key)

    kept, aliases = _without_shared({k: t for k, t in state.items() if k not in pieces})
    modules, ties = entries_of(op, model)
    for name, first in ties.items():
        aliases |= {f"{name}.{piece}": f"{first}.{piece}" for piece in weights[name].pieces}
    for name in modules:
        # Pieces are contiguous and may be shared with other weights (a pattern, one Parameter): no aliases
        # here, since a reader wants the pieces of each entry; safetensors wants memory of their own.
        pieces = {f"{name}.{p}": state[f"{name}.{p}"] for p in weights[name].pieces}
        kept |= _without_shared(pieces, shared=kept)[0]
    write(kept, {**aliases, **(metadata or {}), **header(modules)}, Path(path))


def _weights(op: str, model: nn.Module) -> dict[str, SparseWeight]:
    """The sparse weights of a model under all their names."""
    weights = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, SparseWeight)}
    if "" in weights:
        kind = type(weights[""]).__name__
        fail(op, f"model must be a module around a {kind}", f"a {kind} alone", TypeError)
    return weights


def entries_of(op: str, model: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What a file says of the sparse weights of a model, and which of them stand for which others."""
    modules: dict[str, dict[str, Any]] = {}
    ties: dict[str, str] = {}
    stored: list[tuple[str, SparseWeight]] = []
    for name, weight in _weights(op, model).items():
        first = next((n for n, other in stored if weight.is_tied_to(other)), None)
        if first is not None:
            ties[name] = first
            continue
        stored.append((name, weight))
        modules[name] = entry_of(weight)
    return modules, ties


def header(modules: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """What makes a file's metadata those of a bsr-v1 file with these entries."""
    return {KEY: json.dumps({"format": FORMAT, "version": __version__, "modules": modules})}


def entry_of(weight: SparseWeight) -> dict[str, Any]:
    """What a file says of a sparse weight."""
    return ({} if weight.format == DEFAULT else {"format": weight.format}) | weight.metadata()


def _check_metadata(op: str, metadata: Mapping[str, str], state: Mapping[str, Any]) -> None:
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            fail(op, "metadata must map str to str", f"{key!r}: {text!r}", TypeError)
        if any("\ud800" <= character <= "\udfff" for character in key + text):
            fail(op, "metadata must be Unicode text, which has no surrogates", ascii(f"{key}: {text}"))
        if key in state:
            fail(op, "metadata must leave the names of tensors to save_file", repr(key))
        if text in state:
            fail(op, "metadata must not be the name of a tensor, which would tie the key to it", repr(text))
    if KEY in metadata:
        fail(op, f'metadata must leave "{KEY}" to save_file', "a value of its own")


def _without_shared(
    state: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors to store, contiguous and each with memory of its own, and which name stands for which.

    With `shared`, tensors to store already, nothing stands for anything: what shares memory is copied.
    """
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    storages = {storage_of(tensor) for tensor in (shared or {}).values()}
    for name, tensor in state.items():
        storage = storage_of(tensor)
        view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if shared is None and tensor.numel() and view in seen:
            aliases[name] = seen[view]
            continue
        seen[view] = name
        # Views of one storage that differ cannot stand for each other: each gets a copy.
        tensor = tensor.detach().clone() if storage in storages else tensor.detach()
        storages.add(storage)
        kept[name] = tensor.contiguous().cpu()
    return kept, aliases


def write(tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: Path) -> None:
    """A safetensors file, in one step."""
    try:
        total = sum(tensor.nbytes for tensor in tensors.values())
        with replacing(path) as temporary, growing(temporary, total, f"writing {path.name}"):
            save_tensors(tensors, temporary, metadata=metadata)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"[save_file] path must be writable; got {path}: {error}") from None
    logger.info("save_file: %s, %d tensors", path, len(tensors))


# What loading.py reads ---------------------------------------------------------------------------


def format_of(op: str, name: str, entry: Any) -> tuple[type[SparseWeight], dict[str, Any]]:
    """The format of an entry of the metadata, and the entry without it."""
    if not isinstance(entry, dict):
        fail(op, f"the metadata of {name} must be an object", type(entry).__name__)
    entry = dict(entry)
    format_name = entry.pop("format", DEFAULT)
    known = formats()
    if not isinstance(format_name, str) or format_name not in known:
        fail(op, f"the format of {name} must be one of {', '.join(sorted(known))}", repr(format_name))
    return known[format_name], entry


def build(
    op: str, name: str, tensors: dict[str, torch.Tensor], kind: type[SparseWeight], entry: Mapping[str, Any]
) -> SparseWeight:
    """The weight called `name`, validated; takes its pieces out of `tensors`."""
    missing = [p for p in kind.pieces if f"{name}.{p}" not in tensors]
    if missing:
        fail(op, f"{name} must have {', '.join(kind.pieces)}", f"no {' and no '.join(missing)}")
    return weight_of(op, name, {p: tensors.pop(f"{name}.{p}") for p in kind.pieces}, kind, entry)


def weight_of(
    op: str, name: str, pieces: Mapping[str, torch.Tensor], kind: type[SparseWeight], entry: Mapping[str, Any]
) -> SparseWeight:
    """The weight called `name` of its pieces, validated. Errors name it."""
    try:
        return kind.from_pieces({piece: tensor.detach() for piece, tensor in pieces.items()}, entry)
    except (ValueError, TypeError) as error:
        raise type(error)(f"[{op}] {name}: {error}") from None
