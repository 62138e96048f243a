"""What a Sparsifier saves, and how it goes on from that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..checks import fail
from .criteria import check_sparsity
from .masks import Mask
from .patterns import matrix_shape

if TYPE_CHECKING:
    from .sparsifier import Sparsifier

_VERSION = 1
_OF_THE_MODEL = ("module", "module_fqn", "tensor_name", "places", "pattern")
_KINDS = {
    "settings": Mapping, "clock": int, "levels": Mapping, "targets": Mapping, "squashed": bool,
    "random": torch.Tensor, "defaults": Mapping, "state": Mapping, "groups": list,
}  # fmt: skip


def check_entries(op: str, saved: Any, kinds: Mapping[str, type], part: str | None = None) -> None:
    """Raises ValueError unless a state_dict, or this part of one, has these entries, each of its kind."""
    what = "state_dict" if part is None else f"{part!r} of state_dict"
    if not isinstance(saved, Mapping):
        fail(op, f"{what} must be a mapping", type(saved).__name__)
    for key, kind in kinds.items():
        entry = saved.get(key)
        if not isinstance(entry, kind) or (isinstance(entry, bool) and kind is not bool):
            got = type(entry).__name__ if key in saved else "none"
            fail(op, f"{what} must have {key!r}, a {kind.__name__}", got)


def check_settings(op: str, ours: Mapping[str, str], theirs: Mapping[str, Any]) -> None:
    """Raises ValueError unless the settings of a state_dict are ours."""
    if theirs != ours:
        names = [*ours, *(key for key in theirs if key not in ours)]
        differ = [name for name in names if name not in ours or theirs.get(name) != ours[name]]
        other = [f"{name}={theirs.get(name)} instead of {ours.get(name)}" for name in differ]
        fail(op, "state_dict must have these settings (strict=False ignores them)", ", ".join(other))


def check_clock(op: str, clock: int) -> None:
    """Raises ValueError unless so many steps can have been taken."""
    if clock < 0:
        fail(op, "'clock' of state_dict must be at least 0", clock)


def check_random(op: str, state: torch.Tensor) -> None:
    """Raises ValueError unless a generator on the CPU takes this state."""
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        requirement = "'random' of state_dict must be the state of a torch.Generator"
        fail(op, requirement, f"{tuple(state.shape)} of {state.dtype}: {str(error).splitlines()[0]}")


def _check_levels(op: str, saved: Mapping[str, Any], names: Iterable[str], part: str) -> None:
    """Raises unless these are sparsities of weights, in [0, 1]."""
    for name, level in saved.items():
        if name not in names:
            fail(op, f"{part!r} of state_dict must be of the same weights", repr(name))
        check_sparsity(op, f"{part!r} of {name} in state_dict", level)


def save(sparsifier: Sparsifier) -> dict[str, Any]:
    """Sparsifier.state_dict."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mask):
            return {"bits": value.bits.clone(), "cols": value.cols, "kept": value.kept}
        return value.clone() if isinstance(value, torch.Tensor) else value

    return {
        "version": _VERSION,
        "settings": sparsifier.settings(),
        "clock": sparsifier.clock,
        "levels": dict(sparsifier._levels),
        "targets": dict(sparsifier._targets),
        "squashed": sparsifier._squashed,
        "observed": sparsifier._observed,
        "random": sparsifier.random.get_state(),
        "defaults": dict(sparsifier.defaults),
        "state": {fqn: {k: plain(v) for k, v in mine.items()} for fqn, mine in sparsifier.state.items()},
        "groups": [
            {**{k: v for k, v in g.items() if k not in _OF_THE_MODEL}, "pattern": str(g["pattern"])}
            for g in sparsifier.groups
        ],
    }


def load(sparsifier: Sparsifier, saved: Mapping[str, Any], strict: bool) -> None:
    """Sparsifier.load_state_dict: checks everything, then takes it over."""
    op = "load_state_dict"
    if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
        got = f"version {saved.get('version')}" if isinstance(saved, Mapping) else type(saved).__name__
        fail(op, f"state_dict must be of a Sparsifier, version {_VERSION}", got)
    check_entries(op, saved, _KINDS)
    for group in saved["groups"]:
        check_entries(op, group, {"tensor_fqn": str}, "groups")
        check_sparsity(op, f"'groups' of state_dict: {group['tensor_fqn']}", group.get("sparsity_level"))
    by_name = {group["tensor_fqn"]: group for group in saved["groups"]}
    names = {group["tensor_fqn"] for group in sparsifier.groups}
    if differ := sorted(names ^ by_name.keys()):
        fail(op, "state_dict must be of the same weights", f"{', '.join(differ[:5])} in one of both only")
    if strict:
        check_settings(op, sparsifier.settings(), saved["settings"])
    check_clock(op, saved["clock"])
    check_random(op, saved["random"])
    _check_levels(op, saved["levels"], names, "levels")
    _check_levels(op, saved["targets"], names, "targets")
    check_sparsity(op, "'defaults' of state_dict: sparsity_level", saved["defaults"].get("sparsity_level"))
    observed = saved.get("observed", False)
    if not isinstance(observed, bool):
        fail(op, "'observed' of state_dict must be a bool", type(observed).__name__)
    state: dict[str, dict[str, Any]] = {}
    for group in sparsifier.groups:
        fqn = group["tensor_fqn"]
        rows, cols = matrix_shape(sparsifier._original(group).shape)
        entry = saved["state"].get(fqn)
        mask = entry.get("mask") if isinstance(entry, Mapping) else None
        if not isinstance(mask, Mapping):
            fail(op, f"state_dict must have a mask of {fqn}", type(mask).__name__)
        check_entries(op, mask, {"bits": torch.Tensor, "cols": int, "kept": int})
        if (tuple(mask["bits"].shape), mask["cols"]) != ((rows, -(-cols // 8)), cols):
            fail(op, f"the mask of {fqn} must be {rows}x{cols}", f"{len(mask['bits'])}x{mask['cols']}")
        if mask["bits"].dtype != torch.uint8:
            fail(op, f"the mask of {fqn} must be uint8", mask["bits"].dtype, TypeError)
        entry = dict(entry) | {"mask": Mask(mask["bits"].clone(), mask["cols"], mask["kept"])}
        if (stay := int(entry["mask"].unpack().count_nonzero())) != mask["kept"]:
            fail(op, f"the mask of {fqn} must keep {stay} weights, as its bits say", mask["kept"])
        state[fqn] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entry.items()}

    if saved["squashed"]:
        sparsifier.squash_mask()
    sparsifier.state.update(state)
    for group in sparsifier.groups:
        group["sparsity_level"] = by_name[group["tensor_fqn"]]["sparsity_level"]
        with torch.no_grad():
            sparsifier._show(group)
    sparsifier.defaults = dict(saved["defaults"])
    sparsifier.clock = saved["clock"]
    sparsifier._levels, sparsifier._targets = dict(saved["levels"]), dict(saved["targets"])
    sparsifier.random.set_state(saved["random"])
    sparsifier._observed = observed
