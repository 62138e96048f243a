"""Quality and time against block shape and density, on the demo's encoder and task.

    python bench/block_shapes.py --out bench/results/pruning/block_shapes.csv
    python bench/block_shapes.py --out … --blocks 32x1 --densities 0.5 --minutes 20
    python bench/block_shapes.py --out … --measure
    python bench/block_shapes.py --out … --plot docs/block_shapes.svg

Feed-forward layers (with --layers all every linear layer) are reconstructed at one density, one after the
other as in examples/minilm, on 1,500 texts; --minutes of distillation follow. A row of the CSV for each:
accuracy@10 and mean cosine to dense on the 1,000 validation entries, and what the predictor says of those
layers with 512 tokens, in f32 and bf16. --measure times the layers of the rows that are there, dense and
sparse in turns, as processor time, which a busy machine changes least. Rows that are in the file are not made
again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rarefy
from examples.minilm import data, prune
from examples.minilm.distill import Distiller
from examples.minilm.evaluate import embed_entries, mean_cosine, quality
from examples.minilm.model import FFN_LAYERS, load_dense, load_tokenizer, quiet_transformers
from examples.minilm.run import fast_bf16
from rarefy.files import replacing
from rarefy.predictor import Case, predictor

BLOCKS = ("4x1", "16x1", "32x1", "128x1", "16x16", "32x32")
DENSITIES = (0.5, 0.25, 0.35)
TEXTS, TOKENS = 1500, 512
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
KEYS = ("block", "density", "layers", "minutes")
FIGURES = ("acc1", "acc10", "cosine", "steps",
           *(f"{how}_{kind}_{dtype}" for how in ("predicted", "measured") for dtype in DTYPES
             for kind in ("dense", "sparse")))  # fmt: skip


def read(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of the CSV by what they are of; none without a file."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        return {tuple(row[key] for key in KEYS): row for row in csv.DictReader(lines)}


def write(path: Path, rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    """The whole file anew, in one step."""
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as lines:
        table = csv.DictWriter(lines, [*KEYS, *FIGURES], lineterminator="\n")
        table.writeheader()
        table.writerows(rows.values())


def predicted(shapes: list[tuple[int, int]], block: str, density: float) -> dict[str, float]:
    """Milliseconds of layers of these shapes, one after the other, dense and sparse, in both dtypes."""
    rows, cols = map(int, block.split("x"))
    found = {}
    for name, dtype in DTYPES.items():
        for kind, shape in (("dense", None), ("sparse", (rows, cols))):
            cases = [
                Case(TOKENS, *s, dtype=dtype, block=shape, density=density if shape else 1.0) for s in shapes
            ]
            found[f"predicted_{kind}_{name}"] = 1e3 * sum(predictor().seconds(case) for case in cases)
    return found


@torch.inference_mode()
def measured(shapes: list[tuple[int, int]], block: str, density: float, rounds: int = 15) -> dict[str, float]:
    """The same as processor time of all threads, in turns, the least of the rounds; random blocks."""
    found = {}
    for name, dtype in DTYPES.items():
        dense = [nn.Linear(k, n) for n, k in shapes]
        sparse = [rarefy.BlockSparseLinear.from_dense(layer, f"block:{block}@{density}") for layer in dense]
        lots = {"dense": dense, "sparse": sparse}
        times: dict[str, list[float]] = {kind: [] for kind in lots}
        inputs = [torch.randn(TOKENS, k).to(dtype) for _, k in shapes]
        for layers in lots.values():
            for layer in layers:
                layer.to(dtype)
        for _ in range(rounds + 2):
            for kind, layers in lots.items():
                begin = time.process_time()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                times[kind].append(time.process_time() - begin)
        for kind, all_of in times.items():
            found[f"measured_{kind}_{name}"] = 1e3 * min(all_of[2:])
    return found


class Bench:
    """The encoder, its task, and what all rows share."""

    def __init__(self) -> None:
        quiet_transformers()
        self.split = data.split(data.read_entries(data.find_wordnet()))
        self.dense, self.tokenizer = load_dense(), load_tokenizer()
        self.base = embed_entries(self.dense, self.tokenizer, self.split.validation)
        self.batches = list(prune.same_lengths(self.tokenizer, self.split.train_texts[:TEXTS]))

    def sparse(self, block: str, density: float, names: list[str]) -> nn.Module:
        """A copy of the encoder with these layers reconstructed at one density."""
        arranged = copy.deepcopy(self.dense)
        if (rows := int(block.split("x")[0])) > 1:
            prune.arranged(arranged, self.batches, rows)
        student = copy.deepcopy(arranged)
        masks = prune.prune(arranged, student, self.batches, dict.fromkeys(names, 1 - density), block)
        patterns, scores = prune.patterns_of(masks, block)
        rarefy.sparsify(student, patterns, scores=scores, measure=False)
        return student

    def distil(self, student: nn.Module, minutes: float) -> int:
        """Trains so long; returns the steps."""
        texts = [t for e in self.split.validation[:250] for t in (e.definition, e.headword)]
        fast = fast_bf16()
        teacher = copy.deepcopy(self.dense).bfloat16() if fast else self.dense
        job = Distiller(student, teacher, self.tokenizer, self.split.train_texts, texts, bf16=fast)
        return job.run(minutes).step

    def figures(self, student: nn.Module) -> dict[str, float]:
        """Quality on the validation entries."""
        found = embed_entries(student, self.tokenizer, self.split.validation)
        return quality(found) | {"cosine": mean_cosine(self.base, found)}


def layers_of(model: nn.Module, which: str) -> dict[str, tuple[int, int]]:
    """Shapes of the layers that are pruned, by name."""
    import re

    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {
        n: (m.out_features, m.in_features)
        for n, m in linear.items()
        if which == "all" or re.fullmatch(FFN_LAYERS, n)
    }


def plot(rows: dict[tuple[str, ...], dict[str, str]], path: Path) -> None:
    """Cosine against the part of the dense time: a line for each block shape, squares with training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for number, block in enumerate(BLOCKS):
            mine = [row for row in rows.values() if row["block"] == block and row["layers"] == "ffn"]
            for trained in (False, True):
                points = []
                for row in mine:
                    if (float(row["minutes"]) > 0) != trained:
                        continue
                    how = "measured" if row[f"measured_sparse_{dtype}"] else "predicted"
                    part = float(row[f"{how}_sparse_{dtype}"]) / float(row[f"{how}_dense_{dtype}"])
                    points.append((part, float(row["cosine"])))
                if points:
                    style = "s" if trained else "o-"
                    axes.plot(*zip(*sorted(points), strict=True), style, color=f"C{number}",
                              label=None if trained else block)  # fmt: skip
        axes.axvline(1, color="#77808a", linewidth=0.8)
        axes.set(xlabel=f"time / dense, {dtype}, 512 tokens", title=f"Feed-forward layers, {dtype}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean cosine to dense")
    panels[0].legend(title="block")
    figure.savefig(path, metadata={"Date": None})


def todo(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Blocks and densities, the highest density of each block first."""
    return ((block, density) for density in args.densities for block in args.blocks)


def main() -> int:  # noqa: D103
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", nargs="+", default=BLOCKS)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--layers", choices=("ffn", "all"), default="ffn")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--measure", action="store_true", help="times of the rows that are there")
    parser.add_argument("--plot", type=Path, help="draw the rows that are there")
    args = parser.parse_args()
    rows = read(args.out)
    if args.plot:
        plot(rows, args.plot)
        return 0
    bench = Bench()
    if args.measure:
        for row in rows.values():
            shapes = list(layers_of(bench.dense, row["layers"]).values())
            row |= {k: f"{v:.3f}" for k, v in measured(shapes, row["block"], float(row["density"])).items()}
            write(args.out, rows)
        return 0
    layers = layers_of(bench.dense, args.layers)
    for block, density in todo(args):
        key = (block, f"{density:g}", args.layers, f"{args.minutes:g}")
        if key in rows:
            continue
        student = bench.sparse(block, density, list(layers))
        steps = bench.distil(student, args.minutes) if args.minutes else 0
        found = bench.figures(student) | predicted(list(layers.values()), block, density)
        row = dict.fromkeys(FIGURES, "") | dict(zip(KEYS, key, strict=True)) | {"steps": str(steps)}
        rows[key] = row | {name: f"{value:.4f}" for name, value in found.items()}
        write(args.out, rows)
        print(*key, {k: round(found[k], 4) for k in ("acc10", "cosine")}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
