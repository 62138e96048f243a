"""BaseSparsifier, WeightNormSparsifier and NearlyDiagonalSparsifier, masks by Rarefy's core."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao import pruning as ao
from torch.nn import functional
from torch.nn.utils import parametrize

from ...checks import check_known, fail
from ...masks import expand_mask, from_blocks, grid_of, to_blocks
from ...prune.criteria import check_sparsity
from ...prune.masks import Scores, make_mask
from ...prune.patterns import matrix_shape

_OF_THE_MODEL = ("module", "module_fqn", "tensor_name")


class FakeSparsity(ao.FakeSparsity):
    """A mask, times a weight. Its state_dict has the mask; torch's is empty, and a prepared model wants one.

    A state_dict without one, as torch's models have it, leaves the mask as it is.
    """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return nn.Module.state_dict(self, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}mask", self.mask)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BaseSparsifier(ao.BaseSparsifier):
    """As torch's, with `update_mask` to be defined, and mended.

    * prepare twice is an error (there: groups and parametrizations pile up), and so is a weight that is
      parametrized already; config entries are checked before anything changes, near names are listed;
    * models that are prepared load what others like them saved (there: an error, masks are missing);
    * state_dict copies, and has `defaults`; load_state_dict leaves its argument alone, checks it before
      anything changes, and says that prepare must come first.
    """

    def prepare(self, model: nn.Module, config: list[dict[str, Any]] | None = None) -> None:
        """Gives the tensors of `config` masks that keep everything; None: the weight of every nn.Linear.

        Args:
            model: changed in place.
            config: dicts with "tensor_fqn"; other keys override the defaults.

        Raises ValueError for a second call, names that the model lacks, weights that are parametrized.
        """
        op = "prepare"
        if self.groups:
            fail(op, "a sparsifier must be prepared once (make another one)", "a second call")
        known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        entries = []
        for entry in config or ():
            if not isinstance(entry, Mapping) or "tensor_fqn" not in entry:
                got = sorted(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
                fail(op, "an entry of config must be a dict with a tensor_fqn", got)
            name = str(entry["tensor_fqn"]).removeprefix(".")
            owner, _, tensor = name.rpartition(".")
            module = dict(model.named_modules(remove_duplicate=False)).get(owner)
            if module is not None and parametrize.is_parametrized(module, tensor):
                fail(op, "a weight must not be parametrized (squash_mask() first)", name)
            check_known(op, "tensor_fqn", name, known)
            entries.append({**entry, "tensor_fqn": name})
        super().prepare(model, config if config is None else entries)

    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        super()._prepare(*args, **kwargs)
        for group in self.groups:
            for made in group["module"].parametrizations[group["tensor_name"]]:
                if type(made) is ao.FakeSparsity:
                    made.__class__ = FakeSparsity

    def state_dict(self) -> dict[str, Any]:
        """{"state", "groups", "defaults"}: copies, groups without what is the model's."""
        groups = [{k: v for k, v in g.items() if k not in _OF_THE_MODEL} for g in self.groups]
        return copy.deepcopy({"state": dict(self.state), "groups": groups, "defaults": self.defaults})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes masks, groups and defaults over; `state_dict` is not changed.

        Args:
            state_dict: of this class, or of torch's.
            strict: whether it must have the same tensors; else those in both are taken.

        Raises ValueError, before anything changes, for a call before prepare, other tensors, other shapes.
        """
        op = "load_state_dict"
        if not self.groups:
            fail(op, "prepare(model) must be called first", "a sparsifier without a model")
        mine, theirs = {g["tensor_fqn"]: g for g in self.groups}, state_dict["state"]
        if strict and (differ := sorted(mine.keys() ^ theirs.keys())):
            fail(op, "state_dict must have the same tensors", f"{', '.join(differ[:5])} in one of both only")
        names = [name for name in mine if name in theirs]
        for name in names:
            new, old = theirs[name].get("mask"), self.state[name]["mask"]
            if new is not None and new.shape != old.shape:
                fail(op, f"the mask of {name} must be of shape {tuple(old.shape)}", tuple(new.shape))
        saved = {g["tensor_fqn"].removeprefix("."): g for g in state_dict["groups"]}
        for name in names:
            mask = self.state[name]["mask"]
            for key, value in theirs[name].items():
                if key == "mask":
                    mask.copy_(value)
                else:
                    self.state[name][key] = copy.deepcopy(value)
            entry = saved.get(name, {})
            mine[name].update(
                {k: copy.deepcopy(v) for k, v in entry.items() if k not in (*_OF_THE_MODEL, "mask")}
            )
        self.defaults = copy.deepcopy(dict(state_dict.get("defaults", self.defaults)))


def weight_norm_mask(scores: torch.Tensor, level: float, block: tuple[int, int], zeros: int) -> torch.Tensor:
    """WeightNormSparsifier's mask, bool (N, K), True stays.

    Args:
        scores: (N, K), norms of single weights.
        level: the part of the blocks that become sparse: round(level · blocks) of least mean score, all of
            them at 1, and otherwise not the last one.
        block: (R, C); blocks at the edges may be smaller.
        zeros: of each sparse block so many elements of least score leave, R · C: all. Elements that a block
            at the edge lacks count as left.

    Raises ValueError for a level outside [0, 1] or NaN (there: taken for the nearer end, a bare error).
    """
    level = check_sparsity("update_mask", "sparsity_level", level)
    shape, size = (scores.shape[0], scores.shape[1]), block[0] * block[1]
    if level == 0 or zeros == 0:
        return torch.ones(shape, dtype=torch.bool)
    if level == 1 and zeros == size:
        return torch.zeros(shape, dtype=torch.bool)
    scores = scores.detach().cpu()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    grid = grid_of(shape, block)
    means = to_blocks(scores, block).sum((2, 3)) / to_blocks(torch.ones_like(scores), block).sum((2, 3))
    count = grid[0] * grid[1]
    chosen = make_mask(
        Scores(means), (1, 1, 0, 0), count if level == 1 else min(round(level * count), count - 1)
    )
    if chosen.nan:
        text = f"[step] {chosen.nan} blocks have scores that are NaN; they count as lowest"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    kept = expand_mask(chosen.unpack(), shape, block)
    if zeros == size:
        return kept
    pad = (0, grid[1] * block[1] - shape[1], 0, grid[0] * block[0] - shape[0])
    elements = to_blocks(functional.pad(scores, pad, value=-torch.inf), block).reshape(count, size)
    inside = make_mask(Scores(elements), (1, 1, 0, 0), zeros, each_row=True).unpack()
    return kept | from_blocks(inside.view(*grid, *block), shape)


class WeightNormSparsifier(BaseSparsifier, ao.WeightNormSparsifier):
    """Blocks of least norm lose some or all of their weights.

    Args:
        sparsity_level: the part of the blocks that become sparse; see weight_norm_mask.
        sparse_block_shape: (R, C).
        zeros_per_block: how many weights of such a block leave; None: all. 2:4 is (1.0, (1, 4), 2).
        norm: 1 (|w|), 2 (w², the default) or a function of the weight.

    Mended: any shape (there blocks must fit with N:M), weights of more dimensions as (out, rest), float16 on
    the CPU, exact counts, ties spread over rows (there whole rows are lost), NaN leaves first with a warning
    (there it stays), one mask for weights that share a Parameter, masks keep their dtype; faster.

    Raises ValueError for a sparsity_level outside [0, 1], zeros_per_block outside [0, R · C], and vectors.
    """

    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        masks: dict[int, torch.Tensor] = {}
        for group in self.groups:
            tensor = getattr(group["module"], group["tensor_name"])
            if tensor.ndim < 2:
                fail("prepare", f"{group['tensor_fqn']} must have 2 or more dimensions", tuple(tensor.shape))
        for group in self.groups:
            tensor = getattr(group["module"], group["tensor_name"])
            mask = masks.setdefault(id(tensor), group.pop("mask", torch.ones_like(tensor.detach())))
            self.state[group["tensor_fqn"]]["mask"] = mask
        for group in self.groups:
            kind = group.get("parametrization", FakeSparsity)
            made = kind(self.state[group["tensor_fqn"]]["mask"])
            parametrize.register_parametrization(group["module"], group["tensor_name"], made)

    @torch.no_grad()
    def update_mask(
        self,
        module: nn.Module,
        tensor_name: str,
        sparsity_level: float,
        sparse_block_shape: tuple[int, int],
        zeros_per_block: int,
        **kwargs: Any,
    ) -> None:
        """Makes the mask of one tensor anew; what has left has score 0, so it stays away."""
        size = sparse_block_shape[0] * sparse_block_shape[1]
        if not 0 <= zeros_per_block <= size:
            fail("update_mask", f"zeros_per_block must be in [0, {size}]", zeros_per_block)
        mask = getattr(module.parametrizations, tensor_name)[0].mask
        tensor = getattr(module, tensor_name).detach()
        matrix = tensor.reshape(matrix_shape(tensor.shape))
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        scores = self.norm_fn(matrix)
        mask.copy_(
            weight_norm_mask(scores, sparsity_level, sparse_block_shape, zeros_per_block).view(mask.shape)
        )


class NearlyDiagonalSparsifier(BaseSparsifier, ao.NearlyDiagonalSparsifier):
    """A band around the diagonal stays: as torch's, with BaseSparsifier's mendings.

    Args:
        nearliness: the width of the band, odd.
    """
