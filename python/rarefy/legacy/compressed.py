"""compressed-tensors: sparse-bitmask, sparse-24-bitmask and marlin-24; and torch's semi-structured tensors.

The bitmask formats keep the values that stay in row-major order, and a bit for each element, the first column
in the lowest bit. The other two are orders that kernels for 2:4 sparsity want: which two of each four columns
stay comes as four bits for each four columns, in CUTLASS's order; marlin-24 also packs quantized values
into int32 in the order of the tensor cores' fragments. What is here undoes these orders.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks import check_dtype, check_shape
from ..csr import CsrWeight
from .readers import OP, Reader, check, csr_of_mask

Pieces = dict[str, torch.Tensor]
Shape = tuple[int, int] | None


def _unpacked(name: str, bits: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The bool mask (N, K) of bytes (N, ceil(K/8))."""
    n, k = shape
    expected = (n, -(-k // 8))
    fits = bits.dtype == torch.uint8 and tuple(bits.shape) == expected
    check(fits, f"{name} must be {expected} uint8, as the shape says", f"{tuple(bits.shape)} {bits.dtype}")
    mask = (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    mask = mask.reshape(n, expected[1] * 8).bool()
    check(not bool(mask[:, k:].any()), f"{name} must have no bits beyond column {k}", "some")
    return mask[:, :k]


def _bitmask(name: str, pieces: Pieces, _: Shape) -> CsrWeight:
    values = pieces[".compressed"]
    check_dtype(OP, f"{name}.compressed", values.dtype)
    shape = check_shape(OP, pieces[".shape"].flatten().tolist(), f"{name}.shape")
    mask = _unpacked(f"{name}.bitmask", pieces[".bitmask"], shape)
    stored = int(mask.sum())
    check(
        values.numel() == stored,
        f"{name}.compressed must have {stored} values, one for each bit",
        values.numel(),
    )
    if ".row_offsets" in pieces:
        counts = mask.sum(1)
        same = torch.equal(pieces[".row_offsets"].long(), counts.cumsum(0) - counts)
        check(same, f"{name}.row_offsets must be where the bits of rows begin", "others")
    return csr_of_mask(values.flatten(), mask)


# 2:4 in CUTLASS's order ---------------------------------------------------------------------------


def _kept_columns(name: str, meta: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The (N, K/4, 2) columns within each four that stay, of N × K/16 int16 in CUTLASS's order."""
    width = cols // 16
    fits = meta.dtype == torch.int16 and meta.numel() == rows * width
    check(fits, f"{name} must be {rows * width} int16", f"{meta.numel()} {meta.dtype}")
    row = torch.arange(rows)[:, None].expand(rows, width)
    col = torch.arange(width)[None, :].expand(rows, width)
    # Rows move within 64; then pairs of rows and columns trade corners; two columns are interleaved.
    to = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
    swap = ((to % 2 == 0) & (col % 2 == 1)).int() - ((to % 2 == 1) & (col % 2 == 0)).int()
    to, col = to + swap, col - swap
    at = col // 2 * (2 * rows) + to * 2 + col % 2
    words = meta.flatten()[at.flatten()].reshape(rows, width).int() & 0xFFFF
    nibbles = (words[:, :, None] >> torch.arange(0, 16, 4)) & 15
    kept = torch.stack([nibbles & 3, nibbles >> 2], -1).reshape(rows, cols // 4, 2)
    check(bool((kept[..., 0] < kept[..., 1]).all()), f"{name} must name two columns of each four", "others")
    return kept


def _spread(values: torch.Tensor, kept: torch.Tensor) -> CsrWeight:
    """Values (N, K/2) at the columns of _kept_columns."""
    rows, fours, _ = kept.shape
    mask = torch.zeros(rows, fours, 4, dtype=torch.bool).scatter_(2, kept.long(), True)
    return csr_of_mask(values.flatten(), mask.reshape(rows, fours * 4))


def semi_structured(name: str, tensor: Any) -> CsrWeight:
    """A torch.sparse.SparseSemiStructuredTensor of CUTLASS's layout."""
    packed, meta, (n, k) = tensor.packed, tensor.meta, tensor.shape
    known = packed is not None and meta is not None and packed.ndim == 2
    check(known, f"{name} must be in CUTLASS's layout; cuSPARSELt's is its own secret", type(tensor).__name__)
    check(
        packed.dtype in (torch.float16, torch.bfloat16), f"{name} must be float16 or bfloat16", packed.dtype
    )
    check(
        n % 64 == k % 32 == 0 and tuple(packed.shape) == (n, k // 2), f"{name} must be (64 i, 32 j)", (n, k)
    )
    return _spread(packed.cpu(), _kept_columns(f"{name}.meta", meta.cpu(), n, k))


def _marlin_order(bits: int) -> torch.Tensor:
    """Where each of 1024 values in four 16×16 tiles comes from, in the order in which marlin-24 has them."""
    order = []
    for lane in range(32):
        # Two 8×4 halves of a fragment, four rows in each, four columns next to each other.
        starts = [
            16 * (2 * (lane % 4) + row) + 256 * (lane // 8) + 8 * (lane // 4 % 2) + 4 * half
            for half in (0, 1)
            for row in (0, 1, 8, 9)
        ]
        order += [start + column for column in range(4) for start in starts]
    interleave = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    return torch.tensor(order).reshape(-1, len(interleave))[:, interleave].flatten()


_SCALES = torch.tensor([8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)])
_GROUP = 128


def _marlin(name: str, pieces: Pieces, _: Shape) -> CsrWeight:
    packed, scales, meta = (pieces[e] for e in (".weight_packed", ".scale_packed", ".meta"))
    two = packed.ndim == meta.ndim == scales.ndim == 2 and packed.dtype == torch.int32
    check(two, f"{name}.weight_packed must be a matrix of int32", f"{tuple(packed.shape)} {packed.dtype}")
    n, k = meta.shape[1] // 2, meta.shape[0] * 32
    check(n > 0 == n % 64 and k > 0, f"{name}.meta must be (K/32, 2N), N a multiple of 64", tuple(meta.shape))
    per_word = packed.shape[1] and n * 16 / packed.shape[1]
    fits = packed.shape[0] == k // 32 and per_word in (4, 8)
    check(fits, f"{name}.weight_packed must be ({k // 32}, {2 * n} or {4 * n})", tuple(packed.shape))
    bits = 32 // int(per_word)
    groups = scales.shape[0]
    fits = scales.shape[1] == n and groups in (1, -(-k // _GROUP)) and scales.is_floating_point()
    check(fits, f"{name}.scale_packed must be (1 or {-(-k // _GROUP)}, {n}) floats", tuple(scales.shape))

    words = packed.long() & 0xFFFFFFFF
    q = (words[:, :, None] >> torch.arange(0, 32, bits)) & (2**bits - 1)
    order = _marlin_order(bits)
    tiles = torch.empty_like(q.reshape(-1, 1024))
    tiles[:, order] = q.reshape(-1, 1024)
    # (K/2 / 16, N / 16) tiles of 16 × 16; inputs first.
    q = tiles.reshape(k // 32, n // 16, 16, 16).transpose(1, 2).reshape(k // 2, n)
    values = (q.t() - 2 ** (bits - 1)).to(scales.dtype)

    rows = scales.reshape(-1, 64)
    if groups > 1 and k // 2 > _GROUP:  # its writer compared the group with K/2
        rows = torch.empty_like(rows).index_copy_(1, _SCALES, rows)
    scales = rows.reshape(groups, n)
    kept = _kept_columns(f"{name}.meta", meta, n, k)
    columns = (torch.arange(k // 4)[:, None] * 4 + kept).reshape(n, k // 2)
    group = columns // _GROUP if groups > 1 else torch.zeros_like(columns)
    return _spread(values * scales.t().gather(1, group), kept)


READERS = (
    Reader(
        "compressed-tensors sparse-bitmask",
        (".bitmask", ".compressed", ".shape", ".row_offsets"),
        _bitmask,
        weight=".weight",
    ),
    Reader(
        "compressed-tensors sparse-24-bitmask",
        (".bitmask", ".compressed", ".shape"),
        _bitmask,
        weight=".weight",
    ),
    Reader(
        "compressed-tensors marlin-24",
        (".weight_packed", ".scale_packed", ".meta"),
        _marlin,
        weight=".weight",
    ),
)
