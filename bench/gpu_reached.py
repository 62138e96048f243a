"""What is asked of the GPU's kernels, row by row: reached here, required, with dense beside it.

python bench/gpu_reached.py                          # all rows, 40 s; writes nothing
python bench/gpu_reached.py --csv FILE --only 64x64  # rows whose text holds this

Products in bf16 from PyTorch with all that is derived at hand, some milliseconds of calls in a CUDA graph, a
call's share of it; dense (cuBLAS) before and after, the mean of both. Efficiency is density × dense's time /
ours. Shapes other than 8192 × 4096 → 4096 may be 15 points below what is required, or take 10 µs longer than
that asks for, whichever is looser. Up to 16 tokens three weights take turns, so that none stays in L2; their
figure is the bytes of W and index over time, of what a copy of 1 GB reads and writes. Results are checked
before they are timed. spread: between the quartiles of seven such graphs, in parts of their median; clock and
power are nvidia-smi's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import rarefy
from gpu_clocks import Clocks
from gpu_layers import DTYPE, OPS, check, graph_times
from rarefy.weight import BsrWeight
from rows import write_csv
from run import git_commit

Call = Callable[[], object]
MAIN = (8192, 4096, 4096)  # tokens, in, out
OTHERS = ((8192, 4096, 14336), (8192, 14336, 4096), (4096, 768, 3072), (4096, 3072, 768), (2048, 4096, 11008),
          (512, 4096, 4096))  # fmt: skip
DENSITIES = (0.5, 0.25, 0.1)
SQUARES = ((128, 128), (64, 64), (32, 32), (16, 16))
RECTANGLES = ((64, 32), (32, 64), (128, 64), (64, 128), (16, 64))  # as their smaller side
TALL = ((128, 1), (64, 1), (32, 1))
# Efficiency in % at DENSITIES, by a block's smaller side; of tall vectors, X by feature.
LINEAR = {128: (86, 78, 62), 64: (75, 65, 53), 32: (58, 41, 31), 16: (50, 29, 16)}
GRADIENT = {128: (85, 80, 60), 64: (65, 55, 40), 32: (40, 35, 25), 16: (20, 18, 12)}
TALL_LINEAR = {128: (76, 72, 58), 64: (60, 57, 47), 32: (38, 30, 22)}
BY_TOKEN = (1.25, 2.2, 3.8)  # × dense, 128×1
DECODE = ((4096, 14336), (14336, 4096))
COPY = 75  # % of its bandwidth, with up to 16 tokens
LESS, MORE_US = 15, 10  # points, or µs, that shapes beside MAIN may be behind
COLUMNS = ("case", "unit", "reached", "required", "verdict", "sparse_us", "dense_us", "spread", "sm_mhz",
           "watts")  # fmt: skip


class Row(NamedTuple):
    """A product: its text, unit and figure required, both calls, and its density."""

    case: str
    unit: str  # "%" of dense's efficiency, "x dense", or "% of a copy"
    required: float
    sparse: Call
    dense: Call
    density: float
    other: bool = False  # a shape beside MAIN
    calls: int = 1  # in one
    bytes: float = 0


class Time(NamedTuple):
    """Microseconds of a call: the median of some, and what lies between their quartiles, in parts of it."""

    us: float
    spread: float


def microseconds(call: Call, total: float = 2000) -> Time:
    """Of a call among as many as take about `total`, in a graph; of seven such."""
    # Its kernels' time, not the host's: or a graph of few short calls would be measured with its own start.
    count = max(3, min(100, round(total / 1e3 / min(graph_times(call, 3)))))

    def chain() -> None:
        for _ in range(count):
            call()

    first, median, third = statistics.quantiles(graph_times(chain, 7), n=4, method="inclusive")
    return Time(median * 1e3 / count, (third - first) / median)


def weight_of(k: int, n: int, block: tuple[int, int], density: float) -> BsrWeight:
    """A random one, whose values stay."""
    layer = rarefy.BlockSparseLinear(k, n, density=density, block_shape=block, device="cuda", dtype=DTYPE)
    return layer.weight


def products(shape: tuple[int, int, int], block: tuple[int, int], at: int) -> Iterator[Row]:
    """Linear and both gradients of one weight, whose density is DENSITIES[at]."""
    m, k, n = shape
    x, dy = (torch.randn(m, side, device="cuda", dtype=DTYPE) for side in (k, n))
    w = weight_of(k, n, block, DENSITIES[at])
    dense = w.to_dense().detach()
    text = f"{m}x{k}x{n} {block[0]}x{block[1]}@{DENSITIES[at]}"
    other = shape != MAIN
    density = w.values.numel() / (n * k)
    with torch.enable_grad():  # the second time values are packed for both
        derived = [w.derived(x.detach().requires_grad_()) for _ in range(2)][1]
    for_weight = (derived[0], derived[2]) if derived else ()

    def linear(x: Tensor) -> Call:
        return lambda: OPS.bsr_linear(x, w.values, w.plan, None, n, k, *derived)

    def grad_weight(x: Tensor) -> Call:
        return lambda: OPS.bsr_grad_weight(dy, x, w.plan, *block, n, k, None, *for_weight)

    def grad_input() -> object:
        return OPS.bsr_grad_input(dy, w.values, w.plan, n, k, *derived)

    check(linear(x)(), x @ dense.T)
    check(grad_input(), dy @ dense)
    whole = pad(dy.T @ x, (0, -k % block[1], 0, -n % block[0]))
    blocks = whole.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).transpose(1, 2)
    check(grad_weight(x)(), blocks[w.block_mask()])
    dense_linear, dense_input, dense_weight = lambda: x @ dense.T, lambda: dy @ dense, lambda: dy.T @ x
    if block[1] > 1:
        side = min(block)
        tables = LINEAR[side][at], LINEAR[side][at], GRADIENT[side][at]
        calls = (("linear", linear(x), dense_linear), ("grad_input", grad_input, dense_input),
                 ("grad_weight", grad_weight(x), dense_weight))  # fmt: skip
        for (name, sparse, dense_call), required in zip(calls, tables, strict=True):
            yield Row(f"{name} {text}", "%", required, sparse, dense_call, density, other)
        return
    by_feature = x.T.contiguous().T
    required = TALL_LINEAR[block[0]][at]
    yield Row(f"linear {text} X by feature", "%", required, linear(by_feature), dense_linear, density)
    if block[0] == 128:
        yield Row(f"linear {text} X by token", "x dense", BY_TOKEN[at], linear(x), dense_linear, density)
    yield Row(f"grad_input {text}", "x dense", 1, grad_input, dense_input, density)
    if block[0] > 32:
        for name, its in (("feature", by_feature), ("token", x)):
            case = f"grad_weight {text} X by {name}"
            yield Row(case, "%", GRADIENT[64][at], grad_weight(its), dense_weight, density)


def decode(k: int, n: int, block: tuple[int, int], density: float, m: int) -> Iterator[Row]:
    """Up to 16 tokens with three weights in turn."""
    x = torch.randn(m, k, device="cuda", dtype=DTYPE)
    weights = [weight_of(k, n, block, density) for _ in range(3)]
    dense = [w.to_dense().detach() for w in weights]
    held = [w.derived(x) for w in weights]

    def sparse() -> None:
        for w, derived in zip(weights, held, strict=True):
            OPS.bsr_linear(x, w.values, w.plan, None, n, k, *derived)

    def plain() -> None:
        for w in dense:
            x @ w.T

    w = weights[0]
    check(OPS.bsr_linear(x, w.values, w.plan, None, n, k, *held[0]), x @ dense[0].T)
    size = 2.0 * w.values.numel() + 4 * w.nnzb
    case = f"linear {m}x{k}x{n} {block[0]}x{block[1]}@{density}"
    if size > 8e6:
        yield Row(case, "% of a copy", COPY, sparse, plain, density, calls=3, bytes=size)
    if m == 1 and density in (0.5, 0.25):
        yield Row(case, "x dense", 1.7 if density == 0.5 else 3, sparse, plain, density, calls=3)


def all_rows() -> Iterator[Row]:
    """Those of every section."""
    for block in SQUARES + RECTANGLES:
        for at in range(len(DENSITIES)):
            yield from products(MAIN, block, at)
    for shape in OTHERS:
        for block in SQUARES:
            for at in range(len(DENSITIES)):
                yield from products(shape, block, at)
    for block in TALL:
        for at in range(len(DENSITIES)):
            yield from products(MAIN, block, at)
    for k, n in DECODE:
        for block in SQUARES:
            for density in DENSITIES:
                for m in (1, 2, 4, 8, 16):
                    yield from decode(k, n, block, density, m)


def copy_bandwidth() -> float:
    """Bytes read and written in a microsecond."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source)).us


def measure(row: Row, bandwidth: float, clocks: Clocks) -> dict[str, object]:
    """A row of the file; clock and power are those of its three measurements together."""
    begin = time.perf_counter()
    before, ours, after = (microseconds(call) for call in (row.dense, row.sparse, row.dense))
    dense_us, sparse = (before.us + after.us) / 2 / row.calls, ours.us / row.calls
    state = clocks.since(begin)
    if row.unit == "%":
        work = 100 * row.density * dense_us
        reached, allowed = work / sparse, work / row.required
        if row.other:
            allowed = max(work / max(row.required - LESS, 1), allowed + MORE_US)
    elif row.unit == "x dense":
        reached, allowed = dense_us / sparse, dense_us / row.required
    else:
        reached, allowed = 100 * row.bytes / sparse / bandwidth, 100 * row.bytes / row.required / bandwidth
    verdict = "" if sparse <= allowed else "short"
    around = (f"{ours.spread:.3f}", *(f"{value:.0f}" for value in state or ()), "", "")[:3]
    figures = f"{reached:.3g}", f"{row.required:g}", verdict, f"{sparse:.1f}", f"{dense_us:.1f}", *around
    return dict(zip(COLUMNS, (row.case, row.unit, *figures), strict=True))


def main() -> None:
    """Prints each row, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description="What is asked of the GPU's kernels, row by row.")
    parser.add_argument("--only", default="", help="rows whose text holds this")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, {git_commit()}, torch {torch.__version__}; a copy: {bandwidth / 1e6:.2f} TB/s")
    found = []
    with torch.no_grad(), Clocks() as clocks:
        for row in all_rows():
            if args.only not in row.case:
                continue
            found.append(measure(row, bandwidth, clocks))
            case, unit, reached, required, verdict, *_ = found[-1].values()
            print(f"{case:52} {reached:>6} {unit:12} required {required:5} {verdict}", flush=True)
    print(f"{sum(row['verdict'] == '' for row in found)} of {len(found)} rows reach what is required")
    if args.csv and found:
        common = {
            "machine": name,
            "date": time.strftime("%F"),
            "commit": git_commit(),
            "torch": torch.__version__,
            "command": "python bench/gpu_reached.py" + (f" --only {args.only}" if args.only else ""),
        }
        write_csv(args.csv, [row | common for row in found])


if __name__ == "__main__":
    main()
