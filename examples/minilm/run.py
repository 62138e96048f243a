"""Make a trained sentence encoder block-sparse, recover its quality, save, load, measure and report.

Exit code 0: it ran (sentences say which goals were missed, if any); 1, with --check only: a goal missed; 2:
something is not installed or an option is wrong; 130: Ctrl-C outside the training (inside it, the best state
goes on).
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import rarefy
from rarefy.prune import Sensitivity

from . import data, measure, prune, report
from .distill import Distiller, Progress, Recipe, write_checkpoint
from .evaluate import embed_entries, mean_cosine, quality
from .model import load_dense, load_tokenizer, quiet_transformers, skeleton
from .summary import missed_goals

WIDTH = 384  # of the encoder; its feed-forward layers are four times as wide
CALIBRATION_TEXTS = 3000
SENSITIVITY_ENTRIES = 100  # their definitions and headwords say what a layer's blocks are worth
LEAST_SHARE = 0.25
VALIDATION_ENTRIES = 250  # their definitions and headwords choose the best state


def options(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; block becomes a pair of integers."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.minilm.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="training time (default: %(default)s)")
    parser.add_argument(
        "--share",
        type=float,
        default=0.5,
        help="of the linear layers' weights, all together, that stays (default: %(default)s)",
    )
    parser.add_argument("--block", default="32x1", help="rows x columns of a block (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--fresh", action="store_true", help="start anew, even where an earlier run can go on"
    )
    parser.add_argument(
        "--measure", action="store_true", help="only measure the sparse encoder that an earlier run saved"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a goal is missed: for maintainers"
    )
    args = parser.parse_args(argv)
    rows, _, cols = args.block.partition("x")
    if not (rows.isdigit() and cols.isdigit() and int(rows) and int(cols)):
        parser.error(f"--block must look like 32x1; got {args.block}")
    if WIDTH % int(rows) or WIDTH % int(cols):
        parser.error(f"--block must divide {WIDTH} both ways; got {args.block}")
    if not LEAST_SHARE <= args.share <= 1:
        parser.error(f"--share must be at least {LEAST_SHARE} and at most 1; got {args.share}")
    if args.minutes < 0:
        parser.error(f"--minutes must not be negative; got {args.minutes}")
    return args


def sparsified(dense: nn.Module, tokenizer, split: data.Split, args: argparse.Namespace):
    """A sparse copy of the dense encoder, reconstructed layer by layer, and how that came about.

    Sensitivities and reconstructed weights are kept in the output folder: a rerun must train the same blocks.

    Returns the copy, sparsify's report, the Sensitivity, the Plan, and a key of what was done.
    """
    kept_at, measured_at = args.out / "pruned.pt", args.out / "sensitivity.json"
    key = f"block:{args.block}, {args.share:g} of the weights"
    report = kept = None
    if measured_at.is_file() and not args.fresh:
        report = Sensitivity.from_json(measured_at.read_text(encoding="utf-8"))
        report = report if report.pattern == f"block:{args.block}" else None
    if kept_at.is_file() and not args.fresh:
        kept = torch.load(kept_at, weights_only=True)
        kept = kept if kept["key"] == key else None
    if kept is None or not prune.complete(report, dense):
        batches = list(prune.same_lengths(tokenizer, split.train_texts[:CALIBRATION_TEXTS]))
        arranged = copy.deepcopy(dense)
        prune.arranged(arranged, batches, int(args.block.partition("x")[0]))
        texts = data.texts_of(split.validation[:SENSITIVITY_ENTRIES])
        report = prune.measured(arranged, tokenizer, batches[::4], texts, args.block, report, measured_at)
    plan = prune.allocated(report, args.share)
    student = copy.deepcopy(dense)
    if kept is None:
        (args.out / "training.pt").unlink(missing_ok=True)
        student = copy.deepcopy(arranged)
        masks = prune.prune(arranged, student, batches, plan.sparsities, args.block)
        patterns, scores = prune.patterns_of(masks, args.block)
        kept = {"key": key, "patterns": patterns, "scores": scores, "weights": student.encoder.state_dict()}
        write_checkpoint(kept, kept_at)
    student.encoder.load_state_dict(kept["weights"])
    return student, rarefy.sparsify(student, kept["patterns"], scores=kept["scores"]), report, plan, key


def fast_bf16() -> bool:
    """Whether this processor multiplies bf16 faster than f32."""
    return bool({"amx_bf16", "avx512_bf16_fast"} & set(rarefy.backend_info().get("cpu_features", ())))


def recover(
    student: nn.Module, dense: nn.Module, tokenizer, split: data.Split, minutes: float,
    checkpoint: Path | None = None, key: str = "", recipe: Recipe | None = None,
) -> Progress:  # fmt: skip
    """Distils the student in place for so many minutes, counting those of an earlier run; see Distiller."""
    fast = fast_bf16()
    teacher = copy.deepcopy(dense).bfloat16() if fast else dense
    chosen = data.texts_of(split.validation[:VALIDATION_ENTRIES])
    distiller = Distiller(
        student,
        teacher,
        tokenizer,
        split.train_texts,
        chosen,
        recipe=recipe,
        checkpoint=checkpoint,
        key=key,
        bf16=fast,
    )
    return distiller.run(minutes)


def measured(dense: nn.Module, sparse: nn.Module, tokenizer, split: data.Split, names: list[str]) -> dict:
    """The report's `quality`, `speed`, `models`, `best` and `outside`; names: the layers that are sparse."""
    models = measure.contenders(dense, sparse)
    embedded = {name: embed_entries(model, tokenizer, split.held_out) for name, model in models.items()}
    found = {
        name: quality(e) | {"mean_cosine": mean_cosine(embedded["dense f32"], e)}
        for name, e in embedded.items()
    }
    rows, best = measure.contest(models, found, tokenizer, split.held_out)
    return {
        "quality": {
            "dense": quality(embedded["dense f32"]),
            "sparse": quality(embedded["sparse f32"]),
            "mean_cosine": found["sparse f32"]["mean_cosine"],
        },
        "speed": measure.encoding_times(models, tokenizer, split.held_out),
        "models": rows,
        "best": best,
        "outside": measure.outside(models, names, tokenizer, split.held_out),
    }


def measured_files(dense: nn.Module, tokenizer, split: data.Split, folder: Path, start: float) -> dict:
    """The report, without `layers`, of the sparse encoder that the folder holds."""
    files = {kind: folder / f"{kind}.safetensors" for kind in ("dense", "sparse")}
    rarefy.save_file(dense, files["dense"])
    sparse = skeleton()
    rarefy.load_file(sparse, files["sparse"])
    names = [n for n, module in sparse.named_modules() if isinstance(module, rarefy.BlockSparseLinear)]
    return {
        **measured(dense, sparse, tokenizer, split, names),
        "size": measure.sizes(dense, files["dense"], files["sparse"]),
        "machine": report.machine(),
        "versions": report.versions(),
        "seconds_total": time.monotonic() - start,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the whole job; returns the exit code."""
    args, start = options(argv), time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 100)
    quiet_transformers()
    saved = args.out / "sparse.safetensors"
    try:
        entries = data.read_entries(data.find_wordnet())
        dense, tokenizer = load_dense(), load_tokenizer()
        if args.measure and not saved.is_file():
            raise FileNotFoundError(f"[demo] --measure wants {saved} of a run without it; got no such file")
    except (FileNotFoundError, ModuleNotFoundError) as error:
        console.print(f"Cannot start: {error}", style="bold red")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    split = data.split(entries)
    console.print(f"WordNet: {len(entries)} definitions, {len(split.held_out)} of them held out.")
    if args.measure:
        console.print("Measuring …")
        result = measured_files(dense, tokenizer, split, args.out, start)
        report.write_json(result, args.out / "measured.json")
        report.show(result, {"spec": f"the encoder in {saved}"}, console)
        return concluded(result, args.check, console)

    console.print("Measuring how much each layer matters, and reconstructing layers …")
    student, layers, sensitivity, plan, key = sparsified(dense, tokenizer, split, args)
    one_shot = quality(embed_entries(student, tokenizer, split.held_out))
    console.print(f"Distilling for {args.minutes:g} minutes (Ctrl-C keeps the best so far) …")
    progress = recover(student, dense, tokenizer, split, args.minutes, args.out / "training.pt", key)
    rarefy.save_file(student, saved)

    console.print("Measuring …")
    result = measured_files(dense, tokenizer, split, args.out, start)
    result["layers"] = layers.to_dict()["layers"]
    details = {
        "spec": key,
        "one_shot": one_shot,
        "training": progress,
        "sensitivity": sensitivity,
        "plan": plan,
    }
    report.write(result, details, args.out)
    report.show(result, details, console)
    console.print(f"Reports: {args.out / 'report.html'} and {args.out / 'report.json'}")
    return concluded(result, args.check, console)


def concluded(result: dict, check: bool, console: Console) -> int:
    """Says which goals were missed; returns the exit code."""
    missed = missed_goals(result)
    for sentence in missed:
        console.print(sentence, style="bold red")
    if not missed:
        console.print("Every goal reached: speed, accuracy@10 and size.", style="bold green")
    return exit_code(missed, check)


def exit_code(missed: list[str], check: bool) -> int:
    """Whether the demo ran; whether it reached its goals counts with --check alone."""
    return 1 if check and missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
