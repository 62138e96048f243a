"""What a state_dict says of a weight on a pattern: read and checked, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checks import check_tensor, fail, first_position
from .pattern import BsrPattern, as_index
from .values import check_padding

INDICES = ("crow_indices", "col_indices")


def read_state(weight: Any, op: str, state_dict: Mapping[str, Any], prefix: str) -> BsrPattern | None:
    """The pattern that a state_dict brings, None for the present one, after all checks."""
    own = weight.pattern
    advice = "rarefy.load_state_dict(model, state_dict) takes a pattern over"
    indices, changed = [], False
    for name, mine in zip(INDICES, own.indices(), strict=True):
        if prefix + name not in state_dict:
            indices.append(mine)
            continue
        index = as_index(op, prefix + name, state_dict[prefix + name])
        indices.append(index)
        requirement = f"{prefix}{name} must be of this module's pattern"
        if index.shape != mine.shape:
            if weight.strict_pattern:
                fail(op, f"{requirement}, {len(mine)} elements ({advice})", len(index))
            changed = True
        elif weight._pattern_known and not index.is_meta:
            differs = index.to(mine.device) != mine
            if not bool(differs.any()):
                continue
            if weight.strict_pattern:
                (at,) = first_position(differs)
                requirement += f", whose {name}[{at}]={int(mine[at])} ({advice})"
                fail(op, requirement, f"{name}[{at}]={int(index[at])}")
            changed = True
    crow, col = (index.to(indices[0].device) for index in indices)
    pattern = None
    if (changed or not weight._pattern_known) and not crow.is_meta:
        pattern = BsrPattern(crow, col, shape=weight.shape, block_shape=weight.block_shape, op=op)
    values = state_dict.get(prefix + "values")
    if values is not None:
        check_tensor(op, prefix + "values", values)
        expected = weight.values_shape(pattern or own)
        if tuple(values.shape) != expected:
            requirement = f"{prefix}values must be of shape {expected} ({advice})"
            fail(op, requirement, tuple(values.shape))
        brought = pattern or own
        if not brought.is_meta:
            check_padding(op, values, brought if values.is_meta else brought.to(values.device))
    elif changed:
        fail(op, f"{prefix}values must come with another pattern", "none")
    return pattern
