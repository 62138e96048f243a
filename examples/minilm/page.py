"""The HTML page of the report: self-contained, with plots as inline SVG."""

from __future__ import annotations

import io

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from rarefy.prune import Plan, Sensitivity
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
    """The whole page of a result and its details (spec, one_shot, training, sensitivity, plan)."""
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
        frontier(result["models"]),
        paragraph(best_sentence(result["best"])),
        *(paragraph(text) for text in outside_sentences(result["outside"])),
        heading("Size"),
        table(SIZE_HEADINGS, size_rows(result)),
        heading("How much of each layer stays"),
        paragraph(
            "Each group of layers pruned alone: 1 − cosine to dense on validation texts. Dots: what was "
            "allocated, so that the sum is least under the budget."
        ),
        sensitivity_curves(details["sensitivity"], details["plan"]),
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


def frontier(models: list[dict]) -> str:
    """Accuracy@10 over milliseconds of every contender; the line joins those that nothing beats in both."""
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    best, line = -1.0, []
    for row in sorted(models, key=lambda row: (row["ms"], -row["acc10"])):
        if row["acc10"] > best:
            best, line = row["acc10"], [*line, row]
    axes.step([r["ms"] for r in line], [r["acc10"] for r in line], where="post", color="#b4bec9", zorder=0)
    for kind, colour in (("dense", "#77808a"), ("sparse", "#1f77b4")):
        mine = [row for row in models if row["name"].startswith(kind)]
        axes.scatter([row["ms"] for row in mine], [row["acc10"] for row in mine], color=colour, label=kind)
        for row in mine:
            axes.annotate(
                row["name"].removeprefix(f"{kind} "),
                (row["ms"], row["acc10"]),
                xytext=(5, 4),
                textcoords="offset points",
            )
    axes.set(xlabel="ms for a batch of 32", ylabel="accuracy@10", title="The frontier")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return svg(figure)


def sensitivity_curves(report: Sensitivity, plan: Plan) -> str:
    """The loss of each group over what stays of it, and what the plan has chosen, as inline SVG."""
    kinds = list(dict.fromkeys(group.partition(", layer")[0] for group in report.groups()))
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        mine = [(g, points) for g, points in report.groups().items() if g.partition(", layer")[0] == kind]
        for i, (group, points) in enumerate(mine):
            colour = f"C{i}"
            losses = {point.sparsity: point.loss - report.loss for point in points}
            axes.plot(
                [1 - s for s in losses], list(losses.values()), color=colour, label=group.rpartition(" ")[2]
            )
            chosen = plan.sparsities[points[0].layers[0].removesuffix(".weight")]
            axes.plot(1 - chosen, losses[chosen], "o", color=colour)
        axes.set(title=kind, xlabel="part that stays")
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("1 − cosine to dense")
    figure.axes[-1].legend(title="layer", fontsize="small")
    return svg(figure)


def training_curve(curve: list[dict]) -> str:
    """1 − mean cosine on the validation texts over training time, as inline SVG."""
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy([p["seconds"] for p in curve], [p["validation"] for p in curve], marker=".")
    axes.set(
        xlabel="seconds of training", ylabel="1 − cosine to dense", title="Distillation, validation texts"
    )
    axes.grid(alpha=0.3, which="both")
    return svg(figure)


def svg(figure: Figure) -> str:
    """A figure as inline SVG."""
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
