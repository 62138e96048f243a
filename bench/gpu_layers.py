"""What a user of PyTorch gets on a GPU: sparse layers against dense ones in one process.

The three products by CUDA graph, what the host needs for a call, and a training step of a feed-forward
network. Results are checked before they are timed.

python bench/gpu_layers.py                       # 8192 × 4096 → 4096; writes nothing
python bench/gpu_layers.py --csv FILE --blocks 128x128 64x64 128x1 --densities 0.5 0.25 0.1
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import rarefy

DTYPE = torch.bfloat16
OPS = torch.ops.rarefy


def graph_ms(call: Callable[[], object], rounds: int = 20) -> float:
    """Median time of a call's kernels, replayed as a CUDA graph."""
    return statistics.median(graph_times(call, rounds))


def graph_times(call: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of a call's kernels, replayed as a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def host_us(call: Callable[[], object], calls: int = 200) -> float:
    """What the host needs to queue a call, while the GPU is not in the way."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises unless results agree to what bf16 can say."""
    torch.testing.assert_close(got.float(), want.float(), atol=0.02 * float(want.abs().max()), rtol=0.02)


def products(m: int, k: int, n: int, block: tuple[int, int], density: float) -> list[dict]:
    """Rows of the three products of one layer; of tall vectors, linear with x by token and by feature."""
    x, dy = torch.randn(m, k, device="cuda", dtype=DTYPE), torch.randn(m, n, device="cuda", dtype=DTYPE)
    w = rarefy.BlockSparseLinear(k, n, density=density, block_shape=block, device="cuda", dtype=DTYPE).weight
    dense, size, derived = w.to_dense().detach(), (n, k), w.derived(x)
    for_weight = (derived[0], derived[2]) if derived else ()
    sparse = {
        "linear": lambda: OPS.bsr_linear(x, w.values, w.plan, None, *size, *derived),
        "grad_input": lambda: OPS.bsr_grad_input(dy, w.values, w.plan, *size, *derived),
        "grad_weight": lambda: OPS.bsr_grad_weight(dy, x, w.plan, *block, *size, None, *for_weight),
    }
    dense_calls = {
        "linear": lambda: x @ dense.T,
        "grad_input": lambda: dy @ dense,
        "grad_weight": lambda: dy.T @ x,
    }
    if block[1] == 1:
        by_feature = x.t().contiguous().t()
        sparse = {
            "linear": sparse["linear"],
            "linear, x by feature": lambda: OPS.bsr_linear(
                by_feature, w.values, w.plan, None, *size, *derived
            ),
        }
        dense_calls["linear, x by feature"] = dense_calls["linear"]
    rows = []
    with torch.no_grad():
        for op, call in sparse.items():
            if op != "grad_weight":
                check(call(), dense_calls[op]())
            t_dense, t = graph_ms(dense_calls[op]), graph_ms(call)
            kernel = rarefy.explain(w, x, op=op.split(",")[0])["kernel"]
            rows.append(
                {"case": f"{op} {m}x{k}x{n} {block[0]}x{block[1]}", "density": density, "kernel": kernel,
                 "dense_ms": round(t_dense, 4), "ms": round(t, 4), "speedup": round(t_dense / t, 3),
                 "efficiency": round(density * t_dense / t, 3), "derived_bytes": w.derived_nbytes}
            )  # fmt: skip
    return rows


def host_times() -> list[dict]:
    """Rows of the host's time for a layer of 1024 to 1024 features and 256 tokens."""
    x = torch.randn(256, 1024, device="cuda", dtype=DTYPE)
    dense = nn.Linear(1024, 1024, device="cuda", dtype=DTYPE)
    sparse = rarefy.BlockSparseLinear(
        1024, 1024, density=0.5, block_shape=(64, 64), device="cuda", dtype=DTYPE
    )
    rows = []
    with torch.no_grad():
        times = [host_us(lambda f=f: f(x)) for f in (dense, sparse)]
    rows.append(("host forward", times))
    rows.append(
        ("host forward + backward", [host_us(lambda f=f: f(x).sum().backward()) for f in (dense, sparse)])
    )
    return [{"case": name, "density": 0.5, "dense_ms": round(a / 1e3, 4), "ms": round(b / 1e3, 4),
             "speedup": round(a / b, 3)} for name, (a, b) in rows]  # fmt: skip


def training_step(block: int, density: float) -> dict:
    """A row of forward, backward and fused AdamW of 4096 → 14336 → 4096 with 8192 tokens."""
    x = torch.randn(8192, 4096, device="cuda", dtype=DTYPE)

    def step_ms(make: Callable[[int, int], nn.Module]) -> float:
        model = nn.Sequential(make(4096, 14336), nn.GELU(), make(14336, 4096)).to("cuda", DTYPE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        times = []
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[4:]) * 1e3

    dense = step_ms(nn.Linear)
    sparse = step_ms(lambda k, n: rarefy.BlockSparseLinear(k, n, density=density, block_shape=(block, block)))
    return {
        "case": f"training step 8192x4096x14336x4096 {block}x{block}",
        "density": density,
        "dense_ms": round(dense, 3),
        "ms": round(sparse, 3),
        "speedup": round(dense / sparse, 3),
    }


def main() -> None:
    """Prints each row, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description="Layers on a GPU, sparse against dense.")
    parser.add_argument("--shape", default="8192x4096x4096", help="tokens x in x out (default: %(default)s)")
    parser.add_argument("--blocks", nargs="+", default=["128x128", "64x64", "128x1", "64x1"])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.25, 0.1])
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = [int(size) for size in args.shape.split("x")]
    rows = []
    for block in args.blocks:
        for density in args.densities:
            made = products(*shape, tuple(int(side) for side in block.split("x")), density)
            print(*made, sep="\n", flush=True)
            rows += made
    rows += host_times() + [training_step(b, d) for b, d in ((64, 0.5), (64, 0.25), (128, 0.25))]
    print(*rows[-5:], sep="\n")
    if args.csv:
        common = {
            "device": torch.cuda.get_device_name(),
            "date": time.strftime("%F"),
            "torch": torch.__version__,
            "command": "python " + " ".join(sys.argv),
        }
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *common])
            writer.writeheader()
            writer.writerows(row | common for row in rows)


if __name__ == "__main__":
    main()
