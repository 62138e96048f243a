"""From masks to layers that are faster: what Sparsifier.convert does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.pruning.sparsifier.utils import swap_module

from ..checks import fail
from ..masks import NONZERO, beyond_two_of_four, to_blocks
from ..report import Report
from ..sparsify import sparsify
from .masks import Mask

TWO_OF_FOUR = "2:4"


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
    """Layers of a squashed model as sparse ones, as `spec` or as their patterns are stored."""
    patterns: dict[str, str] = {}
    scores: dict[str, torch.Tensor] = {}
    for group in groups:
        form, module = spec or group["pattern"].spec, group["module"]
        if form is None:
            continue
        if isinstance(module, nn.Conv2d):
            if form.startswith("block:") and (spec is not None or _keeps_its_blocks(module, form)):
                patterns[re.escape(group["module_fqn"])] = f"{form}@{NONZERO}"
            continue
        mask = masks[group["tensor_fqn"]].unpack()
        if form == TWO_OF_FOUR and spec is None and bool(beyond_two_of_four(mask).any()):
            form = "bitmap"  # on the way to 2:4, or at a lower sparsity
        kept, name = _stored(form, mask), _layer(group)
        density = float(kept.double().mean()) if kept.numel() else 1.0
        patterns[re.escape(name)] = form if form == TWO_OF_FOUR else f"{form}@{density!r}"
        scores[name] = kept.float()  # 1 and 0: the density, or 2:4, keeps exactly the ones
    if not patterns:
        fail("convert", "a layer must have a pattern that a format stores", "none")
    return sparsify(model, patterns, scores=scores, **options)


def _layer(group: dict[str, Any]) -> str:
    """What sparsify calls a group's layer: "attention.in_proj" for the weight "attention.in_proj_weight"."""
    tensor = group["tensor_name"]
    inner = "" if tensor == "weight" else tensor.removesuffix("_weight")
    return ".".join(filter(None, (group["module_fqn"], inner)))


def _keeps_its_blocks(conv: nn.Conv2d, form: str) -> bool:
    """Whether blocks of (O, C · KH · KW), as masks have it, are blocks of (O, KH · KW · C), as is stored."""
    return form.endswith("x1") or conv.kernel_size == (1, 1)


def _stored(form: str, mask: torch.Tensor) -> torch.Tensor:
    """Which blocks of a format have an element that stays; for formats of single weights which of those."""
    if form == TWO_OF_FOUR and bool(beyond_two_of_four(mask).any()):
        fail("convert", 'format "2:4" takes masks with at most two of each four', "more")
    if form in ("csr", "bitmap", TWO_OF_FOUR):
        return mask
    if not (match := re.fullmatch(r"block:(\d+)x(\d+)", form)):
        known = 'format must be "csr", "bitmap", "2:4" or "block:RxC", without a density'
        fail("convert", known, repr(form))
    return to_blocks(mask, (int(match[1]), int(match[2]))).flatten(2).any(2)
