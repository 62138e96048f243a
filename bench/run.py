"""Measures Rarefy beside torch and scipy, one CSV row per case: ``python bench/run.py`` (or ``make bench``).

All contestants of a case run in one process, in turns, on the same fresh random matrices; each row says on
what machine and with what versions, and has the command that measures it again. A run can be interrupted:
starting it again measures the cases that are not in its file yet. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import scipy
import torch
from tqdm import tqdm

import rarefy
from cases import Case, load_cases
from contestants import RIVALS, Problem, make_contestants, make_problem, prepared_weight
from timing import Times, graph_of, interleave

ROOT = Path(__file__).resolve().parent.parent
CONTESTANTS = ("rarefy", "dense_torch", "dense_onednn", "torch_bsr", "scipy_bsr")
DENSE = ("dense_torch", "dense_onednn")
TIMES = [f"{name}_{part}" for name in CONTESTANTS for part in ("ms", "min_ms", "max_ms")]
COLUMNS = [
    *("case", "op", "M", "N", "K", "block", "density", "dtype", "device", "threads", "mode", "kernel"),
    *("dense_ms", "dense_by", "speedup", "efficiency", "useful_gflops", "peak_gflops", "peak_share"),
    *("dense_peak_share", *TIMES, "turns"),
    *("machine", "cores", "date", "commit", "rarefy", "torch", "scipy", "blas", "repro"),
]


def git_commit() -> str:
    """The short commit, with "-dirty" when tracked files other than results differ from it."""
    try:
        head = subprocess.run(
            ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
        command = ["git", "-C", ROOT, "status", "--porcelain", "-uno", "--", ".", ":!bench/results", ":!docs"]
        changed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def cpu_name() -> str:
    """The processor's brand, and its family and model where Linux tells: one brand may be several of them."""
    name = rarefy.backend_info()["cpu"]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return name
    found = [re.search(rf"^{key}\s*: (\d+)$", text, re.MULTILINE) for key in ("cpu family", "model")]
    return f"{name} (family {found[0][1]} model {found[1][1]})" if all(found) else name


def environment(device: str, commit: str | None) -> dict[str, object]:
    """The columns that are the same for all cases of a run."""
    cores = len(os.sched_getaffinity(0))
    machine = cpu_name()
    if device == "cuda":
        machine, cores = (
            torch.cuda.get_device_name(),
            torch.cuda.get_device_properties(0).multi_processor_count,
        )
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return {
        "machine": machine,
        "cores": cores,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit or git_commit(),
        "rarefy": rarefy.__version__,
        "torch": torch.__version__,
        "scipy": scipy.__version__,
        "blas": f"{blas[1] if blas else 'unknown'}, oneDNN {onednn[1] if onednn else 'none'}",
    }


def peak_gflops(program: Path, threads: int) -> float | None:
    """What `threads` cores reach in float32 FMAs right now, or None without the program."""
    if not program.exists():
        return None
    out = subprocess.run([program, str(threads), "0.03"], check=True, capture_output=True, text=True).stdout
    return float(json.loads(out)["gflops"])


def kernel_of(p: Problem) -> str:
    """The kernel that Rarefy runs for a case and its configuration, as `rarefy.explain` says."""
    explained = rarefy.explain(prepared_weight(p), p.x, op=p.case.op)
    return f"{explained['kernel']} {explained['config']}".strip()


def row_of(p: Problem, times: dict[str, Times], peak: float | None, mode: str) -> dict[str, object]:
    """One case's columns, but for those of `environment`."""
    case, useful_flop = p.case, p.useful_flop
    best = min((name for name in DENSE if name in times), key=lambda name: times[name].median)
    dense, sparse = times[best].median, times["rarefy"].median
    dense_flop = 2.0 * case.M * case.N * case.K
    row: dict[str, object] = {
        **{key: getattr(case, key) for key in ("op", "M", "N", "K", "dtype", "device", "threads")},
        "case": case.name,
        "block": f"{case.block[0]}x{case.block[1]}",
        "density": case.density,
        "mode": mode,
        "kernel": kernel_of(p),
        "dense_ms": f"{dense * 1e3:.5g}",
        "dense_by": best.removeprefix("dense_"),
        "speedup": f"{dense / sparse:.4g}",
        "efficiency": f"{useful_flop / dense_flop * dense / sparse:.4g}",
        "useful_gflops": f"{useful_flop / sparse * 1e-9:.4g}",
        "turns": " ".join(f"{name}:{len(t.turns)}" for name, t in times.items()),
        "repro": f"python bench/run.py --case {case.name}",
    }
    for name, t in times.items():
        for part, seconds in zip(("ms", "min_ms", "max_ms"), (t.median, *t.spread), strict=True):
            row[f"{name}_{part}"] = f"{seconds * 1e3:.5g}"
    if peak is not None:
        row |= {
            "peak_gflops": f"{peak:.4g}",
            "peak_share": f"{useful_flop / sparse * 1e-9 / peak:.4g}",
            "dense_peak_share": f"{dense_flop / dense * 1e-9 / peak:.4g}",
        }
    return row


def measure(case: Case, rivals: list[str], budget: float, peak_program: Path) -> list[dict[str, object]]:
    """Run one case: one row, or on CUDA one of the kernels alone (graphs) and one of eager calls."""
    if case.device == "cpu":
        torch.set_num_threads(case.threads)
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
    problem = make_problem(case, generator)
    calls = make_contestants(problem, rivals)
    if case.device == "cpu":
        peak = peak_gflops(peak_program, case.threads)
        return [row_of(problem, interleave(calls, "cpu", budget), peak, "eager")]
    graphs = {name: graph_of(call) for name, call in calls.items()}
    return [
        row_of(problem, interleave(group, "cuda", budget), None, mode)
        for mode, group in (("graph", graphs), ("eager", calls))
    ]


def summary(row: dict[str, object]) -> str:
    """One line for the screen."""
    parts = [
        f"{row['case']:50} {float(row['rarefy_ms']):9.4f} ms, {row['dense_by']} dense {row['dense_ms']} ms",
        f"speedup {float(row['speedup']):.2f}",
        f"efficiency {float(row['efficiency']):.0%}",
    ]
    if "peak_share" in row:
        parts.append(f"{float(row['peak_share']):.0%} of peak")
    if row["device"] == "cuda":
        parts.append(str(row["mode"]))
    parts += [f"{name} {row[f'{name}_ms']} ms" for name in RIVALS if f"{name}_ms" in row]
    return ", ".join(parts)


def arguments() -> argparse.Namespace:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--cases", type=Path, help="a list of cases; default: bench/cases/{cpu,gpu}.toml")
    add("--case", action="append", help="measure this case only (may be repeated) and write no file")
    add("--match", default="", help="of the list, the cases whose name has this regular expression in it")
    add("--out", type=Path, help="the CSV file; default: bench/results/MACHINE/DATE-COMMIT.csv")
    add("--budget", type=float, default=0.3, help="seconds of timing a case (default: %(default)s)")
    add("--commit", help="what to write as commit, where git is not at hand")
    add("--list", action="store_true", help="print the cases and end")
    add("--peak", type=Path, default=ROOT / "build/release/bench/rarefy_peak")
    return parser.parse_args()


def chosen_cases(args: argparse.Namespace) -> dict[Case, list[str]]:
    """What to measure; single cases get every rival that can run them."""
    if args.case:
        return {Case.parse(name): list(RIVALS) for name in args.case}
    path = args.cases or ROOT / "bench/cases" / ("gpu.toml" if args.device == "cuda" else "cpu.toml")
    return {case: rivals for case, rivals in load_cases(path).items() if re.search(args.match, case.name)}


def main() -> int:
    """Measure; the exit code is 130 after Ctrl-C."""
    args = arguments()
    try:
        cases = chosen_cases(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    same = environment("cuda" if any(c.device == "cuda" for c in cases) else "cpu", args.commit)
    if not args.peak.exists():
        print(f"no {args.peak}: shares of the FMA peak stay empty (make bench builds it)", file=sys.stderr)
    out = args.out
    if out is None and not args.case:
        slug = re.sub(r"[^a-z0-9]+", "-", f"{same['machine']} {same['cores']} cores".lower()).strip("-")
        out = ROOT / "bench/results" / slug / f"{same['date']}-{same['commit']}.csv"
    done = set()
    if out is not None and out.exists():
        with out.open(newline="", encoding="utf-8") as file:
            done = {row["case"] for row in csv.DictReader(file)}
    left = {case: rivals for case, rivals in cases.items() if case.name not in done}
    bar = tqdm(left.items(), desc=f"{len(done)} done before" if done else None, unit="case", smoothing=0.05)
    try:
        for case, rivals in bar:
            rows = [same | row for row in measure(case, rivals, args.budget, args.peak)]
            for row in rows:
                tqdm.write(summary(row))
            if out is not None:
                append(out, rows)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    if out is not None:
        print(out)
    return 0


def append(path: Path, rows: list[dict[str, object]]) -> None:
    """Add rows to a CSV file, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
