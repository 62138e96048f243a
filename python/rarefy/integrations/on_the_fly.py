"""Dense weights that become sparse while transformers loads them: one at a time is in memory as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ..advice import Auto
from ..changes import change_of
from ..layers import Layer, find_layers
from ..log import logger
from ..patcher import BlockSparseModelPatcher, why_stays
from .mapped import forget_pages

OP = "from_pretrained"


class SparsifyOnLoad(ConversionOps):
    """Layers of a skeleton that become sparse when their weights come, and what makes them so."""

    def __init__(self, model: nn.Module, patterns: Any, tokens: int, mapped: bool) -> None:
        self.tokens, self.mapped = tokens, mapped
        layers = find_layers(model, rewritten=True)
        specs = BlockSparseModelPatcher.of(OP, patterns).assign(OP, layers)
        ties = getattr(model, "all_tied_weights_keys", {})
        tied = {*ties, *ties.values()}
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
    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, missing_keys: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Makes the layer of a tensor sparse; returns what is still to be put into the model."""
        rest = {}
        for name, tensors in input_dict.items():
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            target = name if name in self.waiting else full_layer_name
            if target not in self.waiting:
                rest[name] = tensor
                continue
            layer, spec = self.waiting[target]
            layer.module.weight = nn.Parameter(tensor)
            if isinstance(spec, Auto):
                spec, _times = spec.chosen(layer.linear(), self.tokens)
            change = spec if isinstance(spec, str) else change_of(OP, layer, spec, None, None)
            if isinstance(change, str):  # it stays as it is
                rest[target] = tensor
                continue
            change.apply()
            logger.info("from_pretrained: %s %s", layer.name, change.sparse.weight.spec_format())
            change.sparse.weight._is_hf_initialized = True
            if self.mapped:
                forget_pages(tensor)
            if missing_keys is not None:
                missing_keys.difference_update(layer.weight_names)
        return rest
