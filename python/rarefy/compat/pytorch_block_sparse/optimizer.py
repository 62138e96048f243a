"""SparseOptimizer: blocks of small norm leave, blocks elsewhere begin; as in pytorch_block_sparse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...checks import check_known, fail
from ...pattern import BsrPattern
from .matrix import BlockSparseMatrixBase


class SparseOptimizerStrategy:
    """Base of what SparseOptimizer does to a matrix."""

    def run(self, block_sparse_matrix: BlockSparseMatrixBase) -> torch.Tensor:
        """Changes a matrix; (blocks · R, C): 1 where data is what it was, 0 where it is new."""
        raise NotImplementedError(f"[{type(self).__name__}] run must be defined; got none")


class MagnitudeSparseOptimizerStrategy(SparseOptimizerStrategy):
    """The blocks of smallest norm leave, as many begin at random places.

    Args:
        cleanup_ratio: int(blocks · ratio) blocks leave, in [0, 1].
        new_coefficients_distribution: "uniform" in ±scale·σ, or "gaussian" with mean scale·µ and deviation
            scale·σ; µ and σ are those of all values before.
        new_coefficients_scale: see above.
        generator: of places and values; default: torch's global one.
    """

    def __init__(
        self,
        cleanup_ratio: float,
        new_coefficients_distribution: str = "uniform",
        new_coefficients_scale: float = 0.1,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        op = type(self).__name__
        if not 0 <= cleanup_ratio <= 1:
            fail(op, "cleanup_ratio must be in [0, 1]", cleanup_ratio)
        distribution = new_coefficients_distribution
        check_known(
            op, "new_coefficients_distribution", distribution, SparseOptimizer.COEFFICIENTS_DISTRIBUTION
        )
        self.cleanup_ratio = cleanup_ratio
        self.new_coefficients_distribution = new_coefficients_distribution
        self.new_coefficients_scale = new_coefficients_scale
        self.generator = generator

    @torch.no_grad()
    def initialize_new_blocks(self, old_data: torch.Tensor, new_data: torch.Tensor) -> None:
        """Draws `new_data`, any shape, in place, from mean and deviation of `old_data`."""
        scale, deviation = self.new_coefficients_scale, float(old_data.double().std(correction=0))
        if self.new_coefficients_distribution == "gaussian":
            mean = float(old_data.double().mean())
            drawn = torch.randn(new_data.shape, generator=self.generator) * (deviation * scale) + mean * scale
        else:
            drawn = (2 * torch.rand(new_data.shape, generator=self.generator) - 1) * (deviation * scale)
        new_data.copy_(drawn)

    @torch.no_grad()
    def run(
        self, block_sparse_matrix: BlockSparseMatrixBase, optimizer: Optimizer | None = None
    ) -> torch.Tensor:
        """Moves int(blocks · ratio) blocks; values and state in `optimizer` of the others go with them.

        Where fewer places are free than blocks leave, blocks stay that would have left, as they are.
        """
        bsm = block_sparse_matrix
        bad = bsm.block_norm().argsort(stable=True)[: int(bsm.nnzb * self.cleanup_ratio)]
        free = (~bsm.block_mask()).flatten().nonzero().flatten().cpu()
        bad = bad[: len(free)]
        chosen = free[torch.randperm(len(free), generator=self.generator)[: len(bad)]]
        mask = bsm.block_mask().flatten()
        mask[bsm.pattern.positions()[bad]] = False
        mask[chosen.to(mask.device)] = True
        pattern = BsrPattern.from_mask(
            mask.view(bsm.grid), shape=tuple(bsm.shape), block_shape=bsm.block_shape
        )
        old = bsm.values.detach().clone()
        change = bsm.change_pattern(pattern, optimizer)
        fresh = (change.source < 0).nonzero().flatten()
        new = old.new_zeros((len(fresh), *bsm.block_shape))
        if len(fresh):
            self.initialize_new_blocks(old, new)
        bsm.values.index_copy_(0, fresh, new)
        bsm.zero_padding_()
        keep = torch.ones_like(bsm.data)
        keep.view(-1, *bsm.block_shape)[fresh] = 0
        return keep


class OptimizerStateUpdater:
    """What an optimizer keeps of a matrix: any torch optimizer whose state tensors have its values' shape."""

    def __init__(self, optimizer: Optimizer, sparse_object: BlockSparseMatrixBase) -> None:
        if not isinstance(sparse_object, BlockSparseMatrixBase):
            got = type(sparse_object).__name__
            fail("OptimizerStateUpdater", "sparse_object must be a BlockSparseMatrix", got, TypeError)
        self.optimizer, self.sparse_object = optimizer, sparse_object

    @staticmethod
    def is_compatible(optimizer: Any) -> bool:
        """Whether it is a torch.optim.Optimizer."""
        return isinstance(optimizer, Optimizer)

    def has_parameter(self) -> bool:
        """Whether the optimizer has the matrix's values."""
        mine = self.sparse_object.values
        return any(p is mine for group in self.optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def update_state_data(self, param: nn.Parameter, state_keep_mask: torch.Tensor) -> None:
        """Multiplies the state of a Parameter by a mask of as many elements; counters stay."""
        for value in self.optimizer.state.get(param, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                value.mul_(state_keep_mask.view(value.shape))

    def update_state(self, state_keep_mask: torch.Tensor) -> bool:
        """The same for the matrix; whether the optimizer has it."""
        found = self.has_parameter()
        if found:
            self.update_state_data(self.sparse_object.values, state_keep_mask)
        return found


class AdamOptimizerStateUpdater(OptimizerStateUpdater):
    """The same for torch's Adam and AdamW, whose states are exp_avg, exp_avg_sq and max_exp_avg_sq."""

    @staticmethod
    def is_compatible(optimizer: Any) -> bool:
        """Whether it is an Adam or AdamW."""
        return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


class SparseOptimizer(Optimizer):
    """Cleans matrices at each step: a part of their blocks, `lr`, is replaced. Schedulers of lr work on it.

    sparse = SparseOptimizer(SparseOptimizer.sparse_objects(model), lr=0.1)
    sparse.attach_optimizer(optimizer)
    for batch in data: loss.backward(); optimizer.step(); every so many steps: sparse.step()

    Args:
        sparse_objects: matrices, or groups: dicts with "sparse_objects" and any of the other arguments.
        lr: the part of the blocks that leaves at a step, in [0, 1].
        method: "magnitude".
        new_coefficients_scale, new_coefficients_distribution: see MagnitudeSparseOptimizerStrategy.
        generator: of places and values; default: torch's global one.

    Raises ValueError for a ratio outside [0, 1], a name that is not known, a matrix in two groups.
    """

    METHODS: tuple[str, ...] = ("magnitude",)
    COEFFICIENTS_DISTRIBUTION: tuple[str, ...] = ("uniform", "gaussian")
    allowed_keys = frozenset(("lr", "method", "new_coefficients_scale", "new_coefficients_distribution"))

    def __init__(
        self,
        sparse_objects: Any,
        lr: float = 1e-1,
        method: str = "magnitude",
        new_coefficients_scale: float = 0.1,
        new_coefficients_distribution: str = "uniform",
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "method": method,
            "new_coefficients_scale": new_coefficients_scale,
            "new_coefficients_distribution": new_coefficients_distribution,
        }
        objects = (
            [sparse_objects] if isinstance(sparse_objects, nn.Module | Mapping) else list(sparse_objects)
        )
        groups = objects if objects and isinstance(objects[0], dict) else [{"sparse_objects": objects}]
        self.attached_optimizers: list[Optimizer] = []
        self.generator = generator
        super().__init__(groups, defaults)

    @staticmethod
    def sparse_objects(model: nn.Module) -> list[BlockSparseMatrixBase]:
        """The matrices of a model."""
        return [module for module in model.modules() if isinstance(module, BlockSparseMatrixBase)]

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """From now on what it keeps of the matrices moves along, whatever optimizer of torch it is."""
        if not OptimizerStateUpdater.is_compatible(optimizer):
            got = type(optimizer).__name__
            fail("attach_optimizer", "optimizer must be a torch.optim.Optimizer", got, TypeError)
        if any(optimizer is other for other in self.attached_optimizers):
            warnings.warn("[attach_optimizer] this optimizer is attached already", stacklevel=2)
            return
        self.attached_optimizers.append(optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds matrices, {"sparse_objects": …}, with arguments of their own."""
        op = "SparseOptimizer"
        if not isinstance(param_group, dict):
            fail(op, "a group must be a dict", type(param_group).__name__, TypeError)
        group = dict(param_group)
        if "sparse_objects" not in group or not group.keys() - {"sparse_objects"} <= self.allowed_keys:
            keys = f"sparse_objects and keys of {sorted(self.allowed_keys)}"
            fail(op, f"a group must have {keys}", sorted(group))
        objects = group["sparse_objects"]
        objects = [objects] if isinstance(objects, nn.Module) else list(objects)
        for matrix in objects:
            if not isinstance(matrix, BlockSparseMatrixBase):
                fail(op, "sparse_objects must be BlockSparseMatrix", type(matrix).__name__, TypeError)
        group = {**self.defaults, **group, "sparse_objects": objects, "params": []}
        if not 0 <= group["lr"] <= 1:
            fail(op, "lr, the part of the blocks that leaves, must be in [0, 1]", group["lr"])
        check_known(op, "method", group["method"], self.METHODS)
        distribution = group["new_coefficients_distribution"]
        check_known(op, "new_coefficients_distribution", distribution, self.COEFFICIENTS_DISTRIBUTION)
        mine = {id(matrix) for matrix in objects}
        if len(mine) < len(objects) or any(
            id(m) in mine for g in self.param_groups for m in g["sparse_objects"]
        ):
            fail(op, "a matrix must be in one group, once", "one that is there already")
        self.param_groups.append(group)

    def clean(
        self, p: BlockSparseMatrixBase, method: str, clean_ratio: float, new_coefficients_scale: float,
        new_coefficients_distribution: str,
    ) -> None:  # fmt: skip
        """Replaces a part of the blocks of one matrix, and moves its state in the attached optimizers."""
        if not isinstance(p, BlockSparseMatrixBase):
            fail("clean", "p must be a BlockSparseMatrix", type(p).__name__, TypeError)
        check_known("clean", "method", method, self.METHODS)
        holders = [o for o in self.attached_optimizers if OptimizerStateUpdater(o, p).has_parameter()]
        if self.attached_optimizers and not holders:
            fail("clean", "an attached optimizer must have the matrix's values", "none that has")
        if not self.attached_optimizers:
            warnings.warn("[clean] no optimizer is attached: momentum stays with places", stacklevel=3)
        strategy = MagnitudeSparseOptimizerStrategy(
            clean_ratio, new_coefficients_distribution, new_coefficients_scale, generator=self.generator
        )
        strategy.run(p, *holders[:1])

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Replaces blocks of all matrices whose group's lr is not 0."""
        for group in self.param_groups:
            if group["lr"] > 0:
                keys = ("method", "new_coefficients_scale", "new_coefficients_distribution")
                for p in group["sparse_objects"]:
                    self.clean(p, clean_ratio=group["lr"], **{key: group[key] for key in keys})

    def state_dict(self) -> dict[str, Any]:
        """The groups' arguments; the matrices are the model's."""
        groups = [
            {k: v for k, v in g.items() if k not in ("sparse_objects", "params")} for g in self.param_groups
        ]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the arguments of as many groups over."""
        groups: Iterable[Any] = state_dict["param_groups"]
        if len(list(groups)) != len(self.param_groups):
            fail(
                "SparseOptimizer.load_state_dict",
                f"there must be {len(self.param_groups)} groups",
                len(groups),
            )
        for mine, saved in zip(self.param_groups, groups, strict=True):
            mine.update(saved)
