"""Experts of transformers 5, which keeps those of a layer in two tensors (E, N, K): layers for each of them.

An experts module whose weights become sparse stays the same module, under another class, with a child for
each expert: "experts.0.gate_up_proj.weight.values" where there was a part of "experts.gate_up_proj". When the
last of them is dense again, they are the two tensors again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

PARTS = ("gate_up_proj", "down_proj")


class Expert(nn.Module):
    """The two layers of one expert, by which the module around it multiplies."""

    def __init__(self, experts: nn.Module, linears: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.__dict__["experts"] = experts  # no child
        for part, linear in linears.items():
            setattr(self, part, linear)


class SparseExperts(nn.Module):
    """Experts of which each is two layers; all else is as in the class `stands_for`, a transformers' one."""

    stands_for: type[nn.Module]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The sum of each token's experts, weighted: (T, H), with indices and weights (T, top_k)."""
        out = torch.zeros_like(hidden_states)
        for number, expert in enumerate(experts_in(self)):
            token, place = torch.where(top_k_index == number)
            if len(token):
                x = self._gated(expert.gate_up_proj(hidden_states[token]))
                x = expert.down_proj(x) * top_k_weights[token, place, None]
                out = out.index_add(0, token, x.to(out.dtype))
        return out

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self.stands_for, "_apply_gate"):
            return self.stands_for._apply_gate(self, x)
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def experts_in(module: nn.Module) -> list[Expert]:
    """The children of a SparseExperts that are experts, by their numbers."""
    return [child for child in module.children() if isinstance(child, Expert)]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module._parameters.items() if parameter is not None}


def is_dense_experts(module: nn.Module) -> bool:
    """Whether a module of transformers has experts, x to down(act(gate) · up), in two tensors (E, N, K)."""
    if not type(module).__module__.startswith("transformers.models.") or "forward" in vars(module):
        return False
    shapes = _shapes(module)
    if set(shapes) != set(PARTS) or any(len(shape) != 3 for shape in shapes.values()):
        return False
    if not all(type(parameter) is nn.Parameter for parameter in module.parameters(recurse=False)):
        return False
    (e, twice, h), (e2, h2, inner) = (shapes[part] for part in PARTS)
    odd = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    plain = not any(getattr(module, key, False) for key in odd)
    gated = getattr(module, "has_gate", True) and getattr(module, "is_concatenated", True)
    return plain and gated and hasattr(module, "act_fn") and (e2, h2, twice) == (e, h, 2 * inner)


def linear_of(module: nn.Module, number: int, part: str) -> nn.Linear:
    """A part of an expert as an nn.Linear of the same memory."""
    whole = module._parameters[part]
    _, n, k = whole.shape
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=whole.dtype)
    linear.weight = nn.Parameter(whole.detach()[number], requires_grad=whole.requires_grad)
    if getattr(whole, "_is_hf_initialized", False):  # transformers must draw nothing here
        linear.weight._is_hf_initialized = True
    return linear.train(module.training)


def unpack(module: nn.Module) -> None:
    """Makes each expert two layers, which share the memory of the two tensors; nothing, if they are."""
    if isinstance(module, SparseExperts):
        return
    count = len(module._parameters[PARTS[0]])
    experts = [Expert(module, {p: linear_of(module, i, p) for p in PARTS}) for i in range(count)]
    for part in PARTS:
        delattr(module, part)
    module.stands_for, module.__class__ = type(module), SparseExperts
    for number, expert in enumerate(experts):
        module.add_module(str(number), expert.train(module.training))


def pack(module: nn.Module) -> None:
    """Makes experts that are all dense two tensors again, as they were."""
    experts = experts_in(module)
    layers = {part: [getattr(expert, part) for expert in experts] for part in PARTS}
    if not all(type(layer) is nn.Linear for part in PARTS for layer in layers[part]):
        return
    _close(module)
    for part, linears in layers.items():
        whole = torch.stack([linear.weight.detach() for linear in linears])
        grad = any(linear.weight.requires_grad for linear in linears)
        module.register_parameter(part, nn.Parameter(whole, requires_grad=grad))


def _close(module: nn.Module) -> None:
    """Takes the layers of experts away and gives the module its class back; its two tensors are to follow."""
    for number in range(len(experts_in(module))):
        delattr(module, str(number))
    kind = module.stands_for
    del module.stands_for
    module.__class__ = kind


def settle_expert(module: nn.Module) -> None:
    """Where the module is an expert: makes all of them two tensors, if none is sparse any more."""
    if isinstance(module, Expert):
        pack(module.experts)


@contextlib.contextmanager
def unpacked(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Experts of which `names` has weights are layers, also after it; an error leaves them as they were."""
    wanted = {path for name in names for path in _above(name)}
    found: list[Any] = [m for n, m in model.named_modules() if n in wanted and is_dense_experts(m)]
    before = [{part: module._parameters[part] for part in PARTS} for module in found]
    for module in found:
        unpack(module)
    try:
        yield
    except BaseException:
        for module, parameters in zip(found, before, strict=True):
            if isinstance(module, SparseExperts):  # whatever has become of some of its layers
                _close(module)
            for part, parameter in parameters.items():
                setattr(module, part, parameter)
        raise


def _above(name: str) -> Iterator[str]:
    """The experts that a weight may be of: "a" of "a.0.down_proj.weight"."""
    parts = name.split(".")
    if len(parts) >= 4 and parts[-1] == "weight" and parts[-2] in PARTS and parts[-3].isdigit():
        yield ".".join(parts[:-3])
