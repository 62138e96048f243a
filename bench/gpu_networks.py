"""Whole networks with random weights on a GPU, dense against sparse in bf16.

Layers of Llama-3-8B (a prompt, and one token behind it), SAM ViT-h's image encoder, two layers with GELU. Of
each: the time from Python and by replay of a CUDA graph, dense and sparse in turns; where asked for, the same
under torch.compile, and sparse layer by layer (rarefy.fuse off); the kernels' time by kind (linear layers,
attention, the rest), and the bound for the speed-up that follows from the share of linear layers (Amdahl).

python bench/gpu_networks.py                              # all, writes nothing
python bench/gpu_networks.py prefill decode --specs block:64x64@0.25 block:128x1@0.25 --csv FILE
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import rarefy
from rows import write_csv
from timing import graph_of, interleave

Call = Callable[[], object]
DTYPE = torch.bfloat16


class Network(NamedTuple):
    """A model, a call of it or of a copy, and the names of the layers that become sparse."""

    model: nn.Module
    call: Callable[[nn.Module], Call]
    names: str
    captures: bool = True  # as a CUDA graph


def llama(layers: int) -> nn.Module:
    """Layers of Llama-3-8B: 4096 features, 14336 hidden, 32 heads on 8 keys."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=1024, max_position_embeddings=8192, rope_theta=500000.0,
    )  # fmt: skip
    with torch.device(DEVICE):
        return transformers.LlamaModel(config).to(DTYPE).eval()


LLAMA_LINEAR = r"layers\.\d+\.(self_attn|mlp)\..*_proj"


def prefill(tokens: int = 2048, layers: int = 4) -> Network:
    """A prompt, batch 1, without a cache."""
    ids = torch.randint(0, 1024, (1, tokens), device=DEVICE)
    return Network(llama(layers), lambda model: partial(model, ids, use_cache=False), LLAMA_LINEAR)


def decode(context: int = 2048, layers: int = 4) -> Network:
    """One token, batch 1, the last of so many in a static cache, again and again."""
    token = torch.randint(0, 1024, (1, 1), device=DEVICE)
    prompt = torch.randint(0, 1024, (1, context - 1), device=DEVICE)
    at = torch.tensor([[context - 1]], device=DEVICE)

    def call(model: nn.Module) -> Call:
        cache = transformers.StaticCache(model.config, max_cache_len=context)
        model(prompt, past_key_values=cache)

        def step() -> object:
            result = model(token, past_key_values=cache, position_ids=at)
            for layer in cache.layers:
                layer.cumulative_length.sub_(1)  # the next one takes the same place
            return result

        return step

    return Network(llama(layers), call, LLAMA_LINEAR)


def sam(size: int = 1024, layers: int = 32) -> Network:
    """The image encoder of SAM ViT-h, one image: 1280 features, 5120 hidden, windows of 14 × 14."""
    from transformers.models.sam.modeling_sam import SamVisionModel

    config = transformers.SamVisionConfig(
        hidden_size=1280, num_hidden_layers=layers, num_attention_heads=16, mlp_dim=5120, image_size=size,
        initializer_range=0.02,
        global_attn_indexes=[i for i in (7, 15, 23, 31) if i < layers],
    )  # fmt: skip
    with torch.device(DEVICE):
        model = SamVisionModel(config).to(DTYPE).eval()
    image = torch.randn(1, 3, size, size, device=DEVICE, dtype=DTYPE)
    names = r".*layers\.\d+\.(attn\.(qkv|proj)|mlp\.lin[12])"
    return Network(model, lambda m: partial(m, image), names, captures=False)  # it copies indices each time


def mlp(tokens: int = 2048) -> Network:
    """Two layers of Llama-3-8B's size with GELU between."""
    with torch.device(DEVICE):
        model = nn.Sequential(nn.Linear(4096, 14336), nn.GELU(), nn.Linear(14336, 4096)).to(DTYPE).eval()
    x = torch.randn(1, tokens, 4096, device=DEVICE, dtype=DTYPE)
    return Network(model, lambda m: partial(m, x), ".*")


NETWORKS: dict[str, tuple[Callable[[], Network], list[str]]] = {
    "prefill": (prefill, ["block:128x128@0.5", "block:64x64@0.5", "block:64x64@0.25", "block:128x1@0.5",
                          "block:128x1@0.25", "block:128x1@0.1"]),
    "decode": (decode, ["block:64x64@0.5", "block:64x64@0.25", "block:64x64@0.1"]),
    "sam": (sam, ["block:64x64@0.2", "block:64x64@0.16", "block:64x64@0.1", "block:128x1@0.2"]),
    "mlp": (mlp, ["block:128x1@0.5", "block:128x1@0.25", "block:128x1@0.1", "block:64x1@0.25",
                  "block:64x64@0.25"]),
    "mlp_8192": (partial(mlp, 8192), ["block:128x1@0.5", "block:128x1@0.25", "block:128x1@0.1"]),
    "mlp_512": (partial(mlp, 512), ["block:128x1@0.25", "block:64x64@0.25"]),
    "mlp_64": (partial(mlp, 64), ["block:128x1@0.25", "block:64x64@0.25"]),
}  # fmt: skip
DEVICE = "cuda"

# Of kernels' names: what they belong to.
KINDS = {
    "linear": r"rarefy|gemm|nvjet|cutlass.*(?<!fmha)|splitKreduce|wgmma|Kernel2",
    "attention": r"fmha|flash|attention|softmax|bmm",
}


def kinds(call: Call, calls: int = 3) -> dict[str, float]:
    """Microseconds of kernels by kind, of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    spent = dict.fromkeys([*KINDS, "rest"], 0.0)
    for event in profile.key_averages():
        attention = re.search(KINDS["attention"], event.key)
        kind = "attention" if attention else "linear" if re.search(KINDS["linear"], event.key) else "rest"
        spent[kind] += event.self_device_time_total / calls
    return spent


def agree(dense: nn.Module, sparse: nn.Module, network: Network) -> float:
    """The distance of a sparse model's result from that of the dense one with the same zeros, relative."""
    zeroed = copy.deepcopy(dense)
    for name, module in sparse.named_modules():
        if isinstance(module, rarefy.BlockSparseLinear):
            with torch.no_grad():
                zeroed.get_submodule(name).weight.copy_(module.weight.to_dense())
    first = [network.call(model)()[0].float() for model in (zeroed, sparse)]
    return float((first[0] - first[1]).norm() / first[0].norm())


@torch.inference_mode()
def measured(name: str, specs: list[str], compiled: bool, apart: bool) -> list[dict[str, Any]]:
    """A row for each spec."""
    torch.manual_seed(0)
    network = NETWORKS[name][0]()
    rows = []
    for spec in specs:
        sparse = copy.deepcopy(network.model)
        report = rarefy.sparsify(sparse, {network.names: spec}, measure=False)
        layers = sum(row.format is not None for row in report.rows)
        off = agree(network.model, sparse, network)
        if not off < 0.05:
            raise RuntimeError(f"{name} {spec}: the sparse model is {off:.3f} off")
        calls = {"dense": network.call(network.model), "sparse": network.call(sparse)}
        if compiled:
            calls["compiled"] = network.call(torch.compile(network.model))
            calls["sparse, compiled"] = network.call(torch.compile(sparse))
        if apart:
            unfused = copy.deepcopy(sparse)
            rarefy.fuse(unfused, False)
            calls["sparse, apart"] = network.call(unfused)
        times = interleave(calls, "cuda", budget=1.0)
        graphs = times
        if network.captures:
            graphs = interleave({key: graph_of(call) for key, call in calls.items()}, "cuda", budget=1.0)
        spent = {key: kinds(calls[key]) for key in ("dense", "sparse")}
        total = sum(spent["dense"].values())
        row: dict[str, Any] = {
            "network": name,
            "spec": spec,
            "layers": layers,
            "relative_error": f"{off:.1e}",
        }
        for key in calls:
            row[f"{key}_ms"] = round(times[key].median * 1e3, 3)
            row[f"{key}_graph_ms"] = round(graphs[key].median * 1e3, 3) if network.captures else ""
        row["speedup"] = round(times["dense"].median / times["sparse"].median, 3)
        row["graph_speedup"] = (
            round(graphs["dense"].median / graphs["sparse"].median, 3) if network.captures else ""
        )
        for key, by_kind in spent.items():
            row |= {f"{key}_{kind}_us": round(us) for kind, us in by_kind.items()}
        row["linear_speedup"] = round(spent["dense"]["linear"] / spent["sparse"]["linear"], 3)
        row["bound"] = round(total / (total - spent["dense"]["linear"]), 2)
        rows.append(row)
        parts = {key: ", ".join(f"{kind} {us:.0f}" for kind, us in spent[key].items()) for key in spent}
        print(f"{name} {spec}: from Python {row['dense_ms']} -> {row['sparse_ms']} ms, {row['speedup']} x; "
              f"graph {row['dense_graph_ms']} -> {row['sparse_graph_ms']}, {row['graph_speedup']} x; linear "
              f"layers {row['linear_speedup']} x, {spent['dense']['linear'] / total:.0%} of dense (bound "
              f"{row['bound']} x); us of dense: {parts['dense']}; "
              f"of sparse: {parts['sparse']}", flush=True)  # fmt: skip
        if apart:
            print(
                f"  layer by layer {row['sparse, apart_ms']}, graph {row['sparse, apart_graph_ms']} ms",
                flush=True,
            )
        if compiled:
            print(f"  compiled {row['compiled_ms']} -> {row['sparse, compiled_ms']} ms", flush=True)
        del sparse, calls, graphs
    return rows


def main() -> None:
    """Prints a line a case, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--specs", nargs="+", help="instead of each network's own")
    parser.add_argument("--compile", action="store_true", help="dense and sparse under torch.compile, too")
    parser.add_argument("--apart", action="store_true", help="sparse layer by layer, too: rarefy.fuse off")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    common = {"device": torch.cuda.get_device_name(), "date": time.strftime("%F"), "torch": torch.__version__,
              "command": "python " + " ".join(sys.argv)}  # fmt: skip
    rows = []
    for name in args.networks:
        rows += measured(name, args.specs or NETWORKS[name][1], args.compile, args.apart)
    if args.csv:
        write_csv(args.csv, [row | common for row in rows])


if __name__ == "__main__":
    main()
