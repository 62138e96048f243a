"""Fixtures of the Python suite: the devices at hand, and one seed for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch: threads that wait sleep. Else two workers' four threads spin on two cores for most of their
# time, and the suite takes 14 minutes instead of 8.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import rarefy
from rarefy import chain, predictor
from rarefy.predictor import Case, terms


def _devices() -> list[str]:
    info = rarefy.backend_info()
    usable = info["problem"] is None and info["cuda_built"] and torch.cuda.is_available()
    return ["cpu", "cuda"] if usable else ["cpu"]


def pytest_report_header() -> str:
    return f"rarefy on: {', '.join(_devices())}; problem: {rarefy.backend_info()['problem']}"


@pytest.fixture
def forced():
    """Forces families until the test ends."""
    before = rarefy.backend_info()["forced_impl"] or ""
    yield rarefy.force_impl
    rarefy.force_impl(before)


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of thousands of tiny calls: threads win nothing there, and cost most on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_networks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """fuse: networks run as one op however little work they are."""
    monkeypatch.setattr(chain, "_WORK", dict.fromkeys(chain._WORK, 0))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """A machine whose times follow from the terms exactly; the list has every case that was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(predictor, "_known", {})
    measured = []

    def measure(case: Case) -> float:
        measured.append(case)
        # A dense product costs 1 ps, one of a sparse layer 1.5 ps, anything else 0.01 ps, a call 5 µs.
        first, work, *rest = terms(case, torch.get_num_threads())
        return 5e-6 * first + (1e-12 if case.block is None else 1.5e-12) * work + 1e-14 * sum(rest)

    monkeypatch.setattr(predictor, "measure", measure)
    monkeypatch.setattr(predictor, "queued", lambda: 0.0)
    monkeypatch.setattr(predictor, "_reading_costs", lambda _case: [1e-11, 2e-11, 4e-11])  # 100 to 25 GB/s
    return measured
