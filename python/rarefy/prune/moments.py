"""Layers fitted to outputs that are wanted of them, from moments of inputs and outputs; biases included."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..checks import check_int, check_tensor, fail
from .damping import Damped, damped
from .masks import Mask
from .reconstruct import reconstruct_weight


class Moments:
    """XᵀX, XᵀY, ΣY², and the sums of X and Y over all tokens, in float64: what a least-squares fit needs.

    X are a layer's inputs, as what was pruned before it gives them; Y the outputs that are wanted for them,
    as the dense model has them, or whatever mends what layers before it broke.

    Args:
        inputs: K.
        outputs: N.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self.tokens = 0
        self.gram = torch.zeros(inputs, inputs, dtype=torch.float64)
        self.cross = torch.zeros(inputs, outputs, dtype=torch.float64)
        self.x = torch.zeros(inputs, dtype=torch.float64)
        self.y = torch.zeros(outputs, dtype=torch.float64)
        self.squares = 0.0

    @torch.no_grad()
    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x: (…, K) inputs; y: (…, N), the outputs that are wanted. Products of a call in float32, or wider.

        Raises ValueError for other widths, different numbers of tokens, and values that are not finite.
        """
        op, (k, n) = "Moments.add", self.cross.shape
        check_tensor(op, "x", x)
        check_tensor(op, "y", y)
        if x.shape[-1:] != (k,) or y.shape[-1:] != (n,) or x.shape[:-1] != y.shape[:-1]:
            fail(op, f"x must be (…, {k}) and y (…, {n})", f"{tuple(x.shape)} and {tuple(y.shape)}")
        x, y = (
            t.detach().flatten(0, -2).cpu().to(torch.promote_types(t.dtype, torch.float32)) for t in (x, y)
        )
        gram = x.T @ x
        if not bool(torch.isfinite(gram).all() and torch.isfinite(y).all()):
            fail(op, "x and y must be finite", "NaN or infinity")
        self.tokens += len(x)
        self.gram += gram
        self.cross += x.T @ y.to(x.dtype)
        self.x += x.sum(0, dtype=torch.float64)
        self.y += y.sum(0, dtype=torch.float64)
        self.squares += float(y.square().sum(dtype=torch.float64))

    def centred(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, K) and (K, N): the same of X and Y less their means, with which a bias takes no part."""
        means = self.x / max(1, self.tokens)
        return self.gram - torch.outer(self.x, means), self.cross - torch.outer(means, self.y)

    def bias(self, weight: torch.Tensor) -> torch.Tensor:
        """(N,) float64: what fits best beside a weight (N, K), mean(Y) − Ŵ mean(X)."""
        return (self.y - weight.double() @ self.x) / max(1, self.tokens)

    def error(self, weight: torch.Tensor, *, bias: bool) -> float:
        """‖XŴᵀ + b − Y‖² / ‖Y‖² of a weight (N, K): what is missed of the outputs; b as `bias` says, or 0."""
        weight, lost = weight.double(), self.squares
        gram, cross = self.centred() if bias else (self.gram, self.cross)
        if bias:
            lost -= float(self.y.square().sum()) / max(1, self.tokens)
        lost += float(((weight @ gram) * weight).sum()) - 2 * float((weight * cross.T).sum())
        return max(lost, 0.0) / self.squares if self.squares else 0.0


@torch.no_grad()
def fitted(
    weight: torch.Tensor, moments: Moments, ridge: float = 0.01, *, bias: bool
) -> tuple[torch.Tensor, Damped]:
    """The dense weight (N, K) that fits best, in float64, and the XᵀX that it is best for, damped.

    argmin ‖XWᵀ + b − Y‖² + λ‖W − W₀‖², λ = ridge · mean of XᵀX's diagonal, W₀ the weight; X and Y less their
    means if there is a bias.

    Raises ValueError for moments of another shape or without tokens.
    """
    op = "reconstruct_layer"
    if tuple(moments.cross.shape) != (want := tuple(weight.shape)[::-1]):
        fail(op, f"moments must be of {want[0]} inputs and {want[1]} outputs", tuple(moments.cross.shape))
    if not moments.tokens:
        fail(op, "moments must have tokens", 0)
    gram, cross = moments.centred() if bias else (moments.gram, moments.cross)
    found = damped(op, gram, ridge, "moments")
    pull = found.hessian.diagonal() - gram.diagonal()
    near = weight.detach().cpu().double()
    return (found.inverse @ (cross + pull[:, None] * near.T)).T.contiguous(), found


@torch.no_grad()
def reconstruct_layer(
    layer: nn.Linear,
    moments: Moments,
    pattern: Any = None,
    sparsity: float | None = None,
    method: str = "obs",
    *,
    ridge: float = 0.01,
    **options: Any,
) -> Mask | None:
    """Prunes one layer in place so that it gives what is wanted of it, bias included.

    First the dense weight that fits best, with a pull to the layer's own (see fitted), then
    reconstruct_weight of that; the bias is the rest, mean(Y) − Ŵ mean(X).

    Args:
        layer: changed in place.
        moments: of its inputs, and of the outputs that are wanted.
        pattern: see reconstruct_weight; None: only fitted, without sparsity and options.
        sparsity: the same.
        method: the same.
        ridge: see fitted; also the dampening of reconstruct_weight.
        **options: refit, panel, steps, mask, int8, name: see there.

    Returns the mask, None without a pattern. Raises what reconstruct_weight and fitted do.
    """
    given = sorted(options) + ["sparsity"] * (sparsity is not None)
    if pattern is None and given:
        fail("reconstruct_layer", f"{' and '.join(given)} must come with a pattern", "None")
    weight, found = fitted(layer.weight, moments, ridge, bias=layer.bias is not None)
    mask = None
    if pattern is not None:
        weight, mask = reconstruct_weight(weight, found, pattern, sparsity, method, **options)
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(moments.bias(weight))
    return mask


def arrange(importance: torch.Tensor, rows: int, kept: int, rounds: int = 12) -> torch.Tensor:
    """An order of outputs in which `rows` neighbours care for the same inputs, so that tall blocks fit.

    Groups keep their `kept` best inputs; outputs go, those with most to lose first, to the group that keeps
    most of theirs and has room. The round that kept most wins; the first one is the order as it is.

    Args:
        importance: (N, K), what leaving a weight out costs; ≥ 0, N a multiple of rows.
        rows: of a block.
        kept: inputs that a block row keeps, of K.
        rounds: how often outputs are assigned anew.

    Returns the order, (N,) int64: W[order] has similar rows side by side.

    Raises ValueError for an N that is no multiple, or kept outside [1, K].
    """
    op = "arrange"
    check_tensor(op, "importance", importance)
    check_int(op, "rows", rows, 1)
    n = len(importance)
    if importance.ndim != 2 or n % rows or not 1 <= kept <= importance.shape[1]:
        want = "importance must be (N, K) with N a multiple of rows, and kept in [1, K]"
        fail(op, want, f"{tuple(importance.shape)}, rows={rows}, kept={kept}")
    importance, groups = importance.detach().float().cpu(), n // rows
    order, best, most = torch.arange(n), torch.arange(n), -1.0
    for _ in range(rounds):
        sums = importance[order].view(groups, rows, -1).sum(1)
        top = torch.zeros_like(sums).scatter_(1, sums.topk(kept, dim=1).indices, 1.0)
        if (found := (sums * top).sum().item()) > most:
            best, most = order, found
        gain = importance @ top.T
        chosen, room = torch.empty(n, dtype=torch.long), [rows] * groups
        for row in (gain.max(1).values - gain.mean(1)).argsort(descending=True).tolist():
            chosen[row] = group = int(gain[row].argmax())
            room[group] -= 1
            if room[group] == 0:
                gain[:, group] = -torch.inf
        before, order = order, chosen.argsort(stable=True)
        if torch.equal(before, order):  # it stays as it is from now on
            break
    return best


@torch.no_grad()
def arrange_hidden(
    up: nn.Linear, down: nn.Linear, gram: torch.Tensor, rows: int, density: float, ridge: float = 0.01
) -> torch.Tensor:
    """Orders the hidden features between two layers, in place, so that tall blocks of `up` fit; see arrange.

    What they compute together stays the same, if what is between them treats features alike.

    Args:
        up: of (H, K).
        down: of (N, H).
        gram: (K, K), XᵀX of the inputs of `up`: leaving w_ij out costs w_ij² / [H⁻¹]_jj.
        rows: of a block.
        density: of `up`, by and by.
        ridge: dampening of gram.

    Returns the order, (H,) int64.

    Raises ValueError for layers that do not follow each other, a gram of another shape or one that is not
    finite, and rows that do not divide H.
    """
    op = "arrange_hidden"
    if up.out_features != down.in_features:
        fail(op, "down must have as many inputs as up has outputs", f"{down.in_features}, {up.out_features}")
    if tuple(gram.shape) != (up.in_features, up.in_features):
        fail(op, f"gram must be of shape {(up.in_features, up.in_features)}", tuple(gram.shape))
    inverse = damped(op, gram, ridge, "gram").inverse.diagonal()
    importance = up.weight.detach().cpu().double().square() / inverse
    order = arrange(importance, rows, max(1, round(density * up.in_features)))
    at = order.to(up.weight.device)
    up.weight.copy_(up.weight[at])
    if up.bias is not None:
        up.bias.copy_(up.bias[at])
    down.weight.copy_(down.weight[:, at])
    return order
