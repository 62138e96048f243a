"""The benchmark runner: case names, the lists of cases, and one small case measured to the end."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rarefy

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import cpu_sweep  # noqa: E402
import gpu_clocks  # noqa: E402
import gpu_reached  # noqa: E402
import overhead  # noqa: E402
import reached  # noqa: E402
import rivals  # noqa: E402
from cases import Case, load_cases  # noqa: E402
from timing import interleave  # noqa: E402


@pytest.mark.parametrize("path", sorted((BENCH / "cases").glob("*.toml")), ids=lambda p: p.stem)
def test_case_names_are_distinct_and_parse_back(path):
    cases = list(load_cases(path))
    assert len({case.name for case in cases}) == len(cases) > 0
    assert [Case.parse(case.name) for case in cases] == cases


@pytest.mark.parametrize(
    "name",
    [
        "",
        "linear",
        "linear-1x2x3-4x5-d0.5-f32-cpu",
        "linear-1x2x3-4x5-d0.5-f32-cuda2",
        "spmm-1x2x3-4x5-d0.5-f32-cpu1",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"\[bench\] --case must be a case's name"):
        Case.parse(name)


def test_all_contestants_have_turns_and_slow_ones_few():
    def slow():
        return sum(range(300_000))

    calls = {"fast": lambda: None, "slow": slow}
    times = interleave(calls, "cpu", budget=0.01)
    assert len(times["slow"].turns) >= 3 and len(times["fast"].turns) >= len(times["slow"].turns)
    for t in times.values():
        assert t.spread[0] <= t.median <= t.spread[1]
    assert times["fast"].median < times["slow"].median


def test_a_run_writes_rows_resumes_and_makes_tables(tmp_path):
    pytest.importorskip("scipy")
    out, cases = tmp_path / "results.csv", tmp_path / "cases.toml"
    cases.write_text(
        'device = "cpu"\n[[group]]\nop = ["linear", "grad_input", "grad_weight"]\nNK = [[24, 40]]\nM = [7]\n'
        'block = ["4x4"]\ndensity = [0.5]\ndtype = ["f32"]\nthreads = [1]\n'
        'rivals = ["torch_bsr", "scipy_bsr"]\n'
    )
    command = [sys.executable, str(BENCH / "run.py"), f"--cases={cases}", f"--out={out}", "--budget=0.01"]
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == ["linear", "grad_input", "grad_weight"]  # the second run added none
    for row in rows:
        assert row["repro"] == f"python bench/run.py --case {row['case']}"
        assert float(row["rarefy_min_ms"]) <= float(row["rarefy_ms"]) <= float(row["rarefy_max_ms"])
        assert float(row["efficiency"]) == pytest.approx(0.5 * float(row["speedup"]), rel=1e-3)
        assert all(row[key] for key in ("machine", "cores", "date", "commit", "torch", "kernel", "dense_by"))
    assert rows[0]["scipy_bsr_ms"] and rows[0]["torch_bsr_ms"] and not rows[1]["scipy_bsr_ms"]
    tables = subprocess.run(
        [sys.executable, str(BENCH / "plot.py"), str(out), "--markdown"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "## Weight gradient" in tables and "torch BSR" in tables


@pytest.mark.usefixtures("one_thread")
def test_overhead_compares_both_layers_in_each_mode():
    lines = overhead.table("cpu", features=32, tokens=2, rounds=3).splitlines()
    assert [line.split(" |")[0] for line in lines[2:]] == [
        "| forward",
        "| forward, no_grad",
        "| forward + backward",
        "| forward + backward to x",
    ]
    for line in lines[2:]:
        _, _, dense, sparse, ratio, _ = line.split("|")
        medians = [float(cell.split("(")[0]) for cell in (dense, sparse)]
        assert min(medians) > 0 and 0.2 < float(ratio) < 20


def test_the_gallery_draws_the_committed_results(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import gallery

    machines = sorted(path for path in gallery.RESULTS.iterdir() if path.is_dir())
    columns = {"case", "op", "block", "speedup", "efficiency"}
    newest = {machine.name: gallery.newest(machine, columns) for machine in machines}
    assert newest["pruning"] is None and sum(found is not None for found in newest.values()) >= 3
    folder = tmp_path / "build" / "gallery"
    folder.mkdir(parents=True)
    draws = (gallery._networks, gallery._feed_forward, gallery._hopper)
    found = [plot for machine in machines for draw in draws for plot in draw(machine, folder)]
    found += gallery._pruning(folder)
    assert len(found) >= 7 and len({plot.file for plot in found}) == len(found)
    assert all(plot.file.stat().st_size > 5000 and plot.source.exists() for plot in found)
    text = gallery.markdown(found, tmp_path / "docs")
    assert text.count("](../build/gallery/") == len(found) and str(tmp_path) not in text


def reached_with(tmp_path, monkeypatch, capsys, *arguments):
    """bench/reached.py with a ceiling that is not measured, and two rows' worth of what it printed."""
    peak = tmp_path / "peak"
    peak.write_text('#!/bin/sh\necho \'{"isa": "none", "gflops": 100.0}\'\n')
    peak.chmod(0o755)
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(
        sys, "argv", ["reached.py", f"--peak={peak}", "--rounds=1", f"--csv={out}", *arguments]
    )
    reached.main()
    with out.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader), reader.fieldnames, capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_reached_measures_the_rows_whose_text_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reached, "SIZE", (64, 96))
    monkeypatch.setattr(reached, "rows", lambda *_: small_rows())
    rows, _, text = reached_with(tmp_path, monkeypatch, capsys, "--only", "bf16")
    assert [row["case"] for row in rows] == ["bf16 64→96 block:4x1@0.5, M = 2"]
    assert "1 rows" in text or "of 1 rows" in text
    rows, _, _ = reached_with(tmp_path, monkeypatch, capsys, "--only", "of reading")
    assert [row["case"] for row in rows] == ["f32 64→96 2:4, M = 1"] and float(rows[0]["ceiling"]) == 100
    rows, _, _ = reached_with(tmp_path, monkeypatch, capsys, "--only", "skewed")
    assert [row["case"] for row in rows] == ["f32 64→96 block:4x1@0.5 skewed, M = 8"]
    rows, _, _ = reached_with(tmp_path, monkeypatch, capsys, "--only", "of the line")
    assert [row["unit"] for row in rows] == ["of the line from 4 to 32"] and float(rows[0]["reached"]) > 0


@pytest.mark.parametrize("backward", [[], ["--backward"]])
def test_the_sweep_has_a_row_for_each_number_of_tokens(tmp_path, monkeypatch, capsys, backward):
    path = tmp_path / "rows.csv"
    asked = ["--shapes", "48x40", "--blocks", "3x5", "8x8", "--densities", "0.5", "--tokens", "1", "6"]
    brief = ["--threads", "1", "--seconds", "0.001", "--csv", str(path)]
    monkeypatch.setattr(sys, "argv", ["cpu_sweep.py", *asked, *brief, *backward])
    cpu_sweep.main()
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["dtype"], row["block"], row["tokens"]) for row in rows] == [
        (dtype, block, tokens) for dtype in ("f32", "bf16") for block in ("3x5", "8x8") for tokens in "16"
    ]
    for row in rows:
        assert float(row["speedup"]) == pytest.approx(float(row["dense_us"]) / float(row["us"]), rel=0.05)
    slower = sum(float(row["speedup"]) < 1 for row in rows)
    assert f"{slower} of 8 are slower than dense" in capsys.readouterr().out


def test_the_sweep_refuses_gradients_of_int8(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cpu_sweep.py", "--dtypes", "int8", "--backward"])
    with pytest.raises(SystemExit):
        cpu_sweep.main()
    assert "layers in int8 have no gradients" in capsys.readouterr().err


def test_a_skewed_pattern_has_rows_and_columns_of_all_lengths():
    _, sparse = reached.sparse_layer("block:4x1@0.25", (64, 96), torch.float32, skewed=True)
    mask = sparse.weight.block_mask()
    for counts in (mask.sum(0), mask.sum(1)):
        assert counts.max() > 2.5 * counts.float().median()


@pytest.mark.usefixtures("one_thread")
def test_reached_with_nothing_to_measure_writes_a_head_alone(tmp_path, monkeypatch, capsys):
    rows, columns, text = reached_with(tmp_path, monkeypatch, capsys, "--only", "no such row")
    assert rows == [] and columns[:2] == ["case", "unit"] and columns[-1] == "command"
    assert "0 of 0 rows" in text


def test_reached_without_its_ceilings_says_how_to_build_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reached.py", "--peak", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        reached.main()
    assert "none, which is not there: make bench" in capsys.readouterr().err


@pytest.mark.usefixtures("one_thread")
def test_reached_as_on_a_processor_with_avx2_alone(tmp_path, monkeypatch, capsys):
    asked = {f"{row.case} {row.unit}": row.required for row in reached.rows("avx2", "avx2")}
    assert asked["f32 768→3072 block:4x1@0.5, M = 512 of f32"] == 0.85
    monkeypatch.setattr(reached, "rows", lambda *_: [])
    begun = {}
    monkeypatch.setattr(os, "execve", lambda program, words, env: begun.update(env))
    monkeypatch.setattr(reached.torch.backends.quantized, "engine", "onednn")  # put back at the end
    for name in reached.AVX2:
        monkeypatch.delenv(name, raising=False)
    if "avx2" not in rarefy.backend_info()["machine"]:
        pytest.skip("has no AVX2")
    try:
        reached_with(tmp_path, monkeypatch, capsys, "--isa", "avx2")
        assert begun.items() >= reached.AVX2.items()  # anew, with what torch's libraries read
        begun.clear()
        for name, value in reached.AVX2.items():
            monkeypatch.setenv(name, value)
        reached_with(tmp_path, monkeypatch, capsys, "--isa", "avx2")
        assert not begun and rarefy.backend_info()["forced_impl"] == "cpu:avx2"
    finally:
        rarefy.force_impl("")


def small_rows():
    yield reached.linear("block:4x1@0.5", 2, reached.BF16, (64, 96), speedup=1.0)
    yield reached.linear("2:4", 1, size=(64, 96), reading=0.9)
    yield reached.linear("block:4x1@0.5", 8, size=(64, 96), share=0.1, of="f32", skewed=True)
    yield reached.between("block:4x1@0.5", 8, reached.F32)


def test_reached_names_each_row_once():
    texts = [f"{row.case} {row.unit}" for row in reached.rows("amx_bf16", "amx_int8")]
    assert len(set(texts)) == len(texts) > 50


@pytest.mark.usefixtures("one_thread")
def test_rivals_agree_with_dense_and_are_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LIBXSMM", raising=False)
    path = tmp_path / "rivals.csv"
    case = ("--case", "8x64x96", "4x1", "0.5", "f32", "--rounds", "1", "--csv", str(path))
    monkeypatch.setattr(sys, "argv", ["rivals.py", *case])
    rivals.main()
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["rarefy_ms"] and row["dense_ms"] and row["mkl_ms"] and row["libxsmm_ms"] == ""
    assert row["command"] == "python bench/rivals.py --case 8x64x96 4x1 0.5 f32"
    assert "8x64x96 4x1 0.5 f32" in capsys.readouterr().out


def test_a_library_without_what_is_called_says_so(monkeypatch):
    """Of a libdnnl built without ONEDNN_EXPERIMENTAL_SPARSE, or an engine that is refused."""
    library = SimpleNamespace(dnnl_engine_create=lambda *_: 6)
    monkeypatch.setattr(rivals.ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(RuntimeError, match="dnnl_engine_create must succeed; got status 6"):
        rivals.OneDnn("libdnnl.so")


def test_a_rival_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(rivals, "mkl", lambda p: (lambda: None, lambda: torch.zeros(p.m, p.n)))
    with pytest.raises(RuntimeError, match="mkl must agree with dense; got 1"):
        rivals.contestants(rivals.Problem("8x64x96", "4x1", 0.5, "f32"), None)


def test_clocks_are_read_while_something_runs(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho [N/A], [N/A]\n"
        "for i in 1 2 3; do echo 1755, 690.5; echo 1500, 500; done\nexec sleep 60\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    begin = time.perf_counter()
    with gpu_clocks.Clocks() as clocks:
        while clocks.since(begin) is None or len(clocks._samples) < 6:
            assert time.perf_counter() < begin + 30
            time.sleep(0.01)
        assert clocks.since(begin) == gpu_clocks.Sample(1627.5, 595.25)
        assert clocks.since(time.perf_counter()) is None
    assert clocks._process.returncode is not None


def test_without_nvidia_smi_there_are_no_clocks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with gpu_clocks.Clocks() as clocks:
        assert clocks.since(0) is None


def test_a_row_of_the_gpu_has_clocks_and_spread(monkeypatch):
    times = iter((gpu_reached.Time(100, 0.01), gpu_reached.Time(80, 0.02), gpu_reached.Time(120, 0.01)) * 2)
    monkeypatch.setattr(gpu_reached, "microseconds", lambda _call: next(times))
    row = gpu_reached.Row("linear 8x8x8", "%", 70, lambda: None, lambda: None, density=0.5)
    for state, said in ((gpu_clocks.Sample(1755.4, 690.6), ("1755", "691")), (None, ("", ""))):
        found = gpu_reached.measure(row, 1.0, SimpleNamespace(since=lambda _begin, its=state: its))
        assert (found["reached"], found["verdict"], found["spread"]) == ("68.8", "short", "0.020")
        assert (found["sm_mhz"], found["watts"]) == said
