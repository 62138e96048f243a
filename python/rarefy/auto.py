"""Auto: specs such as "auto@0.5:any", by which sparsify chooses blocks and dtypes by predicted time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .advice import blocks_for, can_predict, first_of_fastest
from .checks import fail
from .masks import NONZERO, nonzero_blocks
from .predictor import Case, predicted_seconds
from .spec import KEPT, Spec, kept_text, read_kept

ANY = "any"
_MOSTLY = 0.5  # zeros among the weights of a layer that was pruned before
# What layers may store, as specs end and as Case says it, by device and dtype of the layer; the own dtype
# first, and those that round least.
_STORED: dict[tuple[str, torch.dtype], dict[str, dict[str, Any]]] = {
    ("cpu", torch.float32): {
        "f32": {},
        "bf16": {"values": torch.bfloat16},
        "bf16x": {"rounds_x": True},
        "int8": {"int8": True},
    },
    ("cpu", torch.bfloat16): {"bf16": {}, "int8": {"int8": True}},
    ("cuda", torch.bfloat16): {"bf16": {}},
    ("cuda", torch.float16): {"f16": {}},
}
_KNOWN = tuple(dict.fromkeys(word for words in _STORED.values() for word in words))
_FOR = (
    "auto predicts for the CPU in float32 and bfloat16, and for GPUs of compute capability 9.0 in bfloat16 "
    "and float16"
)

_NO_BLOCK = "no block shape that auto knows divides it"

WhyNot = Callable[[Spec], str | None]  # why a layer cannot have a spec


@dataclass(frozen=True)
class Auto:
    """A spec for sparsify: the blocks that are fastest here, or dense where that is faster.

    "auto@0.5" keeps half of the blocks, "auto@nonzero" all that are not zero, so that nothing changes but the
    speed; there single elements count, too, on a CPU. "auto" is the latter where half of a layer's weights or
    more are zero, and else "auto@0.5". A convolution without groups counts as the linear layer of its matrix.

    Values have the layer's dtype. "auto:bf16", "auto@0.5:bf16x" or "auto@nonzero:int8" choose among blocks
    whose values are stored as such a spec of blocks says, and round as it does. ":any" takes what is fastest
    of the layer's own dtype, bf16 and bf16x under float32, and int8; of those that are about as fast the one
    that rounds least. Values of int8 do not train and are finite: ":any" stores them in layers in eval mode
    alone, of finite weights. On a GPU it is the own dtype.
    """

    density: float | str | None
    values: str | None = None

    @staticmethod
    def parse(text: Any, op: str) -> Auto | None:
        """Reads "auto@0.5:any"; None for what does not begin with "auto".

        Raises:
            ValueError: another end, a density outside [0, 1], or values whose times nobody predicts.
        """
        if not isinstance(text, str) or not text.startswith("auto"):
            return None
        match = re.fullmatch(f"auto(?:@{KEPT})?(?::(.*))?", text, re.DOTALL)
        if match is None:
            fail(op, "spec must look like auto, auto@0.5, auto@nonzero, auto:bf16x or auto:any", repr(text))
        kept, values = match.groups()
        if values not in (None, ANY, *_KNOWN):
            fail(op, f"values of auto must be {', '.join(_KNOWN)} or {ANY}", repr(text))
        return Auto(None if kept is None else read_kept(op, kept), values)

    def __str__(self) -> str:  # noqa: D105
        kept = "" if self.density is None else f"@{kept_text(self.density)}"
        return f"auto{kept}" + ("" if self.values is None else f":{self.values}")

    def chosen(
        self, layer: nn.Module, tokens: int, why_not: WhyNot | None = None
    ) -> tuple[Spec | str, tuple[float, float] | None]:
        """What a layer becomes, or why it stays; and the predicted milliseconds of dense and sparse.

        why_not: what the layer says of a spec; default: what specs say of its shape.
        """
        weight = layer.weight
        if isinstance(layer, nn.Conv2d):
            return "auto chooses for convolutions without groups", None
        if not isinstance(layer, nn.Linear):
            return "already block-sparse: auto chooses for dense layers", None
        if not can_predict(weight):
            return _FOR, None
        stored = self._stored(layer)
        if isinstance(stored, str):
            return stored, None
        times = self._times(weight.detach(), tokens, stored, why_not)
        if isinstance(times, str):
            return times, None
        dense = predicted_seconds(_dense(weight, tokens))
        # What is about as fast as the fastest is no reason to stay dense.
        spec = first_of_fastest({spec: its for spec, its in times.items() if its < dense} or times)
        if spec is None:
            return _NO_BLOCK, None
        dense, sparse = 1e3 * dense, 1e3 * times[spec]
        if sparse >= dense:
            found = (
                f"dense is predicted to be faster: {dense:.3f} ms, {spec} {sparse:.3f} ms at {tokens} tokens"
            )
            return found, (dense, sparse)
        return spec, (dense, sparse)

    def _stored(self, layer: nn.Linear) -> dict[str, dict[str, Any]] | str:
        """Ends of specs that come into question, those that round least first, and Case's; or why none."""
        weight = layer.weight
        known = _STORED[weight.device.type, weight.dtype]
        if self.values is None:
            return {"": {}}
        if self.values != ANY:
            if self.values in known:
                return {f":{self.values}": known[self.values]}
            its = str(weight.dtype).removeprefix("torch.")
            of = "a GPU" if weight.is_cuda else "a CPU"
            return f"auto predicts {' or '.join(known)} for layers in {its} on {of}, not {self.values}"
        others = {word: how for word, how in known.items() if how}
        if "int8" in others and (layer.training or not bool(weight.detach().isfinite().all())):
            del others["int8"]
        return {"": {}} | {f":{word}": how for word, how in others.items()}

    def _times(
        self,
        weight: torch.Tensor,
        tokens: int,
        stored: dict[str, dict[str, Any]],
        why_not: WhyNot | None,
    ) -> dict[Spec, float] | str:
        """Predicted seconds of the specs that fit; or why none does."""
        kept = self.density
        if kept is None:
            zeros = weight.numel() - int(torch.count_nonzero(weight))
            kept = NONZERO if weight.numel() and zeros >= _MOSTLY * weight.numel() else 0.5

        @functools.cache
        def density(block: tuple[int, int]) -> float:
            return float(nonzero_blocks(weight, block).float().mean()) if kept == NONZERO else kept

        dense = _dense(weight, tokens)
        # Where zeros are what they are, single elements, too.
        more = ((1, 1),) if kept == NONZERO and dense.device == "cpu" else ()
        times: dict[Spec, float] = {}
        reason = _NO_BLOCK
        for end, how in stored.items():
            for block in blocks_for(dense, *more):
                # As the text is read, but with every digit of the density.
                spec = replace(
                    Spec.parse(f"block:{block[0]}x{block[1]}@{kept_text(kept)}{end}"), density=kept
                )
                refused = spec.why_not(tuple(weight.shape)) if why_not is None else why_not(spec)
                case = replace(dense, block=block, density=density(block), **how)
                if refused is None and how and not _is_fast(case):
                    refused = f"no kernel but the reference multiplies {spec.format}{spec.suffix} here"
                if refused is None:
                    times[spec] = predicted_seconds(case)
                else:
                    reason = refused
        return times or reason


def _dense(weight: torch.Tensor, tokens: int) -> Case:
    return Case(tokens, *weight.shape, weight.dtype, device=weight.device.type)


def _is_fast(case: Case) -> bool:
    """Whether more than the reference multiplies by such blocks, whose measurement would take minutes."""
    kernel = case.kernel
    return kernel is not None and not kernel.startswith("ref")
