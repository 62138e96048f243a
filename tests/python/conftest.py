"""Fixtures of the Python suite: the devices at hand, and one seed for every test."""

import pytest
import torch

import rarefy


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
