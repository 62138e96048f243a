"""How much a weight matters: what is observed while a model runs and trains, and scores made of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checks import check_int, check_known, check_tensor, fail
from .damping import damped
from .masks import Scores

State = dict[str, Any]


@dataclass(frozen=True)
class Criterion:
    """Base of all criteria. W is the weight as (N, K), G its gradient, X the (tokens, K) inputs of its layer.

    Attributes:
        needs: what must be observed first: "gradient", "inputs" (sums of squares by column) or "gram" (XᵀX).
        by_row: whether scores are comparable within a row only, so that each row loses the same by default.
    """

    @property
    def needs(self) -> str | None:  # noqa: D102
        return None

    @property
    def by_row(self) -> bool:  # noqa: D102
        return False

    def observe(self, weight: torch.Tensor, gradient: torch.Tensor, state: State) -> None:
        """Adds what one step shows to `state`, by (N, K) tensors on W's device; for those with gradients."""

    def score(self, name: str, weight: torch.Tensor, state: State, random: torch.Generator) -> Scores:
        """The scores of W under its name in the model, from what was observed."""
        raise NotImplementedError


def _observed(criterion: Criterion, state: State, key: str, name: str) -> torch.Tensor:
    if key not in state:
        advice = {
            "gradient": "call loss.backward() and Sparsifier.observe() (attach(optimizer) does) first",
            "inputs": "run data through the model inside Sparsifier.calibration() first",
            "gram": "run data through the model inside Sparsifier.calibration() first",
        }[criterion.needs]
        fail("score", f"{criterion} needs observations ({advice})", f"none of {name}")
    return state[key]


def _add(state: State, key: str, value: torch.Tensor, keep: float = 1.0) -> None:
    if key in state:
        state[key] = state[key].to(value.device).mul_(keep).add_(value)  # moved where a checkpoint was loaded
    else:
        state[key] = value.clone()


@dataclass(frozen=True)
class Magnitude(Criterion):
    """|w| (p = 1) or w² (p = 2); a block counts as its L1 or L2 norm (Janowsky 1989; Han et al. 2015).

    "magnitude" and "l2" are p = 2, "l1" p = 1.
    """

    p: int = 2

    def __post_init__(self) -> None:  # noqa: D105
        if self.p not in (1, 2):
            fail("Magnitude", "p must be 1 or 2", self.p)

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        return Scores(weight, "magnitude" if self.p == 1 else "square")


@dataclass(frozen=True)
class Random(Criterion):
    """Uniform numbers from the sparsifier's own generator, which its state_dict holds."""

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        return Scores(torch.rand(weight.shape, generator=random))


@dataclass(frozen=True)
class Gradient(Criterion):
    """|Σ G| over the observed steps: weights that the loss hardly asks to move leave: "gradient"."""

    @property
    def needs(self) -> str:  # noqa: D102
        return "gradient"

    def observe(self, weight, gradient, state) -> None:  # noqa: D102
        _add(state, "gradient", gradient.float())

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        return Scores(_observed(self, state, "gradient", name), "magnitude")


@dataclass(frozen=True)
class Taylor(Criterion):
    """|Σ W∘G|: the first-order change of the loss without the weight (Molchanov et al. 2019)."""

    @property
    def needs(self) -> str:  # noqa: D102
        return "gradient"

    def observe(self, weight, gradient, state) -> None:  # noqa: D102
        _add(state, "gradient", weight.float() * gradient.float())

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        return Scores(_observed(self, state, "gradient", name), "magnitude")


@dataclass(frozen=True)
class Movement(Criterion):
    """−Σ W∘G: weights that training moves to zero leave first (Sanh et al. 2020)."""

    @property
    def needs(self) -> str:  # noqa: D102
        return "gradient"

    def observe(self, weight, gradient, state) -> None:  # noqa: D102
        _add(state, "gradient", -(weight.float() * gradient.float()))

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        return Scores(_observed(self, state, "gradient", name))


@dataclass(frozen=True)
class Snip(Criterion):
    """|W∘G| of each step, s ← momentum · s + |W∘G| (Lee et al. 2019; with momentum as neural-compressor)."""

    momentum: float = 1.0

    def __post_init__(self) -> None:  # noqa: D105
        if not 0 <= self.momentum <= 1:
            fail("Snip", "momentum must be in [0, 1]", self.momentum)

    @property
    def needs(self) -> str:  # noqa: D102
        return "gradient"

    def observe(self, weight, gradient, state) -> None:  # noqa: D102
        _add(state, "gradient", (weight.float() * gradient.float()).abs_(), self.momentum)

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        return Scores(_observed(self, state, "gradient", name))


@dataclass(frozen=True)
class Fisher(Criterion):
    """w² Σ G² / 2: the second-order change of the loss, with the empirical Fisher diagonal as Hessian.

    LeCun et al. 1990 with Theis et al. 2018's Hessian: "fisher".
    """

    @property
    def needs(self) -> str:  # noqa: D102
        return "gradient"

    def observe(self, weight, gradient, state) -> None:  # noqa: D102
        _add(state, "gradient", gradient.float().square())

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        fisher = _observed(self, state, "gradient", name)
        return Scores(weight.float().square().mul_(fisher.to(weight.device)).mul_(0.5))


@dataclass(frozen=True)
class BlockFisher(Criterion):
    """w² / 2[F⁻¹]_qq, F = Σ gᵀg + λI of `size` neighbours of a row (Kurtic et al. 2022): "block_fisher".

    The second-order change of the loss if one weight leaves and its neighbours adapt; with size 1 and without
    λ it is Fisher's. F takes `size` times the memory of the weight, in float32, on the CPU.

    Attributes:
        size: of neighbours; the last ones of a row may be fewer.
        dampening: λ as a part of the mean of F's diagonal over the weight.
    """

    size: int = 16
    dampening: float = 0.01

    def __post_init__(self) -> None:  # noqa: D105
        check_int("BlockFisher", "size", self.size, 1)
        if not 0 < self.dampening < math.inf:
            fail("BlockFisher", "dampening must be positive", self.dampening)

    @property
    def needs(self) -> str:  # noqa: D102
        return "gradient"

    def _cut(self, matrix: torch.Tensor) -> torch.Tensor:
        """(N, K) as (N, ⌈K/size⌉, size), zeros past the end."""
        rest = -matrix.shape[1] % self.size
        return nn.functional.pad(matrix, (0, rest)).unflatten(1, (-1, self.size))

    def observe(self, weight, gradient, state) -> None:  # noqa: D102
        parts = self._cut(gradient.cpu().float())
        _add(state, "gradient", parts.unsqueeze(3) * parts.unsqueeze(2))

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        fisher = _observed(self, state, "gradient", name)
        mean = float(fisher.diagonal(dim1=2, dim2=3).sum()) / max(1, weight.numel())
        fisher = fisher + (self.dampening * mean or 1.0) * torch.eye(self.size, device=fisher.device)
        inverse = torch.linalg.inv(fisher).diagonal(dim1=2, dim2=3).flatten(1)[:, : weight.shape[1]]
        return Scores(weight.float().square() / (2 * inverse.to(weight.device)))


def _by_column(weight: torch.Tensor, scale: torch.Tensor, importance: str) -> Scores:
    """`scale` is (K,), or (groups, K) of a grouped convolution, whose outputs see different inputs."""
    if len(scale) == 1:
        return Scores(weight, importance, scale[0])
    rows = scale.float().repeat_interleave(len(weight) // len(scale), 0).to(weight.device)
    values = weight.float().abs() if importance == "magnitude" else weight.float().square()
    return Scores(values * rows)


@dataclass(frozen=True)
class Wanda(Criterion):
    """|W_ij| · ‖X_j‖₂, compared within each row (Sun et al. 2024).

    squared=True is what torchao computed instead: Σ X_j² in place of its root; with scope="local" for the
    threshold over the whole layer that it took.
    """

    squared: bool = False

    @property
    def needs(self) -> str:  # noqa: D102
        return "inputs"

    @property
    def by_row(self) -> bool:  # noqa: D102
        return not self.squared

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        squares = _observed(self, state, "inputs", name)
        return _by_column(weight, squares if self.squared else squares.sqrt(), "magnitude")


@dataclass(frozen=True)
class Activation(Criterion):
    """‖X_j‖₂ for every weight of column j: inputs that are rarely large; for patterns of columns."""

    @property
    def needs(self) -> str:  # noqa: D102
        return "inputs"

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        norms = _observed(self, state, "inputs", name).sqrt()
        return _by_column(torch.ones_like(weight), norms, "magnitude")


@dataclass(frozen=True)
class Hessian(Criterion):
    """W_ij² / [(XᵀX + λI)⁻¹]_jj: the layer's error if one weight leaves and the others adapt (OBS).

    Attributes:
        dampening: λ as a part of the mean of XᵀX's diagonal; ten times more, with a warning, as often as
            the matrix is singular.
    """

    dampening: float = 0.01

    @property
    def needs(self) -> str:  # noqa: D102
        return "gram"

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        grams = _observed(self, state, "gram", name)
        diagonals = [damped("Hessian", gram, self.dampening, name).inverse.diagonal() for gram in grams]
        return _by_column(weight, torch.stack(diagonals).reciprocal(), "square")


@dataclass(frozen=True)
class FPGM(Criterion):
    """Σ_k ‖w_i − w_k‖ for every weight of row i: rows near the geometric median leave (He et al. 2019).

    Attributes:
        p: the norm, 1 or 2.
    """

    p: int = 2

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        rows = weight.detach().double()
        distances = torch.cdist(rows, rows, p=float(self.p)).sum(1)
        return Scores((distances / max(1, rows.shape[1])).unsqueeze(1).expand(-1, rows.shape[1]))


@dataclass(frozen=True, eq=False)
class User(Criterion):
    """Scores of yours.

    Attributes:
        scores: a mapping of tensor names to tensors of the weight's shape, or a function of (name, weight)
            that returns one.
    """

    scores: Mapping[str, torch.Tensor] | Callable[[str, torch.Tensor], torch.Tensor]

    def score(self, name, weight, state, random) -> Scores:  # noqa: D102
        if callable(self.scores):
            values = self.scores(name, weight)
        elif name in self.scores:
            values = self.scores[name]
        else:
            near = difflib.get_close_matches(name, map(str, self.scores), n=3, cutoff=0.3)
            fail("User", f"scores must have an entry for {name}", f"near names: {', '.join(near) or 'none'}")
        check_tensor("User", f"scores of {name}", values)
        if values.numel() != weight.numel() or len(values) != len(weight):
            fail("User", f"scores of {name} must be of the weight's shape", tuple(values.shape))
        return Scores(
            values.reshape(weight.shape).to(torch.float64 if values.dtype == torch.float64 else torch.float32)
        )


_NAMES: dict[str, Callable[[], Criterion]] = {
    "magnitude": Magnitude,
    "l1": lambda: Magnitude(1),
    "l2": Magnitude,
    "random": Random,
    "gradient": Gradient,
    "taylor": Taylor,
    "movement": Movement,
    "snip": Snip,
    "fisher": Fisher,
    "block_fisher": BlockFisher,
    "wanda": Wanda,
    "activation": Activation,
    "hessian": Hessian,
    "obs": Hessian,
    "fpgm": FPGM,
}


def parse_criterion(criterion: Any, op: str = "parse_criterion") -> Criterion:
    """A Criterion, or the name of one with its defaults; a mapping or a function makes a User.

    Raises ValueError for an unknown name (near ones are listed), TypeError for another kind of object.
    """
    if isinstance(criterion, Criterion):
        return criterion
    if isinstance(criterion, str):
        check_known(op, "criterion", criterion, _NAMES)
        return _NAMES[criterion]()
    if isinstance(criterion, Mapping) or callable(criterion):
        return User(criterion)
    return fail(op, "criterion must be a Criterion or a str", type(criterion).__name__, TypeError)


def check_sparsity(op: str, name: str, sparsity: Any) -> float:
    """Returns `sparsity` as a float in [0, 1]."""
    if not isinstance(sparsity, int | float) or isinstance(sparsity, bool):
        fail(op, f"{name} must be a number", repr(sparsity), TypeError)
    if math.isnan(sparsity) or not 0 <= sparsity <= 1:
        fail(op, f"{name} must be in [0, 1]", sparsity)
    return float(sparsity)
