"""Speed and size: from text to embedding, dense and sparse in turn in one process, and bytes on disk."""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path

import torch
from torch import nn

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
    dense: nn.Module, sparse: nn.Module, tokenizer, entries: list[Entry], rounds: int = 25, batches=BATCHES
) -> list[dict]:
    """Times tokenizing, encoding and pooling a batch; rows of the report's `speed` key.

    dense and sparse are f32 encoders; copies of them are converted to each dtype. Every round runs each of
    them once, dense first in even rounds, so that a busy moment of the machine hits both alike. Times are
    medians in milliseconds, with quartiles; `tokens` counts what the encoder sees, padding included.
    """
    rows = []
    for dtype_name, dtype in DTYPES.items():
        models = {"dense": copy.deepcopy(dense).to(dtype), "sparse": copy.deepcopy(sparse).to(dtype)}
        for size in batches:
            texts = middle_batch(entries, size)
            times: dict[str, list[float]] = {"dense": [], "sparse": []}
            for turn in range(-2, rounds):
                for name in ("dense", "sparse") if turn % 2 == 0 else ("sparse", "dense"):
                    start = time.perf_counter()
                    embed_batch(models[name], tokenize(tokenizer, texts))
                    if turn >= 0:
                        times[name].append(1e3 * (time.perf_counter() - start))
            rows.append(
                {
                    "batch": size,
                    "tokens": tokenize(tokenizer, texts)["input_ids"].numel(),
                    "dtype": dtype_name,
                }
                | {f"{name}_ms": statistics.median(ms) for name, ms in times.items()}
                | {f"{name}_quartiles_ms": _quartiles(ms) for name, ms in times.items()}
                | {"speedup": statistics.median(times["dense"]) / statistics.median(times["sparse"])}
                | {"rounds": rounds}
            )
    return rows


def _quartiles(ms: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(ms, n=4)
    return [low, high]


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
