"""SparseWeight, what layers, patcher, files and reports know of a sparse format, and the formats by name.

A format is a subclass of SparseWeight, a subclass of Spec that says how its name is written, and one call
of register_format. docs/add_a_format.md walks through an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from .checks import DTYPES_BY_NAME, check_tensor, fail
from .hugging_face import guard_save_pretrained
from .spec import KINDS, Spec
from .values import counted, new_values

# What a matrix would answer to and a sparse weight does not: what to use instead.
_ADVICE = {
    "data": "its Parameter's, weight.values.data",
    "grad": "its Parameter's, weight.values.grad",
    "T": "weight.to_dense().T (F.linear(x, weight) multiplies by the transpose)",
    "mT": "weight.to_dense().mT (F.linear(x, weight) multiplies by the transpose)",
    "t": "weight.to_dense().t() (F.linear(x, weight) multiplies by the transpose)",
    "transpose": "weight.to_dense().transpose(…)",
    "view": "weight.to_dense().view(…)",
    "reshape": "weight.to_dense().reshape(…)",
    "norm": "weight.values.norm(): what is not stored is zero",
}


class SparseWeight(nn.Module):
    """A weight W of shape (N, K) = (out_features, in_features) of which only a part is stored.

    A module, so that its tensors move, copy, train and save as those of any layer do. To the layer
    around it, it is a matrix: `linear` multiplies by it, `shape`, `dtype`, `device`, `requires_grad` and
    `numel()` are those of the dense matrix it stands for.

    A format defines what is marked below, and whatever makes sense for it alone.
    """

    format: ClassVar[str]  # its name in files
    pieces: ClassVar[tuple[str, ...]]  # the names of its tensors in a state_dict, the values first
    reserved: ClassVar[tuple[str, ...]] = ()  # those of them that belong to no other kind of module

    shape: torch.Size
    # The dtype of x and of the result where values are stored narrower; None: that of the values.
    x_dtype: torch.dtype | None = None
    # Whether an x in float32 may be rounded to bfloat16, as values are, by kernels that multiply in it.
    rounds_x: bool = False
    computes_in_x_dtype: ClassVar[bool] = False  # whether x_dtype is never that of the values
    # Whether load_state_dict refuses another pattern than the present one, or takes it over.
    strict_pattern: bool = True

    def __init__(self) -> None:
        super().__init__()
        guard_save_pretrained(SparseWeight)

    # -- to be defined by a format --------------------------------------------------------------

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> torch.Tensor:
        """Returns x Wᵀ + bias, as F.linear does: x of shape (…, K) gives (…, N); or an activation of it."""
        raise NotImplementedError

    def to_dense(self) -> torch.Tensor:
        """The (N, K) tensor with zeros for what is not stored; differentiable, exact."""
        raise NotImplementedError

    @property
    def density(self) -> float:
        """What is stored / all, in the format's units (blocks, elements), in [0, 1]."""
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        """What a file says of this weight beside its tensors: values that JSON knows."""
        raise NotImplementedError

    @classmethod
    def from_pieces(cls, pieces: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> SparseWeight:
        """The weight of a file's tensors, which it takes as they are, after checking everything.

        Raises ValueError or TypeError; neither tensors nor metadata are trusted.
        """
        raise NotImplementedError

    @classmethod
    def infer(cls, pieces: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, Any] | None:
        """The metadata of a state_dict's tensors, which come without; None if they are another format's."""
        raise NotImplementedError

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws values anew, uniform with nn.Linear's bound for the stored inputs of each row."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored values."""
        return getattr(self, self.pieces[0]).dtype

    @property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return getattr(self, self.pieces[0]).device

    @torch.no_grad()
    def assign_(self, other: SparseWeight) -> None:
        """Takes over all that `other`, of the same shape and class, holds; Parameters stay."""
        for piece in self.pieces:
            mine, theirs = getattr(self, piece), getattr(other, piece)
            if isinstance(mine, nn.Parameter):
                same = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and not mine.is_meta
                setattr(self, piece, mine.copy_(theirs) if same else swap_data(mine, theirs.detach()))
            else:
                setattr(self, piece, theirs.clone())
        self.x_dtype, self.rounds_x = other.x_dtype, other.rounds_x

    def check_state(self, op: str, state_dict: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Raises unless the tensors of a state_dict fit: values of the same shape, all else equal."""
        advice = "rarefy.load_state_dict(model, state_dict) takes what differs over"
        for piece in self.pieces:
            tensor, mine = state_dict.get(prefix + piece), getattr(self, piece)
            if tensor is None:
                continue
            check_tensor(op, prefix + piece, tensor)
            if tensor.shape != mine.shape:
                requirement = f"{prefix}{piece} must be of shape {tuple(mine.shape)} ({advice})"
                fail(op, requirement, tuple(tensor.shape))
            if isinstance(mine, nn.Parameter) or mine.is_meta or tensor.is_meta:
                continue
            if not torch.equal(tensor.to(mine.device), mine):
                fail(op, f"{prefix}{piece} must be those of this module ({advice})", "others")

    def _apply(self, fn: Any, recurse: bool = True) -> SparseWeight:
        counts = {name: p for name, p in self._parameters.items() if p is not None and not p.is_inference()}
        super()._apply(fn, recurse)
        for name, before in counts.items():
            now = self._parameters[name]
            if not now.is_inference():
                continue
            if now is before:
                with torch.inference_mode(False):
                    now.data = counted(now)
            else:
                self._parameters[name] = new_values(now, now.requires_grad)
        return self

    def _follow_x_dtype(self, fn: Any, before: torch.dtype, device: torch.device) -> None:
        """After _apply(fn) on values of dtype `before` on a device: x_dtype as for any tensor of that dtype.

        Once values are cast, they are stored as they compute.
        """
        if self.x_dtype is None:
            return
        moved = fn(torch.empty(0, dtype=self.x_dtype, device=device)).dtype
        cast = self.values.dtype != before or moved == self.values.dtype
        self.x_dtype = None if cast else moved

    def is_tied_to(self, other: SparseWeight) -> bool:
        """Whether both are one weight: the same module, or the same tensors in another."""
        return self is other

    def spec_format(self) -> str:
        """The format as a spec has it, without the density: "block:16x16"."""
        raise NotImplementedError

    def options_repr(self) -> str:
        """What a layer's repr says of its weight."""
        return f"density={self.density:.4g}, format={self.spec_format()}"

    def zero_padding_(self) -> SparseWeight:
        """Sets to zero what is stored outside the matrix; nothing, for a format that stores no such thing."""
        return self

    # -- the same for every format --------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `linear`, which layers call."""
        return type(self).linear(self, *args, **kwargs)

    @property
    def ndim(self) -> int:
        """2, as of any matrix."""
        return 2

    def dim(self) -> int:
        """2, as of any matrix."""
        return 2

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """N · K, as of the dense matrix; how many are stored is values.numel()."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are saved."""
        return sum(t.numel() * t.element_size() for t in (getattr(self, piece) for piece in self.pieces))

    @property
    def requires_grad(self) -> bool:
        """Whether any of its Parameters does."""
        return any(p.requires_grad for p in self.parameters())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> SparseWeight:
        """As nn.Module's, for those Parameters that can have a gradient: integers cannot."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad and parameter.dtype.is_floating_point)
        return self

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: D105
        if name == "parametrizations" and type(value) is nn.ModuleDict:
            value = _Parametrizations()
        super().__setattr__(name, value)
        if (
            name == "forward"
        ):  # accelerate's hooks, which bring offloaded tensors in: a product must meet them
            self.__dict__["linear"] = value

    def __setstate__(self, state: dict[str, Any]) -> None:  # noqa: D105
        super().__setstate__(state)
        for tensors in (self._parameters, self._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_inference():
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[name] = (
                        new_values(tensor, tensor.requires_grad) if is_parameter else counted(tensor)
                    )
        guard_save_pretrained(SparseWeight)

    def __getattr__(self, name: str) -> Any:  # noqa: D105
        if name in _ADVICE:
            kind = type(self).__name__
            raise AttributeError(f"[{kind}] {name} must be asked of a tensor: {_ADVICE[name]}; got a {kind}")
        return super().__getattr__(name)

    def _no_product(self, other: object) -> Any:
        kind = type(self).__name__
        requirement = "a product must be F.linear(x, weight) or weight.linear(x), for x @ weight.to_dense().T"
        fail(kind, requirement, "@", TypeError)

    __matmul__ = __rmatmul__ = _no_product

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: D105
        # functional.linear(x, weight, bias) works with a SparseWeight. Being an overriding type also keeps
        # fused paths that read `.weight` of a linear layer (nn.TransformerEncoderLayer in eval) away.
        if func is functional.linear:

            def linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> Any:  # noqa: A002
                return weight.linear(input, bias) if isinstance(weight, SparseWeight) else NotImplemented

            return linear(*args, **(kwargs or {}))
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm):
            next(a for a in args if isinstance(a, SparseWeight))._no_product(None)
        return NotImplemented


@torch.no_grad()
def swap_data(parameter: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None = None) -> nn.Parameter:
    """Gives a Parameter other data, of whatever size; returns it, or a new one where it cannot stay."""
    if parameter.is_meta != data.is_meta or not isinstance(parameter, nn.Parameter):
        return new_values(data, parameter.requires_grad)
    parameter.grad = None
    if data.shape != parameter.shape:
        # While an earlier loss is alive autograd keeps a node that expects gradients of the old size; only
        # for another dtype it makes another one.
        other = torch.float32 if data.dtype == torch.float16 else torch.float16
        parameter.data = torch.empty(0, dtype=other, device=data.device)
    parameter.data = counted(data)
    parameter.grad = grad
    torch.autograd.graph.increment_version(parameter)  # a pending backward must notice
    return parameter


class _Parametrizations(nn.ModuleDict):
    """What torch.nn.utils.parametrize keeps; ModuleDict refuses a child called like its method `values`."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._modules[name] = module


# Files and formats ---------------------------------------------------------------------------------


def check_metadata(op: str, metadata: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A file's entry as arguments: shape, block_shape …, stored (dtype) and x_dtype, all of the right kind.

    Pairs are lists of two ints, counts ints, dtypes names; x_dtype may be missing.
    """
    if not isinstance(metadata, Mapping) or set(metadata) - {"x_dtype"} != set(keys):
        got = sorted(metadata) if isinstance(metadata, Mapping) else type(metadata).__name__
        fail(op, f"the metadata must have the keys {', '.join(keys)}", got)
    checked = {}
    for key, value in metadata.items():
        if key.endswith("dtype"):
            if not isinstance(value, str) or value not in DTYPES_BY_NAME:
                fail(op, f"{key} in the metadata must be one of {', '.join(DTYPES_BY_NAME)}", repr(value))
            checked[key] = DTYPES_BY_NAME[value]
        elif key.endswith("shape"):
            if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
                fail(op, f"{key} in the metadata must be two ints", value)
            checked[key] = tuple(value)
        else:
            if type(value) is not int:
                fail(op, f"{key} in the metadata must be an int", repr(value))
            checked[key] = value
    return checked


_weights: dict[str, type[SparseWeight]] = {}


def register_format(weight: type[SparseWeight], spec: type[Spec]) -> None:
    """Makes a format known to layers, sparsify, files and reports.

    Args:
        weight: the container; its `format` is the name in files and must be new.
        spec: how users ask for it.

    Raises ValueError for a name that another format has, TypeError for classes of another kind.
    """
    op = "register_format"
    if not (isinstance(weight, type) and issubclass(weight, SparseWeight)):
        fail(op, "weight must be a subclass of SparseWeight", weight, TypeError)
    if not (isinstance(spec, type) and issubclass(spec, Spec)):
        fail(op, "spec must be a subclass of Spec", spec, TypeError)
    if _weights.get(weight.format, weight) is not weight:
        fail(op, "the format's name must be new", repr(weight.format))
    _weights[weight.format] = weight
    if spec not in KINDS:
        KINDS.append(spec)
        KINDS.sort(key=lambda kind: kind.example)  # as messages list them


def formats() -> dict[str, type[SparseWeight]]:
    """The weight classes of all formats by name."""
    return dict(_weights)


def reserved_endings() -> tuple[str, ...]:
    """Endings of names that only tensors of sparse weights may have, such as ".crow_indices"."""
    return tuple(sorted({f".{piece}" for weight in _weights.values() for piece in weight.reserved}))
