"""Checkpoints of a Sparsifier: runs that go on bit for bit, copies, state dicts that are refused."""

from __future__ import annotations

import copy
import runpy
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from prune_models import Net, batch, observed, same_state
from rarefy.prune import Sparsifier
from states import with_entry, without_entry

RUN = """
import sys, torch
from torch import nn
from rarefy.prune import Sparsifier

def start(criterion, in_place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier = Sparsifier(0.8, criterion, "block:3x2", schedule="cubic:2:30:3", in_place=in_place, seed=3)
    sparsifier.prepare(model)
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier

def run(parts, begin, end):
    model, optimizer, sparsifier = parts
    for t in range(begin, end):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    return [part.state_dict() for part in parts]

RUNS = [("random", True), ("movement", False)]
if __name__ == "__main__":
    results = []
    for settings, states in zip(RUNS, torch.load(sys.argv[1])):
        parts = start(*settings)
        for part, state in zip(parts, states):
            part.load_state_dict(state)
        results.append(run(parts, 17, 40))
    torch.save(results, sys.argv[2])
"""


@pytest.mark.timeout(300)  # a new process imports torch: a minute on a machine that is busy
def test_a_run_goes_on_bit_for_bit_in_a_new_process(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    here = runpy.run_path(str(script))
    whole = [here["run"](here["start"](*settings), 0, 40) for settings in here["RUNS"]]
    first = [here["run"](here["start"](*settings), 0, 17) for settings in here["RUNS"]]
    torch.save(first, tmp_path / "first.pt")
    arguments = [sys.executable, script, tmp_path / "first.pt", tmp_path / "second.pt"]
    subprocess.run(arguments, check=True, timeout=280)
    assert whole[0][2]["clock"] == 40
    assert same_state(whole, torch.load(tmp_path / "second.pt"))


def test_a_state_dict_is_a_copy_and_is_not_changed():
    first, second = Sparsifier(0.5, "snip"), Sparsifier(0.5, "snip")
    a, b = Net(), Net()
    first.prepare(a)
    second.prepare(b)
    observed(first, a)
    first.step()
    state = first.state_dict()
    kept = copy.deepcopy(state)
    second.load_state_dict(state)
    assert same_state(state, kept)
    state["state"]["up.weight"]["mask"]["bits"].zero_()
    assert first.masks()["up.weight"].any() and second.masks()["up.weight"].any()
    assert torch.equal(second.masks()["up.weight"], first.masks()["up.weight"])
    assert torch.equal(b.up.parametrizations.weight[0].mask, first.masks()["up.weight"])
    assert kept["state"]["up.weight"]["mask"]["bits"].numel() == 30 * 2  # a bit a weight
    assert second.defaults == first.defaults


def test_a_squashed_run_goes_on():
    first, second = (Sparsifier(0.5) for _ in range(2))
    first.prepare(a := Net())
    first.step()
    first.squash_mask()
    second.prepare(b := Net())
    second.load_state_dict(first.state_dict())
    b.load_state_dict(a.state_dict())
    optimizer = torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)
    second.attach(optimizer)
    b(batch()).sum().backward()
    optimizer.step()
    second.step()
    assert torch.equal(b.up.weight != 0, first.masks()["up.weight"])


def test_state_dicts_of_others_are_refused():
    one = Sparsifier(0.5)
    one.prepare(Net())
    state = one.state_dict()

    def load(model, state, **options):
        sparsifier = Sparsifier(0.5, **options)
        sparsifier.prepare(model)
        with pytest.raises(ValueError) as error:
            sparsifier.load_state_dict(state)
        return str(error.value)

    assert "must be of the same weights; got 0.weight" in load(nn.Sequential(nn.Linear(4, 4)), state)
    assert "pattern=unstructured instead of 2:4" in load(Net(), state, pattern="2:4")
    assert "must be of a Sparsifier, version 1; got version None" in load(Net(), {})
    other = Net()
    other.down = nn.Linear(40, 10)
    assert "the mask of down.weight must be 10x40; got 10x30" in load(other, state)
    with pytest.raises(ValueError, match=r"prepare\(model\) must be called first"):
        Sparsifier(0.5).load_state_dict(state)


def test_damaged_state_dicts_are_refused_before_anything_changes():
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(Net())
    sparsifier.step()
    state = sparsifier.state_dict()

    damaged, less = partial(with_entry, state), partial(without_entry, state)
    keeps = state["state"]["up.weight"]["mask"]["kept"]
    cases = [
        *((less(key), key) for key in state if key not in ("version", "observed")),
        (less("groups", 0, "tensor_fqn"), "'groups' of state_dict must have 'tensor_fqn', a str; got none"),
        (damaged(None, "groups", 0), "'groups' of state_dict must be a mapping; got NoneType"),
        (damaged(2.0, "groups", 0, "sparsity_level"), r"must be in \[0, 1\]; got 2.0"),
        (damaged(None, "state", "up.weight"), "must have a mask of up.weight; got NoneType"),
        (damaged("2", "settings", "unknown"), "unknown=2 instead of None"),
        (less("settings", "scope"), "scope=None instead of"),
        (damaged(torch.zeros(4, dtype=torch.uint8), "random"), "'random' of state_dict must be the state"),
        (damaged(keeps + 1, "state", "up.weight", "mask", "kept"), f"must keep {keeps} weights"),
        (damaged(-1, "clock"), "'clock' of state_dict must be at least 0; got -1"),
        (damaged(0.5, "levels", "else"), "'levels' of state_dict must be of the same weights; got 'else'"),
        (damaged(1, "observed"), "'observed' of state_dict must be a bool"),
        (damaged(None, "state", "up.weight", "mask", "bits"), "'bits'"),
    ]
    sparsifier.step()
    before = sparsifier.state_dict()
    for bad, text in cases:
        with pytest.raises(ValueError, match=rf"\[load_state_dict\] .*{text}"):
            sparsifier.load_state_dict(bad)
        assert sparsifier.clock == 2 and torch.equal(sparsifier.random.get_state(), before["random"])
    assert sparsifier.state_dict()["levels"] == before["levels"]
    sparsifier.load_state_dict(state)
    assert sparsifier.clock == 1


def test_a_sparsifier_copies():
    sparsifier = Sparsifier(0.5, "random")
    sparsifier.prepare(Net())
    sparsifier.attach(torch.optim.SGD(sparsifier._model.parameters(), lr=0.1))
    other = copy.deepcopy(sparsifier)
    sparsifier.step()
    other.step()
    assert same_state(sparsifier.state_dict(), other.state_dict())


def test_state_dicts_that_are_damaged_are_refused():
    def damaged(change) -> str:
        first, second = Sparsifier(0.5), Sparsifier(0.5)
        model = Net()
        for sparsifier, net in ((first, Net()), (second, model)):
            sparsifier.prepare(net)
            sparsifier.step()
        before, state = second.state_dict(), first.state_dict()
        change(state)
        with pytest.raises((ValueError, TypeError)) as caught:
            second.load_state_dict(state)
        assert same_state(second.state_dict(), before)
        return str(caught.value)

    assert "must have 'groups', a list; got none" in damaged(lambda s: s.pop("groups"))
    assert "must have 'random', a Tensor; got int" in damaged(lambda s: s.update(random=3))
    assert "must have a mask of up.weight" in damaged(lambda s: s["state"].pop("up.weight"))
    assert "must have a mask of up.weight" in damaged(lambda s: s["state"]["up.weight"].pop("mask"))
    mask = "up.weight"
    assert "must have 'bits'" in damaged(lambda s: s["state"][mask]["mask"].pop("bits"))

    def floats(state) -> None:
        state["state"][mask]["mask"]["bits"] = state["state"][mask]["mask"]["bits"].float()

    assert "the mask of up.weight must be uint8" in damaged(floats)
