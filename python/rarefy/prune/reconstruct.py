"""Layer-wise reconstruction: weights that stay make up for those that leave, from XᵀX of calibration data."""

from __future__ import annotations

from typing import Any

import torch

from .. import _load
from ..checks import check_int, check_known, fail
from .criteria import check_sparsity
from .damping import Damped, damped
from .elimination import Elimination, check_shapes
from .masks import Mask, Scores, make_mask
from .patterns import Pattern, RowBalanced, parse_pattern

_sparse_gpt = _load.op("_sparse_gpt_")
_least_squares = _load.op("_least_squares_")
_block_obs = _load.op("_block_obs_")

_LEVELS = 127  # of int8
METHODS = ("sparsegpt", "obs", "wanda", "magnitude", "least_squares")


def layer_error(weight: torch.Tensor, changed: torch.Tensor, gram: torch.Tensor) -> float:
    """‖X(W − Ŵ)ᵀ‖² / ‖XWᵀ‖², from XᵀX: the part of a layer's output that pruning took, in float64.

    Args:
        weight: W, (N, K), of any float dtype.
        changed: Ŵ, of the same shape.
        gram: XᵀX, (K, K).

    Raises ValueError for other shapes.
    """
    if weight.ndim != 2 or changed.shape != weight.shape or gram.shape != (weight.shape[1],) * 2:
        got = f"{tuple(weight.shape)}, {tuple(changed.shape)} and {tuple(gram.shape)}"
        fail("layer_error", "weight and changed must be (N, K) and gram (K, K)", got)
    weight, gram = weight.double(), gram.double()
    difference = weight - changed.double()
    whole = float(((weight @ gram) * weight).sum())
    return float(((difference @ gram) * difference).sum()) / whole if whole else 0.0


@torch.no_grad()
def reconstruct_weight(
    weight: torch.Tensor,
    gram: torch.Tensor | Damped,
    pattern: Any,
    sparsity: float | None = None,
    method: str = "sparsegpt",
    *,
    refit: bool = False,
    mask: Mask | None = None,
    dampening: float = 0.01,
    panel: int = 128,
    steps: int = 16,
    int8: bool = False,
    name: str = "weight",
) -> tuple[torch.Tensor, Mask]:
    """Prunes one weight so that its layer's outputs change least.

    Args:
        weight: (N, K), of any float dtype; not changed.
        gram: (K, K), XᵀX of calibration inputs X of shape (tokens, K); or a Damped of it, used as it is.
        pattern: a Pattern or its name; exactly pattern.removed(shape, sparsity) units leave.
        sparsity: in [0, 1]; None: what the pattern allows at most, else 0.5.
        method: "sparsegpt": one sweep over the columns (Frantar & Alistarh 2023), for unstructured, N:M
            and blocks. "obs": optimal brain surgeon, block by block (Hassibi & Stork 1993; Frantar & Alistarh
            2022), see Elimination: better and slower; blocks, over the whole layer, or with "row_balanced" as
            many in each block row. "wanda", "magnitude": only a mask.
            "least_squares": no new mask but `mask`, or the weight's zeros.
        refit: solve for the best weights on the mask in the end, by least squares: O(rows · k³), except that
            rows of equal masks share the work.
        mask: for "sparsegpt" and "least_squares": keep to it instead of choosing one.
        dampening: λ / mean of XᵀX's diagonal; singular matrices get more (see damped).
        panel: columns among which "sparsegpt" compares units.
        steps: rounds of "obs" until as many have left; over the whole layer twice as many until none is.
        int8: round what stays to int8 as Int8Weight does, with a scale for each row, column after column:
            those on the right make up for the rounding, too (Frantar et al. 2023, GPTQ). The result, float,
            is what "block:…:int8" stores of it: rounding it again changes nothing but the last place.
        name: for messages.

    Returns the weight (N, K), in its dtype, and the mask.

    Raises:
        ValueError: shapes that differ, XᵀX that is not finite, sparsities and patterns that do not fit.
        TypeError: arguments of the wrong kind.
    """
    op = "reconstruct"
    check_shapes(op, name, weight, gram)
    check_known(op, "method", method, METHODS)
    check_int(op, "panel", panel, 1)
    check_int(op, "steps", steps, 1)
    pattern = parse_pattern(pattern, op)
    pattern.check_shape(op, name, weight.shape)
    sparsity = asked_sparsity(op, pattern, sparsity)
    if mask is not None and method not in ("sparsegpt", "least_squares"):
        fail(op, 'mask needs the method "sparsegpt" or "least_squares"', repr(method))
    if method == "sparsegpt" and pattern.each_row:
        fail(op, 'the method "sparsegpt" counts in whole layers ("obs" in rows)', pattern)
    if method == "obs" and not pattern.each_row and (pattern.units(weight.shape)[3] or pattern.fixed):
        fail(op, 'the method "obs" is for blocks', pattern)

    found = damped(op, gram, dampening, name)
    old = weight.detach().cpu().double().contiguous()
    if method == "obs" and not pattern.each_row:
        new, chosen = Elimination(old, found, pattern, steps=2 * steps, name=name).solve(sparsity)
    elif method in ("sparsegpt", "obs"):
        # What no input reaches costs nothing: it leaves first, and comes back as it was if it may stay.
        dead = found.gram.diagonal() == 0
        new = old.clone()
        new[:, dead] = 0
        if method == "sparsegpt":
            chosen = _sweep(new, found, pattern, sparsity, mask, panel)
        else:
            bits = torch.zeros(len(new), -(-weight.shape[1] // 8), dtype=torch.uint8)
            count = pattern.removed(weight.shape, sparsity)
            _block_obs(new, bits, found.inverse, list(pattern.units(weight.shape)), count, steps)
            chosen = _counted(bits, weight.shape[1])
        back = chosen.unpack() & dead
        new[back] = old[back]
    elif method == "least_squares":
        chosen, refit = mask if mask is not None else Mask.pack(old != 0), True
    else:
        chosen = _plain_mask(old, found.gram if method == "wanda" else None, pattern, sparsity)
        new = chosen.apply_(old.clone())
    if refit:
        new = old.clone()  # from the original weights: what they do on X is the aim
        _least_squares(new, chosen.bits, found.hessian, found.inverse)
    if int8:
        _sparse_gpt(new, chosen.bits.clone(), found.sweep, [1, 1, 0, 0], 0, panel, True, _LEVELS)
    return new.to(weight.device, weight.dtype), chosen


def _counted(bits: torch.Tensor, cols: int) -> Mask:
    return Mask(bits, cols, int(Mask(bits, cols, 0).unpack().sum()))


def _sweep(
    new: torch.Tensor, found: Damped, pattern: Pattern, sparsity: float, mask: Mask | None, panel: int
) -> Mask:
    """SparseGPT over the columns of `new`, in place: the mask that it chose, or kept to."""
    shape = new.shape
    units, fixed = pattern.units(shape), mask is not None or pattern.fixed
    if fixed:
        mask = pattern.mask(Scores(new), shape, sparsity) if mask is None else mask
        bits = mask.bits.clone()
    else:
        bits = torch.zeros(len(new), -(-shape[1] // 8), dtype=torch.uint8)
    inside = pattern
    if units[3] and sparsity < pattern.most and units[:2] != (1, 1):
        inside = parse_pattern(f"{units[2]}:{units[3]}")  # below its sparsity "block:…+2:4" is 2:4 in part
    remove = 0 if fixed else inside.removed(shape, sparsity)
    _sparse_gpt(new, bits, found.sweep, list(inside.units(shape)), remove, panel, fixed, 0)
    return _counted(bits, shape[1])


def _plain_mask(old: torch.Tensor, gram: torch.Tensor | None, pattern: Pattern, sparsity: float) -> Mask:
    """By magnitudes, or with `gram` by Wanda's scores, within rows where the pattern leaves the choice."""
    shape = old.shape
    if gram is None:
        return pattern.mask(Scores(old, "square"), shape, sparsity)
    scores, units = Scores(old, "magnitude", gram.diagonal().clamp(min=0).sqrt()), pattern.units(shape)
    if units[3] or pattern.fixed:
        return pattern.mask(scores, shape, sparsity)
    rows = RowBalanced(min(units[0], shape[0]), min(units[1], shape[1]))
    return make_mask(scores, rows.units(shape), rows.removed(shape, sparsity), each_row=True)


def asked_sparsity(op: str, pattern: Pattern, sparsity: float | None) -> float:
    """What is asked of a layer, checked; None: what the pattern allows at most, else 0.5."""
    if sparsity is None:
        return pattern.most if pattern.most < 1 else 0.5
    sparsity = check_sparsity(op, "sparsity", sparsity)
    pattern.check_sparsity(op, sparsity)
    return sparsity
