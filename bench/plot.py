"""Plots and Markdown tables from a results file of bench/run.py.

``python bench/plot.py bench/results/MACHINE/DATE-COMMIT.csv`` writes PNGs into docs/performance/;
with ``--markdown`` it prints the tables of docs/performance.md instead.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, str]
RIVALS = ("dense_torch", "dense_onednn", "torch_bsr", "scipy_bsr")
MOST_LOSSES = 20  # rows of the table of losses; the rest is counted


def read(path: Path) -> list[Row]:
    """All rows, in the order of the file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def product(row: Row) -> str:
    """M×N×K, as in the tables."""
    return f"{row['M']}×{row['N']}×{row['K']}"


def percent(text: str) -> str:
    """A share as a percentage; a dash for an empty column."""
    return f"{float(text):.0%}" if text else "–"


def distinct(rows: Iterable[Row], key: Callable[[Row], str]) -> list[str]:
    """Different values of a key, in order of appearance."""
    return list(dict.fromkeys(map(key, rows)))


def table(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(rows: list[Row]) -> str:
    """The sentence without which no figure may stand."""
    r = rows[0]
    peaks = {}
    for row in rows:
        if row["peak_gflops"]:
            peaks.setdefault(row["threads"], []).append(float(row["peak_gflops"]))
    parts = [
        f"{r['machine']}, {r['cores']} {'SMs' if r['device'] == 'cuda' else 'cores'}; {r['date']}",
        f"commit {r['commit']}; rarefy {r['rarefy']}, torch {r['torch']} ({r['blas']}), scipy {r['scipy']}",
    ]
    parts += [
        f"FMA peak on {threads} thread{'s' if threads != '1' else ''}: {statistics.median(found):.0f} GFLOP/s"
        f" (median of {len(found)} samples, {min(found):.0f}–{max(found):.0f})"
        for threads, found in sorted(peaks.items())
    ]
    return "; ".join(parts) + f"; {len(rows)} rows."


def grid_table(rows: list[Row]) -> str:
    """Block shapes down, densities across: speedup over dense, and share of the FMA peak."""
    densities = sorted(distinct(rows, lambda r: r["density"]), key=float)
    cells = {(r["block"], r["density"]): r for r in rows}
    body = []
    for block in distinct(rows, lambda r: r["block"]):
        line = [block]
        for density in densities:
            r = cells.get((block, density))
            share = f" ({percent(r['peak_share'])})" if r and r["peak_share"] else ""
            line.append(f"{float(r['speedup']):.2f}{share}" if r else "–")
        body.append(line)
    return table(["block", *(f"density {d}" for d in densities)], body)


def grids(rows: list[Row]) -> str:
    """One grid_table for each product, dtype, size and number of threads."""

    def key(r: Row) -> str:
        threads = (
            f", {r['threads']} thread{'s' if r['threads'] != '1' else ''}" if r["device"] == "cpu" else ""
        )
        return (
            f"{r['op']} {r['dtype']} {product(r)}{threads}{', ' + r['mode'] if r['device'] == 'cuda' else ''}"
        )

    text = []
    for title in distinct(rows, key):
        group = [r for r in rows if key(r) == title]
        dense = distinct(group, lambda r: r["dense_by"])
        fastest = min(float(r["dense_ms"]) for r in group)
        slowest = max(float(r["dense_ms"]) for r in group)
        share = [float(r["dense_peak_share"]) for r in group if r["dense_peak_share"]]
        note = f"dense ({' or '.join(dense)}): {fastest:.3g}–{slowest:.3g} ms"
        if share:
            note += f", {statistics.median(share):.0%} of the FMA peak"
        text.append(f"**{title}**; {note}\n\n{grid_table(group)}")
    return "\n\n".join(text)


def rivals_table(rows: list[Row]) -> str:
    """Milliseconds of every contestant, where another sparse library took part."""
    chosen = [r for r in rows if r["torch_bsr_ms"] or r["scipy_bsr_ms"]]
    body = [
        [
            f"{product(r)} {r['block']} {r['density']}, {r['dtype']}, {r['threads']} thr.",
            f"{float(r['rarefy_ms']):.3g} ({float(r['rarefy_min_ms']):.3g}–{float(r['rarefy_max_ms']):.3g})",
            *(f"{float(r[f'{name}_ms']):.3g}" if r[f"{name}_ms"] else "–" for name in RIVALS),
        ]
        for r in chosen
    ]
    head = ["M×N×K, block, density", "rarefy, ms (spread)", "F.linear", "oneDNN", "torch BSR", "scipy BSR"]
    return table(head, body)


def losses(rows: list[Row]) -> str:
    """Where the better dense kernel is as fast or faster, worst first."""
    lost = sorted((r for r in rows if float(r["speedup"]) <= 1), key=lambda r: float(r["speedup"]))
    text = f"Dense is at least as fast in {len(lost)} of {len(rows)} rows"
    if not lost:
        return text + "."
    body = [
        [f"`{r['case']}`", f"{float(r['speedup']):.2f}", r["rarefy_ms"], r["dense_ms"]]
        for r in lost[:MOST_LOSSES]
    ]
    shown = f"; the worst {MOST_LOSSES}" if len(lost) > MOST_LOSSES else ""
    return f"{text}{shown}:\n\n{table(['case', 'speedup', 'rarefy, ms', 'dense, ms'], body)}"


def markdown(rows: list[Row]) -> str:
    """Everything that docs/performance.md shows."""
    parts = [where(rows)]
    titles = {"linear": "Forward", "grad_input": "Input gradient", "grad_weight": "Weight gradient"}
    for op, title in titles.items():
        group = [r for r in rows if r["op"] == op]
        if group:
            parts += [f"### {title}", grids(group)]
    if any(r["torch_bsr_ms"] or r["scipy_bsr_ms"] for r in rows):
        parts += ["### Other sparse libraries", rivals_table(rows)]
    parts += ["### Where Rarefy loses", losses(rows)]
    return "\n\n".join(parts)


def plots(rows: list[Row], folder: Path) -> list[Path]:
    """Efficiency by block shape for each product and dtype; returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    colours = {d: f"C{i}" for i, d in enumerate(sorted(distinct(rows, lambda r: r["density"]), key=float))}
    for op, dtype in itertools.product(
        distinct(rows, lambda r: r["op"]), distinct(rows, lambda r: r["dtype"])
    ):
        group = [r for r in rows if (r["op"], r["dtype"]) == (op, dtype)]
        if not group:
            continue
        blocks = distinct(group, lambda r: r["block"])
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), sharex=True)
        for r in group:
            x = blocks.index(r["block"]) + 0.15 * (list(colours).index(r["density"]) - (len(colours) - 1) / 2)
            left.plot(x, float(r["speedup"]), "o", color=colours[r["density"]], alpha=0.6)
            right.plot(x, 100 * float(r["efficiency"]), "o", color=colours[r["density"]], alpha=0.6)
        for axes, line, label in (
            (left, 1, "speedup over dense"),
            (right, 100, "efficiency per useful FLOP, %"),
        ):
            axes.axhline(line, color="grey", linewidth=1)
            axes.set_xticks(range(len(blocks)), blocks)
            axes.set_xlim(-0.5, len(blocks) - 0.5)
            axes.set_xlabel("block, rows × columns")
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        for density, colour in colours.items():
            left.plot([], [], "o", color=colour, label=f"density {density}")
        left.legend()
        first = group[0]
        figure.suptitle(f"{op}, {dtype}: {first['machine']}, {first['date']}, commit {first['commit']}")
        figure.tight_layout()
        files.append(folder / f"{first['device']}-{op}-{dtype}.png")
        figure.savefig(files[-1], dpi=110)
        plt.close(figure)
    return files


def main() -> None:
    """Read the results; print tables or write plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a CSV file of bench/run.py")
    parser.add_argument("--markdown", action="store_true", help="print tables instead of plotting")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance", help="folder of the plots")
    args = parser.parse_args()
    rows = read(args.results)
    if not rows:
        parser.error(f"{args.results} must have rows; got none")
    if args.markdown:
        print(markdown(rows))
    else:
        for file in plots(rows, args.out):
            print(file)


if __name__ == "__main__":
    main()
