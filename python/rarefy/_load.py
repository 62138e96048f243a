"""Loads the compiled ops, once, at import; says in one sentence what to do when that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).parent / "lib" / "librarefy_torch.so"
OLDEST_TORCH = (2, 10)


def _load() -> str | None:
    """Load the library into torch; return None, or why it is not there and what to do."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        return f"rarefy needs torch 2.10 or later; got {torch.__version__}: pip install 'torch>=2.10'"
    if not LIBRARY.exists():
        return (
            f"rarefy's compiled library is missing ({LIBRARY}): "
            "run `make setup` in a source tree, or `pip install rarefy`"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        # torch wraps the loader's error, which says what is wrong.
        reason = error.__cause__ or error
        return f"rarefy's compiled library does not load ({reason}): run `make setup`, or reinstall rarefy"
    return None


problem = _load()


def require() -> None:
    """Raise ImportError with what to do, unless the compiled library is loaded."""
    if problem is not None:
        raise ImportError(problem)


def op(name: str) -> Callable[..., Any]:
    """Return an op of the compiled library, or a function that raises ImportError with what to do."""
    if problem is None:
        return getattr(torch.ops.rarefy, name).default

    def missing(*_args: object) -> Any:
        raise ImportError(problem)

    return missing
