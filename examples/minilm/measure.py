"""Speed and size: from text to embedding, dense and sparse in turn in one process, and bytes on disk."""

from __future__ import annotations

import copy
import re
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import rarefy
from rarefy.timing import measure_pair, quietest

from .data import Entry
from .model import embed_batch, tokenize

BATCHES = (1, 8, 32, 128)
CONTEST_BATCH = 32
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
MAX_ACC10_LOSS = 0.01  # against dense f32


def middle_batch(entries: list[Entry], size: int) -> list[str]:
    """The middle `size` definitions by length: a typical batch of texts sorted by length, as in `embed`."""
    texts = sorted((entry.definition for entry in entries), key=len)
    start = (len(texts) - size) // 2
    return texts[start : start + size]


def contenders(dense: nn.Module, sparse: nn.Module) -> dict[str, nn.Module]:
    """Both f32 encoders in every dtype that they run in, by name: "dense f32", "sparse bf16" and so on."""
    models = {}
    for kind, model in (("dense", dense), ("sparse", sparse)):
        for name, dtype in DTYPES.items():
            models[f"{kind} {name}"] = copy.deepcopy(model).to(dtype)
    quantized = {
        "dense int8": _dynamic_int8(dense),
        "dense int8 onednn": _dynamic_int8(dense, "onednn"),
        "sparse int8": _converted(sparse, "int8"),
        "sparse bf16 layers": _converted(sparse, "bf16x"),
    }
    return models | {name: model for name, model in quantized.items() if model is not None}


def _dynamic_int8(dense: nn.Module, engine: str | None = None) -> nn.Module | None:
    """Torch's own int8, weights s8 and inputs u8 by their range; None where torch has it no longer.

    engine: another one than torch's own choice. onednn multiplies on AMX's tiles, three times as fast.
    """
    quantized = torch.backends.quantized
    before = quantized.engine
    if engine is not None and (engine == before or engine not in quantized.supported_engines):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantized.engine = engine or before
            return torch.ao.quantization.quantize_dynamic(copy.deepcopy(dense), {nn.Linear}, torch.qint8)
    except (AttributeError, RuntimeError):
        return None
    finally:
        quantized.engine = before


def _converted(sparse: nn.Module, dtype: str) -> nn.Module | None:
    """The same blocks in a f32 encoder; None where there are none.

    dtype: "int8", with inputs rounded token by token, or "bf16x", bf16 with inputs rounded to it.
    """
    patterns = {}
    for name, layer in sparse.named_modules():
        if isinstance(layer, rarefy.BlockSparseLinear):
            rows, cols = layer.weight.block_shape
            patterns[re.escape(name)] = f"block:{rows}x{cols}@{layer.weight.density!r}:{dtype}"
    if not patterns:
        return None
    converted = copy.deepcopy(sparse)
    rarefy.sparsify(converted, patterns, measure=False)
    return converted


def _encoder(model: nn.Module, tokenizer, texts: list[str]) -> Callable[[], torch.Tensor]:
    return lambda: embed_batch(model, tokenize(tokenizer, texts))


@torch.inference_mode()
def encoding_times(
    models: dict[str, nn.Module],
    tokenizer,
    entries: list[Entry],
    rounds: range = range(9, 34),
    batches=BATCHES,
) -> list[dict]:
    """Times tokenizing, encoding and pooling a batch; rows of the report's `speed` key.

    models: the contenders. Dense and sparse of one dtype take turns, in three passes of `rounds`
    (rarefy.timing). Times are medians in milliseconds, with quartiles; `tokens` counts what the encoder sees,
    padding included. What three tries found noisy has the reason as `noise`, and no `speedup`.
    """
    rows = []
    for dtype in DTYPES:
        for size in batches:
            texts = middle_batch(entries, size)
            pair = [_encoder(models[f"{kind} {dtype}"], tokenizer, texts) for kind in ("dense", "sparse")]
            times = quietest(partial(measure_pair, *pair, rounds=rounds, budget=0.3))
            tokens = tokenize(tokenizer, texts)["input_ids"].numel()
            row = {"batch": size, "tokens": tokens, "dtype": dtype}
            for name, timing in (("dense", times.dense), ("sparse", times.sparse)):
                row[f"{name}_ms"] = timing.median
                row[f"{name}_quartiles_ms"] = [timing.lower, timing.upper]
            rows.append(row | {"speedup": times.speedup, "noise": times.noise, "rounds": times.dense.rounds})
    return rows


@torch.inference_mode()
def contest(
    models: dict[str, nn.Module],
    quality: dict[str, dict],
    tokenizer,
    entries: list[Entry],
    rounds: range = range(9, 34),
    batch: int = CONTEST_BATCH,
) -> tuple[list[dict], dict]:
    """Every contender against dense f32, and the best sparse one against the best dense one.

    quality: acc1, acc10 and mean_cosine by name. Returns the report's `models`: rows with `name`, quality,
    `good` (accuracy@10 within 0.01 of dense f32), `ms` and `speedup` over dense f32, measured in turns; and
    `best`: names and times of the fastest good ones, in turns, `speedup`, and `over_dense_f32`.
    """
    texts = middle_batch(entries, batch)
    encode = {name: _encoder(model, tokenizer, texts) for name, model in models.items()}

    def turns(first: str, second: str):
        return quietest(partial(measure_pair, encode[first], encode[second], rounds=rounds, budget=0.3))

    rows = []
    for name in models:
        good = quality[name]["acc10"] >= quality["dense f32"]["acc10"] - MAX_ACC10_LOSS - 1e-9
        times = turns("dense f32", name)
        speedup = 1.0 if name == "dense f32" else times.speedup
        row = {"name": name, **quality[name], "good": good, "ms": times.sparse.median}
        rows.append(row | {"speedup": speedup, "noise": times.noise})

    def fastest(kind: str) -> dict:
        mine = [row for row in rows if row["name"].startswith(kind)]
        return max(mine, key=lambda row: (row["good"], row["speedup"] or 0.0))

    dense, sparse = fastest("dense"), fastest("sparse")
    times = turns(dense["name"], sparse["name"])
    best = {"dense": dense["name"], "sparse": sparse["name"], "good": sparse["good"]}
    best |= {"dense_ms": times.dense.median, "sparse_ms": times.sparse.median}
    return rows, best | {
        "speedup": times.speedup,
        "noise": times.noise,
        "over_dense_f32": sparse["speedup"],
    }


@torch.inference_mode()
def outside(
    models: dict[str, nn.Module], names: list[str], tokenizer, entries: list[Entry], rounds: int = 11
) -> dict[str, dict[str, float]]:
    """What no kernel for these layers can make faster: shares of the dense time, by dtype, at batch 32.

    `share` of the time is not spent in the named layers, `bound` = 1 / share is what the whole encoder would
    gain if they took no time.
    """
    texts, found = middle_batch(entries, CONTEST_BATCH), {}
    for dtype in DTYPES:
        model = models[f"dense {dtype}"]
        encode, spent, hooks = _encoder(model, tokenizer, texts), [0.0], []
        for name in names:
            layer = model.get_submodule(name)
            hooks.append(
                layer.register_forward_pre_hook(lambda *_, s=spent: s.append(s.pop() - time.perf_counter()))
            )
            hooks.append(
                layer.register_forward_hook(lambda *_, s=spent: s.append(s.pop() + time.perf_counter()))
            )
        shares = []
        for _ in range(rounds):
            spent[0], begin = 0.0, time.perf_counter()
            encode()
            shares.append(1 - spent[0] / (time.perf_counter() - begin))
        for hook in hooks:
            hook.remove()
        share = statistics.median(shares)
        found[dtype] = {"share": share, "bound": 1 / share}
    return found


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
