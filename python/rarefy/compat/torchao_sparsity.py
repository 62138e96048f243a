"""torchao.sparsity, deleted upstream in August 2026: the same names, on whatever device runs.

from rarefy.compat.torchao_sparsity import sparsify_, block_sparse_weight, WandaSparsifier

Block-sparse weights become rarefy.BlockSparseLinear, on the CPU 2:4 weights too (two values of each four and
a bit for each). On CUDA, in 16-bit floats, torch's semi-structured tensors hold those; in float32 layers stay
dense there, and a warning says so.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..checks import check_block_shape, check_int, check_known, check_tensor, fail
from ..layers import find_layers
from ..masks import NONZERO, expand_mask, grid_of, to_blocks
from ..prune.criteria import check_sparsity
from ..prune.masks import Scores, make_mask
from ..sparsify import sparsify
from .torch_ao_pruning import WeightNormSparsifier
from .torch_ao_pruning.sparsifiers import BaseSparsifier

FilterFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class SemiSparseWeightConfig:
    """Weights with at most two of each four that are not zero; `alg_id` has no effect."""

    alg_id: int | None = None


@dataclass(frozen=True)
class BlockSparseWeightConfig:
    """Weights whose square blocks of zeros are not stored."""

    blocksize: int = 64


semi_sparse_weight = SemiSparseWeightConfig
block_sparse_weight = BlockSparseWeightConfig


def sparsify_(model: nn.Module, config: Any, filter_fn: FilterFn | None = None) -> nn.Module:
    """Stores the weights of linear layers as they are pruned: nothing is pruned here. In place.

    Args:
        model: with zeros in its weights, as a sparsifier's squash_mask leaves them.
        config: BlockSparseWeightConfig: layers become BlockSparseLinear without blocks of zeros, frozen.
            SemiSparseWeightConfig: weights, which must be 2:4, become BlockSparseLinear with a bit for each
            element ("2:4@nonzero", for few tokens), frozen; on CUDA torch's semi-structured tensors.
        filter_fn: called with module and name; default: every nn.Linear that can become sparse.

    Returns the model (torchao returns None).

    Raises TypeError for another config, ValueError for weights that are not 2:4.
    """
    op = "sparsify_"
    found = [x for x in find_layers(model) if x.reason is None]
    found = [x for x in found if filter_fn is None or filter_fn(x.module, x.name)]
    if isinstance(config, BlockSparseWeightConfig):
        side = check_int(op, "blocksize", config.blocksize, 1)
        fitting = [x for x in found if min(x.shape) >= side]
        return _stored(model, [x.name for x in fitting], f"block:{side}x{side}@{NONZERO}")
    if not isinstance(config, SemiSparseWeightConfig):
        fail(op, "config must be a SemiSparseWeightConfig or a BlockSparseWeightConfig", config, TypeError)
    for layer in found:
        weight = layer.module.weight.detach()
        if not bool((mask_creator(weight) | (weight == 0)).all()):
            fail(op, f"the weight of {layer.name} must be 2:4 (see apply_fake_sparsity)", "other zeros")
    on_cuda = [x for x in found if x.module.weight.is_cuda]
    _stored(model, [x.name for x in found if not x.module.weight.is_cuda], f"2:4@{NONZERO}")
    for layer in on_cuda:
        if layer.module.weight.dtype.itemsize == 2:
            packed = torch.sparse.to_sparse_semi_structured(layer.module.weight.detach())
            layer.module.weight = nn.Parameter(packed, requires_grad=False)
    if any(x.module.weight.dtype.itemsize > 2 for x in on_cuda):
        text = "[sparsify_] 2:4 on CUDA is for 16-bit floats: other layers stay dense"
        warnings.warn(text, stacklevel=2)
    return model


def _stored(model: nn.Module, names: list[str], spec: str) -> nn.Module:
    """Makes these layers sparse, as they are, and freezes their weights."""
    if names:
        sparsify(model, {re.escape(name): spec for name in names}, measure=False)
    for name in names:
        model.get_submodule(name).weight.requires_grad_(False)
    return model


def apply_fake_sparsity(model: nn.Module, filter_fn: FilterFn | None = None, **kwargs: Any) -> None:
    """Prunes linear layers to 2:4 by magnitude, at once: plain Parameters with zeros.

    Args:
        model: changed in place.
        filter_fn: see sparsify_.
        kwargs: of WeightNormSparsifier, instead of those of 2:4.
    """
    found = [x for x in find_layers(model) if x.reason is None]
    names = [x.name for x in found if filter_fn is None or filter_fn(x.module, x.name)]
    if not names:
        fail("apply_fake_sparsity", "filter_fn must leave a layer", "none")
    options = {"sparsity_level": 1.0, "sparse_block_shape": (1, 4), "zeros_per_block": 2, **kwargs}
    sparsifier = WeightNormSparsifier(**options)
    sparsifier.prepare(model, [{"tensor_fqn": f"{name}.weight"} for name in names])
    sparsifier.step()
    sparsifier.squash_mask()


def mask_creator(tensor: torch.Tensor, N: int = 2, M: int = 4) -> torch.Tensor:
    """Bool, of the tensor's shape: the N largest of each M neighbours in its last dimension, by magnitude."""
    check_tensor("mask_creator", "tensor", tensor)
    if not 0 <= N <= M:
        fail("mask_creator", "N must be in [0, M]", f"{N}:{M}")
    matrix = tensor.detach().reshape(-1, tensor.shape[-1]).float().cpu()
    groups = len(matrix) * -(-matrix.shape[1] // M)
    mask = make_mask(Scores(matrix, "magnitude"), (1, 1, N, M), groups)
    return mask.unpack().view(tensor.shape).to(tensor.device)


class PerChannelNormObserver(nn.Module):
    """Observes inputs (…, K): `norm`, (K,) float64, is ‖X_j‖₂ over all tokens so far.

    With `upstream` it is the sum of squares, as torchao's.
    """

    def __init__(self, upstream: bool = False) -> None:
        super().__init__()
        self.upstream = upstream
        self.register_buffer("squares", torch.zeros(0, dtype=torch.float64))

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the tokens of x, and returns it."""
        squares = x.detach().reshape(-1, x.shape[-1]).double().square().sum(0)
        self.squares = squares if self.squares.numel() == 0 else self.squares + squares
        return x

    @property
    def norm(self) -> torch.Tensor:
        """See the class; empty before the first call."""
        return self.squares if self.upstream else self.squares.sqrt()


class WandaSparsifier(BaseSparsifier):
    """Weights of least |W_ij| · ‖X_j‖ leave each output's row (Sun et al. 2024).

    sparsifier.prepare(model, config); run data through the model; sparsifier.step(); sparsifier.squash_mask()

    Args:
        sparsity_level: round(level · K) weights leave each row.
        semi_structured_block_size: M: of each M neighbours round(level · M) leave instead: 4 for 2:4.
        upstream: torchao's numerics: sums of squares instead of norms, and rows of a layer compared with each
            other, so that whole rows may leave.

    Raises ValueError where no data ran before step().
    """

    def __init__(
        self, sparsity_level: float = 0.5, semi_structured_block_size: int | None = None, *,
        upstream: bool = False,
    ) -> None:  # fmt: skip
        level = check_sparsity("WandaSparsifier", "sparsity_level", sparsity_level)
        super().__init__({"sparsity_level": level, "semi_structured_block_size": semi_structured_block_size})
        self.upstream = upstream
        self._handles: list[Any] = []

    def prepare(self, model: nn.Module, config: list[dict[str, Any]] | None = None) -> None:
        """As BaseSparsifier's; layers observe their inputs until squash_mask."""
        super().prepare(model, config)
        for group in self.groups:
            observer = PerChannelNormObserver(self.upstream)
            self.state[group["tensor_fqn"]]["observer"] = observer
            self._handles.append(
                group["module"].register_forward_pre_hook(lambda _, x, o=observer: (o(x[0]), None)[1])
            )

    @torch.no_grad()
    def update_mask(
        self, module: nn.Module, tensor_name: str, sparsity_level: float = 0.0, tensor_fqn: str = "",
        semi_structured_block_size: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Makes the mask of one layer from what it has seen."""
        norm, mask = (
            self.state[tensor_fqn]["observer"].norm,
            getattr(module.parametrizations, tensor_name)[0].mask,
        )
        if norm.numel() == 0:
            fail("WandaSparsifier", "data must run through the model before step()", f"none at {tensor_fqn}")
        weight = getattr(module, tensor_name).detach()
        if self.upstream:
            scores = Scores((weight.double().abs() * norm).cpu())
        else:
            scores = Scores(weight, "magnitude", norm)
        if semi_structured_block_size is not None:
            m = check_int("WandaSparsifier", "semi_structured_block_size", semi_structured_block_size, 1)
            groups = len(weight) * -(-weight.shape[1] // m)
            new = make_mask(scores, (1, 1, m - round(sparsity_level * m), m), groups)
        elif self.upstream:
            new = make_mask(scores, (1, 1, 0, 0), round(sparsity_level * weight.numel()))
        else:
            new = make_mask(scores, (1, 1, 0, 0), round(sparsity_level * weight.shape[1]), each_row=True)
        mask.copy_(new.unpack())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As BaseSparsifier's; what was observed goes on being added to."""
        observers = {fqn: state["observer"] for fqn, state in self.state.items()}
        super().load_state_dict(state_dict, strict)
        for fqn, observer in observers.items():
            observer.squares = self.state[fqn]["observer"].squares.clone()
            self.state[fqn]["observer"] = observer

    def squash_mask(self, *args: Any, **kwargs: Any) -> None:
        """As BaseSparsifier's; observing ends."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        super().squash_mask(*args, **kwargs)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, of_mask: bool) -> torch.Tensor:
        ctx.of_mask = of_mask
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad * ctx.saved_tensors[0] if ctx.of_mask else grad, None, None


class _MaskOfScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, remove: int) -> torch.Tensor:
        mask = make_mask(Scores(scores.detach().float()), (1, 1, 0, 0), remove).unpack()
        return mask.to(scores.device).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None


class SupermaskLinear(nn.Linear):
    """A linear layer that learns which blocks of its weight to keep (Ramanujan et al. 2020): a score a block.

    Args:
        sparsity_level: exactly round(level · blocks) blocks of least score are left out.
        blocksize: of square blocks; those at the edges are smaller.
        fixed_mask: scores do not learn.
        fixed_weight: the weight does not.
        others: of nn.Linear.

    The gradient of the mask goes to the scores as it is (straight through).
    """

    def __init__(
        self, sparsity_level: float, blocksize: int, fixed_mask: bool = False, fixed_weight: bool = False,
        *args: Any, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **others)
        self.sparsity_level = check_sparsity("SupermaskLinear", "sparsity_level", sparsity_level)
        self.blocksize = check_block_shape("SupermaskLinear", (blocksize, blocksize))[0]
        grid = grid_of(tuple(self.weight.shape), (blocksize, blocksize))
        scores = torch.empty(grid, device=self.weight.device, dtype=self.weight.dtype)
        self.scores = nn.Parameter(scores, requires_grad=not fixed_mask)
        nn.init.kaiming_uniform_(self.scores, a=5**0.5)
        self.weight.requires_grad_(not fixed_weight)

    def get_mask(self) -> torch.Tensor:
        """(N, K): 1 where a block is kept; differentiable with respect to the scores."""
        blocks = _MaskOfScores.apply(self.scores, round(self.sparsity_level * self.scores.numel()))
        side = (self.blocksize, self.blocksize)
        return expand_mask(blocks, tuple(self.weight.shape), side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        return functional.linear(x, self.weight * self.get_mask(), self.bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, sparsity_level: float = 0.0, blocksize: int = 1, **others: Any
    ) -> SupermaskLinear:
        """With a copy of a layer's weight and bias; scores are the norms of its blocks."""
        sizes = {
            "bias": linear.bias is not None,
            "device": linear.weight.device,
            "dtype": linear.weight.dtype,
        }
        new = cls(
            sparsity_level,
            blocksize,
            False,
            False,
            linear.in_features,
            linear.out_features,
            **sizes,
            **others,
        )
        with torch.no_grad():
            new.weight.copy_(linear.weight)
            if linear.bias is not None:
                new.bias.copy_(linear.bias)
            blocks = to_blocks(linear.weight.detach(), (blocksize, blocksize)).flatten(2).float()
            new.scores.copy_(blocks.norm(dim=2))
        return new.train(linear.training)

    @classmethod
    def to_linear(cls, layer: SupermaskLinear) -> nn.Linear:
        """An nn.Linear with the masked weight; for sparsify_ with BlockSparseWeightConfig."""
        new = nn.Linear(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            layer.weight.device,
            layer.weight.dtype,
        )
        with torch.no_grad():
            new.weight.copy_(layer.weight * layer.get_mask())
            if layer.bias is not None:
                new.bias.copy_(layer.bias)
        return new.train(layer.training)


def tile_mask(x: torch.Tensor) -> torch.Tensor:
    """Bool (N, K): of each 4×4 tile at most 2 in every row and column stay, the largest first, greedily.

    So x and its transpose are both 2:4. Sizes that are no multiple of 4 count as padded.
    """
    tiles = to_blocks(x.detach().abs().float(), (4, 4))
    grid = tiles.shape[:2]
    order = tiles.reshape(-1, 16).argsort(dim=1, descending=True, stable=True)
    at = torch.arange(len(order), device=x.device)
    rows = torch.zeros(len(order), 4, dtype=torch.int64, device=x.device)
    cols, kept = torch.zeros_like(rows), torch.zeros(len(order), 16, dtype=torch.bool, device=x.device)
    for rank in range(16):
        place = order[:, rank]
        row, col = place // 4, place % 4
        free = (rows[at, row] < 2) & (cols[at, col] < 2)
        kept[at, place] = free
        rows[at, row] += free
        cols[at, col] += free
    tiles = kept.view(*grid, 4, 4).transpose(1, 2).reshape(grid[0] * 4, grid[1] * 4)
    return tiles[: x.shape[0], : x.shape[1]]


def semi_structured_sparsify(x: torch.Tensor, algo: str = "", backend: str = "cutlass") -> torch.Tensor:
    """Zeros outside tile_mask(x) for x (N, K); gradients pass as they are. `algo`, `backend`: no effect."""
    return _StraightThrough.apply(x, tile_mask(x), False)


def semi_structured_sparsify_like(
    x: torch.Tensor, pattern: torch.Tensor, gradient: str = "sparse"
) -> torch.Tensor:
    """Zeros for x where `pattern`, of its shape, is zero.

    Args:
        x: (N, K).
        pattern: a tensor or a mask.
        gradient: "sparse": zero where x is made zero; "dense" or "ste": as it is.
    """
    check_known("semi_structured_sparsify_like", "gradient", gradient, ("sparse", "dense", "ste"))
    return _StraightThrough.apply(x, pattern.detach() != 0, gradient == "sparse")


class SemiSparseLinear(nn.Linear):
    """nn.Linear that multiplies by semi_structured_sparsify(weight): training with 2:4 weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        return functional.linear(x, semi_structured_sparsify(self.weight), self.bias)

    @classmethod
    def from_dense(cls, linear: nn.Linear) -> SemiSparseLinear:
        """A layer around the same Parameters."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    @classmethod
    def to_dense(cls, layer: SemiSparseLinear) -> nn.Linear:
        """An nn.Linear around the same Parameters: dense, as they are."""
        new = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)


class SemiSparseActivationLinear(SemiSparseLinear):
    """nn.Linear whose input is made 2:4, tile by tile of 4 tokens and 4 features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N)."""
        flat = semi_structured_sparsify(x.reshape(-1, x.shape[-1])).view(x.shape)
        return functional.linear(flat, self.weight, self.bias)


def swap_linear_with_semi_sparse_linear(
    model: nn.Module, config: Mapping[str, type], current: str = ""
) -> None:
    """Replaces the nn.Linear layers of `config`, {name: a class with from_dense}, in place.

    Raises ValueError for names that are no nn.Linear of the model; nothing has changed then. `current` has
    no effect.
    """
    linears = [name for name, m in model.named_modules() if type(m) is nn.Linear and name]
    for name in config:
        check_known("swap_linear_with_semi_sparse_linear", "a layer", name, linears)
    for name, kind in config.items():
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, kind.from_dense(model.get_submodule(name)))


def swap_semi_sparse_linear_with_linear(model: nn.Module, current: str = "") -> None:
    """The inverse, for all SemiSparseLinear layers; Parameters stay."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SemiSparseLinear) and name:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, type(module).to_dense(module))
