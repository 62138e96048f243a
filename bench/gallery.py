"""The plots of the documentation's gallery, from the committed results: ``python bench/gallery.py FOLDER``.

`make docs` draws them. Of each machine's files of a kind the largest of the newest day is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plot import Row, distinct, plots, read

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"


@dataclass(frozen=True)
class Plot:
    """A picture, what it shows, and where its figures are."""

    file: Path
    caption: str
    source: Path


def newest(machine: Path, wanted: set[str]) -> tuple[Path, list[Row]] | None:
    """A machine's newest CSV with these columns and rows: of its last day, the largest."""
    found = []
    for path in machine.glob("*.csv"):
        rows = read(path)
        if rows and wanted <= rows[0].keys():
            found.append((path.name[:10], len(rows), path, rows))
    return max(found, key=lambda entry: entry[:3])[2:] if found else None


def bars(
    labels: list[str], heights: list[float], title: str, ylabel: str, file: Path, line: float | None
) -> Path:
    """One bar for each label, with its height on top; `line` is what is even."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(max(6, 0.7 * len(labels) + 2), 4.2))
    axes.bar_label(axes.bar(range(len(labels)), heights), fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel(ylabel)
    axes.margins(y=0.12)
    axes.set_title(title, fontsize=10)
    if line is not None:
        axes.axhline(line, color="grey", linewidth=1)
    return _saved(figure, file)


def curves(rows: list[Row], key: Callable[[Row], str], title: str, file: Path) -> Path:
    """Speedup over dense by density, a curve for each `key`."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name in distinct(rows, key):
        points = sorted((float(r["density"]), float(r["speedup"])) for r in rows if key(r) == name)
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xlabel("density")
    axes.set_ylabel("speedup over dense")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7)
    return _saved(figure, file)


def _saved(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _layers(machine: Path, folder: Path) -> list[Plot]:
    """Speedup and efficiency by block shape, of the runner's cases."""
    if (found := newest(machine, {"case", "op", "block", "speedup", "efficiency"})) is None:
        return []
    path, rows = found
    rows = [row for row in rows if row["speedup"] and row["efficiency"]]
    return [
        Plot(file, f"{file.stem.replace('-', ', ')}: each dot is a size", path)
        for file in plots(rows, folder / machine.name)
    ]


def _networks(machine: Path, folder: Path) -> list[Plot]:
    """Whole networks against dense."""
    if (found := newest(machine, {"network", "spec", "speedup", "bound"})) is None:
        return []
    path, rows = found
    labels = [f"{r['network']} {r['spec'].removeprefix('block:')}" for r in rows]
    first = rows[0]
    where = f"{first['cpu']}, {first['threads']} threads" if "cpu" in first else first["device"]
    title = f"Whole networks: {where}, {first['date']}"
    heights = [float(r["speedup"]) for r in rows]
    file = bars(labels, heights, title, "speedup over dense", folder / f"{machine.name}-networks.png", 1)
    return [Plot(file, "networks, by block shape and density", path)]


def _feed_forward(machine: Path, folder: Path) -> list[Plot]:
    """Two layers and an activation as one op."""
    if (found := newest(machine, {"H", "layers_ms", "network_ms", "dense/network"})) is None:
        return []
    path, rows = found
    labels = [f"{r['M']}×{r['K']}×{r['H']} {r['block']}@{r['density']} {r['dtype']}" for r in rows[:20]]
    heights = [float(r["dense/network"]) for r in rows[:20]]
    title = f"Feed-forward networks as one op: {rows[0]['machine']}, {rows[0]['date']}"
    name = folder / f"{machine.name}-feed-forward.png"
    return [Plot(bars(labels, heights, title, "speedup over dense", name, 1), "feed-forward networks", path)]


def _hopper(machine: Path, folder: Path) -> list[Plot]:
    """Hopper's kernels by density."""
    found = []
    for kind in ("tall", "unions", "strips"):
        files = sorted(machine.glob(f"*-hopper-{kind}.csv"))
        rows = [r for r in (read(files[-1]) if files else []) if r["op"] == "linear" and r["speedup"]]
        if not rows:
            continue
        sizes = (rows[0]["M"], rows[0]["N"], rows[0]["K"])
        rows = [r for r in rows if (r["M"], r["N"], r["K"]) == sizes]
        title = f"{kind}: {'×'.join(sizes)} bf16, {rows[0]['machine']}, {rows[0]['date']}"
        file = curves(
            rows, lambda r: f"{r['block']} {r['kernel']}", title, folder / f"{machine.name}-{kind}.png"
        )
        found.append(Plot(file, f"kernels for Hopper: {kind}", files[-1]))
    return found


def _pruning(folder: Path) -> list[Plot]:
    """What pruning costs: accuracy of moving patterns, and of block shapes against time."""
    from matplotlib import pyplot as plt

    path = RESULTS / "pruning/moving_digits.json"
    data = json.loads(path.read_text("utf-8"))
    names = list(data["accuracy"])
    title = (
        f"Digits at density {data['settings']['density']}, {data['settings']['steps']} steps: mean of seeds"
    )
    heights = [data["accuracy"][name]["mean"] for name in names]
    file = bars(names, heights, title, "accuracy, %", folder / "moving-digits.png", heights[0])
    found = [
        Plot(file, "moving patterns against pruning and fixed ones; rigl4 has four times the steps", path)
    ]

    path = RESULTS / "pruning/block_shapes.csv"
    rows = [r for r in read(path) if r["predicted_sparse_f32"] and r["held_out_acc1"]]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for row in rows:
        x, y = float(row["predicted_sparse_f32"]), float(row["held_out_acc1"])
        axes.plot(x, y, "o", color="C0")
        axes.annotate(f"{row['block']}@{row['density']}", (x, y), fontsize=6)
    axes.set_xlabel("predicted milliseconds, f32")
    axes.set_ylabel("accuracy on held-out entries")
    axes.set_title("MiniLM on WordNet, by block shape and density", fontsize=10)
    found.append(Plot(_saved(figure, folder / "block-shapes.png"), "what block shapes cost and gain", path))
    return found


def gallery(folder: Path) -> list[Plot]:
    """Draws all plots into a folder."""
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for machine in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for draw in (_networks, _feed_forward, _hopper, _layers):
            found += draw(machine, folder)
    return found + _pruning(folder)


def markdown(found: list[Plot], base: Path) -> str:
    """The plots as Markdown of a page in the folder `base`, beside build/."""
    parts = []
    for plot in found:
        image = Path("..") / plot.file.relative_to(base.parent)
        parts.append(f"![{plot.caption}]({image})\n\n{plot.caption}; `{plot.source.relative_to(ROOT)}`\n")
    return "\n".join(parts)


if __name__ == "__main__":
    for plot in gallery(Path(sys.argv[1])):
        print(plot.file, plot.source, sep="\t")
