"""Layers whose patterns can move: stored blocks, and their masked dense twins, behind one interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checks import check_known, fail
from ..masks import block_norms, expand_mask, grid_of, to_blocks
from ..modules import BlockSparseLinear
from ..pattern import BsrPattern
from ..pattern_weight import PatternWeight
from ..pseudo import PseudoBlockSparseLinear
from ..values import init_bounds

# Of blocks that are grown: (number, R, C) on the CPU, from the layer's values (nnzb, R, C), the bound of an
# initialisation for each new block, and a generator.
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]


class Movable:
    """A weight whose pattern moves, with all layers that share it.

    Attributes:
        names: of the layers.
        modules: the layers.
        explored: (block rows, block columns) bool: which blocks were stored at any time.
    """

    shape: tuple[int, int]
    block_shape: tuple[int, int]

    def __init__(self, names: list[str], modules: list[nn.Module]) -> None:
        self.names, self.modules = names, modules
        self.explored = self.mask()

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns."""
        return grid_of(self.shape, self.block_shape)

    @property
    def parameter(self) -> nn.Parameter:
        """What the optimizer has."""
        raise NotImplementedError

    @property
    def nnzb(self) -> int:
        """How many blocks are stored."""
        return int(self.mask().count_nonzero())

    def mask(self) -> torch.Tensor:
        """(block rows, block columns) bool on the CPU: which blocks are stored."""
        raise NotImplementedError

    def norms(self) -> torch.Tensor:
        """(block rows, block columns) float32 or float64 on the CPU: L2 norms, −1 where nothing is stored."""
        raise NotImplementedError

    def check(self, optimizer: Optimizer | None) -> None:
        """Raises what `change` would raise; changes nothing."""
        raise NotImplementedError

    def change(
        self, mask: torch.Tensor, optimizer: Optimizer | None, draw: Draw | None, random: torch.Generator
    ) -> None:
        """Stores the blocks of `mask` from now on: those that stay keep values and optimizer state.

        New blocks and their state are zero; with `draw` their values are what it draws.
        """
        raise NotImplementedError

    def _drawn(
        self,
        draw: Draw,
        values: torch.Tensor,
        mask: torch.Tensor,
        rows: torch.Tensor,
        random: torch.Generator,
    ) -> torch.Tensor:
        bounds = init_bounds(mask, self.shape[1], self.block_shape[1])[rows]
        return draw(values, bounds, random).to(values)


class Stored(Movable):
    """A BsrWeight or CsrWeight."""

    def __init__(self, names: list[str], modules: list[nn.Module]) -> None:
        self._weight: PatternWeight = modules[0].weight
        self.shape, self.block_shape = tuple(self._weight.shape), self._weight.block_shape
        super().__init__(names, modules)

    @property
    def weight(self) -> PatternWeight:
        """The weight of the first layer, as it is now."""
        return self.modules[0].weight

    @property
    def parameter(self) -> nn.Parameter:  # noqa: D102
        return self.weight.values

    @property
    def nnzb(self) -> int:  # noqa: D102
        return self.weight.nnzb

    def mask(self) -> torch.Tensor:  # noqa: D102
        return self.weight.block_mask().cpu()

    def norms(self) -> torch.Tensor:  # noqa: D102
        weight = self.weight
        blocks = weight.blocks(weight.values.detach()).flatten(1)
        wide = blocks if blocks.dtype == torch.float64 else blocks.float()
        norms = torch.linalg.vector_norm(wide, dim=1).cpu()
        grid = norms.new_full(self.grid, -1)
        grid.view(-1)[weight.pattern.positions().cpu()] = norms
        return grid

    def check(self, optimizer: Optimizer | None) -> None:  # noqa: D102
        from ..pattern_change import PatternChange

        pattern = self.weight.pattern
        PatternChange(pattern, pattern).check(self.parameter, optimizer)

    def change(
        self, mask: torch.Tensor, optimizer: Optimizer | None, draw: Draw | None, random: torch.Generator
    ) -> None:
        """See Movable."""
        weight = self.weight
        pattern = BsrPattern.from_mask(mask, shape=self.shape, block_shape=self.block_shape)
        before = weight.blocks(weight.values.detach()).clone() if draw is not None else None
        change = weight.change_pattern(pattern.to(weight.device), optimizer)
        if before is not None:
            fresh = (change.source < 0).nonzero().flatten()
            rows = change.new.block_rows()[fresh].cpu()
            new = self._drawn(draw, before, mask, rows, random)
            with torch.no_grad():
                weight.blocks(weight.values).index_copy_(0, fresh, new)
            weight.zero_padding_()
        self.explored |= mask


class Twin(Movable):
    """A PseudoBlockSparseLinear: the same on a dense matrix, as an oracle and where no kernel is wanted."""

    def __init__(self, names: list[str], modules: list[nn.Module]) -> None:
        self.shape = tuple(modules[0].weight.shape)
        self.block_shape = modules[0].block_shape
        super().__init__(names, modules)

    @property
    def parameter(self) -> nn.Parameter:  # noqa: D102
        return self.modules[0].weight

    def mask(self) -> torch.Tensor:  # noqa: D102
        return self.modules[0].block_mask.cpu().clone()

    def norms(self) -> torch.Tensor:  # noqa: D102
        dense = self.modules[0].masked_weight().detach()
        norms = block_norms(dense, self.block_shape).to(self.parameter.dtype).cpu()
        return norms.masked_fill_(~self.mask(), -1)

    def check(self, optimizer: Optimizer | None) -> None:
        """Nothing can fail: state of another shape stays as it is."""

    @torch.no_grad()
    def change(
        self, mask: torch.Tensor, optimizer: Optimizer | None, draw: Draw | None, random: torch.Generator
    ) -> None:
        """See Movable."""
        parameter, old = self.parameter, self.mask()
        kept = expand_mask(old & mask, self.shape, self.block_shape).to(parameter.device)
        before = (
            to_blocks(parameter, self.block_shape)[old.to(parameter.device)] if draw is not None else None
        )
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        same = [t for t in state.values() if isinstance(t, torch.Tensor) and t.shape == parameter.shape]
        for tensor in (parameter, parameter.grad, *same):
            if tensor is not None:
                tensor.masked_fill_(~kept, 0)
        if before is not None:
            rows, columns = (mask & ~old).nonzero(as_tuple=True)
            new = self._drawn(draw, before, mask, rows, random)
            r, c = self.block_shape
            for row, column, block in zip(rows.tolist(), columns.tolist(), new, strict=True):
                part = parameter[row * r : (row + 1) * r, column * c : (column + 1) * c]
                part.copy_(block[: part.shape[0], : part.shape[1]])
        for module in self.modules:
            module.block_mask.copy_(mask)
        self.explored |= mask


def find_movable(op: str, model: nn.Module, layers: Sequence[str] | None) -> list[Movable]:
    """The weights of a model's BlockSparseLinear and PseudoBlockSparseLinear layers, tied ones once.

    Args:
        op: for messages.
        model: any module.
        layers: regular expressions for whole names; None: all of them.

    Raises ValueError for an expression that matches none, and if there are no such layers.
    """
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
    if isinstance(layers, str):
        fail(op, "layers must be a list of regular expressions", repr(layers), TypeError)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        sparse = isinstance(module, BlockSparseLinear) and isinstance(module.weight, PatternWeight)
        if (sparse and module.weight.dtype.is_floating_point) or isinstance(module, PseudoBlockSparseLinear):
            found[name] = module
    if not found:
        kinds = {m.weight.spec_format() for m in model.modules() if isinstance(m, BlockSparseLinear)}
        requirement = "the model must have a BlockSparseLinear, blocks or csr, that trains (see sparse_start)"
        fail(op, requirement, f"{', '.join(sorted(kinds))}, which do not move" if kinds else "none")
    if layers is not None:
        taken: dict[str, nn.Module] = {}
        for pattern in layers:
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                fail(op, "layers must be regular expressions", f"{pattern!r}: {error}")
            hits = {name: module for name, module in found.items() if compiled.fullmatch(name)}
            if not hits:
                check_known(op, "a layer", pattern, list(found))
            taken |= hits
        found = {name: module for name, module in found.items() if name in taken}
    groups: dict[int, tuple[list[str], list[Any]]] = {}
    for name, module in found.items():
        weight = module.weight
        parameter = (
            weight if isinstance(module, PseudoBlockSparseLinear) else weight._parameters.get("values")
        )
        if parameter is None or parameter.is_meta:
            got = f"{name}: parametrized, or on the meta device"
            fail(op, "values must be a Parameter with data", got, TypeError)
        names, modules = groups.setdefault(id(parameter), ([], []))
        names.append(name)
        modules.append(module)
    kinds = {PseudoBlockSparseLinear: Twin}
    return [kinds.get(type(modules[0]), Stored)(names, modules) for names, modules in groups.values()]
