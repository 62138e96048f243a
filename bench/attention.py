"""Block-sparse attention against dense attention with a mask, and against FlexAttention on the same blocks.

Random blocks of scores and the diagonal, forward alone and with backward. Results are compared before they
are timed. FlexAttention, compiled by Triton, on a GPU alone: what it makes for a CPU GCC 12 does not compile.

python bench/attention.py                                  # 4096 tokens, blocks of 64, a tenth of them
python bench/attention.py --device cuda --dtype bfloat16 --csv out.csv
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import rarefy
from rarefy import sparse
from rarefy.timing import measure_pair, quietest
from rows import write_csv


def chosen_blocks(count: int, density: float) -> Tensor:
    """(count, count) bool: the diagonal and random others, this share of all together."""
    blocks = torch.rand(count, count) < (density * count - 1) / max(1, count - 1)
    return blocks.fill_diagonal_(True)


def flex(blocks: Tensor, block: int, device: str) -> Callable[..., Tensor]:
    """FlexAttention on whole blocks, compiled."""
    counts = blocks.sum(1, dtype=torch.int32)[None, None].to(device)
    order = blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None].to(device)
    none = torch.zeros_like(counts)
    mask = BlockMask.from_kv_blocks(none, order, counts, order, BLOCK_SIZE=(block, block))
    # By default its tiles, of up to 128, do not divide smaller blocks: it chooses among all that do.
    compiled = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
    return partial(compiled, block_mask=mask)


def trained(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of a sum."""
    return list(torch.autograd.grad(attend(*inputs).sum(), inputs))


def measured(args: argparse.Namespace, backward: bool) -> list[dict]:
    """A row for each rival."""
    torch.manual_seed(0)
    device, dtype, block = args.device, getattr(torch, args.dtype), args.block
    count = args.tokens // block
    blocks = chosen_blocks(count, args.density)
    pattern = rarefy.BsrPattern.from_mask(
        blocks, shape=(args.tokens, args.tokens), block_shape=(block, block), device=device
    )
    mask = blocks.repeat_interleave(block, 0).repeat_interleave(block, 1).to(device)
    size = (1, args.heads, args.tokens, args.features)
    inputs = [torch.randn(size, device=device, dtype=dtype, requires_grad=backward) for _ in range(3)]
    rivals: dict[str, Callable[..., Tensor]] = {
        "sdpa with a mask": partial(functional.scaled_dot_product_attention, attn_mask=mask)
    }
    if device == "cuda":
        rivals["flex_attention"] = flex(blocks, block, device)
    ours = partial(sparse.sparse_attention, pattern=pattern)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2

    def call(attend: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(backward):
                trained(attend, inputs) if backward else attend(*inputs)
            sync()

        return run

    rows = []
    for name, rival in rivals.items():
        try:
            call(rival)()
            with torch.no_grad():
                want = rival(*inputs)
        except Exception as error:  # of any kind: a compiler's
            said = " ".join(str(error).split())[:300]
            print(f"{name} does not run here: {said}", flush=True)
            continue
        with torch.no_grad():
            torch.testing.assert_close(ours(*inputs), want, rtol=tolerance, atol=tolerance)
        times = quietest(partial(measure_pair, call(rival), call(ours), budget=1.0))
        where = torch.cuda.get_device_name() if device == "cuda" else rarefy.backend_info()["cpu"]
        rows.append({
            "machine": where, "threads": torch.get_num_threads(), "date": time.strftime("%F"),
            "torch": torch.__version__, "dtype": args.dtype, "heads": args.heads, "tokens": args.tokens,
            "features": args.features, "block": block, "density": round(blocks.float().mean().item(), 3),
            "pass": "forward and backward" if backward else "forward", "rival": name,
            "rival_ms": round(times.dense.median, 3), "ours_ms": round(times.sparse.median, 3),
            "speedup": round(times.dense.median / times.sparse.median, 2), "noise": times.noise or "",
            "command": "python " + " ".join(sys.argv),
        })  # fmt: skip
        print(
            *(
                f"{key}={rows[-1][key]}"
                for key in ("pass", "rival", "rival_ms", "ours_ms", "speedup", "noise")
            )
        )
    return rows


def main() -> None:
    """Prints a line for each rival and pass, and writes all where --csv says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = [row for backward in (False, True) for row in measured(args, backward)]
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
