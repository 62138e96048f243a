"""What Rarefy says while it works: lines of a log, progress bars, and ranges for profilers.

The logger is "rarefy" of logging, which is silent until somebody listens. RAREFY_LOG=info (or debug, warning)
in the environment prints its lines to stderr; nothing else is ever written, and no file.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from .checks import fail

logger = logging.getLogger("rarefy")
logger.addHandler(logging.NullHandler())

T = TypeVar("T")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


def set_up(level: str | None) -> None:
    """Prints lines of this level and above to stderr; None or "": nothing. RAREFY_LOG says it at import."""
    if not level:
        return
    if level.lower() not in _LEVELS:
        fail("rarefy", f"RAREFY_LOG must be one of {', '.join(_LEVELS)}", repr(level))
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s rarefy %(levelname)s: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[level.lower()])
    logger.propagate = False  # or a root logger would print it again


def progress(items: Iterable[T], text: str, unit: str = "layer", total: int | None = None) -> Iterable[T]:
    """The items, with a bar on a terminal for what takes more than a second."""
    return tqdm(items, desc=text, unit=unit, total=total, delay=1, leave=False, disable=None)


@contextlib.contextmanager
def growing(path: Path, total: int, text: str) -> Iterator[None]:
    """A bar on a terminal for a file that somebody writes, `total` bytes in the end; none for small ones."""
    if total < _LARGE or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    bar = tqdm(total=total, desc=text, unit="B", unit_scale=True, delay=1, leave=False)

    def watch() -> None:
        while not done.wait(0.2):
            with contextlib.suppress(OSError):  # it may be replaced just now
                bar.update(path.stat().st_size - bar.n)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        bar.close()


_LARGE = 2**27  # bytes that take less than a second to write


@contextlib.contextmanager
def nvtx(model: nn.Module) -> Iterator[nn.Module]:
    """Within it, each sparse layer of a model is a range for Nsight Systems, by its name, shape and format.

    with rarefy.nvtx(model): model(x)

    Raises RuntimeError where torch has no NVTX (a build without CUDA).
    """
    from .layers import SPARSE

    mark: Any = torch.cuda.nvtx
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, SPARSE):
            n, k = layer.weight.shape
            text = f"{name}: {n}x{k} {layer.weight.spec_format()}@{layer.weight.density:.3g}"
            begin = functools.partial(_begin, mark, text)
            handles.append(layer.register_forward_pre_hook(begin))
            handles.append(layer.register_forward_hook(functools.partial(_end, mark), always_call=True))
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


def _begin(mark: Any, text: str, *_: object) -> None:
    mark.range_push(text)  # what it returns would take the place of the inputs


def _end(mark: Any, *_: object) -> None:
    mark.range_pop()


set_up(os.environ.get("RAREFY_LOG"))
