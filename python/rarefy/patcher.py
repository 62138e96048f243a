"""BlockSparseModelPatcher: patterns of names, and the layers that they make sparse, in place."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .auto import Auto
from .changes import Change, change_of
from .checks import check_int, fail
from .fusing import fuse as fuse_networks
from .fusing import networks
from .layers import SPARSE, Layer, find_layers
from .log import logger, progress
from .report import Report, environment
from .report_data import LayerRow
from .spec import Spec
from .timing import time_layers

FilterFn = Callable[[str, nn.Module], bool]


def _near(name: str, names: Iterable[str]) -> str:
    """The names most like this one, for an error message."""
    names = list(names)
    close = difflib.get_close_matches(name.replace("\\", ""), names, n=5, cutoff=0.3) or names[:5]
    return ", ".join(close) or "none"


class BlockSparseModelPatcher:
    r"""Replaces the layers whose qualified names match a pattern by block-sparse ones, values kept.

    patcher = BlockSparseModelPatcher()
    patcher.add_pattern(r"encoder\.layer\.\d+\.output\.dense", "block:16x16@0.5")
    report = patcher.patch_model(model)

    Patterns must match the whole name. Where two match a layer, the one that was added first counts.
    """

    def __init__(self) -> None:
        self.patterns: list[tuple[re.Pattern[str], Spec | Auto]] = []

    @classmethod
    def of(cls, op: str, patterns: Any) -> BlockSparseModelPatcher:
        """The patcher of what rarefy.sparsify takes: patterns and their specs, or a spec for all layers.

        Raises as add_pattern does; TypeError for another kind of object.
        """
        if isinstance(patterns, str | Spec):
            patterns = {".*": patterns}
        if not isinstance(patterns, Mapping):
            fail(op, "patterns must be a mapping of regular expressions", type(patterns).__name__, TypeError)
        patcher = cls()
        for pattern, spec in patterns.items():
            patcher.add_pattern(pattern, spec)
        return patcher

    def add_pattern(self, pattern: str | re.Pattern[str], spec: Any) -> None:
        """Adds a regular expression and what its layers become.

        Args:
            pattern: matched against the whole qualified name of a layer.
            spec: "block:16x16@0.5", "csr@0.1", {"block_shape": (16, 16), "density": 0.5} or a Spec; or
                "auto@0.5", "auto@nonzero" or "auto", which choose blocks, or leave a layer dense, by
                predicted time; with ":bf16x" and others behind it for values stored so, with ":any" for
                the dtype that is fastest.

        Raises:
            ValueError: an expression or a spec that cannot be read.
            TypeError: another kind of object.
        """
        op = "add_pattern"
        if not isinstance(pattern, str | re.Pattern):
            fail(op, "pattern must be a str", type(pattern).__name__, TypeError)
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            fail(op, "pattern must be a regular expression", f"{pattern!r}: {error}")
        self.patterns.append((compiled, Auto.parse(spec, op) or Spec.parse(spec, op)))

    def get_patchable_layers(self, model: nn.Module) -> list[Layer]:
        """The layers of `model` that can become block-sparse, whatever the patterns."""
        return [layer for layer in find_layers(model, rewritten=True) if layer.reason is None]

    def patch_model(
        self,
        model: nn.Module,
        *,
        scores: Mapping[str, torch.Tensor] | None = None,
        filter_fn: FilterFn | None = None,
        dry_run: bool = False,
        measure: bool = True,
        tokens: int = 512,
        optimizer: Optimizer | None = None,
        fuse: bool = True,
    ) -> Report:
        """Replaces the matching layers in place and reports on every layer; see rarefy.sparsify."""
        op = "patch_model"
        check_int(op, "tokens", tokens, 1)
        layers = find_layers(model, rewritten=True)
        specs = self.assign(op, layers)
        scores = {} if scores is None else scores
        if not isinstance(scores, Mapping):
            fail(op, "scores must be a mapping of layer names to tensors", type(scores).__name__, TypeError)
        names = [name for layer in layers if layer.name in specs for name in layer.names]
        for name in scores:
            if name not in names:
                got = f"{name!r}; near names: {_near(str(name), names)}"
                fail(op, "scores must be for layers that a pattern matches", got)

        rows: list[LayerRow] = []
        changes: list[Change] = []
        measured: list[tuple[LayerRow, nn.Module, nn.Module]] = []
        for layer in progress(layers, "sparsifying"):
            spec = specs.get(layer.name)
            row = LayerRow(layer.name, layer.names[1:], layer.shape, matched=spec is not None)
            rows.append(row)
            row.reason = why_stays(layer, spec, filter_fn)
            if row.reason is not None:
                continue
            if isinstance(spec, Auto):
                spec, row.predicted = spec.chosen(layer.as_product(), tokens, layer.why_not)
                if isinstance(spec, str):
                    row.reason = spec
                    continue
            given = next((scores[name] for name in layer.names if name in scores), None)
            change = change_of(op, layer, spec, given, optimizer)
            if isinstance(change, str):
                row.reason = change
                continue
            changes.append(change)
            row.format, row.density = spec.format + spec.suffix, change.sparse.density
            dense = change.dense.weight
            row.dense_bytes = dense.numel() * dense.element_size()
            row.sparse_bytes = change.sparse.weight.nbytes
            row.on_images = isinstance(change.dense, nn.Conv2d)
            measured.append((row, change.dense, change.sparse))
        self._warn_of_idle_patterns(layers, {row.name: row.reason for row in rows})
        if measure:
            time_layers(measured, tokens)
        # Nothing has changed so far; from here on nothing can fail.
        fused = []
        if not dry_run:
            for change in changes:
                change.apply()
            fused = networks(model) if fuse_networks(model, fuse) else []
        for row in rows:
            if row.matched:
                what = f"stays: {row.reason}" if row.reason else f"{row.format} at density {row.density:.4g}"
                logger.info("sparsify%s: %s %s", " (dry run)" if dry_run else "", row.name, what)
        return Report(rows, tokens=tokens, dry_run=dry_run, networks=fused, environment=environment())

    def _warn_of_idle_patterns(self, layers: list[Layer], reasons: Mapping[str, str | None]) -> None:
        """Says so where all layers of a pattern stay because of what they are."""
        for pattern, _ in self.patterns:
            matched = [layer for layer in layers if any(map(pattern.fullmatch, layer.names))]
            if all(layer.reason and not isinstance(layer.module, SPARSE) for layer in matched):
                first = matched[0].name
                text = f"pattern {pattern.pattern!r} matches only layers that stay: {first}: {reasons[first]}"
                warnings.warn(f"[patch_model] {text}", stacklevel=4)

    def assign(self, op: str, layers: list[Layer]) -> dict[str, Spec | Auto]:
        """The spec of each matched layer; every pattern must have at least one layer of its own."""
        if not self.patterns:
            fail(op, "there must be at least one pattern", "none")
        specs: dict[str, Spec | Auto] = {}
        for pattern, spec in self.patterns:
            matched = [layer for layer in layers if any(map(pattern.fullmatch, layer.names))]
            if not matched:
                near = _near(pattern.pattern, [name for layer in layers for name in layer.names])
                got = f"{pattern.pattern!r}, which matches none; near names: {near}"
                fail(op, "a pattern must match the whole name of a layer", got)
            own = [layer for layer in matched if layer.name not in specs]
            if not own:
                taken = _near(pattern.pattern, [layer.name for layer in matched])
                got = f"{pattern.pattern!r}, which only matches {taken}"
                fail(op, "a pattern must match a layer that no earlier pattern took", got)
            specs |= {layer.name: spec for layer in own}
        return specs


def why_stays(
    layer: Layer, spec: Spec | Auto | None, filter_fn: FilterFn | None, *, meta: bool = False
) -> str | None:
    """Why a layer stays as it is, or None; with `meta`, its values may be still to come."""
    if spec is None:
        return "no pattern matches"
    sparse = isinstance(layer.module, SPARSE)  # it can become sparser
    if layer.reason is not None and not sparse:
        return layer.reason
    if layer.module.weight.device.type == "meta" and not meta:
        return "its weight is on the meta device and holds no values"
    if (reason := layer.why_not(spec)) is not None:
        return reason
    if filter_fn is not None and not filter_fn(layer.name, layer.module):
        return "filter_fn declined it"
    return None
