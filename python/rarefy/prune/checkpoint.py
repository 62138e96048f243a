"""What a Sparsifier saves, and how it goes on from that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..checks import fail
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


def check_entries(op: str, saved: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raises ValueError unless a state_dict has these entries, each of its kind."""
    for key, kind in kinds.items():
        if not isinstance(saved.get(key), kind):
            got = type(saved[key]).__name__ if key in saved else "none"
            fail(op, f"state_dict must have {key!r}, a {kind.__name__}", got)


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
    by_name = {g.get("tensor_fqn"): g for g in saved["groups"]}
    if differ := sorted({g["tensor_fqn"] for g in sparsifier.groups} ^ by_name.keys()):
        fail(op, "state_dict must be of the same weights", f"{', '.join(differ[:5])} in one of both only")
    ours = sparsifier.settings()
    if strict and saved["settings"] != ours:
        other = [f"{k}={v} instead of {ours[k]}" for k, v in saved["settings"].items() if v != ours[k]]
        fail(op, "state_dict must have these settings (strict=False ignores them)", ", ".join(other))
    state: dict[str, dict[str, Any]] = {}
    for group in sparsifier.groups:
        fqn = group["tensor_fqn"]
        rows, cols = matrix_shape(sparsifier._original(group).shape)
        entry = dict(saved["state"].get(fqn, {}))
        mask = entry.get("mask")
        if not isinstance(mask, Mapping):
            fail(op, f"state_dict must have a mask of {fqn}", type(mask).__name__)
        check_entries(op, mask, {"bits": torch.Tensor, "cols": int, "kept": int})
        if (tuple(mask["bits"].shape), mask["cols"]) != ((rows, -(-cols // 8)), cols):
            fail(op, f"the mask of {fqn} must be {rows}x{cols}", f"{len(mask['bits'])}x{mask['cols']}")
        if mask["bits"].dtype != torch.uint8:
            fail(op, f"the mask of {fqn} must be uint8", mask["bits"].dtype, TypeError)
        entry["mask"] = Mask(mask["bits"].clone(), mask["cols"], mask["kept"])
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
    sparsifier._observed = saved.get("observed", False)
