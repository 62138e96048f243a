"""One layer on a GPU beside what else there is for it, in one process.

cuBLAS, torch BSR (Triton), cuSPARSE Blocked-ELL, cuSPARSELt 2:4, and stk where it is installed: kernel time
by replay of a CUDA graph, and the time of a call from Python. The same random pattern for all; each result
is compared with the dense one before it is timed. A rival that cannot do a case says why.

python bench/gpu_peers.py                                              # 8192 × 4096 → 4096; writes nothing
python bench/gpu_peers.py --csv FILE --shapes 8192x4096x4096 512x4096x4096 --blocks 128 64 32 16 128x1
python bench/gpu_peers.py --tune                                       # torch BSR: minutes for each case
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import rarefy
from rows import write_csv
from timing import graph_of, interleave

Call = Callable[[], object]
DTYPE = torch.bfloat16


class Case:
    """One layer's product: inputs, the sparse weight and its dense twin."""

    def __init__(self, tokens: int, cols: int, rows: int, block: tuple[int, int], density: float) -> None:
        self.block, self.density = block, density
        self.x = torch.randn(tokens, cols, device="cuda", dtype=DTYPE)
        self.dy = torch.randn(tokens, rows, device="cuda", dtype=DTYPE)
        self.layer = rarefy.BlockSparseLinear(
            cols, rows, bias=False, density=density, block_shape=block, device="cuda", dtype=DTYPE
        ).requires_grad_(False)
        self.dense = self.layer.weight.to_dense().detach()

    @property
    def square(self) -> int:
        """The side of its blocks; others than squares are refused."""
        if self.block[0] != self.block[1]:
            raise ValueError("square blocks only")
        return self.block[0]


def torch_bsr(case: Case, tune: bool) -> Call:
    """F.linear of a torch BSR tensor: `bsr_dense_addmm`, with the parameters that torch has or finds."""
    bsr = case.dense.to_sparse_bsr((case.square, case.square))
    if tune:
        from torch.sparse._triton_ops_meta import tune_bsr_dense_addmm

        nothing = torch.zeros(case.dense.shape[0], case.x.shape[0], device="cuda", dtype=DTYPE)
        tune_bsr_dense_addmm(nothing, bsr, case.x.t(), beta=0, store=True)
    return lambda: functional.linear(case.x, bsr)


def semi_structured(case: Case, tune: bool) -> Call:
    """2:4 by cuSPARSELt: of any weights the same time, so of random ones that are 2:4."""
    if case.density != 0.5:
        raise ValueError("half of the weights only")
    pairs = torch.rand(case.dense.numel() // 4, 4, device="cuda").argsort(1) < 2
    weight = torch.where(pairs.view_as(case.dense), torch.randn_like(case.dense), 0)
    sparse = torch.sparse.to_sparse_semi_structured(weight)
    want = case.x @ weight.t()
    check("2:4", functional.linear(case.x, sparse), want)
    return lambda: functional.linear(case.x, sparse)


def stk_product(case: Case, tune: bool) -> Call:
    """Dense · sparse of stk (MegaBlocks)."""
    import stk

    weight = stk_matrix(stk, case)
    return lambda: stk.ops.dds(case.x, weight.t())


def stk_matrix(stk: Any, case: Case) -> Any:
    """The weight as stk has it."""
    if case.square != 128:
        raise ValueError("blocks of 128 only")
    pattern = case.layer.weight.pattern
    crow, col = pattern.crow_indices.int().cuda(), pattern.col_indices.short().cuda()
    rows = torch.repeat_interleave(torch.arange(len(crow) - 1, device="cuda"), crow.diff()).short()
    return stk.Matrix(tuple(case.dense.shape), case.layer.weight.values.detach(), rows, col, crow)


def stk_gradient(case: Case, tune: bool) -> Call:
    """Dense · dense where the weight is stored, of stk."""
    import stk

    weight = stk_matrix(stk, case)
    return lambda: stk.ops.sdd(case.dy.t(), case.x, weight).data


class BlockedEll:
    """cuSPARSE's SpMM of a Blocked-ELL matrix by ctypes: Yᵀ = W Xᵀ, both by column, so X and Y by row.

    Every block row has as many places as the longest has blocks; places without a block say -1.
    """

    BF16, F32, INDEX_32, BY_COLUMN, ALGORITHM = 14, 0, 2, 1, 13

    def __init__(self, case: Case) -> None:
        side, pattern = case.square, case.layer.weight.pattern
        crow, col = pattern.crow_indices.long().cpu(), pattern.col_indices.int().cpu()
        rows, longest = len(crow) - 1, int(crow.diff().max())
        self.columns = torch.full((rows, longest), -1, dtype=torch.int32)
        self.values = torch.zeros(rows, side, longest, side, dtype=DTYPE)
        blocks = case.layer.weight.values.detach().cpu()
        for row in range(rows):
            first, last = int(crow[row]), int(crow[row + 1])
            self.columns[row, : last - first] = col[first:last]
            self.values[row, :, : last - first] = blocks[first:last].transpose(0, 1)
        self.columns, self.values = self.columns.cuda(), self.values.cuda()
        self.case, self.y = case, torch.empty_like(case.dy)
        self.library = ctypes.CDLL("libcusparse.so.12")
        self.handle = self._made("cusparseCreate")
        n, k = case.dense.shape
        size = ctypes.c_int64
        self.w = self._made(
            "cusparseCreateBlockedEll", size(n), size(k), size(side), size(longest * side),
            self._address(self.columns), self._address(self.values), self.INDEX_32, 0, self.BF16,
        )  # fmt: skip
        tokens = case.x.shape[0]
        self.b = self._made("cusparseCreateDnMat", size(k), size(tokens), size(k),
                            self._address(case.x), self.BF16, self.BY_COLUMN)  # fmt: skip
        self.c = self._made("cusparseCreateDnMat", size(n), size(tokens), size(n),
                            self._address(self.y), self.BF16, self.BY_COLUMN)  # fmt: skip
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        needed = ctypes.c_size_t()
        self._call("cusparseSpMM_bufferSize", *self._arguments(), ctypes.byref(needed))
        self.buffer = torch.empty(max(needed.value, 16), dtype=torch.uint8, device="cuda")

    @staticmethod
    def _address(tensor: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    def _made(self, name: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made

    def _arguments(self) -> tuple[object, ...]:
        return (self.handle, 0, 0, ctypes.byref(self.one), self.w, self.b, ctypes.byref(self.zero), self.c,
                self.F32, self.ALGORITHM)  # fmt: skip

    def __call__(self) -> Tensor:
        """Queues the product; its result is the same tensor each time."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cusparseSetStream", self.handle, stream)
        self._call("cusparseSpMM", *self._arguments(), self._address(self.buffer))
        return self.y


RIVALS: dict[str, Callable[[Case, bool], Call]] = {
    "torch BSR": torch_bsr,
    "cuSPARSE Blocked-ELL": lambda case, _: BlockedEll(case),
    "cuSPARSELt 2:4": semi_structured,
    "stk": stk_product,
    "stk, weight gradient": stk_gradient,
}


def check(name: str, got: Tensor, want: Tensor) -> None:
    """Raises unless results agree to what bf16 can say."""
    torch.testing.assert_close(
        got.float(),
        want.float(),
        atol=0.02 * float(want.abs().max()),
        rtol=0.02,
        msg=lambda m: f"{name}: {m}",
    )


def host_us(call: Call, calls: int = 30) -> float:
    """A call from Python, the GPU's time included: what a loop of such calls takes each."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def contestants(case: Case, tune: bool) -> dict[str, Call]:
    """Dense, ours and all rivals that can do the case, checked."""
    calls: dict[str, Call] = {
        "dense": lambda: functional.linear(case.x, case.dense),
        "rarefy": lambda: case.layer(case.x),
    }
    want = case.x @ case.dense.t()
    check("rarefy", case.layer(case.x), want)
    for name, make in RIVALS.items():
        try:
            call = make(case, tune)
            result = call()
            if name == "stk, weight gradient":
                pattern, side = case.layer.weight.pattern, case.square
                row = int((pattern.crow_indices > 0).nonzero()[0]) - 1  # the first stored block's
                col = int(pattern.col_indices[0])
                columns = slice(col * side, (col + 1) * side)
                block = case.dy[:, row * side : (row + 1) * side].t() @ case.x[:, columns]
                check(name, result[0], block)
            elif name != "cuSPARSELt 2:4":  # checked on weights of its own
                check(name, result, want)
            calls[name] = call
        except Exception as error:  # a rival's failure is a result
            print(f"  {name}: {str(error).splitlines()[0][:100]}", flush=True)
    if "stk, weight gradient" in calls:
        ops, weight = torch.ops.rarefy, case.layer.weight
        derived = weight.derived(case.x)
        size, held = tuple(case.dense.shape), (derived[0], derived[2]) if derived else ()
        calls["dense, weight gradient"] = lambda: case.dy.t() @ case.x
        calls["rarefy, weight gradient"] = lambda: ops.bsr_grad_weight(
            case.dy, case.x, weight.plan, *case.block, *size, None, *held
        )
    return calls


@torch.no_grad()
def measured(shape: tuple[int, int, int], block: tuple[int, int], density: float, tune: bool) -> list[dict]:
    """A row for each contestant."""
    case = Case(*shape, block, density)
    calls = contestants(case, tune)
    host = {name: host_us(call) for name, call in calls.items()}
    graphs: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            graphs[name] = graph_of(call)
        except Exception as error:
            print(f"  {name}: not captured: {str(error).splitlines()[0][:80]}", flush=True)
            torch.cuda.synchronize()
    times = interleave(graphs, "cuda", budget=0.3)
    rows = []
    for name in calls:
        against = "dense, weight gradient" if "gradient" in name else "dense"
        row = {"shape": "x".join(map(str, shape)), "block": f"{block[0]}x{block[1]}", "density": density,
               "contestant": name, "graph_us": "", "spread": "", "call_us": round(host[name], 1),
               "efficiency": "", "call_speedup": round(host[against] / host[name], 3)}  # fmt: skip
        if name in times:
            low, high = times[name].spread
            row |= {"graph_us": round(times[name].median * 1e6, 1),
                    "spread": f"{low * 1e6:.1f}-{high * 1e6:.1f}",
                    "efficiency": round(density * times[against].median / times[name].median, 3)}  # fmt: skip
        rows.append(row)
        print("  {contestant:24} {graph_us:>8} us, efficiency {efficiency}; a call {call_us} us, "
              "{call_speedup} x".format(**row), flush=True)  # fmt: skip
    return rows


def sides(text: str) -> tuple[int, int]:
    """'64' or '64x32'."""
    parts = [int(side) for side in text.split("x")]
    return parts[0], parts[-1]


def main() -> None:
    """Prints each row, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8192x4096x4096"], help="tokens x in x out")
    parser.add_argument("--blocks", nargs="+", default=["128", "64", "32", "16"])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.25, 0.1])
    parser.add_argument("--tune", action="store_true", help="let torch tune its BSR kernel for each case")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    common = {"device": torch.cuda.get_device_name(), "date": time.strftime("%F"), "torch": torch.__version__,
              "command": "python " + " ".join(sys.argv)}  # fmt: skip
    rows = []
    for text in args.shapes:
        tokens, cols, features = (int(size) for size in text.split("x"))
        for block in map(sides, args.blocks):
            for density in args.densities:
                print(f"{text}, {block[0]}x{block[1]} at {density}", flush=True)
                rows += measured((tokens, cols, features), block, density, args.tune)
    if args.csv:
        write_csv(args.csv, [row | common for row in rows])


if __name__ == "__main__":
    main()
