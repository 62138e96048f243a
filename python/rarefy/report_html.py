"""HTML pages of reports: one file with inline style and SVG, nothing loaded from elsewhere.

The pieces (document, paragraph, table, bar_chart) take plain text and escape it; other reports use them too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .report_data import LayerRow, lines

# Scoped, so that a notebook around it stays as it is. At 800 pixels every column of the layers fits: names
# and notes wrap, numbers do not.
_STYLE = """
.rarefy { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff }
body.rarefy { margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
.rarefy h1 { font-size: 1.5rem } .rarefy h2 { font-size: 1.15rem; margin-top: 2rem }
.rarefy .scroll { overflow-x: auto }
.rarefy table { border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums }
.rarefy th, .rarefy td { padding: .25rem .35rem; text-align: right; border-bottom: 1px solid #dde3ea }
.rarefy td { white-space: nowrap; vertical-align: top }
.rarefy :is(th, td):first-child { text-align: left }
.rarefy table.layers :is(th, td):is(:nth-child(-n+3), :last-child) { text-align: left }
.rarefy table.layers td:is(:first-child, :last-child) { white-space: normal; overflow-wrap: anywhere }
.rarefy table.layers td:first-child { min-width: 8rem } .rarefy table.layers td:last-child { min-width: 6rem }
.rarefy tr.stays td, .rarefy tr.noise td { color: #77808a }
.rarefy tr.slower td, .rarefy tr.larger td { background: #fdf0e7 }
.rarefy .missed { color: #b00020 } .rarefy .note { color: #8a5a00 }
.rarefy svg { max-width: 100%; height: auto }
.rarefy svg text { font: 12px system-ui, sans-serif; fill: #1c2733 }
.rarefy .dense { fill: #b4bec9 } .rarefy .sparse { fill: #1f77b4 } .rarefy .slow { fill: #d9722b }
.rarefy footer { margin-top: 2rem; font-size: 13px; color: #5b6672 }
"""

_LABEL, _PLOT, _BAR = 330, 560, 13  # widths of names and plot, height of a bar, in pixels

Bar = tuple[float, str, str]  # value ≥ 0, class ("dense", "sparse" or "slow"), label


def document(title: str, parts: Iterable[str], footer: str = "") -> str:
    """A whole page; parts are HTML, title and footer are plain text."""
    name, body = escape(title), "\n".join(parts)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style>"
    )
    end = f"<footer>{escape(footer)}</footer>" if footer else ""
    body = f'<body class="rarefy"><h1>{name}</h1>\n{body}\n{end}</body>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n{body}</html>\n'


def heading(text: str) -> str:
    """A heading of the second level."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; kind is its class: "note", "missed" or none."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(
    columns: Sequence[object], rows: Sequence[Sequence[object]], kinds: Iterable[str] = (), kind: str = ""
) -> str:
    """A table; `kinds` are the classes of its rows, `kind` is its own."""
    head = "".join(f"<th>{escape(str(c))}</th>" for c in columns)
    body = "\n".join(
        f'<tr class="{escape(style)}">' + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>"
        for row, style in itertools.zip_longest(rows, kinds, fillvalue="")
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
    width = _LABEL + _PLOT + 140
    return f'<svg role="img" viewBox="0 0 {width} {y}" width="{width}" height="{y}">{"".join(parts)}</svg>'


def speed_chart(rows: Iterable[tuple[str, float]]) -> str:
    """Speedups by name; the line at 1 is dense, slower ones stand out."""
    groups = [(name, [(s, "sparse" if s >= 1 else "slow", f"{s:.2f}x")]) for name, s in rows]
    return bar_chart(groups, rule=(1.0, "dense"))


def bytes_chart(layers: Iterable[dict[str, Any]]) -> str:
    """Dense and sparse bytes of each layer, rows of Report.to_dict()["layers"] that became sparse."""

    def bar(row: dict[str, Any], kind: str) -> Bar:
        count = row[f"{kind}_bytes"]
        larger = kind == "sparse" and count > row["dense_bytes"]
        return count, "slow" if larger else kind, f"{count / 1e3:.1f} kB {kind}"

    return bar_chart([(row["name"], [bar(row, "dense"), bar(row, "sparse")]) for row in layers])


def _parts(rows: Sequence[LayerRow], summary: str, tokens: int) -> list[str]:
    parts = [paragraph(summary)]
    if measured := [(row.name, row.speedup) for row in rows if row.speedup is not None]:
        parts += [heading(f"Speed against dense, {tokens} tokens"), speed_chart(measured)]
    if replaced := [row for row in rows if row.reason is None]:
        parts.append(heading("Bytes of each weight, indices included"))
        parts.append(bytes_chart(row.to_dict() for row in replaced))
    head, *body = lines(rows)
    parts += [heading("Layers"), table(head, body, map(_kind, rows), "layers")]
    return parts


def _kind(row: LayerRow) -> str:
    """The classes of a row of the table of layers."""
    found = {"stays": row.reason, "slower": row.is_slower, "noise": row.noise, "larger": row.is_larger}
    return " ".join(name for name, holds in found.items() if holds)


def _footer(environment: Mapping[str, Any]) -> str:
    facts = " · ".join(f"{key}: {value}" for key, value in environment.items() if value)
    return f"Times are medians of dense and sparse forward calls in turns. {facts}"


def page(rows: Sequence[LayerRow], summary: str, tokens: int, environment: Mapping[str, Any]) -> str:
    """The page of a sparsify report, as text: its rows, its summary, and what it was measured on."""
    return document("Rarefy report", _parts(rows, summary, tokens), _footer(environment))


def fragment(rows: Sequence[LayerRow], summary: str, tokens: int, environment: Mapping[str, Any]) -> str:
    """The same as an element for notebooks."""
    body = "\n".join(_parts(rows, summary, tokens))
    footer = f"<footer>{escape(_footer(environment))}</footer>"
    return f'<style>{_STYLE}</style><div class="rarefy">{body}{footer}</div>'
