"""BitmapWeight, "bitmap@0.5" and "2:4": products, gradients, files, layers, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BitmapPattern, BitmapWeight, BlockSparseLinear, Spec
from rarefy.bitmap_ops import bitmap_columns, bitmap_linear, bitmap_plan
from rarefy.prune.masks import Mask


def random_weight(n=37, k=83, density=0.5, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    dense = torch.randn(n, k, dtype=torch.float64).to(dtype)
    return dense, BitmapWeight.from_dense(dense, density=density)


def two_of_four(n=24, k=64, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    dense = torch.randn(n, k, dtype=torch.float64).to(dtype)
    return dense, Spec.parse("2:4").make(dense)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 40])
@pytest.mark.parametrize("make", [random_weight, two_of_four])
def test_products_are_those_of_the_dense_matrix(make, tokens):
    _, weight = make()
    x, bias = torch.randn(tokens, weight.shape[1]), torch.randn(weight.shape[0])
    expected = x.double() @ weight.to_dense().double().T + bias.double()
    torch.testing.assert_close(weight.linear(x, bias).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        weight.linear(x, bias, activation="gelu").double(), nn.functional.gelu(expected), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("make", [random_weight, two_of_four])
def test_integers_come_out_exactly_whatever_family_is_forced(make):
    dense, _ = make()
    dense = (dense * 2).round()
    weight = make()[1]
    weight = BitmapWeight.from_dense(dense, mask=weight.pattern.mask())
    x = torch.randint(-3, 4, (5, weight.shape[1])).float()
    expected = x @ weight.to_dense().T
    chosen = rarefy.explain(weight, x)
    assert chosen["kernel"].endswith("bitmap" if make is random_weight else "two_of_four")
    for candidate in chosen["candidates"]:
        if candidate["why_not"]:
            continue
        before = rarefy.force_impl(f"cpu:{candidate['family']}")
        try:
            assert torch.equal(weight.linear(x), expected)
        finally:
            rarefy.force_impl(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    weight = random_weight(dtype=dtype)[1]
    x = torch.randn(3, 83).to(dtype)
    expected = x.double() @ weight.to_dense().double().T
    y = weight.linear(x)
    assert y.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_narrow_values_keep_x_as_it_is():
    dense, _ = random_weight()
    weight = Spec.parse("bitmap@0.5:bf16").make(dense)
    assert (weight.dtype, weight.x_dtype) == (torch.bfloat16, torch.float32)
    x = torch.randn(2, 83)
    torch.testing.assert_close(weight.linear(x), x @ weight.to_dense().float().T, rtol=1e-5, atol=1e-5)
    assert weight.double().x_dtype is None and weight.linear(x.double()).dtype == torch.float64


def test_what_is_not_stored_meets_no_x():
    mask = torch.tensor([[True, False, True, False], [False, True, False, True]])
    weight = BitmapWeight.from_dense(torch.ones(2, 4), mask=mask)
    x = torch.tensor([[1.0, torch.inf, 2.0, torch.nan]])
    y = weight.linear(x)
    assert y[0, 0] == 3 and y[0, 1].isnan()


@pytest.mark.parametrize("make", [random_weight, two_of_four])
def test_gradients_of_any_order(make):
    _, weight = make(6, 12, dtype=torch.float64)
    plan, blocks = weight.pattern.plan, weight.pattern.blocks(torch.device("cpu")).plan
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    values = weight.values.detach().clone().requires_grad_()
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for given in (None, blocks):

        def call(x, values, bias, given=given):
            return bitmap_linear(x, values, plan, bias, 6, 12, given)

        assert torch.autograd.gradcheck(call, (x, values, bias), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, (x, values, bias))


def test_a_layer_trains_as_the_dense_one_under_its_mask():
    dense, weight = random_weight(seed=3)
    layer = BlockSparseLinear.from_weight(weight, torch.zeros(37))
    mask = weight.pattern.mask()
    other = nn.Parameter(dense * mask)
    x = torch.randn(2, 5, 83)
    layer(x).square().sum().backward()
    nn.functional.linear(x, other * mask).square().sum().backward()
    torch.testing.assert_close(layer.weight.values.grad, other.grad[mask], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        layer.weight.values.sub_(layer.weight.values.grad, alpha=1e-3)
        other.sub_(other.grad, alpha=1e-3)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, other * mask), rtol=1e-4, atol=1e-4)


def test_vmap_autocast_nested_and_compile():
    _, weight = random_weight()
    x = torch.randn(4, 2, 83)
    expected = weight.linear(x)
    args = (weight.values, weight.pattern.plan, None, 37, 83)
    assert torch.equal(torch.vmap(lambda x: bitmap_linear(x, *args))(x), expected)
    stacked = torch.stack([weight.values, 2 * weight.values])
    y = torch.vmap(lambda v: bitmap_linear(x[0], v, *args[1:]))(stacked)
    torch.testing.assert_close(y[1], 2 * y[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert weight.linear(x).dtype == torch.bfloat16
    nested = torch.nested.nested_tensor([x[0], x[1, :1]], layout=torch.jagged)
    torch.testing.assert_close(weight.linear(nested).values(), torch.cat([expected[0], expected[1, :1]]))
    compiled = torch.compile(BlockSparseLinear.from_weight(weight), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected)
    torch.library.opcheck(
        torch.ops.rarefy.bitmap_linear.default,
        (x, weight.values.detach(), *args[1:], None, "relu"),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 1), (1, 65)])
def test_edges(shape):
    weight = BitmapWeight.from_dense(torch.ones(shape))
    assert weight.nnz == shape[0] * shape[1] and torch.equal(weight.to_dense(), torch.ones(shape))
    y = weight.linear(torch.ones(2, shape[1]), torch.full((shape[0],), 3.0))
    assert torch.equal(y, torch.full((2, shape[0]), 3.0 + shape[1]))
    assert weight.linear(torch.ones(0, shape[1])).shape == (0, shape[0])


def test_sizes_in_memory():
    _, weight = two_of_four(64, 256)
    assert weight.nbytes == 64 * 256 * 2 + 64 * 256 // 8  # of 4 bytes each
    assert weight.density == 0.5 and weight.numel() == 64 * 256
    assert len(weight.pattern.plan) * 4 < 64 * 256 // 8 + 64 * 4 + 100


# Specs ---------------------------------------------------------------------------------------------


def test_two_of_four_keeps_the_two_largest_and_ties_the_earlier():
    dense = torch.tensor(
        [[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0, 2.0, 0.0, 2.0]]
    )
    weight = Spec.parse("2:4").make(dense)
    expected = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1, 0, 1]], dtype=torch.bool)
    assert torch.equal(weight.pattern.mask(), expected)
    assert weight.pattern.two_of_four and weight.spec_format() == "2:4"
    assert torch.equal(weight.values, dense[expected])
    scores = -torch.arange(16.0).view(2, 8)
    assert Spec.parse("2:4").make(dense, scores=scores).pattern.mask()[:, [0, 1, 4, 5]].all()
    ragged = Spec.parse("2:4").make(torch.ones(2, 6))
    assert ragged.pattern.counts().tolist() == [4, 4] and not ragged.pattern.two_of_four


def test_two_of_four_of_what_is_pruned_already():
    dense, weight = two_of_four()
    pruned = weight.to_dense().detach()
    again = Spec.parse("2:4@nonzero").make(pruned)
    assert again.pattern == weight.pattern and torch.equal(again.values, weight.values)
    pruned[3, 8:12] = 1
    with pytest.raises(ValueError, match="at most two of each four; got more in row 3, columns from 8"):
        Spec.parse("2:4@nonzero").make(pruned)
    with pytest.raises(ValueError, match="mask must have at most two of each four"):
        Spec.parse("2:4").make(dense, mask=torch.ones(dense.shape, dtype=torch.bool))
    few = torch.zeros(dense.shape, dtype=torch.bool)
    few[:, ::4] = True
    one = Spec.parse("2:4").make(dense, mask=few)
    assert torch.equal(one.pattern.mask(), few) and one.spec_format() == "bitmap"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("2:4", "2:4"),
        ("2:4@nonzero", "2:4@nonzero"),
        ("2:4:bf16", "2:4:bf16"),
        ("bitmap@0.25", "bitmap@0.25"),
        ("bitmap@nonzero:f16", "bitmap@nonzero:f16"),
        ({"two_of_four": True}, "2:4"),
        ({"bitmap_density": 0.5}, "bitmap@0.5"),
    ],
)
def test_specs_read_and_print(spec, text):
    assert str(Spec.parse(spec)) == text and Spec.parse(text) == Spec.parse(spec)


@pytest.mark.parametrize("spec", ["2:4@0.5", "3:4", "bitmap", "bitmap@2", "2:4@", {"two_of_four": False}])
def test_other_specs_are_refused(spec):
    with pytest.raises(ValueError, match=r"\[Spec.parse\]"):
        Spec.parse(spec)


def test_a_model_there_and_back(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    report = rarefy.sparsify(model, {"0": "2:4", "2": "bitmap@0.25"}, measure=False)
    assert [row.format for row in report.rows if row.format] == ["2:4", "bitmap"]
    x = torch.randn(3, 64)
    y = model(x)
    rarefy.save_file(model, tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    rarefy.load_file(other, tmp_path / "model.safetensors")
    assert torch.equal(other(x), y) and other[0].weight.pattern.two_of_four
    third = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    rarefy.load_state_dict(third, model.state_dict())
    assert torch.equal(third(x), y)
    rarefy.load_state_dict(other, third.state_dict())  # onto bitmaps
    dense = rarefy.desparsify(copy.deepcopy(model))
    torch.testing.assert_close((dense if isinstance(dense, nn.Module) else model)(x), y, rtol=1e-4, atol=1e-4)


def test_files_say_what_is_wrong(tmp_path):
    _, weight = random_weight(5, 13)
    entry, pieces = weight.metadata(), {"values": weight.values.detach(), "bitmap": weight.bitmap}
    assert entry == {"shape": [5, 13], "nnz": weight.nnz, "dtype": "f32"}

    def message(pieces, entry):
        with pytest.raises((ValueError, TypeError)) as error:
            BitmapWeight.from_pieces(pieces, entry)
        return str(error.value)

    extra = weight.bitmap.clone()
    extra[2, 1] |= 0x40
    assert "bits past column 13 must be 0; got bitmap[2, 1] with bit 6" in message(
        pieces | {"bitmap": extra}, entry
    )
    more = weight.bitmap.clone()
    more[0, 0] ^= 1
    assert "as the bitmap says" in message(pieces | {"bitmap": more}, entry)
    assert "as the metadata says" in message(pieces, entry | {"nnz": 3})
    assert "as the metadata says" in message(pieces, entry | {"dtype": "bf16"})
    assert "bitmap must be uint8" in message(pieces | {"bitmap": weight.bitmap.int()}, entry)
    assert "of shape (5, 2)" in message(pieces | {"bitmap": weight.bitmap[:4]}, entry)
    assert "must have the keys" in message(pieces, entry | {"nnzb": 3})
    assert "values must be floating point" in message(
        pieces | {"values": weight.values.to(torch.int8)}, entry
    )


def test_bad_arguments_of_the_op():
    _, weight = random_weight()
    x, args = torch.randn(2, 83), (weight.values, weight.pattern.plan, None, 37, 83)
    for bad, error, text in (
        ((x[:, :80], *args), ValueError, "x's last dimension must be in_features=83"),
        ((x, weight.values[:-1], *args[1:]), ValueError, "values must be contiguous, of shape"),
        (
            (x, weight.values, torch.zeros(9, dtype=torch.int32), *args[2:]),
            ValueError,
            "plan must be a bitmap",
        ),
        ((x, weight.values, weight.pattern.plan.long(), *args[2:]), TypeError, "plan must be what"),
        ((x.double(), *args), TypeError, "values must have the dtype of x"),
        ((x, weight.values, weight.pattern.plan, torch.zeros(36), 37, 83), ValueError, "bias must be contig"),
    ):
        with pytest.raises(error, match=text.replace("(", r"\(")):
            bitmap_linear(*bad)
    with pytest.raises(ValueError, match="activation must be"):
        bitmap_linear(x, *args, None, "tanh")


def test_a_plan_is_what_masks_and_csr_say():
    dense, weight = random_weight()
    bits = Mask.pack(weight.pattern.mask()).bits
    assert torch.equal(bits, weight.bitmap)
    csr = rarefy.CsrWeight.from_dense(dense, mask=weight.pattern.mask())
    crow, col = bitmap_columns(bitmap_plan(bits, 37, 83), 37, 83)
    assert torch.equal(crow, csr.crow_indices) and torch.equal(col, csr.col_indices)
    assert torch.equal(csr.values, weight.values)


# Modules -------------------------------------------------------------------------------------------


def test_copies_pickles_and_moves():
    _, weight = two_of_four()
    x = torch.randn(2, 64)
    y = weight.linear(x)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert torch.equal(other.linear(x), y) and other.values is not weight.values
    assert copy.deepcopy(weight).pattern is weight.pattern
    half = copy.deepcopy(weight).half()
    assert half.dtype == torch.float16 and half.bitmap.dtype == torch.uint8
    assert half.linear(x.half()).dtype == torch.float16
    meta = copy.deepcopy(weight).to("meta")
    assert meta.linear(x.to("meta")).shape == y.shape
    back = meta.to_empty(device="cpu")
    assert torch.equal(back.bitmap, weight.bitmap)
    weight.reset_parameters(torch.Generator().manual_seed(1))
    assert weight.values.abs().max() <= 1 / 32**0.5 and not torch.equal(weight.linear(x), y)


def test_edits_of_the_bitmap_are_put_back_and_ddps_taken_over():
    _, weight = random_weight()
    x, before = torch.randn(2, 83), weight.bitmap.clone()
    y = weight.linear(x)
    weight.bitmap[0, 0] ^= 1
    with pytest.warns(UserWarning, match="bitmap was written to and is put back"):
        assert torch.equal(weight.linear(x), y)
    assert torch.equal(weight.bitmap, before)
    other = BitmapWeight.from_dense(torch.randn(37, 83), density=0.5)
    with torch.no_grad():  # as a broadcast of rank 0's tensors
        for mine, theirs in zip(
            (*weight.parameters(), *weight.buffers()), (*other.parameters(), *other.buffers()), strict=True
        ):
            mine.copy_(theirs)
    assert torch.equal(weight.linear(x), other.linear(x))
    assert weight.pattern == other.pattern


def test_state_dicts_of_other_patterns_are_refused_before_anything_changes():
    _, weight = random_weight()
    _, other = random_weight(seed=5)
    layer = BlockSparseLinear.from_weight(weight)
    kept = weight.values.detach().clone()
    with pytest.raises(ValueError, match="bitmap must be that of this module's pattern"):
        layer.load_state_dict(BlockSparseLinear.from_weight(other).state_dict())
    assert torch.equal(weight.values, kept)
    layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(weight.values, kept)


def test_patterns_compare_and_refuse():
    pattern = random_weight()[1].pattern
    assert pattern == BitmapPattern(pattern.bits, shape=(37, 83)) != random_weight(seed=1)[1].pattern
    assert pattern != 3 and hash(pattern) == hash(pickle.loads(pickle.dumps(pattern)))
    with pytest.raises(ValueError, match="BitmapPattern"):
        BitmapPattern(pattern.bits, shape=(37, 90))
    with pytest.raises(TypeError, match="meta device"):
        BitmapPattern(pattern.bits.to("meta"), shape=(37, 83))


def test_scores_do_not_choose_what_is_stored_already():
    _, weight = two_of_four()
    pruned = weight.to_dense().detach()
    scores = torch.where(pruned == 0, 1.0, 0.0)  # would keep the zeros and lose every weight
    with pytest.raises(ValueError, match="scores rank what 2:4 keeps, not what 2:4@nonzero stores"):
        Spec.parse("2:4@nonzero").make(pruned, scores=scores)
    kept = Spec.parse("2:4@nonzero").make(pruned, scores=scores, mask=pruned != 0)
    assert torch.equal(kept.to_dense(), pruned)
    with pytest.raises(TypeError, match=r"scores must be a torch\.Tensor; got list"):
        Spec.parse("2:4").make(pruned, scores=[1.0])


def test_blocks_elsewhere_are_copied_once():
    pattern = random_weight()[1].pattern
    meta = torch.device("meta")
    assert pattern.blocks(meta) is pattern.blocks(meta)
    assert pattern.blocks(torch.device("cpu")) is pattern.blocks(torch.device("cpu"))
    assert pattern.blocks(meta).is_meta and not pattern.blocks(torch.device("cpu")).is_meta


@pytest.mark.parametrize("density", [0.5, 0.3])
def test_a_layer_that_is_not_strict_takes_another_pattern_over(density):
    _, weight = random_weight()
    _, other = random_weight(seed=5, density=density)
    layer, theirs = BlockSparseLinear.from_weight(weight), BlockSparseLinear.from_weight(other)
    values, x = weight.values, torch.randn(2, 83)
    layer(x).sum().backward()
    gradient = values.grad.new_zeros(37, 83).masked_scatter(weight.pattern.mask(), values.grad)
    rarefy.set_strict_pattern(layer, False)
    layer.load_state_dict(theirs.state_dict())
    assert weight.values is values and weight.pattern == other.pattern
    assert torch.equal(layer(x), theirs(x)) and torch.equal(weight.bitmap, other.bitmap)
    both = torch.where(weight.pattern.mask(), gradient, 0)  # as PatternChange moves it
    mask = weight.pattern.mask()
    assert torch.equal(values.grad.new_zeros(37, 83).masked_scatter(mask, values.grad), both)
    with pytest.raises(ValueError, match="values must come with another pattern"):
        layer.load_state_dict({"weight.bitmap": random_weight(seed=9)[1].bitmap}, strict=False)
    with pytest.raises(TypeError, match="bitmap must be uint8"):
        layer.load_state_dict(theirs.state_dict() | {"weight.bitmap": other.bitmap.long()})
    assert weight.pattern == other.pattern


@pytest.mark.parametrize("assign", [False, True])
def test_after_the_meta_device_the_first_pattern_is_taken_over(assign):
    _, weight = random_weight()
    _, other = random_weight(seed=5)
    theirs = BlockSparseLinear.from_weight(other)
    layer = BlockSparseLinear.from_weight(weight).to("meta")
    if not assign:
        layer.to_empty(device="cpu")
    layer.load_state_dict(theirs.state_dict(), assign=assign)
    x = torch.randn(3, 83)
    assert torch.equal(layer(x), theirs(x)) and layer.weight.pattern == other.pattern
    with pytest.raises(ValueError, match="bitmap must be that of this module's pattern"):
        layer.load_state_dict(BlockSparseLinear.from_weight(random_weight(seed=6)[1]).state_dict())
    narrow = BlockSparseLinear.from_weight(random_weight(seed=7, density=0.2)[1]).to("meta")
    narrow.load_state_dict(theirs.state_dict(), assign=True)
    assert torch.equal(narrow(x), theirs(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_dense_matrix_in_a_compiled_graph(backend):
    _, weight = random_weight()
    compiled = torch.compile(lambda: weight.to_dense() * 2, backend=backend, fullgraph=True)
    assert torch.equal(compiled(), 2 * weight.to_dense())
    compiled().sum().backward()
    assert torch.equal(weight.values.grad, torch.full_like(weight.values, 2))
