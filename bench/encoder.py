"""An encoder of MiniLM's sizes with random weights: dense against sparse, each in its dtypes, end to end.

What `make demo` times, for machines that lack its model: the same layers and batches, nothing of its quality.

python bench/encoder.py                                    # 6 layers of 384, batches of 32 × 17 tokens
python bench/encoder.py --width 768 --layers 12 --threads 2 --csv out.csv
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import rarefy
from dynamic_int8 import by_engine
from rarefy.timing import Times, measure_pair, quietest
from rows import write_csv


class Layer(nn.Module):
    """A post-norm transformer layer, as BERT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.output(attended))
        return self.norms[1](x + self.down(functional.gelu(self.up(x))))


def variants(dense: nn.Module, args: argparse.Namespace) -> dict[str, tuple[nn.Module, torch.dtype]]:
    """The models that are compared, by name, with the dtype of their inputs."""
    models = {
        "dense f32": (dense, torch.float32),
        "dense bf16": (copy.deepcopy(dense).bfloat16(), torch.bfloat16),
    }
    try:
        for at, (engine, quantized) in enumerate(by_engine(dense).items()):
            models["dense int8" if at == 0 else f"dense int8 {engine}"] = (quantized, torch.float32)
    except (AttributeError, RuntimeError) as error:
        print(f"dense int8: not measured ({error})", file=sys.stderr)
    names = r"\d+\.(up|down)" if args.only == "ffn" else r"\d+\.(up|down|query|key|value|output)"
    sparse = copy.deepcopy(dense)
    rarefy.sparsify(sparse, {names: args.spec})
    models["sparse f32"] = (sparse, torch.float32)
    models["sparse bf16"] = (copy.deepcopy(sparse).bfloat16(), torch.bfloat16)
    eight = copy.deepcopy(dense)
    rarefy.sparsify(eight, {names: args.spec + ":int8"})
    models["sparse int8"] = (eight, torch.float32)
    mixed = copy.deepcopy(dense).bfloat16()
    rarefy.sparsify(mixed, {names: args.spec + ":int8"})
    models["sparse int8 in bf16"] = (mixed, torch.bfloat16)
    return models


def measured(models: dict[str, tuple[nn.Module, torch.dtype]], x: torch.Tensor) -> dict[str, Times]:
    """Each model's times, in turns with dense f32."""

    @torch.inference_mode()
    def call(name: str, x: torch.Tensor) -> torch.Tensor:
        return models[name][0](x)

    calls = {name: partial(call, name, x.to(dtype)) for name, (_, dtype) in models.items()}
    first = calls["dense f32"]
    return {name: quietest(partial(measure_pair, first, c, budget=0.5)) for name, c in calls.items()}


def main() -> None:
    """Prints a table, and writes it where --csv says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=17, help="of a text")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--spec", default="block:32x1@0.5")
    parser.add_argument(
        "--only", choices=("ffn", "all"), default="ffn", help="which linear layers are sparse"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dense = nn.Sequential(*(Layer(args.width, args.heads) for _ in range(args.layers))).eval()
    models, rows = variants(dense, args), []
    cpu = rarefy.backend_info()["cpu"]
    print(f"{cpu}, {args.threads} threads, {args.spec} in {args.only}")
    for batch in args.batches:
        found = measured(models, torch.randn(batch, args.tokens, args.width))
        rows += [
            {
                "cpu": cpu,
                "threads": args.threads,
                "date": time.strftime("%F"),
                "torch": torch.__version__,
                "spec": args.spec,
                "sparse": args.only,
                "width": args.width,
                "layers": args.layers,
                "batch": batch,
                "tokens": batch * args.tokens,
                "model": name,
                "ms": round(pair.sparse.median, 3),
                "quartiles_ms": f"{pair.sparse.lower:.3f}–{pair.sparse.upper:.3f}",
                "speedup_over_dense_f32": round(pair.dense.median / pair.sparse.median, 3),
                "noise": pair.noise or "",
                "command": "python " + " ".join(sys.argv),
            }
            for name, pair in found.items()
        ]
        speed = {name: pair.dense.median / pair.sparse.median for name, pair in found.items()}
        best = [max(v for n, v in speed.items() if n.startswith(kind)) for kind in ("dense", "sparse")]
        line = ", ".join(f"{name} {x:.2f}" for name, x in speed.items())
        f32, bf16 = (speed[f"sparse {t}"] / speed[f"dense {t}"] for t in ("f32", "bf16"))
        print(f"batch {batch}, × dense f32: {line}; sparse/dense: f32 {f32:.2f}, bf16 {bf16:.2f}, "
              f"best {best[1] / best[0]:.2f}", flush=True)  # fmt: skip
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
