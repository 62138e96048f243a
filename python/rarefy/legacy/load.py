"""read_legacy and load_legacy: old checkpoints as weights, and into a model; python -m rarefy convert."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..checks import fail
from ..dense import kind_of
from ..layers import find_layers
from ..loading import restore
from ..log import logger, progress
from ..serialization import entry_of, header, write
from ..sparse_weight import SparseWeight, reserved_endings
from ..spec import Spec
from . import blocks, compressed
from .readers import OP

_READERS = (*compressed.READERS, *blocks.READERS)
DENSE = "dense"


@dataclass(frozen=True)
class Found:
    """What a sparse weight of an old checkpoint was, and what it is now: a line of --explain."""

    name: str
    was: str
    now: str
    shape: tuple[int, ...]
    density: float

    def __str__(self) -> str:  # noqa: D105
        size = "×".join(map(str, self.shape))
        return f"{self.name}: {self.was}, {size} at density {self.density:.4g}; now {self.now}"


def read_legacy(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    spec: str | Spec | None = None,
    shapes: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[dict[str, torch.Tensor | SparseWeight], list[Found]]:
    """Reads a checkpoint of a format that its library no longer reads.

    Known are torch.nn.utils.prune (weight_orig and weight_mask), compressed-tensors' sparse-bitmask,
    sparse-24-bitmask and marlin-24, torchao's BlockSparseTensor, torch's sparse layouts and semi-structured
    tensors (of CUTLASS), pytorch_block_sparse, nn_pruning's SparseDimensionsLinear.

    Args:
        source: a state_dict, a file (safetensors, or of torch.save: no code in it is run), or a folder of
            safetensors or torch files.
        spec: what sparse weights become. None: blocks stay blocks, single elements become "csr". "dense",
            or a spec of rarefy.sparsify: "block:4x1@nonzero" keeps every block that is not zero.
        shapes: of the weights by name, where a format does not say them.

    Returns:
        All tensors by name, where sparse weights are a SparseWeight, and what was found.

    Raises:
        ValueError: nothing of these formats is there; tensors that contradict each other, with the name.
        TypeError: tensors of the wrong kind.
        OSError: a file cannot be read.
    """
    tensors: dict[str, Any] = dict(_tensors(source))
    shapes = shapes or {}
    target = None if spec is None or spec == DENSE else Spec.parse(spec, OP)
    found: list[Found] = []
    out: dict[str, Any] = {}

    def put(name: str, was: str, weight: SparseWeight | torch.Tensor) -> None:
        if isinstance(weight, torch.Tensor):
            out[name] = weight
            now, density = DENSE, float((weight != 0).double().mean()) if weight.numel() else 0.0
        else:
            density, now = weight.density, weight.spec_format()
            if spec is not None:
                dense = weight.to_dense().detach()
                why = None if target is None else target.why_not(tuple(weight.shape))
                weight = dense if target is None or why else target.make(dense)
                now = DENSE if target is None else f"dense, {why}" if why else weight.spec_format()
            out[name] = weight
        found.append(Found(name, was, now, tuple(weight.shape), density))
        logger.info("read_legacy: %s", found[-1])

    for reader in _READERS:
        for name in progress(reader.names(tensors), reader.format, "weight"):
            pieces, full = reader.take(name, tensors), name + reader.weight
            try:
                put(full, reader.format, reader.read(name, pieces, shapes.get(full)))
                if reader.read is blocks._dimensions:
                    bias = blocks.expanded_bias(name, pieces, shapes.get(full))
                    tensors |= {} if bias is None else {f"{name}.bias": bias}
            except (ValueError, TypeError, RuntimeError) as error:
                raise _named(error, name) from None
    for name, tensor in tensors.items():
        try:
            if isinstance(tensor, blocks.BlockSparseTensor):
                put(name, "torchao's BlockSparseTensor", blocks.torchao_blocks(name, tensor))
            elif isinstance(tensor, torch.sparse.SparseSemiStructuredTensor):
                put(name, "torch's semi-structured tensor", compressed.semi_structured(name, tensor))
            elif isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
                put(name, f"a {tensor.layout} tensor", blocks.torch_sparse(name, tensor))
            elif isinstance(tensor, torch.Tensor):
                out[name] = tensor
        except (ValueError, TypeError, RuntimeError) as error:
            raise _named(error, name) from None
    if not found:
        got = "none" if not out else f"{len(out)} others, the first {next(iter(out))}"
        fail(OP, "there must be tensors of a format that rarefy.load_legacy knows", got)
    return out, found


def _named(error: Exception, name: str) -> Exception:
    text = str(error)
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(text if text.startswith(f"[{OP}]") else f"[{OP}] {name}: {text}")


def load_legacy(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    spec: str | Spec | None = None,
) -> list[Found]:
    """Loads an old checkpoint into a model, in place; its linear layers become sparse as the weights were.

    Args:
        model: of the checkpoint's architecture, dense, sparse or on the meta device.
        source: a state_dict, a file or a folder; see rarefy.legacy.read_legacy.
        spec: what sparse weights become; None: what is nearest to what they were.

    Returns what was found, a line for each sparse weight. Everything is checked before the model changes.

    Raises as read_legacy does; ValueError for names or shapes that are not the model's, TypeError for dtypes.
    """
    if not isinstance(model, nn.Module):
        fail(OP, "model must be an nn.Module", type(model).__name__, TypeError)
    layers = [x for x in find_layers(model, rewritten=True) if x.shape is not None and len(x.shape) == 2]
    shapes = {name: tuple(layer.shape) for layer in layers for name in layer.weight_names}
    out, found = read_legacy(source, spec=spec, shapes=shapes)
    conv1d = {name for layer in layers if _is_conv1d(layer.module) for name in layer.weight_names}
    for name in conv1d.intersection(out):
        if isinstance(out[name], SparseWeight):  # the checkpoint has such a layer's weight transposed
            fail(OP, f'{name} must be of an nn.Linear (spec="dense" loads others)', "a Conv1D")
    weights = {name: w for name, w in out.items() if isinstance(w, SparseWeight)}
    restore(OP, model, {name: t for name, t in out.items() if name not in weights}, weights)
    return found


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a layer is transformers' Conv1D, or one that became sparse."""
    return "conv1d" in (kind_of(module), getattr(module, "stands_for", None))


# Sources -------------------------------------------------------------------------------------------


def _tensors(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return _state_dict(source)
    path = Path(source)
    if path.is_dir():
        # Of a Trainer's folder pytorch_model.bin: training_args.bin beside it is no checkpoint.
        kinds = ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt", "*.pth")
        files = next((sorted(path.glob(kind)) for kind in kinds if any(path.glob(kind))), [])
        if not files:
            fail(OP, f"the folder must hold one of {', '.join(kinds)}", path)
        return {key: tensor for file in files for key, tensor in _file(file).items()}
    if not path.is_file():
        raise FileNotFoundError(f"[{OP}] source must be a file or a folder; got {path}")
    return _file(path)


def _file(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        except SafetensorError as error:
            fail(OP, f"{path.name} must be a safetensors file", error)
    allowed = [
        (blocks.BlockSparseTensor, "torchao.sparsity.blocksparse.BlockSparseTensor"),
        (blocks.BlockSparseTensor, "torchao.prototype.sparsity.superblock.blocksparse.BlockSparseTensor"),
        torch.sparse.SparseSemiStructuredTensorCUTLASS,
        torch.sparse.SparseSemiStructuredTensorCUSPARSELT,
    ]
    try:
        # Indices of sparse tensors are checked while they are read, before anything follows them.
        with torch.serialization.safe_globals(allowed), torch.sparse.check_sparse_tensor_invariants():
            return _state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
        first = str(error).split("\n", 1)[0]
        fail(OP, f"{path.name} must be a state_dict that torch.load(weights_only=True) reads", first)


def _state_dict(found: Any) -> Mapping[str, Any]:
    """The state_dict in what torch.save wrote: itself, or under one of the usual names."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        fail(OP, "source must be a state_dict, of names and tensors", type(found).__name__, TypeError)
    return found


# python -m rarefy convert ----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Turns a checkpoint of an old sparse format into a bsr-v1 file; exit code 1 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m rarefy convert", description=main.__doc__)
    parser.add_argument("source", help="safetensors or torch file, or a folder of them")
    parser.add_argument("output", nargs="?", help="safetensors file to write; without, only --explain")
    parser.add_argument("--spec", help='"dense", "csr@nonzero", "2:4@nonzero", "block:4x1@nonzero" …')
    parser.add_argument("--explain", action="store_true", help="say what each sparse weight was and is")
    arguments = parser.parse_args(argv)
    if arguments.output is None and not arguments.explain:
        parser.error("an output or --explain must be given")
    try:
        out, found = read_legacy(arguments.source, spec=arguments.spec)
        if arguments.explain:
            print("\n".join(map(str, found)))
        if arguments.output is not None:
            save(out, Path(arguments.output))
    except (ValueError, TypeError, OSError) as error:
        print(f"rarefy: {error}")
        return 1
    return 0


def save(tensors: Mapping[str, torch.Tensor | SparseWeight], path: Path) -> None:
    """Writes what read_legacy returned as a bsr-v1 file, which rarefy.load_file reads."""
    kept: dict[str, torch.Tensor] = {}
    modules: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, SparseWeight):
            modules[name] = entry_of(tensor)
            kept |= {f"{name}.{piece}": getattr(tensor, piece).detach().clone() for piece in tensor.pieces}
        elif name.endswith(reserved_endings()):
            fail(OP, "names must not be those of a sparse weight's indices", name)
        else:
            kept[name] = tensor.detach().contiguous().clone()
    write(kept, header(modules), path)
