"""What is in torch.ao.pruning._experimental: pruners of rows, and a sparsifier of tensors; mended."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.ao.pruning._experimental import data_sparsifier as data
from torch.ao.pruning._experimental import pruner

from ...checks import fail
from ...prune.criteria import check_sparsity
from ...prune.masks import Scores, make_mask
from .sparsifiers import BaseSparsifier, weight_norm_mask


class FakeStructuredSparsity(pruner.FakeStructuredSparsity):
    """A mask of rows. Its state_dict has the mask; torch's is empty, so that prepared models do not load."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return nn.Module.state_dict(self, *args, **kwargs)


class _Mended(BaseSparsifier):
    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        super()._prepare(*args, **kwargs)
        for group in self.groups:
            for made in group["module"].parametrizations[group["tensor_name"]]:
                if type(made) is pruner.FakeStructuredSparsity:
                    made.__class__ = FakeStructuredSparsity


class BaseStructuredSparsifier(_Mended, pruner.BaseStructuredSparsifier):
    """As torch's, `update_mask` to be defined; prune() resizes Linear, Conv2d and LSTM in a row."""


class SaliencyPruner(_Mended, pruner.SaliencyPruner):
    """Exactly int(rows · sparsity_level) rows of least L1 norm leave, ties spread (there by index)."""

    @torch.no_grad()
    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Makes the mask of rows anew."""
        weight = getattr(module, tensor_name).detach()
        mask = getattr(module.parametrizations, tensor_name)[0].mask
        if weight.ndim < 2:
            fail("update_mask", "a weight must have 2 or more dimensions", tuple(weight.shape))
        scores = weight.float().abs().flatten(1).sum(1, keepdim=True).cpu()
        level = check_sparsity("update_mask", "sparsity_level", kwargs["sparsity_level"])
        remove = int(len(mask) * level)
        mask.copy_(make_mask(Scores(scores), (1, 1, 0, 0), remove).unpack().view(-1))


class LSTMSaliencyPruner(_Mended, pruner.LSTMSaliencyPruner):
    """Rows of each of an LSTM's four gates, as torch's."""


class FPGMPruner(_Mended, pruner.FPGMPruner):
    """Rows nearest to all others leave, as torch's."""


class DataNormSparsifier(data.DataNormSparsifier):
    """WeightNormSparsifier for tensors, Parameters and embeddings by name; see weight_norm_mask.

    Mended: levels of 0 and 1 have their masks of ones and zeros (there the last lines overwrite them), edges
    keep exact counts, masks keep their dtype.
    """

    def update_mask(  # noqa: D102
        self, name: str, data: torch.Tensor, sparsity_level: float, sparse_block_shape: tuple[int, int],
        zeros_per_block: int, **kwargs: Any,
    ) -> None:  # fmt: skip
        size = sparse_block_shape[0] * sparse_block_shape[1]
        if not 0 <= zeros_per_block <= size:
            fail("update_mask", f"zeros_per_block must be in [0, {size}]", zeros_per_block)
        matrix = data.detach().squeeze()
        if matrix.ndim > 2:
            fail("update_mask", f"{name} must have at most 2 dimensions", tuple(data.shape))
        matrix = matrix.reshape(-1, matrix.shape[-1]) if matrix.ndim else matrix.reshape(1, 1)
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        scores = matrix.abs() if self.norm == "L1" else matrix.square()
        mask = self.get_mask(name)
        new = weight_norm_mask(scores, sparsity_level, sparse_block_shape, zeros_per_block)
        mask.data.copy_(new.view(mask.shape))
