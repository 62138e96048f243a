"""How long a linear layer takes on this processor: a model of each kernel's configuration, calibrated once.

What a kernel does for a problem follows from its configuration, as its driver reckons it: tokens that a
thread packs and stores, products, weights that stream by. Some short measurements say what each of these
costs here; they are kept in a file. On a Hopper GPU nothing is measured: its kernels are chosen by times that
are predicted, and these are told. docs/performance.md has how exact both are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _load
from .backend import backend_info
from .checks import DTYPE_NAMES, fail
from .derived import FEW_TOKENS
from .files import replacing
from .masks import block_count, grid_of
from .modules import BlockSparseLinear
from .timing import MOST_WAITED, queued

_LANES = {"avx512": 16, "avx2": 8, "neon": 4}  # floats of a vector, by family
_PANEL = 32  # tokens of a panel in pairs, fours and lanes (src/cpu/pairs.h)
_GROUP = {torch.int8: 64}  # columns of a group there, which may be half empty; 32 of 16-bit values
# Rows of int8 of which a multiple goes alone, and rows of a product where others meet (src/cpu/quads.h).
_QUADS = {"avx512": (8, 16), "amx": (16, 16), "scalar": (16, 16)}
_NEARLY_ALL = 0.65  # of a product's columns, from which all are multiplied (src/cpu/quads_weight.h)
_OUTPUTS = {"amx_linear": 32, "pairs_linear": 32, "avx512_bf16_linear": 4}  # of a product in pairs

# What is measured: (out_features, in_features), densities, tokens for each kind of kernel; those of them that
# run the kernel in question, and the rarer ones where these are few.
_SHAPES = ((768, 768), (384, 1536), (2048, 1024))
_DENSITIES, _RARER = (0.1, 0.5), (0.02, 0.005)
_TOKENS = {True: (1, 4), False: (8, 64, 120, 512)}  # 120 leave lanes empty
_LEAST = 9  # points
_SECONDS = 0.012  # for a single measurement
_PATIENCE = 8  # times as long while threads wait for a processor: five calls of two threads may all be late
_FORMAT = 6  # of the file
# Weights of so many bytes and more are no faster than they are read, by whatever level holds them; so many
# tokens of a dense layer, whose own speed of reading it is.
_READ, _READING_TOKENS = (2**23, 2**25, 2**27), 16


@dataclass(frozen=True)
class Case:
    """A layer and its input: what a time is predicted for. block: rows × columns; None: nn.Linear.

    values: of blocks: their dtype where it is not that of x.
    rounds_x: of blocks under float32: values are bfloat16, and x may be rounded to it.
    int8: of blocks: values are int8 with a scale a row, x is rounded token by token.
    weight_only: of blocks under float32: values are int8 with a scale a row, x stays as it is.
    device: "cpu" or "cuda", the current one.
    """

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.float32
    block: tuple[int, int] | None = None
    density: float = 1.0
    rounds_x: bool = False
    int8: bool = False
    weight_only: bool = False
    device: str = "cpu"
    values: torch.dtype | None = None

    @property
    def blocks(self) -> int:
        """Stored blocks."""
        return block_count(
            self.density, math.prod(grid_of((self.out_features, self.in_features), self.block))
        )

    @property
    def stored(self) -> torch.dtype:
        """Of the values."""
        if self.block is None:
            return self.dtype
        is_int8 = self.int8 or self.weight_only
        return torch.int8 if is_int8 else torch.bfloat16 if self.rounds_x else self.values or self.dtype

    @property
    def kernel(self) -> str | None:
        """That of blocks, by name; None where none fits that is allowed."""
        return _explain(self)["kernel"]

    @property
    def weight_bytes(self) -> int:
        """Of values and indices."""
        stored = self.blocks * math.prod(self.block) if self.block else self.out_features * self.in_features
        floats = self.block is not None and self.weight_only and self.kernel.endswith("_scaled")
        return stored * (4 if floats else self.stored.itemsize) + (4 * self.blocks if self.block else 0)

    @property
    def reading(self) -> str | None:
        """What it is read as, if it is large and its tokens are few: a group of measurements of its own."""
        if self.weight_bytes < _READ[0] or (self.block is None and self.tokens > _READING_TOKENS):
            return None
        return "reading" if self.block else f"reading {DTYPE_NAMES[self.dtype]} dense {self.tokens}"

    @property
    def group(self) -> str:
        """Cases of one group run one kernel, and are predicted from the same measurements."""
        few, name = "few" if self.tokens <= FEW_TOKENS else "many", DTYPE_NAMES[self.dtype]
        if self.block is None:
            return f"{name} dense {few}"
        kernel, config = _explained(self, torch.get_num_threads(), backend_info()["forced_impl"] or "")
        how = " scatter" if config.get("scatter") else ""
        own = name if self.stored == self.dtype else f"{name} {DTYPE_NAMES[self.stored]}"
        int8 = f"{name} int8" if self.int8 else f"{name} w8" if self.weight_only else None
        stored = int8 or ("bf16x" if self.rounds_x else own)
        return "{} {}x{} {} {}{}".format(stored, *self.block, few, kernel, how)


# What a kernel does, in terms that each have their own cost -----------------------------------------


def _explain(case: Case) -> dict[str, Any]:
    """What the core says of the layer's linear, with its packed weight at hand."""
    name = DTYPE_NAMES[case.dtype]
    sizes = (case.out_features, case.in_features, *case.block, case.blocks)
    values = "bf16 rounding x" if case.rounds_x else DTYPE_NAMES[case.stored]
    stored = "i8 dynamic" if case.int8 else "i8 scaled" if case.weight_only else values
    index = torch.cuda.current_device() if case.device == "cuda" else 0
    of_device = (case.device, index, -1)
    text = torch.ops.rarefy.explain("linear", *sizes, stored, name, case.tokens, True, "none", *of_device)
    return json.loads(text)


@functools.lru_cache(maxsize=4096)
def _explained(case: Case, threads: int, forced: str) -> tuple[str, dict[str, int]]:
    """Name and configuration of the kernel that the layer runs."""
    found = _explain(case)
    if found["kernel"] is None:
        fail("predict", "a kernel of this build must fit the layer", found["why_none"])
    config = dict(item.split("=") for item in (found["config"] or "").split())
    return found["kernel"], {field: int(value) for field, value in config.items()}


def terms(case: Case, threads: int, forced: str = "") -> list[float]:
    """What the slowest thread does: how many products, elements packed, stored and so on; the first is 1."""
    m, n, k = case.tokens, case.out_features, case.in_features
    if case.block is None:
        return [1, m * n * k / threads, n * k / threads, m * k, m * n / threads]
    (rows, cols), blocks = case.block, case.blocks
    weights = blocks * rows * cols
    kernel, config = _explained(case, threads, forced)
    if "_digits" in kernel:  # each token is three of int8: linear_digits.cc
        m *= 3
    alone = kernel.endswith(("_int8_rows", "_digits_rows"))  # nothing is joined but to four rows
    if kernel.endswith(("_int8_tokens", "_digits_tokens")) and (rows % _PANEL or cols % _PANEL):
        weights = n * k  # as if all were stored
    elif case.int8:  # quads_weight.h
        least, outputs = (4, 4) if alone else _QUADS.get(kernel.partition("_")[0], (8, 8))
        as_they_are = rows == least and cols % 4 == 0
        if rows % least or (rows < outputs and outputs % rows == 0 and not as_they_are):
            stored = _of_product(case, outputs)
            weights = n * k * (1 if stored > _NEARLY_ALL else stored)
    elif kernel in _OUTPUTS and rows % 16:  # pairs_weight.h
        outputs = 8 if _OUTPUTS[kernel] == 4 and rows % 8 == 0 else _OUTPUTS[kernel]
        weights = n * k * _of_product(case, outputs)
    splits, panels = config.get("splits", 1), config.get("panels", 1)
    width = _LANES.get(kernel.partition("_")[0], 8)
    tiles = 1  # of x, between which sums wait
    if "vectors" in config:  # linear.cc, blocking.cc; linear_pieces.cc
        lanes, step = config["vectors"] * width, width
        if "columns" in config:
            tiles = -(-k // cols // config["columns"])
    elif set(config) == {"panels", "splits", "rest"} and case.tokens > FEW_TOKENS:
        lanes = 2 * _PANEL if alone and kernel.startswith("avx512") else _PANEL
        step = 1 if kernel.endswith("_lanes") else _PANEL // 2  # linear_lanes.cc, _pairs.cc
        group = _GROUP.get(case.stored, _PANEL)
        if step > 1 and cols % group and not alone and weights < n * k:
            weights += n * group / 2  # a block row's last group is half empty
    else:  # up to FEW_TOKENS, and what has no model of its own
        return [1, weights / threads, m * weights / threads, m * k, m * n / threads, blocks / threads]
    most = -(-m // lanes)
    rest = config.get("rest", 0)  # panels of which each thread has a part of the outputs
    each = packed = _rounds(most - rest, panels, splits, threads)
    if rest:
        each, packed = (most - rest) // threads + rest / threads, (most - rest) // threads + rest
    filled = -(-m // step) * step / most
    worked = each * filled
    return [
        1,
        worked * weights / splits,  # products
        packed * filled * k,
        worked * n * tiles / splits,  # stored
        each * weights / splits,  # weights that stream by a panel, however full
        each * (blocks + n // rows * tiles) / splits,  # blocks that begin, block rows that end
    ]


def _of_product(case: Case, outputs: int) -> float:
    """Part of all columns that a product of so many outputs has: what any block row stores that it meets."""
    rows = case.block[0]
    return 1 - (1 - case.density) ** ((outputs + rows - math.gcd(outputs, rows)) / rows)


def _rounds(most: int, panels: int, splits: int, threads: int) -> int:
    """Panels that the slowest thread goes through."""
    return -(-(-(-most // panels) * splits) // threads) * min(panels, most)


def fitted(rows: list[list[float]], times: list[float]) -> list[float]:
    """Costs ≥ 0 of the terms, so that the sums of squared relative errors is least.

    rows: terms of each measurement; times: theirs. The costs of terms that do not help are 0.
    """
    a = torch.tensor(rows, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64).unsqueeze(1)
    scale = a.norm(dim=0).clamp(min=1e-300)
    a, wanted = a / scale, torch.ones(len(times), dtype=torch.float64)
    x, used = torch.zeros(a.shape[1], dtype=torch.float64), []
    for _ in range(4 * a.shape[1]):  # Lawson & Hanson 1974, chapter 23
        gain = a.T @ (wanted - a @ x)
        gain[used] = -1.0
        if gain.max() < 1e-9:
            break
        used.append(int(gain.argmax()))
        while True:
            target = torch.zeros_like(x)
            target[used] = torch.linalg.lstsq(a[:, used], wanted.unsqueeze(1), driver="gelsd").solution[:, 0]
            if not used or (target[used] > 0).all():
                break
            negative = [i for i in used if target[i] <= 0]
            step = min(float(x[i] / (x[i] - target[i])) for i in negative)
            x = x + step * (target - x)
            used = [i for i in used if x[i] > 1e-12]
            x[[i for i in range(len(x)) if i not in used]] = 0.0
        x = target
    return (x / scale).tolist()


# Measuring ----------------------------------------------------------------------------------------


def layer_of(case: Case) -> nn.Module:
    """A layer as the case says, with random values, for inference."""
    return _layer(replace(case, tokens=1))


@functools.lru_cache(maxsize=1)  # neighbours of a calibration differ in tokens
def _layer(case: Case) -> nn.Module:
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = nn.Linear(case.in_features, case.out_features).requires_grad_(False)
    if case.block is None:
        return dense.to(case.dtype)
    grid = grid_of((case.out_features, case.in_features), case.block)
    scores = torch.rand(grid, generator=generator)
    spec = {"block_shape": case.block, "density": case.density}
    if case.int8 or case.weight_only:
        spec |= {"int8": "int8" if case.int8 else "w8"}
    else:
        spec |= {"dtype": case.stored, "rounds_x": case.rounds_x}
    return BlockSparseLinear.from_dense(dense.to(case.dtype), spec=spec, scores=scores)


def measure(case: Case, seconds: float = _SECONDS) -> float:
    """Seconds that a call takes: the shortest of those that fit into `seconds`, at least five.

    Where other programs keep the processors busy, of more calls.
    """
    # Not made in inference mode: what kernels pack is not kept beside values whose writes nobody counts.
    layer, x = layer_of(case), torch.randn(case.tokens, case.in_features, dtype=case.dtype)
    with torch.inference_mode():
        for _ in range(2):
            layer(x)
        best, calls, start, waited = math.inf, 0, time.perf_counter(), queued()
        while True:
            begin = time.perf_counter()
            layer(x)
            now = time.perf_counter()
            best, calls, spent = min(best, now - begin), calls + 1, now - start
            if calls < 5 or spent < seconds:
                continue
            if spent > _PATIENCE * seconds or queued() - waited <= MOST_WAITED * spent:
                return best


def _reading_costs(case: Case) -> list[float]:
    """Seconds a byte of _READ bytes: of a dense layer, or of their sum, which sparse kernels come near to."""
    columns, costs = 4096, []
    dtype = torch.float32 if case.block else case.dtype
    x = torch.ones(case.tokens, columns, dtype=dtype)
    for size in _READ:
        weight = torch.ones(size // dtype.itemsize // columns, columns, dtype=dtype)
        best = math.inf
        with torch.inference_mode():
            for _ in range(8):
                begin = time.perf_counter()
                _ = weight.sum() if case.block else nn.functional.linear(x, weight)
                best = min(best, time.perf_counter() - begin)
        costs.append(best / size)
    return costs


def _cost_of(size: int, costs: list[float]) -> float:
    """Of a byte; between those of _READ it follows the size's logarithm."""
    if size >= _READ[-1]:
        return costs[-1]
    i = next(i for i in range(len(_READ)) if size < _READ[i + 1])
    share = math.log(size / _READ[i]) / math.log(_READ[i + 1] / _READ[i])
    return costs[i] + share * (costs[i + 1] - costs[i])


# The machine's costs, and where they are kept ---------------------------------------------------------


def machine_key() -> dict[str, Any]:
    """What costs depend on: processor, versions, the compiled library, threads, forced kernels."""
    if _load.problem is not None:
        raise ImportError(_load.problem)
    info, library = backend_info(), _load.LIBRARY.stat()
    return {
        "format": _FORMAT,
        "machine": info["machine"],
        "rarefy": info["version"],
        "torch": info["torch"],
        "library": f"{library.st_size} {library.st_mtime_ns}",
        "threads": torch.get_num_threads(),
        "forced": info["forced_impl"] or "",
    }


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/rarefy, or ~/.cache/rarefy."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "rarefy"


class Predictor:
    """Predicts times on one machine as it is: its processor, libraries and number of threads.

    Costs are measured when a group of cases is asked for that nobody asked for before, about 0.4 s each, and
    kept in a file in `folder`. What cannot be read there is measured anew, and so is, in another process,
    what was measured while other programs kept the processors busy.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.key = machine_key()
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or cache_folder()) / f"speed-{digest}.json"
        self.costs: dict[str, list[float]] = self._read()
        self.passing: set[str] = set()  # groups measured while threads waited: not for the file

    def seconds(self, case: Case) -> float:
        """The time of one call of the layer, everything included."""
        self.calibrate([case])
        modelled = sum(c * t for c, t in zip(self.costs[case.group], self._terms(case), strict=True))
        if case.reading is None:
            return modelled
        costs, size = self.costs[case.reading], case.weight_bytes
        read = size * _cost_of(size, costs)
        if case.block is None or case.tokens <= FEW_TOKENS:
            return max(modelled, read)
        return modelled + read - size * costs[0]  # what waits for memory does not multiply

    def calibrate(self, cases: Iterable[Case]) -> None:
        """Measures what is not known yet of the groups of these cases."""
        cases = list(cases)
        new = {
            case.group: case
            for case in cases
            if len(self.costs.get(case.group, ())) != len(self._terms(case))
        }
        for group, case in new.items():
            points = calibration(case)
            self._keep(
                group,
                lambda points=points: fitted([self._terms(p) for p in points], [measure(p) for p in points]),
            )
            _layer.cache_clear()
        large = {case.reading: case for case in cases if case.reading not in (None, *self.costs)}
        for reading, case in large.items():
            self._keep(reading, lambda case=case: _reading_costs(case))
        if new or large:
            self._write()

    def _keep(self, group: str, measured: Callable[[], list[float]]) -> None:
        start, waited = time.perf_counter(), queued()
        self.costs[group] = measured()
        if queued() - waited > MOST_WAITED * (time.perf_counter() - start):
            self.passing.add(group)

    def _terms(self, case: Case) -> list[float]:
        return terms(case, self.key["threads"], self.key["forced"])

    def _read(self) -> dict[str, list[float]]:
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            costs = kept["costs"]
            sound = kept["key"] == self.key and all(
                isinstance(row, list)
                and all(type(c) is float and 0 <= c < math.inf for c in row)
                and any(row)
                for row in costs.values()
            )
            return costs if sound else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self) -> None:
        costs = {group: row for group, row in self.costs.items() if group not in self.passing}
        text = json.dumps({"key": self.key, "costs": costs}, indent=1, allow_nan=False)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")


def calibration(case: Case) -> list[Case]:
    """The cases that are measured for the group of this one; itself where no other is of it."""
    tokens, own = _TOKENS[case.tokens <= FEW_TOKENS], (case.out_features, case.in_features)
    usual = [_DENSITIES, *((density,) for density in _RARER)]
    near = tuple(min(1.0, case.density * part) for part in (0.7, 1.0, 1.4))
    found: dict[Case, None] = {}
    # Then kernels for tokens that none of _TOKENS is near to, such as lanes of AVX2 for 5 to 8: as many as
    # here; and for some sizes and densities alone, such as int8 by token on AMX: with those of the case.
    for token_counts, sets, shapes in (
        (tokens, usual, _SHAPES),
        ((case.tokens,), usual, _SHAPES),
        (sorted({*tokens, case.tokens}), [near], (*_SHAPES, own)),
    ):
        grid: list[Case] = []
        for densities in sets:
            for n, k in shapes:
                if case.block is not None and (n % case.block[0] or k % case.block[1]):
                    n, k = (max(b, size // b * b) for size, b in zip((n, k), case.block, strict=True))
                for density in (1.0,) if case.block is None else densities:
                    for count in token_counts:
                        point = replace(case, tokens=count, out_features=n, in_features=k, density=density)
                        grid += [point] if point.group == case.group else []
            if len(grid) >= _LEAST or case.block is None:
                return grid
        found |= dict.fromkeys(grid)
    return list(found) or [case]


_known: dict[str, Predictor] = {}


def predictor() -> Predictor:
    """The predictor of this machine, with the number of threads and the forced kernels of now."""
    key = json.dumps([machine_key(), str(cache_folder())])
    if key not in _known:
        _known[key] = Predictor()
    return _known[key]


def predicted_seconds(case: Case) -> float:
    """Of one call of the layer on its device; infinity where nobody can say, such as on other GPUs."""
    if case.device == "cpu":
        return predictor().seconds(case)
    dense = case.block is None
    found = _explain(replace(case, block=(case.out_features, case.in_features)) if dense else case)
    microseconds = found["dense_us" if dense else "predicted_us"]
    return math.inf if microseconds is None else microseconds / 1e6
