"""The classes of torch.nn.utils.prune: methods of your own by compute_mask, and those that it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...checks import check_known, check_tensor, fail
from ...prune.masks import Mask, Scores, make_mask
from ...prune.patterns import matrix_shape
from .pruned import add_mask, count_of, left_of, place, remove, scores_of

_TYPES = ("unstructured", "structured", "global")


def without_lowest(scores: torch.Tensor, count: int, left: torch.Tensor) -> torch.Tensor:
    """`left`, bool of the shape of `scores`, without its `count` lowest; ties leave evenly over rows."""
    shape = matrix_shape(scores.shape) if scores.ndim > 1 else (1, scores.numel())
    before = Mask.pack(left.cpu().reshape(shape))
    matrix = Scores(scores.float().cpu().reshape(shape))
    gone = left.numel() - before.kept
    return make_mask(matrix, (1, 1, 0, 0), gone + count, previous=before).unpack().view(scores.shape)


class BasePruningMethod(ABC):
    """A way to prune; subclasses say `PRUNING_TYPE` and `compute_mask`.

    PRUNING_TYPE: "unstructured": compute_mask sees only the elements that are left, flat; "structured": only
    the slices along `self.dim` that are left; "global": everything.
    """

    PRUNING_TYPE = "unstructured"
    _tensor_name = ""

    @abstractmethod
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """The mask, 1 stays, of the shape of `t`, scores of what is left; `default_mask` was there before."""

    def _on_top(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mask after this method, where `mask` was there before."""
        op = type(self).__name__
        check_known(op, "PRUNING_TYPE", self.PRUNING_TYPE, _TYPES)
        if self.PRUNING_TYPE == "unstructured":
            part: Any = mask != 0
        elif self.PRUNING_TYPE == "structured":
            dim = self.dim
            if scores.ndim < 2:
                fail(op, "a tensor must have 2 or more dimensions", tuple(scores.shape))
            if not -scores.ndim <= dim < scores.ndim:
                fail(op, f"dim must be of {scores.ndim} dimensions", dim)
            left = (mask != 0).movedim(dim, 0).flatten(1).any(1)
            part = (slice(None),) * (dim % scores.ndim) + (left,)
        else:
            part = (slice(None),) * scores.ndim
        new = mask.clone()
        new[part] = self.compute_mask(scores[part], mask[part]).to(new)
        return new

    def prune(
        self, t: torch.Tensor, default_mask: torch.Tensor | None = None,
        importance_scores: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The tensor with zeros where the mask of this method is, on top of `default_mask`; a new one."""
        op = f"{type(self).__name__}.prune"
        check_tensor(op, "t", t)
        mask = torch.ones_like(t) if default_mask is None else default_mask
        if mask.shape != t.shape:
            fail(op, f"default_mask must be of shape {tuple(t.shape)}", tuple(mask.shape))
        return torch.where(self._on_top(scores_of(op, t, importance_scores), mask) != 0, t, 0)

    def apply_mask(self, module: nn.Module) -> torch.Tensor:
        """The pruned tensor of a module that this method was applied to."""
        return getattr(module, self._tensor_name)

    @classmethod
    def apply(
        cls, module: nn.Module, name: str, *args: Any,
        importance_scores: torch.Tensor | None = None, **kwargs: Any,
    ) -> BasePruningMethod:  # fmt: skip
        """Prunes `module.name` in place, on top of what has left before.

        Args:
            module: any.
            name: of a parameter.
            *args: of the method's constructor.
            importance_scores: of the tensor's shape, instead of it.
            **kwargs: of the constructor, too.

        Returns the method; what is pruned is held by the parametrization.
        """
        op, method = f"{cls.__name__}.apply", cls(*args, **kwargs)
        method._tensor_name = name
        tensor, made = place(op, module, name)
        mask = left_of(tensor, made).to(tensor.dtype)
        add_mask(op, module, name, method._on_top(scores_of(op, tensor, importance_scores), mask) != 0)
        return method

    def remove(self, module: nn.Module) -> None:
        """Makes the pruning permanent; see nn_prune.remove."""
        remove(module, self._tensor_name)


class PruningContainer(BasePruningMethod):
    """Several methods for one tensor, one after the other; each sees what those before it have left."""

    PRUNING_TYPE = "global"

    def __init__(self, *methods: BasePruningMethod) -> None:
        given = methods[0] if len(methods) == 1 and isinstance(methods[0], Iterable) else methods
        self._methods: tuple[BasePruningMethod, ...] = ()
        for method in given:
            self.add_pruning_method(method)

    def add_pruning_method(self, method: BasePruningMethod) -> None:
        """One more, for the same tensor.

        Raises TypeError for something else, ValueError for another tensor's.
        """
        op = "PruningContainer"
        if not isinstance(method, BasePruningMethod):
            fail(op, "a method must be a BasePruningMethod", type(method).__name__, TypeError)
        if self._methods and method._tensor_name != self._tensor_name:
            fail(op, f"methods must be for {self._tensor_name!r}", repr(method._tensor_name))
        self._tensor_name = method._tensor_name
        self._methods += (method,)

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Of all of them (the original: of the last one)."""
        for method in self._methods:
            default_mask = method._on_top(t, default_mask)
        return default_mask

    def __len__(self) -> int:  # noqa: D105
        return len(self._methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:  # noqa: D105
        return iter(self._methods)

    def __getitem__(self, at: int) -> BasePruningMethod:  # noqa: D105
        return self._methods[at]


class Identity(BasePruningMethod):
    """Keeps everything."""

    def compute_mask(self, t, default_mask):  # noqa: D102
        return default_mask.clone()


class CustomFromMask(BasePruningMethod):
    """A mask of the tensor's shape, 1 stays."""

    PRUNING_TYPE = "global"

    def __init__(self, mask: torch.Tensor) -> None:
        check_tensor("CustomFromMask", "mask", mask)
        self.mask = mask

    def compute_mask(self, t, default_mask):  # noqa: D102
        if self.mask.shape != default_mask.shape:
            want = tuple(default_mask.shape)
            fail("CustomFromMask", f"mask must be of shape {want}", tuple(self.mask.shape))
        return default_mask * self.mask.to(default_mask)


class _Lowest(BasePruningMethod):
    """Methods of this module see the whole tensor: ties spread over its rows, whatever left before."""

    def __init__(self, amount: Any) -> None:
        self.amount = amount

    def _importance(self, t: torch.Tensor) -> torch.Tensor:
        """What the lowest of leave, of the shape of `t`."""
        raise NotImplementedError

    def compute_mask(self, t, default_mask):
        left = default_mask != 0
        count = count_of(type(self).__name__, self.amount, int(left.sum()))
        return without_lowest(self._importance(t), count, left).to(default_mask)

    def _on_top(self, scores, mask):
        return self.compute_mask(scores, mask)


class RandomUnstructured(_Lowest):
    """Random elements: an int of them, or a part of what is left."""

    def __init__(self, amount: Any, *, generator: torch.Generator | None = None) -> None:
        super().__init__(amount)
        self.generator = generator

    def _importance(self, t: torch.Tensor) -> torch.Tensor:
        return torch.rand(t.shape, generator=self.generator)


class L1Unstructured(_Lowest):
    """Elements of least magnitude: an int of them, or a part of what is left."""

    def _importance(self, t: torch.Tensor) -> torch.Tensor:
        return t.abs()


class _Structured(BasePruningMethod):
    PRUNING_TYPE = "structured"

    def __init__(self, amount: Any, dim: int = -1) -> None:
        self.amount, self.dim = amount, dim

    def _scores(self, slices: torch.Tensor) -> torch.Tensor:
        """(number,) of slices (number, elements)."""
        raise NotImplementedError

    def compute_mask(self, t, default_mask):
        slices = t.float().movedim(self.dim, 0).flatten(1)
        count = count_of(type(self).__name__, self.amount, len(slices))
        every = torch.ones(len(slices), 1, dtype=torch.bool)
        keep = without_lowest(self._scores(slices).unsqueeze(1), count, every).view(-1)
        shape = [1] * t.ndim
        shape[self.dim] = -1
        return default_mask * keep.view(shape).to(default_mask)


class RandomStructured(_Structured):
    """Random slices along `dim`: an int of them, or a part of those that are left."""

    def __init__(self, amount: Any, dim: int = -1, *, generator: torch.Generator | None = None) -> None:
        super().__init__(amount, dim)
        self.generator = generator

    def _scores(self, slices: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(slices), generator=self.generator)


class LnStructured(_Structured):
    """Slices along `dim` of least n-norm: an int of them, or a part of those that are left."""

    def __init__(self, amount: Any, n: float, dim: int = -1) -> None:
        super().__init__(amount, dim)
        self.n = n

    def _scores(self, slices: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(slices, ord=self.n, dim=1)
