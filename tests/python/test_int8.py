"""Blocks of int8 with a scale for each row: rounding, both products, gradients, specs, files, bad input."""

import copy
import pickle

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BlockSparseLinear, Int8Spec, Int8Weight, Spec, ops
from tiny import FEED, Tiny

SPECS = ["block:32x1@0.5:int8", "block:16x16@0.4:int8", "block:32x1@0.5:w8", "block:4x4@0.5:w8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(spec: str = SPECS[0], n: int = 70, k: int = 90, dtype: torch.dtype = torch.float32):
    return BlockSparseLinear.from_dense(nn.Linear(k, n, dtype=dtype), spec)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token as integers and their scale, as docs/numerics.md says, in float64."""
    most = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    inverse = torch.full_like(most, 127) / most  # 127 / most would be 127 · (1 / most)
    return (x.float() * inverse).round().double(), (most / 127).double()


def expected(
    weight: Int8Weight, x: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and a bound of its rounding in float32."""
    q, scale = rounded(x) if weight.dynamic else (x.double(), torch.ones(*x.shape[:-1], 1).double())
    dense = rarefy.BsrWeight(
        weight.values,
        weight.crow_indices,
        weight.col_indices,
        shape=weight.shape,
        block_shape=weight.block_shape,
    ).to_dense()
    w = dense.double() * weight.scales.double()[:, None]
    b = torch.zeros(weight.shape[0]).double() if bias is None else bias.detach().double()
    terms = 4 if weight.dynamic else weight.shape[1] + 4
    sums = (q @ w.T * scale).abs() if weight.dynamic else q.abs() @ w.abs().T
    return q @ w.T * scale + b, terms * 2**-24 * (sums + b.abs())


# Rounding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_has_its_scale(dtype):
    dense = torch.randn(70, 90).to(dtype)
    dense[5], dense[6] = 0, 1e-33
    weight = Int8Weight.from_dense(dense, block_shape=(16, 2), density=0.5)
    kept = torch.kron(weight.block_mask().float(), torch.ones(16, 2))[:70, :90].bool()
    stored = torch.where(kept, dense, 0).float()
    scales = stored.abs().amax(1).clamp(min=2.0**-100) / 127
    scales[stored.abs().amax(1) == 0] = 1
    assert torch.equal(weight.scales, scales) and weight.scales[5] == 1
    error = (weight.to_dense().float() - stored).abs()
    unit = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    tiny = 2**-25 if dtype == torch.float16 else 0
    assert (
        error <= scales[:, None] * 0.5 * (1 + 1e-5) + unit * stored.abs() + unit * scales[:, None] + tiny
    ).all()
    assert weight.values.abs().max() == 127 and not weight.values.requires_grad
    assert weight.x_dtype == dtype and weight.dtype == torch.int8
    again = Int8Weight.from_dense(weight.to_dense(), block_shape=(16, 2), mask=weight.block_mask())
    if dtype == torch.float32:
        assert torch.equal(again.values, weight.values)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (33, 65)])
def test_any_shape(shape):
    weight = Int8Weight.from_dense(torch.randn(shape), block_shape=(32, 1))
    assert weight.to_dense().shape == shape and weight.scales.shape == (shape[0],)
    assert weight.linear(torch.randn(3, shape[1])).shape == (3, shape[0])


# Products ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_products(spec, dtype):
    sparse = layer(spec, dtype=dtype)
    store = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for tokens in (0, 1, 3, 33, 100):
        x = torch.randn(tokens, 90, dtype=dtype)
        want, bound = expected(sparse.weight, x, sparse.bias)
        for _ in range(3):  # unpacked, packed
            with torch.no_grad():
                y = sparse(x)
            assert y.dtype == dtype
            assert (
                (y.double() - want).abs() <= bound + store * y.double().abs() + 2**-24 * (store > 0)
            ).all()
    with torch.no_grad():
        assert torch.equal(sparse(x.reshape(2, 50, 90)), sparse(x).reshape(2, 50, 70))
        fused = sparse.weight.linear(x, sparse.bias, activation="relu")
        assert torch.equal(fused, sparse(x).relu())


def test_error_against_the_exact_layer():
    """docs/numerics.md: |y − x Wᵀ| ≤ Σ s_x/2 |w| + s_w/2 |x| + s_x s_w/4 over the stored elements."""
    dense, x = torch.randn(64, 96), torch.randn(40, 96) * torch.logspace(-3, 3, 40)[:, None]
    weight = Int8Weight.from_dense(dense, block_shape=(32, 1), density=0.5)
    kept = weight.block_mask().repeat_interleave(32, 0)
    exact = x.double() @ torch.where(kept, dense, 0).double().T
    _, sx = rounded(x)
    sw = weight.scales.double()
    bound = (
        sx / 2 @ torch.ones(1, 96).double() @ torch.where(kept, dense.abs(), 0).double().T
        + x.double().abs() @ (kept * sw[:, None] / 2).T
        + sx / 4 * (kept.double() * sw[:, None]).sum(1)
    )
    error = (weight.linear(x).double() - exact).abs()
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > 0


def test_packed_values_follow_values_and_scales():
    for spec in ("block:32x1@0.5:int8", "block:32x1@0.5:w8"):
        sparse, x = layer(spec), torch.randn(20, 90)
        with torch.no_grad():
            first = sparse(x)
            assert sparse.weight.derived_nbytes > 0
            sparse.weight.values.neg_()
            flipped = sparse(x) - sparse.bias
            assert torch.allclose(flipped, -(first - sparse.bias), rtol=1e-5, atol=1e-6)
            sparse.weight.scales.mul_(2)
            assert torch.allclose(sparse(x) - sparse.bias, 2 * flipped, rtol=1e-5, atol=1e-6)
            sparse.weight.values.data.zero_()  # which torch does not count
            assert torch.equal(sparse(x), sparse.bias.expand(20, -1))


def test_the_mode_may_change():
    sparse, x = layer(), torch.randn(20, 90)
    with torch.no_grad():
        dynamic = sparse(x)
        sparse.weight.dynamic = False
        exact = sparse(x)
        assert not torch.equal(dynamic, exact)
        assert torch.allclose(
            exact, nn.functional.linear(x, sparse.weight.to_dense(), sparse.bias), atol=1e-5
        )
    assert str(sparse).count("block:32x1:w8") == 1


def test_a_token_with_nan_or_infinity_is_all_nan():
    sparse, x = layer(), torch.randn(40, 90)
    with torch.no_grad():
        clean = sparse(x)
        for token, number in ((3, torch.nan), (17, torch.inf), (38, -torch.inf)):
            x[token, token] = number
        y = sparse(x)
    bad = torch.zeros(40, dtype=torch.bool)
    bad[[3, 17, 38]] = True
    assert y[bad].isnan().all() and torch.equal(y[~bad], clean[~bad])


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_those_of_the_scaled_values(spec):
    sparse = layer(spec)
    x = torch.randn(2, 20, 90, requires_grad=True)
    upstream = torch.randn(2, 20, 70)
    sparse(x).backward(upstream)
    dense = sparse.weight.to_dense()
    assert torch.allclose(x.grad, upstream @ dense, rtol=1e-4, atol=1e-4)
    assert torch.allclose(sparse.bias.grad, upstream.sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert sparse.weight.values.grad is None and not sparse.weight.requires_grad
    # The gradient's gradient, forward mode, torch.func.
    y = torch.randn(2, 20, 70, requires_grad=True)
    dx = torch.ops.rarefy.int8_grad_input(
        y, sparse.weight.values, sparse.weight.scales, sparse.weight.plan, 70, 90
    )
    (ddy,) = torch.autograd.grad(dx, y, upstream @ dense)
    assert torch.allclose(ddy, upstream @ dense @ dense.T, rtol=1e-3, atol=1e-3)
    _, tangent = torch.func.jvp(sparse, (x.detach(),), (torch.ones_like(x),))
    assert torch.allclose(tangent, torch.ones_like(x) @ dense.T, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(torch.func.vmap(sparse)(x.detach()), sparse(x.detach()), atol=1e-6)
    recorded = sparse.weight.linear(x, sparse.bias, activation="gelu")
    with torch.no_grad():
        assert torch.allclose(recorded, sparse.weight.linear(x, sparse.bias, activation="gelu"), atol=1e-5)


def test_autocast_and_compile():
    sparse, x = layer(), torch.randn(20, 90)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            y = sparse(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, copy.deepcopy(sparse).bfloat16()(x.bfloat16()))
        compiled = torch.compile(sparse, backend="aot_eager")
        assert torch.equal(compiled(x), sparse(x))


def test_explain_names_the_kernel():
    sparse, x = layer(), torch.randn(20, 90)
    assert rarefy.explain(sparse, x)["kernel"].endswith("_linear_int8")
    sparse.weight.dynamic = False
    assert rarefy.explain(sparse, x)["kernel"].endswith("_linear_scaled")
    for spec in ("block:4x1@0.5:int8", "block:8x4@0.5:int8"):  # joined to 16 rows, or not
        for tokens in (4, 20):
            kernel = rarefy.explain(layer(spec), x[:tokens])["kernel"]
            eights = "_rows" if spec.startswith("block:4x1") else ""  # AVX2 and AVX-VNNI join others to 8
            many = {"avx512": "_rows", "amx": "_tokens", "avx2": eights, "avx": eights}
            many = many.get(kernel.split("_")[0], "")
            ends = ("_linear_int8" + many,) if tokens == 20 else ("_linear_int8",)
            # AMX: as if dense, where that is less for so many threads.
            assert kernel.endswith((*ends, "_linear_int8") if many == "_tokens" else ends)
    for spec in ("block:1x1@0.5:int8", "block:3x5@0.5:int8"):
        for tokens in (4, 20):
            assert "_linear_int8" in rarefy.explain(layer(spec), x[:tokens])["kernel"]


# Moving, copying, states ---------------------------------------------------------------------------


def test_copies_moves_and_state():
    sparse, x = layer(), torch.randn(20, 90)
    assert list(sparse.weight.state_dict()) == ["values", "crow_indices", "col_indices", "scales"]
    with torch.no_grad():
        y = sparse(x)
        for other in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
            assert torch.equal(other(x), y)
        half = copy.deepcopy(sparse).bfloat16()
        assert half.weight.x_dtype == torch.bfloat16 and half.weight.scales.dtype == torch.float32
        assert torch.equal(half.weight.values, sparse.weight.values)
        other = copy.deepcopy(sparse)
        other.reset_parameters()
        assert not torch.equal(other(x), y) and (other.weight.scales > 0).all()
        other.load_state_dict(sparse.state_dict())
        assert torch.equal(other(x), y)
        with torch.device("meta"):
            empty = nn.Linear(90, 70)
        meta = copy.deepcopy(sparse).to("meta")
        assert meta.weight.scales.is_meta and empty.weight.is_meta
        back = meta.to_empty(device="cpu")
        back.load_state_dict(sparse.state_dict())
        assert torch.equal(back(x), y)
    smaller = copy.deepcopy(sparse)
    mask = sparse.weight.block_mask()
    mask[0] = False
    smaller.weight.change_pattern(rarefy.BsrPattern.from_mask(mask, shape=(70, 90), block_shape=(32, 1)))
    assert torch.equal(smaller.weight.to_dense()[32:], sparse.weight.to_dense()[32:])
    assert not smaller.weight.to_dense()[:32].any()


def test_state_dicts_that_do_not_fit():
    sparse = layer()
    for key, tensor, kind, said in (
        ("weight.scales", -torch.ones(70), ValueError, r"scales\[0\]=-1"),
        ("weight.scales", torch.ones(69), ValueError, r"shape \(70,\)"),
        ("weight.scales", torch.ones(70).double(), TypeError, "float32"),
        ("weight.values", sparse.weight.values.float(), TypeError, "int8; got float32"),
        ("weight.values", torch.full_like(sparse.weight.values, -128), ValueError, "-128|padding"),
    ):
        with pytest.raises(kind, match=said):
            sparse.load_state_dict({**sparse.state_dict(), key: tensor})


# Specs, the patcher, the report --------------------------------------------------------------------


def test_specs():
    assert Spec.parse("block:32x1@0.5:int8") == Int8Spec((32, 1), 0.5)
    assert str(Spec.parse("block:32x32@0.25:w8")) == "block:32x32@0.25:w8"
    assert Spec.parse({"block_shape": (32, 1), "density": 0.5, "int8": "w8"}) == Int8Spec((32, 1), 0.5, "w8")
    for text in ("block:32x1:int8", "block:32x1@0.5:int4", "block:32x1@0.5:int8:bf16", "csr@0.5:int8"):
        with pytest.raises(ValueError, match=r"^\[Spec.parse\] spec must look like .*; got "):
            Spec.parse(text)
    with pytest.raises(ValueError, match='int8 must be "int8" or "w8"'):
        Spec.parse({"block_shape": (32, 1), "density": 0.5, "int8": True})


def test_sparsify_reports_and_desparsifies():
    model = Tiny().eval()
    report = rarefy.sparsify(model, {FEED: "block:16x1@0.5:int8", "once": "block:4x4@0.5:w8"}, measure=False)
    row = report["encoder.layer.0.intermediate.dense"]
    assert (row.format, row.density) == ("block:16x1:int8", 0.5) and "block:16x1:int8" in str(report)
    assert row.sparse_bytes == 32 * 16 // 2 + 4 * 32 + 4 * (16 + 3)
    again = rarefy.sparsify(model, {FEED: "block:16x1@0.5:int8"}, measure=False)
    assert "already block:16x1@0.5:int8" in again["encoder.layer.0.intermediate.dense"].reason
    dense = model.encoder.layer[0].intermediate["dense"].weight.to_dense()
    rarefy.desparsify(model)
    assert torch.equal(model.encoder.layer[0].intermediate["dense"].weight, dense)


# Files ---------------------------------------------------------------------------------------------
# Bad input -----------------------------------------------------------------------------------------


def test_bad_arguments_are_named():
    values, index = torch.ones(2, 16, 1, dtype=torch.int8), (torch.tensor([0, 2]), torch.tensor([0, 1]))

    def make(values=values, scales=None, **options):
        scales = torch.ones(16) if scales is None else scales
        return Int8Weight(values, scales, *index, **{"shape": (16, 2), "block_shape": (16, 1)} | options)

    assert make().linear(torch.ones(3, 2)).shape == (3, 16)
    low = values.clone()
    low[1, 2, 0] = -128
    wrong = torch.ones(16)
    cases = [
        (lambda: make(values.float()), TypeError, "values must be int8; got float32"),
        (lambda: make(low), ValueError, "values must be in [-127, 127]; got values[1, 2, 0]=-128"),
        (
            lambda: make(scales=torch.ones(15)),
            ValueError,
            "scales must be of shape (16,), one for each row; got (15,)",
        ),
        (lambda: make(scales=torch.ones(16, 1)), ValueError, "scales must be of shape (16,)"),
        (lambda: make(scales=torch.ones(16).half()), TypeError, "scales must be float32; got float16"),
        (lambda: make(scales=[1.0]), TypeError, "scales must be a torch.Tensor"),
        (lambda: make(x_dtype=torch.float64), TypeError, "x_dtype must be float32, bfloat16 or float16"),
    ]
    for number in (0.0, -2.0, torch.nan, torch.inf):
        scales = wrong.clone()
        scales[7] = number
        cases.append((lambda s=scales: make(scales=s), ValueError, f"scales[7]={scales[7].item()}"))
    dense = torch.ones(20, 4)
    dense[17, 3] = torch.nan
    from_dense = Int8Weight.from_dense
    cases += [
        (lambda: from_dense(dense, block_shape=(16, 1)), ValueError, "finite; got W[17, 3]=nan"),
        (
            lambda: from_dense(dense.double(), block_shape=(16, 1)),
            TypeError,
            "must be float32, bfloat16 or float16",
        ),
        (lambda: make().stored_as(torch.bfloat16), TypeError, "dtype must be int8"),
        (lambda: make().linear(torch.ones(3, 2).double()), TypeError, "x must be f32, bf16 or f16"),
        (lambda: make().linear(torch.ones(3, 5)), ValueError, "in_features=2"),
    ]
    x, plan = torch.ones(1, 2), make().plan

    def op(values=values, scales=wrong, **options):
        return ops.int8_linear(x, values, scales, plan, None, 16, 2, **options)

    cases += [
        (lambda: op(values.float()), TypeError, "values must be int8"),
        (lambda: op(scales=wrong[1:]), ValueError, "scales must be contiguous, with out_features=16"),
        (lambda: op(scales=wrong.half()), TypeError, "scales must be float32"),
        (lambda: op(activation="tanh"), ValueError, "activation"),
    ]
    for call, kind, said in cases:
        with pytest.raises(kind) as caught:
            call()
        assert said in str(caught.value), str(caught.value)


def test_opcheck():
    weight, x = layer().weight, torch.randn(6, 90, requires_grad=True)
    bias = torch.randn(70, requires_grad=True)
    args = (x, weight.values, weight.scales, weight.plan, bias, 70, 90, False)
    torch.library.opcheck(torch.ops.rarefy.int8_linear, args)
    held, held_args = torch.ops.rarefy._int8_linear_held, (*args, None, None, 0)
    torch.library.opcheck(held, held_args, test_utils=("test_schema", "test_faketensor"))
    with torch.no_grad():
        assert torch.equal(held(*held_args), torch.ops.rarefy.int8_linear(*args))
        with pytest.raises(TypeError, match="int8_linear"):
            held(x.double(), *held_args[1:])
    dy = torch.randn(6, 70, requires_grad=True)
    torch.library.opcheck(
        torch.ops.rarefy.int8_grad_input, (dy, weight.values, weight.scales, weight.plan, 70, 90)
    )


@pytest.mark.parametrize("block", ["32x1", "4x1", "16x16", "8x8", "1x1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_tokens_of_w8_read_the_values_and_hold_nothing(block, dtype):
    model = nn.Sequential(nn.Linear(96, 64)).to(dtype)
    rarefy.sparsify(model, {".*": f"block:{block}@0.5:w8"}, measure=False)
    layer = model[0]
    dense = layer.weight.to_dense().double()
    for tokens in (1, 2, 3, 4):
        x = torch.randn(tokens, 96, dtype=dtype)
        expected = x.double() @ dense.T + layer.bias.double()
        for _ in range(3):
            with torch.no_grad():
                first = layer(x)
            torch.testing.assert_close(
                first.double(), expected, rtol=1e-2, atol=1e-5 if dtype.itemsize == 4 else 2e-2
            )
            assert torch.equal(layer(x), first)
    families = {c["family"] for c in rarefy.explain(layer, x)["candidates"] if not c["why_not"]}
    if not families & {"avx512", "avx2"}:
        pytest.skip("no kernel for a few tokens here")
    assert layer.weight.derived_nbytes <= 16  # no values
    with torch.no_grad():
        layer(torch.randn(5, 96, dtype=dtype))
    assert layer.weight.derived_nbytes >= 4 * layer.weight.values.numel()
    x = torch.randn(1, 96, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0)[None].to(dtype), rtol=1e-2, atol=5e-2)


def test_large_w8_may_read_the_values_with_more_tokens_than_a_few():
    model = nn.Sequential(nn.Linear(2048, 2048))
    rarefy.sparsify(model, {".*": "block:8x8@0.5:w8"}, measure=False)
    layer = model[0]
    x = torch.randn(13, 2048)
    expected = x.double() @ layer.weight.to_dense().double().T + layer.bias.double()
    with torch.no_grad():
        few = {}
        for tokens in (8, 12):
            few[tokens] = layer(x[:tokens])
            torch.testing.assert_close(few[tokens].double(), expected[:tokens], rtol=1e-2, atol=1e-4)
            reads = rarefy.explain(layer, x[:tokens])["kernel"].endswith("_few_int8")
            assert (layer.weight.derived_nbytes <= 16) == reads
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-2, atol=1e-4)
        assert layer.weight.derived_nbytes >= 4 * layer.weight.values.numel()
        for tokens, first in few.items():
            assert torch.equal(layer(x[:tokens]), first), "as if nothing were held"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_w8_multiplies_digits_of_x(dtype):
    model = nn.Sequential(nn.Linear(1024, 1536)).to(dtype)
    rarefy.sparsify(model, {".*": "block:32x1@0.5:w8"}, measure=False)
    layer = model[0]
    x = torch.randn(70, 1024).to(dtype)
    x[3] *= 1e-20 if dtype != torch.float16 else 1e-3
    exact = copy.deepcopy(layer.weight).float().to_dense()  # which is not rounded to dtype
    expected = x.double() @ exact.double().T + layer.bias.double()
    with torch.no_grad():
        for tokens in (1, 4, 5, 33, 70):
            y = layer(x[:tokens])
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(y.double(), expected[:tokens], rtol=eps, atol=2e-5)
        if not rarefy.explain(layer, x)["kernel"].split("_linear")[-1].startswith("_digits"):
            pytest.skip("no kernel multiplies digits here")
        bits = layer(x)
        for tokens in (1, 4, 33):
            assert torch.equal(layer(x[:tokens]), bits[:tokens]), "a token's bits do not depend on others"
        # Of floats it would be four bytes a value.
        assert layer.weight.derived_nbytes < 4 * layer.weight.values.numel()
        x[2, 5] = torch.inf
        stored = layer.weight.block_mask()[:, 5].repeat_interleave(32)
        y = layer(x)
        assert torch.equal(y[2].isfinite(), ~stored)
        assert torch.equal(y[3:], bits[3:])


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("rows", [16, 128, 256])
def test_a_token_of_a_large_layer_has_the_same_bits_in_every_batch(rows, dynamic):
    """Out of memory few tokens go by another way, some of them at a time, with parts of W in turn."""
    n, k = 6144, 6144  # 19 MB of values
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (n * k // 2,), generator=generator).to(torch.int8)
    kept = torch.rand(n // rows, k, generator=generator).argsort(1)[:, : k // 2].sort(1).values
    crow = torch.arange(0, kept.numel() + 1, k // 2)
    scales = torch.rand(n, generator=generator) + 0.5
    weight = Int8Weight(
        values.view(-1, rows, 1),
        scales,
        crow,
        kept.flatten(),
        shape=(n, k),
        block_shape=(rows, 1),
        dynamic=dynamic,
    )
    x = torch.randn(70, k, generator=generator)
    x[1, 5] = torch.inf
    if not dynamic and "_digits" not in rarefy.explain(weight, x)["kernel"]:
        pytest.skip("no kernel multiplies digits here")
    with torch.inference_mode():
        every = weight.linear(x)
        assert every[0].isfinite().all() and not every[1].isfinite().all()
        for tokens in (1, 2, 3, 4, 5, 8):
            y = weight.linear(x[:tokens])
            torch.testing.assert_close(y, every[:tokens], rtol=0, atol=0, equal_nan=True)
