"""Which of several choices each layer gets, so that together they keep to a budget and lose least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..checks import fail

_BUCKETS = 4096  # of what is spent above the least possible: in each the least loss goes on


def choose(
    costs: Sequence[Sequence[float]], losses: Sequence[Sequence[float]], budget: float, unit: str
) -> list[int]:
    """One choice for each layer: Σ cost ≤ budget, Σ loss least (a multiple-choice knapsack).

    Args:
        costs: of each layer's choices, ≥ 0.
        losses: of the same.
        budget: what all may cost together; never exceeded.
        unit: of costs, for messages.

    Layer by layer, over what was spent so far: of the sums that fall into one of _BUCKETS buckets the one of
    least loss goes on, with its exact cost. So it is exact where no two sums of different cost share one.

    Raises ValueError for a budget below the least cost, which the message names.
    """
    least = sum(min(row) for row in costs)
    if not budget >= least:
        fail(
            "allocate", f"the budget must be at least {least:g} {unit}, the least that can be", f"{budget:g}"
        )
    room = budget - least
    limit, width = room + 1e-12 * abs(budget), room / _BUCKETS or 1.0
    spent, lost = np.zeros(1), np.zeros(1)
    steps: list[
        tuple[np.ndarray, np.ndarray]
    ] = []  # of each sum that goes on: where from, and what is chosen
    for row, loss in zip(costs, losses, strict=True):
        extra = np.asarray(row, dtype=float) - min(row)
        sums, total = (np.add.outer(a, b).ravel() for a, b in ((spent, extra), (lost, np.asarray(loss))))
        fits = np.flatnonzero(sums <= limit)
        bucket = (sums[fits] / width).astype(np.int64)
        fits = fits[np.lexsort((sums[fits], total[fits], bucket))]
        bucket = (sums[fits] / width).astype(np.int64)
        kept = fits[np.r_[True, bucket[1:] != bucket[:-1]]]
        spent, lost = sums[kept], total[kept]
        steps.append((kept // len(row), kept % len(row)))
    at, chosen = int(np.lexsort((spent, lost))[0]), []
    for origin, choice in reversed(steps):
        chosen.append(int(choice[at]))
        at = int(origin[at])
    return chosen[::-1]
