"""Kernels for few tokens read the plan before the kernel ahead of them is known to have ended."""

import pytest
import torch

import rarefy
from helpers import random_bsr, small_integers
from rarefy import ops

SIZE, TURNS = 1024, 1000


def _hopper() -> bool:
    info = rarefy.backend_info()
    usable = info["problem"] is None and info["cuda_built"] and torch.cuda.is_available()
    return usable and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not _hopper(), reason="no GPU of compute capability 9.0")
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("by", ["copy", "kernel"])
@pytest.mark.parametrize(("block", "kernel"), [((32, 32), "sm90_decode"), ((32, 1), "sm90_tall_decode")])
def test_a_plan_that_was_written_right_before_the_call_is_the_one_that_is_read(by, block, kernel, tokens):
    """src/cuda/sm90/decode.h assumes it: as many blocks at other places, in turns and in one stream."""
    first = random_bsr((SIZE, SIZE), block, 0.3, dtype=torch.bfloat16, device="cuda", integers=True)
    dense = torch.zeros(SIZE // block[0], SIZE // block[1], dtype=torch.bool)
    rows = torch.repeat_interleave(torch.arange(len(dense)), first.crow.cpu().diff().long())
    dense[rows, first.col.cpu().long()] = True
    turned = dense.flip(0, 1)  # rows of other lengths, too
    crow = torch.cat([torch.zeros(1, dtype=torch.long), turned.sum(1).cumsum(0)]).int().cuda()
    col = turned.nonzero()[:, 1].int().cuda()
    plans = [first.plan, ops.bsr_plan(crow, col, SIZE, SIZE, *block)]
    assert plans[0].shape == plans[1].shape and not torch.equal(*plans)

    x = small_integers(tokens, SIZE).to("cuda", torch.bfloat16)
    weight = rarefy.BsrWeight.from_dense(first.dense().bfloat16(), block_shape=block, density="nonzero")
    assert rarefy.explain(weight, x)["kernel"] == kernel

    def product(plan: torch.Tensor) -> torch.Tensor:
        return ops.bsr_linear(x, first.values, plan, None, SIZE, SIZE)

    want = [product(plan) for plan in plans]
    assert not torch.equal(*want)
    plan = torch.empty_like(plans[0])
    got = []
    torch.cuda.synchronize()
    for turn in range(TURNS):
        if by == "copy":
            plan.copy_(plans[turn % 2])
        else:
            torch.bitwise_or(plans[turn % 2], 0, out=plan)
        got.append(product(plan))
    wrong = [turn for turn, y in enumerate(got) if not torch.equal(y, want[turn % 2])]
    assert wrong == []
