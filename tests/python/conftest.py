"""Fixtures of the Python suite: the devices at hand, and one seed for every test."""

from collections.abc import Iterator

import pytest
import torch

import rarefy
from rarefy import chain


def _devices() -> list[str]:
    info = rarefy.backend_info()
    usable = info["problem"] is None and info["cuda_built"] and torch.cuda.is_available()
    return ["cpu", "cuda"] if usable else ["cpu"]


def pytest_report_header() -> str:
    return f"rarefy on: {', '.join(_devices())}; problem: {rarefy.backend_info()['problem']}"


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
    monkeypatch.setattr(chain, "_WORK", 0)
