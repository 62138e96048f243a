"""The HTML page of the report: self-contained, with plots as inline SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

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

DENSE, SPARSE = "#9aa5b1", "#2a6fdb"
LAYER_HEADINGS = ("layer", "density", "dense kB", "sparse kB", "dense ms", "sparse ms", "speed-up")
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


def page(result: dict, details: dict) -> str:
    """The whole page of a result and its details (spec, one_shot, training)."""
    training = details["training"]
    layers = [row for row in result["layers"] if row["sparse_bytes"] is not None]
    parts = [
        "<h1>A sentence encoder made block-sparse</h1>",
        paragraph(
            f"all-MiniLM-L6-v2 with {details['spec']} in its feed-forward layers, after "
            f"{training.seconds / 60:.1f} minutes of distillation."
        ),
        *(paragraph(text, "missed") for text in missed_goals(result)),
        *(paragraph(text, "note") for text in slower_notes(result["speed"])),
        "<h2>Quality</h2>",
        paragraph(
            "Reverse dictionary: 1,000 held-out definitions find their headwords by cosine. Mean cosine of "
            f"sparse and dense embeddings: {result['quality']['mean_cosine']:.4f}."
        ),
        table(QUALITY_HEADINGS, quality_rows(result, details)),
        plot(lambda axes: training_curve(axes, training.curve)),
        "<h2>Speed</h2>",
        paragraph(
            "From text to embedding: tokenizer, encoder, pooling. Dense and sparse take turns in one "
            "process; medians in milliseconds, quartiles in brackets."
        ),
        table(SPEED_HEADINGS, speed_rows(result)),
        plot(lambda axes: speed_bars(axes, result["speed"])),
        "<h2>Size</h2>",
        table(SIZE_HEADINGS, size_rows(result)),
        "<h2>Layers that became sparse</h2>",
        table(LAYER_HEADINGS, [layer_cells(row) for row in layers]),
        plot(lambda axes: layer_bytes(axes, layers)),
        "<h2>Where and with what</h2>",
        table(("", ""), [*result["machine"].items(), *result["versions"].items()]),
        paragraph(f"The whole job took {result['seconds_total'] / 60:.1f} minutes."),
    ]
    return HEAD + "\n".join(parts) + "\n</body></html>\n"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text, which is escaped; kind is its class."""
    return f'<p class="{kind}">{html.escape(text)}</p>'


def table(headings: tuple, rows: list[tuple]) -> str:
    """An HTML table; every cell is escaped."""
    line = "".join(f"<th>{html.escape(str(h))}</th>" for h in headings)
    cells = ("".join(f"<td>{html.escape(str(c))}</td>" for c in row) for row in rows)
    return f"<table><tr>{line}</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def layer_cells(row: dict) -> tuple[str, ...]:
    """A row of the table of layers, from a row of the result's `layers`."""
    sizes = (f"{row[f'{name}_bytes'] / 1e3:.1f}" for name in ("dense", "sparse"))
    times = (f"{row[f'{name}_ms']:.3f}" for name in ("dense", "sparse"))
    return row["name"], f"{row['density']:.3f}", *sizes, *times, f"{row['speedup']:.2f}×"


def plot(draw: Callable[[Axes], None]) -> str:
    """An inline SVG of what `draw` puts on matplotlib axes."""
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    draw(figure.subplots())
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def training_curve(axes: Axes, curve: list[dict]) -> None:
    """1 − mean cosine on the validation texts over training time."""
    axes.semilogy([p["seconds"] for p in curve], [p["validation"] for p in curve], color=SPARSE, marker=".")
    axes.set(
        xlabel="seconds of training", ylabel="1 − cosine to dense", title="Distillation, validation texts"
    )
    axes.grid(alpha=0.3, which="both")


def speed_bars(axes: Axes, rows: list[dict]) -> None:
    """Speed-up by dtype and batch size; the line at 1 is dense."""
    labels = [f"{row['dtype']}\nbatch {row['batch']}" for row in rows]
    speedups = [row["speedup"] for row in rows]
    bars = axes.bar(labels, speedups, color=[SPARSE if s > 1 else DENSE for s in speedups])
    axes.bar_label(bars, fmt="%.2f×")
    axes.axhline(1, color="#222", linewidth=0.8)
    axes.set(ylabel="times as fast as dense", title="End to end, same dtype")
    axes.margins(y=0.15)


def layer_bytes(axes: Axes, layers: list[dict]) -> None:
    """Megabytes of each layer's weight, dense and sparse side by side."""
    for offset, name, color in ((-0.2, "dense", DENSE), (0.2, "sparse", SPARSE)):
        at = [i + offset for i in range(len(layers))]
        axes.bar(at, [row[f"{name}_bytes"] / 1e6 for row in layers], 0.4, label=name, color=color)
    short = [row["name"].removeprefix("encoder.layer.").removesuffix(".dense") for row in layers]
    axes.set_xticks(range(len(layers)), short, rotation=45, ha="right")
    axes.set(ylabel="MB, index included", title="Weights by layer")
    axes.legend()
