"""The HTML page of the report: self-contained, with plots as inline SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Callable

from .summary import (
    QUALITY_HEADINGS,
    SIZE_HEADINGS,
    SPEED_HEADINGS,
    missed_goals,
    quality_rows,
    size_rows,
    slower_notes,
    speed_rows,
)

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<title>Rarefy: a sentence encoder made block-sparse</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
.missed { color: #b00020 }
.note { color: #8a5a00 }
svg { max-width: 100%; height: auto }
</style></head>
<body>
"""
DENSE, SPARSE = "#9aa5b1", "#2a6fdb"


def page(result: dict, details: dict) -> str:
    """The whole page of a result and its details (spec, one_shot, training)."""
    training, layers = details["training"], result["layers"]
    notes = [("missed", text) for text in missed_goals(result)]
    notes += [("note", text) for text in slower_notes(result["speed"])]
    parts = [
        "<h1>A sentence encoder made block-sparse</h1>",
        f"<p>all-MiniLM-L6-v2 with {html.escape(details['spec'])} in its feed-forward layers, "
        f"after {training.seconds / 60:.1f} minutes of distillation.</p>",
        *(f'<p class="{kind}">{html.escape(text)}</p>' for kind, text in notes),
        "<h2>Quality</h2>",
        "<p>Reverse dictionary: 1,000 held-out definitions find their headwords by cosine. "
        f"Mean cosine of sparse and dense embeddings: {result['quality']['mean_cosine']:.4f}.</p>",
        table(QUALITY_HEADINGS, quality_rows(result, details)),
        plot(lambda axes: training_curve(axes, training.curve)) if training.curve else "",
        "<h2>Speed</h2>",
        "<p>From text to embedding: tokenizer, encoder, pooling. Dense and sparse take turns in one process; "
        "medians in milliseconds, quartiles in brackets.</p>",
        table(SPEED_HEADINGS, speed_rows(result)),
        plot(lambda axes: speed_bars(axes, result["speed"])),
        "<h2>Size</h2>",
        table(SIZE_HEADINGS, size_rows(result)),
        plot(lambda axes: layer_bytes(axes, layers)) if layers else "",
        "<h2>Layers</h2>",
        table(tuple(layers[0]), [tuple(row.values()) for row in layers]) if layers else "",
        "<h2>Where and with what</h2>",
        table(("", ""), [*result["machine"].items(), *result["versions"].items()]),
        f"<p>The whole job took {result['seconds_total'] / 60:.1f} minutes.</p>",
    ]
    return HEAD + "\n".join(parts) + "\n</body></html>\n"


def table(headings: tuple, rows: list[tuple]) -> str:
    """An HTML table; every cell is escaped."""
    line = "".join(f"<th>{html.escape(str(h))}</th>" for h in headings)
    cells = ("".join(f"<td>{html.escape(str(c))}</td>" for c in row) for row in rows)
    return f"<table><tr>{line}</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def plot(draw: Callable, width: float = 7, height: float = 3.2) -> str:
    """An inline SVG of what `draw` puts on matplotlib axes of the given size in inches."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots())
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def training_curve(axes, curve: list[dict]) -> None:
    """1 − mean cosine on the validation texts over training time."""
    axes.semilogy([p["seconds"] for p in curve], [p["validation"] for p in curve], color=SPARSE, marker=".")
    axes.set(
        xlabel="seconds of training", ylabel="1 − cosine to dense", title="Distillation, validation texts"
    )
    axes.grid(alpha=0.3, which="both")


def speed_bars(axes, rows: list[dict]) -> None:
    """Speed-up by batch size and dtype; the line at 1 is dense."""
    labels = [f"{row['dtype']}\nbatch {row['batch']}" for row in rows]
    bars = axes.bar(
        labels, [row["speedup"] for row in rows], color=[SPARSE if r["speedup"] > 1 else DENSE for r in rows]
    )
    axes.bar_label(bars, fmt="%.2f×")
    axes.axhline(1, color="#222", linewidth=0.8)
    axes.set(ylabel="times as fast as dense", title="End to end, same dtype")
    axes.margins(y=0.15)


def layer_bytes(axes, layers: list[dict]) -> None:
    """Bytes of each layer, dense and sparse."""
    raise NotImplementedError
