"""The functions of torch.nn.utils.prune, of its classes, and the reader of its checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...checks import check_known, fail
from ...prune.masks import Mask, Scores, allocate_global, make_mask
from ...prune.patterns import matrix_shape
from . import methods
from .pruned import Pruned, add_mask, count_of, left_of, place, scores_of


def identity(module: nn.Module, name: str) -> nn.Module:
    """A mask that keeps everything; for masks to come."""
    methods.Identity.apply(module, name)
    return module


def random_unstructured(
    module: nn.Module, name: str, amount: Any, *, generator: torch.Generator | None = None
) -> nn.Module:
    """Random elements leave: an int of them, or a part of those that are left.

    Args:
        module: changed in place, and returned.
        name: of a parameter.
        amount: an int, a number of elements; a float, the part of those that have not left before.
        generator: default: torch's global one.

    Raises ValueError for a name that the module lacks, an amount out of range.
    """
    methods.RandomUnstructured.apply(module, name, amount, generator=generator)
    return module


def l1_unstructured(
    module: nn.Module, name: str, amount: Any, importance_scores: torch.Tensor | None = None
) -> nn.Module:
    """Elements of least magnitude, or of scores of least magnitude, leave; see random_unstructured."""
    methods.L1Unstructured.apply(module, name, amount, importance_scores=importance_scores)
    return module


def random_structured(
    module: nn.Module, name: str, amount: Any, dim: int, *,
    generator: torch.Generator | None = None, bias: bool = False,
) -> nn.Module:  # fmt: skip
    """Random slices along `dim` leave, counted as in random_unstructured; `bias` as of ln_structured."""
    _check_bias("random_structured", module, dim, bias)
    methods.RandomStructured.apply(module, name, amount, dim, generator=generator)
    return _with_bias("random_structured", module, name, bias)


def ln_structured(
    module: nn.Module, name: str, amount: Any, n: float, dim: int,
    importance_scores: torch.Tensor | None = None, *, bias: bool = False,
) -> nn.Module:  # fmt: skip
    """Slices along `dim` of least n-norm leave, counted as in random_unstructured.

    bias: with dim=0, whether the bias of an output whose slice has left leaves, too: the output is then 0.
    """
    _check_bias("ln_structured", module, dim, bias)
    methods.LnStructured.apply(module, name, amount, n, dim, importance_scores=importance_scores)
    return _with_bias("ln_structured", module, name, bias)


def _check_bias(op: str, module: nn.Module, dim: int, bias: bool) -> None:
    if bias and dim != 0:
        fail(op, "bias=True is for slices of outputs: dim must be 0", dim)
    if bias and getattr(module, "bias", None) is None:
        fail(op, "bias=True needs a module with a bias", type(module).__name__)


def _with_bias(op: str, module: nn.Module, name: str, bias: bool) -> nn.Module:
    if bias:
        tensor, made = place(op, module, name)
        add_mask(op, module, "bias", left_of(tensor, made).flatten(1).any(1))
    return module


def custom_from_mask(module: nn.Module, name: str, mask: torch.Tensor) -> nn.Module:
    """A mask of the tensor's shape, 1 stays, on top of those there are."""
    methods.CustomFromMask.apply(module, name, mask)
    return module


def global_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: Any = "l1",
    importance_scores: Mapping[tuple[nn.Module, str], torch.Tensor] | None = None,
    *,
    amount: Any,
    min_density: float = 0.0,
    generator: torch.Generator | None = None,
) -> None:
    """Elements of least magnitude of all tensors together leave; nothing is concatenated.

    Args:
        parameters: (module, name) of each.
        pruning_method: "l1" or "random", or torch's L1Unstructured or RandomUnstructured.
        importance_scores: by (module, name), instead of magnitudes.
        amount: as of random_unstructured, over all that is left.
        min_density: what each tensor keeps at least (there small ones lose all of it).
        generator: for "random".
    """
    op = "global_unstructured"
    places = list(parameters)
    named = getattr(pruning_method, "__name__", pruning_method)
    names = {"L1Unstructured": "l1", "RandomUnstructured": "random"}
    check_known(op, "pruning_method", kind := names.get(named, named), ("l1", "random"))
    scores, previous, limits = [], [], []
    for module, name in places:
        tensor, made = place(op, module, name)
        left = left_of(tensor, made)
        given = (importance_scores or {}).get((module, name))
        drawn = (
            torch.rand(tensor.shape, generator=generator)
            if kind == "random"
            else scores_of(op, tensor, given).abs()
        )
        shape = matrix_shape(tensor.shape) if tensor.ndim > 1 else (1, tensor.numel())
        scores.append(Scores(drawn.float().reshape(shape)))
        previous.append(Mask.pack(left.reshape(shape)))
        gone = tensor.numel() - int(left.sum())
        limits.append((gone, max(gone, tensor.numel() - -int(-min_density * tensor.numel() // 1))))
    gone = sum(low for low, _ in limits)
    remove = gone + count_of(op, amount, sum(x.values.numel() for x in scores) - gone)
    if remove > (most := sum(high for _, high in limits)):
        fail(
            op,
            f"amount must leave every tensor a density of {min_density:g}: at most {most - gone}",
            remove - gone,
        )
    counts = allocate_global(scores, [(1, 1, 0, 0)] * len(scores), limits, remove, previous)
    for (module, name), score, before, count in zip(places, scores, previous, counts, strict=True):
        keep = make_mask(score, (1, 1, 0, 0), count, previous=before).unpack()
        add_mask(op, module, name, keep.view(getattr(module, name).shape))


def load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
    """Loads a checkpoint of a model that torch.nn.utils.prune or this module has pruned; `state_dict` stays.

    X_orig and X_mask become a parametrization of X, where there is none yet.

    Args:
        model: pruned or not.
        state_dict: its tensors.
        strict: as of nn.Module.load_state_dict, whose result is returned.

    Raises ValueError for a name that the model lacks, or shapes that differ, and RuntimeError for what
    nn.Module.load_state_dict refuses: the model is then as it was before.
    """
    op = "load_state_dict"
    state, modules = dict(state_dict), dict(model.named_modules())
    added: list[tuple[nn.Module, str, list[str]]] = []
    kept = copy.deepcopy(model.state_dict())  # extra states too, which may be anything
    try:
        for key in state_dict:
            base = key.removesuffix("_orig")
            if base == key or base + "_mask" not in state_dict:
                continue
            owner, _, name = base.rpartition(".")
            module = modules.get(owner)
            if not isinstance(getattr(module, name, None), torch.Tensor):
                fail(op, "a pruned tensor must be one of the model", repr(base))
            mask = state.pop(base + "_mask")
            if getattr(module, name).shape != mask.shape:
                fail(op, f"{base} must be of shape {tuple(getattr(module, name).shape)}", tuple(mask.shape))
            if place(op, module, name)[1] is None:
                added.append((module, name, list(module._parameters)))
                identity(module, name)
            path = f"{owner}.parametrizations.{name}".removeprefix(".")
            at = [isinstance(p, Pruned) for p in module.parametrizations[name]].index(True)
            state[f"{path}.original"], state[f"{path}.{at}.mask"] = state.pop(key), mask
        return model.load_state_dict(state, strict)
    except BaseException:
        for module, name, order in reversed(added):
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            for later in order[order.index(name) + 1 :]:  # at the place where it was
                module._parameters[later] = module._parameters.pop(later)
        model.load_state_dict(kept)
        raise
