"""examples/roberta_from_scratch.py: the counts of its full model, and its small one trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rarefy
from examples import roberta_from_scratch as example


def test_the_full_model_has_84_and_68_million_parameters():
    """On the meta device the patcher would find no values: the counts are reckoned from the sizes."""
    full = example.FULL
    assert round(full.dense / 1e6) == 84 and round(full.sparse / 1e6) == 68
    blocks = full.layers * (full.hidden**2 + 2 * full.hidden * full.inner) // 2
    assert full.dense - full.sparse == blocks


@pytest.mark.timeout(300)
def test_the_small_model_trains_with_trainer_and_its_blocks_move(tmp_path, capsys, one_thread):
    words = ["the", "small", "red", "fox", "saw", "a", "big", "bird", "near", "an", "old", "tree"]
    generator = torch.Generator().manual_seed(0)
    lines = [
        " ".join(words[i] for i in torch.randint(len(words), (8,), generator=generator).tolist())
        for _ in range(400)
    ]
    (tmp_path / "text").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    start = [
        m.block_mask() for m in example.SparseOptimizer.sparse_objects(example.sparse_model(example.SMALL))
    ]
    arguments = f"--small --steps 60 --batch 8 --every 10 --part 0.3 --text {tmp_path / 'text'} --out {out}"
    assert example.main(arguments.split()) == 0
    assert "202,344 parameters dense, 165,480 at density 0.5" in capsys.readouterr().out
    model = example.sparse_model(example.SMALL)
    rarefy.load_file(model, out)
    end = [m.block_mask() for m in example.SparseOptimizer.sparse_objects(model)]
    assert not all(map(torch.equal, start, end))
    assert [int(m.sum()) for m in start] == [int(m.sum()) for m in end] == [2, 8, 8] * 2
    with pytest.raises(SystemExit):
        (tmp_path / "text").write_text("\n", encoding="utf-8")
        example.main(arguments.split())
