"""From masks to layers that are faster: what Sparsifier.convert does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.pruning.sparsifier.utils import swap_module

from ..checks import fail
from ..masks import to_blocks
from ..report import Report
from ..sparsify import sparsify
from .masks import Mask


def swap(model: nn.Module, groups: list[dict[str, Any]], mapping: Mapping[type, Any]) -> None:
    """As torch.ao: each pruned module whose class is in `mapping` becomes mapping[class].from_dense(it)."""
    for group in groups:
        for name, _, _ in group["places"]:
            module = model.get_submodule(name)
            kind = nn.utils.parametrize.type_before_parametrizations(module)
            if kind in mapping:
                if not name:
                    fail("convert", "a module that is swapped must be in another one", "the model itself")
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, swap_module(module, mapping))


def to_sparse(
    model: nn.Module,
    groups: list[dict[str, Any]],
    masks: Mapping[str, Mask],
    spec: str | None,
    options: dict[str, Any],
) -> Report:
    """Linear layers of a squashed model as BlockSparseLinear, as `spec` or as their patterns are stored."""
    patterns: dict[str, str] = {}
    scores: dict[str, torch.Tensor] = {}
    for group in groups:
        form = spec or group["pattern"].spec
        if form is None or not isinstance(group["module"], nn.Linear):
            continue
        kept = _stored(form, masks[group["tensor_fqn"]].unpack())
        density = float(kept.double().mean()) if kept.numel() else 1.0
        patterns[re.escape(group["module_fqn"])] = f"{form}@{density!r}"
        scores[group["module_fqn"]] = kept.float()  # 1 and 0: the density keeps exactly the ones
    if not patterns:
        fail("convert", "a layer must have a pattern that a format stores", "none")
    return sparsify(model, patterns, scores=scores, **options)


def _stored(form: str, mask: torch.Tensor) -> torch.Tensor:
    """Which blocks of a format have an element that stays; for "csr" which elements."""
    if form == "csr":
        return mask
    if not (match := re.fullmatch(r"block:(\d+)x(\d+)", form)):
        fail("convert", 'format must be "csr" or "block:RxC", without a density', repr(form))
    return to_blocks(mask, (int(match[1]), int(match[2]))).flatten(2).any(2)
