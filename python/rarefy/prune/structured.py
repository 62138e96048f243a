"""Structured removal: hidden features, channels and heads leave, and the layers around them get smaller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..attention import projections, separate, settle
from ..checks import check_known, check_tensor, fail
from .couplings import Coupling, child, find_couplings, is_attention, is_depthwise, is_norm, is_plain
from .criteria import check_sparsity
from .masks import Scores, make_mask


@dataclass(frozen=True)
class Removed:
    """Units of a coupling before and after, and parameters of its layers."""

    name: str
    before: int
    after: int
    parameters_before: int
    parameters_after: int


@dataclass(frozen=True)
class _Part:
    """A dimension of a tensor that has a coupling's features, `tiles` times one after the other."""

    module: nn.Module
    key: str
    dim: int
    tiles: int

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.module, self.key)

    @property
    def size(self) -> int:
        return self.tensor.shape[self.dim]

    def cut(self, keep: torch.Tensor) -> None:
        """Leaves what `keep`, (units,) bool, says."""
        old = self.tensor
        places = keep.repeat_interleave(self.size // (len(keep) * self.tiles)).repeat(self.tiles)
        new = old.detach().index_select(self.dim, places.nonzero().flatten().to(old.device))
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        setattr(self.module, self.key, new)


def _parts(model: nn.Module, coupling: Coupling) -> Iterator[_Part]:
    """All that is cut, producers first; biases and statistics that are not there are left out."""
    groups = coupling.groups
    for name in coupling.producers:
        module = model.get_submodule(name)
        if is_attention(module):
            three = 3 // len(projections(module))  # one tensor has all three projections, or each has its own
            found = [(key, 0, three) for key in projections(module)]
            found += [("in_proj_bias", 0, 3), ("bias_k", 2, 1), ("bias_v", 2, 1)]
        else:
            found = [("weight", 0, groups), ("bias", 0, groups)]
        yield from (_Part(module, *x) for x in found if getattr(module, x[0]) is not None)
    for name in coupling.norms:
        module = model.get_submodule(name)
        for key in ("weight", "bias", "running_mean", "running_var"):
            if getattr(module, key, None) is not None:
                yield _Part(module, key, 0, groups)
    for name in coupling.consumers:
        module = model.get_submodule(name)
        yield _Part(module, "weight", 1, groups // getattr(module, "groups", 1))


def unit_norms(model: nn.Module, coupling: Coupling) -> torch.Tensor:
    """(units,) float64: norms of what would leave with each, rows of producers and columns of consumers."""
    units, between = _units(model, coupling), [model.get_submodule(name) for name in coupling.norms]
    squares = torch.zeros(units, dtype=torch.float64)
    for part in _parts(model, coupling):
        if part.key.endswith("weight") and part.module not in between:
            weight = part.tensor.detach().double().cpu().movedim(part.dim, 0)
            squares += weight.reshape(part.tiles, units, -1).square().sum((0, 2))
    return squares.sqrt()


def _units(model: nn.Module, coupling: Coupling) -> int:
    first = next(_parts(model, coupling))
    return first.size // (coupling.unit * first.tiles)


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
    zero. Layers stay the same modules with new Parameters: make the optimizer afterwards. Only an
    nn.MultiheadAttention, whose heads must fill embed_dim, changes its class (rarefy.attention) and keeps
    three projection weights, q_proj_weight and so on, in place of one.

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
    removed = [_shrunk(model, coupling, keep) for coupling, keep in plans]
    for module in model.modules():  # nested tensors are for torch's own attention, as its __init__ says
        if isinstance(module, nn.TransformerEncoder):
            same = (getattr(layer.self_attn, "_qkv_same_embed_dim", False) for layer in module.layers)
            module.use_nested_tensor = module.use_nested_tensor and all(same)
    return removed


def _check_fits(op: str, model: nn.Module, coupling: Coupling) -> None:
    name, modules = coupling.name, {x: child(model, x) for x in _names(coupling)}
    can = {
        **{x: is_plain(modules[x]) for x in coupling.consumers},
        **{x: is_norm(modules[x]) or is_depthwise(modules[x]) for x in coupling.norms},
        **{x: is_plain(modules[x]) or is_attention(modules[x]) for x in coupling.producers},
    }
    if not all(can.values()) or not coupling.producers or not coupling.consumers:
        got = ", ".join(type(modules[x]).__name__ for x, good in can.items() if not good) or "none"
        fail(op, f"the layers of {name} must be plain nn.Linear or nn.Conv2d, with batch norms between", got)
    units, parts = max(1, _units(model, coupling)), list(_parts(model, coupling))
    consumers = [modules[x] for x in coupling.consumers]
    sizes = {part.size for part in parts if part.module not in consumers}
    whole = all(part.tiles and part.size % (units * part.tiles) == 0 for part in parts)
    if not whole or (coupling.unit == 1 and sizes != {units * coupling.groups}):
        fail(op, f"the layers of {name} must have the same hidden features", sorted(p.size for p in parts))


def _names(coupling: Coupling) -> tuple[str, ...]:
    """Of all its layers, each once."""
    return tuple(dict.fromkeys((*coupling.producers, *coupling.norms, *coupling.consumers)))


def _shrunk(model: nn.Module, coupling: Coupling, keep: torch.Tensor) -> Removed:
    modules = [model.get_submodule(x) for x in _names(coupling)]
    count = lambda: sum(p.numel() for x in modules for p in x.parameters(recurse=False))  # noqa: E731
    before, left = count(), int(keep.sum())
    for part in list(_parts(model, coupling)):
        part.cut(keep)
    if coupling.heads is not None:
        module = model.get_submodule(coupling.heads)
        for key in ("num_attention_heads", "num_heads", "num_key_value_heads", "all_head_size"):
            if isinstance(getattr(module, key, None), int):
                setattr(module, key, getattr(module, key) // len(keep) * left)
    for module in modules:
        _declare(module)
    return Removed(coupling.name, len(keep), left, before, count())


def _declare(module: nn.Module) -> None:
    """Makes a layer say the sizes that its tensors have."""
    if is_attention(module):
        separate(module)
        settle(module)
    elif is_norm(module):
        module.num_features = len(module.running_mean if module.weight is None else module.weight)
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif is_depthwise(module):  # as it says until here
        module.groups = module.in_channels = module.out_channels = len(module.weight)
    else:
        module.out_channels, module.in_channels = len(module.weight), module.weight.shape[1] * module.groups
