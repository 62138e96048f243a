"""Quality: how often a definition finds its headword, and how far the embeddings moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .data import Entry
from .model import embed


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the definitions and headwords of n entries, each (n, H), unit length."""

    definitions: Tensor
    headwords: Tensor


def embed_entries(model: nn.Module, tokenizer, entries: list[Entry]) -> Embedded:
    """Embeds definitions and headwords of the entries, in their order."""
    return Embedded(
        embed(model, tokenizer, [entry.definition for entry in entries]),
        embed(model, tokenizer, [entry.headword for entry in entries]),
    )


def accuracy(embedded: Embedded, k: int) -> float:
    """Share of definitions whose own headword is among the k of largest cosine.

    Rank counts the headwords strictly more similar, and, among equals, those listed before: no lucky ties.
    """
    cosine = embedded.definitions @ embedded.headwords.T
    n = len(cosine)
    own = cosine.diagonal().unsqueeze(1)
    before = torch.arange(n).unsqueeze(0) < torch.arange(n).unsqueeze(1)
    rank = ((cosine > own) | ((cosine == own) & before)).sum(1)
    return (rank < k).double().mean().item()


def mean_cosine(a: Embedded, b: Embedded) -> float:
    """Mean over all 2n texts of the cosine between their embeddings in a and in b."""
    pairs = ((a.definitions, b.definitions), (a.headwords, b.headwords))
    return torch.cat([nn.functional.cosine_similarity(x, y, dim=-1) for x, y in pairs]).double().mean().item()


def quality(embedded: Embedded) -> dict[str, float]:
    """Accuracy at 1 and at 10, under the report's keys."""
    return {"acc1": accuracy(embedded, 1), "acc10": accuracy(embedded, 10)}
