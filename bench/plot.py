"""Plots and Markdown tables from a results file of bench/run.py.

``python bench/plot.py bench/results/MACHINE/DATE-COMMIT.csv`` writes PNGs into docs/performance/;
with ``--markdown`` it prints tables instead, with ``--write docs/performance_tables.md`` it puts them
into that page, between the marks of their device.
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
RIVALS = {  # columns, and their titles in tables
    "dense_torch": "F.linear",
    "dense_onednn": "oneDNN",
    "torch_bsr": "torch BSR",
    "scipy_bsr": "scipy BSR",
}
MOST_LOSSES = 12  # rows of the table of losses; the rest is counted


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


def ratio(text: str) -> str:
    """A speedup, to two decimals or two digits, whichever are more."""
    number = float(text)
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def threads(row: Row) -> str:
    """The number of threads of a CPU row, after a comma."""
    return (
        f", {row['threads']} thread{'' if row['threads'] == '1' else 's'}" if row["device"] == "cpu" else ""
    )


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
    peaks: dict[str, list[float]] = {}
    for row in rows:
        if row["peak_gflops"]:
            peaks.setdefault(row["threads"], []).append(float(row["peak_gflops"]))
    parts = [
        f"{r['machine']}, {r['cores']} {'SMs' if r['device'] == 'cuda' else 'cores'}; {r['date']}",
        f"commit {r['commit']}; rarefy {r['rarefy']}, torch {r['torch']}"
        + (f" ({r['blas']}), scipy {r['scipy']}" if r["device"] == "cpu" else ""),
    ]
    parts += [
        f"FMA peak on {number} thread{'s' if number != '1' else ''}: {statistics.median(found):.0f} GFLOP/s"
        f" (median of {len(found)} samples, {min(found):.0f}–{max(found):.0f})"
        for number, found in sorted(peaks.items())
    ]
    return "; ".join(parts) + f"; {len(rows)} rows."


def grid(rows: list[Row]) -> str:
    """Sizes and densities down, block shapes across: speedup over dense, and share of the FMA peak."""
    blocks = distinct(rows, lambda r: r["block"])
    cells = {(product(r), r["density"], r["block"]): r for r in rows}
    body = []
    for size in distinct(rows, product):
        densities = {r["density"] for r in rows if product(r) == size}
        for density in sorted(densities, key=float):
            found = [cells.get((size, density, block)) for block in blocks]
            dense = [float(r["dense_ms"]) for r in found if r]
            line = [
                f"{size}, {density}",
                f"{statistics.median(dense):.3g} {next(r['dense_by'] for r in found if r)}",
            ]
            for r in found:
                share = f" ({percent(r['peak_share'])})" if r and r["peak_share"] else ""
                line.append(f"{ratio(r['speedup'])}{share}" if r else "–")
            body.append(line)
    return table(["M×N×K, density", "dense, ms", *blocks], body)


def grids(rows: list[Row]) -> str:
    """One grid for each product, dtype and number of threads."""

    def key(r: Row) -> str:
        return f"{r['op']}, {r['dtype']}{threads(r)}"

    groups = {title: [r for r in rows if key(r) == title] for title in distinct(rows, key)}
    return "\n\n".join(f"**{title}**\n\n{grid(group)}" for title, group in groups.items())


def rivals_table(rows: list[Row]) -> str:
    """Milliseconds of every contestant, where another sparse library took part."""
    chosen = [r for r in rows if r["torch_bsr_ms"] or r["scipy_bsr_ms"]]
    names = [name for name in RIVALS if any(r[f"{name}_ms"] for r in chosen)]
    body = [
        [
            f"{product(r)}, {r['block']}, {r['density']}, {r['dtype']}{threads(r)}",
            f"{float(r['rarefy_ms']):.3g} ({float(r['rarefy_min_ms']):.3g}–{float(r['rarefy_max_ms']):.3g})",
            *(f"{float(r[f'{name}_ms']):.3g}" if r[f"{name}_ms"] else "–" for name in names),
        ]
        for r in chosen
    ]
    return table(["M×N×K, block, density", "rarefy, ms (spread)", *(RIVALS[name] for name in names)], body)


def losses(rows: list[Row]) -> str:
    """Where the better dense kernel is as fast or faster, worst first."""
    lost = sorted((r for r in rows if float(r["speedup"]) <= 1), key=lambda r: float(r["speedup"]))
    text = f"Dense is at least as fast in {len(lost)} of {len(rows)} rows"
    if not lost:
        return text + "."
    body = [
        [f"`{r['case']}`", ratio(r["speedup"]), r["rarefy_ms"], r["dense_ms"]] for r in lost[:MOST_LOSSES]
    ]
    shown = f"; the worst {MOST_LOSSES}" if len(lost) > MOST_LOSSES else ""
    return f"{text}{shown}:\n\n{table(['case', 'speedup', 'rarefy, ms', 'dense, ms'], body)}"


def markdown(rows: list[Row]) -> str:
    """Everything that docs/performance_tables.md shows; of CUDA rows, those of the kernels alone."""
    parts = [where(rows)]
    rows = [r for r in rows if r["device"] == "cpu" or r["mode"] == "graph"]
    shares = ", in parentheses the share of the FMA peak" if any(r["peak_share"] for r in rows) else ""
    parts.append(f"Cells are the speedup over the better dense kernel{shares}.")
    titles = {"linear": "Forward", "grad_input": "Input gradient", "grad_weight": "Weight gradient"}
    for op, title in titles.items():
        group = [r for r in rows if r["op"] == op]
        if group:
            parts += [f"## {title}", grids(group)]
    if any(r["torch_bsr_ms"] or r["scipy_bsr_ms"] for r in rows):
        parts += ["## Other sparse libraries", rivals_table(rows)]
    parts += ["## Where Rarefy loses", losses(rows)]
    return "\n\n".join(parts)


def write_into(page: Path, rows: list[Row]) -> None:
    """Replace what stands between <!-- begin DEVICE --> and <!-- end DEVICE --> in a page.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    begin, end = (f"<!-- {word} {rows[0]['device']} -->" for word in ("begin", "end"))
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"[plot] {page} must have the marks {begin} and {end}; got a page without")
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{markdown(rows)}\n\n{end}{after}", encoding="utf-8")


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
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into a page")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance", help="folder of the plots")
    args = parser.parse_args()
    rows = read(args.results)
    if not rows:
        parser.error(f"{args.results} must have rows; got none")
    if args.write:
        write_into(args.write, rows)
    elif args.markdown:
        print(markdown(rows))
    else:
        for file in plots(rows, args.out):
            print(file)


if __name__ == "__main__":
    main()
