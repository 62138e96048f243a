"""Whole networks with random weights, dense against sparse on the CPU in f32: the cases that TVM published.

BERT-base with 16×1 blocks in its encoder, MobileNetV2 with 4×1 blocks in its 1×1 convolutions, ResNet-18 with
8×1 blocks in its 3×3. Of each: the share of the dense time in the layers that become sparse, the bound that
follows from it (Amdahl), and the speed-up of the network and of those layers alone. Dense convolutions run in
whichever memory format is faster.

python bench/networks.py                                # all, on torch's threads
python bench/networks.py bert --threads 1 --csv out.csv
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers
from torch import nn

import rarefy
from rarefy.timing import measure_pair, quietest
from rows import write_csv


def bert(batch: int) -> tuple[nn.Module, torch.Tensor, str]:
    """BERT-base, 128 tokens a text."""
    model = transformers.BertModel(transformers.BertConfig()).eval()
    return model, torch.randint(0, 30000, (batch, 128)), r"encoder\.layer\.\d+\..*(query|key|value|dense)"


def mobilenet(batch: int) -> tuple[nn.Module, torch.Tensor, str]:
    """MobileNetV2, 224 × 224; its convolutions by channel stay dense."""
    model = torchvision.models.mobilenet_v2().eval()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    return model, torch.randn(batch, 3, 224, 224), "|".join(name.replace(".", r"\.") for name in names)


def resnet(batch: int) -> tuple[nn.Module, torch.Tensor, str]:
    """ResNet-18, 224 × 224."""
    return torchvision.models.resnet18().eval(), torch.randn(batch, 3, 224, 224), r"layer\d\.\d\.conv\d"


NETWORKS: dict[str, tuple[Callable[[int], tuple[nn.Module, torch.Tensor, str]], list[str]]] = {
    "bert": (bert, ["block:16x1@0.15", "block:16x1@0.1", "block:16x1@0.05"]),
    "mobilenet": (mobilenet, ["block:4x1@0.6", "block:4x1@0.1"]),
    "resnet": (resnet, ["block:8x1@0.3"]),
}


def share(model: nn.Module, layers: list[str], call: Callable[[], Any], rounds: int = 5) -> float:
    """The share of a model's time that these layers take, the median of some rounds."""
    started, spent, handles = [0.0], [0.0], []

    def start(*_: Any) -> None:
        started[0] = time.perf_counter()

    def stop(*_: Any) -> None:
        spent[0] += time.perf_counter() - started[0]

    for module in map(model.get_submodule, layers):
        handles += [module.register_forward_pre_hook(start), module.register_forward_hook(stop)]
    parts = []
    for _ in range(rounds):
        spent[0], begin = 0.0, time.perf_counter()
        call()
        parts.append(spent[0] / (time.perf_counter() - begin))
    for handle in handles:
        handle.remove()
    return sorted(parts)[rounds // 2]


@torch.inference_mode()
def measured(name: str, spec: str, batch: int) -> dict[str, Any]:
    """One row: a network at a density."""
    torch.manual_seed(0)
    dense, x, names = NETWORKS[name][0](batch)
    sparse = copy.deepcopy(dense)
    report = rarefy.sparsify(sparse, {names: spec}, measure=False)
    layers = [row.name for row in report.rows if row.format is not None]
    last = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    calls = [partial(dense, x)]
    if x.ndim == 4:
        sparse = sparse.to(memory_format=torch.channels_last)
        other = copy.deepcopy(dense).to(memory_format=torch.channels_last)
        calls.append(partial(other, last))
    found = [quietest(partial(measure_pair, call, partial(sparse, last), budget=1.0)) for call in calls]
    best = min(range(len(calls)), key=lambda i: found[i].dense.median)
    times, part = found[best], share(calls[best].func, layers, calls[best])
    sparse_part = share(sparse, layers, partial(sparse, last))
    return {
        "cpu": rarefy.backend_info()["cpu"], "threads": torch.get_num_threads(), "date": time.strftime("%F"),
        "torch": torch.__version__, "network": name, "batch": batch, "spec": spec, "layers": len(layers),
        "dense": ["as it comes", "channels_last"][best], "dense_ms": round(times.dense.median, 3),
        "sparse_ms": round(times.sparse.median, 3),
        "speedup": round(times.dense.median / times.sparse.median, 3),
        "layers_speedup": round(part * times.dense.median / (sparse_part * times.sparse.median), 2),
        "share_of_layers": round(part, 3), "bound": round(1 / max(1e-9, 1 - part), 2),
        "noise": times.noise or "", "command": "python " + " ".join(sys.argv),
    }  # fmt: skip


def main() -> None:
    """Prints a line a case, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.networks:
        for spec in NETWORKS[name][1]:
            for batch in args.batches:
                row = measured(name, spec, batch)
                rows.append(row)
                print(f"{name} {spec} batch {batch}: {row['dense_ms']} -> {row['sparse_ms']} ms, "
                      f"{row['speedup']:.2f} x; the layers {row['layers_speedup']:.2f} x, "
                      f"{row['share_of_layers']:.0%} of dense, bound {row['bound']:.1f} x {row['noise']}",
                      flush=True)  # fmt: skip
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
