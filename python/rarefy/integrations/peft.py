"""PEFT: LoRA and DoRA on sparse layers, by PEFT's calls; merging adds what the pattern stores. docs/peft.md.

Importing this module teaches LoRA about BlockSparseLinear, also for target_modules="all-linear".
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..checks import fail
from ..masks import to_blocks
from ..modules import BlockSparseLinear
from ..pattern_weight import PatternWeight
from ..sparse_weight import SparseWeight
from .needs import need

need("peft", "0.21")  # before names that earlier versions do not have

from peft.tuners import tuners_utils
from peft.tuners.lora import layer as lora
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.model import LoraModel
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge

OP = "merge"


def row_norms(
    weight: SparseWeight,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm of each row of W + scaling · B A, (N,) in float32, from what W stores: no tensor is (N, K).

    |w + s bA|² = |w|² + 2 s b · (W Aᵀ) + s² bᵀ (A Aᵀ) b, with W Aᵀ by the layer's own kernel.

    Args:
        weight: W, (N, K).
        a: A, (r, K).
        b: B, (N, r).
        scaling: s.
        squares: |w|² of each row, where it is known.
    """
    squares = _row_squares(weight) if squares is None else squares
    cross = weight.linear(a.to(weight.x_dtype or weight.dtype)).float()  # (r, N)
    a, b = a.float(), b.float()
    total = squares + 2 * scaling * (b * cross.t()).sum(1) + scaling**2 * (b @ (a @ a.t()) * b).sum(1)
    return total.clamp(min=0).sqrt()


def _row_squares(weight: SparseWeight) -> torch.Tensor:
    """|w|² of each row, (N,) in float32."""
    if not isinstance(weight, PatternWeight):
        return weight.to_dense().float().square().sum(1)
    pattern = weight.pattern
    stored = weight.blocks(weight.values.detach()).float().square().sum(-1)  # (nnzb, R)
    rows = torch.repeat_interleave(pattern.crow_indices.diff().long())
    whole = stored.new_zeros(len(pattern.crow_indices) - 1, stored.shape[1]).index_add_(0, rows, stored)
    scales = getattr(weight, "scales", None)
    whole = whole.flatten()[: weight.shape[0]]
    return whole if scales is None else whole * scales.float().square()


class Magnitudes(DoraLinearLayer):
    """DoRA's magnitude for each row of a sparse weight, under PEFT's names."""

    def update_layer(
        self, *, base_layer: nn.Module, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, **_: Any
    ) -> None:
        """Starts with the norms of the rows as they are, so that nothing changes yet."""
        norms = row_norms(base_layer.weight, lora_A.detach(), lora_B.detach(), scaling)
        self.weight = nn.Parameter(norms.to(lora_A.dtype))

    def factors(
        self, base_layer: nn.Module, a: torch.Tensor, b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """What the rows of W + scaling · B A are multiplied by; no gradient goes into their norms.

        1 for rows that are zero, which have no direction: their B can begin to learn.
        """
        with torch.no_grad():
            norms = row_norms(base_layer.weight, a, b, scaling).to(self.weight.dtype)
        return torch.where(norms > 0, self.weight / norms.clamp(min=torch.finfo(norms.dtype).tiny), 1)

    def forward(
        self,
        x: torch.Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: nn.Module,
        base_result: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """What comes on top of the layer's own result, which is `base_result` unless x was dropped out of."""
        factors = self.factors(base_layer, lora_A.weight, lora_B.weight, scaling)
        if base_result is None:
            base = base_layer.weight.linear(x.to(base_layer.weight.x_dtype or base_layer.weight.dtype))
        else:
            base = base_result if base_layer.bias is None else base_result - base_layer.bias
        return (factors - 1) * base + factors * scaling * lora_B(lora_A(x))


class SparseDora(DoraLinearVariant):
    """DoRA on a sparse layer: y = m / |W + s B A| · (x Wᵀ + s B(A(x))) + b. Merging is SparseLinear's."""

    @staticmethod
    def init(module: SparseLinear, adapter_name: str, **_: Any) -> None:
        """Adds the magnitudes."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        magnitudes = Magnitudes(fan_in_fan_out=False)
        magnitudes.update_layer(
            base_layer=module.get_base_layer(),
            lora_A=module.lora_A[adapter_name].weight,
            lora_B=module.lora_B[adapter_name].weight,
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = magnitudes


class SparseLinear(lora.Linear):
    """LoRA on a BlockSparseLinear: y = x Wᵀ + b + scaling · B(A(x)).

    `strict` says what merging does with the part of B A that lies where W stores nothing: refuse, or drop it.
    """

    strict: bool = True

    def __init__(self, base_layer: nn.Module, adapter_name: str, *, config: Any, **kwargs: Any) -> None:
        base = base_layer.get_base_layer() if isinstance(base_layer, BaseTunerLayer) else base_layer
        if base.activation is not None:  # an adapter is added to the product, before any activation
            fail("lora", "a sparse layer with an adapter must have no activation", repr(base.activation))
        with warnings.catch_warnings():
            # PEFT reads in_features and out_features, as it should, but does not know the class.
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(base_layer, adapter_name, config=config, **kwargs)
        self.fan_in_fan_out = False  # a sparse weight is (out, in), also where it was a Conv1D's
        self._before: dict[str, torch.Tensor] = {}  # values before a DoRA adapter was merged

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """LoRA and DoRA."""
        return {(): None, ("use_dora",): SparseDora}

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
        together = [*self.merged_adapters, *names]
        if len(together) > 1 and any(name in self.lora_variant for name in together):
            fail(OP, "a DoRA adapter must be merged alone", ", ".join(map(repr, together)))
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
            if name in self.lora_variant:
                delta = self._scaled(name, base.weight.values + inside) - base.weight.values
            if safe_merge and not bool((base.weight.values + delta).isfinite().all()):
                fail(OP, "merged values must be finite", f"NaN or infinity with {name!r}")
            deltas[name] = delta
        for name, delta in deltas.items():
            if name in self.lora_variant:
                self._before[name] = base.weight.values.clone()
            base.weight.values.add_(delta)
            self._add_bias(name, 1)
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtracts what merge added, to rounding; of DoRA, gives the values back as they were."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                weight = self.get_base_layer().weight
                if name in self._before:
                    weight.values.copy_(self._before.pop(name))
                else:
                    weight.values.sub_(self._stored(name)[0].to(weight.dtype))
                self._add_bias(name, -1)

    def _scaled(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Values whose rows have the magnitudes of a DoRA adapter."""
        base, a, b = self.get_base_layer(), self.lora_A[name].weight, self.lora_B[name].weight
        factors = self.lora_magnitude_vector[name].factors(base, a, b, self.scaling[name])
        weight, block_rows = base.weight, base.weight.block_shape[0]
        rows = torch.repeat_interleave(weight.pattern.crow_indices.diff().long())
        padded = functional.pad(factors, (0, -len(factors) % block_rows), value=1.0)
        of_blocks = padded.unflatten(0, (-1, block_rows))[rows]  # (nnzb, R)
        return (weight.blocks(values) * of_blocks[..., None]).reshape(values.shape).to(weight.dtype)

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
