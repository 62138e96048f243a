"""Experts of transformers: a layer for each, some of them sparse; saved, loaded and dense again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import rarefy
from rarefy import BlockSparseLinear
from transformers_models import (
    IDS,
    VERSION,
    RarefyConfig,
    architecture,
    assert_same,
    output_of,
    quiet,  # noqa: F401 (a fixture of every test here)
)

EXPERTS = r".*experts\.1\.(gate_up_proj|down_proj)"


@pytest.mark.skipif(VERSION < "5", reason="each expert is three layers there")
def test_some_of_the_experts_are_sparse_and_the_others_as_they_were(tmp_path):
    kind, config, inputs, _ = architecture("mixtral")
    dense = kind(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    model = copy.deepcopy(dense)
    report = rarefy.sparsify(model, {EXPERTS: "block:4x4@nonzero"}, measure=False)
    names = [row.name for row in report.rows if row.format is not None]
    assert names[:2] == [f"model.layers.0.mlp.experts.1.{part}_proj" for part in ("gate_up", "down")]
    # Blocks without zeros: what is computed is the same, in other sums.
    torch.testing.assert_close(output_of(model, inputs), output_of(dense, inputs))
    losses = [m(**inputs, labels=IDS).loss for m in (model, dense)]
    for loss in losses:
        loss.backward()
    mine = model.model.layers[0].mlp.experts
    theirs = dense.model.layers[0].mlp.experts
    for part in ("gate_up_proj", "down_proj"):
        whole = getattr(theirs, part).grad
        sparse, rest = (mine.get_submodule(f"{i}.{part}").weight for i in (1, 0))
        blocks = whole[1].unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 2).reshape(-1, 4, 4)
        torch.testing.assert_close(sparse.values.grad, blocks)
        torch.testing.assert_close(rest.grad, whole[0])
    # Saved by transformers and by Rarefy, and sparsified while it loads; pickled; and back again.
    for saved in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        saved.save_pretrained(tmp_path / "sparse")
        assert_same(model, kind.from_pretrained(tmp_path / "sparse"))
    rarefy.save_file(model, tmp_path / "file.safetensors")
    other = kind(config).eval()
    rarefy.load_file(other, tmp_path / "file.safetensors")
    assert_same(model, other)
    other = kind(config).eval()
    rarefy.load_state_dict(other, model.state_dict())
    assert_same(model, other)
    made = kind.from_pretrained(
        tmp_path / "dense", quantization_config=RarefyConfig({EXPERTS: "block:4x4@nonzero"})
    )
    assert_same(model, made)
    rarefy.desparsify(model)
    assert_same(model, kind.from_pretrained(tmp_path / "dense"))
    assert torch.equal(output_of(model, inputs), output_of(dense, inputs))


@pytest.mark.skipif(VERSION < "5", reason="each expert is three layers there")
def test_experts_of_a_file_that_does_not_fit_stay_as_they_were(tmp_path):
    kind, config, _, _ = architecture("mixtral")
    model, other = kind(config), kind(config)
    rarefy.sparsify(model, {EXPERTS: "block:4x4@0.5"}, measure=False)
    state = model.state_dict()
    del state["lm_head.weight"]
    before = copy.deepcopy(other)
    parameter = other.model.layers[0].mlp.experts.gate_up_proj
    with pytest.raises(ValueError, match="every tensor of the model must be there; got none for lm_head"):
        rarefy.load_state_dict(other, state)
    assert_same(other, before)
    assert other.model.layers[0].mlp.experts.gate_up_proj is parameter


class _Experts(torch.nn.Module):
    """Experts as transformers has them, of no architecture."""

    __module__ = "transformers.models.made_up"

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(count, 16, 4))
        self.down_proj = torch.nn.Parameter(torch.randn(count, 4, 8))
        self.act_fn = torch.nn.SiLU()


def test_experts_come_back_whatever_has_become_of_their_layers():
    from rarefy.experts import unpacked

    model = torch.nn.ModuleDict({"experts": _Experts(3)})
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="in between"), unpacked(model, ["experts.0.down_proj.weight"]):
        expert = getattr(model["experts"], "0")
        expert.down_proj = BlockSparseLinear.from_dense(expert.down_proj, "block:4x4@0.5")
        raise RuntimeError("in between")
    assert type(model["experts"]) is _Experts and not hasattr(model["experts"], "stands_for")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)
    assert [name for name, _ in model["experts"].named_children()] == ["act_fn"]


def test_experts_are_known_by_their_class_not_compared_with_one_another(monkeypatch):
    from rarefy.integrations import on_the_fly

    def equal(self, other):
        raise AssertionError("a pair of layers was compared: their number squared, of hundreds of experts")

    monkeypatch.setattr(on_the_fly.ExpertLayer, "__eq__", equal)
    model = torch.nn.ModuleDict({"experts": _Experts(5).to("meta"), "plain": torch.nn.Linear(8, 8)})
    loading = on_the_fly.SparsifyOnLoad(model, "block:4x4@0.5", tokens=1, mapped=False)
    assert loading.wants("experts.down_proj") and loading.wants("plain.weight")
