"""Quality and time against block shape and density, on the demo's encoder and task.

    python bench/block_shapes.py --out bench/results/pruning/block_shapes.csv
    python bench/block_shapes.py --out … --blocks 32x1 --densities 0.5 --minutes 20
    python bench/block_shapes.py --out … --steps 5000 --device cuda --jobs 16
    python bench/block_shapes.py --out … --measure
    python bench/block_shapes.py --out … --plot docs/block_shapes.svg

Feed-forward layers (with --layers all every linear layer) are reconstructed one after the other as in
examples/minilm; densities are of all of them together, shared out by sensitivities that were measured once,
with one shape. Then they are distilled: for --minutes with Rarefy's layers on the CPU; or for --steps, or for
--minutes on another --device, all rows at once with masked ones (students.py). A row of the CSV for each:
quality on the 1,000 validation entries and on the 1,000 held-out ones, and what the predictor says of those
layers with 512 tokens, in f32 and bf16. --measure times the layers of the rows that have no times, dense and
sparse in turns, as processor time, which a busy machine changes least. Rows that are in the file are not made
again; masks, weights and sensitivities are kept in --kept.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import rarefy
import students
from examples.minilm import data, prune, run
from examples.minilm.distill import write_checkpoint
from examples.minilm.evaluate import embed_entries, mean_cosine, quality
from examples.minilm.model import (
    FFN_LAYERS,
    load_dense,
    load_tokenizer,
    quiet_transformers,
    skeleton,
    token_ids,
)
from more_texts import more_texts
from rarefy.files import replacing
from rarefy.predictor import Case, predictor
from rarefy.prune import Mask, Sensitivity
from students import Recipe

BLOCKS = ("4x1", "16x1", "32x1", "128x1", "16x16", "32x32")
DENSITIES = (0.5, 0.35, 0.25)
TOKENS = 512  # for which layers are timed
SHARED, SPARSITIES = "16x1", (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # how the sensitivities are measured
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
PLOTTED = ("", "relations=0")  # recipes
KEYS = ("block", "density", "layers", "budget", "recipe")
QUALITY = ("acc1", "acc10", "cosine")
FIGURES = (*QUALITY, *(f"held_out_{name}" for name in QUALITY), "steps", "seconds", "on",
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
    """The encoder, its task, and what all rows share; what is found on the way is kept in a folder."""

    def __init__(self, kept: Path) -> None:
        quiet_transformers()
        self.kept, self.base, self.order = kept, {}, None
        self.kept.mkdir(parents=True, exist_ok=True)
        self.split = data.split(data.read_entries(data.find_wordnet()))
        self.dense, self.tokenizer = load_dense(), load_tokenizer()
        self.batches = list(
            prune.same_lengths(self.tokenizer, self.split.train_texts[: run.CALIBRATION_TEXTS])
        )

    def sensitivity(self) -> Sensitivity:
        """Of all groups of layers, measured once, with one shape, and kept in the folder."""
        path = self.kept / f"sensitivity-{SHARED}.json"
        found = Sensitivity.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
        if not prune.complete(found, self.dense):
            texts = data.texts_of(self.split.validation[: run.SENSITIVITY_ENTRIES])
            model, some = self.arranged(SHARED), self.batches[::4]
            found = prune.measured(model, self.tokenizer, some, texts, SHARED, found, path, SPARSITIES)
        return found

    def shares(self, density: float, which: str) -> dict[str, float]:
        """Sparsities of layers under one budget, by that sensitivity: every shape gets the same."""
        found = self.sensitivity()
        names = set(layers_of(self.dense, which))
        found.points = [p for p in found.points if {n.removesuffix(".weight") for n in p.layers} <= names]
        return prune.allocated(found, density).sparsities

    def arranged(self, block: str) -> nn.Module:
        """A copy of the dense encoder whose hidden features stand as the blocks want them."""
        rows = int(block.split("x")[0])
        if self.order is None or self.order[0] != rows:
            self.order = rows, copy.deepcopy(self.dense)
            prune.arranged(self.order[1], self.batches, rows)
        return self.order[1]

    def lessons(self, recipe: Recipe, device: str) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of a recipe, endless."""
        texts = self.split.train_texts
        if recipe.more:
            texts = texts + more_texts(data.find_wordnet(), self.split)
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer))) if recipe.pieces else ()
        continues = torch.tensor([token.startswith("##") for token in tokens])
        return students.batches(
            token_ids(self.tokenizer, texts), recipe.tokens, recipe.seed, device,
            pieces=recipe.pieces, continues=continues,
        )  # fmt: skip

    def kept_at(self, block: str, density: float, which: str) -> Path:
        """The file with one student."""
        return self.kept / f"{which}-{block}-{density:g}.pt"

    def pruned(self, block: str, density: float, which: str) -> tuple[nn.Module, dict[str, Mask]]:
        """A copy of the encoder with these layers reconstructed, and their masks; kept in the folder."""
        path = self.kept_at(block, density, which)
        if not path.is_file():
            model = self.arranged(block)
            student, shares = copy.deepcopy(model), self.shares(density, which)
            masks = prune.prune(model, student, self.batches, shares, block)
            kept = {n: (m.bits, m.cols, m.kept) for n, m in masks.items() if shares.get(n, 0)}
            write_checkpoint({"masks": kept, "weights": student.encoder.state_dict()}, path)
        found = torch.load(path, weights_only=True)
        student = copy.deepcopy(self.dense)
        student.encoder.load_state_dict(found["weights"])
        return student, {name: Mask(*parts) for name, parts in found["masks"].items()}

    def distil(
        self, student: nn.Module, masks: dict[str, Mask], block: str, minutes: float, recipe: Recipe
    ) -> int:
        """Trains Rarefy's layers for so long on the CPU; returns the steps."""
        patterns, scores = prune.patterns_of(masks, block)
        rarefy.sparsify(student, patterns, scores=scores, measure=False)
        return run.recover(student, self.dense, self.tokenizer, self.split, minutes, recipe=recipe).step

    def figures(self, student: nn.Module) -> dict[str, float]:
        """Quality on the entries that choices were made on, and on those that none was."""
        found = {}
        for prefix, entries in (("", self.split.validation), ("held_out_", self.split.held_out)):
            if prefix not in self.base:
                self.base[prefix] = embed_entries(self.dense, self.tokenizer, entries)
            mine = embed_entries(student, self.tokenizer, entries)
            given = quality(mine) | {"cosine": mean_cosine(self.base[prefix], mine)}
            found |= {prefix + name: value for name, value in given.items()}
        return found


def layers_of(model: nn.Module, which: str) -> dict[str, tuple[int, int]]:
    """Shapes of the layers that are pruned, by name."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {
        n: (m.out_features, m.in_features)
        for n, m in linear.items()
        if which == "all" or re.fullmatch(FFN_LAYERS, n)
    }


def plot(rows: dict[tuple[str, ...], dict[str, str]], path: Path) -> None:
    """Cosine against the part of the dense time: a line for each block shape and number of steps.

    Dashed: not trained; stars: rows whose steps are theirs alone. Times are of block and density, whatever
    the training: those of one row serve all.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    mine = [row for row in rows.values() if row["layers"] == "ffn" and row["held_out_cosine"]]
    lines = [row for row in mine if row["recipe"] in PLOTTED]
    counts = Counter(row["steps"] for row in lines)
    budgets = sorted((steps for steps, count in counts.items() if count > 1), key=int)
    parts = {}
    for row in mine:
        for how, dtype in itertools.product(("measured", "predicted"), DTYPES):
            if row[f"{how}_sparse_{dtype}"]:
                part = float(row[f"{how}_sparse_{dtype}"]) / float(row[f"{how}_dense_{dtype}"])
                parts.setdefault((row["block"], row["density"], dtype), part)
    styles = dict(zip(budgets, ("o--", "s-", "^:"), strict=False))
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for (number, block), steps in itertools.product(enumerate(BLOCKS), (*styles, "*")):
            points = [
                (parts[block, row["density"], dtype], float(row["held_out_cosine"]))
                for row in (lines if steps in styles else mine)
                if row["block"] == block and (row["steps"] if row["steps"] in styles else "*") == steps
            ]
            xs, ys = zip(*sorted(points), strict=True) if points else ((), ())
            axes.plot(xs, ys, styles.get(steps, "*"), color=f"C{number}")
        axes.axvline(1, color="#77808a", linewidth=0.8)
        axes.set(xlabel=f"time / dense, {dtype}, 512 tokens", title=f"Feed-forward layers, {dtype}")
        axes.grid(alpha=0.3)
    for number, block in enumerate(BLOCKS):
        panels[0].plot([], [], color=f"C{number}", label=block)
    panels[0].set_ylabel("mean cosine to dense, held out")
    panels[0].legend(title="block")
    figure.savefig(path, metadata={"Date": None})


def shape_of(row: dict[str, str]) -> tuple[str, ...]:
    """What times depend on: block, density and layers."""
    return row["block"], row["density"], row["layers"]


def recipe_of(text: str) -> Recipe:
    """The students' recipe with other values, "lr=1e-3,pooled=4"; ValueError for names that it lacks."""
    given, demo = dict(part.split("=") for part in text.split(",") if part), Recipe()
    if unknown := set(given) - {field.name for field in fields(Recipe)}:
        raise ValueError(f"[recipe] names must be those of Recipe; got {sorted(unknown)}")
    return replace(demo, **{name: type(getattr(demo, name))(value) for name, value in given.items()})


def prepare(kept: Path, of: tuple[str, float, str], threads: int) -> None:
    """In a process of its own: one student, pruned and kept."""
    torch.set_num_threads(threads)
    Bench(kept).pruned(*of)


def together(
    bench: Bench, keys: list[tuple[str, ...]], steps: int, minutes: float, device: str, jobs: int,
    trained: Path | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Students of all these rows, trained at once, for so many steps or else minutes: what each row gets.

    trained: a folder for what they became, as the students that wait in `kept`.
    """
    of = [(block, float(density), which) for block, density, which, _, _ in keys]
    missing = [each for each in dict.fromkeys(of) if not bench.kept_at(*each).is_file()]
    if jobs > 1 and missing:
        bench.sensitivity()  # once, not by every process
        threads = itertools.repeat(max(1, torch.get_num_threads() // jobs))
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(prepare, itertools.repeat(bench.kept), missing, threads))
    models, masks = zip(*(bench.pruned(*each) for each in of), strict=True)
    learning = students.Students(models, masks, device)
    teacher = students.Students([bench.dense], [{}], device)
    recipes = [recipe_of(key[-1]) for key in keys]
    made = bench.lessons(recipes[0], device)
    cuda = device.startswith("cuda")
    start = time.monotonic()
    steps = students.train(learning, teacher, made, steps, recipes, bf16=cuda, seconds=60 * minutes)
    seconds, model = f"{time.monotonic() - start:.0f}", copy.deepcopy(bench.dense).to(device)
    for number in range(len(keys)):
        learning.load_into(model, number)
        if trained is not None:
            kept = {n: (m.bits, m.cols, m.kept) for n, m in masks[number].items()}
            path = trained / "-".join((keys[number][2], *keys[number][:2], keys[number][4])).rstrip("-")
            weights = {n: w.cpu().clone() for n, w in model.encoder.state_dict().items()}
            trained.mkdir(parents=True, exist_ok=True)
            write_checkpoint({"masks": kept, "weights": weights}, path.with_name(path.name + ".pt"))
        about = {
            "steps": str(steps),
            "seconds": seconds,
            "on": torch.cuda.get_device_name() if cuda else "CPU",
        }
        yield about | {name: f"{value:.4f}" for name, value in bench.figures(model).items()}


def main() -> int:  # noqa: D103
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kept", type=Path, default=Path("build/block_shapes"))
    parser.add_argument("--blocks", nargs="+", default=BLOCKS)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--layers", choices=("ffn", "all"), default="ffn")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=0.0)
    budget.add_argument("--steps", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where all rows are trained at once")
    parser.add_argument("--jobs", type=int, default=1, help="students that are pruned at a time for that")
    parser.add_argument("--recipes", nargs="+", default=[""], help="as lr=1e-3,pooled=4")
    parser.add_argument("--trained", type=Path, help="a folder for students that were trained at once")
    parser.add_argument("--measure", action="store_true", help="times of the rows that have none")
    parser.add_argument("--plot", type=Path, help="draw the rows that are there")
    args = parser.parse_args()
    rows = read(args.out)
    if args.plot:
        plot(rows, args.plot)
        return 0
    if args.measure:
        with torch.device("meta"):
            model = skeleton()
        for of, alike in itertools.groupby(sorted(rows.values(), key=shape_of), shape_of):
            alike = list(alike)
            names = [name for name in FIGURES if name.startswith("measured")]
            times = next(({k: r[k] for k in names} for r in alike if r[names[0]]), None)
            if times is None:
                shapes = list(layers_of(model, of[2]).values())
                times = {k: f"{v:.3f}" for k, v in measured(shapes, of[0], float(of[1])).items()}
            for row in alike:
                row |= times
            write(args.out, rows)
        return 0
    label = f"{args.steps} steps" if args.steps else f"{args.minutes:g} minutes"
    keys = [
        (block, f"{density:g}", args.layers, label, recipe)
        for density in args.densities for block in args.blocks for recipe in args.recipes
    ]  # fmt: skip
    keys = [key for key in keys if key not in rows]
    if not keys:
        return 0
    bench = Bench(args.kept)
    layers = list(layers_of(bench.dense, args.layers).values())

    def alone() -> Iterator[dict]:
        for block, density, which, _, text in keys:
            recipe = recipe_of(text)
            if recipe.average or recipe.pieces or recipe.more:
                raise ValueError(
                    f"[recipe] average, pieces and more are for students on a device; got {text}"
                )
            student, masks = bench.pruned(block, float(density), which)
            start = time.monotonic()
            steps = bench.distil(student, masks, block, args.minutes, recipe) if args.minutes else 0
            about = {"steps": str(steps), "seconds": f"{time.monotonic() - start:.0f}", "on": "CPU"}
            yield about | {name: f"{value:.4f}" for name, value in bench.figures(student).items()}

    if args.steps or args.device != "cpu":
        found = together(bench, keys, args.steps, args.minutes, args.device, args.jobs, args.trained)
    else:
        found = alone()
    for key, figures in zip(keys, found, strict=True):
        times = {n: f"{v:.3f}" for n, v in predicted(layers, key[0], float(key[1])).items()}
        rows[key] = dict.fromkeys(FIGURES, "") | dict(zip(KEYS, key, strict=True)) | times | figures
        write(args.out, rows)
        print(
            *key,
            *(figures[name] for name in ("acc10", "cosine", "held_out_acc10", "held_out_cosine")),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
