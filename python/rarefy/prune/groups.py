"""The weights of a model that are pruned: found, configured, and seen from all layers that share them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..checks import fail

FilterFn = Callable[[str, nn.Module], bool]

# What an entry of a configuration may say; others are kept, as torch.ao does, unless they are misspelt.
_OPTIONS = ("sparsity", "sparsity_level", "pattern")

# Modules and their parameters with a weight matrix.
_TENSORS = {
    nn.Linear: ("weight",),
    nn.Conv2d: ("weight",),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(module name, module, parameter name) of everything that is pruned without a configuration."""
    for name, module in model.named_modules():
        for kind, tensors in _TENSORS.items():
            if isinstance(module, kind):
                for tensor in tensors:
                    if isinstance(getattr(module, tensor, None), torch.Tensor):
                        yield name, module, tensor


def _resolve(op: str, model: nn.Module, entry: Mapping[str, Any]) -> tuple[str, nn.Module, str]:
    """The same of a configuration's entry, in torch.ao's words: tensor_fqn, or module_fqn and tensor_name."""
    if "tensor_fqn" in entry:
        fqn = str(entry["tensor_fqn"]).removeprefix(".")
    elif "module_fqn" in entry:
        fqn = f"{entry['module_fqn']}.{entry.get('tensor_name', 'weight')}".removeprefix(".")
    else:
        fail(op, "an entry of config must have a tensor_fqn", sorted(map(str, entry)))
    name, _, tensor = fqn.rpartition(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    found = getattr(modules[name], tensor, None) if name in modules else None
    if not isinstance(found, torch.Tensor):
        known = [n for n, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1]
        near = difflib.get_close_matches(fqn, known, n=3, cutoff=0.3) or known[:3]
        fail(op, "tensor_fqn must name a tensor of the model", f"{fqn!r}; near names: {', '.join(near)}")
    for key, mine in (("module_fqn", name), ("tensor_name", tensor), ("module", modules[name])):
        if key in entry and entry[key] is not mine and entry[key] != mine:
            fail(op, f"{key} must be that of tensor_fqn {fqn!r}", entry[key])
    return name, modules[name], tensor


Config = Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None


def find_groups(
    op: str, model: nn.Module, config: Config, filter_fn: FilterFn | None
) -> list[dict[str, Any]]:
    """One dict for each Parameter: where it is (all its places) and what the configuration says of it."""
    entries: list[tuple[str, nn.Module, str, dict[str, Any]]] = []
    if config is None:
        entries = [(*place, {}) for place in _candidates(model)]
    elif isinstance(config, Mapping):
        candidates, taken = list(_candidates(model)), set()
        for pattern, options in config.items():
            if not isinstance(options, Mapping):
                fail(op, f"config[{pattern!r}] must be a dict of options", type(options).__name__, TypeError)
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                fail(op, "keys of config must be regular expressions", f"{pattern!r}: {error}")
            names = [(name, f"{name}.{tensor}") for name, _, tensor in candidates]
            hits = [i for i, pair in enumerate(names) if any(map(compiled.fullmatch, pair))]
            if not hits:
                near = difflib.get_close_matches(pattern, [n for n, _ in names], n=3, cutoff=0.3)
                got = f"{pattern!r}, which matches none; near names: {', '.join(near) or 'none'}"
                fail(op, "a pattern of config must match the whole name of a layer", got)
            entries += [(*candidates[i], dict(options)) for i in hits if i not in taken]
            taken |= set(hits)
    elif isinstance(config, Sequence) and not isinstance(config, str):
        for entry in config:
            if not isinstance(entry, Mapping):
                fail(op, "config must be a list of dicts", type(entry).__name__, TypeError)
            places = ("tensor_fqn", "module_fqn", "tensor_name", "module")
            options = {key: value for key, value in entry.items() if key not in places}
            entries.append((*_resolve(op, model, entry), options))
    else:
        fail(op, "config must be None, a list of dicts or a mapping", type(config).__name__, TypeError)

    groups: dict[int, dict[str, Any]] = {}
    for name, module, tensor, options in entries:
        if filter_fn is not None and not filter_fn(name, module):
            continue
        if is_parametrized(module, tensor):
            advice = "squash_mask() of the sparsifier that prepared it, or remove the parametrization"
            fail(op, f"a weight must not be parametrized ({advice})", f"{name}.{tensor}")
        weight = getattr(module, tensor)
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
            fail(
                op,
                "a weight must be float64, float32, bfloat16 or float16",
                f"{name}.{tensor}: {weight.dtype}",
                TypeError,
            )
        for key in options:
            if key not in _OPTIONS and (near := difflib.get_close_matches(key, _OPTIONS, n=1, cutoff=0.8)):
                fail(op, f"config must not have keys that only resemble {near[0]!r}", repr(key))
        group = groups.setdefault(
            id(weight),
            {
                "module": module,
                "module_fqn": name,
                "tensor_name": tensor,
                "tensor_fqn": f"{name}.{tensor}".removeprefix("."),
                "places": [],
                **options,
            },
        )
        group["places"].append((name, module, tensor))
    # Others that hold the same Parameter, whether they were asked for or not.
    for name, module in model.named_modules():
        for tensor, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            group = groups.get(id(parameter))
            if group is not None and (module, tensor) not in [(m, t) for _, m, t in group["places"]]:
                group["places"].append((name, module, tensor))
    if not groups:
        fail(
            op, "the model must have a weight to prune (nn.Linear, nn.Conv2d, nn.MultiheadAttention)", "none"
        )
    return list(groups.values())


def batches_of(data: Any) -> Iterable[Any]:
    """`data`; TypeError unless it can be iterated over."""
    if not isinstance(data, Iterable):
        fail("calibration", "data must be an iterable of batches", type(data).__name__, TypeError)
    return data


def call(model: nn.Module, batch: Any) -> Any:
    """The model's result for a batch: a tensor, a tuple of arguments or a dict of them."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def inputs_of(module: nn.Module, x: torch.Tensor, name: str = "a layer") -> torch.Tensor:
    """What the weight of a Linear or Conv2d multiplies, (groups, tokens, K) in float64 on the CPU.

    Raises ValueError for another number of features or channels; `name` is for that.
    """
    conv = isinstance(module, nn.Conv2d)
    wanted, at = (module.in_channels, -3) if conv else (module.in_features, -1)
    if x.ndim < -at or x.shape[at] != wanted:
        what = "channels" if conv else "features"
        fail("calibration", f"the inputs of {name} must have {wanted} {what}", tuple(x.shape))
    x = x.detach().cpu().double()
    if isinstance(module, nn.Conv2d):
        if x.ndim == 3:
            x = x.unsqueeze(0)
        if isinstance(module.padding, str):
            total = [
                d * (k - 1) if module.padding == "same" else 0
                for d, k in zip(module.dilation, module.kernel_size, strict=True)
            ]
            left = [t // 2 for t in total]
            padding = [left[1], total[1] - left[1], left[0], total[0] - left[0]]
        else:
            padding = [module.padding[1]] * 2 + [module.padding[0]] * 2
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = nn.functional.pad(x, padding, mode=mode)
        columns = nn.functional.unfold(x, module.kernel_size, module.dilation, 0, module.stride)
        return columns.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    return x.reshape(1, -1, x.shape[-1])


@torch.no_grad()
def run_through(model: nn.Module, data: Iterable[Any], forward: Callable[[Any], Any] | None) -> None:
    """Batches through a model, or through `forward` in place of it, without gradients."""
    for batch in batches_of(data):
        call(model, batch) if forward is None else forward(batch)


def collect_grams(
    op: str,
    model: nn.Module,
    groups: list[dict[str, Any]],
    data: Iterable[Any],
    forward: Callable[[Any], Any] | None,
) -> dict[str, torch.Tensor]:
    """XᵀX of what each group's layers get of the data, (groups of a convolution, K, K) float64, by name.

    Raises ValueError for data that does not reach a layer, or is not finite there.
    """
    state: dict[str, dict[str, Any]] = {group["tensor_fqn"]: {} for group in groups}
    with observing(groups, state, gram=True):
        run_through(model, data, forward)
    for name, seen in state.items():
        if "gram" not in seen:
            fail(op, "data must reach every layer", f"none at {name}")
    return {name: seen["gram"] for name, seen in state.items()}


def grams(
    model: nn.Module,
    data: Iterable[Any],
    *,
    config: Config = None,
    filter_fn: FilterFn | None = None,
    forward: Callable[[Any], Any] | None = None,
) -> dict[str, torch.Tensor]:
    """XᵀX of the inputs of linear layers and convolutions, by the names of their weights.

    Args:
        model: in the mode (eval) in which it is to be good; not changed.
        data: batches: tensors, tuples of arguments or dicts of them.
        config: which layers, as for Sparsifier.prepare.
        filter_fn: as there.
        forward: what to do with a batch instead of calling the model.

    Returns (groups, K, K) float64 each, one group for a linear layer. Raises ValueError for data that does
    not reach a layer, or is not finite there.
    """
    groups = find_groups("grams", model, config, filter_fn)
    groups = [g for g in groups if isinstance(g["module"], nn.Linear | nn.Conv2d)]
    return collect_grams("grams", model, groups, data, forward)


@contextmanager
def observing(groups: list[dict[str, Any]], state: dict[str, dict[str, Any]], gram: bool) -> Iterator[None]:
    """While it is open, calls of the layers add Σ X² by column, and XᵀX if asked, to their group's state."""
    hooks = []

    def hook(fqn: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def observe(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = inputs_of(module, args[0], fqn)
            if not bool(torch.isfinite(x).all()):
                fail("calibration", f"the inputs of {fqn} must be finite", "NaN or infinity")
            mine = state[fqn]
            squares = x.square().sum(1)
            mine["inputs"] = squares if "inputs" not in mine else mine["inputs"] + squares
            mine["tokens"] = mine.get("tokens", 0) + x.shape[1]
            if gram:
                product = x.mT @ x
                mine["gram"] = product if "gram" not in mine else mine["gram"] + product

        return observe

    for group in groups:
        for _, module, tensor in group["places"]:
            if isinstance(module, nn.Linear | nn.Conv2d) and tensor == "weight":
                hooks.append(module.register_forward_pre_hook(hook(group["tensor_fqn"])))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
