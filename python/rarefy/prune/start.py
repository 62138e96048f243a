"""sparse_start: a dense model's layers as sparse ones with random patterns, to be trained from scratch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..checks import check_density, fail
from ..layers import find_layers
from ..masks import grid_of
from ..sparsify import sparsify
from ..spec import Spec
from .scopes import LayerInfo, parse_allocation


def sparse_start(
    model: nn.Module,
    form: str,
    density: float,
    *,
    allocation: Any = "uniform",
    layers: Sequence[str] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Replaces linear layers by BlockSparseLinear with random patterns and values drawn for them, in place.

    Args:
        model: any module.
        form: the format without a density: "block:16x16", "csr".
        density: of all these layers together, in [0, 1]: round(density · blocks) blocks, exactly.
        allocation: how the layers share them; see parse_allocation: "uniform", "er", "erk".
        layers: regular expressions for whole names; None: every nn.Linear that can become sparse.
        seed: of patterns and values.

    Values are uniform in ±1/√f, f the stored inputs of the row, as BlockSparseLinear draws them.

    Returns the density of each layer by name.

    Raises ValueError for a form, density or allocation that cannot be, for blocks larger than a layer,
    and for names that match no layer.
    """
    op = "sparse_start"
    density = check_density(op, density)
    allocation = parse_allocation(allocation, op)
    found = [x for x in find_layers(model) if x.reason is None]
    if layers is not None:
        for pattern in layers:
            if not any(re.fullmatch(pattern, name) for x in found for name in x.names):
                fail(op, "layers must match the whole name of a layer that can become sparse", repr(pattern))
        found = [x for x in found if any(re.fullmatch(p, name) for p in layers for name in x.names)]
    if not found:
        fail(op, "the model must have an nn.Linear that can become sparse", "none")
    block = getattr(Spec.parse(f"{form}@0.5", op), "block_shape", (1, 1))
    for x in found:
        if block[0] > x.shape[0] or block[1] > x.shape[1]:
            rows, cols = x.shape
            fail(op, f"blocks must not be larger than {x.name}, {rows}x{cols}", "{}x{}".format(*block))
    grids = [grid_of(x.shape, block) for x in found]
    infos = [
        LayerInfo(x.name, x.module.weight, rows * columns)
        for x, (rows, columns) in zip(found, grids, strict=True)
    ]
    removed = allocation.removed(infos, 1 - density)
    random = torch.Generator().manual_seed(seed)
    patterns, scores, densities = {}, {}, {}
    for info, grid, gone in zip(infos, grids, removed, strict=True):
        part = (info.units - gone) / info.units if info.units else 1.0
        patterns[re.escape(info.name)] = f"{form}@{part!r}"
        scores[info.name], densities[info.name] = torch.rand(grid, generator=random), part
    sparsify(model, patterns, scores=scores, measure=False)
    for name in densities:
        model.get_submodule(name).weight.reset_parameters(random)
    return densities
