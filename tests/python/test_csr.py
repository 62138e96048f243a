"""CSR as a second format: conversions, products and gradients, the patcher, files, and stored dtypes."""

import copy
import json
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn

import rarefy
from helpers import assert_within_bound
from rarefy import BlockSparseLinear, BsrWeight, CsrSpec, CsrWeight, Spec, ops
from test_serialization import assert_same_state, command, read  # noqa: F401 (a fixture)
from tiny import FEED, Tiny, ids

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]


def small(shape=(7, 10), density=0.4, dtype=torch.float32) -> CsrWeight:
    return CsrWeight.from_dense((torch.randn(shape) * 20).to(dtype), density=density)


# The container -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 10), (1, 1), (0, 5), (5, 0), (33, 65)])
def test_keeps_the_largest_elements_bit_for_bit(shape, dtype):
    dense = (torch.randn(shape) * 20).to(dtype)
    assert torch.equal(CsrWeight.from_dense(dense).to_dense(), dense)
    weight = CsrWeight.from_dense(dense, density=0.3)
    assert weight.values.shape == (round(0.3 * dense.numel()),) and weight.nnz == weight.nnzb
    kept = weight.block_mask()
    assert torch.equal(weight.to_dense(), torch.where(kept, dense, 0))
    if 0 < weight.nnz < dense.numel():
        assert dense[kept].double().abs().min() >= dense[~kept].double().abs().max()
    assert weight.nbytes == weight.nnz * (dtype.itemsize + 4) + 4 * (shape[0] + 1)
    assert weight.density == (weight.nnz / dense.numel() if dense.numel() else 0)


def test_is_the_1x1_blocks_in_other_clothes():
    dense, x, bias = torch.randn(33, 65), torch.randn(5, 65), torch.randn(33)
    csr = CsrWeight.from_dense(dense, density=0.2)
    bsr = BsrWeight.from_dense(dense, block_shape=(1, 1), density=0.2)
    assert csr.pattern == bsr.pattern and torch.equal(csr.values, bsr.values.flatten())
    assert torch.equal(csr.linear(x, bias), bsr.linear(x, bias))
    assert torch.equal(nn.functional.linear(x, csr, bias), csr.linear(x, bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_and_gradients(dtype, device):
    layer = BlockSparseLinear.from_weight(small((33, 65), dtype=dtype), torch.randn(33, dtype=dtype))
    layer = layer.to(device)
    x = torch.randn(2, 6, 65, dtype=dtype, device=device, requires_grad=True)
    upstream = torch.randn(2, 6, 33, dtype=dtype, device=device)
    y = layer(x)
    y.backward(upstream)
    w, b = layer.weight.to_dense().detach().double(), layer.bias.detach().double()
    rows, dy = x.detach().double().reshape(12, 65), upstream.double().reshape(12, 33)
    checks = [
        (y.detach().reshape(12, 33), rows @ w.T + b, rows.abs() @ w.abs().T + b.abs(), 66),
        (x.grad.reshape(12, 65), dy @ w, dy.abs() @ w.abs(), 33),
    ]
    kept = layer.weight.block_mask()
    checks.append((layer.weight.values.grad, (dy.T @ rows)[kept], (dy.abs().T @ rows.abs())[kept], 12))
    for got, expected, magnitude, terms in checks:
        assert_within_bound(got.cpu(), expected.cpu(), magnitude.cpu(), terms)


def test_gradients_of_higher_order():
    layer = BlockSparseLinear.from_weight(small(dtype=torch.float64))
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    values = layer.weight.values.detach().clone().requires_grad_()

    def product(x, values):
        return torch.func.functional_call(layer, {"weight.values": values}, (x,))

    torch.autograd.gradcheck(product, (x, values))
    torch.autograd.gradgradcheck(product, (x, values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8])
def test_scipy_and_torch_round_trips(dtype):
    weight = small(dtype=dtype)
    array = weight.to_scipy()
    assert isinstance(array, scipy.sparse.csr_array)
    assert np.array_equal(array.toarray(), weight.to_dense().detach().numpy())
    tensor = weight.to_torch()
    assert tensor.layout == torch.sparse_csr and torch.equal(tensor.to_dense(), weight.to_dense())
    for back in (CsrWeight.from_scipy(array), CsrWeight.from_torch(tensor)):
        assert back.pattern == weight.pattern and torch.equal(back.values, weight.values)
    with pytest.raises(TypeError, match=r"^\[CsrWeight.from_scipy\] .*; got bsr"):
        CsrWeight.from_scipy(array.tobsr())
    with pytest.raises(TypeError, match=r"^\[CsrWeight.from_torch\] .*sparse_csr tensor; got torch.strided"):
        CsrWeight.from_torch(torch.eye(2))


def test_bad_arrays_are_named():
    index = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    cases = [
        (lambda: CsrWeight(torch.ones(2, 1, 1), *index, shape=(2, 2)), "values must be of shape (2,)"),
        (lambda: CsrWeight(torch.ones(3), *index, shape=(2, 2)), "values must be of shape (2,); got (3,)"),
        (lambda: CsrWeight(torch.ones(2), *index, shape=(3, 2)), "crow_indices must have 4 elements"),
        (lambda: CsrWeight(torch.ones(2), *index, shape=(2, 1)), "col_indices[0]=1 out of range"),
    ]
    for call, part in cases:
        with pytest.raises(ValueError, match=r"^\[CsrWeight\] ") as caught:
            call()
        assert part in str(caught.value)


def test_copies_moves_and_state():
    weight = small()
    assert list(weight.state_dict()) == ["values", "crow_indices", "col_indices"]
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert other.pattern == weight.pattern and torch.equal(other.values, weight.values)
    assert copy.deepcopy(weight).half().dtype == torch.float16
    other = copy.deepcopy(weight)
    other.reset_parameters()
    assert not torch.equal(other.values, weight.values)
    other.load_state_dict(weight.state_dict())
    assert torch.equal(other.values, weight.values)


def test_layers_train_as_the_blocks_do():
    linear = nn.Linear(16, 8, dtype=torch.float64)
    layers = [BlockSparseLinear.from_dense(linear, s) for s in ("csr@0.5", "block:1x1@0.5")]
    assert "density=0.5, format=csr" in repr(layers[0])
    for layer in layers:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.1)
        for step in range(5):
            x = torch.randn(12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
    assert torch.equal(layers[0].to_dense().weight, layers[1].to_dense().weight)


# Specs, the patcher and the report -----------------------------------------------------------------


def test_specs():
    assert Spec.parse("csr@0.1") == CsrSpec(0.1) and str(CsrSpec(0.1)) == "csr@0.1"
    assert Spec.parse({"density": 0.25}) == CsrSpec(0.25)
    spec = Spec.parse("block:16x1@0.5:bf16")
    assert spec.dtype == torch.bfloat16 and str(spec) == "block:16x1@0.5:bf16"
    assert Spec.parse("csr@0.5:f16") == CsrSpec(0.5, dtype=torch.float16)
    for text in (
        "csr",
        "csr@",
        "csr:1@0.5",
        "csr@0.5:i8",
        "csr@0.5:bf16:bf16",
        "block:4x4:bf16@0.5",
        "csr@..",
    ):
        with pytest.raises(ValueError, match=r"^\[Spec.parse\] spec must look like .*; got "):
            Spec.parse(text)


def test_sparsify_reports_and_desparsifies():
    model, blocks = Tiny().eval(), Tiny().eval()
    blocks.load_state_dict(model.state_dict())
    report = rarefy.sparsify(model, {FEED: "csr@0.25", "once": "block:4x4@0.5"}, measure=False)
    rarefy.sparsify(blocks, {FEED: "block:1x1@0.25", "once": "block:4x4@0.5"}, measure=False)
    row = report["encoder.layer.0.intermediate.dense"]
    assert (row.format, row.density, row.dense_bytes) == ("csr", 0.25, 32 * 16 * 4)
    assert row.sparse_bytes == 128 * 8 + 33 * 4 and "csr" in str(report)
    assert torch.equal(model(ids()), blocks(ids()))
    assert isinstance(model.encoder.layer[0].output["dense"].weight, CsrWeight)
    rarefy.desparsify(model)
    rarefy.desparsify(blocks)
    assert_same_state(model, blocks)


# Files ---------------------------------------------------------------------------------------------


def csr_tiny() -> Tiny:
    model = Tiny().eval()
    rarefy.sparsify(model, {FEED: "csr@0.25", "once": "block:4x4@0.5", "head": "csr@0.5:bf16"}, measure=False)
    return model


def test_file_round_trip_into_dense_sparse_and_meta_models(tmp_path):
    model = csr_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    tensors, metadata = read(tmp_path / "m.safetensors")
    entry = json.loads(metadata["rarefy"])["modules"]["encoder.layer.1.intermediate.dense.weight"]
    assert entry == {"format": "csr", "shape": [32, 16], "nnz": 128, "dtype": "f32"}
    assert tensors["encoder.layer.1.intermediate.dense.weight.values"].shape == (128,)
    dense, other = Tiny().eval(), Tiny().eval()
    rarefy.sparsify(other, {FEED: "block:2x8@0.75", "once": "csr@0.5", "head": "csr@0.1"}, measure=False)
    with torch.device("meta"):
        meta = Tiny().eval()
    for skeleton in (dense, other, meta, csr_tiny()):
        rarefy.load_file(skeleton, tmp_path / "m.safetensors")
        assert_same_state(model, skeleton)
        assert torch.equal(model(ids()), skeleton(ids()))
        assert skeleton.head.weight.x_dtype == torch.float32


def test_state_dicts_bring_their_format(tmp_path):
    model, other = Tiny().eval(), Tiny().eval()
    rarefy.sparsify(model, {FEED: "csr@0.25"}, measure=False)
    rarefy.sparsify(other, {FEED: "block:2x8@0.75"}, measure=False)
    for target in (other, Tiny().eval()):
        rarefy.load_state_dict(target, model.state_dict())
        assert_same_state(model, target)
        assert isinstance(target.encoder.layer[0].output["dense"].weight, CsrWeight)


LIES = {
    "nnz_wrong": ({"nnz": 127}, "nnz|elements"),
    "nnz_text": ({"nnz": "128"}, "nnz"),
    "dtype_wrong": ({"dtype": "f16"}, "f16"),
    "format_unknown": ({"format": "csc"}, "format of .* must be one of .*bsr, .*csr"),
    "format_bsr": ({"format": "bsr"}, "keys"),
    "shape_wrong": ({"shape": [16, 32]}, "shape"),
    "x_dtype_unknown": ({"x_dtype": "f8"}, "x_dtype"),
    "block_shape_given": ({"block_shape": [1, 1]}, "keys"),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_in_files_are_named(tmp_path, name):
    from safetensors.torch import save_file as save_tensors

    change, said = LIES[name]
    model = csr_tiny()
    rarefy.save_file(model, tmp_path / "m.safetensors")
    tensors, metadata = read(tmp_path / "m.safetensors")
    root = json.loads(metadata["rarefy"])
    root["modules"]["encoder.layer.1.intermediate.dense.weight"].update(change)
    save_tensors(tensors, tmp_path / "m.safetensors", metadata | {"rarefy": json.dumps(root)})
    with pytest.raises((ValueError, TypeError), match=rf"^\[load_file\] (?s:.*)({said})"):
        rarefy.load_file(model, tmp_path / "m.safetensors")


# Values in a dtype of their own --------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["block:16x1@0.5:bf16", "csr@0.5:bf16", "block:4x4@0.5:f16"])
def test_narrow_values_under_wide_activations(spec, tmp_path):
    linear = nn.Linear(40, 32)
    layer = BlockSparseLinear.from_dense(linear, spec)
    weight = layer.weight
    assert weight.dtype.itemsize == 2 and weight.x_dtype == layer.bias.dtype == torch.float32
    plain = BlockSparseLinear.from_dense(linear, spec.rpartition(":")[0])
    assert weight.pattern == plain.weight.pattern  # chosen before rounding
    assert torch.equal(weight.values, plain.weight.values.to(weight.dtype))
    assert 2 * weight.values.nbytes == plain.weight.values.nbytes
    x = torch.randn(5, 40)
    dense = weight.to_dense().detach().double()
    expected = x.double() @ dense.T + layer.bias.detach().double()
    magnitude = x.double().abs() @ dense.abs().T + layer.bias.detach().double().abs()
    y = layer(x)
    assert_within_bound(y.detach(), expected, magnitude, 41)
    y.sum().backward()
    assert weight.values.grad.dtype == weight.dtype
    rarefy.save_file(nn.Sequential(layer), tmp_path / "m.safetensors")
    rarefy.load_file(other := nn.Sequential(nn.Linear(40, 32)), tmp_path / "m.safetensors")
    assert torch.equal(other[0](x), y)
    twin = BlockSparseLinear.from_dense(nn.Linear(40, 32), spec)
    rarefy.load_state_dict(twin, layer.state_dict())
    assert torch.equal(twin(x), y)
    with torch.inference_mode():
        assert copy.deepcopy(layer)(x).dtype == torch.float32


FAMILIES = ("ref", "scalar", "avx2", "avx512")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_shape", [(4, 3), (16, 1), (1, 1), (32, 32)])
def test_products_read_narrow_values_exactly(family, dtype, block_shape):
    if family not in ("ref", "scalar", *rarefy.backend_info()["cpu_features"]):
        pytest.skip(f"this machine has no {family}")
    before = rarefy.force_impl(f"cpu:{family}")
    try:
        weight = BsrWeight.from_dense(torch.randn(65, 97), block_shape=block_shape, density=0.5)
        values, wide = weight.values.detach().to(dtype), weight.values.detach().to(dtype).float()
        for tokens in (1, 3, 17, 70):  # 5 to 16 of f32 alone may go by kernels for a few
            x, dy, bias = torch.randn(tokens, 97), torch.randn(tokens, 65), torch.randn(65)
            sizes = (weight.plan, 65, 97)
            y = ops.bsr_linear(x, values, weight.plan, bias, 65, 97)
            assert y.dtype == torch.float32
            assert torch.equal(y, ops.bsr_linear(x, wide, weight.plan, bias, 65, 97))
            assert torch.equal(ops.bsr_grad_input(dy, values, *sizes), ops.bsr_grad_input(dy, wide, *sizes))
    finally:
        rarefy.force_impl(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_in_torch(dtype):
    weight = BsrWeight.from_dense(torch.randn(9, 7), block_shape=(4, 3), density=0.6)
    values = weight.values.detach().to(dtype).requires_grad_()
    x, bias = torch.randn(5, 7, requires_grad=True), torch.randn(9, requires_grad=True)
    torch.library.opcheck(
        torch.ops.rarefy.bsr_linear, (x, values, weight.plan, bias, 9, 7), rtol=2**-7, atol=2**-7
    )
    y = ops.bsr_linear(x, values, weight.plan, bias, 9, 7)
    dx, dvalues = torch.autograd.grad(y.square().sum(), (x, values))
    wide = values.detach().float().requires_grad_()
    again = ops.bsr_linear(x, wide, weight.plan, bias, 9, 7)
    wanted, wide_values = torch.autograd.grad(again.square().sum(), (x, wide))
    assert torch.equal(dx, wanted) and dvalues.dtype == dtype
    assert torch.equal(dvalues, wide_values.to(dtype))  # rounded once
    for wrong in (values.detach().double(), values.detach().float()):
        with pytest.raises(TypeError, match=r"^\[bsr_linear\] values must have the dtype of x"):
            ops.bsr_linear(x.detach().to(dtype), wrong, weight.plan, None, 9, 7)


def test_a_layer_with_narrow_values_on_every_device(device):
    """Values in bfloat16 under float32 x: read as they are on the CPU, widened in one place elsewhere."""
    layer = BlockSparseLinear.from_dense(nn.Linear(96, 64), "block:16x8@0.5:bf16").to(device)
    x = torch.randn(7, 96, device=device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.float32 and layer.weight.values.dtype == torch.bfloat16
    dense = layer.weight.to_dense().detach().double()
    torch.testing.assert_close(y.double(), x.double() @ dense.T + layer.bias.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), dense.sum(0).expand(7, -1), rtol=1e-5, atol=1e-5)
    assert layer.weight.values.grad.dtype == torch.bfloat16


def test_casting_a_layer_with_narrow_values():
    def layer():
        return BlockSparseLinear.from_dense(nn.Linear(40, 32), "block:4x4@0.5:bf16")

    assert layer().to("cpu").weight.x_dtype == torch.float32
    for cast in ("half", "bfloat16", "float", "double"):
        moved = getattr(layer(), cast)()
        assert moved.weight.x_dtype is None and moved.weight.dtype == moved.bias.dtype
        x = torch.randn(3, 40, dtype=moved.bias.dtype)
        assert moved(x).dtype == x.dtype


def test_the_command_reads_csr_and_narrow_values(tmp_path, command):  # noqa: F811
    rarefy.save_file(csr_tiny(), tmp_path / "m.safetensors")
    assert command("verify", tmp_path / "m.safetensors")["sparse_weights"] == 6
    command("convert", tmp_path / "m.safetensors", tmp_path / "again.safetensors", "--to", "dense")
    dense = read(tmp_path / "again.safetensors")[0]
    model = csr_tiny()
    rarefy.load_file(model, tmp_path / "m.safetensors")
    weight = model.encoder.layer[0].output["dense"].weight
    assert torch.equal(dense["encoder.layer.0.output.dense.weight"], weight.to_dense())


def test_files_that_the_command_made_of_dense_ones_load_as_csr(tmp_path, command):  # noqa: F811
    model, skeleton = (nn.Sequential(nn.Linear(11, 9)) for _ in range(2))
    rarefy.save_file(model, tmp_path / "dense.safetensors")
    options = ("--to", "csr", "--density", "0.5")
    command("convert", tmp_path / "dense.safetensors", tmp_path / "m.safetensors", *options)
    rarefy.load_file(skeleton, tmp_path / "m.safetensors")
    rarefy.sparsify(model, {"0": "csr@0.5"}, measure=False)
    assert_same_state(model, skeleton)
