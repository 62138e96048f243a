"""Damaged files and configurations of transformers, and what cannot be: one sentence each."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from transformers_models import (
    FEED,
    SIZES,
    RarefyConfig,
    quiet,  # noqa: F401 (a fixture of every test here)
    sparse_bert,
    transformers,
)


def test_without_the_integration_loading_fails_with_one_sentence(tmp_path):
    sparse_bert().save_pretrained(tmp_path)
    code = "import sys, transformers; transformers.AutoModel.from_pretrained(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode != 0
    assert re.search(r"sparse weights need .*import rarefy\.integrations\.transformers", last)


UP = "bert.encoder.layer.0.intermediate.dense.weight"


def _no_traces(config: dict[str, Any]) -> None:
    del config["quantization_config"], config["transformers_weights"]


def _change(**entry: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["modules"][UP].update(entry)


def _config(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"].update(keys)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_traces, r"must describe the sparse weight bert\.encoder.*; got no entry, but .*indices in the"),
        (lambda c: c["quantization_config"]["modules"].pop(UP), rf"must describe the sparse weight {UP}; "),
        (_config(format="bsr-v2"), r"must be of format \"bsr-v1\".*; got format 'bsr-v2'"),
        (_config(extra=1), "must be of format .*, extra"),
        (_config(modules=[]), "modules must be a mapping; got list"),
        (_config(modules={"a.b.weight": {}}), "layers that BertForMaskedLM has; got a.b.weight"),
        (_config(modules=None), "must be patterns .* or the modules of a saved model; got neither"),
        (_config(modules=None, patterns={".*": "csr@0.5"}), "config.json must have modules"),
        (_change(shape=[16, 16]), rf"{UP} must be of shape \(32, 16\); got \(16, 16\)"),
        (_change(shape="x"), rf"shape in config.json of {UP} must be two ints; got x"),
        (_change(nnzb=5), rf"{UP}: .*there must be 5 blocks of f32.*; got 16 blocks of f32"),
        (_change(block_shape=[4, 5]), rf"{UP}: .*; got "),
        (_change(format="newer"), rf"the format of {UP} must be one of .*; got 'newer'"),
    ],
)
def test_a_damaged_config_is_refused_in_one_sentence(damage, message, tmp_path):
    sparse_bert({FEED: "block:4x4@0.5"}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    damage(config)
    path.write_text(json.dumps(config))
    with pytest.raises((ValueError, TypeError), match=message) as error:
        transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def _first_index(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.col_indices"][0] = 1000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{UP}.col_indices"), rf"model.safetensors must have {UP}.col_indices; got no"),
        (_first_index, rf"{UP}: .*col_indices\[0\]=1000 out of range"),
        (lambda t: t.update({f"{UP}.values": t[f"{UP}.values"][:3].clone()}), rf"{UP}: .*values must be"),
        (lambda t: t.update({f"{UP}.values": t[f"{UP}.values"].half()}), rf"{UP}: .*blocks of f16"),
    ],
)
def test_damaged_tensors_are_refused_in_one_sentence(damage, message, tmp_path):
    sparse_bert({FEED: "block:4x4@0.5"}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, TypeError), match=message):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_a_missing_shard_is_an_error_that_names_it(tmp_path):
    sparse_bert().save_pretrained(tmp_path, max_shard_size="4KB")
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_patterns_that_cannot_be(tmp_path):
    for arguments, kind, message in (
        ((), ValueError, "must be patterns"),
        (([],), TypeError, "patterns must be a mapping"),
        (("cube@0.1",), ValueError, "spec must look like"),
        (({"(": "csr@0.5"},), ValueError, "regular expression"),
        (({"a": "cube"},), ValueError, "spec must look like"),
    ):
        with pytest.raises(kind, match=rf"^\[RarefyConfig\] .*{message}|^\[add_pattern\] .*{message}"):
            RarefyConfig(*arguments)
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="must match the whole name of a layer; got 'nothing'"):
        config = RarefyConfig({"nothing": "csr@0.5"})
        transformers.BertModel.from_pretrained(tmp_path / "dense", quantization_config=config)


def test_models_that_a_config_cannot_describe_are_not_saved(tmp_path):
    model = sparse_bert()
    torch.nn.utils.parametrize.register_parametrization(
        model.bert.encoder.layer[0].output.dense.weight, "values", torch.nn.Identity()
    )
    with pytest.raises(NotImplementedError, match=r"^\[save_pretrained\] .*rarefy\.save_file.*; got bert\."):
        model.save_pretrained(tmp_path / "sparse")
    assert not (tmp_path / "sparse").exists()


def test_a_transformers_that_lacks_what_is_needed_saves_no_sparse_model(tmp_path, monkeypatch):
    model = sparse_bert()
    monkeypatch.setitem(sys.modules, "rarefy.integrations.transformers", None)  # as if its imports failed
    with pytest.raises(NotImplementedError, match=r"^\[save_pretrained\] transformers must be .*save_file"):
        model.save_pretrained(tmp_path / "sparse")
    assert not (tmp_path / "sparse").exists()


def test_an_old_transformers_is_named_in_one_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "rarefy.integrations.transformers")
    monkeypatch.setattr("importlib.metadata.version", {"transformers": "4.49.0"}.__getitem__)
    with pytest.raises(ImportError, match=r"transformers must be 4\.50 or later; got 4\.49\.0$"):
        importlib.import_module("rarefy.integrations.transformers")


def test_saving_leaves_the_model_as_it_was_also_after_an_error(tmp_path):
    model = sparse_bert()
    before = dict(vars(model.config)), set(vars(model))
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").mkdir()  # a folder where a file should be
    with pytest.raises(OSError):
        model.save_pretrained(tmp_path / "b")
    model.config.architectures = before[0].get("architectures")
    assert vars(model.config).keys() == before[0].keys() and set(vars(model)) == before[1]
