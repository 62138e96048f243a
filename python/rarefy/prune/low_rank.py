"""Low rank: weights as a product of two thin ones, by data or without, and with sparse blocks beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checks import check_int, check_tensor, fail
from ..elements import ElementsSpec
from ..layers import Layer, find_layers
from ..linear_base import check_linear, copy_parameter, new_linear
from ..modules import BlockSparseLinear
from ..spec import Spec
from ..weight import BlockSpec
from .criteria import check_sparsity
from .damping import damped
from .groups import Config, FilterFn, collect_grams, find_groups
from .masks import Scores
from .patterns import parse_pattern
from .reconstruct import layer_error


class LowRankLinear(nn.Module):
    """y = (x Vᵀ) Uᵀ + b, and x Sᵀ besides where there are sparse blocks S.

    Args:
        u: (N, r), v: (r, K): the factors, copied.
        bias: (N,), or None; copied.
        sparse: a BlockSparseLinear of (N, K) without bias and activation, or None; taken as it is.

    `down` is an nn.Linear with V, `up` one with U and the bias, `sparse` runs on Rarefy's kernels.

    Raises ValueError for shapes that do not fit each other, and for an activation.
    """

    def __init__(
        self, u: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None,
        sparse: BlockSparseLinear | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        op = "LowRankLinear"
        check_tensor(op, "u", u)
        check_tensor(op, "v", v)
        if u.ndim != 2 or v.ndim != 2 or u.shape[1] != v.shape[0]:
            fail(op, "u must be (N, r) and v (r, K)", f"{tuple(u.shape)} and {tuple(v.shape)}")
        if bias is not None and tuple(bias.shape) != (u.shape[0],):
            fail(op, f"bias must be of shape ({u.shape[0]},)", tuple(bias.shape))
        self.out_features, self.in_features = u.shape[0], v.shape[1]
        if sparse is not None and (sparse.out_features, sparse.in_features) != (u.shape[0], v.shape[1]):
            fail(
                op, f"sparse must be {u.shape[0]}x{v.shape[1]}", f"{sparse.out_features}x{sparse.in_features}"
            )
        if sparse is not None and sparse.activation is not None:  # its result is a summand
            fail(op, "sparse must have no activation", repr(sparse.activation))
        self.down = new_linear(v.detach().clone(), None, True, self.training)
        self.up = new_linear(u.detach().clone(), None, True, self.training)
        self.up.bias = copy_parameter(bias)
        self.sparse = sparse

    @property
    def rank(self) -> int:
        """R."""
        return self.up.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        y = self.up(self.down(x))
        return y if self.sparse is None else y + self.sparse(x)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The same layer as an nn.Linear. Copies."""
        weight = self.up.weight @ self.down.weight
        if self.sparse is not None:
            weight = weight + self.sparse.weight.to_dense()
        return new_linear(weight, self.up.bias, self.up.weight.requires_grad, self.training)

    def extra_repr(self) -> str:
        """Sizes and rank."""
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


class LowRankConv2d(nn.Module):
    """A convolution as one to r channels with the kernel, and one of 1 × 1 from those, which has the bias.

    Args:
        u: (N, r), v: (r, C·KH·KW): the factors of the weight as a matrix, copied.
        like: the nn.Conv2d whose stride, padding, dilation and bias they take; one group.

    Raises ValueError for factors that do not fit it.
    """

    def __init__(self, u: torch.Tensor, v: torch.Tensor, like: nn.Conv2d) -> None:
        super().__init__()
        n, k = like.out_channels, like.weight[0].numel()
        if u.ndim != 2 or v.ndim != 2 or (len(u), v.shape[1]) != (n, k) or u.shape[1] != len(v):
            got = f"{tuple(u.shape)} and {tuple(v.shape)}"
            fail("LowRankConv2d", f"u must be ({n}, r) and v (r, {k})", got)
        options = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        same = {"device": u.device, "dtype": u.dtype}
        down = {name: getattr(like, name) for name in options}
        self.down = nn.Conv2d(like.in_channels, len(v), **down, bias=False, **same)
        self.up = nn.Conv2d(len(v), len(u), 1, bias=False, **same)
        with torch.no_grad():
            self.down.weight.copy_(v.view(self.down.weight.shape))
            self.up.weight.copy_(u.view(self.up.weight.shape))
        self.up.bias = copy_parameter(like.bias)

    @property
    def rank(self) -> int:
        """R."""
        return self.up.in_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) to (B, N, H′, W′)."""
        return self.up(self.down(x))

    def matrix(self) -> torch.Tensor:
        """The product of both weights, (N, C·KH·KW)."""
        return self.up.weight.flatten(1) @ self.down.weight.flatten(1)


@dataclass(frozen=True)
class FactorizedLayer:
    """One layer: its rank (None: it stays, as `reason` says), parameters before and after, the part lost.

    `error` is ‖X(W − Ŵ)ᵀ‖² / ‖XWᵀ‖² on the calibration inputs, without them ‖W − Ŵ‖² / ‖W‖².
    """

    name: str
    rank: int | None
    before: int
    after: int
    error: float
    reason: str | None = None


@dataclass(frozen=True)
class Factorization:
    """The layers that were asked for."""

    layers: list[FactorizedLayer]

    def __iter__(self) -> Iterator[FactorizedLayer]:  # noqa: D105
        return iter(self.layers)

    def __str__(self) -> str:  # noqa: D105
        lines = [
            f"{x.name}: {'stays, ' + x.reason if x.rank is None else f'rank {x.rank}'}, "
            f"{x.before:,} to {x.after:,} parameters, {x.error:.4f} lost"
            for x in self.layers
        ]
        return "\n".join(lines)


@torch.no_grad()
def factorize_weight(
    weight: torch.Tensor,
    *,
    rank: int | None = None,
    energy: float | None = None,
    gram: torch.Tensor | None = None,
    dampening: float = 1e-4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """U (N, r) and V (r, K), float64, so that ‖X(W − UV)ᵀ‖ is least; without X, ‖W − UV‖ (Eckart & Young).

    With XᵀX = LLᵀ the best product is PPᵀW, P being the first r left singular vectors of WL, as in
    activation-aware SVD (Wang et al. 2024), and nothing is inverted. U = P, V = PᵀW.

    Args:
        weight: (N, K), of any float dtype.
        rank: r, from 1 to min(N, K); or
        energy: the smallest r that keeps this part of Σσ², in [0, 1]; exactly one of both.
        gram: (K, K), XᵀX of calibration inputs; None: all inputs count the same.
        dampening: what is added to XᵀX's diagonal, as a part of its mean.

    Raises ValueError for arguments out of range and shapes that differ.
    """
    op = "factorize"
    check_tensor(op, "weight", weight)
    if weight.ndim != 2 or (gram is not None and tuple(gram.shape) != (weight.shape[1],) * 2):
        shapes = f"{tuple(weight.shape)} and {None if gram is None else tuple(gram.shape)}"
        fail(op, "weight must be (N, K) and gram (K, K)", shapes)
    if (rank is None) == (energy is None):
        fail(op, "one of rank and energy must be given", f"{rank} and {energy}")
    wide = weight.detach().cpu().double()
    scaled = wide
    if gram is not None:
        scaled = wide @ damped(op, gram, dampening, "gram").lower
    left, values, _ = torch.linalg.svd(scaled, full_matrices=False)
    if energy is not None:
        check_sparsity(op, "energy", energy)
        part = values.square().cumsum(0) / values.square().sum().clamp(min=1e-300)
        rank = min(len(values), 1 + int((part < energy - 1e-12).sum()))
    rank = check_int(op, "rank", rank, 1)
    if rank > len(values):
        fail(op, f"rank must be at most {len(values)}", rank)
    u = left[:, :rank]
    return u.contiguous(), (u.T @ wide).contiguous()


@torch.no_grad()
def factorize_with_blocks(
    weight: torch.Tensor, pattern: Any, density: float, rank: int, gram: torch.Tensor | None = None,
    *, rounds: int = 10,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """U, V and S, (N, K) with zeros, so that UV + S is near W: in turns, as GoDec (Zhou & Tao 2011).

    S takes from W − UV the round(density · blocks) largest blocks, of norms that columns' inputs scale; UV is
    the best product for W − S. The best of all rounds is returned.

    Args:
        weight: (N, K).
        pattern: of S: "block:16x16", "unstructured".
        density: of S.
        rank: of UV.
        gram: see factorize_weight.
        rounds: of both steps.

    Returns U, V and S in float64 on the CPU.

    Raises ValueError for a pattern that is not known, and numbers or shapes out of range.
    """
    pattern, wide = parse_pattern(pattern, "factorize"), weight.detach().cpu().double()
    eye = torch.eye(wide.shape[1], dtype=torch.float64)
    measure = eye if gram is None else gram.detach().cpu().double()
    scale = measure.diagonal().clamp(min=0).sqrt()
    sparse, best = torch.zeros_like(wide), (math.inf,)
    for _ in range(check_int("factorize", "rounds", rounds, 1)):
        u, v = factorize_weight(wide - sparse, rank=rank, gram=gram)
        rest = wide - u @ v
        mask = pattern.mask(Scores((rest * scale), "square"), rest.shape, 1 - density)
        sparse = mask.apply_(rest.clone())
        error = layer_error(wide, u @ v + sparse, measure)
        if error < best[0]:
            best = (error, u, v, sparse)
    return best[1:]


def factorize(
    model: nn.Module,
    *,
    rank: int | None = None,
    energy: float | None = None,
    ratio: float | None = None,
    data: Iterable[Any] | None = None,
    sparse: Any = None,
    config: Config = None,
    filter_fn: FilterFn | None = None,
    forward: Callable[[Any], Any] | None = None,
) -> Factorization:
    """Replaces linear layers by LowRankLinear and convolutions by LowRankConv2d, in place.

    Args:
        model: any module; layers that cannot be replaced stay, and the result says why.
        rank: of every layer; or
        energy: the part of Σσ² that is kept; or
        ratio: parameters after / before, S included; exactly one of the three.
        data: batches (a tensor, a tuple of arguments or a dict): what the layers get then counts.
        sparse: "block:16x16@0.1", "csr@0.05", "bitmap@0.2": blocks or elements beside the product; not with
            energy, of linear layers.
        config: which layers, as of Sparsifier.prepare.
        filter_fn: the same.
        forward: what to do with a batch instead of calling the model.

    A layer whose factors would have as many parameters stays. Biases, dtypes, devices and modes carry over.

    Raises ValueError for arguments that exclude each other or are out of range, before anything changes.
    """
    op = "factorize"
    given = {"rank": rank, "energy": energy, "ratio": ratio}
    if sum(value is not None for value in given.values()) != 1:
        fail(op, "one of rank, energy and ratio must be given", given)
    if ratio is not None:
        check_sparsity(op, "ratio", ratio)
    if sparse is not None and energy is not None:
        fail(op, "sparse goes with rank or ratio", "energy")
    spec = None if sparse is None else Spec.parse(sparse, op)
    if spec is not None and not isinstance(spec, BlockSpec | ElementsSpec):
        fail(op, "sparse must be blocks, csr or bitmap", str(spec))
    if spec is not None and isinstance(spec.density, str):
        fail(op, "sparse must have a density that is a number", str(spec))
    groups = find_groups(op, model, config, filter_fn)
    kinds = nn.Linear | nn.Conv2d
    groups = [g for g in groups if isinstance(g["module"], kinds) and g["tensor_name"] == "weight"]
    grams = {} if data is None else collect_grams(op, model, groups, data, forward)
    layers = {id(x.module): x for x in find_layers(model)}
    convolutions = (group for group in groups if isinstance(group["module"], nn.Conv2d))
    layers |= {id(group["module"]): _convolution(model, group) for group in convolutions}
    rows, changes = [], []
    for group in groups:
        layer, gram = layers[id(group["module"])], grams.get(group["tensor_fqn"])
        gram = None if gram is None else gram[0]
        row, new = _one(layer, spec, gram, rank, energy, ratio)
        rows.append(row)
        if new is not None:
            changes.append((layer, new))
    for layer, new in changes:
        layer.replace(new)
    return Factorization(rows)


def _convolution(model: nn.Module, group: dict[str, Any]) -> Layer:
    """An nn.Conv2d with all places where it is used, and why it must stay."""
    module, named = group["module"], list(model.named_modules(remove_duplicate=False))
    layer = Layer([name for name, found in named if found is module], module)
    for name in layer.names:
        parent, _, key = name.rpartition(".")
        layer.places += [(model.get_submodule(parent), key)] if name else []
    if not layer.places:
        layer.reason = "it is the model itself"
    elif type(module) is not nn.Conv2d or type(module.weight) is not nn.Parameter:
        layer.reason = "it is no plain nn.Conv2d"
    elif any(found is not module for _, found, _ in group["places"]):
        layer.reason = "its weight is tied to another layer's"
    return layer


def _one(
    layer: Layer,
    spec: Spec | None,
    gram: torch.Tensor | None,
    rank: int | None,
    energy: float | None,
    ratio: float | None,
) -> tuple[FactorizedLayer, LowRankLinear | LowRankConv2d | None]:
    """What becomes of one layer."""
    module, convolves = layer.module, isinstance(layer.module, nn.Conv2d)
    if not convolves:
        module = check_linear("factorize", module)
    weight, before = module.weight.detach().flatten(1), module.weight.numel()

    def stays(reason: str) -> tuple[FactorizedLayer, None]:
        return FactorizedLayer(layer.name, None, before, before, 0.0, reason), None

    if layer.reason is not None:
        return stays(layer.reason)
    n, k = weight.shape
    if convolves and (module.groups > 1 or spec is not None):
        return stays("a convolution in groups" if module.groups > 1 else "blocks are for linear layers")
    if spec is not None and spec.why_not((n, k)) is not None:
        return stays(spec.why_not((n, k)))
    stored = 0 if spec is None else round(spec.density * n * k)
    if ratio is not None:
        rank = math.floor((ratio * before - stored) / (n + k))
        if rank < 1:
            return stays(f"a ratio of {ratio:g} leaves no rank")
    if rank is not None and rank * (n + k) + stored >= before:
        return stays(f"rank {rank} would have as many parameters")
    block = None
    r, c = getattr(spec, "block_shape", (1, 1))
    if spec is None:
        u, v = factorize_weight(weight, rank=rank, energy=energy, gram=gram)
    else:
        pattern = f"block:{r}x{c}" if (r, c) != (1, 1) else "unstructured"
        u, v, s = factorize_with_blocks(weight, pattern, spec.density, rank, gram)
        part = new_linear(s.to(weight), None, True, module.training)
        block = BlockSparseLinear.from_dense(part, spec=spec, scores=s.abs().to(weight.device))
    if len(v) * (n + k) + stored >= before:
        return stays(f"rank {len(v)} would have as many parameters")
    u, v = u.to(weight), v.to(weight)
    new = LowRankConv2d(u, v, module) if convolves else LowRankLinear(u, v, module.bias, block)
    measure = torch.eye(k, dtype=torch.float64) if gram is None else gram
    product = new.matrix() if convolves else new.to_dense().weight
    error = layer_error(weight.cpu(), product.detach().cpu(), measure)
    after = len(v) * (n + k) + (0 if block is None else block.weight.values.numel())
    new = new.train(module.training).requires_grad_(module.weight.requires_grad)
    return FactorizedLayer(layer.name, len(v), before, after, error), new
