"""A Sensitivity as CSV, as an HTML page with its curves drawn in SVG, and as a picture."""

from __future__ import annotations

import csv
import html
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import fail
from ..files import replacing

if TYPE_CHECKING:
    from .sensitivity import Point, Sensitivity

_FIELDS = ("group", "layers", "sparsity", "loss", "parameters", "bytes", "milliseconds")
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
_WIDTH, _HEIGHT, _MARGIN = 460, 300, 46


def _cells(point: Point) -> list[str]:
    ms = "" if point.milliseconds is None else repr(point.milliseconds)
    numbers = (repr(point.sparsity), repr(point.loss), str(point.parameters), str(point.bytes), ms)
    return [point.group, " ".join(point.layers), *numbers]


def to_csv(report: Sensitivity) -> str:
    """A line for each point, with a head."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_FIELDS)
    writer.writerows(map(_cells, report.points))
    return out.getvalue()


def _curves(report: Sensitivity, title: str, value: Callable[[Point], float | None]) -> str:
    """An SVG of one curve for each group against sparsity."""
    lines = {
        name: [(p.sparsity, value(p)) for p in points if value(p) is not None]
        for name, points in report.groups().items()
    }
    numbers = [y for line in lines.values() for _, y in line]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    span = high - low or 1.0

    def at(x: float, y: float) -> str:
        across = _MARGIN + x * (_WIDTH - _MARGIN - 10)
        return f"{across:.1f},{_HEIGHT - _MARGIN - (y - low) / span * (_HEIGHT - 2 * _MARGIN):.1f}"

    parts = [f'<text x="{_MARGIN}" y="20">{html.escape(title)}</text>']
    for y, text in ((_HEIGHT - _MARGIN, f"{low:.4g}"), (_MARGIN, f"{high:.4g}")):
        parts.append(f'<text x="2" y="{y}" font-size="11">{text}</text>')
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 12}" font-size="12">sparsity</text>')
    for i, (name, line) in enumerate(lines.items()):
        points, color = " ".join(at(*pair) for pair in line), _COLORS[i % len(_COLORS)]
        label = f"<title>{html.escape(name)}</title>"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}">{label}</polyline>')
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">{"".join(parts)}</svg>'


def to_html(report: Sensitivity) -> str:
    """A page of its own."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(point)) + "</tr>\n"
        for point in report.points
    )
    head = "".join(f"<th>{name}</th>" for name in _FIELDS)
    charts = _curves(report, "loss", lambda p: p.loss) + _curves(
        report, f"predicted ms, {report.tokens} tokens", lambda p: p.milliseconds
    )
    title = f"Sensitivity to {html.escape(report.pattern)}: loss of the dense model {report.loss:.6g}"
    return (
        f'<!doctype html>\n<html><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body><h1>{title}</h1>\n{charts}\n<table>\n<tr>{head}</tr>\n{rows}</table></body></html>\n"
    )


def _picture(report: Sensitivity, path: os.PathLike[str]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("Sensitivity.write", "matplotlib must be installed for a picture", "no matplotlib", ImportError)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, points in report.groups().items():
        x = [p.sparsity for p in points]
        panels[0].plot(x, [p.loss for p in points], marker=".", label=name)
        if all(p.milliseconds is not None for p in points):
            panels[1].plot(x, [p.milliseconds for p in points], marker=".", label=name)
    panels[0].set(xlabel="sparsity", ylabel="loss")
    panels[1].set(xlabel="sparsity", ylabel=f"predicted ms, {report.tokens} tokens")
    if len(report.groups()) <= len(_COLORS):
        panels[0].legend(fontsize="small")
    figure.suptitle(report.pattern)
    figure.savefig(path, format="png", dpi=130)


def write(report: Sensitivity, path: str | os.PathLike[str]) -> None:
    """Sensitivity.write."""
    suffix = Path(path).suffix
    texts = {".csv": report.to_csv, ".json": report.to_json, ".html": report.to_html}
    if suffix not in (*texts, ".png"):
        fail("Sensitivity.write", "path must end in .csv, .json, .html or .png", repr(os.fspath(path)))
    with replacing(path) as temporary:
        if suffix == ".png":
            _picture(report, temporary)
        else:
            temporary.write_text(texts[suffix](), encoding="utf-8")
