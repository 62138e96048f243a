"""What transformers 5 calls otherwise than 4: names of tensors, dtypes, and tensors that become sparse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import PreTrainedModel

from ..layers import find_layers
from .on_the_fly import SparsifyOnLoad


def resolve(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The model's names for weights of the file, without those that it has no place for."""
    known = dict.fromkeys(model.state_dict(), True)
    layers = find_layers(model, rewritten=True)  # experts, too, which are parts of a tensor
    known |= {name: True for layer in layers for name in layer.weight_names}
    renamings = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    found = {}
    for name in names:
        key = name
        if key not in known:
            key, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        if key in known:
            found[name] = key
    return found


def key_in_file(model: nn.Module, key: str) -> str:
    """The name that save_pretrained gives a tensor of the model."""
    (found,) = revert_weight_conversion(model, {key: torch.empty(0)})
    return found


def dtype_rule(model: nn.Module) -> Callable[[str, torch.dtype], torch.dtype]:
    """What transformers casts a tensor to, by name and the dtype that is asked for: some stay float32."""

    @functools.cache
    def plan(dtype: torch.dtype) -> Any:
        found = model._get_dtype_plan(dtype)
        return (found, *build_glob_alternation(list(found))) if found else None

    def rule(name: str, dtype: torch.dtype) -> torch.dtype:
        if (known := plan(dtype)) is None:
            return dtype
        dtypes, alternation, groups, _ = known
        match = alternation.search(name)
        return dtypes[groups[match.lastgroup]] if match is not None else dtype

    return rule


class QuantizeOps(ConversionOps):
    """SparsifyOnLoad as transformers wants one that changes tensors on their way."""

    def __init__(self, on_load: SparsifyOnLoad) -> None:
        self.on_load = on_load

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, missing_keys: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Makes the layer of a tensor sparse; returns what is still to be put into the model."""
        rest = {}
        for name, tensors in input_dict.items():
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            target = name if self.on_load.wants(name) else full_layer_name
            if not self.on_load.wants(target):
                rest[name] = tensor
            else:
                taken = self.on_load.take(target, tensor)
                if not taken:
                    rest[target] = tensor
                elif missing_keys is not None:
                    missing_keys.difference_update(taken)
        return rest


@contextmanager
def saving(
    kwargs: dict[str, Any], state: dict[str, torch.Tensor], metadata: dict[str, str]
) -> Iterator[None]:
    """Nothing: the quantizer is asked for both."""
    yield


def install(quantizer: type) -> None:
    """Makes weights that stay on disk before accelerate meets them; for all else there are methods.

    What came under one of a module's names is not missing under others, where memory would be made for it.
    """
    load = PreTrainedModel._load_pretrained_model

    @functools.wraps(load)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        done = load(*args, **kwargs)
        for given in (*args, *kwargs.values()):
            mine = getattr(given, "hf_quantizer", None)
            if isinstance(mine, quantizer):
                mine.finish()
                done[0].missing_keys.difference_update(mine.all_pieces())
        return done

    PreTrainedModel._load_pretrained_model = staticmethod(wrapped)
