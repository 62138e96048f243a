"""The HTML page of a report: one file with inline style and SVG, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from .report import COLUMNS, LayerRow, Report, cells

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733 }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #dde3ea; white-space: nowrap }
th:nth-child(-n+3), td:nth-child(-n+3), th:last-child, td:last-child { text-align: left }
tr.stays td { color: #77808a }
tr.slower td { background: #fdf0e7 }
svg text { font: 12px system-ui, sans-serif; fill: #1c2733 }
.dense { fill: #b4bec9 } .sparse { fill: #1f77b4 } .slow { fill: #d9722b }
footer { margin-top: 2rem; font-size: 13px; color: #5b6672 }
"""

_LABEL, _PLOT, _BAR = 330, 560, 13  # widths of names and plot, height of a bar, in pixels


def _chart(
    rows: list[LayerRow], bars: Callable[[LayerRow], list[tuple[float, str, str]]], rule: float | None = None
) -> str:
    """Horizontal bars, a group a layer; each bar is (value, class, label). `rule` is a line at a value."""
    groups = [(row, bars(row)) for row in rows]
    largest = max([value for _, group in groups for value, _, _ in group] + [rule or 0])
    scale = _PLOT / largest if largest > 0 else 0
    parts, y = [], 18
    for row, group in groups:
        name = row.name if len(row.name) <= 46 else "…" + row.name[-45:]
        middle = y + _BAR * len(group) / 2 + 4
        parts.append(
            f'<text x="{_LABEL - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}'
            f"<title>{escape(row.name)}</title></text>"
        )
        for value, style, label in group:
            width = value * scale
            parts.append(
                f'<rect class="{style}" x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR - 1}"/>'
                f'<text x="{_LABEL + width + 5:.1f}" y="{y + _BAR - 3}">{escape(label)}</text>'
            )
            y += _BAR
        y += 6
    if rule is not None:
        x = _LABEL + rule * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{y}" stroke="#1c2733" stroke-dasharray="3 3"/>'
            f'<text x="{x:.1f}" y="11" text-anchor="middle">dense</text>'
        )
    width = _LABEL + _PLOT + 110
    return f'<svg role="img" viewBox="0 0 {width} {y}" width="{width}" height="{y}">{"".join(parts)}</svg>'


def _speed_bars(row: LayerRow) -> list[tuple[float, str, str]]:
    return [(row.speedup, "sparse" if row.speedup >= 1 else "slow", f"{row.speedup:.2f}x")]


def _byte_bars(row: LayerRow) -> list[tuple[float, str, str]]:
    return [
        (row.dense_bytes, "dense", f"{row.dense_bytes / 1e3:.1f} kB dense"),
        (row.sparse_bytes, "sparse", f"{row.sparse_bytes / 1e3:.1f} kB sparse"),
    ]


def _html_table(report: Report) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in COLUMNS)
    body = []
    for row in report.rows:
        style = ' class="stays"' if row.reason else ' class="slower"' if row.is_slower else ""
        body.append(f"<tr{style}>" + "".join(f"<td>{escape(c)}</td>" for c in cells(row)) + "</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def page(report: Report) -> str:
    """The page as text."""
    measured = [row for row in report.replaced if row.speedup is not None]
    plots = ""
    if measured:
        plots += f"<h2>Speed against dense, {report.tokens} tokens</h2>" + _chart(
            measured, _speed_bars, rule=1.0
        )
    if report.replaced:
        plots += "<h2>Bytes of each weight, indices included</h2>" + _chart(report.replaced, _byte_bars)
    facts = " · ".join(f"{escape(str(k))}: {escape(str(v))}" for k, v in report.environment.items() if v)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Rarefy report</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>Rarefy report</h1>\n<p>{escape(report.summary())}</p>\n"
        f"{plots}\n<h2>Layers</h2>\n{_html_table(report)}\n"
        f"<footer>Times are medians of interleaved dense and sparse forward calls. {facts}</footer>"
        "</body></html>\n"
    )
