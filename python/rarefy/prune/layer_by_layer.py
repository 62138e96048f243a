"""reconstruct: a whole model, layer by layer; towards what each layer gave, or what another model's gives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..checks import check_int, fail
from ..log import progress
from .groups import Config, FilterFn, batches_of, call, collect_grams, find_groups, inputs_of
from .masks import Mask
from .moments import Moments, fitted
from .patterns import matrix_shape, parse_pattern
from .reconstruct import asked_sparsity, layer_error, reconstruct_weight


@dataclass
class Reconstruction:
    """What reconstruct did.

    Attributes:
        masks: by the name of each weight.
        errors: ‖X(W − Ŵ)ᵀ‖² / ‖XWᵀ‖² of each layer, with the inputs it had when its turn came; `towards`
            another model ‖XŴᵀ + b − Y‖² / ‖Y‖², what it misses of that one's outputs Y.
    """

    masks: dict[str, Mask] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:  # noqa: D105
        lines = [f"{n}  kept {m.density:.4f}  error {self.errors[n]:.4g}" for n, m in self.masks.items()]
        return "\n".join(lines)


def reconstruct(
    model: nn.Module,
    data: Collection[Any],
    pattern: Any = "unstructured",
    sparsity: float | None = None,
    method: str = "sparsegpt",
    *,
    config: Config = None,
    filter_fn: FilterFn | None = None,
    forward: Callable[[Any], Any] | None = None,
    towards: nn.Module | None = None,
    memory: int = 1 << 30,
    skip: Collection[str] = (),
    on_layer: Callable[[str, Mask, float], None] | None = None,
    **options: Any,
) -> Reconstruction:
    """Prunes the linear layers and convolutions of a model, in place, from calibration data.

    Args:
        model: in the mode (eval) in which it is to be good.
        data: batches, run through as often as `memory` asks: tensors, tuples of arguments or dicts of them.
        pattern: see reconstruct_weight.
        sparsity: the same for each layer; `config` may give layers their own "sparsity" and "pattern".
        method: see reconstruct_weight.
        config: which layers, as for Sparsifier.prepare.
        filter_fn: as there.
        forward: what to do with a batch instead of calling the model.
        towards: a copy of the model as it was (copy.deepcopy), or another with layers of the same names and
            shapes: every layer, weight and bias, is fitted to the outputs that its layer gives there, on what
            the pruned layers before it give here, so that it also mends what those broke (see
            reconstruct_layer; `dampening` is its ridge). With memory=0 that is so from layer to layer. None:
            a layer's own outputs.
        memory: bytes of XᵀX (float64, K² for each layer; `towards` N·K more) held at a time. Layers are taken
            in that many at once, in the model's order, each lot with the inputs that the pruned ones before
            it give; 0: one by one.
        skip: names of weights that were done before: with the model saved in `on_layer`, what an
            interruption costs is the layer in progress.
        on_layer: called with name, mask and error after each layer.
        **options: refit, dampening, panel, steps, mask: see reconstruct_weight.

    Shows a progress bar on a terminal.

    Raises ValueError for data that is empty, or not finite or of the wrong width where a layer sees it, and
    as reconstruct_weight does, or if `towards` has no such layers.
    """
    op = "reconstruct"
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
    pattern, memory = parse_pattern(pattern, op), check_int(op, "memory", memory)
    groups = [g for g in find_groups(op, model, config, filter_fn) if g["tensor_fqn"] not in skip]
    groups = [g for g in groups if isinstance(g["module"], nn.Linear | nn.Conv2d)]
    for group in groups:
        group["pattern"] = parse_pattern(group.get("pattern", pattern), op)
        asked = group.get("sparsity", group.get("sparsity_level", sparsity))
        group["sparsity"] = asked_sparsity(op, group["pattern"], asked)
        weight = getattr(group["module"], group["tensor_name"])
        group["pattern"].check_shape(op, group["tensor_fqn"], weight.shape)
    result = Reconstruction()
    if towards is not None:
        _check_towards(op, groups, towards, forward)

    def observed() -> Iterator[tuple[dict[str, Any], Any]]:
        for lot in _lots(groups, memory, towards is not None):
            if towards is None:
                seen: dict[str, Any] = collect_grams(op, model, lot, data, forward)
            else:
                seen = _collect_moments(op, model, towards, lot, data)
            yield from ((group, seen.pop(group["tensor_fqn"])) for group in lot)

    for group, seen in progress(observed(), "reconstruct", total=len(groups)):
        fqn = group["tensor_fqn"]
        mask, error = _one(group, seen, method, options)
        result.masks[fqn], result.errors[fqn] = mask, error
        if on_layer is not None:
            on_layer(fqn, mask, error)
    return result


@torch.no_grad()
def _one(
    group: dict[str, Any], seen: torch.Tensor | list[Moments], method: str, options: dict[str, Any]
) -> tuple[Mask, float]:
    """One layer, in place, from XᵀX or moments; the groups of a convolution one after the other."""
    weight, given = getattr(group["module"], group["tensor_name"]), {**options, "name": group["tensor_fqn"]}
    asked, bias = (group["pattern"], group["sparsity"], method), group["module"].bias
    matrix = weight.detach().reshape(matrix_shape(weight.shape))
    part, ridge = len(matrix) // len(seen), options.get("dampening", 0.01)
    new, bits, lost, whole = torch.empty_like(matrix), [], 0.0, 0.0
    for i, found in enumerate(seen):
        rows = slice(i * part, (i + 1) * part)
        old = matrix[rows].double().cpu()
        if isinstance(found, Moments):
            best, gram = fitted(old, found, ridge, bias=bias is not None)
            made, mask = reconstruct_weight(best, gram, *asked, **given)
            new[rows], size = made, found.squares
            if bias is not None:
                bias[rows] = found.bias(new[rows].cpu()).to(bias)
            error = found.error(new[rows].cpu(), bias=bias is not None)
        else:
            new[rows], mask = reconstruct_weight(matrix[rows], found, *asked, **given)
            size = float(((old @ found) * old).sum())
            error = layer_error(old, new[rows].cpu(), found)
        bits.append(mask)
        lost, whole = lost + error * size, whole + size
    weight.copy_(new.view(weight.shape))
    mask = Mask(torch.cat([m.bits for m in bits]), matrix.shape[1], sum(m.kept for m in bits))
    return mask, lost / whole if whole else 0.0


def _check_towards(op: str, groups: Iterable[dict[str, Any]], towards: nn.Module, forward: Any) -> None:
    if forward is not None:
        fail(op, "forward must be None with towards: both models are called", "a function")
    if not isinstance(towards, nn.Module):
        fail(op, "towards must be an nn.Module", type(towards).__name__, TypeError)
    theirs = dict(towards.named_modules(remove_duplicate=False))
    for group in groups:
        for name, module, _ in group["places"]:
            there = getattr(theirs.get(name), "weight", None)
            if not isinstance(there, torch.Tensor) or there.shape != module.weight.shape:
                fail(op, f"towards must have a layer {name} of shape {tuple(module.weight.shape)}", "none")
            if there is module.weight:
                fail(op, "towards must be a copy of the model (copy.deepcopy)", "the same weights")


@torch.no_grad()
def _collect_moments(
    op: str, model: nn.Module, towards: nn.Module, groups: list[dict[str, Any]], data: Iterable[Any]
) -> dict[str, list[Moments]]:
    """Of each layer its inputs in the model and its outputs in the other one, by the name of its weight.

    One Moments for each group of a convolution.
    """
    found: dict[str, list[Moments]] = {}
    pairs: list[tuple[str, nn.Module, nn.Module]] = []
    for group in groups:
        module, fqn = group["module"], group["tensor_fqn"]
        outputs, columns = matrix_shape(module.weight.shape)
        parts = getattr(module, "groups", 1)
        found[fqn] = [Moments(columns, outputs // parts) for _ in range(parts)]
        pairs += [(fqn, m, towards.get_submodule(name)) for name, m, _ in group["places"]]
    given: list[list[torch.Tensor]] = [[] for _ in pairs]
    wanted: list[list[torch.Tensor]] = [[] for _ in pairs]
    hooks = []
    for (fqn, here, there), xs, ys in zip(pairs, given, wanted, strict=True):
        take = lambda m, args, xs=xs, fqn=fqn: xs.append(inputs_of(m, args[0], fqn))  # noqa: E731
        hooks.append(here.register_forward_pre_hook(take))
        hooks.append(there.register_forward_hook(lambda m, args, y, ys=ys: ys.append(y.detach())))
    try:
        for batch in batches_of(data):
            call(model, batch)
            call(towards, batch)
            for (fqn, here, _), xs, ys in zip(pairs, given, wanted, strict=True):
                if len(xs) != len(ys):
                    requirement = f"towards must call the layer of {fqn} {len(xs)} times, as the model does"
                    fail(op, requirement, f"{len(ys)} times")
                for x, y in zip(xs, ys, strict=True):  # of each call, (groups, tokens, K) and as it comes
                    if (whole := _tokens_of(here, y)).shape[0] != x.shape[1]:
                        requirement = f"towards must give the layer of {fqn} {x.shape[1]} tokens in a call"
                        fail(op, requirement, f"{whole.shape[0]} of {tuple(y.shape)}")
                    tokens = whole.chunk(len(x), 1)
                    for moments, mine, theirs in zip(found[fqn], x, tokens, strict=True):
                        moments.add(mine, theirs)
                xs.clear()
                ys.clear()
    finally:
        for hook in hooks:
            hook.remove()
    for name, parts in found.items():
        if not parts[0].tokens:
            fail(op, "data must reach every layer", f"none at {name}")
    return found


def _tokens_of(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Outputs of a Linear or Conv2d as (tokens, N), in the order of inputs_of."""
    if isinstance(module, nn.Conv2d):
        return (y.unsqueeze(0) if y.ndim == 3 else y).permute(0, 2, 3, 1).flatten(0, 2)
    return y.reshape(-1, y.shape[-1])


def _lots(groups: Iterable[dict[str, Any]], memory: int, towards: bool) -> Iterator[list[dict[str, Any]]]:
    """Groups in order, as many at once as `memory` bytes of XᵀX allow; at least one."""
    lot: list[dict[str, Any]] = []
    used = 0
    for group in groups:
        weight = getattr(group["module"], group["tensor_name"])
        rows, columns = matrix_shape(weight.shape)
        size = 8 * (columns**2 * getattr(group["module"], "groups", 1) + towards * rows * columns)
        if lot and used + size > memory:
            yield lot
            lot, used = [], 0
        lot.append(group)
        used += size
    if lot:
        yield lot
