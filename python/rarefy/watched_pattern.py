"""WatchedPattern: a weight with one pattern, and copies of its indices that others may write to."""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import nn
from torch.compiler import is_compiling

from .derived import HoldsDerived, Kept
from .pattern import BsrPattern, digest
from .pattern_state import INDICES
from .sparse_weight import SparseWeight
from .values import zero_padding

PUBLIC = (*INDICES, "pattern_digest")

alive: weakref.WeakSet[WatchedPattern] = weakref.WeakSet()


@torch.compiler.assume_constant_result
def _settle_all() -> bool:
    """What a compiler runs while it traces, since the graph it makes will not look at versions."""
    for weight in list(alive):
        weight._settle()
        if weight._pattern.device.type == "cuda" and "values" in weight._parameters:
            weight.prepare()
    return True


def forget_derived() -> None:
    """Drops what kernels derived from all weights, when the choice of kernels changes."""
    for weight in list(alive):
        weight._kept = {}
        weight._pattern.forget_prepared()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


class WatchedPattern(HoldsDerived, SparseWeight):
    """A weight of `values`, the one Parameter, and a `pattern` that says where they are.

    `pattern` is the one truth about the pattern. The buffers `crow_indices` and `col_indices` are copies
    of it for others: they are saved, and DistributedDataParallel sends those of rank 0 to ranks that drew
    another pattern. Whoever writes to them moves their version counters; the next use of the weight then
    looks at them. A whole pattern with its digest, as DDP brings it, is checked and taken over. Anything
    else (averages, as AveragedModel makes of all buffers, or an edit) is put back, with a warning.
    """

    _pattern: BsrPattern
    _pattern_known: bool

    @property
    def pattern(self) -> BsrPattern:
        """Which blocks are stored; see the class for who may change it."""
        if is_compiling():
            if torch.compiler.is_dynamo_compiling():  # else torch.export traces all that is done here
                _settle_all()
        elif not self._is_settled():
            self._settle()
        return self._pattern

    def _set_pattern(self, pattern: BsrPattern) -> None:
        """Makes `pattern`, on the device of values, the truth, with new copies of its indices as buffers."""
        self._pattern, self._looked_in = pattern, None
        self._kept: dict[torch.dtype | str, Kept] = {}  # what kernels derive, by the dtype of x
        with torch.inference_mode(False):
            crow, col = (index.clone() for index in pattern.indices())
            buffers = (crow, col, digest(crow, col))
        for name, buffer in zip(PUBLIC, buffers, strict=True):
            self.register_buffer(name, buffer, persistent=name in INDICES)
        self._seen()

    def _seen(self) -> None:
        """Remembers that the buffers are what the pattern says, and that padding is zero."""
        buffers = self._buffers
        crow, col = buffers["crow_indices"], buffers["col_indices"]
        # Only then there is something in values to look after.
        values = self._parameters.get("values") if self._pattern.is_padded else None
        self._watched = (crow, _version(crow), col, _version(col))
        self._watched_values = (values, -1 if values is None else _version(values))

    def _is_settled(self) -> bool:
        """Whether nobody wrote to what is watched."""
        return self._indices_are_settled() and (not self._pattern.is_padded or self._padding_is_settled())

    def _indices_are_settled(self) -> bool:
        buffers = self._buffers
        crow, crow_version, col, col_version = self._watched
        return (
            buffers["crow_indices"] is crow
            and buffers["col_indices"] is col
            and crow._version == crow_version  # never inference tensors
            and col._version == col_version
        )

    def _padding_is_settled(self) -> bool:
        values, (seen, version) = self._parameters.get("values"), self._watched_values
        return values is None or (values is seen and _version(values) == version)

    def _settle(self) -> None:
        """Looks at buffers that were written to since the last look, and at padding; see the class."""
        # Not without need: a write between a forward and its backward is an error.
        touched = self._pattern.is_padded and not self._padding_is_settled()
        if not self._indices_are_settled():
            self._settle_indices(self._buffers["crow_indices"], self._buffers["col_indices"])
        if touched:
            self._settle_padding(self._parameters["values"])

    def _settle_indices(self, crow: torch.Tensor, col: torch.Tensor) -> None:
        own = self._pattern
        if type(crow) is not torch.Tensor or type(col) is not torch.Tensor or crow.is_meta or own.is_meta:
            return  # a tracer's stand-ins hold nothing to look at
        if crow.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # looking means waiting, which a capture forbids: the next call outside looks
        if crow.device != own.device:
            own = self._pattern = own.to(crow.device)
            self._kept = {}
        # DDP writes rank 0's buffers over all others before each forward. One look for each DDP module is
        # enough, and more would wait for the GPU in every layer.
        ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if ddp is not None and self._looked_in is not None and self._looked_in() is ddp:
            self._seen()
            return
        self._looked_in = None if ddp is None else weakref.ref(ddp)
        if _equal((crow, col), own.indices()):
            self._seen()
            return
        if torch.equal(digest(crow, col), self._buffers["pattern_digest"]):
            self._pattern = BsrPattern(
                crow, col, shape=self.shape, block_shape=self.block_shape, op=type(self).__name__
            )
            self._kept = {}  # of the pattern before
            self._pattern_known = True
            self._seen()
            return
        self._set_pattern(own)
        warnings.warn(
            f"[{type(self).__name__}] crow_indices and col_indices were written to and are put back: "
            "weight.change_pattern changes a pattern",
            stacklevel=4,
        )

    @torch.no_grad()
    def _settle_padding(self, values: torch.Tensor) -> None:
        if type(values) is nn.Parameter and not values.is_meta:
            zero_padding(self.blocks(values.detach()), self._pattern)
            self._seen()
