"""Dense weights that become sparse while transformers loads them: one at a time is in memory as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..advice import Auto
from ..changes import change_of
from ..layers import Layer, find_layers
from ..log import logger
from ..patcher import BlockSparseModelPatcher, why_stays
from .mapped import forget_pages

OP = "from_pretrained"


class SparsifyOnLoad:
    """Layers of a skeleton that become sparse when their weights come, and what makes them so."""

    def __init__(self, model: nn.Module, patterns: Any, tokens: int, mapped: bool) -> None:
        self.tokens, self.mapped = tokens, mapped
        layers = find_layers(model, rewritten=True)
        specs = BlockSparseModelPatcher.of(OP, patterns).assign(OP, layers)
        ties = getattr(model, "all_tied_weights_keys", {})
        tied = {*ties, *ties.values()}
        self.taken: set[str] = set()
        self.hooks: list[Any] = []
        self.waiting: dict[str, tuple[Layer, Any]] = {}
        for layer in layers:
            spec = specs.get(layer.name)
            untied = not tied.intersection(layer.weight_names)
            if untied and why_stays(layer, spec, None, meta=True) is None:
                self.waiting |= dict.fromkeys(layer.weight_names, (layer, spec))

    def wants(self, name: str) -> bool:
        """Whether the tensor called `name` becomes sparse."""
        return name in self.waiting

    @torch.no_grad()
    def take(self, name: str, tensor: torch.Tensor) -> Layer | None:
        """Makes the layer of the weight `name` sparse and returns it; None where it stays as it is."""
        layer, spec = self.waiting[name]
        self.taken.update(layer.weight_names)
        layer.module.weight = nn.Parameter(tensor)
        if isinstance(spec, Auto):
            spec, _times = spec.chosen(layer.linear(), self.tokens)
        change = spec if isinstance(spec, str) else change_of(OP, layer, spec, None, None)
        if isinstance(change, str):
            return None
        change.apply()
        logger.info("from_pretrained: %s %s", layer.name, change.sparse.weight.spec_format())
        change.sparse.weight._is_hf_initialized = True
        if self.mapped:
            forget_pages(tensor)
        return layer
