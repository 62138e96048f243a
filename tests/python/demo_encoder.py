"""What the tests of examples/minilm share: a tokenizer, a tiny encoder and texts for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("transformers")

from examples.minilm import data


def entries(n: int) -> list[data.Entry]:
    # Every headword twice, and every definition three times over the list.
    return [data.Entry(f"word{i // 2}", f"definition {i // 3} of some thing") for i in range(n)]


class Words:
    """A tokenizer as the demo uses one: a word's id is its length."""

    pad_token_id = 0

    def __call__(self, texts: list[str], truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1 + len(word) % 29 for word in text.split()][:max_length] for text in texts]}


TEXTS = [" ".join("x" * (1 + (i * j) % 13) for j in range(1, 3 + i % 7)) for i in range(120)]


def encoder(seed: int) -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return BertModel(config, add_pooling_layer=False).eval()


def split_of() -> data.Split:
    entries = [data.Entry(text, " ".join(reversed(text.split()))) for text in TEXTS[:40]]
    return data.Split(entries, entries, TEXTS)
