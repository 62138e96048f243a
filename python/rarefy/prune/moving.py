"""Training with patterns that move: blocks that matter little leave, as many grow elsewhere, state follows.

SET, RigL, SRigL and MagnitudeRegrow on the stored blocks of BlockSparseLinear; TopKAST is in top_kast.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checks import check_int, check_known, fail
from .checkpoint import check_clock, check_entries, check_random, check_settings
from .criteria import check_sparsity
from .drop_fractions import parse_fraction
from .growth import Watch, candidate_norms, gradient_norms
from .masks import Mask, Scores, make_mask
from .movable import Movable, find_movable

_VERSION = 1
_KINDS = {
    "settings": Mapping, "clock": int, "late": bool, "random": torch.Tensor, "grown": Mapping,
    "explored": Mapping,
}  # fmt: skip


@dataclass(frozen=True)
class Move:
    """What became of one weight: its layer, blocks grown, blocks stored, part of all blocks stored ever."""

    name: str
    grown: int
    nnzb: int
    explored: float

    def __str__(self) -> str:  # noqa: D105
        return f"{self.name}: {self.grown} of {self.nnzb} blocks grown, {self.explored:.1%} explored"


def top(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """Bool mask of exactly `keep` of the largest scores; ties leave evenly over rows and columns."""
    return make_mask(Scores(scores), (1, 1, 0, 0), scores.numel() - keep).unpack()


class MovingPattern:
    """Base of the methods. A change drops and grows as many blocks, so that nnzb stays (but for GraNet).

    moving = RigL(model, optimizer, end=7500)
    for batch in data: loss.backward(); optimizer.step(); moving.step()

    Every `every` steps a part of each layer's blocks, `fraction`, those of smallest L2 norm, leaves, and as
    many grow where the method wants them; a block that left may grow again, and keeps its values then. Grown
    blocks and their optimizer state are zero, or blocks have what `init` draws. Parameters stay the same
    objects in the same memory. All choices are made by exact counts, from scores and a generator of its own.

    Args:
        model: with BlockSparseLinear layers (blocks or csr), or PseudoBlockSparseLinear, their masked dense
            twins, whose weights move alike. Weights that share a Parameter move as one.
        optimizer: whose state moves along: any whose state tensors have the Parameter's shape; or several.
        fraction: see parse_fraction: "cosine:0.3", "constant:0.3" or 0.3, "linear:0.3", "power:0.3:3".
        every: steps from one change to the next.
        begin, end: the first and the last step that may change something; `end` is None: for ever.
        layers: regular expressions for whole names of layers; None: all that are sparse and train.
        init: what grown blocks hold: "zero", or "uniform", as BlockSparseLinear draws them: ±1/√f, f the
            stored inputs of the row.
        seed: of the generator.

    Raises:
        ValueError: names that match no layer, fractions outside [0, 1], `fraction` that needs an `end`,
            optimizers that hold no layer's weights.
        TypeError: arguments of the wrong kind, values that are no Parameter.
    """

    needs_gradient = False  # where nothing is stored

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        fraction: Any = "cosine:0.3",
        every: int = 100,
        begin: int = 0,
        end: int | None = None,
        layers: Sequence[str] | None = None,
        init: str = "zero",
        seed: int = 0,
    ) -> None:
        op = type(self).__name__
        self.fraction = parse_fraction(fraction, op)
        self.every, self.begin = check_int(op, "every", every, 1), check_int(op, "begin", begin)
        self.end = end if end is None else check_int(op, "end", end, self.begin)
        if end is None and self.fraction.needs_end:
            fail(op, f"end must be given with {self.fraction} (constant:… needs none)", None)
        check_known(op, "init", init, ("zero", "uniform"))
        self.init, self._draw = init, None if init == "zero" else _uniform
        given = [] if optimizer is None else optimizer
        self.optimizers = [given] if isinstance(given, Optimizer) else list(given)
        for one in self.optimizers:
            if not isinstance(one, Optimizer):
                fail(op, "optimizer must be a torch.optim.Optimizer", type(one).__name__, TypeError)
        self.layers = [x for x in find_movable(op, model, layers) if x.parameter.requires_grad]
        theirs = [self._optimizer_of(layer) for layer in self.layers]
        if self.layers and self.optimizers and all(one is None for one in theirs):
            fail(op, f"optimizer must hold weights of {self.layers[0].name} or another layer", "one without")
        for layer, one in zip(self.layers, theirs, strict=True):
            layer.check(one)
        self.clock = 0  # steps so far
        self.random = torch.Generator().manual_seed(seed)
        self.grown = {layer.name: 0 for layer in self.layers}  # blocks, over all changes
        self._late = False  # a change was due when gradients were not finite
        self._watch: Watch | None = None
        self._arm()

    def due(self, step: int) -> bool:
        """Whether step `step`, counted from 1, changes patterns."""
        inside = self.begin <= step and (self.end is None or step <= self.end)
        return inside and step % self.every == 0 and self.fraction.at(step, self.end) > 0

    @torch.no_grad()
    def step(self) -> list[Move]:
        """After optimizer.step(), once for each: changes the patterns if it is time; says what moved.

        A change that needs gradients which are not finite (as under a GradScaler) waits for the next step.
        All layers are decided before the first changes. Between steps nothing runs, except that in a step
        with a change RigL and SRigL keep the layers' inputs and the gradients of their outputs.

        Raises ValueError if such a step brought no gradient to any layer.
        """
        self.clock += 1
        moves: list[Move] = []
        if self._late or self.due(self.clock):
            fraction = self.fraction.at(self.clock, self.end)
            gradients = self._gradients()
            self._late = gradients is None
            if gradients is not None:
                masks = [
                    (layer, self._next(layer, fraction, gradients.get(i)))
                    for i, layer in enumerate(self.layers)
                    if i in gradients or not self.needs_gradient
                ]
                moves = [self._change(layer, mask) for layer, mask in masks]
        self._arm()
        return moves

    def report(self) -> list[Move]:
        """For each weight the blocks grown so far, and which part of all blocks was stored at any time."""
        return [self._said(layer, self.grown[layer.name]) for layer in self.layers]

    # -- what a method is ------------------------------------------------------------------------------

    def _wanted(self, layer: Movable, gradient: torch.Tensor | None) -> torch.Tensor:
        """(block rows, block columns): the larger, the sooner a block grows."""
        raise NotImplementedError

    def _next(self, layer: Movable, fraction: float, gradient: torch.Tensor | None) -> torch.Tensor:
        """The blocks that are stored next, bool, as many as are stored now."""
        kept = top(layer.norms(), layer.nnzb - round(fraction * layer.nnzb))
        return top(self._wanted(layer, gradient).masked_fill_(kept, torch.inf), layer.nnzb)

    # -- how it happens --------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Watches the layers if the coming step needs their gradients, and else leaves them alone."""
        if self._watch is not None:
            self._unwatch()
        self._watch = None
        if self.needs_gradient and (self._late or self.due(self.clock + 1)):
            pairs = ((i, module) for i, layer in enumerate(self.layers) for module in layer.modules)
            self._watch = Watch(pairs)
            self._unwatch = weakref.finalize(self, self._watch.close)  # also when nobody has this any more

    def _gradients(self) -> dict[int, torch.Tensor] | None:
        """Norms of gradients by layer, {} if none are needed; None if they are not finite."""
        return {}

    def _change(self, layer: Movable, mask: torch.Tensor) -> Move:
        stored = layer.mask()
        grown = int((mask & ~stored).count_nonzero())
        if not torch.equal(mask, stored):
            layer.change(mask, self._optimizer_of(layer), self._draw, self.random)
        self.grown[layer.name] += grown
        return self._said(layer, grown)

    def _said(self, layer: Movable, grown: int) -> Move:
        explored = int(layer.explored.count_nonzero()) / max(1, layer.explored.numel())
        return Move(layer.name, grown, layer.nnzb, explored)

    def _optimizer_of(self, layer: Movable) -> Optimizer | None:
        parameter = layer.parameter
        for optimizer in self.optimizers:
            if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        return None

    # -- checkpoints -----------------------------------------------------------------------------------

    def settings(self) -> dict[str, str]:
        """What it was made with, as text: what a checkpoint must agree in."""
        names = ("fraction", "every", "begin", "end", "init")
        return {"method": type(self).__name__} | {name: str(getattr(self, name)) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Clock, random numbers and what was explored; the rest is the model's and the optimizer's.

        Taken after step(): with their states a run goes on bit for bit.
        """
        return {
            "version": _VERSION,
            "settings": self.settings(),
            "clock": self.clock,
            "late": self._late,
            "random": self.random.get_state(),
            "grown": dict(self.grown),
            "explored": {layer.name: Mask.pack(layer.explored).bits for layer in self.layers},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Goes on from state_dict(), after those of model and optimizer were loaded.

        The model takes the patterns of its checkpoint over with rarefy.load_state_dict.

        Raises ValueError for the state of another method, other layers or, unless strict=False, other
        settings; nothing has changed then.
        """
        op = f"{type(self).__name__}.load_state_dict"
        if not isinstance(state_dict, Mapping) or state_dict.get("version") != _VERSION:
            fail(op, f"state_dict must be of a {type(self).__name__}, version {_VERSION}", "another one")
        check_entries(op, state_dict, _KINDS)
        ours, theirs = self.settings(), state_dict["settings"]
        if ours["method"] != theirs.get("method") or strict:
            check_settings(op, ours, theirs)
        self._check_state(op, state_dict)
        for layer in self.layers:
            bits, columns = state_dict["explored"][layer.name].clone(), layer.grid[1]
            layer.explored = Mask(bits, columns, 0).unpack()
        self.clock, self._late = state_dict["clock"], state_dict["late"]
        self.random.set_state(state_dict["random"])
        self.grown = dict(state_dict["grown"])
        self._arm()

    def _check_state(self, op: str, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError unless all that a method's load_state_dict takes fits; changes nothing."""
        check_clock(op, state_dict["clock"])
        check_random(op, state_dict["random"])
        if differ := sorted(map(str, self.grown.keys() ^ state_dict["grown"].keys())):
            fail(op, "state_dict must be of the same layers", f"{', '.join(differ[:5])} in one of both only")
        check_entries(op, state_dict["grown"], dict.fromkeys(self.grown, int), "grown")
        check_entries(op, state_dict["explored"], dict.fromkeys(self.grown, torch.Tensor), "explored")
        for layer in self.layers:
            bits, (rows, columns) = state_dict["explored"][layer.name], layer.grid
            if tuple(bits.shape) != (rows, -(-columns // 8)) or bits.dtype != torch.uint8:
                requirement = f"what was explored of {layer.name} must be bits of {layer.grid} blocks"
                fail(op, requirement, f"{tuple(bits.shape)} of {bits.dtype}")

    def __repr__(self) -> str:  # noqa: D105
        settings = ", ".join(f"{k}={v}" for k, v in self.settings().items() if k != "method")
        return f"{type(self).__name__}({settings}, layers={len(self.layers)})"


class SET(MovingPattern):
    """Sparse evolutionary training: new blocks anywhere (Mocanu et al. 2018).

    The published method drops a constant part, `fraction=0.3`. Blocks that are not kept are equally likely.
    """

    def _wanted(self, layer: Movable, gradient: torch.Tensor | None) -> torch.Tensor:
        return torch.rand(layer.grid, generator=self.random)


class RigL(MovingPattern):
    """New blocks where the norm of the loss's gradient is largest (Evci et al. 2020): ‖(dYᵀX)_block‖.

    The gradient is that of the step's batch, all micro-batches together, to the whole weight; it exists in
    pieces only (see gradient_norms). Under torch.distributed squares of norms are summed over the ranks.

    The whole costs 2·tokens·N·K operations where a training step of the layer costs 6·tokens·N·K·density:
    at a low density one change takes as long as several steps. Two arguments make it less.

    Args:
        candidates: only so many times nnzb blocks, drawn anew each time from those not stored, have their
            gradients computed, and may grow (Heddes et al. 2024, who find 1 enough); None: all.
        tokens: at most so many tokens, evenly spaced, give the gradient; None: all.
        others: see MovingPattern.
    """

    needs_gradient = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        candidates: float | None = None,
        tokens: int | None = None,
        **others: Any,
    ):
        op = type(self).__name__
        self.tokens = tokens if tokens is None else check_int(op, "tokens", tokens, 1)
        if candidates is not None and not 0 < candidates < float("inf"):
            fail(op, "candidates must be positive", candidates)
        self.candidates = candidates
        super().__init__(model, optimizer, **others)

    def settings(self) -> dict[str, str]:  # noqa: D102
        return super().settings() | {"candidates": str(self.candidates), "tokens": str(self.tokens)}

    def _wanted(self, layer: Movable, gradient: torch.Tensor | None) -> torch.Tensor:
        return gradient

    def _gradients(self) -> dict[int, torch.Tensor] | None:
        found: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self.layers):
            pair = self._watch.pairs(i, self.tokens)
            if pair is None:
                continue
            if self.candidates is None:
                norms = gradient_norms(*pair, layer.block_shape)
            else:
                norms = candidate_norms(*pair, layer.block_shape, self._drawn(layer))
            found[i] = _over_ranks(norms).cpu()
        if not found:
            op = type(self).__name__
            fail(op, "a step with a change must run forward and backward through the layers", "no gradient")
        sound = (bool((torch.isfinite(g) | (g == -torch.inf)).all()) for g in found.values())
        return found if all(sound) else None

    def _drawn(self, layer: Movable) -> torch.Tensor:
        """Candidates: bool, (block rows, block columns), none of them stored."""
        free = layer.explored.numel() - layer.nnzb
        drawn = torch.rand(layer.grid, generator=self.random).masked_fill_(layer.mask(), -torch.inf)
        return top(drawn, min(free, round(self.candidates * layer.nnzb)))


class SRigL(RigL):
    """RigL with as many blocks in every block row, constant fan-in (Lasby et al. 2024).

    The smallest blocks of the layer leave; each row then takes its largest gradients, or loses its smallest
    blocks, until it has ⌊nnzb / rows⌋ or ⌈nnzb / rows⌉. A layer that starts otherwise is so after one change.

    Args:
        salient: γ: a row with fewer salient blocks (large in the layer by norm, or by gradient among those
            not stored) than γ times its share is given up, and its blocks go to the other rows; 0: none is.
        others: see RigL and MovingPattern.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, *, salient: float = 0.0, **others: Any):
        self.salient = check_sparsity("SRigL", "salient", salient)
        super().__init__(model, optimizer, **others)

    def settings(self) -> dict[str, str]:  # noqa: D102
        return super().settings() | {"salient": str(self.salient)}

    def _next(self, layer: Movable, fraction: float, gradient: torch.Tensor | None) -> torch.Tensor:
        stored, norms, nnzb = layer.mask(), layer.norms(), layer.nnzb
        move = round(fraction * nnzb)
        kept = top(norms, nnzb - move)
        grows = top(gradient.masked_fill(stored, -torch.inf), min(move, stored.numel() - nnzb))
        target = self._row_counts(stored, (kept | grows).sum(1), nnzb)
        # Of each row first what is kept, by norm, then what grows, by gradient: all of it in one order.
        scores = torch.where(kept, 2 + _to_one(norms), _to_one(gradient))
        chosen = torch.zeros_like(stored)
        for count in target.unique().tolist():
            rows = target == count
            mask = make_mask(Scores(scores[rows]), (1, 1, 0, 0), stored.shape[1] - count, each_row=True)
            chosen[rows] = mask.unpack()
        return chosen

    def _row_counts(self, stored: torch.Tensor, salient: torch.Tensor, nnzb: int) -> torch.Tensor:
        """(block rows,) how many blocks each row has next: equal but for one, 0 for those given up."""
        rows, columns = stored.shape
        alive = torch.ones(rows, dtype=torch.bool)
        if self.salient:
            had = stored.any(1)
            alive = had & (salient >= self.salient * nnzb / max(1, int(had.sum())))
        order = salient.masked_fill(~alive, -1).sort(dim=0, descending=True, stable=True).indices
        count = max(int(alive.sum()), -(-nnzb // max(1, columns)), min(rows, 1))
        each, more = divmod(nnzb, max(1, count))
        target = torch.zeros(rows, dtype=torch.int64)
        target[order[:count]] = each
        target[order[:more]] += 1
        return target


class MagnitudeRegrow(MovingPattern):
    """The smallest blocks leave, and blocks anywhere begin with random values, as large as is asked.

    What pytorch_block_sparse's SparseOptimizer does: σ being the standard deviation of the layer's values,
    new ones are uniform in ±scale·σ, or normal with scale·σ.

    Args:
        scale: see above.
        distribution: "uniform" or "gaussian".
        others: see MovingPattern; `init` is given by these.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any = None, *, scale: float = 0.1, distribution: str = "uniform",
        **others: Any,
    ):  # fmt: skip
        op = type(self).__name__
        check_known(op, "distribution", distribution, ("uniform", "gaussian"))
        if not 0 <= scale < float("inf"):
            fail(op, "scale must not be negative", scale)
        super().__init__(model, optimizer, **others)
        self.scale, self.distribution, self._draw = float(scale), distribution, self._of_deviation

    def settings(self) -> dict[str, str]:  # noqa: D102
        return super().settings() | {"scale": str(self.scale), "distribution": self.distribution}

    def _wanted(self, layer: Movable, gradient: torch.Tensor | None) -> torch.Tensor:
        return torch.rand(layer.grid, generator=self.random)

    def _of_deviation(
        self, values: torch.Tensor, bounds: torch.Tensor, random: torch.Generator
    ) -> torch.Tensor:
        deviation = float(values.double().std(correction=0)) if values.numel() else 0.0
        shape = (len(bounds), *values.shape[1:])
        if self.distribution == "gaussian":
            return torch.randn(shape, generator=random) * (self.scale * deviation)
        return (2 * torch.rand(shape, generator=random) - 1) * (self.scale * deviation)


def _uniform(values: torch.Tensor, bounds: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    shape = (len(bounds), *values.shape[1:])
    return (2 * torch.rand(shape, generator=random) - 1) * bounds[:, None, None].float()


def _to_one(scores: torch.Tensor) -> torch.Tensor:
    """Scores ≥ 0 as float64 in [0, 1], in the same order; −∞ stays."""
    most = float(scores.max()) if scores.numel() else 0.0
    return scores.double() / most if most > 0 else scores.double()


def _over_ranks(norms: torch.Tensor) -> torch.Tensor:
    """The root of the sum of squares over the ranks of torch.distributed; without it the norms themselves."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return norms
    squares = norms.square()
    torch.distributed.all_reduce(squares)
    return squares.sqrt_().masked_fill_(norms == -torch.inf, -torch.inf)
