"""HTML pages of reports: one file with inline style and SVG, nothing loaded from elsewhere.

The pieces (document, paragraph, table, bar_chart) take plain text and escape it; other reports use them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .report import COLUMNS, Report, cells

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733 }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #dde3ea; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
table.layers :is(th, td):is(:nth-child(-n+3), :last-child) { text-align: left }
tr.stays td { color: #77808a }
tr.slower td { background: #fdf0e7 }
.missed { color: #b00020 } .note { color: #8a5a00 }
svg { max-width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: #1c2733 }
.dense { fill: #b4bec9 } .sparse { fill: #1f77b4 } .slow { fill: #d9722b }
footer { margin-top: 2rem; font-size: 13px; color: #5b6672 }
"""

_LABEL, _PLOT, _BAR = 330, 560, 13  # widths of names and plot, height of a bar, in pixels

Bar = tuple[float, str, str]  # value ≥ 0, class ("dense", "sparse" or "slow"), label


def document(title: str, parts: Iterable[str], footer: str = "") -> str:
    """A whole page; parts are HTML, title and footer are plain text."""
    name, body = escape(title), "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    end = f"<footer>{escape(footer)}</footer>" if footer else ""
    body = f"<h1>{name}</h1>\n{body}\n{end}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def heading(text: str) -> str:
    """A heading of the second level."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; kind is its class: "note", "missed" or none."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(
    columns: Sequence[object], rows: Sequence[Sequence[object]], kinds: Sequence[str] = (), kind: str = ""
) -> str:
    """A table; `kinds` are the classes of its rows, `kind` is its own."""
    head = "".join(f"<th>{escape(str(c))}</th>" for c in columns)
    body = "\n".join(
        f'<tr class="{escape(kinds[i] if kinds else "")}">'
        + "".join(f"<td>{escape(str(c))}</td>" for c in row)
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return f'<div class="scroll"><table class="{escape(kind)}"><tr>{head}</tr>\n{body}</table></div>'


def bar_chart(groups: Sequence[tuple[str, Sequence[Bar]]], rule: tuple[float, str] | None = None) -> str:
    """Horizontal bars as SVG: groups of bars, each with a name; `rule` is a line at a value, with a label."""
    largest = max([value for _, bars in groups for value, _, _ in bars] + [rule[0] if rule else 0])
    scale = _PLOT / largest if largest > 0 else 0
    parts, y = [], 18
    for name, bars in groups:
        short = name if len(name) <= 46 else "…" + name[-45:]
        middle = y + _BAR * len(bars) / 2 + 4
        parts.append(
            f'<text x="{_LABEL - 8}" y="{middle:.1f}" text-anchor="end">{escape(short)}'
            f"<title>{escape(name)}</title></text>"
        )
        for value, style, label in bars:
            end, kind = value * scale, escape(style)
            parts.append(
                f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{end:.1f}" height="{_BAR - 1}"/>'
                f'<text x="{_LABEL + end + 5:.1f}" y="{y + _BAR - 3}">{escape(label)}</text>'
            )
            y += _BAR
        y += 6
    if rule is not None:
        x = _LABEL + rule[0] * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{y}" stroke="#1c2733" stroke-dasharray="3 3"/>'
            f'<text x="{x:.1f}" y="11" text-anchor="middle">{escape(rule[1])}</text>'
        )
    width = _LABEL + _PLOT + 110
    return f'<svg role="img" viewBox="0 0 {width} {y}" width="{width}" height="{y}">{"".join(parts)}</svg>'


def speed_chart(rows: Iterable[tuple[str, float]]) -> str:
    """Speedups by name; the line at 1 is dense, slower ones stand out."""
    groups = [(name, [(s, "sparse" if s >= 1 else "slow", f"{s:.2f}x")]) for name, s in rows]
    return bar_chart(groups, rule=(1.0, "dense"))


def bytes_chart(layers: Iterable[dict[str, Any]]) -> str:
    """Dense and sparse bytes of each layer, rows of Report.to_dict()["layers"] that became sparse."""

    def bar(row: dict[str, Any], kind: str) -> Bar:
        count = row[f"{kind}_bytes"]
        return count, kind, f"{count / 1e3:.1f} kB {kind}"

    return bar_chart([(row["name"], [bar(row, "dense"), bar(row, "sparse")]) for row in layers])


def page(report: Report) -> str:
    """The page of a sparsify report, as text."""
    parts = [paragraph(report.summary())]
    measured = [(row.name, row.speedup) for row in report.replaced if row.speedup is not None]
    if measured:
        parts += [heading(f"Speed against dense, {report.tokens} tokens"), speed_chart(measured)]
    if report.replaced:
        parts.append(heading("Bytes of each weight, indices included"))
        parts.append(bytes_chart(row.to_dict() for row in report.replaced))
    kinds = ["stays" if row.reason else "slower" if row.is_slower else "" for row in report.rows]
    parts += [heading("Layers"), table(COLUMNS, [cells(row) for row in report.rows], kinds, "layers")]
    facts = " · ".join(f"{key}: {value}" for key, value in report.environment.items() if value)
    footer = f"Times are medians of dense and sparse forward calls in turns. {facts}"
    return document("Rarefy report", parts, footer)
