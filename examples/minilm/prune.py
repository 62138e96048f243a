"""How much of each layer stays, and the pruned layers, one after the other: rarefy.prune on this encoder.

Each group of layers alone is pruned to some sparsities, and what that costs says which gets which under a
budget of weights. Then the encoder is walked from its inputs to its outputs: a layer is fitted to what the
dense model has there, after residual sums to the sum, on what the pruned layers before it give, so that it
also mends what those broke.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rarefy.prune import (
    Mask,
    Moments,
    Plan,
    Sensitivity,
    arrange_hidden,
    eliminations,
    grams,
    reconstruct_layer,
    sensitivity,
)

from .model import embed, pad, token_ids

SPARSITIES = (0.2, 0.35, 0.5, 0.65, 0.8)
# Layers that get one sparsity together.
GROUPS = {
    "query, key, value": r"attention\.self\.(query|key|value)",
    "attention's output": r"attention\.output\.dense",
    "up": r"intermediate\.dense",
    "down": r"output\.dense",
}
FEED_FORWARD_DENSITY = 0.5  # about, while hidden features are put in order


def same_lengths(tokenizer, texts: list[str], most: int = 64) -> Iterator[Tensor]:
    """Batches of token ids (B, T), B ≤ most, of texts of one length each: nothing is padded."""
    by_length: dict[int, list[list[int]]] = {}
    for row in token_ids(tokenizer, texts):
        by_length.setdefault(len(row), []).append(row)
    for length in sorted(by_length):
        rows = by_length[length]
        for start in range(0, len(rows), most):
            yield pad(rows[start : start + most], 0)["input_ids"]


@torch.no_grad()
def arranged(model: nn.Module, batches: list[Tensor], rows: int) -> None:
    """Puts the hidden features of feed-forward networks in an order in which tall blocks fit, in place."""
    found = grams(model, batches, config={r"encoder\.layer\.\d+\.intermediate\.dense": {}})
    for i, layer in enumerate(model.encoder.layer):
        (gram,) = found[f"encoder.layer.{i}.intermediate.dense.weight"]
        arrange_hidden(layer.intermediate.dense, layer.output.dense, gram, rows, FEED_FORWARD_DENSITY)


def groups_of(model: nn.Module, kinds: Mapping[str, str] = GROUPS) -> dict[str, str]:
    """Groups of layers that get one sparsity together: expressions for their layers' names, by name."""
    return {
        f"{kind}, layer {i}": rf"encoder\.layer\.{i}\.{names}"
        for i in range(len(model.encoder.layer))
        for kind, names in kinds.items()
    }


def complete(report: Sensitivity | None, model: nn.Module, kinds: Mapping[str, str] = GROUPS) -> bool:
    """Whether a report has all groups of the model."""
    return report is not None and set(groups_of(model, kinds)) <= set(report.groups())


def measured(
    model: nn.Module,
    tokenizer,
    batches: list[Tensor],
    validation: list[str],
    block: str,
    resume: Sensitivity | None,
    path: Path,
    sparsities: Sequence[float] = SPARSITIES,
    kinds: Mapping[str, str] = GROUPS,
) -> Sensitivity:
    """1 − mean cosine to the dense embeddings, with each group of layers pruned alone.

    batches: for XᵀX. validation: texts. resume: what an earlier run measured. path: where it is kept.
    sparsities: of each group. kinds: which groups, of GROUPS.
    """
    if complete(resume, model, kinds):
        return resume
    groups = groups_of(model, kinds)
    config = {"|".join(groups.values()): {}}
    found = eliminations(model, batches, f"block:{block}", config=config)
    target = embed(model, tokenizer, validation)
    return sensitivity(
        model,
        lambda student: 1 - (embed(student, tokenizer, validation) * target).sum(-1).mean().item(),
        f"block:{block}",
        sparsities,
        by=groups,
        prune=lambda name, weight, sparsity: found[name].prune(sparsity)[0],
        config=config,
        time=False,
        resume=resume,
        path=path,
    )


def allocated(report: Sensitivity, share: float) -> Plan:
    """Sparsities with which `share` of all the groups' weights stay, and the sum of losses is least."""
    dense = sum(points[0].parameters for points in report.groups().values())
    return report.allocate(parameters=share * dense)


@torch.no_grad()
def prune(
    dense: nn.Module,
    student: nn.Module,
    batches: list[Tensor],
    sparsities: Mapping[str, float],
    block: str,
) -> dict[str, Mask]:
    """Reconstructs, in place, the student's linear layers; their masks by name.

    dense, student: the dense encoder and a copy of it (transformers' BertModel). sparsities: by names of
    layers. Those without one, or 0, keep all blocks, and are fitted, too: they mend what the pruned ones
    before them broke.
    """
    masks: dict[str, Mask] = {}
    wanted = [dense.embeddings(ids) for ids in batches]
    given = list(wanted)
    for number, (full, part) in enumerate(zip(dense.encoder.layer, student.encoder.layer, strict=True)):

        def settle(name: str, inputs: list[Tensor], aims: list[Tensor], number=number, part=part) -> None:
            layer, name = part.get_submodule(name), f"encoder.layer.{number}.{name}"
            moments = Moments(layer.in_features, layer.out_features)
            for x, y in zip(inputs, aims, strict=True):
                moments.add(x, y)
            sparsity = sparsities.get(name, 0)
            how = (f"block:{block}", sparsity) if sparsity else ()
            mask = reconstruct_layer(layer, moments, *how)
            masks[name] = Mask.pack(torch.ones_like(layer.weight, dtype=torch.bool)) if mask is None else mask

        for name in ("query", "key", "value"):
            name = f"attention.self.{name}"
            settle(name, given, [full.get_submodule(name)(x) for x in wanted])

        # After a residual sum, the aim is what the dense model has there.
        context = [full.attention.self(x)[0] for x in wanted]
        aims = [
            full.attention.output.dense(c) + x - s for c, x, s in zip(context, wanted, given, strict=True)
        ]
        wanted = [full.attention.output(c, x) for c, x in zip(context, wanted, strict=True)]
        context = [part.attention.self(x)[0] for x in given]
        settle("attention.output.dense", context, aims)
        given = [part.attention.output(c, x) for c, x in zip(context, given, strict=True)]

        settle("intermediate.dense", given, [full.intermediate.dense(x) for x in wanted])

        hidden = [full.intermediate(x) for x in wanted]
        aims = [full.output.dense(h) + x - s for h, x, s in zip(hidden, wanted, given, strict=True)]
        wanted = [full.output(h, x) for h, x in zip(hidden, wanted, strict=True)]
        hidden = [part.intermediate(x) for x in given]
        settle("output.dense", hidden, aims)
        given = [part.output(h, x) for h, x in zip(hidden, given, strict=True)]
    return masks


def patterns_of(masks: Mapping[str, Mask], block: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What rarefy.sparsify wants for exactly these blocks: patterns by names, and scores of 1 and 0."""
    rows, cols = map(int, block.split("x"))
    scores = {
        name: mask.unpack()[::rows, ::cols].float() for name, mask in masks.items()
    }  # blocks stay or leave whole
    return {re.escape(n): f"block:{block}@{s.double().mean().item()!r}" for n, s in scores.items()}, scores
