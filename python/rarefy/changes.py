"""What becomes of one layer, prepared so that nothing can fail when it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from .layers import SPARSE, Layer, dense_of
from .pattern_change import PatternChange
from .pattern_weight import PatternWeight
from .sparse_weight import SparseWeight
from .spec import Spec


@dataclass
class Change:
    """A layer as a dense one and as it will be, and what makes it so."""

    dense: nn.Module
    sparse: nn.Module
    apply: Callable[[], None]


def change_of(
    op: str, layer: Layer, spec: Spec, scores: torch.Tensor | None, optimizer: Optimizer | None
) -> Change | str:
    """The change of a layer to a spec, or why it stays as it is. Errors name the layer."""
    try:
        if isinstance(layer.module, SPARSE):
            return _sparser(layer, spec, scores, optimizer)
        dense = layer.linear()
        sparse = layer.around(layer.from_dense(dense, spec, scores).weight)
    except (ValueError, TypeError) as error:
        raise type(error)(f"[{op}] layer {layer.name}: {error}") from None
    return Change(dense, sparse, lambda: layer.replace(sparse))


def _sparser(
    layer: Layer, spec: Spec, scores: torch.Tensor | None, optimizer: Optimizer | None
) -> Change | str:
    """The change of a layer that is sparse already; within its format the weight stays the same."""
    module, weight = layer.module, layer.module.weight
    if is_parametrized(weight):
        return "its values are parametrized (torch.nn.utils.parametrize)"
    dense = dense_of(module)
    target = layer.from_dense(dense, spec, scores).weight
    if scores is None and target.density > weight.density:
        return f"already sparser, at density {weight.density:.4g}: scores say which blocks to add"
    stays = _same_format(weight, target)
    if stays and weight.pattern == target.pattern:
        return f"already {spec}"
    sparse = layer.around(target)
    if stays:
        PatternChange(weight.pattern, target.pattern).check(weight.values, optimizer)
        pattern = target.pattern
        return Change(dense, sparse, lambda: weight.change_pattern(pattern, optimizer))
    if optimizer is not None:
        requirement = "optimizer state can follow within one format and block shape only"
        raise ValueError(f"{requirement}; got {weight.spec_format()} to {spec.format}")
    target.requires_grad_(weight.requires_grad)
    return Change(dense, sparse, lambda: layer.put(target))


def _same_format(a: SparseWeight, b: SparseWeight) -> bool:
    kinds = type(a) is type(b) and isinstance(a, PatternWeight)
    same = [(w.spec_format(), w.dtype, w.x_dtype, w.rounds_x) for w in (a, b)]
    return kinds and same[0] == same[1]
