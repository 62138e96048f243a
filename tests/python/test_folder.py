"""Reports on saved models, times of their layers, and what Rarefy says while it works."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rarefy
from rarefy import log
from rarefy.__main__ import main


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 8))
    rarefy.sparsify(model, {"0": "block:16x4@0.5", "2": "csr@0.25"}, measure=False)
    return model


def test_a_file_of_save_file(tmp_path):
    model = _model()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    report = rarefy.report_folder(tmp_path / "m.safetensors")
    for name in ("0", "2"):
        row, weight = report[name], model[int(name)].weight
        assert (row.format, row.density) == (weight.spec_format(), weight.density)
        assert (row.sparse_bytes, row.dense_bytes) == (weight.nbytes, 4 * 32 * 64)
    assert report["3"].reason == "dense, 0% zeros" and report["3"].shape == (8, 32)
    assert len(report) == 3 and report["0"].speedup is None


@pytest.mark.parametrize("shards", [None, "4KB"])
def test_a_folder_of_transformers(shards, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("rarefy.integrations.transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=40))
    rarefy.sparsify(model, {".*query": "block:4x4@0.5", ".*key": "block:4x1@0.5:w8"}, measure=False)
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    report = rarefy.report_folder(tmp_path)
    assert {row.name.rpartition(".")[2]: row.format for row in report.replaced} == {
        "query": "block:4x4",
        "key": model.encoder.layer[0].attention.self.key.weight.spec_format(),
    }
    assert len([row for row in report if row.reason]) == 5  # the other layers of BERT; no embedding
    if shards is not None:
        next(tmp_path.glob("model-*.safetensors")).unlink()
        with pytest.raises(FileNotFoundError, match=r"\[report_folder\] the folder must hold model-"):
            rarefy.report_folder(tmp_path)


def test_bench_times_what_is_sparse_or_would_become_so(tmp_path, capsys, monkeypatch):
    save_file({"a.weight": torch.randn(64, 32), "a.bias": torch.randn(64)}, tmp_path / "dense.safetensors")
    arguments = ["rarefy", "bench", str(tmp_path), "--spec", "block:16x4@0.5", "--tokens", "4", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    (layer,) = found["layers"]
    assert layer["format"] == "block:16x4" and layer["dense_ms"] > 0 and layer["sparse_ms"] > 0
    assert found["tokens"] == 4 and found["dry_run"]
    monkeypatch.setattr(sys, "argv", ["rarefy", "report", str(tmp_path), "--html", str(tmp_path / "a.html")])
    assert main() == 0
    assert "dense, 0% zeros" in capsys.readouterr().out and (tmp_path / "a.html").stat().st_size > 1000


def test_bad_folders_are_named_in_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    rarefy.save_file(_model(), tmp_path / "m.safetensors")
    for path, text in (
        ("nowhere", "path must be a file or a folder"),
        ("empty", "the folder must hold safetensors files"),
        ("bad.safetensors", "bad.safetensors must be a safetensors file"),
    ):
        monkeypatch.setattr(sys, "argv", ["rarefy", "report", str(tmp_path / path)])
        assert main() == 1
        out = capsys.readouterr()
        assert text in out.err and not out.out
    with pytest.raises(ValueError, match="tokens must be at least 1"):
        rarefy.report_folder(tmp_path / "m.safetensors", tokens=0)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model.safetensors.index.json", "{", "index.json must be a JSON object with a weight_map"),
        ("model.safetensors.index.json", "[1]", "index.json must be a JSON object with a weight_map"),
        ("model.safetensors.index.json", "{}", "index.json must be a JSON object with a weight_map"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', "must be a JSON object with a weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": []}}',
            "must be a JSON object with a weight_map",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "must name files beside it; got 3"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../m"}}', "files beside it; got '../m'"),
        ("config.json", "{", "config.json must be a JSON object"),
        ("config.json", "[]", "config.json must be a JSON object"),
        ("config.json", '{"quantization_config": "x"}', "quantization_config of .* an object; got str"),
        (
            "config.json",
            '{"quantization_config": {"quant_method": "rarefy", "modules": [1]}}',
            "modules in config.json must be an object; got list",
        ),
        (
            "config.json",
            '{"quantization_config": {"quant_method": "rarefy", "modules": {"0.weight": 3}}}',
            "the metadata of 0.weight must be an object; got int",
        ),
    ],
)
def test_bad_json_is_a_sentence_and_no_traceback(file, text, message, tmp_path):
    rarefy.save_file(_model(), tmp_path / "model.safetensors")
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=rf"^\[report_folder\] .*{message}"):
        rarefy.report_folder(tmp_path)


def test_auto_chooses_for_dense_layers(tmp_path):
    tensors = {"a.weight": torch.randn(512, 512), "b.weight": torch.randn(3, 5)}
    save_file(tensors, tmp_path / "dense.safetensors")
    report = rarefy.report_folder(tmp_path, spec="auto@0.1")
    assert report["a"].format is not None and report["a"].predicted[1] < report["a"].predicted[0]
    assert report["b"].reason == "no block shape that auto knows divides it"


def test_layers_that_are_alike_are_in_memory_once(tmp_path, monkeypatch):
    from rarefy import folder

    made = []
    pair = folder._pair
    monkeypatch.setattr(folder, "_pair", lambda weight: made.append(weight) or pair(weight))
    save_file({f"{i}.weight": torch.randn(32, 32) for i in range(5)}, tmp_path / "dense.safetensors")
    report = rarefy.report_folder(tmp_path, spec="block:16x16@0.5", measure=True, tokens=2)
    assert len(made) == 1
    assert all(report[str(i)].times is report["0"].times is not None for i in range(5))
    assert [report[str(i)].timed_as for i in range(5)] == [None, "0", "0", "0", "0"]


def test_lines_of_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "rarefy"):
        model = _model()
        rarefy.save_file(model, tmp_path / "m.safetensors")
        rarefy.load_file(model, tmp_path / "m.safetensors")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["sparsify: 0 block:16x4 at density 0.5", "sparsify: 2 csr at density 0.25"]
    assert any(line.startswith("save_file: ") for line in lines)
    assert any("2 sparse weights" in line for line in lines)


def test_rarefy_log_prints_to_stderr_and_refuses_other_levels(tmp_path):
    code = "import torch, rarefy; model = torch.nn.Sequential(torch.nn.Linear(8, 8))"
    code += "; rarefy.sparsify(model, 'csr@0.5', measure=False)"

    def run(level: str) -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": ":".join(sys.path), "PATH": "", "RAREFY_LOG": level}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path
        )

    assert "rarefy INFO: sparsify: 0 csr" in run("info").stderr
    assert run("").stderr == "" and not list(tmp_path.iterdir())
    bad = run("loud")
    assert bad.returncode != 0 and "RAREFY_LOG must be one of debug, info, warning; got 'loud'" in bad.stderr


def test_ranges_have_the_names_of_layers(monkeypatch):
    ranges: list[str | None] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append(None))
    model = _model()
    x = torch.randn(2, 32)
    wanted = model(x)
    with log.nvtx(model):
        assert torch.equal(model(x), wanted)
        with pytest.raises(ValueError, match="bsr_linear"):
            model(torch.randn(2, 31))
    assert ranges[:4] == ["0: 64x32 block:16x4@0.5", None, "2: 32x64 csr@0.25", None]
    assert ranges[4:] == ["0: 64x32 block:16x4@0.5", None]  # also where a layer fails
    model(x)
    assert len(ranges) == 6


def test_words_after_python_m_rarefy_are_completed(capsys, monkeypatch):
    from rarefy.completion import WORDS

    for command, words in WORDS.items():
        monkeypatch.setattr(sys, "argv", ["rarefy", *filter(None, [command]), "--help"])
        with pytest.raises(SystemExit):
            main()
        text = capsys.readouterr().out
        options = set(
            re.findall(r"--[a-z]+", text.partition("positional")[0] + text.partition("options:")[2])
        )
        assert options == {word for word in words.split() if word.startswith("--")}, command
    monkeypatch.setattr(sys, "argv", ["rarefy", "completion", "bash"])
    assert main() == 0
    script = capsys.readouterr().out

    def completed(*line: str) -> list[str]:
        words = " ".join(f"'{word}'" for word in line)
        code = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _rarefy_module; echo ${{COMPREPLY[@]}}"
        run = subprocess.run(["bash", "-c", script + code], capture_output=True, text=True, check=True)
        return run.stdout.split()

    assert completed("python", "-m", "rarefy", "re") == ["report"]
    assert completed("python", "-m", "rarefy", "report", "--s") == ["--spec"]
    assert completed("python", "-m", "rarefy", "completion", "") == ["bash", "zsh", "--help"]
    assert completed("python", "-m", "other", "re") == completed("python", "re") == []
    monkeypatch.setattr(sys, "argv", ["rarefy", "completion", "zsh"])
    assert main() == 0 and "bashcompinit" in capsys.readouterr().out and "bashcompinit" not in script


def test_a_bar_shows_how_much_of_a_large_file_is_written(tmp_path, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, total: int, desc: str, **_: object) -> None:
            self.total, self.desc, self.n, self.closed = total, desc, 0, False
            bars.append(self)

        def update(self, n: int) -> None:
            self.n += n

        def close(self) -> None:
            self.closed = True

    model = _model()
    monkeypatch.setattr(log, "tqdm", Bar)
    rarefy.save_file(model, tmp_path / "a.safetensors")
    assert bars == []  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    rarefy.save_file(model, tmp_path / "a.safetensors")
    assert bars == []  # small
    monkeypatch.setattr(log, "_LARGE", 0)
    rarefy.save_file(model, tmp_path / "a.safetensors")
    (bar,) = bars
    assert bar.desc == "writing a.safetensors" and bar.closed
    assert 0 < bar.total < (tmp_path / "a.safetensors").stat().st_size
    with log.growing(tmp_path / "b", 10, "writing b"):
        (tmp_path / "b").write_bytes(b"12345")
        end = time.monotonic() + 10
        while bars[-1].n < 5 and time.monotonic() < end:
            time.sleep(0.05)
    assert bars[-1].n == 5
