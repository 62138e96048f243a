"""What the GPU's clock and power were while something ran: nvidia-smi in the background, read as it goes."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from typing import NamedTuple

import torch

_EVERY_MS = 50


class Sample(NamedTuple):
    """MHz of the SMs and watts."""

    sm_mhz: float
    watts: float


def current_gpu() -> list[str]:
    """Arguments that name torch's current GPU to nvidia-smi; none where torch does not say."""
    if not torch.cuda.is_available():
        return []
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return [] if uuid is None else ["-i", f"GPU-{uuid}"]


class Clocks:
    """Samples every 50 ms, for as long as it is entered. Where there is no nvidia-smi there are none."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, Sample]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:  # noqa: D105
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", str(_EVERY_MS)]
        try:
            self._process = subprocess.Popen(
                ["nvidia-smi", *current_gpu(), *query],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:  # noqa: D105
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            try:
                sample = Sample(*(float(part) for part in line.split(",")))
            except (ValueError, TypeError):  # "[N/A]", or another number of columns
                continue
            self._samples.append((time.perf_counter(), sample))

    def since(self, begin: float) -> Sample | None:
        """Medians of what came after that time of time.perf_counter()."""
        found = [sample for at, sample in self._samples if at >= begin]
        return Sample(*map(statistics.median, zip(*found, strict=True))) if found else None
