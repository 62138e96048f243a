"""Who takes part in a case, each as a call without arguments, on the same random matrices.

Rarefy, torch's dense kernels, torch BSR and scipy BSR.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from torch import Tensor
from torch.nn.functional import linear

import rarefy
from cases import Case
from rarefy import masks

TORCH_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Largest accepted error of an element, relative to the largest element of the result.
CLOSE = {"f64": 1e-12, "f32": 1e-4, "bf16": 5e-2, "f16": 1e-2}

Call = Callable[[], object]


@dataclass
class Problem:
    """One case's matrices: fresh random numbers, and a pattern of exactly round(density · blocks) blocks."""

    case: Case
    x: Tensor  # (M, K)
    dy: Tensor  # (M, N)
    dense: Tensor  # (N, K) without zeros: what the dense kernels multiply by
    masked: Tensor  # (N, K), zero outside the pattern
    values: Tensor
    crow: Tensor
    col: Tensor

    @property
    def useful_flop(self) -> float:
        """A multiplication and an addition for each stored element and token."""
        return 2.0 * self.case.M * self.values.numel()


def make_problem(case: Case, generator: torch.Generator) -> Problem:
    """Random matrices and a random pattern for a case, on its device."""
    dtype, device = TORCH_DTYPES[case.dtype], case.device

    def random(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=generator).to(device=device, dtype=dtype)

    x, dense, dy = random(case.M, case.K), random(case.N, case.K), random(case.M, case.N)
    kept = masks.random_blocks(masks.grid_of((case.N, case.K), case.block), case.density, generator).to(
        device
    )
    values = masks.to_blocks(dense, case.block)[kept].contiguous()
    masked = dense * masks.expand_mask(kept, (case.N, case.K), case.block)
    return Problem(case, x, dy, dense, masked, values, *masks.pattern_of(kept))


def dense_product(p: Problem, w: Tensor) -> Tensor:
    """The product with torch's ordinary dense kernels."""
    if p.case.op == "linear":
        return linear(p.x, w)
    return p.dy @ w if p.case.op == "grad_input" else p.dy.T @ p.x


def rarefy_call(p: Problem) -> Call:
    """Rarefy's product, as BlockSparseLinear calls it."""
    N, K, (rows, cols) = p.case.N, p.case.K, p.case.block
    plan = rarefy.ops.bsr_plan(p.crow, p.col, N, K, rows, cols)
    if p.case.op == "linear":
        weight = prepared_weight(p)
        return lambda: weight.linear(p.x)
    if p.case.op == "grad_input":
        return lambda: rarefy.ops.bsr_grad_input(p.dy, p.values, plan, N, K)
    return lambda: rarefy.ops.bsr_grad_weight(p.dy, p.x, plan, rows, cols, N, K)


def prepared_weight(p: Problem) -> rarefy.BsrWeight:
    """The weight of a layer, with what kernels derive from it made ahead, as a server does."""
    shape, block = (p.case.N, p.case.K), p.case.block
    weight = rarefy.BsrWeight(p.values, p.crow, p.col, shape=shape, block_shape=block)
    return weight.requires_grad_(False).prepare()


def onednn_call(p: Problem) -> Call | None:
    """The float32 kernels of oneDNN, which F.linear does not use on x86; a weight is packed beforehand.

    bfloat16 and float16 need no call of their own: there F.linear is oneDNN.
    """
    if p.case.device != "cpu" or p.case.dtype != "f32" or not torch.backends.mkldnn.is_available():
        return None
    product = torch.ops.mkldnn._linear_pointwise
    if p.case.op == "linear":
        packed = torch.ops.mkldnn._reorder_linear_weight(p.dense, p.case.M)
        return lambda: product(p.x, packed, None, "none", [], "")
    if p.case.op == "grad_input":
        return lambda: product(p.dy, p.dense.T, None, "none", [], "")
    return lambda: product(p.dy.T, p.x.T, None, "none", [], "")


def torch_bsr_call(p: Problem) -> Call | None:
    """Torch's own BSR weights: square blocks only; on the CPU in the argument order that is fastest there."""
    square = p.case.block[0] == p.case.block[1]
    fits = p.case.N % p.case.block[0] == 0 and p.case.K % p.case.block[1] == 0
    if p.case.op != "linear" or not square or not fits or (p.case.device == "cpu" and p.case.dtype != "f32"):
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")  # in beta; invariants unchecked
        w = torch.sparse_bsr_tensor(p.crow, p.col, p.values, size=(p.case.N, p.case.K))
    if p.case.device == "cpu":
        return lambda: (w @ p.x.T).T
    return lambda: linear(p.x, w)


def scipy_bsr_call(p: Problem) -> Call | None:
    """BSR of scipy times Xᵀ, on one thread."""
    if p.case.op != "linear" or p.case.device != "cpu" or p.case.dtype not in ("f32", "f64"):
        return None
    arrays = (p.values.numpy(), p.col.numpy(), p.crow.numpy())
    w = scipy.sparse.bsr_array(arrays, shape=(p.case.N, p.case.K), blocksize=p.case.block)
    x = p.x.numpy()
    return lambda: (w @ x.T).T


RIVALS = {"torch_bsr": torch_bsr_call, "scipy_bsr": scipy_bsr_call}


def make_contestants(p: Problem, rivals: list[str]) -> dict[str, Call]:
    """Each contestant's call, by the name of its columns, after one checked run.

    Raises:
        RuntimeError: a result is not that of the dense product.
    """
    calls: dict[str, Call | None] = {
        "rarefy": rarefy_call(p),
        "dense_torch": lambda: dense_product(p, p.dense),
        "dense_onednn": onednn_call(p),
    }
    calls |= {name: RIVALS[name](p) for name in rivals}
    if calls.get("torch_bsr") is not None and p.case.device == "cuda":
        try:
            calls["torch_bsr"]()
        except (RuntimeError, ValueError, NotImplementedError):
            calls["torch_bsr"] = None  # its kernels take some block shapes and dtypes only: empty columns
    present = {name: call for name, call in calls.items() if call is not None}
    if "dense_onednn" in present:
        check(p, "dense_onednn", present["dense_onednn"](), present["dense_torch"]())
    masked = dense_product(p, p.masked)
    for name in ("rarefy", *rivals):
        if name in present:
            check(
                p, name, present[name](), stored_blocks(p, masked) if p.case.op == "grad_weight" else masked
            )
    return present


def stored_blocks(p: Problem, dense: Tensor) -> Tensor:
    """The stored blocks of an (N, K) matrix, (nnzb, R, C)."""
    counts = p.crow.diff().long()
    rows = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
    return masks.to_blocks(dense, p.case.block)[rows, p.col.long()]


def check(p: Problem, name: str, result: object, want: Tensor) -> None:
    """A time of a wrong result is worth nothing."""
    got = torch.from_numpy(result) if isinstance(result, np.ndarray) else result
    error = (got - want).abs().max().item()
    limit = CLOSE[p.case.dtype] * want.abs().max().item()
    if not error <= limit:
        what = f"{name} must agree with dense to {limit:.3g}"
        raise RuntimeError(f"[bench] {what}; got {error:.3g} ({p.case.name})")
