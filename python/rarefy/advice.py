"""Advise: which blocks and which dtype make a model's linear layers fastest here, by prediction."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from . import _load
from .checks import check_density, check_int, check_shape, fail
from .layers import find_layers
from .masks import grid_of
from .predictor import Case, predicted_seconds

# Finest first: of blocks that are about as fast, the one that keeps a model's quality best is the first.
BLOCKS = {
    "cpu": ((4, 1), (16, 1), (32, 1), (16, 16), (32, 32)),
    "cuda": ((32, 1), (64, 1), (128, 1), (16, 16), (32, 32), (64, 64), (128, 128)),
}
_NEAR = 1.05
# Of model and inputs, and how sparse layers store and round (of Case, and at the end of a spec).
_DTYPES: dict[str, tuple[torch.dtype, dict[str, bool], str]] = {
    "f32": (torch.float32, {}, ""),
    "bf16x": (torch.float32, {"rounds_x": True}, ":bf16x"),
    "bf16": (torch.bfloat16, {}, ""),
    "int8": (torch.float32, {"int8": True}, ":int8"),
    "w8": (torch.float32, {"weight_only": True}, ":w8"),
    "f16": (torch.float16, {}, ""),
}
_OF_DEVICE = {"cpu": ("f32", "bf16x", "bf16", "int8", "w8"), "cuda": ("bf16", "f16")}
_USUAL = {"cpu": ("f32", "bf16x", "bf16", "int8"), "cuda": ("bf16",)}  # each is seconds of measuring
_PREDICTED = {(on, _DTYPES[name][0]) for on, names in _OF_DEVICE.items() for name in names}
_INFERENCE = ("int8", "w8")  # layers that do not train

T = TypeVar("T")


@dataclass(frozen=True)
class LayerAdvice:
    """What is predicted for the layers of one shape, of one dtype; times are of one call, in milliseconds."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    tokens: int
    dtype: str
    dense_ms: float
    spec: str | None  # None: dense is faster than all blocks at this density
    sparse_ms: float  # of `spec`, or of what comes closest
    break_even: float | None  # the density below which those blocks are faster than dense

    @property
    def speedup(self) -> float:
        """Dense time / sparse time."""
        return self.dense_ms / self.sparse_ms

    @property
    def best_ms(self) -> float:
        """Of a call, if the advice is taken."""
        return self.dense_ms if self.spec is None else self.sparse_ms


@dataclass(frozen=True)
class Advice:
    """What advise found: iterable over its rows, those of the recommended dtype first. `print` it."""

    rows: list[LayerAdvice]
    dtype: str  # in which all layers together take least time, of those that train if there are any
    density: float

    def __iter__(self) -> Iterator[LayerAdvice]:  # noqa: D105
        return iter(self.rows)

    def patterns(self, dtype: str | None = None) -> dict[str, str]:
        """Names and specs for rarefy.sparsify, in the recommended dtype or another one of the rows.

        Convert the model to that dtype. For "bf16x", "int8" and "w8" it stays in float32: the specs say
        the rest.

        Raises:
            ValueError: there are no rows of the dtype.
        """
        dtype = self.dtype if dtype is None else dtype
        if not self._has(dtype):
            there = ", ".join(dict.fromkeys(row.dtype for row in self.rows))
            fail("advise", f"dtype of patterns must be one of {there}", repr(dtype))
        return {
            re.escape(name): row.spec
            for row in self.rows
            if row.dtype == dtype and row.spec is not None
            for name in row.names
        }

    def total_ms(self, dtype: str, *, dense: bool = False) -> float:
        """Of all layers, as advised or dense."""
        rows = [row for row in self.rows if row.dtype == dtype]
        return sum(len(row.names) * (row.dense_ms if dense else row.best_ms) for row in rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for json."""
        rows = [
            vars(row)
            | {"names": list(row.names), "speedup": row.speedup}
            | ({} if math.isfinite(row.sparse_ms) else {"sparse_ms": None})  # no blocks fit
            for row in self.rows
        ]
        return {"dtype": self.dtype, "density": self.density, "layers": rows}

    def __str__(self) -> str:
        """A table, and a sentence for each dtype."""
        head = (
            "layers",
            "shape",
            "tokens",
            "dtype",
            "dense ms",
            "sparse ms",
            "speedup",
            "break-even",
            "spec",
        )
        lines = [head] + [
            (
                row.names[0] + (f" and {len(row.names) - 1} more" if len(row.names) > 1 else ""),
                "x".join(map(str, row.shape)),
                str(row.tokens),
                row.dtype,
                f"{row.dense_ms:.3f}",
                f"{row.sparse_ms:.3f}" if math.isfinite(row.sparse_ms) else "-",
                f"{row.speedup:.2f}x",
                "none" if row.break_even is None else f"{row.break_even:.3f}",
                row.spec or "stays dense",
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        for dtype in dict.fromkeys(row.dtype for row in self.rows):
            best, dense = self.total_ms(dtype), self.total_ms(dtype, dense=True)
            text += (
                f"\n{dtype}: all layers {dense:.3f} ms dense, {best:.3f} ms as advised ({dense / best:.2f}x)."
            )
        return f"{text}\nRecommended: {self.dtype}{self._for_inference()}. All times are predicted."

    def _for_inference(self) -> str:
        """What is faster than the recommended dtype once layers are trained."""
        faster = [name for name in _INFERENCE if self._has(name) and name != self.dtype]
        best = min(faster, key=self.total_ms, default=self.dtype)
        gain = self.total_ms(self.dtype) / self.total_ms(best)
        return f"; for inference, once layers are trained, {best} ({gain:.2f}x as fast)" if gain > 1 else ""

    def _has(self, dtype: str) -> bool:
        return any(row.dtype == dtype for row in self.rows)


def advise(
    model: nn.Module | Mapping[str, tuple[int, int]],
    x: Any = None,
    *,
    tokens: int = 512,
    density: float = 0.5,
    dtypes: tuple[str, ...] | None = None,
    device: torch.device | str | None = None,
) -> Advice:
    """Predicts what the linear layers of a model gain on this machine, and which blocks and dtype are best.

    On a CPU the first call measures for some seconds; its figures are kept in ~/.cache/rarefy (or
    $XDG_CACHE_HOME), for this processor, number of threads and versions. Of GPUs those of compute capability
    9.0 (Hopper) can be predicted, beside cuBLAS, and nothing is measured.

    Args:
        model: its nn.Linear layers that can become sparse are looked at; or shapes (N, K) by name.
        x: what the model is called with (a tensor, a tuple of arguments or a mapping of keyword arguments),
            to learn how many tokens each layer sees.
        tokens: of each layer, where there is no x.
        density: share of blocks that stay.
        dtypes: of model and inputs, "f32" and "bf16"; a model in f32 whose sparse layers store bf16 and may
            round x to it is "bf16x", and one whose layers store int8, for inference alone, "int8" where x
            is rounded token by token, "w8" where it stays as it is. Dense is in f32 beside these three. On a
            GPU "bf16" and "f16". Default: all of a CPU but "w8"; "bf16" of a GPU.
        device: "cpu" or "cuda", the current GPU; default: where the model is, "cpu" for shapes.

    Returns:
        An Advice with a row for each shape and dtype, which recommends one that trains, and says whether
        one that does not is faster for inference. The finest blocks within 5 % of the fastest are named.

    Raises:
        ValueError: no layer that could become sparse; tokens below 1; a density or dtype that is not valid; a
            GPU that nothing is known of.
        TypeError: arguments of the wrong kind.
        ImportError: the compiled library is missing.
    """
    op = "advise"
    check_int(op, "tokens", tokens, 1)
    check_density(op, density)
    on = _device_of(op, model, device)
    known = _OF_DEVICE[on]
    dtypes = _USUAL[on] if dtypes is None else dtypes
    if not dtypes or (unknown := [name for name in dtypes if name not in known]):
        fail(op, f"dtypes must be some of {', '.join(known)}", dtypes if not dtypes else unknown)
    if _load.problem is not None:
        raise ImportError(_load.problem)
    if on == "cuda" and not _is_predicted_gpu():
        fail(op, "device must be a CPU, or a GPU of compute capability 9.0", "another, or none")
    kinds: dict[tuple[tuple[int, int], int], list[str]] = {}
    for name, shape, rows in _layers(op, model, x, tokens):
        kinds.setdefault((shape, rows), []).append(name)
    rows = [
        _advice(
            tuple(names),
            dtype,
            Case(count, *shape, _DTYPES[dtype][0], **_DTYPES[dtype][1], device=on),
            density,
        )
        for dtype in dtypes
        for (shape, count), names in kinds.items()
    ]
    found = Advice(rows, dtypes[0], density)
    trains = [dtype for dtype in dtypes if dtype not in _INFERENCE]
    best = min(trains or dtypes, key=found.total_ms)
    return Advice(sorted(rows, key=lambda row: row.dtype != best), best, density)


def _device_of(op: str, model: Any, device: torch.device | str | None) -> str:
    """The type of the device that times are predicted for."""
    if device is None:
        layers = find_layers(model) if isinstance(model, nn.Module) else []
        found = {layer.module.weight.device.type for layer in layers if layer.reason is None}
        if len(found) > 1:
            fail(op, "layers must be on one device, or device be given", ", ".join(sorted(found)))
        return "cuda" if found == {"cuda"} else "cpu"
    try:
        its = torch.device(device).type
    except (RuntimeError, TypeError):
        its = None
    if its not in _OF_DEVICE:
        fail(op, "device must be cpu or cuda", repr(device))
    return its


def _is_predicted_gpu() -> bool:
    """Whether times on the current GPU can be predicted."""
    if not torch.cuda.is_available():
        return False
    return predicted_seconds(Case(1, 64, 64, torch.bfloat16, device="cuda")) < math.inf


def can_predict(weight: torch.Tensor) -> bool:
    """Whether times of layers of its dtype on its device can be predicted, with values of that dtype."""
    on = weight.device.type
    return (on, weight.dtype) in _PREDICTED and (on == "cpu" or _is_predicted_gpu())


def _layers(op: str, model: Any, x: Any, tokens: int) -> list[tuple[str, tuple[int, int], int]]:
    """Name, shape and tokens of each layer."""
    if isinstance(model, Mapping):
        found = [(str(name), check_shape(op, shape), tokens) for name, shape in model.items()]
        for name, shape, _ in found:
            if 0 in shape:
                fail(op, f"the shape of {name} must be at least (1, 1)", shape)
    elif isinstance(model, nn.Module):
        layers = [layer for layer in find_layers(model) if layer.reason is None and 0 not in layer.shape]
        seen = {} if x is None else _tokens_seen(model, layers, x)
        found = [(layer.name, layer.shape, seen.get(layer.name, tokens)) for layer in layers]
    else:
        fail(op, "model must be an nn.Module, or shapes by name", type(model).__name__, TypeError)
    if not found:
        fail(op, "model must have layers that can become sparse", "none")
    return found


def _tokens_seen(model: nn.Module, layers: list, x: Any) -> dict[str, int]:
    """How many rows each layer multiplies when the model is called with x."""
    seen: dict[str, int] = {}

    def watch(name: str):
        def hook(_module: nn.Module, inputs: tuple) -> None:
            seen[name] = max(1, inputs[0].shape[:-1].numel())

        return hook

    hooks = [layer.module.register_forward_pre_hook(watch(layer.name)) for layer in layers]
    try:
        with torch.inference_mode():
            if isinstance(x, Mapping):
                model(**x)
            else:
                model(*x) if isinstance(x, tuple) else model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _advice(names: tuple[str, ...], dtype: str, dense: Case, density: float) -> LayerAdvice:
    dense_s, block, sparse_s = _best(dense, density)
    even, spec = None, None
    if block is not None:
        even = break_even(replace(dense, block=block), dense_s)
        if sparse_s < dense_s:
            spec = "block:{}x{}@{:g}".format(*block, density) + _DTYPES[dtype][2]
    sizes = (dense.out_features, dense.in_features)
    return LayerAdvice(names, sizes, dense.tokens, dtype, 1e3 * dense_s, spec, 1e3 * sparse_s, even)


def _best(dense: Case, density: float) -> tuple[float, tuple[int, int] | None, float]:
    """Predicted seconds of dense; the finest block within 5 % of the fastest, if any; its seconds."""
    times = {
        block: predicted_seconds(replace(dense, block=block, density=density)) for block in blocks_for(dense)
    }
    block = first_of_fastest(times)
    return predicted_seconds(dense), block, times.get(block, math.inf)


def blocks_for(dense: Case, *more: tuple[int, int]) -> list[tuple[int, int]]:
    """Those of BLOCKS, and `more`, that divide the layer, finest first."""
    sizes = (dense.out_features, dense.in_features)
    blocks = (*BLOCKS[dense.device], *more)
    return [block for block in blocks if not any(n % b for n, b in zip(sizes, block, strict=True))]


def first_of_fastest(seconds: Mapping[T, float]) -> T | None:
    """The first that takes up to 5 % longer than the fastest; None if nothing is known of any."""
    least = _NEAR * min(seconds.values(), default=math.inf)
    return next((key for key, its in seconds.items() if its <= least < math.inf), None)


def break_even(case: Case, dense: float) -> float | None:
    """The largest density at which the layer takes no more than `dense` seconds; None if there is none."""
    total = math.prod(grid_of((case.out_features, case.in_features), case.block))
    if predicted_seconds(replace(case, density=1 / total)) > dense:
        return None
    if predicted_seconds(replace(case, density=1.0)) <= dense:
        return 1.0
    low, high = 1, total  # blocks: `low` is fast enough, `high` is not
    while high - low > max(1, total // 1000):
        middle = (low + high) // 2
        if predicted_seconds(replace(case, density=middle / total)) <= dense:
            low = middle
        else:
            high = middle
    return low / total


# python -m rarefy advise --------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Prints what layers of given shapes, or of a safetensors file, would gain; exit code 1 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m rarefy advise", description=main.__doc__)
    parser.add_argument(
        "file", nargs="?", help="safetensors file: its two-dimensional .weight tensors are layers"
    )
    parser.add_argument(
        "--shape", action="append", default=[], help="out_features x in_features, like 1536x384"
    )
    parser.add_argument("--tokens", type=int, default=512, help="rows of x (default: %(default)s)")
    parser.add_argument("--density", type=float, default=0.5, help="stored share of blocks (default: 0.5)")
    parser.add_argument(
        "--dtype", action="append", choices=sorted(_DTYPES), help="default: all of a CPU but w8; or bf16"
    )
    parser.add_argument("--device", choices=sorted(_OF_DEVICE), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of a call (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.file is None and not args.shape:
        parser.error("a file or --shape is wanted")
    try:
        shapes = _shapes(args.file, args.shape)
        if args.threads is not None:
            torch.set_num_threads(check_int("advise", "--threads", args.threads, 1))
        dtypes = tuple(args.dtype) if args.dtype else None
        found = advise(shapes, tokens=args.tokens, density=args.density, dtypes=dtypes, device=args.device)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0


def _shapes(file: str | None, texts: list[str]) -> dict[str, tuple[int, int]]:
    shapes: dict[str, tuple[int, int]] = {}
    for text in texts:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            fail("advise", "--shape must look like 1536x384", repr(text))
        shapes[text] = (int(match[1]), int(match[2]))
    if file is not None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    sizes = tensors.get_slice(key).get_shape()
                    if key.endswith(".weight") and len(sizes) == 2 and "embedding" not in key:
                        shapes[key.removesuffix(".weight")] = tuple(sizes)
        except SafetensorError as error:
            fail("advise", "file must be a safetensors file", f"{file}: {error}")
    return shapes
