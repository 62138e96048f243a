"""What the tests of sparse matrices share: random matrices of scipy, in every dtype."""

from __future__ import annotations

import torch

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
NUMPY = {torch.float64: "f8", torch.float32: "f4", torch.int64: "i8", torch.int32: "i4"}
NUMPY |= {torch.int16: "i2", torch.int8: "i1"}


def random_blocks(rows: int, columns: int, r: int, c: int, density: float, dtype=torch.float32, index="i4"):
    """Blocks as (data, indices, indptr), and the dense matrix; integers up to 8, exact in any dtype."""
    mask = torch.rand(rows, columns) < density
    blocks = torch.randint(-8, 9, (int(mask.sum()), r, c)).to(dtype)
    place = mask.nonzero()
    dense = torch.zeros(rows, columns, r, c, dtype=dtype)
    dense[place[:, 0], place[:, 1]] = blocks
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    indptr[1:] = mask.sum(1).cumsum(0)
    kind = {"i4": torch.int32, "i8": torch.int64}[index]
    arrays = (blocks, place[:, 1].to(kind), indptr.to(kind))
    return arrays, dense.transpose(1, 2).reshape(rows * r, columns * c)


def csr(rows: int, columns: int, density: float, dtype=torch.float32, index="i4"):
    (data, indices, indptr), dense = random_blocks(rows, columns, 1, 1, density, dtype, index)
    return (data.flatten(), indices, indptr), dense


def whole(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(dtype)


def on(arrays, device):
    return tuple(array.to(device) for array in arrays)
