"""What is asked of the CPU's kernels, row by row: reached here, required, with ceilings measured beside it.

python bench/reached.py                          # one thread; make bench runs it last
python bench/reached.py --threads 16 --csv FILE  # and its rows as a file
python bench/reached.py --only bf16              # rows whose text holds this
python bench/reached.py --isa avx2               # as if the processor had no more; torch, too
python bench/reached.py --isa avx_vnni           # with its vpdpbusd: int8 alone, all else is the same

Everything goes through PyTorch: row-major X in, row-major Y out, with bias. Shares are of rarefy_peak's
ceilings in the row's dtype (reading: of as many bytes as W has with its indices), speed-ups over torch's
layer, the better of MKL and oneDNN (int8: of the engines x86 and onednn), in turns; 5 to 31 tokens are
compared with the line between what 4 and 32 take. One thread's time is the processor's; with more it is the
wall's. A row's figure is from the best turn of each.

--isa: ATen and oneDNN obey their variables. MKL takes kernels of AVX2 for processors of AMD whatever its own
says; FBGEMM, which multiplies torch's dynamic int8, has none, so that oneDNN does that here.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

import rarefy
from dynamic_int8 import by_engine
from feed_forward import measure, network
from run import cpu_name, git_commit

ROOT = Path(__file__).resolve().parent.parent
SIZE = (768, 3072)  # in, out
OTHERS = ((3072, 768), (1024, 4096), (4096, 4096), (4096, 11008), (1000, 777))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "f16", F32: "f32"}
Calls = dict[str, Callable[[], object]]
COLUMNS = ("case", "unit", "reached", "required", "verdict", "sparse_ms", "dense_ms", "ceiling")
# What restricts torch's libraries to AVX2; read when they are loaded.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
RESTRICTED = {"avx2": AVX2, "avx_vnni": AVX2 | {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}}
MACHINE = ("machine", "threads", "date", "commit", "torch", "command")


@dataclass
class Measured:
    """What a row measures, made when its turn comes."""

    calls: Calls  # "sparse", and "dense" for a speed-up or "fewer" and "more" tokens
    work: float = 0  # FLOP or bytes of a sparse call
    ceiling: str = ""  # what rarefy_peak measures
    between: float = 0  # where on the way from fewer to more tokens


@dataclass
class Row:
    """One figure: how it is measured, and what issue and documents ask for."""

    case: str
    unit: str  # "× dense", "of <ceiling>" or "of the line"
    required: float
    make: Callable[[], Measured]
    scale: float = 1  # a speed-up counts so many times: density, for efficiencies


def sparse_layer(
    spec: str, size: tuple[int, int], dtype: torch.dtype, skewed: bool = False
) -> tuple[nn.Module, nn.Module]:
    """nn.Linear and its sparse layer, of a random pattern; skewed: rows and columns by a power law."""
    torch.manual_seed(0)
    dense = nn.Linear(*size).to(dtype).requires_grad_(False)
    other = nn.Linear(*size).to(dtype)
    scores = None
    if skewed:
        rows, columns = (
            torch.rand(n, generator=torch.Generator().manual_seed(n)).rsqrt() for n in size[::-1]
        )
        scores = rows[:, None] * columns * torch.rand(size[1], size[0])
    sparse = rarefy.BlockSparseLinear.from_dense(other, spec=spec, scores=scores)
    return dense, sparse.eval().requires_grad_(False)


def linear(
    spec: str, tokens: int, dtype: torch.dtype = F32, size: tuple[int, int] = SIZE, **row: object
) -> Row:
    """Y = X Wᵀ + b."""
    unit = "of reading" if "reading" in row else f"of {row['of']}" if "share" in row else "× dense"
    if row.get("rival") == "int8":
        unit = "× torch's dynamic int8"
    required = next(row[key] for key in ("reading", "share", "speedup") if key in row)

    skewed = bool(row.get("skewed"))

    def make() -> Measured:
        dense, sparse = sparse_layer(spec, size, dtype, skewed)
        x, weight = torch.randn(tokens, size[0], dtype=dtype), sparse.weight
        calls = {"sparse": partial(sparse, x), "dense": partial(dense, x)}
        if "reading" in row:
            bytes_ = weight.nbytes if "bitmap" in weight.pieces else weight.values.nbytes + 4 * weight.nnzb
            return Measured(calls, bytes_, f"{bytes_ / 1e6:.2f}")
        if "share" in row:
            return Measured(calls, 2.0 * tokens * weight.values.numel(), row["of"])
        if "rival" in row:
            layers = by_engine(nn.Sequential(nn.Linear(*size)))
            for at, (engine, layer) in enumerate(layers.items()):
                calls["dense" if at == 0 else f"dense of {engine}"] = partial(layer, x)
        elif dtype == F32 and torch.backends.mkldnn.is_available():  # F.linear is MKL's
            packed = torch.ops.mkldnn._reorder_linear_weight(dense.weight, tokens)
            calls["dense of oneDNN"] = partial(
                torch.ops.mkldnn._linear_pointwise, x, packed, dense.bias, "none", [], ""
            )
        return Measured(calls)

    text = f"{NAMES[dtype]} {size[0]}→{size[1]} {spec}{' skewed' if skewed else ''}, M = {tokens}"
    return Row(text, unit, required, make)


def between(
    spec: str, tokens: int, dtype: torch.dtype, size: tuple[int, int] = SIZE, least: int = 4, most: int = 32
) -> Row:
    """Tokens that no kernel is made for: as fast as the line between its neighbours."""

    def make() -> Measured:
        _, sparse = sparse_layer(spec, size, dtype)
        counts = {"sparse": tokens, "fewer": least, "more": most}
        calls = {
            name: partial(sparse, torch.randn(count, size[0], dtype=dtype)) for name, count in counts.items()
        }
        return Measured(calls, between=(tokens - least) / (most - least))

    text = f"{NAMES[dtype]} {size[0]}→{size[1]} {spec}, M = {tokens}"
    return Row(text, f"of the line from {least} to {most}", 1.0, make)


def gradients(
    spec: str, density: float, dtype: torch.dtype, share: float, efficiency: float
) -> Iterator[Row]:
    """The gradients of the input and of the weight, M = 512."""
    (k, n), text = SIZE, f"{NAMES[dtype]} {SIZE[0]}→{SIZE[1]} {spec}, M = 512"

    def make(name: str) -> Measured:
        dense, sparse = sparse_layer(spec, SIZE, dtype)
        w = sparse.weight
        x, dy = torch.randn(512, k, dtype=dtype), torch.randn(512, n, dtype=dtype)
        plan = rarefy.ops.bsr_plan(w.crow_indices, w.col_indices, n, k, *w.block_shape)
        calls = {
            "grad_input": (
                lambda: rarefy.ops.bsr_grad_input(dy, w.values, plan, n, k),
                lambda: dy @ dense.weight,
            ),
            "grad_weight": (
                lambda: rarefy.ops.bsr_grad_weight(dy, x, plan, *w.block_shape, n, k),
                lambda: dy.T @ x,
            ),
        }[name]
        calls = dict(zip(("sparse", "dense"), calls, strict=True))
        return Measured(calls, 2.0 * 512 * w.values.numel(), "f32") if dtype == F32 else Measured(calls)

    for name, asked in (("grad_input", share), ("grad_weight", round(share - 0.1, 2))):
        if dtype == F32:
            yield Row(f"{name} {text}", "of f32", asked, partial(make, name))
        else:
            yield Row(f"{name} {text}", "of dense's efficiency", efficiency, partial(make, name), density)


def rows(isa_bf16: str, isa_int8: str) -> Iterator[Row]:
    """Everything that is asked, each made when its turn comes."""
    avx2 = isa_bf16 == "avx2"
    less = 0.05 if avx2 else 0
    for density, share in ((0.5, 0.9), (0.25, 0.9), (0.1, 0.9), (0.05, 0.8)):
        share = round(share - less, 2)
        for block in ("4x1", "8x8", "16x1", "32x1", "32x32"):
            yield linear(f"block:{block}@{density}", 512, share=share, of="f32")
    for block in ("4x4", "16x16", "64x64", "128x1"):
        yield linear(f"block:{block}@0.25", 512, share=round(0.9 - less, 2), of="f32")
    for block in ("4x1", "16x1", "32x32"):
        yield linear(f"block:{block}@0.5", 128, share=round(0.9 - less, 2), of="f32")
        yield linear(f"block:{block}@0.5", 32, share=round(0.8 - less, 2), of="f32")
    for size in OTHERS:
        yield linear("block:32x1@0.25", 512, size=size, share=round(0.9 - less, 2), of="f32")
    for block in ("4x1", "32x32"):
        yield linear(f"block:{block}@0.25", 512, share=round(0.9 - less, 2), of="f32", skewed=True)
    for block in ("1x1", "1x16", "2x2"):
        spec = "csr@0.35" if block == "1x1" else f"block:{block}@0.35"
        yield linear(spec, 512, share=round(0.5 - less, 2), of="f32")
        yield linear(spec, 512, speedup=1.0)
    if isa_bf16 == "amx_bf16":
        for density, speedup in ((0.5, 1.8), (0.25, 3.3), (0.1, 5.5)):
            for block in ("32x1", "64x1", "32x32", "64x64"):
                yield linear(f"block:{block}@{density}", 512, BF16, speedup=speedup)
        for block, speedup in (("16x1", 1.4), ("16x16", 1.4), ("4x1", 1.2)):
            yield linear(f"block:{block}@0.5", 512, BF16, speedup=speedup)
        for size in OTHERS:
            yield linear("block:32x1@0.25", 512, BF16, size, speedup=3.3)
        yield linear("block:32x1@0.25", 512, BF16, speedup=3.3, skewed=True)
    elif isa_bf16 == "avx512_bf16":
        for block in ("4x1", "16x16", "32x1", "32x32"):
            yield linear(f"block:{block}@0.5", 512, BF16, speedup=1.7)
            yield linear(f"block:{block}@0.5", 512, BF16, share=0.85, of="bf16")
        for size in OTHERS:
            yield linear("block:32x1@0.5", 512, BF16, size, speedup=1.7)
        yield linear("block:32x1@0.5", 512, BF16, speedup=1.7, skewed=True)
    elif avx2:
        for dtype in (BF16, F16):
            for block in ("4x1", "16x16", "32x1", "32x32"):
                yield linear(f"block:{block}@0.5", 512, dtype, speedup=1.0)
                yield linear(f"block:{block}@0.5", 512, dtype, share=0.8, of="f32")
    wanted = 5 if isa_bf16 == "amx_bf16" else 1 if avx2 else 3
    for block in ("32x1", "32x32"):
        yield linear(f"block:{block}@0.5:bf16x", 512, speedup=wanted)
    for block in ("4x1", "16x16", "32x1", "32x32"):
        yield linear(f"block:{block}@0.5:int8", 512, speedup=1.0, rival="int8")
        share = 0.8 if isa_int8 == "amx_int8" else round(0.85 - less, 2)
        yield linear(f"block:{block}@0.5:int8", 512, share=share, of="int8")
    yield linear("block:32x32@0.25:int8", 512, share=share, of="int8")
    yield linear("block:32x32@0.5:int8", 512, size=(4096, 4096), speedup=1.0, rival="int8")
    for size in ((768, 768), SIZE, (4096, 11008)):
        for spec, dtype in (("block:16x1@0.5", F32), ("block:16x16@0.5", F32), ("block:4x1@0.5", F32),
                            ("block:16x16@0.5", BF16), ("block:32x32@0.5:int8", F32),
                            ("block:32x32@0.5:w8", F32)):  # fmt: skip
            for tokens in (1, 4):
                yield linear(spec, tokens, dtype, size, reading=0.9)
                if avx2:
                    rival = {"rival": "int8"} if "int8" in spec else {}
                    yield linear(spec, tokens, dtype, size, speedup=1.0, **rival)
    for spec, dtype in (("block:64x1@0.5", F32), ("block:64x1@0.5", BF16), ("block:32x1@0.5:int8", F32),
                        ("block:64x1@0.5:int8", F32)):  # fmt: skip
        for tokens in (1, 4):  # what is recommended for inference, out of memory
            yield linear(spec, tokens, dtype, (4096, 11008), reading=0.9)
    for spec, dtype in (("block:32x1@0.5", F32), ("block:32x1@0.5", BF16), ("block:32x1@0.5:int8", F32)):
        for tokens in (5, 8, 15, 24):
            yield between(spec, tokens, dtype)
    for spec, dtype in (("block:32x32@0.5", F32), ("block:64x1@0.5", F32), ("block:64x1@0.5:bf16", BF16)):
        for tokens in (5, 8):  # out of memory
            yield between(spec, tokens, dtype, (4096, 11008))
    for spec in ("2:4", "bitmap@0.5"):
        yield linear(spec, 1, size=(4096, 11008), speedup=1.7)
    for spec in ("block:8x8@0.5", "block:16x16@0.5"):
        yield from gradients(spec, 0.5, F32, round(0.85 - less, 2), 0.6)
    for spec in ("block:32x1@0.5", "block:32x32@0.5"):
        for dtype in (F32, BF16) if isa_bf16 != "none" else (F32,):
            yield from gradients(spec, 0.5, dtype, round(0.85 - less, 2), 0.6)
    if isa_bf16 == "amx_bf16":
        for density, speedup in ((0.5, 2.2), (0.25, 3.6)):
            yield chain(f"block:32x1@{density}", speedup)


def chain(spec: str, speedup: float) -> Row:
    """A feed-forward network in bf16 against dense eager."""

    def make() -> Measured:
        x = torch.randn(512, SIZE[0], dtype=BF16)
        models = {"sparse": network(*SIZE, spec, True, BF16), "dense": network(*SIZE, None, False, BF16)}
        return Measured({name: partial(model, x) for name, model in models.items()})

    return Row(f"bf16 {SIZE[0]}→{SIZE[1]}→{SIZE[0]} {spec}, M = 512", "× dense", speedup, make)


def arguments(doc: str) -> argparse.Namespace:
    """What the command line says; `doc` begins with a line for --help."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--isa", choices=("best", *RESTRICTED), default="best")
    parser.add_argument("--peak", type=Path, default=ROOT / "build/release/bench/rarefy_peak")
    args = parser.parse_args()
    if not args.peak.exists():
        parser.error(f"--peak must be the built rarefy_peak; got {args.peak}, which is not there: make bench")
    return args


def measured_ceiling(args: argparse.Namespace, what: str) -> tuple[str, float]:
    """The instruction set and what rarefy_peak measures with it: FLOP/s, or bytes/s of so many MB."""
    command = [args.peak.resolve(), str(args.threads), "0.2", what]
    features = rarefy.backend_info()["cpu_features"]
    if args.isa in RESTRICTED:
        command.append(args.isa)
    elif features and not any(feature.startswith(("avx512", "amx")) for feature in features):
        command.append(features[0])  # what --isa calls it
    out = json.loads(subprocess.check_output(command, text=True))
    return out["isa"], out["gflops"] * 1e9


def restrict(isa: str) -> None:
    """Kernels of Rarefy and of torch, whose libraries read variables once: then the program starts anew."""
    if RESTRICTED[isa].items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | RESTRICTED[isa])
    rarefy.force_impl(f"cpu:{isa}")
    torch.backends.quantized.engine = "onednn"


def main() -> None:
    """Prints a line a row, and how many reach what is required."""
    args = arguments(__doc__)
    if args.isa in RESTRICTED:
        restrict(args.isa)
    torch.set_num_threads(args.threads)

    @cache
    def ceiling(what: str) -> tuple[str, float]:
        return measured_ceiling(args, what)

    print(f"{cpu_name()}, {args.threads} threads, {git_commit()}, torch {torch.__version__}")
    for what in ("f32", "bf16", "int8"):
        print(f"ceiling {what}: {ceiling(what)[1] / 1e9:.0f} GFLOP/s ({ceiling(what)[0]})")
    written = []
    for row in rows(ceiling("bf16")[0], ceiling("int8")[0]):
        if args.only in f"{row.case} {row.unit}" and (args.isa != "avx_vnni" or ":int8" in row.case):
            written.append(one(row, args, ceiling))
            line = "{case:58} {reached:6} {unit}, required {required}{verdict}"
            print(line.format(**written[-1]), flush=True)
    reached = sum(row["verdict"] == "" for row in written)
    print(f"{reached} of {len(written)} rows reach what is required")
    if args.csv:
        same = {
            "machine": cpu_name(),
            "threads": args.threads,
            "date": time.strftime("%F"),
            "commit": git_commit(),
            "torch": torch.__version__,
            "command": "python " + " ".join(sys.argv),
        }
        write(args.csv, [row | same for row in written])


def write(path: Path, written: list[dict[str, object]]) -> None:
    """A file with a line a row; of its head alone if there are none."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *MACHINE])
        writer.writeheader()
        writer.writerows(written)


def one(row: Row, args: argparse.Namespace, ceiling: Callable[[str], tuple[str, float]]) -> dict[str, object]:
    """A row's figures."""
    made = row.make()
    calls = made.calls if not made.work else {"sparse": made.calls["sparse"]}
    with torch.inference_mode():
        best = {name: min(turns) for name, turns in measure(calls, args.threads, args.rounds).items()}
    limit = ceiling(made.ceiling)[1] if made.work else 0
    if made.work:
        reached = made.work / best["sparse"] / limit
    elif made.between:
        line = best["fewer"] + made.between * (best["more"] - best["fewer"])
        reached = line / best["sparse"]
    else:
        best["dense"] = min(time for name, time in best.items() if name.startswith("dense"))
        reached = row.scale * best["dense"] / best["sparse"]
    return {
        "case": row.case,
        "unit": row.unit,
        "reached": f"{reached:.2f}",
        "required": row.required,
        "verdict": "" if round(reached, 2) >= row.required else "  (short)",
        "sparse_ms": f"{best['sparse'] * 1e3:.4f}",
        "dense_ms": f"{best['dense'] * 1e3:.4f}" if "dense" in best else "",
        "ceiling": f"{limit / 1e9:.1f}" if limit else "",
    }


if __name__ == "__main__":
    main()
