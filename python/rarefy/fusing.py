"""Which layers a network may begin with: `fuse` marks them, and their output waits (chain.py).

A guess from modules and attributes beside them, as networks lie in other people's modules; a wrong one costs
some microseconds a call.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from . import _torch_private
from .activations import NONE
from .chain import Hidden, fits, is_int8, runs
from .checks import fail
from .shared_input import mark

_FUNCTIONS = (functional.gelu, functional.relu, functional.silu, torch.relu)
_NAMES = ("gelu", "relu", "silu", "swish")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")  # where they are defined
_OF_ATTENTION = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)


def networks(model: nn.Module) -> list[tuple[str, ...]]:
    """The layers of each network that may run as one op, by name: what it begins with, and then `down`.

    Not those that no x runs as one: by their layers, or by an activation beside them that is not noted.
    """
    found: dict[str, list[str]] = {}
    for name, up, down in _followed(model):
        # What ends a network seldom begins the next.
        if name not in found and _may_activate(up, model.get_submodule(name.rpartition(".")[0])):
            found.setdefault(down, []).append(name)
    all_of_them = [(*names, down) for down, names in found.items()]
    return [names for names in all_of_them if _may_run([model.get_submodule(name) for name in names])]


@torch.no_grad()
def _may_run(layers: list[nn.Module]) -> bool:
    """Whether there is an x for which these, the last one `down`, are one op: `through`, without an x."""
    down, int8 = layers[-1], {is_int8(layer) for layer in layers}
    if len(int8) > 1 or down.activation is not None:
        return False
    x = torch.empty(1, dtype=_x_dtype(down), device=down._modules["weight"].device)
    return all(runs(layer, x) for layer in layers)


def _x_dtype(layer: nn.Module) -> torch.dtype:
    weight = layer._modules["weight"]
    return weight.x_dtype or weight.dtype


def _may_activate(up: nn.Module, parent: nn.Module) -> bool:
    """Whether the activations beside a layer are noted, one of them at least; so may those that hide be.

    A waiting layer is given to them. It is on the meta device, where nothing is computed or drawn.
    """
    in_order, beside = isinstance(parent, nn.Sequential), list(parent.children())
    if in_order:  # those that follow, as far as the next layer
        beside = itertools.takewhile(_is_bare, beside[beside.index(up) + 1 :])
    beside = [child for child in beside if _is_bare(child) and not isinstance(child, _OF_ATTENTION)]
    known = [child for child in beside if type(child).__module__ in _ACTIVATIONS]
    if up.activation is not None:
        return not (in_order and known)  # a second one is computed
    return not known or _has_function(parent) or any(_notes(up, child) for child in known)


def _is_bare(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _notes(up: nn.Module, activation: nn.Module) -> bool:
    x = torch.empty((1, up.in_features), dtype=_x_dtype(up), device="meta")
    try:
        with torch.no_grad():
            y = type(activation).forward(activation, Hidden.of(up, x))
    except Exception:  # whatever comes of computing on two devices
        return False
    return type(y) is Hidden and y._activation != NONE


def fuse(model: nn.Module, enabled: bool = True) -> list[str]:
    """Lets feed-forward networks of sparse layers run as one op; sparsify and load_file do it by themselves.

    A network is a sparse layer, GELU, ReLU or SiLU, and a sparse layer that takes as many features, in the
    same module or in one after it, as in transformers' BERT, ViT and Llama, with or without a gate. Where no
    activation lies beside the first layer, it must make more features than it takes. In float32 results are,
    bit for bit, those of the layers with fused activations, which differ from torch's by units in the last
    place (docs/numerics.md). Layers of int8 that round x are one op as well; after GELU and SiLU a hidden
    feature may become the next level there. In bfloat16 on packed weights hidden features
    are rounded as those of layers are, with a gate each of the two and their product. Nothing else changes:
    parameters, names, hooks, gradients. Calls that are recorded for a gradient, under autocast, torch.compile
    or torch.func go layer by layer. On CUDA two layers with tall blocks keep hidden features as their kernels
    read them; others, and those with a gate, run layer by layer with the activation in the first one's
    kernel; so do gates on the CPU whose layers hold packed floats in other blocks than `up`'s.

    Layers of one module with as many input features, such as q, k and v, are one op, too, once they have been
    seen with the same x (of 2¹⁸ elements or more; not in inference mode, where nothing counts writes to x).

    Args:
        model: any module.
        enabled: False undoes it.

    Returns:
        The names of the layers whose output may now wait for what follows.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        fail("fuse", "model must be an nn.Module", type(model).__name__, TypeError)
    for module in model.modules():
        if _is_sparse(module):
            vars(module).pop("waits", None)
            vars(module).pop("shares", None)
    if not enabled or not _torch_private.wrappers:
        return []
    names = []
    for name, up, _ in _followed(model):
        up.waits = True
        names.append(name)
    for module in model.modules():
        mark([child for child in module.children() if _is_sparse(child)])
    return names


def _is_sparse(module: nn.Module) -> bool:
    """A BlockSparseLinear, whose module imports this one."""
    return hasattr(type(module), "waits")


def _followed(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The layers that a network may begin with, and the name of what may end it: a guess, some µs a call."""
    named = {id(module): name for name, module in model.named_modules()}
    for name, parent in model.named_modules():
        if not any(map(_is_sparse, parent.children())):
            continue
        beside = _has_activation(parent)
        around = list(model.get_submodule(name.rpartition(".")[0]).children()) if name else [parent]
        later = around[around.index(parent) + 1 :] if name else []
        keys = list(dict(parent.named_children()))
        layers = [*parent.children(), *(layer for module in later for layer in module.children())]
        for at, key in enumerate(keys):
            up, after = layers[at], filter(_is_sparse, layers[at + 1 :])
            if not _is_sparse(up) or not fits(up._modules["weight"]):
                continue
            expands = beside or up.activation is not None or up.out_features > up.in_features
            down = next((layer for layer in after if layer.in_features == up.out_features), None)
            if expands and down is not None:
                yield f"{name}.{key}".lstrip("."), up, named[id(down)]


def _has_activation(module: nn.Module) -> bool:
    for child in module.children():
        kind = type(child).__name__.lower()
        if any(name in kind for name in _NAMES) and _is_bare(child):
            return True
    return _has_function(module)


def _has_function(module: nn.Module) -> bool:
    values = (v for v in vars(module).values() if inspect.isroutine(v))
    return any(value is function for value in values for function in _FUNCTIONS)
