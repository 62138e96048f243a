"""bench/moving_digits.py: what counts as the order of the literature, its record, and a short run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import moving_digits  # noqa: E402

FIRST = {"gradual": 96.9, "rigl": 96.3, "set": 95.3, "static": 95.1}
MEANS = FIRST | {"rigl4": 96.601, "set4": 96.2, "static4": 95.8}


def test_the_record_is_of_five_seeds_in_the_order_of_the_literature() -> None:
    record = json.loads((ROOT / "bench/results/pruning/moving_digits.json").read_text(encoding="utf-8"))
    settings, found = record["settings"], record["accuracy"]
    assert settings["density"] == 0.02 and found.keys() == set(moving_digits.METHODS)
    assert all(len(result["points"]) == 5 for result in found.values())
    mean = {method: sum(result["points"]) / 5 for method, result in found.items()}
    assert moving_digits.ordered(mean)
    # By operations: weights stored times steps, gradual magnitude's at 0.28 of all on average.
    longer = settings["longer"]["steps"] * settings["density"]
    assert longer < settings["steps"] * 0.28 / 3


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"rigl4": 96.5}, False),  # 0.4 behind gradual magnitude
        ({"set4": 96.7}, False),
        ({"static4": 96.7}, False),
        ({"set": 96.4}, False),
        ({"static": 96.4}, False),
        ({"rigl4": 97.5, "set4": 97.0}, True),
    ],
)
def test_what_is_in_order(changed: dict[str, float], good: bool) -> None:
    assert moving_digits.ordered(MEANS | changed) is good


@pytest.mark.parametrize("method", moving_digits.METHODS)
def test_each_method_trains(monkeypatch: pytest.MonkeyPatch, one_thread: None, method: str) -> None:
    monkeypatch.setattr(moving_digits, "STEPS", 100)
    assert (
        15 < moving_digits.run(method, 0.1, 0, "uniform") <= 100
    )  # 10 by chance; also that it keeps its density
