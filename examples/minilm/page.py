"""The HTML page of the report: self-contained, with plots as inline SVG."""

from __future__ import annotations

import io

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from rarefy.report_html import bytes_chart, document, heading, paragraph, speed_chart, table

from .summary import (
    MODEL_HEADINGS,
    QUALITY_HEADINGS,
    SIZE_HEADINGS,
    SPEED_HEADINGS,
    best_sentence,
    missed_goals,
    model_rows,
    outside_sentences,
    quality_rows,
    size_rows,
    slower_notes,
    speed_rows,
    speedup_text,
)

LAYER_HEADINGS = ("layer", "density", "dense kB", "sparse kB", "dense ms", "sparse ms", "speed-up")


def page(result: dict, details: dict) -> str:
    """The whole page of a result and its details (spec, one_shot, training)."""
    training = details["training"]
    layers = [row for row in result["layers"] if row["sparse_bytes"] is not None]
    parts = [
        paragraph(
            f"all-MiniLM-L6-v2 with {details['spec']}, after "
            f"{training.seconds / 60:.1f} minutes of distillation."
        ),
        *(paragraph(text, "missed") for text in missed_goals(result)),
        *(paragraph(text, "note") for text in slower_notes(result["speed"])),
        heading("Quality"),
        paragraph(
            "Reverse dictionary: 1,000 held-out definitions find their headwords by cosine. Mean cosine of "
            f"sparse and dense embeddings: {result['quality']['mean_cosine']:.4f}."
        ),
        table(QUALITY_HEADINGS, quality_rows(result, details)),
        training_curve(training.curve),
        heading("Speed"),
        paragraph(
            "From text to embedding: tokenizer, encoder, pooling. Dense and sparse of the same dtype take "
            "turns in one process; medians in milliseconds, quartiles in brackets."
        ),
        table(SPEED_HEADINGS, speed_rows(result)),
        speed_chart(
            (f"{row['dtype']}, batch {row['batch']}", row["speedup"])
            for row in result["speed"]
            if row["speedup"] is not None
        ),
        paragraph(
            "Every dtype at batch 32, the sparse ones with the same weights, each in turns with dense f32:"
        ),
        table(MODEL_HEADINGS, model_rows(result)),
        paragraph(best_sentence(result["best"])),
        *(paragraph(text) for text in outside_sentences(result["outside"])),
        heading("Size"),
        table(SIZE_HEADINGS, size_rows(result)),
        heading("Layers that became sparse"),
        table(LAYER_HEADINGS, [layer_cells(row) for row in layers]),
        bytes_chart(layers),
        heading("Where and with what"),
        table(("", ""), [*result["machine"].items(), *result["versions"].items()]),
    ]
    took = f"The whole job took {result['seconds_total'] / 60:.1f} minutes."
    return document("A sentence encoder made block-sparse", parts, took)


def layer_cells(row: dict) -> tuple[str, ...]:
    """A row of the table of layers, from a row of the result's `layers`."""
    sizes = (f"{row[f'{name}_bytes'] / 1e3:.1f}" for name in ("dense", "sparse"))
    times = (f"{row[f'{name}_ms']:.3f}" for name in ("dense", "sparse"))
    return row["name"], f"{row['density']:.3f}", *sizes, *times, speedup_text(row)


def training_curve(curve: list[dict]) -> str:
    """1 − mean cosine on the validation texts over training time, as inline SVG."""
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy([p["seconds"] for p in curve], [p["validation"] for p in curve], marker=".")
    axes.set(
        xlabel="seconds of training", ylabel="1 − cosine to dense", title="Distillation, validation texts"
    )
    axes.grid(alpha=0.3, which="both")
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
