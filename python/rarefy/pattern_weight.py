"""PatternWeight: what the formats share that are values on a BsrPattern; moving, copying and loading them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from . import ops
from ._torch_private import PLAIN, eager
from .activations import activate
from .checks import DTYPE_NAMES, check_dtype, check_tensor, fail
from .derivatives import record_linear, run_eagerly
from .derived import reads_itself, tf32_allowed
from .masks import random_blocks
from .nested import linear_of_nested
from .pattern import BsrPattern
from .pattern_change import PatternChange
from .pattern_state import INDICES, read_state
from .sparse_weight import SparseWeight, swap_data
from .values import check_padding, dense_of, draw_uniform_, init_bounds, new_values, zero_padding
from .watched_pattern import PUBLIC, WatchedPattern, alive


def meets_nothing(
    weight: PatternWeight, x: torch.Tensor, values: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    """Whether a product with these, `values` as they are stored, meets nothing on its way but autograd.

    On every call of a layer: one function, which reads the dict, as a module's attributes take 0.05 µs each.
    """
    if (
        type(x) in PLAIN
        and type(values) is nn.Parameter
        and (bias is None or (type(bias) in PLAIN and bias.is_contiguous()))
        and eager()
        and not x.is_nested
    ):
        own = weight.__dict__
        buffers = own["_buffers"]
        crow, crow_version, col, col_version = own["_watched"]
        return (  # as _is_settled
            buffers["crow_indices"] is crow
            and buffers["col_indices"] is col
            and crow._version == crow_version  # never inference tensors
            and col._version == col_version
            and (not own["_pattern"].is_padded or weight._padding_is_settled())
        )
    return False


class PatternWeight(WatchedPattern):
    """A weight of `values`, the one Parameter, and a `pattern` that says where they are.

    See WatchedPattern for who may change the pattern, and what becomes of writes to its indices.
    """

    pieces = ("values", *INDICES)
    reserved = INDICES

    values: nn.Parameter
    crow_indices: torch.Tensor
    col_indices: torch.Tensor

    def _init(self, values: torch.Tensor, pattern: BsrPattern, x_dtype: torch.dtype | None = None) -> None:
        """Takes values and a pattern of one device that fit, as they are."""
        SparseWeight.__init__(self)
        self.shape = pattern.shape
        if x_dtype is not None and x_dtype != values.dtype:
            self.x_dtype = x_dtype
        # A pattern on the meta device holds nothing yet: the first one that is loaded is taken over.
        self._pattern_known = not pattern.is_meta
        if not isinstance(values, nn.Parameter):
            values = new_values(values, values.dtype.is_floating_point)
        self.values = values
        self._set_pattern(pattern)
        alive.add(self)

    @classmethod
    def from_pattern(
        cls, values: torch.Tensor, pattern: BsrPattern, *, x_dtype: torch.dtype | None = None
    ) -> PatternWeight:
        """Values on an existing pattern, which is shared; both as they are, on one device."""
        weight = cls.__new__(cls)
        weight._check_values(f"{cls.__name__}.from_pattern", values, pattern)
        weight._init(values, pattern, x_dtype)
        return weight

    def _check_values(self, op: str, values: Any, pattern: BsrPattern) -> None:
        """Raises unless `values` are a contiguous tensor for this pattern, with zero padding."""
        check_tensor(op, "values", values)
        check_dtype(op, "values", values.dtype)
        if values.device != pattern.device:
            fail(op, f"pattern must be on the device of values, {values.device}", pattern.device, TypeError)
        if tuple(values.shape) != self.values_shape(pattern):
            fail(op, f"values must be of shape {self.values_shape(pattern)}", tuple(values.shape))
        if not values.is_contiguous():
            fail(op, "values must be contiguous", f"strides {values.stride()}")
        check_padding(op, values, pattern)

    # -- what values are: blocks, unless a format says otherwise ------------------------------------

    @staticmethod
    def values_shape(pattern: BsrPattern) -> tuple[int, ...]:
        """The shape of `values` on a pattern: (nnzb, R, C)."""
        return (pattern.nnzb, *pattern.block_shape)

    @staticmethod
    def blocks(values: torch.Tensor) -> torch.Tensor:
        """`values` as (nnzb, R, C), a view."""
        return values

    # -- properties -----------------------------------------------------------------------------

    @property
    def plan(self) -> torch.Tensor:
        """What kernels read of the pattern; see BsrPattern."""
        return self.pattern.plan

    @property
    def block_shape(self) -> tuple[int, int]:
        """(R, C)."""
        return self._pattern.block_shape

    @property
    def nnzb(self) -> int:
        """How many blocks are stored."""
        return self._pattern.nnzb

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of the whole matrix."""
        return self._pattern.grid

    @property
    def density(self) -> float:
        """Stored blocks / all blocks; 0 for an empty matrix."""
        return self._pattern.density

    def block_row_indices(self) -> torch.Tensor:
        """(nnzb,) int64: the block row of each stored block."""
        return self.pattern.block_rows()

    def block_mask(self) -> torch.Tensor:
        """(block rows, block columns) bool: which blocks are stored."""
        return self.pattern.mask()

    @property
    def core_dtype(self) -> str:
        """How the core's problems call the values."""
        return DTYPE_NAMES[self.dtype] + (" rounding x" if self.rounds_x else "")

    # -- use ------------------------------------------------------------------------------------

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        """Returns x Wᵀ + bias, as F.linear does: x of shape (…, K) gives (…, N); or an activation of it."""
        values = self._parameters.get("values")  # nn.Module's lookup takes longer
        # First what a small layer meets, whose product is a quarter of its time: nothing on the way but
        # autograd. What follows would find the same, in 2.5 µs more, and in 5 where something is packed.
        if (
            activation is None
            and meets_nothing(self, x, values, bias)
            and (kept := self._kept.get(x.dtype)) is not None  # of a settled pattern: not to be asked before
            and self.x_dtype is None
            and not (kept.may_round and tf32_allowed())
        ):
            blocks = self.blocks(values)
            if is_grad_enabled() and (
                x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
            ):
                call = kept.call or kept.call_with(self._pattern, values, blocks, x.requires_grad)
                return record_linear(x, blocks, bias, call)
            return run_eagerly(x, blocks, bias, kept.call or kept.call_with(self._pattern, values, blocks))
        if getattr(x, "is_nested", False):
            y = linear_of_nested(self, x, bias)
            return y if activation is None else activate(y, activation)
        pattern = self.pattern
        values = self.blocks(self.values if values is None else values)
        derived = self.derived(x)
        if self.x_dtype is not None and not reads_itself(values, self.x_dtype):
            values = values.to(self.x_dtype)  # the one place where narrower values are widened
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        n, k = self.shape
        if self.rounds_x and reads_itself(values, x.dtype):
            return ops.bsr_linear_rounded(
                x, values, pattern.plan, bias, n, k, *derived, activation=activation
            )
        if activation is None:
            return ops.bsr_linear(x, values, pattern.plan, bias, n, k, *derived)
        return ops.bsr_linear(x, values, pattern.plan, bias, n, k, *derived, activation=activation)

    def to_dense(self) -> torch.Tensor:
        """The (N, K) tensor with zeros for the blocks that are not stored; differentiable, exact."""
        return dense_of(self.blocks(self.values), self.pattern)

    def stored_as(self, dtype: torch.dtype | None, *, rounds_x: bool | None = None) -> PatternWeight:
        """This weight with values stored in a dtype, x and results staying as they are; None: no change.

        rounds_x: let an x in float32 be rounded to bfloat16, if that is what values are now; None: no change.
        """
        if dtype is not None and dtype != self.dtype:
            self.x_dtype = self.dtype if self.x_dtype is None else self.x_dtype
            self.values = new_values(self.values.detach().to(dtype), self.values.requires_grad)
            self._kept = {}
            self._seen()
        self._let_round(self.rounds_x if rounds_x is None else rounds_x)
        return self

    def _let_round(self, rounds_x: bool) -> None:
        """Sets rounds_x where there is something to round."""
        self.rounds_x = rounds_x and (self.dtype, self.x_dtype) == (torch.bfloat16, torch.float32)

    @torch.no_grad()
    def zero_padding_(self) -> PatternWeight:
        """Sets padding to zero again, after something other than training wrote to all of `values`."""
        self._settle()
        zero_padding(self.blocks(self.values), self._pattern)
        return self

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values anew: uniform in ±1/√f, f the stored inputs of the row; see BlockSparseLinear."""
        if self.values.is_meta:
            return
        bounds = init_bounds(self.block_mask(), self.shape[1], self.block_shape[1])
        draw_uniform_(self.values, 1, generator)
        self.blocks(self.values).mul_(bounds[self.block_row_indices()].to(self.dtype)[:, None, None])
        self.zero_padding_()

    def change_pattern(
        self, pattern: BsrPattern, optimizer: Optimizer | None = None, *, values: torch.Tensor | None = None
    ) -> PatternChange:
        """Stores other blocks of the same shape from now on: what is in both patterns keeps its values.

        Gradients and the optimizer's state move along; `values` stays the same Parameter. Blocks that are
        new start at zero, or with their part of `values`. See PatternChange for all of it. Weights tied by
        the Parameter change together.

        Raises ValueError for another shape or block shape and for optimizer state that cannot move; nothing
        has changed then.
        """
        parameter = self._parameters.get("values")
        op = f"{type(self).__name__}.change_pattern"
        if parameter is None or parameter.is_meta:
            fail(op, "values must be a Parameter with data", "a parametrization or meta tensor", TypeError)
        tied = [w for w in alive if w._parameters.get("values") is parameter]
        change = PatternChange(self.pattern, pattern)
        change.apply(parameter, optimizer, values=values)
        for weight in tied:
            weight._set_pattern(change.new)
            weight._pattern_known = True
        return change

    # -- moving and copying ---------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> PatternWeight:
        # `fn` is for values; indices only follow the device, whatever else it does (casts, to_empty).
        self._settle()
        buffers, before = self._buffers, self.values.dtype
        self._buffers, self._kept = {}, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = buffers
        self._follow_x_dtype(fn, before, buffers["crow_indices"].device)
        self._let_round(self.rounds_x)
        device = self.values.device
        if device != self._pattern.device:
            if self._pattern.is_meta:
                # to_empty() gave values without content; kernels must see a valid pattern all the same.
                sizes = {"shape": self.shape, "block_shape": self.block_shape}
                stand_in = random_blocks(self.grid, self.density)
                self._set_pattern(BsrPattern.from_mask(stand_in, device=device, **sizes))
                self._pattern_known = False
            else:
                self._pattern_known = self._pattern_known and device.type != "meta"
                self._set_pattern(self._pattern.to(device))
        else:
            self._seen()
        return self

    def is_tied_to(self, other: SparseWeight) -> bool:
        """Whether both are one weight: the same module, or the same Parameter on equal patterns."""
        if self is other:
            return True
        return type(self) is type(other) and self.values is other.values and self.pattern == other.pattern

    @torch.no_grad()
    def assign_(self, other: PatternWeight) -> None:
        """Takes over values and pattern of a weight of the same class and shape.

        `values` stays the same Parameter; where the pattern differs it gets other data, of another size.
        """
        op = f"{type(self).__name__}.assign_"
        if other.shape != self.shape:
            fail(op, f"other must be of shape {tuple(self.shape)}", tuple(other.shape))
        pattern = other.pattern
        if self.pattern.same_sizes(pattern) and not self.values.is_meta and self.dtype == other.dtype:
            self.values.copy_(other.values)
            if self._pattern != pattern:
                self._set_pattern(pattern.to(self.device))
        else:
            self.values = swap_data(self.values, other.values.detach())
            self._set_pattern(pattern.to(self.device))
        self.x_dtype, self.rounds_x = other.x_dtype, other.rounds_x
        self._kept = {}
        self._pattern_known = other._pattern_known
        self._seen()

    def __getstate__(self) -> dict[str, Any]:  # noqa: D105
        self._settle()
        hidden = ("_watched", "_watched_values", "_looked_in", "_kept")
        state = {key: value for key, value in self.__dict__.items() if key not in hidden}
        # Weights that share a pattern share it in a pickle, too; the buffers are made of it again.
        state["_buffers"] = {k: b for k, b in self._buffers.items() if k not in PUBLIC}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a pickle or a copy in."""
        super().__setstate__(state)
        self._set_pattern(self._pattern)
        alive.add(self)

    # -- state_dict -----------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not is_compiling():
            self._settle()  # what is saved can be loaded: indices of one pattern, padding zero …
            if self._pattern.is_padded and "values" in self._parameters:
                self._settle_padding(self.values)  # … even if it was written to behind the version counter
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def check_state(self, op: str, state_dict: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Raises unless the tensors of a state_dict fit: ValueError for another pattern than this one.

        What was found is kept for the load that follows, so that nothing is checked or planned twice.
        """
        brought = [state_dict.get(prefix + piece) for piece in self.pieces]
        self._incoming = (prefix, brought, read_state(self, op, state_dict, prefix))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        op = f"{type(self).__name__}.load_state_dict"
        checked, tensors, pattern = self.__dict__.pop("_incoming", (None, [], None))
        same = (state_dict.get(prefix + p) is t for p, t in zip(self.pieces, tensors, strict=True))
        if checked != prefix or not all(same):
            pattern = read_state(self, op, state_dict, prefix)
        assigns = local_metadata.get("assign_to_params_buffers", False)
        if pattern is not None and self._pattern_known and not self.values.is_meta:
            self.change_pattern(pattern)  # the Parameter stays, and what belongs to it fits
        elif pattern is not None and (assigns or not self.values.is_meta):
            self._set_pattern(pattern.to(self.device))
            self._pattern_known = True
        # The pattern holds the indices now: the buffers take the place of those that came.
        state = dict(state_dict)
        state |= {prefix + n: self._buffers[n] for n in INDICES if prefix + n in state_dict}
        super()._load_from_state_dict(state, prefix, local_metadata, *args)
        pattern = pattern or self._pattern
        if self._pattern.device != self.values.device and not pattern.is_meta:
            self._set_pattern(pattern.to(self.values.device))
        self._seen()
