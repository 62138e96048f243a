"""Dense weights that become sparse while transformers loads them: one at a time is in memory as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..auto import Auto
from ..changes import change_of
from ..experts import experts_in, unpack
from ..layers import ExpertLayer, Layer, find_layers
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
        # By the name of the tensor that comes: a weight, or those of all experts of a layer.
        self.waiting: dict[str, list[tuple[Layer, Any]]] = {}
        for layer in layers:
            spec = specs.get(layer.name)
            untied = not tied.intersection(layer.parameter_names)
            if untied and why_stays(layer, spec, None, meta=True) is None:
                for name in layer.parameter_names:
                    self.waiting.setdefault(name, []).append((layer, spec))
        # Experts of which any becomes sparse are layers, all of them.
        self.experts: dict[str, ExpertLayer] = {}
        experts = [layer for layer in layers if isinstance(layer, ExpertLayer)]
        waiting = (layer for found in self.waiting.values() for layer, _ in found)
        held = {id(layer.holder) for layer in waiting if isinstance(layer, ExpertLayer)}
        for layer in experts:
            if id(layer.holder) in held:
                self.experts |= dict.fromkeys(layer.parameter_names, layer)

    def wants(self, name: str) -> bool:
        """Whether the tensor called `name` becomes sparse."""
        return name in self.waiting or name in self.experts

    @torch.no_grad()
    def take(self, name: str, tensor: torch.Tensor) -> list[str]:
        """Makes layers of the tensor `name` sparse; returns all its names, or none if it stays as it is."""
        waiting = self.waiting.get(name, [])
        if name in self.experts:
            names, dense = self._take_experts(self.experts[name], waiting, tensor), False
        else:
            ((layer, spec),) = waiting
            layer.module.weight = nn.Parameter(tensor)
            names, dense = layer.parameter_names, not self._change(layer, spec)
        self.taken.update(names)
        if dense:
            return []
        if self.mapped:
            forget_pages(tensor)
        return names

    def _take_experts(
        self, one: ExpertLayer, waiting: list[tuple[Layer, Any]], tensor: torch.Tensor
    ) -> list[str]:
        """Makes the experts of a tensor (E, N, K) layers, sparse ones where they are to be."""
        unpack(one.holder)
        specs = {layer.number: (layer, spec) for layer, spec in waiting}
        for number, expert in enumerate(experts_in(one.holder)):
            linear = getattr(expert, one.part)
            linear.weight = nn.Parameter(tensor[number])
            if number in specs:
                layer, spec = specs[number]
                layer.module = linear
                if self._change(layer, spec):
                    continue
            linear.weight = nn.Parameter(tensor[number].clone())
            linear.weight._is_hf_initialized = True
        return one.parameter_names

    def _change(self, layer: Layer, spec: Any) -> bool:
        """Makes a layer, whose weight is there, sparse; False where it stays as it is."""
        if isinstance(spec, Auto):
            spec, _times = spec.chosen(layer.linear(), self.tokens, layer.why_not)
        change = spec if isinstance(spec, str) else change_of(OP, layer, spec, None, None)
        if isinstance(change, str):
            return False
        change.apply()
        logger.info("from_pretrained: %s %s", layer.name, spec.format + spec.suffix)
        change.sparse.weight._is_hf_initialized = True
        return True
