"""Kernels of other libraries on operands laid out for them, beside Rarefy's whole layer.

python bench/rivals.py --csv FILE                                # what PyTorch brings along
python bench/rivals.py --libxsmm ../libxsmm/lib/libxsmm.so       # and libxsmm's BCSC
python bench/rivals.py --onednn ../onednn/lib/libdnnl.so         # and oneDNN's sparse matmul
python bench/rivals.py --case 512x768x3072 32x1 0.5 bf16         # one case

Rarefy's time is that of a layer through PyTorch: row-major X in, row-major Y out, with bias. Of the others
the kernel alone is timed, on one thread, X and Y as it wants them (by feature), which a model would have to
transpose before and after:

* fbgemm: SparseDenseMM, CSR in float32, out of the libtorch_cpu.so that is loaded.
* mkl: torch's CSR times Xᵀ. Blocks are single elements for both.
* libxsmm: packed_spgemm_bcsc, float32 and bfloat16, if --libxsmm (or LIBXSMM) names the library. Build its
  public source anywhere: make STATIC=0 lib. X is packed in panels of 16, 32 and 64 tokens; the best counts.
* onednn: matmul of CSR and Xᵀ in float32, if --onednn (or ONEDNN) names a library that was built with
  ONEDNN_EXPERIMENTAL_SPARSE, such as that of the package onednn-cpu-gomp: pip download --no-deps
  onednn-cpu-gomp, and unpack it anywhere.

The best of --rounds turns of each counts, in turns; processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import rarefy
from feed_forward import measure
from rarefy import masks
from rows import write_csv
from run import cpu_name, git_commit

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = ("1x1", "4x1", "16x1", "32x1", "16x16", "32x32")
DENSITIES = (0.5, 0.25, 0.1)
CLOSE = {"f32": 1e-4, "bf16": 5e-2}  # of the largest element
FBGEMM = "_ZN6fbgemm13SparseDenseMMEiiPKiS1_PKfS3_iPfib"
XSMM_TYPES = {"f32": 1, "bf16": 2}  # libxsmm_datatype
BETA_0, VNNI_A = 4, 256  # libxsmm_gemm_flags
DNNL_CPU, DNNL_IN_ORDER, DNNL_F32, DNNL_S32, DNNL_AB = 1, 1, 3, 4, 3
DNNL_SRC, DNNL_WEIGHTS, DNNL_DST = 1, 33, 17
Made = tuple[Callable[[], object], Callable[[], Tensor]]  # the call, and its result as (tokens, outputs)


def fields(*names: str, kind: type = ctypes.c_int) -> list[tuple[str, type]]:
    """Fields of a C struct that are all of one type."""
    return [(name, kind) for name in names]


class Shape(ctypes.Structure):
    """libxsmm_gemm_shape."""

    _fields_ = fields("m", "n", "k", "lda", "ldb", "ldc", "a_type", "b_type", "out_type", "comp_type")


class Blocks(ctypes.Structure):
    """libxsmm_spgemm_config."""

    _fields_ = fields("packed_width", "bk", "bn")


class Param(ctypes.Structure):
    """libxsmm_gemm_param: four pointers of an operation, and six of each matrix."""

    _fields_ = [("op", ctypes.c_void_p * 4), *fields("a", "b", "c", kind=ctypes.c_void_p * 6)]


class Problem:
    """Random matrices; W of `block` at a density."""

    def __init__(self, size: str, block: str, density: float, dtype: str) -> None:
        self.m, self.k, self.n = map(int, size.split("x"))
        self.block, self.dtype = tuple(map(int, block.split("x"))), dtype
        generator = torch.Generator().manual_seed(0)
        kind = DTYPES[dtype]
        self.x = torch.randn(self.m, self.k, generator=generator).to(kind)
        self.dense = torch.randn(self.n, self.k, generator=generator).to(kind)
        shape = (self.n, self.k)
        kept = masks.random_blocks(masks.grid_of(shape, self.block), density, generator)
        self.values = masks.to_blocks(self.dense, self.block)[kept].contiguous()
        self.crow, self.col = masks.pattern_of(kept)
        self.masked = self.dense * masks.expand_mask(kept, shape, self.block)
        self.shape = shape

    def csr(self) -> Tensor:
        """W as single elements."""
        return self.masked.to_sparse_csr()


def rarefy_layer(p: Problem) -> Made:
    """The whole layer."""
    weight = rarefy.BsrWeight(p.values, p.crow, p.col, shape=p.shape, block_shape=p.block)
    weight = weight.requires_grad_(False).prepare()
    bias = torch.zeros(p.n, dtype=p.x.dtype)
    return lambda: weight.linear(p.x, bias), lambda: weight.linear(p.x, bias)


def dense_layer(p: Problem) -> Made:
    """Torch's dense layer, on the same W with zeros."""
    bias = torch.zeros(p.n, dtype=p.x.dtype)
    return (lambda: torch.nn.functional.linear(p.x, p.masked, bias),) * 2


def fbgemm(p: Problem) -> Made | None:
    """CSR · Xᵀ."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    function = getattr(ctypes.CDLL(str(library)), FBGEMM, None)
    if function is None or p.dtype != "f32":
        return None
    w, xt, y = p.csr(), p.x.t().contiguous(), torch.empty(p.n, p.m)
    arrays = [w.crow_indices().int(), w.col_indices().int(), w.values()]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*arrays, xt)]
    arguments = (p.n, p.m, *pointers, p.m, ctypes.c_void_p(y.data_ptr()), p.m, False)

    def result() -> Tensor:
        function(*arguments)
        return y.t()

    return lambda held=(arrays, xt, y): function(*arguments), result


def mkl(p: Problem) -> Made | None:
    """CSR of torch times Xᵀ."""
    if p.dtype != "f32":
        return None
    w, xt = p.csr(), p.x.t().contiguous()
    return lambda: w @ xt, lambda: (w @ xt).t()


def libxsmm(library: ctypes.CDLL, p: Problem, width: int) -> Made | None:
    """Blocks by columns of Wᵀ, which are our block rows; each is [outputs][features]."""
    rows, cols = p.block
    create = library.libxsmm_create_packed_spgemm_bcsc
    create.argtypes = [Shape, ctypes.c_uint, ctypes.c_uint, Blocks]
    create.restype = ctypes.c_void_p
    kind = XSMM_TYPES[p.dtype]
    pairs = 2 if p.dtype == "bf16" else 1
    if p.m % width or cols % pairs or rows == cols == 1:
        return None
    panels = p.m // width
    shape = Shape(panels, 0, p.k, p.k, 0, p.n, kind, kind, kind, 1)
    kernel = create(shape, BETA_0 | (VNNI_A if pairs == 2 else 0), 0, Blocks(width, cols, rows))
    if not kernel:
        return None
    x = p.x.reshape(panels, width, p.k // pairs, pairs).transpose(1, 2).contiguous()  # [k][tokens], or pairs
    y = torch.empty(panels, p.n, width, dtype=p.x.dtype)
    count = ctypes.c_ulonglong(p.n // rows)
    param = Param()
    param.a[0] = x.data_ptr()
    param.b[0], param.b[1], param.b[2] = p.values.data_ptr(), p.crow.data_ptr(), p.col.data_ptr()
    param.b[3] = ctypes.addressof(count)
    param.c[0] = y.data_ptr()
    function = ctypes.CFUNCTYPE(None, ctypes.POINTER(Param))(kernel)
    pointer = ctypes.byref(param)

    def result() -> Tensor:
        function(pointer)
        return y.transpose(1, 2).reshape(p.m, p.n)

    return lambda held=(x, y, count): function(pointer), result


class Argument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = [("arg", ctypes.c_int), ("memory", ctypes.c_void_p)]


class OneDnn:
    """As much of oneDNN's C API as a sparse matmul takes."""

    def __init__(self, path: str) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # its own OpenMP, which torch.set_num_threads does not reach
        self.library = ctypes.CDLL(path)
        self.engine = self.made("engine_create", DNNL_CPU, ctypes.c_size_t(0))
        self.stream = self.made("stream_create", self.engine, DNNL_IN_ORDER)

    def call(self, name: str, *arguments: object) -> None:
        """A function whose status must be success."""
        status = getattr(self.library, f"dnnl_{name}")(*arguments)
        if status != 0:
            raise RuntimeError(f"[bench] dnnl_{name} must succeed; got status {status}")

    def made(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """What a function makes in its first argument."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def dense(self, tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Descriptor and memory of a row-major matrix."""
        sizes = (ctypes.c_int64 * 12)(*tensor.shape)
        kind = self.made("memory_desc_create_with_tag", 2, sizes, DNNL_F32, DNNL_AB)
        return kind, self.made("memory_create", kind, self.engine, ctypes.c_void_p(tensor.data_ptr()))

    def csr(self, shape: tuple[int, int], parts: list[Tensor]) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """The same of values, columns, row pointers."""
        sizes, count = (ctypes.c_int64 * 12)(*shape), ctypes.c_int64(parts[0].numel())
        index = (DNNL_S32, DNNL_S32)
        kind = self.made("memory_desc_create_with_csr_encoding", 2, sizes, DNNL_F32, count, *index)
        handles = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in parts))
        return kind, self.made("memory_create_v2", kind, self.engine, 3, handles)


def onednn(library: OneDnn, p: Problem) -> Made | None:
    """CSR · Xᵀ."""
    if p.dtype != "f32":
        return None
    w, xt, y = p.csr(), p.x.t().contiguous(), torch.empty(p.n, p.m)
    parts = [w.values(), w.col_indices().int(), w.crow_indices().int()]
    (src, src_memory), (weights, x_memory), (dst, y_memory) = (
        library.csr(p.shape, parts),
        library.dense(xt),
        library.dense(y),
    )
    which = library.made("matmul_primitive_desc_create", library.engine, src, weights, None, dst, None)
    primitive = library.made("primitive_create", which)
    memories = ((DNNL_SRC, src_memory), (DNNL_WEIGHTS, x_memory), (DNNL_DST, y_memory))
    arguments = (Argument * 3)(*(Argument(arg, memory) for arg, memory in memories))

    def run(held: tuple = (parts, xt, y)) -> None:
        library.call("primitive_execute", primitive, library.stream, 3, arguments)
        library.call("stream_wait", library.stream)

    def result() -> Tensor:
        run()
        return y.t()

    return run, result


def contestants(
    p: Problem, xsmm: ctypes.CDLL | None, dnnl: OneDnn | None = None
) -> dict[str, Callable[[], object]]:
    """Each one's call, after its result was compared with the dense one."""
    made = {"rarefy": rarefy_layer(p), "dense": dense_layer(p), "fbgemm": fbgemm(p), "mkl": mkl(p)}
    for width in (16, 32, 64) if xsmm is not None else ():
        made[f"libxsmm_{width}"] = libxsmm(xsmm, p, width)
    if dnnl is not None:
        made["onednn"] = onednn(dnnl, p)
    wanted = torch.nn.functional.linear(p.x.float(), p.masked.float())
    calls = {}
    for name, one in made.items():
        if one is None:
            continue
        error = (one[1]().float() - wanted).abs().max() / wanted.abs().max()
        if not error <= CLOSE[p.dtype]:
            raise RuntimeError(f"[bench] {name} must agree with dense; got {error:.3g}")
        calls[name] = one[0]
    return calls


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs=4, metavar=("MxKxN", "BLOCK", "DENSITY", "DTYPE"))
    parser.add_argument("--libxsmm", default=os.environ.get("LIBXSMM"))
    parser.add_argument("--onednn", default=os.environ.get("ONEDNN"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    xsmm = ctypes.CDLL(args.libxsmm) if args.libxsmm else None
    if xsmm is not None:
        xsmm.libxsmm_init()
    dnnl = OneDnn(args.onednn) if args.onednn else None
    cases = [tuple(args.case)] if args.case else [
        ("512x768x3072", block, str(density), dtype)
        for dtype in DTYPES
        for block in (BLOCKS if dtype == "f32" else BLOCKS[1:])
        for density in DENSITIES
    ]  # fmt: skip
    same = {"machine": cpu_name(), "threads": 1, "date": time.strftime("%F"), "commit": git_commit()}
    rows = []
    for size, block, density, dtype in cases:
        problem = Problem(size, block, float(density), dtype)
        with torch.inference_mode():
            turns = measure(contestants(problem, xsmm, dnnl), 1, args.rounds)
        best = {name: 1e3 * min(times) for name, times in turns.items()}
        of_xsmm = [best.pop(name) for name in list(best) if name.startswith("libxsmm")]
        best["libxsmm"] = min(of_xsmm, default=None)
        row = {"case": size, "block": block, "density": density, "dtype": dtype}
        for name in ("rarefy", "dense", "fbgemm", "mkl", "libxsmm", "onednn"):
            value = best.get(name)
            row[f"{name}_ms"] = "" if value is None else f"{value:.3f}"
        print(*row.values(), flush=True)
        command = f"python bench/rivals.py --case {size} {block} {density} {dtype}"
        rows.append(row | same | {"torch": torch.__version__, "command": command})
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    sys.exit(main())
