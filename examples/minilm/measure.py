"""Speed and size: from text to embedding, dense and sparse in turn in one process, and bytes on disk."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from rarefy.timing import measure_pair, quietest

from .data import Entry
from .model import embed_batch, tokenize

BATCHES = (1, 8, 32, 128)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def middle_batch(entries: list[Entry], size: int) -> list[str]:
    """The middle `size` definitions by length: a typical batch of texts sorted by length, as in `embed`."""
    texts = sorted((entry.definition for entry in entries), key=len)
    start = (len(texts) - size) // 2
    return texts[start : start + size]


@torch.inference_mode()
def encoding_times(
    dense: nn.Module,
    sparse: nn.Module,
    tokenizer,
    entries: list[Entry],
    rounds: range = range(9, 34),
    batches=BATCHES,
) -> list[dict]:
    """Times tokenizing, encoding and pooling a batch; rows of the report's `speed` key.

    dense and sparse are f32 encoders; copies of them are converted to each dtype and take turns, in three
    passes of `rounds` (rarefy.timing). Times are medians in milliseconds, with quartiles; `tokens` counts
    what the encoder sees, padding included. What three tries found noisy has the reason as `noise`, and no
    `speedup`.
    """
    rows = []
    for dtype_name, dtype in DTYPES.items():
        models = [copy.deepcopy(model).to(dtype) for model in (dense, sparse)]
        for size in batches:
            texts = middle_batch(entries, size)
            encode = [lambda m=model, t=texts: embed_batch(m, tokenize(tokenizer, t)) for model in models]
            times = quietest(lambda pair=encode: measure_pair(*pair, rounds=rounds, budget=0.3))
            tokens = tokenize(tokenizer, texts)["input_ids"].numel()
            row = {"batch": size, "tokens": tokens, "dtype": dtype_name}
            for name, timing in (("dense", times.dense), ("sparse", times.sparse)):
                row[f"{name}_ms"] = timing.median
                row[f"{name}_quartiles_ms"] = [timing.lower, timing.upper]
            rows.append(row | {"speedup": times.speedup, "noise": times.noise, "rounds": times.dense.rounds})
    return rows


def linear_bytes(path: Path, names: list[str]) -> int:
    """Bytes of the named linear layers in a safetensors file: weights or values, indices and biases."""
    from safetensors import safe_open

    prefixes = tuple(f"{name}." for name in names)
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(key).nbytes for key in file.keys() if key.startswith(prefixes))  # noqa: SIM118


def sizes(dense: nn.Module, dense_file: Path, sparse_file: Path) -> dict[str, int]:
    """The report's `size` key; the linear layers are those of the dense encoder, embeddings excluded."""
    names = [name for name, module in dense.named_modules() if isinstance(module, nn.Linear)]
    return {
        "linear_dense_bytes": linear_bytes(dense_file, names),
        "linear_sparse_bytes": linear_bytes(sparse_file, names),
        "file_dense_bytes": dense_file.stat().st_size,
        "file_sparse_bytes": sparse_file.stat().st_size,
    }
