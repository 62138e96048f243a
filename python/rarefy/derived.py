"""What kernels derive from a weight, beyond its plan: asked for, made and kept for one weight and dtype of x.

`prepared` follows from the pattern, which keeps it; `packed` from the values too, and is kept with the data
pointer and version that it was made of. Both are never saved. One of each serves all products and any number
of tokens: a kernel that they are not for ignores them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _load

Derived = tuple[Tensor | None, Tensor | None, int]  # prepared, packed, key: the last arguments of a product

_sizes, _prepare, _pack = map(_load.op, ("bsr_derived_sizes", "bsr_prepare", "bsr_pack"))


class Kept:
    """What is derived from one weight for x of one dtype."""

    __slots__ = ("_arguments", "_packed", "key", "packed_bytes", "prepared")

    def __init__(self, pattern: Any, values: Tensor, x_dtype: torch.dtype, stored: bool = True) -> None:
        """Asks what the best kernel wants and prepares; `values` as (nnzb, R, C). Packs nothing yet.

        With `stored` False the product does not read values as they are but cast to x_dtype in each call.
        """
        n, k = pattern.shape
        with torch.inference_mode(False), torch.no_grad():
            if not stored:
                values = torch.empty_like(values, dtype=x_dtype)
            arguments = ("linear", values, pattern.plan, n, k, x_dtype)
            self.key, prepared_bytes, self.packed_bytes = _sizes(*arguments)
            if self.packed_bytes and not stored:
                self.key = 0
            self.prepared = None
            if self.key and prepared_bytes:
                self.prepared = pattern.prepared(self.key, lambda: _prepare(*arguments))
        self._arguments = (pattern.plan, self.prepared, n, k, x_dtype)
        self._packed: tuple[tuple[int, int] | None, Tensor | None] = (None, None)  # of what, or seen once

    def current(self, parameter: Tensor, values: Tensor, now: bool = False) -> Derived | tuple[()]:
        """What a call with these values may use.

        Values that changed are packed at the second call with them, as a training step changes them after
        each; `now` does it at once.
        """
        if not self.packed_bytes:
            return self.of_pattern()
        if parameter.is_inference() or capturing(parameter):
            return ()  # nothing counts the changes of such values, nor those between replays
        at = (parameter.data_ptr(), parameter._version)
        seen, packed = self._packed
        if seen != at:
            packed = None
        if packed is None and (now or seen == at):
            with torch.inference_mode(False), torch.no_grad():
                packed = _pack("linear", values.detach(), *self._arguments)
        self._packed = (at, packed)
        return (self.prepared, packed, self.key) if packed is not None else ()

    def of_pattern(self) -> Derived | tuple[()]:
        """What a call may use whatever the values are, where nothing is packed."""
        return (self.prepared, None, self.key) if self.key else ()

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return sum(t.numel() for t in (self.prepared, self._packed[1]) if t is not None)


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what is made then belongs to the graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def dtype_of_product(x: Tensor) -> torch.dtype:
    """The dtype that a product computes in: that of x, or autocast's."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
