"""Structured removal: hidden features, channels and heads leave, and the layers around them get smaller."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checks import check_known, check_tensor, fail
from .criteria import check_sparsity
from .masks import Scores, make_mask

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_BETWEEN = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d,
)  # fmt: skip
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
# Feed-forward networks by the names of their layers: what makes hidden features, and what reads them.
_NETWORKS = (
    (("intermediate.dense",), "output.dense"),
    (("linear1",), "linear2"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi",), "wo"),
)


@dataclass(frozen=True)
class Coupling:
    """Hidden features and all layers that have them.

    Attributes:
        name: of the first producer.
        producers: names of layers whose outputs they are: nn.Linear, nn.Conv2d.
        consumers: of those whose inputs they are.
        norms: of what lies between and has a number for each: batch norms, depthwise convolutions.
        unit: how many neighbours of the first producer leave together: the size of a head. In layers of other
            widths as large a part does: a head of keys with all heads of queries that share it.
        heads: name of the module whose counts of heads change, or None.
    """

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    norms: tuple[str, ...] = ()
    unit: int = 1
    heads: str | None = None


@dataclass(frozen=True)
class Removed:
    """Units of a coupling before and after, and parameters of its layers."""

    name: str
    before: int
    after: int
    parameters_before: int
    parameters_after: int


def _child(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _plain(module: nn.Module | None) -> bool:
    """Whether a layer can be cut: of exactly these classes, with Parameters of its own, without groups."""
    if type(module) not in (nn.Linear, nn.Conv2d) or getattr(module, "groups", 1) != 1:
        return False
    return type(module.weight) is nn.Parameter


def _depthwise(module: nn.Module | None) -> bool:
    """Whether a convolution keeps channels apart, one to one."""
    if type(module) is not nn.Conv2d or type(module.weight) is not nn.Parameter:
        return False
    return module.groups == module.in_channels == module.out_channels > 1


def _outputs(module: nn.Module) -> int:
    return module.weight.shape[0]


def find_couplings(model: nn.Module) -> list[Coupling]:
    """The hidden features of common blocks, each with all that has them.

    Found are: Linear and Conv2d that follow each other in an nn.Sequential (and in those inside it), with
    activations, dropout, pooling, batch norms, depthwise convolutions and nn.Flatten between; the channels
    inside of residual blocks, conv1, bn1, conv2, …, as torchvision and timm name them, where nothing but
    those, activations and a shortcut is in the block (those of the sum itself stay); feed-forward networks of
    transformers by their layers' names (BERT, RoBERTa, ViT, CLIP, Llama, nn.TransformerEncoderLayer), where
    only what works element by element may lie between; heads of BERT's attention, and of Llama's (Mistral's,
    Qwen's, …), where a head of keys and values leaves with the heads of queries that share it. Layers that
    occur twice, or whose weight is shared, are left out.
    """
    found: list[Coupling] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if _in_order(module):
            found += _in_sequence(module, prefix)
        found += _in_block(module, prefix)
        for ups, down in _NETWORKS:
            layers = [_child(module, x) for x in (*ups, down)]
            if all(map(_plain, layers)) and {_outputs(x) for x in layers[:-1]} == {
                layers[-1].weight.shape[1]
            }:
                names = tuple(prefix + x for x in ups)
                found.append(Coupling(names[0], names, (f"{prefix}{down}",)))
        inner, out = _child(module, "self"), _child(module, "output.dense")
        size = getattr(inner, "attention_head_size", None)
        parts = [_child(module, f"self.{x}") for x in ("query", "key", "value")]
        if isinstance(size, int) and all(map(_plain, (*parts, out))):
            names = tuple(f"{prefix}self.{x}" for x in ("query", "key", "value"))
            found.append(
                Coupling(names[0], names, (f"{prefix}output.dense",), unit=size, heads=f"{prefix}self")
            )
        size, out = getattr(module, "head_dim", None), _child(module, "o_proj")
        parts = [_child(module, f"{x}_proj") for x in "qkv"]
        if isinstance(size, int) and size > 0 and all(map(_plain, (*parts, out))):
            shared = _outputs(parts[0]) // max(1, _outputs(parts[1]))
            names = tuple(f"{prefix}{x}_proj" for x in "qkv")
            if _outputs(parts[1]) == _outputs(parts[2]) and shared * _outputs(parts[1]) == _outputs(parts[0]):
                found.append(Coupling(names[0], names, (f"{prefix}o_proj",), unit=shared * size, heads=name))
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    alone = lambda c: all(  # noqa: E731
        uses[id(model.get_submodule(x).weight)] == 1 for x in (*c.producers, *c.consumers)
    )
    named = {coupling.name: coupling for coupling in found}  # a sequence inside another is seen twice
    return [coupling for coupling in named.values() if alone(coupling)]


def _in_order(module: nn.Module) -> bool:
    """Whether a module calls its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _flat(sequence: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in sequence.named_children():
        if _in_order(module):
            yield from _flat(module, f"{prefix}{name}.")
        else:
            yield prefix + name, module


def _in_block(module: nn.Module, prefix: str) -> Iterator[Coupling]:
    """The channels between conv1, conv2, … of a residual block."""
    layers = dict(module.named_children())
    convolutions = list(itertools.takewhile(layers.__contains__, (f"conv{i}" for i in itertools.count(1))))
    norms = [name.replace("conv", "bn") for name in convolutions]
    if len(convolutions) < 2 or not all(type(layers.get(name)) in _NORMS for name in norms):
        return
    order = list(layers)
    if any(order.index(a) > order.index(b) for a, b in zip(convolutions, norms, strict=True)):
        return  # norms before convolutions are of what comes in
    others = layers.keys() - {*convolutions, *norms, "downsample", "shortcut"}
    if any(type(layers[name]) not in _BETWEEN for name in others):
        return
    for one, norm, other in zip(convolutions, norms, convolutions[1:], strict=False):
        if not (_plain(layers[one]) and _plain(layers[other])):
            continue
        if _outputs(layers[one]) == layers[norm].num_features == layers[other].in_channels:
            yield Coupling(prefix + one, (prefix + one,), (prefix + other,), (prefix + norm,))


def _in_sequence(sequence: nn.Sequential, prefix: str) -> Iterator[Coupling]:
    """Of each layer and the next one what lies between keeps features apart: else there is no coupling."""
    children = list(_flat(sequence))
    for at, (name, module) in enumerate(children):
        if not _plain(module):
            continue
        channels, flat, norms = isinstance(module, nn.Conv2d), False, []
        for other, after in itertools.islice(children, at + 1, None):
            if type(after) in _NORMS or (channels and not flat and _depthwise(after)):
                norms.append(prefix + other)
            elif _plain(after):
                # Channels reach an nn.Linear flattened, channel by channel; features as they are.
                reads = (
                    isinstance(after, nn.Conv2d) if channels and not flat else isinstance(after, nn.Linear)
                )
                times, rest = divmod(after.weight.shape[1], _outputs(module))
                if reads and rest == 0 and (times == 1 or flat):
                    yield Coupling(prefix + name, (prefix + name,), (prefix + other,), tuple(norms))
                break
            elif channels and type(after) is nn.Flatten and (after.start_dim, after.end_dim) == (1, -1):
                flat = True
            elif type(after) not in _BETWEEN and not (channels and not flat and type(after) in _POOLS):
                break


def unit_norms(model: nn.Module, coupling: Coupling) -> torch.Tensor:
    """(units,) float64: norms of what would leave with each, rows of producers and columns of consumers."""
    units = _units(model, coupling)
    squares = torch.zeros(units, dtype=torch.float64)
    for name in coupling.producers:
        weight = model.get_submodule(name).weight.detach().double().cpu()
        squares += weight.reshape(units, -1).square().sum(1)
    for name in coupling.consumers:
        weight = model.get_submodule(name).weight.detach().double().cpu()
        squares += weight.reshape(len(weight), units, -1).square().sum((0, 2))
    return squares.sqrt()


def _units(model: nn.Module, coupling: Coupling) -> int:
    return _outputs(model.get_submodule(coupling.producers[0])) // coupling.unit


@torch.no_grad()
def shrink(
    model: nn.Module,
    sparsity: float | Mapping[str, float],
    *,
    couplings: Sequence[Coupling] | None = None,
    scores: Mapping[str, torch.Tensor] | None = None,
) -> list[Removed]:
    """Removes hidden units of least score; the layers around them get smaller, in place, biases included.

    The model then computes, exactly, what it computed with the removed features' columns in the consumers at
    zero. Layers stay the same modules with new Parameters: make the optimizer afterwards.

    Args:
        model: any module.
        sparsity: the part of the units that leaves each coupling, in [0, 1], or by its name;
            round(sparsity · units) leave, and one stays at least.
        couplings: default: find_couplings(model).
        scores: by name of a coupling, (units,): instead of unit_norms.

    Raises ValueError for names that are not there, scores of another shape and layers that do not fit each
    other, before anything changes.
    """
    op = "shrink"
    found = {c.name: c for c in (find_couplings(model) if couplings is None else couplings)}
    if not found:
        fail(op, "the model must have a coupling", "none")
    for given in (sparsity if isinstance(sparsity, Mapping) else {}, scores or {}):
        for name in given:
            check_known(op, "a coupling", name, list(found))
    plans = []
    for name, coupling in found.items():
        part = sparsity.get(name, 0.0) if isinstance(sparsity, Mapping) else sparsity
        _check_fits(op, model, coupling)
        rank = unit_norms(model, coupling) if name not in (scores or {}) else scores[name]
        check_tensor(op, "scores", rank)
        units = _units(model, coupling)
        if tuple(rank.shape) != (units,):
            fail(op, f"the scores of {name} must be of shape ({units},)", tuple(rank.shape))
        gone = min(round(check_sparsity(op, "sparsity", part) * units), units - 1)
        kept = make_mask(Scores(rank.detach().double().view(-1, 1)), (1, 1, 0, 0), gone).unpack().view(-1)
        plans.append((coupling, kept))
    return [_cut(model, coupling, keep) for coupling, keep in plans]


def _check_fits(op: str, model: nn.Module, coupling: Coupling) -> None:
    layers = [_child(model, x) for x in (*coupling.producers, *coupling.consumers)]
    if not all(map(_plain, layers)) or not coupling.producers or not coupling.consumers:
        got = ", ".join(type(x).__name__ for x in layers)
        fail(op, f"the layers of {coupling.name} must be plain nn.Linear or nn.Conv2d", got)
    widths = [_outputs(model.get_submodule(x)) for x in coupling.producers]
    whole, units = widths[0] % coupling.unit == 0, max(1, widths[0] // coupling.unit)
    same = coupling.unit > 1 or len(set(widths)) == 1
    reads = [model.get_submodule(x).weight.shape[1] for x in coupling.consumers]
    if not (whole and same) or any(width % units for width in (*widths, *reads)):
        fail(op, f"the layers of {coupling.name} must have the same hidden features", sorted(set(widths)))


def _cut(model: nn.Module, coupling: Coupling, keep: torch.Tensor) -> Removed:
    names = (*coupling.producers, *coupling.norms, *coupling.consumers)
    count = lambda: sum(p.numel() for x in names for p in model.get_submodule(x).parameters())  # noqa: E731
    before, units = count(), _units(model, coupling)

    def wide(width: int, tensor: torch.Tensor) -> torch.Tensor:
        return keep.repeat_interleave(width // units).to(tensor.device)

    for name in coupling.producers:
        module = model.get_submodule(name)
        rows = wide(_outputs(module), module.weight)
        _replace(module, "weight", module.weight[rows])
        if module.bias is not None:
            _replace(module, "bias", module.bias[rows])
        setattr(module, "out_features" if isinstance(module, nn.Linear) else "out_channels", int(rows.sum()))
    for name in coupling.norms:
        module = model.get_submodule(name)
        channels = wide(getattr(module, "num_features", None) or module.out_channels, keep)
        if isinstance(module, nn.Conv2d):
            module.in_channels = module.out_channels = module.groups = int(channels.sum())
        else:
            module.num_features = int(channels.sum())
        for key in ("weight", "bias", "running_mean", "running_var"):
            tensor = getattr(module, key, None)
            if tensor is not None:
                _replace(module, key, tensor[channels.to(tensor.device)])
    for name in coupling.consumers:
        module = model.get_submodule(name)
        columns = wide(module.weight.shape[1], module.weight)
        _replace(module, "weight", module.weight[:, columns])
        setattr(module, "in_features" if isinstance(module, nn.Linear) else "in_channels", int(columns.sum()))
    left = int(keep.sum())
    if coupling.heads is not None:
        module = model.get_submodule(coupling.heads)
        if hasattr(module, "all_head_size"):
            module.all_head_size = module.all_head_size // units * left
        for key in ("num_attention_heads", "num_heads", "num_key_value_heads"):
            if isinstance(getattr(module, key, None), int):
                setattr(module, key, getattr(module, key) // units * left)
    return Removed(coupling.name, units, left, before, count())


def _replace(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    old: Any = getattr(module, key)
    tensor = tensor.detach().clone()
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    setattr(module, key, tensor)
