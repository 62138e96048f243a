"""Couplings: hidden features with all layers that have them, found by the names of layers and their order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..attention import projections

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
BETWEEN = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d,
)  # fmt: skip
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
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
        producers: names of layers whose outputs they are: nn.Linear, nn.Conv2d, or nn.MultiheadAttention with
            its three projections.
        consumers: of those whose inputs they are: nn.Linear, nn.Conv2d.
        norms: of what lies between and has a number for each: batch norms, depthwise convolutions.
        unit: how many neighbours of the first producer leave together: the size of a head. In layers of other
            widths as large a part does: a head of keys with all heads of queries that share it.
        heads: name of the module whose counts of heads change, or None.
        groups: in so many equal parts of the channels those at the same place leave together: convolutions in
            groups, which stay as many.
    """

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    norms: tuple[str, ...] = ()
    unit: int = 1
    heads: str | None = None
    groups: int = 1


def child(model: nn.Module, name: str) -> nn.Module | None:
    """The submodule of this name, or None."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def is_plain(module: nn.Module | None) -> bool:
    """Whether a layer can be cut: of exactly these classes, with Parameters of its own; not depthwise."""
    if type(module) not in (nn.Linear, NonDynamicallyQuantizableLinear, nn.Conv2d) or is_depthwise(module):
        return False
    return type(module.weight) is nn.Parameter


def is_depthwise(module: nn.Module | None) -> bool:
    """Whether a convolution keeps channels apart, one to one."""
    if type(module) is not nn.Conv2d or type(module.weight) is not nn.Parameter:
        return False
    return module.groups == module.in_channels == module.out_channels > 1


def is_norm(module: nn.Module | None) -> bool:
    """Whether it is a batch norm with something to cut."""
    return isinstance(module, NORMS) and (module.affine or module.track_running_stats)


def is_attention(module: nn.Module | None) -> bool:
    """Whether it is an nn.MultiheadAttention, or ours, with dense projections."""
    names = [] if module is None else projections(module)
    return bool(names) and all(type(getattr(module, name)) is nn.Parameter for name in names)


def outputs(module: nn.Module) -> int:
    """How many features or channels a plain layer has."""
    return module.weight.shape[0]


def inputs(module: nn.Module) -> int:
    """How many it reads."""
    return module.weight.shape[1] * getattr(module, "groups", 1)


def common_groups(layers: Iterable[nn.Module]) -> int:
    """In how many parts channels fall that all these layers read or make in their groups."""
    return math.lcm(*(getattr(layer, "groups", 1) for layer in layers))


def find_couplings(model: nn.Module) -> list[Coupling]:
    """The hidden features of common blocks, each with all that has them.

    Found are: Linear and Conv2d that follow each other in an nn.Sequential (and in those inside it), with
    activations, dropout, pooling, batch norms, depthwise convolutions and nn.Flatten between; the channels
    inside of residual blocks, conv1, bn1, conv2, …, as torchvision and timm name them, where nothing but
    those, activations and a shortcut is in the block; feed-forward networks of transformers by their layers'
    names (BERT, RoBERTa, ViT, CLIP, Llama, nn.TransformerEncoderLayer), where only what works element by
    element may lie between; heads of nn.MultiheadAttention, of BERT's attention, and of Llama's (Mistral's,
    Qwen's, …), where a head of keys and values leaves with the heads of queries that share it. Layers that
    occur twice, or whose weight is shared, are left out. What goes through residual sums stays:
    trace_couplings finds that, in models that torch.fx can trace.

    Args:
        model: any module; nothing of it changes or runs, and what is not recognised is left out.
    """
    found: list[Coupling] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if _in_order(module):
            found += _in_sequence(module, prefix)
        found += _in_block(module, prefix)
        for ups, down in _NETWORKS:
            layers = [child(module, x) for x in (*ups, down)]
            if all(map(is_plain, layers)) and {outputs(x) for x in layers[:-1]} == {
                layers[-1].weight.shape[1]
            }:
                names = tuple(prefix + x for x in ups)
                found.append(Coupling(names[0], names, (f"{prefix}{down}",)))
        inner, out = child(module, "self"), child(module, "output.dense")
        size = getattr(inner, "attention_head_size", None)
        parts = [child(module, f"self.{x}") for x in ("query", "key", "value")]
        if isinstance(size, int) and all(map(is_plain, (*parts, out))):
            names = tuple(f"{prefix}self.{x}" for x in ("query", "key", "value"))
            found.append(
                Coupling(names[0], names, (f"{prefix}output.dense",), unit=size, heads=f"{prefix}self")
            )
        size, out = getattr(module, "head_dim", None), child(module, "o_proj")
        parts = [child(module, f"{x}_proj") for x in "qkv"]
        if isinstance(size, int) and size > 0 and all(map(is_plain, (*parts, out))):
            shared = outputs(parts[0]) // max(1, outputs(parts[1]))
            names = tuple(f"{prefix}{x}_proj" for x in "qkv")
            if outputs(parts[1]) == outputs(parts[2]) and shared * outputs(parts[1]) == outputs(parts[0]):
                found.append(Coupling(names[0], names, (f"{prefix}o_proj",), unit=shared * size, heads=name))
        if is_attention(module) and is_plain(module.out_proj):
            found.append(Coupling(name, (name,), (f"{prefix}out_proj",), unit=module.head_dim, heads=name))
    named = {coupling.name: coupling for coupling in found}  # a sequence inside another is seen twice
    return alone(model, named.values())


def alone(model: nn.Module, couplings: Iterable[Coupling]) -> list[Coupling]:
    """Those whose layers share no Parameter with others, nor occur twice."""
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def once(name: str) -> bool:
        parameters = model.get_submodule(name).parameters(recurse=False)
        return all(uses[id(parameter)] == 1 for parameter in parameters)

    return [c for c in couplings if all(map(once, (*c.producers, *c.consumers, *c.norms)))]


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
    if len(convolutions) < 2 or not all(type(layers.get(name)) in NORMS for name in norms):
        return
    order = list(layers)
    if any(order.index(a) > order.index(b) for a, b in zip(convolutions, norms, strict=True)):
        return  # norms before convolutions are of what comes in
    others = layers.keys() - {*convolutions, *norms, "downsample", "shortcut"}
    if any(type(layers[name]) not in BETWEEN for name in others):
        return
    for one, norm, other in zip(convolutions, norms, convolutions[1:], strict=False):
        if not (is_plain(layers[one]) and is_plain(layers[other])):
            continue
        if outputs(layers[one]) == layers[norm].num_features == layers[other].in_channels:
            groups = common_groups((layers[one], layers[other]))
            names = ((prefix + one,), (prefix + other,), (prefix + norm,))
            yield Coupling(prefix + one, *names, groups=groups)


def _in_sequence(sequence: nn.Sequential, prefix: str) -> Iterator[Coupling]:
    """Of each layer and the next one what lies between keeps features apart: else there is no coupling."""
    children = list(_flat(sequence))
    for at, (name, module) in enumerate(children):
        if not is_plain(module):
            continue
        channels, flat, norms = isinstance(module, nn.Conv2d), False, []
        for other, after in itertools.islice(children, at + 1, None):
            if type(after) in NORMS or (channels and not flat and is_depthwise(after)):
                norms.append(prefix + other)
            elif is_plain(after):
                # Channels reach an nn.Linear flattened, channel by channel; features as they are.
                reads = (
                    isinstance(after, nn.Conv2d) if channels and not flat else isinstance(after, nn.Linear)
                )
                times, rest = divmod(inputs(after), outputs(module))
                if reads and rest == 0 and (times == 1 or flat):
                    names = ((prefix + name,), (prefix + other,), tuple(norms))
                    yield Coupling(prefix + name, *names, groups=common_groups((module, after)))
                break
            elif channels and type(after) is nn.Flatten and (after.start_dim, after.end_dim) == (1, -1):
                flat = True
            elif type(after) not in BETWEEN and not (channels and not flat and type(after) in POOLS):
                break
