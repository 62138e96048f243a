"""torch.ao.pruning's callbacks of Lightning; they import, and can be called by hand, where Lightning is not.

from rarefy.compat.torch_ao_pruning.lightning import PostTrainingDataSparsity
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.pruning._experimental.data_scheduler import BaseDataScheduler
from torch.ao.pruning._experimental.data_sparsifier import BaseDataSparsifier

from ...checks import fail

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        Callback = object

__all__ = ["PostTrainingDataSparsity", "TrainingAwareDataSparsity"]


class _DataSparsity(Callback):
    """What both share: parameters of a copy of `pl_module.model`, by names with _ for dots.

    There every parameter is taken, and one of three dimensions ends the training with an error; here those of
    at most two are.
    """

    def __init__(self, data_sparsifier_class: type, data_sparsifier_args: Mapping[str, Any]) -> None:
        super().__init__()
        self.data_sparsifier_class = self._subclass(
            "data_sparsifier_class", data_sparsifier_class, BaseDataSparsifier
        )
        self.data_sparsifier_args = dict(data_sparsifier_args)
        self.data_sparsifier: BaseDataSparsifier | None = None
        self.sparsified: nn.Module | None = None

    def _subclass(self, name: str, given: Any, base: type) -> type:
        if not (isinstance(given, type) and issubclass(given, base)):
            got = getattr(given, "__name__", given)
            fail(type(self).__name__, f"{name} must be a {base.__name__}", got, TypeError)
        return given

    def _attach(self, model: nn.Module) -> None:
        """Puts a model's parameters in the sparsifier's place of those of the same names; masks stay."""
        for name, parameter in model.named_parameters():
            if parameter.ndim > 2:
                continue
            name = name.replace(".", "_")
            config = self.data_sparsifier.data_groups.get(name, {})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it replaces what it had
                self.data_sparsifier.add_data(name=name, data=parameter, **config)

    @torch.no_grad()
    def _write(self) -> None:
        """Puts what is left of the parameters into the copy."""
        for name, parameter in self.sparsified.named_parameters():
            if parameter.ndim <= 2:
                masked = self.data_sparsifier.get_data(name.replace(".", "_"), return_original=False)
                parameter.copy_(masked)


class PostTrainingDataSparsity(_DataSparsity):
    """Sparsifies a copy of the model when the fit ends: `callback.sparsified`; the model stays as it is.

    Args:
        data_sparsifier_class: such as DataNormSparsifier; made when it is used.
        data_sparsifier_args: of its constructor, without data_list.
    """

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Copies, sparsifies, squashes."""
        self.sparsified = copy.deepcopy(pl_module.model).eval()
        self.data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        self._attach(self.sparsified)
        self.data_sparsifier.step()
        self._write()
        self.data_sparsifier.squash_mask()


class TrainingAwareDataSparsity(_DataSparsity):
    """Sparsifies a copy of the model after each epoch, along a schedule: `callback.sparsified`.

    Args:
        data_sparsifier_class: see PostTrainingDataSparsity.
        data_sparsifier_args: the same.
        data_scheduler_class: a BaseDataScheduler; made when the training starts.
        data_scheduler_args: of its constructor, without data_sparsifier.
    """

    def __init__(
        self, data_sparsifier_class: type, data_sparsifier_args: Mapping[str, Any],
        data_scheduler_class: type, data_scheduler_args: Mapping[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(data_sparsifier_class, data_sparsifier_args)
        self.data_scheduler_class = self._subclass(
            "data_scheduler_class", data_scheduler_class, BaseDataScheduler
        )
        self.data_scheduler_args = dict(data_scheduler_args)
        self.data_scheduler: BaseDataScheduler | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes sparsifier and schedule."""
        self.data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        self.sparsified = copy.deepcopy(pl_module.model)
        self._attach(self.sparsified)
        self.data_scheduler = self.data_scheduler_class(
            data_sparsifier=self.data_sparsifier, **self.data_scheduler_args
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """A copy of the model as it is now, sparsified; then the schedule moves on."""
        self.sparsified = copy.deepcopy(pl_module.model)
        self._attach(self.sparsified)
        self.data_sparsifier.step()
        self._write()
        self.data_scheduler.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Squashes the masks."""
        self.data_sparsifier.squash_mask()
