"""The functions of torch.nn.utils.prune on a parametrization, and the reader of its checkpoints."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...checks import check_known, check_tensor, fail
from ...prune.masks import Mask, Scores, allocate_global, make_mask
from ...prune.patterns import matrix_shape


class Pruned(nn.Module):
    """The parametrization: the original times a mask, zero where the mask is, even of NaN.

    `mask`, of the tensor's shape and dtype, 1 stays: a buffer, so it is saved.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        """The pruned tensor."""
        return torch.where(self.mask != 0, original, 0)


def _place(op: str, module: nn.Module, name: str) -> tuple[torch.Tensor, Pruned | None]:
    """The tensor under its masks, and its parametrization if there is one."""
    if not isinstance(module, nn.Module):
        fail(op, "module must be an nn.Module", type(module).__name__, TypeError)
    if parametrize.is_parametrized(module, name):
        for made in module.parametrizations[name]:
            if isinstance(made, Pruned):
                return getattr(module, name).detach(), made
        fail(
            op,
            f"{name} must have no parametrization of others",
            type(module.parametrizations[name][0]).__name__,
        )
    check_known(op, "name", name, [n for n, _ in module.named_parameters(recurse=False)])
    return getattr(module, name).detach(), None


def _count(op: str, amount: Any, left: int) -> int:
    """Of so many that are left: an int is a number of them, a float the part round(amount · left)."""
    if isinstance(amount, numbers.Integral) and not isinstance(amount, bool):
        if not 0 <= amount <= left:
            fail(op, f"amount must be in [0, {left}], or a part in [0.0, 1.0]", amount)
        return int(amount)
    if not isinstance(amount, numbers.Real) or isinstance(amount, bool):
        fail(op, "amount must be a number", repr(amount), TypeError)
    if not 0.0 <= amount <= 1.0:
        fail(op, f"amount must be in [0.0, 1.0], or an int up to {left}", amount)
    return round(float(amount) * left)


def _prune(op: str, module: nn.Module, name: str, keep: torch.Tensor) -> nn.Module:
    """Adds a mask, bool of the tensor's shape, to those there are."""
    tensor, made = _place(op, module, name)
    if made is None:
        mask = keep.to(tensor.device).to(tensor.dtype)
        parametrize.register_parametrization(module, name, Pruned(mask))
    else:
        made.mask.mul_(keep.to(made.mask.device))
    return module


def _left(tensor: torch.Tensor, made: Pruned | None) -> torch.Tensor:
    """Bool: what no mask has removed so far, of what _place gave."""
    return torch.ones_like(tensor, dtype=torch.bool) if made is None else made.mask != 0


def _scores(op: str, tensor: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    if given is None:
        return tensor.abs()
    check_tensor(op, "importance_scores", given)
    if given.shape != tensor.shape:
        fail(op, f"importance_scores must be of shape {tuple(tensor.shape)}", tuple(given.shape))
    return given.detach()


def _unstructured(op: str, module: nn.Module, name: str, amount: Any, scores: torch.Tensor) -> nn.Module:
    tensor, made = _place(op, module, name)
    left = _left(tensor, made)
    remove = _count(op, amount, int(left.sum())) + int((~left).sum())
    ranked = scores.float().masked_fill(~left.to(scores.device), -torch.inf)
    matrix = ranked.reshape(matrix_shape(tensor.shape) if tensor.ndim > 1 else (1, -1)).cpu()
    keep = make_mask(Scores(matrix), (1, 1, 0, 0), remove).unpack().view(tensor.shape)
    return _prune(op, module, name, keep)


def _structured(
    op: str, module: nn.Module, name: str, amount: Any, dim: int, scores: torch.Tensor
) -> nn.Module:
    """Slices along `dim` of least score leave; those that left before do not count."""
    tensor, made = _place(op, module, name)
    if tensor.ndim < 2:
        fail(op, f"{name} must have 2 or more dimensions", tuple(tensor.shape))
    if not -tensor.ndim <= dim < tensor.ndim:
        fail(op, f"dim must be of {tensor.ndim} dimensions", dim)
    slices = _left(tensor, made).movedim(dim, 0).flatten(1).any(1).cpu()
    remove = _count(op, amount, int(slices.sum())) + int((~slices).sum())
    ranked = scores.float().cpu().masked_fill(~slices, -torch.inf).unsqueeze(1)
    keep = make_mask(Scores(ranked), (1, 1, 0, 0), remove).unpack().view(-1)
    shape = [1] * tensor.ndim
    shape[dim] = -1
    return _prune(op, module, name, keep.view(shape).expand(tensor.shape))


def identity(module: nn.Module, name: str) -> nn.Module:
    """A mask that keeps everything; for masks to come."""
    tensor, _ = _place("identity", module, name)
    return _prune("identity", module, name, torch.ones_like(tensor, dtype=torch.bool))


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
    op = "random_unstructured"
    tensor, _ = _place(op, module, name)
    return _unstructured(op, module, name, amount, torch.rand(tensor.shape, generator=generator))


def l1_unstructured(
    module: nn.Module, name: str, amount: Any, importance_scores: torch.Tensor | None = None
) -> nn.Module:
    """Elements of least magnitude, or of least score, leave; see random_unstructured."""
    op = "l1_unstructured"
    tensor, _ = _place(op, module, name)
    return _unstructured(op, module, name, amount, _scores(op, tensor, importance_scores).abs())


def random_structured(
    module: nn.Module, name: str, amount: Any, dim: int, *, generator: torch.Generator | None = None
) -> nn.Module:
    """Random slices along `dim` leave; see random_unstructured."""
    op = "random_structured"
    tensor, _ = _place(op, module, name)
    length = tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0
    return _structured(op, module, name, amount, dim, torch.rand(length, generator=generator))


def ln_structured(
    module: nn.Module, name: str, amount: Any, n: float, dim: int,
    importance_scores: torch.Tensor | None = None,
) -> nn.Module:  # fmt: skip
    """Slices along `dim` of least n-norm, of the tensor or of scores, leave; see random_unstructured."""
    op = "ln_structured"
    tensor, _ = _place(op, module, name)
    values = tensor if importance_scores is None else _scores(op, tensor, importance_scores)
    if not -tensor.ndim <= dim < tensor.ndim:
        fail(op, f"dim must be of {tensor.ndim} dimensions", dim)
    norms = torch.linalg.vector_norm(values.float().movedim(dim, 0).flatten(1), ord=n, dim=1)
    return _structured(op, module, name, amount, dim, norms)


def custom_from_mask(module: nn.Module, name: str, mask: torch.Tensor) -> nn.Module:
    """A mask of the tensor's shape, 1 stays, on top of those there are."""
    op = "custom_from_mask"
    tensor, _ = _place(op, module, name)
    check_tensor(op, "mask", mask)
    if mask.shape != tensor.shape:
        fail(op, f"mask must be of shape {tuple(tensor.shape)}", tuple(mask.shape))
    return _prune(op, module, name, mask != 0)


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
        tensor, made = _place(op, module, name)
        left = _left(tensor, made)
        given = (importance_scores or {}).get((module, name))
        drawn = (
            torch.rand(tensor.shape, generator=generator)
            if kind == "random"
            else _scores(op, tensor, given).abs()
        )
        shape = matrix_shape(tensor.shape) if tensor.ndim > 1 else (1, tensor.numel())
        scores.append(Scores(drawn.float().reshape(shape)))
        previous.append(Mask.pack(left.reshape(shape)))
        gone = tensor.numel() - int(left.sum())
        limits.append((gone, max(gone, tensor.numel() - -int(-min_density * tensor.numel() // 1))))
    gone = sum(low for low, _ in limits)
    remove = gone + _count(op, amount, sum(x.values.numel() for x in scores) - gone)
    if remove > (most := sum(high for _, high in limits)):
        fail(
            op,
            f"amount must leave every tensor a density of {min_density:g}: at most {most - gone}",
            remove - gone,
        )
    counts = allocate_global(scores, [(1, 1, 0, 0)] * len(scores), limits, remove, previous)
    for (module, name), score, before, count in zip(places, scores, previous, counts, strict=True):
        keep = make_mask(score, (1, 1, 0, 0), count, previous=before).unpack()
        _prune(op, module, name, keep.view(getattr(module, name).shape))


def remove(module: nn.Module, name: str) -> nn.Module:
    """Makes pruning permanent: the tensor is a Parameter with zeros, the same one as before."""
    if _place("remove", module, name)[1] is None:
        fail("remove", f"{name} must be pruned", "a plain parameter")
    original = module.parametrizations[name].original
    value = getattr(module, name).detach().clone()
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    with torch.no_grad():
        original.copy_(value)
    setattr(module, name, original)
    return module


def is_pruned(module: nn.Module) -> bool:
    """Whether a tensor of the module, or of one inside it, is pruned here."""
    return any(isinstance(inner, Pruned) for inner in module.modules())


def load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
    """Loads a checkpoint of a model that torch.nn.utils.prune or this module has pruned; `state_dict` stays.

    X_orig and X_mask become a parametrization of X, where there is none yet.

    Args:
        model: pruned or not.
        state_dict: its tensors.
        strict: as of nn.Module.load_state_dict, whose result is returned.

    Raises ValueError for a name that the model lacks, or shapes that differ, before anything changes.
    """
    op = "load_state_dict"
    state, found = dict(state_dict), []
    for key in state_dict:
        base = key.removesuffix("_orig")
        if base == key or base + "_mask" not in state_dict:
            continue
        owner, _, name = base.rpartition(".")
        module = dict(model.named_modules()).get(owner)
        if module is None or not isinstance(getattr(module, name, None), torch.Tensor):
            fail(op, "a pruned tensor must be one of the model", repr(base))
        mask = state.pop(base + "_mask")
        if getattr(module, name).shape != mask.shape:
            fail(op, f"{base} must be of shape {tuple(getattr(module, name).shape)}", tuple(mask.shape))
        path = f"{owner}.parametrizations.{name}".removeprefix(".")
        state[f"{path}.original"], state[f"{path}.0.mask"] = state.pop(key), mask
        found.append((module, name))
    for module, name in found:
        if not parametrize.is_parametrized(module, name):
            identity(module, name)
    return model.load_state_dict(state, strict)
