"""Gradients where nothing is stored: seen at a layer's call, and reduced to one norm a block in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..activations import activation_gradient
from ..checks import fail
from ..masks import grid_of
from ..ops import bsr_grad_weight
from ..pattern import BsrPattern

_PIECE = 2**22  # elements of the gradient that exist at a time: 16 MB in float32


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def gradient_norms(
    dy: torch.Tensor, x: torch.Tensor, block_shape: tuple[int, int], *, piece: int = _PIECE
) -> torch.Tensor:
    """The L2 norm of each block of dYᵀX, the gradient of a whole weight; (⌈N/R⌉, ⌈K/C⌉) on x's device.

    The gradient exists in pieces of whole block rows, of about `piece` elements, one after the other.

    Args:
        dy: (tokens, N), the gradient of a layer's output.
        x: (tokens, K), its input. Both of any float dtype: sums are in float32, or float64.
        block_shape: (R, C).
        piece: see above.

    Raises ValueError for dy and x of different tokens.
    """
    if dy.ndim != 2 or x.ndim != 2 or len(dy) != len(x):
        got = f"{tuple(dy.shape)} and {tuple(x.shape)}"
        fail("gradient_norms", "dy must be (tokens, N) and x (tokens, K)", got)
    (n, k), (r, c) = (dy.shape[1], x.shape[1]), block_shape
    grid = grid_of((n, k), block_shape)
    x = _wide(x)
    squares = x.new_zeros(grid)
    step = max(1, piece // max(1, r * k))  # block rows
    for first in range(0, grid[0], step):
        rows = slice(first * r, min((first + step) * r, n))
        part = (_wide(dy[:, rows]).mT @ x).square_()
        lots = -(-len(part) // r)
        if r > 1:
            part = nn.functional.pad(part, (0, 0, 0, lots * r - len(part))).view(lots, r, k).sum(1)
        if c > 1:
            part = nn.functional.pad(part, (0, grid[1] * c - k)).view(lots, grid[1], c).sum(2)
        squares[first : first + lots] = part
    return squares.sqrt_()


@torch.no_grad()
def candidate_norms(
    dy: torch.Tensor, x: torch.Tensor, block_shape: tuple[int, int], candidates: torch.Tensor
) -> torch.Tensor:
    """gradient_norms of some blocks, bool (⌈N/R⌉, ⌈K/C⌉), and −∞ for the others; only those are computed."""
    shape = (dy.shape[1], x.shape[1])
    pattern = BsrPattern.from_mask(candidates, shape=shape, block_shape=block_shape).to(x.device)
    dtype = torch.promote_types(dy.dtype, x.dtype)  # under autocast dY is the narrower one
    dy, x = (tensor.to(dtype).contiguous() for tensor in (dy, x))
    blocks = bsr_grad_weight(dy, x, pattern.plan, *block_shape, *shape)
    norms = torch.linalg.vector_norm(_wide(blocks).flatten(1), dim=1)
    grid = norms.new_full(candidates.shape, -torch.inf)
    grid.view(-1)[pattern.positions()] = norms
    return grid


_eager, _watches = ExitStack(), 0  # of all models; torch has one stance


def _run_as_written(more: int) -> None:
    """Compiled models run as they are written while any Watch is open."""
    global _watches
    before, _watches = _watches, _watches + more
    if before == 0:
        _eager.enter_context(torch.compiler.set_stance("force_eager"))
    elif _watches == 0:
        _eager.close()


@torch.no_grad()
def _of_product(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of a layer's product, where dy is that of its output, which an activation may have made.

    The product is computed again: a layer that fuses its activation leaves none.
    """
    activation = getattr(layer, "activation", None)
    if activation is None:
        return dy
    weight = layer.weight
    with torch.autocast(x.device.type, enabled=False):
        dtype = weight.x_dtype or weight.dtype
        product = weight.linear(x.to(dtype), layer.bias)
    return activation_gradient(dy.to(product.dtype), product, activation)


class Watch:
    """Keeps what layers get and what comes back to their products, from now until `close`.

    Several calls of a layer, in one pass or in several micro-batches, count together, as in its gradient.
    What is kept: X and dY of every call, (tokens, K) and (tokens, N), by reference. Until then compiled
    models run as they are written: what torch.compile made before does not ask for hooks.
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        self._seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._handles = [module.register_forward_hook(self._hook(key)) for key, module in layers]
        _run_as_written(1)

    def _hook(self, key: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            if not (torch.is_grad_enabled() and args and output.requires_grad):
                return
            x = args[0].detach()

            def seen(dy: torch.Tensor) -> None:
                dy = _of_product(module, x, dy.detach())
                pair = (dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
                self._seen.setdefault(key, []).append(pair)

            output.register_hook(seen)

        return hook

    def pairs(self, key: int, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All dY, (tokens, N), and X, (tokens, K), of a layer; with `tokens` every so many that these stay.

        None if no gradient came.
        """
        pairs = self._seen.get(key)
        if pairs is None:
            return None
        dy, x = pairs[0] if len(pairs) == 1 else map(torch.cat, zip(*pairs, strict=True))
        every = 1 if tokens is None else -(-len(x) // tokens)
        return dy[::every], x[::every]

    def close(self) -> None:
        """Leaves the layers alone, and drops what was seen; once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        _run_as_written(-1)
