"""Layers in float32 whose x may be rounded to bfloat16: "block:32x1@0.5:bf16x". Bounds, gradients, files."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

import rarefy
from rarefy import ops
from rarefy.fusing import fuse
from rarefy.spec import Spec

SPEC = "block:32x1@0.5:bf16x"
U, UF = 2.0**-8, 2.0**-24


def layer_of(n=96, k=80, spec=SPEC, bias=True):
    torch.manual_seed(0)
    dense = nn.Linear(k, n, bias)
    return rarefy.BlockSparseLinear.from_dense(dense, spec)


def bound(layer, x):
    """docs/numerics.md, "x may be rounded"."""
    w = layer.weight.to_dense().double().abs()
    size = x.double().abs() @ w.T
    terms = layer.in_features + 1
    return U * size + terms * UF / (1 - terms * UF) * ((1 + U) * size + layer.bias.double().abs())


def exact(layer, x):
    return x.double() @ layer.weight.to_dense().double().T + layer.bias.double()


@pytest.mark.parametrize(
    "spec", [SPEC, "block:4x1@0.4:bf16x", "block:16x16@0.5:bf16x", "block:32x32@0.5:bf16x"]
)
@pytest.mark.parametrize("tokens", [1, 4, 5, 33, 64, 200])
def test_results_are_within_the_bound_for_every_number_of_tokens(spec, tokens):
    layer, x = layer_of(spec=spec), torch.randn(tokens, 80)
    with torch.no_grad():
        y = layer(x)
    assert y.dtype == torch.float32
    assert ((y.double() - exact(layer, x)).abs() <= bound(layer, x)).all()


@pytest.mark.parametrize("tokens", [5, 64])
def test_what_bf16_holds_is_multiplied_exactly(tokens):
    layer = layer_of()
    with torch.no_grad():
        layer.weight.values.copy_(torch.randint(-2, 3, layer.weight.values.shape))
        layer.bias.copy_(torch.randint(-9, 9, (96,)))
        x = torch.randint(-100, 100, (tokens, 80)).float()
        assert torch.equal(layer(x).double(), exact(layer, x))


def test_kernels_in_pairs_take_it_where_there_are_any():
    if not any(f in rarefy.backend_info()["machine"] for f in ("amx_bf16", "avx512_bf16_fast")):
        pytest.skip("no kernel in bf16 pairs on this machine")
    x = torch.randn(64, 80)
    found = rarefy.explain(layer_of(), x)
    assert found["kernel"] in ("amx_linear", "avx512_bf16_linear")
    assert "bf16 rounding x, 64 tokens, f32 -> f32" in found["problem"]
    exactly = rarefy.explain(layer_of(spec="block:32x1@0.5:bf16"), x)
    assert exactly["kernel"] not in ("amx_linear", "avx512_bf16_linear")
    layer = layer_of()
    with torch.no_grad():
        assert not torch.equal(layer(x), layer_of(spec="block:32x1@0.5:bf16")(x))
        rounded = x.bfloat16().float()
        got, wanted = layer(x), exact(layer, rounded)
    assert ((got.double() - wanted).abs() <= bound(layer, rounded) * 81 * UF / U * 2).all()


def test_gradients_are_those_of_the_layer_that_rounds_nothing():
    rounding, exactly = layer_of(), layer_of(spec="block:32x1@0.5:bf16")
    results = []
    for layer in (rounding, exactly):
        x = torch.randn(70, 80, generator=torch.Generator().manual_seed(1)).requires_grad_()
        dy = torch.randn(70, 96, generator=torch.Generator().manual_seed(2))
        layer(x).backward(dy)
        results.append((x.grad, layer.weight.values.grad, layer.bias.grad))
    assert results[0][1].dtype == torch.bfloat16
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_forward_mode_vmap_and_compiled_graphs():
    layer = layer_of()
    x, dx = torch.randn(3, 66, 80), torch.randn(3, 66, 80)
    values = layer.weight.values.detach()

    def call(x):
        plan = layer.weight.plan
        return ops.bsr_linear_rounded(x, values, plan, layer.bias.detach(), 96, 80, activation="relu")

    y, dy = torch.func.jvp(call, (x,), (dx,))
    assert torch.equal(dy != 0, y > 0)
    assert torch.equal(torch.vmap(call)(x), call(x))
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)
        got = compiled(x[0])
    assert ((got.double() - exact(layer, x[0])).abs() <= bound(layer, x[0])).all()


def test_the_op_passes_torchs_own_checks():
    layer = layer_of(n=64, k=48)
    args = (
        torch.randn(70, 48, requires_grad=True),
        layer.weight.values.detach().requires_grad_(),
        layer.weight.plan,
        layer.bias.detach().requires_grad_(),
        64,
        48,
    )
    torch.library.opcheck(torch.ops.rarefy.bsr_linear_rounded, args)


def test_autocast_rounds_results_too():
    layer, x = layer_of(), torch.randn(64, 80)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_networks_round_hidden_features_within_their_bound(activation):
    torch.manual_seed(0)
    act = {"gelu": nn.GELU(), "relu": nn.ReLU(), "silu": nn.SiLU()}[activation]
    model = nn.Sequential(nn.Linear(64, 256), act, nn.Linear(256, 64))
    rarefy.sparsify(model, {r"[02]": SPEC}, measure=False)
    assert fuse(model) == ["0"]
    x = torch.randn(100, 64)
    up, down = model[0], model[2]
    with torch.no_grad():
        for _ in range(2):
            got = model(x)
        hidden = act(exact(up, x))
        off = 1.2 * bound(up, x) + 2.0**-12 * hidden.abs() + 1e-30
        off = off * (1 + U) + U * hidden.abs()
        w = down.weight.to_dense().double()
        gamma = 257 * UF / (1 - 257 * UF)
        allowed = off @ w.abs().T + gamma * (hidden.abs() @ w.abs().T + down.bias.double().abs()) * 1.01
    assert ((got.double() - (hidden @ w.T + down.bias.double())).abs() <= allowed).all()


def test_specs_say_it():
    for text in (SPEC, "block:16x16@nonzero:bf16x"):
        spec = Spec.parse(text)
        assert (str(spec), spec.dtype, spec.rounds_x) == (text, torch.bfloat16, True)
    keys = {"block_shape": (32, 1), "density": 0.5, "dtype": torch.bfloat16, "rounds_x": True}
    assert Spec.parse(keys) == Spec.parse(SPEC)
    assert not Spec.parse("block:32x1@0.5:bf16").rounds_x
    for bad in ("csr@0.5:bf16x", "block:32x1@0.5:f16x", "block:32x1@0.5:int8:bf16x", "block:32x1@0.5:bf16xx"):
        with pytest.raises(ValueError, match="must look like"):
            Spec.parse(bad)
    with pytest.raises(ValueError, match="rounds_x must go with blocks of dtype bfloat16"):
        Spec.parse({"block_shape": (32, 1), "density": 0.5, "rounds_x": True})
    with pytest.raises(TypeError, match="rounds_x must be a bool; got int"):
        Spec.parse(keys | {"rounds_x": 1})


def test_a_report_names_it_and_sparsify_can_take_it_back():
    model = nn.Sequential(nn.Linear(64, 64))
    report = rarefy.sparsify(model, SPEC, measure=False)
    assert "block:32x1:bf16x" in str(report)
    assert model[0].weight.rounds_x and "rounds_x=True" in repr(model[0])
    rarefy.sparsify(model, "block:32x1@0.25:bf16", measure=False)
    assert not model[0].weight.rounds_x


def test_files_and_state_dicts_keep_it(tmp_path):
    model = nn.Sequential(layer_of())
    path = tmp_path / "model.safetensors"
    rarefy.save_file(model, path)
    with safe_open(path, framework="pt") as file:
        entry = json.loads(file.metadata()["rarefy"])["modules"]["0.weight"]
    assert entry["activations"] == "bf16"
    other = nn.Sequential(nn.Linear(80, 96))
    rarefy.load_file(other, path)
    assert other[0].weight.rounds_x and other[0].weight.x_dtype == torch.float32
    x = torch.randn(64, 80)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    again = nn.Sequential(layer_of())
    again.load_state_dict(model.state_dict())
    rarefy.load_state_dict(again, model.state_dict())
    assert again[0].weight.rounds_x
    assert copy.deepcopy(model)[0].weight.rounds_x


def test_it_is_for_bf16_values_under_float32():
    layer = layer_of()
    for cast in (torch.bfloat16, torch.float16, torch.float64):
        assert not copy.deepcopy(layer).to(cast).weight.rounds_x
    assert not rarefy.BlockSparseLinear.from_dense(nn.Linear(64, 64).bfloat16(), SPEC).weight.rounds_x
    w = layer.weight
    pieces = {name: getattr(w, name) for name in w.pieces}
    with pytest.raises(ValueError, match="rounds_x must go with values in bfloat16"):
        rarefy.BsrWeight(*pieces.values(), shape=(96, 80), block_shape=(32, 1), rounds_x=True)
    metadata = w.metadata()
    assert type(w).from_pieces(pieces, metadata).rounds_x
    with pytest.raises(ValueError, match="activations in the metadata must be bf16; got 'int8'"):
        type(w).from_pieces(pieces, metadata | {"activations": "int8"})
    with pytest.raises(ValueError, match="rounds_x must go with values in bfloat16"):
        type(w).from_pieces(pieces, {k: v for k, v in metadata.items() if k != "x_dtype"})


def test_derived_data_is_shared_with_inputs_in_bf16():
    layer = layer_of()
    with torch.no_grad():
        layer(torch.randn(64, 80))
        held = layer.weight.derived_nbytes
        layer.weight.prepare(torch.bfloat16)
    assert layer.weight.derived_nbytes == held


def test_no_change_keeps_it():
    weight = layer_of().weight
    assert weight.stored_as(None).rounds_x and weight.stored_as(torch.bfloat16).rounds_x
    assert not weight.stored_as(None, rounds_x=False).rounds_x
    assert weight.stored_as(None, rounds_x=True).rounds_x
    assert not weight.stored_as(torch.float16).rounds_x


def test_another_format_that_is_loaded_does_not_round():
    model = nn.Sequential(layer_of(bias=False))
    csr = rarefy.BlockSparseLinear.from_dense(model[0].to_dense(), "csr@0.3:bf16")
    state = {f"0.{name}": tensor for name, tensor in csr.state_dict().items()}
    rarefy.load_state_dict(model, state)
    assert model[0].weight.format == "csr" and model[0].weight.x_dtype == torch.float32
    assert not model[0].weight.rounds_x
    x = torch.randn(3, 80)
    assert torch.equal(model(x), csr(x))


def test_on_cuda_there_is_a_kernel_that_refuses():
    assert torch._C._dispatch_has_kernel_for_dispatch_key("rarefy::bsr_linear_rounded", "CUDA")
    if torch.cuda.is_available():
        layer = layer_of().to("cuda")
        weight, x = layer.weight, torch.randn(2, 80, device="cuda")
        with pytest.raises(RuntimeError, match="x must be on the CPU; got a CUDA tensor"):
            ops.bsr_linear_rounded(x, weight.values, weight.pattern.plan, None, 96, 80)
