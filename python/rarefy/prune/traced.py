"""trace_couplings: which layers have the same features, found by following them through a traced graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from ..checks import fail
from .couplings import (
    BETWEEN,
    NORMS,
    POOLS,
    Coupling,
    alone,
    common_groups,
    inputs,
    is_depthwise,
    is_norm,
    is_plain,
    outputs,
)

# Functions and methods by their names: of one number each, of two values, of pictures, of sizes.
_EACH = {
    "relu", "relu6", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "hardswish", "hardsigmoid",
    "hardtanh", "softplus", "mish", "dropout", "dropout1d", "dropout2d", "neg", "abs", "clamp", "contiguous",
    "to", "float", "half", "bfloat16", "detach", "clone",
}  # fmt: skip
_TWO = {"add", "iadd", "sub", "isub", "mul", "imul", "truediv", "itruediv"}
_PICTURES = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate"}
_SHAPES = {"shape", "dtype", "device", "ndim"}


@dataclass(eq=False)
class _Features:
    """Features that are the same in several values: all layers that make or read them."""

    width: int
    producers: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    fixed: bool = False  # something else sees them
    same: _Features | None = None

    def root(self) -> _Features:
        """What stands for all that were found to be the same."""
        return self if self.same is None else self.same.root()

    def join(self, other: _Features) -> None:
        """These are those."""
        one, two = self.root(), other.root()
        if one is not two:
            two.same, one.fixed = one, one.fixed or two.fixed
            for mine, theirs in ((one.producers, two.producers), (one.consumers, two.consumers)):
                mine += theirs
            one.norms += two.norms


@dataclass(frozen=True)
class _Value:
    """What a node gives: features, and where they are: "last", in channels ("1") or flattened ("flat")."""

    features: _Features
    where: str


def trace_couplings(model: nn.Module) -> list[Coupling]:
    """Couplings of the whole graph of a model, residual streams among them, in the order of first producers.

    Linear and Conv2d (in groups, too) make and read features; batch norms, depthwise convolutions,
    activations, dropout, pooling and flattening pass them on; sums and products make both sides' the same, so
    that all layers around a chain of residual blocks shrink together. Features that reach anything else stay
    whole: inputs and outputs of the model, layer norms (whose means are of all features), concatenations,
    attention, reshapes, Parameters that are added. `shrink(model, 0.25, couplings=trace_couplings(model))`
    then computes what the model did with the removed columns at zero, as with those of find_couplings.

    Raises ValueError for a model that torch.fx cannot trace: its forward must not depend on its inputs'
    values or shapes. Of such a model find_couplings knows blocks by their names.
    """
    op = "trace_couplings"
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # whatever a forward does with a proxy
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        fail(op, "model must be one that torch.fx can trace", first)
    found = _Walk(model).walk(graph)
    couplings = []
    for features in found:
        names = (features.producers, features.consumers, features.norms)
        producers, consumers, norms = (tuple(dict.fromkeys(x)) for x in names)
        if producers and consumers and not features.fixed:
            groups = common_groups(map(model.get_submodule, (*producers, *consumers)))
            if features.width > groups:
                couplings.append(Coupling(producers[0], producers, consumers, norms, groups=groups))
    return alone(model, couplings)


class _Walk:
    """Follows features from node to node."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found, self.values = model, [], {}
        self.calls: dict[str, int] = {}

    def walk(self, graph: fx.Graph) -> list[_Features]:
        """All features, each once, in the order in which they are made."""
        for node in graph.nodes:
            if node.op == "call_module":
                self.calls[node.target] = self.calls.get(node.target, 0) + 1
        for node in graph.nodes:
            given = [self.values[x] for x in node.all_input_nodes if x in self.values]
            value = self._of(node, given)
            if value is not None:
                self.values[node] = value
        return list(dict.fromkeys(x.root() for x in self.found))

    def _of(self, node: fx.Node, given: list[_Value]) -> _Value | None:
        """The value of a node; None for one whose features nobody follows, and then those given stay."""
        if node.op == "call_module" and len(given) == 1:
            value = self._of_module(node.target, self.model.get_submodule(node.target), given[0])
        elif node.op == "call_module" and len(node.all_input_nodes) == 1 and not given:
            value = self._made(node.target, self.model.get_submodule(node.target))
        elif node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if name in ("size", "dim") or (name == "getattr" and node.args[1] in _SHAPES):
                return None
            value = self._of_function(node, name.removesuffix("_"), given)
        else:
            value = None
        if value is None:
            for x in given:
                x.features.root().fixed = True
        return value

    def _made(self, name: str, module: nn.Module) -> _Value | None:
        """What a layer makes."""
        if not is_plain(module) or self.calls[name] != 1:
            return None
        features = _Features(outputs(module), producers=[name])
        self.found.append(features)
        return _Value(features, "1" if isinstance(module, nn.Conv2d) else "last")

    def _of_module(self, name: str, module: nn.Module, given: _Value) -> _Value | None:
        features, where = given.features.root(), given.where
        if self.calls[name] > 1 and next(module.parameters(), None) is not None:
            return None
        if is_plain(module):
            reads = where == "1" if isinstance(module, nn.Conv2d) else where != "1"
            times, rest = divmod(inputs(module), features.width)
            if not reads or rest or not (times == 1 or where == "flat"):
                features.fixed = True
            else:
                features.consumers.append(name)
            return self._made(name, module)
        if is_depthwise(module) or is_norm(module):
            wide = len(module.weight) if module.weight is not None else module.num_features
            channels = "last" if type(module) is nn.BatchNorm1d else "1"
            if where == channels and wide == features.width:
                features.norms.append(name)
                return given
            return None
        if isinstance(module, nn.Flatten):
            return self._flat(given, module.start_dim, module.end_dim)
        passes = type(module) in BETWEEN or type(module) in (*NORMS, nn.Hardsigmoid, nn.Mish)
        return given if passes or (where == "1" and type(module) in POOLS) else None

    def _of_function(self, node: fx.Node, name: str, given: list[_Value]) -> _Value | None:
        if len(given) == 2 and name in _TWO:
            one, two = given
            if one.where != two.where or one.features.root().width != two.features.root().width:
                return None
            one.features.join(two.features)
            return one
        if len(given) != 1 or node.all_input_nodes[0] not in self.values:
            return None
        rest, options = node.args[1:], dict(node.kwargs)
        if name in _EACH:
            return given[0]
        if name in _TWO:  # with a number
            return given[0] if len(node.all_input_nodes) == 1 else None
        if given[0].where == "1" and name in _PICTURES:
            return given[0]
        if name == "flatten":
            dims = (*rest, *(options[x] for x in ("start_dim", "end_dim") if x in options))
            return self._flat(given[0], *dims)
        if (
            name in ("view", "reshape")
            and len(rest) == 2
            and rest[1] == -1
            and _is_batch(rest[0], node.args[0])
        ):
            return self._flat(given[0], 1)
        if name == "mean" and given[0].where == "1":
            dims, keep = options.get("dim", rest[0] if rest else None), options.get("keepdim", False)
            keep = rest[1] if len(rest) > 1 else keep
            if isinstance(dims, (list, tuple)) and {x % 4 for x in dims} == {2, 3}:
                return given[0] if keep else _Value(given[0].features, "last")
        return None

    def _flat(self, given: _Value, start: int = 0, end: int = -1) -> _Value | None:
        return _Value(given.features, "flat") if (start, end) == (1, -1) and given.where != "last" else None


def _is_batch(size: object, of: fx.Node) -> bool:
    """Whether a size is that of the first dimension of a value: x.size(0) or x.shape[0]."""
    if not isinstance(size, fx.Node) or len(size.args) < 2 or size.args[1] != 0:
        return False
    shape = size.args[0]
    if size.target == "size":
        return shape is of
    return getattr(shape, "target", None) is getattr and shape.args == (of, "shape")
