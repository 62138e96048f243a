"""Who computes the ops: torch's threads, implementations that are forced, and what explain says of them."""

import itertools
import os
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

import rarefy
from helpers import random_bsr, small_integers
from op_cases import expected, products
from rarefy import ops


def test_results_do_not_depend_on_the_number_of_threads():
    bsr = random_bsr((256, 192), (8, 8), 0.3)
    x, dy, bias = torch.randn(100, 192), torch.randn(100, 256), torch.randn(256)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert rarefy.backend_info()["threads"] == count
            results.append(products(bsr, x, dy, bias))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_work_is_shared_between_the_threads_of_torch():
    bsr = random_bsr((512, 512), (16, 16), 0.5)
    x, threads = torch.randn(512, 512), torch.get_num_threads()
    shares = []
    try:
        torch.set_num_threads(2)
        for _ in range(20):  # a busy machine may not let the second thread run at once
            whole, own = time.process_time(), time.thread_time()
            for _ in range(20):
                ops.bsr_linear(x, *bsr.operands, None, *bsr.shape)
            whole, own = time.process_time() - whole, time.thread_time() - own
            shares.append((whole - own) / whole)
            if shares[-1] > 0.25:
                return
    finally:
        torch.set_num_threads(threads)
    raise AssertionError(f"CPU time of other threads / all CPU time: {shares}")


@pytest.mark.parametrize("kernel_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["ref", "scalar", "avx2", "avx512"])
def test_forced_implementations(impl, kernel_dtype, forced):
    """force_impl takes effect, is reported, and gives exact integers."""
    forced(f"cpu:{impl}")
    info = rarefy.backend_info((4, 4))
    names = {"f32": torch.float32, "bf16": torch.bfloat16}
    rows = [r for r in info["kernels"] if r["device"] == "cpu" and names.get(r["dtype"]) == kernel_dtype]
    if any(row["kernel"] is None for row in rows):
        pytest.skip(f"this machine has no {impl}: {rows[0]['why']}")
    assert info["forced_impl"] == f"cpu:{impl}"
    assert all(row["kernel"].startswith(impl) and impl in row["why"] for row in rows)
    bsr = random_bsr((36, 20), (4, 4), 0.5, dtype=kernel_dtype, integers=True)
    x, dy, bias = (small_integers(*s).to(kernel_dtype) for s in [(9, 20), (9, 36), (36,)])
    for got, (want, *_) in zip(products(bsr, x, dy, bias), expected(bsr, x, dy, bias), strict=True):
        assert torch.equal(got.double(), want)


def test_an_unknown_implementation_is_an_error(forced):
    with pytest.raises(RuntimeError, match=r"\[force_impl\] RAREFY_FORCE_IMPL .*cpu:ref.*; got \"abacus\""):
        forced("abacus")
    assert forced("") in ("", rarefy.backend_info()["forced_impl"] or "")


def test_the_environment_is_read_at_the_first_call():
    """An unknown family there is an error of every call, not of the import."""
    program = (
        "import torch, rarefy\n"
        "layer = rarefy.BlockSparseLinear(8, 8, block_shape=(4, 4))\n"
        "print(rarefy.explain(layer, torch.ones(9, 8))['kernel'])\n"
        "layer(torch.ones(9, 8))\n"
    )
    run = partial(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True)
    good = run(env={**os.environ, "RAREFY_FORCE_IMPL": "cpu:scalar"})
    assert good.returncode == 0 and good.stdout.strip() == "scalar_linear", good.stderr
    bad = run(env={**os.environ, "RAREFY_FORCE_IMPL": "abacus"})
    assert bad.returncode == 1 and "RAREFY_FORCE_IMPL must name families" in bad.stderr, bad.stderr


def test_what_kernels_prepared_is_forgotten_when_others_are_forced(forced):
    """A pattern keeps it by the key of linear's kernel alone, and it holds the gradients' parts, too."""
    weight = rarefy.BlockSparseLinear(64, 48, density=0.5, block_shape=(4, 4)).weight
    made = []

    def make() -> torch.Tensor:
        made.append(torch.empty(1))
        return made[-1]

    assert weight.pattern.prepared(7, make) is weight.pattern.prepared(7, make)
    forced("cpu:scalar")
    assert weight.pattern.prepared(7, make) is made[1] and len(made) == 2


def test_explain_names_what_runs(forced):
    """Every candidate with its reason, and the configuration of the chosen one."""
    forced("")
    layer = rarefy.BlockSparseLinear(64, 48, density=0.5, block_shape=(4, 4))
    many, few = (rarefy.explain(layer, torch.ones(m, 64)) for m in (512, 1))
    assert many["kernel"].endswith("_linear") and "vectors=" in many["config"] and many["workspace"] > 0
    assert "512 tokens, f32 -> f32, bias, cpu" in many["problem"] and "48x64 block 4x4" in many["problem"]
    assert [c["chosen"] for c in many["candidates"]].count(True) == 1
    assert many["candidates"][-1] == {
        "kernel": "ref_linear", "family": "ref", "chosen": False, "why_not": ""
    }  # fmt: skip
    assert few["kernel"] != many["kernel"] or "few" not in "".join(c["kernel"] for c in few["candidates"])
    assert rarefy.explain(layer.weight, torch.ones(3, 2, 64), op="grad_input")["kernel"].endswith(
        "_grad_input"
    )
    assert "stride 70" in rarefy.explain(layer, torch.ones(9, 70)[:, :64])["problem"]
    # Panels read x by feature; kernels of few tokens get a copy.
    by_feature = rarefy.explain(layer, torch.ones(64, 64).t())
    assert not by_feature["kernel"].endswith("_few") and "by feature" in by_feature["problem"]
    copied = rarefy.explain(layer, torch.ones(64, 2).t())
    assert copied["kernel"].endswith("_few") != ("by feature" in copied["problem"])
    with pytest.raises(
        ValueError, match=r"\[explain\] x's last dimension must be in_features=64; got \(2, 3\)"
    ):
        rarefy.explain(layer, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\[explain\] op must be"):
        rarefy.explain(layer, torch.ones(2, 64), op="matmul")
    with pytest.raises(TypeError, match=r"\[explain\] layer must be a BlockSparseLinear"):
        rarefy.explain(torch.nn.Linear(64, 48), torch.ones(2, 64))


def test_explain_says_why_no_kernel_that_is_allowed_fits(forced):
    forced("cpu:pairs")  # for bf16
    layer = rarefy.BlockSparseLinear(64, 48, density=0.5, block_shape=(4, 4), dtype=torch.float64)
    found = rarefy.explain(layer, torch.ones(512, 64, dtype=torch.float64))
    assert found["kernel"] is None
    assert "must name an implementation that this machine and these inputs can use" in found["why_none"]
    up, down = (
        rarefy.BlockSparseLinear(*s, block_shape=(4, 4)).requires_grad_(False) for s in ((64, 256), (256, 64))
    )
    up.waits = True
    forced("cpu:pairs")
    found = rarefy.explain((up, down), torch.ones(512, 64), activation="gelu")
    assert found["kernel"] is None and "must name an implementation" in found["why_none"]


def test_calls_from_several_python_threads():
    from concurrent.futures import ThreadPoolExecutor

    bsr = random_bsr((128, 96), (8, 8), 0.4)
    inputs = [torch.randn(17, 96) for _ in range(16)]
    want = [ops.bsr_linear(x, *bsr.operands, None, *bsr.shape) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = pool.map(lambda x: ops.bsr_linear(x, *bsr.operands, None, *bsr.shape), inputs * 4)
        assert all(torch.equal(g, w) for g, w in zip(got, itertools.cycle(want), strict=False))
