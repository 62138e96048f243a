"""The report: the JSON file, the HTML page and the summary on the screen."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import rarefy

from . import page
from .summary import (
    MODEL_HEADINGS,
    QUALITY_HEADINGS,
    SIZE_HEADINGS,
    SPEED_HEADINGS,
    best_sentence,
    model_rows,
    outside_sentences,
    quality_rows,
    size_rows,
    slower_notes,
    speed_rows,
)


def machine() -> dict:
    """What the figures were measured on."""
    info = rarefy.backend_info((4, 1))
    return {
        "cpu": info.get("cpu", platform.processor()),
        "cpu_features": info.get("cpu_features"),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"rarefy": rarefy.__version__, "python": platform.python_version()} | {
        p: version(p) for p in packages
    }


def write_json(result: dict, path: Path) -> None:
    """Writes the result alone."""
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write(result: dict, details: dict, folder: Path) -> None:
    """Writes report.json (the result alone) and report.html (with details: see page)."""
    write_json(result, folder / "report.json")
    (folder / "report.html").write_text(page.page(result, details), encoding="utf-8")


def show(result: dict, details: dict, console: Console) -> None:
    """Prints the summary; details: at least `spec`."""
    tables = (
        (f"Quality with {details['spec']}", QUALITY_HEADINGS, quality_rows(result, details)),
        ("Speed, from text to embedding: median (quartiles)", SPEED_HEADINGS, speed_rows(result)),
        (
            "Every dtype, the sparse ones with the same weights, at batch 32",
            MODEL_HEADINGS,
            model_rows(result),
        ),
        ("Size", SIZE_HEADINGS, size_rows(result)),
    )
    for title, headings, rows in tables:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(best_sentence(result["best"]))
    for sentence in outside_sentences(result["outside"]):
        console.print(sentence)
    for note in slower_notes(result["speed"]):
        console.print(note, style="yellow")
    console.print(f"Mean cosine of sparse and dense embeddings: {result['quality']['mean_cosine']:.4f}")
    console.print(f"Total time: {result['seconds_total'] / 60:.1f} minutes")
