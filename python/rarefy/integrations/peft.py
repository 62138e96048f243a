"""PEFT: LoRA on sparse layers, by PEFT's own calls; merging adds what the pattern stores. docs/peft.md.

Importing this module teaches LoRA about BlockSparseLinear, also for target_modules="all-linear".
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.lora import layer as lora
from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from ..checks import fail
from ..masks import to_blocks
from ..modules import BlockSparseLinear
from ..pattern_weight import PatternWeight

OP = "merge"


class SparseLinear(lora.Linear):
    """LoRA on a BlockSparseLinear: y = x Wᵀ + b + scaling · B(A(x)).

    `strict` says what merging does with the part of B A that lies where W stores nothing: refuse, or drop it.
    """

    strict: bool = True

    def __init__(self, base_layer: nn.Module, adapter_name: str, *, config: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # PEFT reads in_features and out_features, as it should, but does not know the class.
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(base_layer, adapter_name, config=config, **kwargs)
        self.fan_in_fan_out = False  # a sparse weight is (out, in), also where it was a Conv1D's

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """LoRA alone: others (DoRA …) want the norms of a dense weight."""
        return {(): None}

    def _stored(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What the weight stores of an adapter, as its values, and the whole of it."""
        weight = self.get_base_layer().weight
        if not isinstance(weight, PatternWeight) or not weight.dtype.is_floating_point:
            requirement = "an adapter must be merged into a weight of floats on a pattern"
            fail(OP, requirement, type(weight).__name__, TypeError)
        delta = self.get_delta_weight(adapter)
        inside = to_blocks(delta, weight.block_shape)[weight.block_mask()]
        return inside.reshape(weight.values.shape), delta

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds active adapters to the stored values. All checks come before the first change.

        Raises ValueError where `strict` and an adapter has a part that is not stored; with `safe_merge`,
        also for values that are not finite.
        """
        names = [a for a in check_adapters_to_merge(self, adapter_names) if a in self.lora_A]
        deltas, base = {}, self.get_base_layer()
        for name in names:
            inside, whole = self._stored(name)
            if self.strict:
                total = whole.double().square().sum()
                lost = float((total - inside.double().square().sum()) / total) if total > 0 else 0.0
                if lost > 1e-6:  # what rounding alone leaves of a sum is not a loss
                    requirement = (
                        "an adapter must lie within the pattern (strict_merge(model, False) drops more)"
                    )
                    fail(OP, requirement, f"{100 * lost:.3g}% of the square of {name!r} outside")
            delta = inside.to(base.weight.dtype)
            if self.lora_bias[name] and base.bias is None:
                fail(OP, "a layer must have a bias to take an adapter's", f"none, for {name!r}")
            if safe_merge and not bool((base.weight.values + delta).isfinite().all()):
                fail(OP, "merged values must be finite", f"NaN or infinity with {name!r}")
            deltas[name] = delta
        for name, delta in deltas.items():
            base.weight.values.add_(delta)
            self._add_bias(name, 1)
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtracts what merge added, to rounding."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                self.get_base_layer().weight.values.sub_(
                    self._stored(name)[0].to(self.get_base_layer().weight.dtype)
                )
                self._add_bias(name, -1)

    def _add_bias(self, name: str, sign: int) -> None:
        if self.lora_bias[name]:
            bias = self.get_base_layer().bias
            bias.add_(self.lora_B[name].bias.to(bias.dtype) * (sign * self.scaling[name]))


def strict_merge(model: nn.Module, strict: bool) -> None:
    """Says for all sparse layers with LoRA whether merging refuses adapters that reach beyond the pattern.

    They do by default. With False the part beyond is dropped: the model becomes another one.
    """
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module.strict = bool(strict)


def _with_sparse_layers(create: Any) -> Any:
    @functools.wraps(create)
    def wrapped(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, BlockSparseLinear) and not lora_config._custom_modules:
            kwargs.pop("parameter_name", None)
            return SparseLinear(target, adapter_name, config=lora_config, **kwargs)
        return create(lora_config, adapter_name, target, **kwargs)

    return staticmethod(wrapped)


def _with_sparse_names(include: Any) -> Any:
    @functools.wraps(include)
    def wrapped(peft_config: Any, model: nn.Module) -> Any:
        asked = getattr(peft_config, "target_modules", None)
        peft_config = include(peft_config, model)
        if isinstance(asked, str) and asked.lower() == "all-linear":
            names = {n for n, m in model.named_modules() if isinstance(m, BlockSparseLinear)}
            inside = {
                n for n in names if n.endswith("base_layer")
            }  # a LoRA layer's, which is there by its name
            peft_config.target_modules = set(peft_config.target_modules) | (names - inside)
        return peft_config

    return wrapped


LoraModel._create_new_module = _with_sparse_layers(LoraModel._create_new_module)
tuners_utils._maybe_include_all_linear_layers = _with_sparse_names(
    tuners_utils._maybe_include_all_linear_layers
)
