"""What is in use and why: versions, machine, and the kernel that each product would run."""

from __future__ import annotations

import json
from typing import Any

import torch

from . import _load, chain
from .activations import NONE, check_activation
from .checks import DTYPE_NAMES, check_block_shape, check_int, check_tensor, fail
from .watched_pattern import forget_derived

__version__ = "0.1.0"

_ACTIVATIONS = {"gelu": "gelu_erf"}  # the core's names, where they are not torch's


def backend_info(block_shape: tuple[int, int] = (32, 32), tokens: int = 1024) -> dict[str, Any]:
    """Return what Rarefy would run on this machine, and why.

    Args:
        block_shape: (rows, cols) of the blocks that the reported kernels are selected for.
        tokens: rows of x that they are selected for; :func:`explain` answers for a layer and an input.

    Returns:
        ``version``, ``torch`` (its version), ``library`` (path, or None) and ``problem`` (None, or why the
        compiled library is not loaded and what to do); when it is loaded also ``threads`` (torch's intra-op
        threads), ``cpu``, ``cpu_features``, ``machine`` (caches and vectors, one line), ``cuda_built``,
        ``cuda_devices``, ``forced_impl`` (see :func:`force_impl`; or None) and ``kernels``: a list of
        ``{op, dtype, device, kernel, why}``.

    Raises:
        ValueError: block_shape is not two integers of at least 1, or tokens is below 1.
    """
    rows, cols = check_block_shape("backend_info", block_shape)
    tokens = check_int("backend_info", "tokens", tokens, 1)
    info: dict[str, Any] = {
        "version": __version__,
        "torch": torch.__version__,
        "library": str(_load.LIBRARY) if _load.problem is None else None,
        "problem": _load.problem,
    }
    if _load.problem is None:
        built = json.loads(torch.ops.rarefy.backend_info(rows, cols, tokens))
        info |= {"version": built.pop("version"), "threads": torch.get_num_threads(), **built}
    return info


def explain(
    layer: Any, x: torch.Tensor, *, op: str = "linear", activation: str | None = None
) -> dict[str, Any]:
    """Return which kernel runs this layer on this input, in which configuration, and why no other.

    Args:
        layer: a BlockSparseLinear, a weight, or the layers (up, down) or (up, gate, down) of a network, for
            the op that it runs as once fused (rarefy.fuse).
        x: (…, K), as for the layer; its values do not matter, its strides do: `x.t()` of a (K, tokens)
            tensor is read in place by some kernels, and copied for the others.
        op: "linear", "grad_input" or "grad_weight"; for the gradients, of an output of x. Not for networks.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None: after the layer, or in the network. Default:
            the layer's own, a network's that of its gate or of up.

    Returns:
        ``problem`` (one line: op, weight, tokens, dtypes, device, threads), ``kernel`` (None when none fits,
        and ``why_none`` says so), ``config`` (its tuning choices, "scatter=0 vectors=4 …"), ``workspace``
        (bytes of working memory a call takes), ``aligned_copies`` (of them: copies of matrices whose rows are
        no multiple of 16 bytes, on a GPU) and ``candidates``: ``{kernel, family, chosen, why_not}`` in
        order of preference; ``why_not`` is empty for those that could run too. ``predicted_us`` and
        ``dense_us`` are microseconds of a call and of the dense product by cuBLAS, as predicted for a Hopper
        GPU in bfloat16 and float16, else None (for the CPU: rarefy.advise). A network whose layers run one by
        one for x has no ``kernel`` and the reason as ``why_none``.

    Raises:
        ValueError: x's last dimension is not K; layers do not fit each other; op or activation is unknown.
        TypeError: arguments of the wrong kind or dtype.
        ImportError: the compiled library is missing.
    """
    if activation is None:  # a network's is that of its gate, or of up
        network = isinstance(layer, tuple | list) and len(layer) > 1
        activation = getattr(layer[-2] if network else layer, "activation", None)
    name = _ACTIVATIONS.get(check_activation("explain", activation), activation or NONE)
    if isinstance(layer, tuple | list):
        return _explain_network(layer, x, op, name)
    weight = getattr(layer, "weight", layer)
    if not all(hasattr(weight, name) for name in ("shape", "block_shape", "nnzb", "values")):
        fail("explain", "layer must be a BlockSparseLinear or its weight", type(layer).__name__, TypeError)
    check_tensor("explain", "x", x)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        fail("explain", f"x's last dimension must be in_features={weight.shape[1]}", tuple(x.shape))
    if x.dtype not in DTYPE_NAMES:
        fail("explain", "x must be float64, float32, bfloat16 or float16", x.dtype, TypeError)
    if _load.problem is not None:
        raise ImportError(_load.problem)
    try:
        at_hand = weight.derived(x) if x.device == weight.device and hasattr(weight, "derived") else ()
    except RuntimeError:  # of no kernel that is allowed: why_none says so below
        at_hand = ()
    derived = at_hand[2] if at_hand else 0
    return json.loads(
        torch.ops.rarefy.explain(
            op,
            *weight.shape,
            *weight.block_shape,
            weight.nnzb,
            getattr(weight, "core_dtype", DTYPE_NAMES[weight.values.dtype]),
            DTYPE_NAMES[x.dtype],
            x.shape[:-1].numel(),
            op == "linear" and getattr(layer, "bias", None) is not None,
            name if op == "linear" else NONE,
            x.device.type,
            x.device.index or 0,
            derived,
            *_rows(x),
        )
    )


def _rows(x: torch.Tensor) -> tuple[int, bool]:
    """How far apart rows of x as a matrix lie, or its columns if it lies by feature; a copy's if neither."""
    matrix = torch.empty_strided(x.shape, x.stride(), device="meta").reshape(-1, x.shape[-1])
    row, column = matrix.stride()
    if matrix.shape[0] == 0 or x.shape[-1] <= 1 or column == 1:
        return row, False
    return (column, True) if row == 1 else (x.shape[-1], False)


def _explain_network(layers: Any, x: torch.Tensor, op: str, activation: str) -> dict[str, Any]:
    requirement = "layer must be a BlockSparseLinear, or a network's (up, down) or (up, gate, down)"
    weights = [getattr(layer, "weight", None) for layer in layers]
    if len(weights) not in (2, 3) or not all(hasattr(weight, "nnzb") for weight in weights):
        fail("explain", requirement, [type(layer).__name__ for layer in layers], TypeError)
    if op != "linear":
        fail("explain", 'op must be "linear" for a network', repr(op))
    check_tensor("explain", "x", x)
    (up, *gate, down), dtype = weights, weights[0].values.dtype
    if x.ndim == 0 or x.shape[-1] != up.shape[1]:
        fail("explain", f"x's last dimension must be in_features={up.shape[1]}", tuple(x.shape))
    shapes = [weight.shape for weight in (up, *gate)]
    if len(set(shapes)) > 1 or down.shape[1] != up.shape[0]:
        fail("explain", "up and gate must be alike, and down must take what they make", [*shapes, down.shape])
    if x.dtype not in DTYPE_NAMES:
        fail("explain", "x must be float64, float32, bfloat16 or float16", x.dtype, TypeError)
    if _load.problem is not None:
        raise ImportError(_load.problem)
    network = (layers[0], layers[1] if gate else None, layers[-1])
    key, why = chain.network_key(*network, x)
    rounding = " rounding x" if chain.rounds(*network) else ""
    found = json.loads(
        torch.ops.rarefy.explain_feed_forward(
            down.shape[0],
            *up.shape,
            *(size for w in (up, gate[0] if gate else None, down) for size in _blocks(w)),
            up.core_dtype if dtype == torch.int8 else DTYPE_NAMES[dtype] + rounding,
            DTYPE_NAMES[x.dtype],
            x.shape[:-1].numel(),
            any(getattr(layer, "bias", None) is not None for layer in layers),
            activation,
            x.device.type,
            x.device.index or 0,
            key,
        )
    )
    if why is None:
        return found
    candidates = [candidate | {"chosen": False} for candidate in found["candidates"]]
    return found | {"kernel": None, "config": None, "why_none": why, "candidates": candidates}


def _blocks(weight: Any) -> tuple[int, int, int]:
    return (0, 0, 0) if weight is None else (*weight.block_shape, weight.nnzb)


def force_impl(forced: str) -> str:
    """Narrow the choice of kernels in this process; return what was forced before.

    Args:
        forced: families by device, "cpu:avx2,cuda:simt"; a family alone goes to its own device; "" lifts all.
            A kernel with tuning choices in parentheses, "avx2_linear(vectors=2)" or "avx2_linear()", goes
            before the others wherever it fits, with those choices. The environment variable
            RAREFY_FORCE_IMPL says the same before the first call.

    Raises:
        RuntimeError: a family that this build does not have; the message lists those that it has.
        ImportError: the compiled library is missing.
    """
    if _load.problem is not None:
        raise ImportError(_load.problem)
    before = torch.ops.rarefy.force_impl(forced)
    forget_derived()
    return before
