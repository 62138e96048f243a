"""What the tests of the ops share: shapes and densities, the three products and their twins in float64."""

import torch

from rarefy import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# out, in, block rows, block cols, density: whole blocks, odd edges, CSR, one huge block, no block, all.
CASES = [
    (64, 96, 16, 16, 0.4),
    (33, 47, 4, 1, 0.5),
    (37, 29, 5, 3, 0.5),
    (20, 30, 1, 1, 0.2),
    (7, 5, 32, 32, 1.0),
    (48, 64, 8, 4, 0.0),
    (40, 24, 4, 8, 1.0),
]
IDS = ["x".join(map(str, case)) for case in CASES]


def products(bsr, x, dy, bias):
    """All three ops on one weight."""
    return (
        ops.bsr_linear(x, *bsr.operands, bias, *bsr.shape),
        ops.bsr_grad_input(dy, *bsr.operands, *bsr.shape),
        ops.bsr_grad_weight(dy, x, bsr.plan, *bsr.block_shape, *bsr.shape),
    )


def expected(bsr, x, dy, bias):
    """(result, magnitude, terms) of each product, from dense float64 matrices."""
    w, x, dy, b = bsr.dense(), x.double(), dy.double(), bias.double()
    stored = bsr.scatter(torch.ones_like(bsr.values)).double()
    rows_x, rows_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dw = rows_dy.T @ rows_x
    dw_magnitude = rows_dy.abs().T @ rows_x.abs()
    return (
        (x @ w.T + b, x.abs() @ w.abs().T + b.abs(), stored.sum(1) + 1),
        (dy @ w, dy.abs() @ w.abs(), stored.sum(0)),
        (bsr.gather(dw), bsr.gather(dw_magnitude), len(rows_x)),
    )
