"""State dicts with an entry changed or gone; the original stays as it is."""

from __future__ import annotations

import copy
from typing import Any


def with_entry(state: Any, value: Any, *path: Any) -> Any:
    """A copy in which the entry at the end of a path of keys is `value`."""
    changed = copy.deepcopy(state)
    _holder(changed, path)[path[-1]] = value
    return changed


def without_entry(state: Any, *path: Any) -> Any:
    """A copy without the entry at the end of a path of keys."""
    changed = copy.deepcopy(state)
    del _holder(changed, path)[path[-1]]
    return changed


def _holder(state: Any, path: tuple) -> Any:
    for key in path[:-1]:
        state = state[key]
    return state
