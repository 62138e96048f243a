"""What is in use and why: versions, machine, and the kernel that each product would run."""

from __future__ import annotations

import json
from typing import Any

import torch

from . import _load

__version__ = "0.1.0"


def backend_info(block_shape: tuple[int, int] = (32, 32)) -> dict[str, Any]:
    """Return what Rarefy would run on this machine, and why.

    Args:
        block_shape: (rows, cols) of the blocks that the reported kernels are selected for.

    Returns:
        ``version``, ``torch`` (its version), ``library`` (path, or None) and ``problem`` (None, or why the
        compiled library is not loaded and what to do); when it is loaded also ``threads`` (torch's intra-op
        threads), ``cpu``, ``cpu_features``, ``cuda_built``, ``cuda_devices``, ``forced_impl`` (the value of
        RAREFY_FORCE_IMPL, or None) and ``kernels``: a list of ``{op, dtype, device, kernel, why}``.

    Raises:
        ValueError: block_shape is not two integers of at least 1.
    """
    if len(block_shape) != 2 or any(not isinstance(n, int) or n < 1 for n in block_shape):
        raise ValueError(f"[backend_info] block_shape must be two integers of at least 1; got {block_shape}")
    info: dict[str, Any] = {
        "version": __version__,
        "torch": torch.__version__,
        "library": str(_load.LIBRARY) if _load.problem is None else None,
        "problem": _load.problem,
    }
    if _load.problem is None:
        built = json.loads(torch.ops.rarefy.backend_info(*block_shape))
        info |= {"version": built.pop("version"), "threads": torch.get_num_threads(), **built}
    return info
