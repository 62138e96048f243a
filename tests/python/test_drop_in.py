"""What works with nn.Linear works with a sparse layer, or fails before anything changes."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

import rarefy
from rarefy import BlockSparseLinear, BsrWeight, CsrWeight, PseudoBlockSparseLinear
from tiny import FEED, Tiny, assert_unchanged, ids, snapshot


def layer(k=10, n=7, block_shape=(4, 3), **options) -> BlockSparseLinear:
    return BlockSparseLinear(k, n, block_shape=block_shape, **options)


# Modules around it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [r"layers\.1\.linear[12]", r"layers\.1\.linear2", r"layers\.\d\.linear[12]"]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_in_eval_with_a_padding_mask(names):
    """The dense first layer turns on nested tensors, which then reach the sparse ones."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    x, mask = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    with torch.inference_mode():
        expected = encoder(x, src_key_padding_mask=mask)
        rarefy.sparsify(encoder, {names: "block:4x4@1"}, measure=False)
        y = encoder(x, src_key_padding_mask=mask)
    torch.testing.assert_close(y[~mask], expected[~mask])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs(layout):
    module = layer()
    parts = [torch.randn(n, 10, requires_grad=True) for n in (3, 1, 4)]
    y = module(torch.nested.as_nested_tensor(parts, layout=layout))
    assert y.is_nested and y.layout == layout
    for part, piece in zip(parts, y.unbind(), strict=True):
        torch.testing.assert_close(piece, module(part))
    sum(piece.square().sum() for piece in y.unbind()).backward()
    twin = copy.deepcopy(module)
    twin.zero_grad()
    sum(twin(part.detach()).square().sum() for part in parts).backward()
    torch.testing.assert_close(module.weight.values.grad, twin.weight.values.grad)


class Doubled(nn.Module):
    def forward(self, values):
        return 2 * values

    def right_inverse(self, values):
        return values / 2


@pytest.mark.parametrize("make", [layer, lambda: BlockSparseLinear.from_dense(nn.Linear(10, 7), "csr@0.5")])
def test_values_can_be_parametrized(make):
    module = make()
    x = torch.randn(3, 10)
    before = module(x)
    parametrize.register_parametrization(module.weight, "values", Doubled())
    torch.testing.assert_close(module(x), before)
    module(x).sum().backward()
    original = module.weight.parametrizations["values"].original
    assert original.grad.shape == original.shape and "values" not in dict(module.weight.named_parameters())
    twin = copy.deepcopy(module)
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(twin(x), before)
    with pytest.raises(ValueError, match=r"^\[desparsify\] .*parametrized.*; got 0"):
        rarefy.desparsify(nn.Sequential(module))
    torch.testing.assert_close(module.double()(x.double()).float(), before)
    module.float()
    parametrize.remove_parametrizations(module.weight, "values")
    torch.testing.assert_close(module(x), before)
    with pytest.raises(ValueError, match="shape"):
        parametrize.register_parametrization(module.weight, "values", nn.Unflatten(0, (1, -1)))
    torch.testing.assert_close(module(x), before)


def test_a_vector_of_parameters_ties_nothing():
    model = Tiny()
    parameters = list(model.parameters())
    vector_to_parameters(parameters_to_vector(parameters), parameters)
    report = rarefy.sparsify(model, {f"{FEED}|head": "block:4x4@0.5"}, measure=False)
    assert len(report.replaced) == 5
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
    assert model(ids()).isfinite().all()


@pytest.mark.parametrize("where", ["tensor", "accumulated"])
def test_hooks_on_gradients_are_reasons_to_stay(where):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    register = "register_hook" if where == "tensor" else "register_post_accumulate_grad_hook"
    getattr(model[0].weight, register)(lambda grad: None)
    report = rarefy.sparsify(model, {r"\d": "block:4x4@0.5"}, measure=False)
    assert "hook" in report["0"].reason and report["1"].reason is None
    getattr(model[1].weight.values, register)(lambda grad: None)
    with pytest.raises(ValueError, match=r"^\[desparsify\] .*hook.*; got 1"):
        rarefy.desparsify(model)


class Odd(BlockSparseLinear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_desparsify_refuses_layers_with_a_forward_of_their_own():
    own = layer(8, 8)
    own.forward = lambda x: x
    for odd in (Odd(8, 8, block_shape=(4, 4)), own):
        model = nn.Sequential(layer(8, 8), odd)
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"^\[desparsify\] .*forward of its own.*; got 1, a \w+"):
            rarefy.desparsify(model)
        assert_unchanged(model, before)


class Quantized(torch.Tensor):
    """Another library's weight, which knows few operations."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    def __repr__(self):
        return "Quantized"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].shape)
        raise NotImplementedError(str(func))


def test_tensors_of_other_libraries_are_reasons_to_stay():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(Quantized((8, 8)))
    report = rarefy.sparsify(model, {r"\d": "block:4x4@0.5"}, measure=False)
    assert "Quantized" in report["0"].reason and report["1"].reason is None


# Arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BlockSparseLinear, PseudoBlockSparseLinear])
def test_positional_density_says_what_to_write(kind):
    with pytest.raises(TypeError, match=r"must be given by name: density=….*; got 0\.5"):
        kind(256, 256, True, 0.5)
    with pytest.raises(TypeError, match=r"; got 'cpu', torch.float32"):
        kind(256, 256, True, "cpu", torch.float32)  # as nn.Linear takes them


def test_strided_biases_work():
    linear = nn.Linear(10, 7)
    linear.bias = nn.Parameter(torch.randn(14)[::2])
    model = nn.Sequential(linear)
    x = torch.randn(3, 10)
    expected = model(x)
    rarefy.sparsify(model, {"0": "block:4x4@1"}, measure=False)
    assert not model[0].bias.is_contiguous()
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_a_default_device_for_new_tensors_disturbs_nothing(default, tmp_path):
    import numpy as np
    import scipy.sparse

    dense = torch.randn(9, 11)
    index = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 3])
    model = nn.Sequential(nn.Linear(11, 9), nn.Linear(9, 8))
    other, x = copy.deepcopy(model), torch.randn(3, 11)
    averaged = copy.deepcopy(model)
    torch.set_default_device(default)
    try:
        for spec in ("block:4x3@0.5", "csr@0.5"):
            sparse = BlockSparseLinear.from_dense(other[0], spec)
            assert sparse.weight.to_dense().device.type == "cpu"
            sparse.weight.reset_parameters()
            sparse.weight.zero_padding_()
            sparse.weight.to_torch(**({"pad": True} if "block" in spec else {}))
        BsrWeight.from_dense(dense, block_shape=(4, 3), scores=dense, density=0.5)
        BsrWeight(dense.new_zeros(2, 4, 3), *index, shape=(9, 11), block_shape=(4, 3))
        with pytest.raises(ValueError, match=r"values\[1, 0, 2\]"):
            BsrWeight(dense.new_ones(2, 4, 3), *index, shape=(12, 11), block_shape=(4, 3))
        assert CsrWeight.from_scipy(scipy.sparse.csr_array(np.eye(3))).device.type == "cpu"
        rarefy.sparsify(model, {"0": "block:4x4@0.5", "1": "csr@0.5"}, measure=True, tokens=4)
        rarefy.sparsify(model, {"0": "block:4x4@0.25"}, measure=False)
        rarefy.save_file(model, tmp_path / "m.safetensors")
        rarefy.load_file(averaged, tmp_path / "m.safetensors")
        rarefy.load_state_dict(other, model.state_dict())
        copy.deepcopy(model).load_state_dict(model.state_dict())
        rarefy.desparsify(copy.deepcopy(model))
        PseudoBlockSparseLinear.from_sparse(model[0]).to_sparse()
        assert layer().weight.device.type == default
    finally:
        torch.set_default_device(None)
    assert torch.equal(averaged(x), model(x)) and torch.equal(other(x), model(x))


# A weight that behaves like a matrix ---------------------------------------------------------------


@pytest.mark.parametrize("spec", ["block:4x3@0.5", "csr@0.5"])
def test_the_weight_answers_as_a_matrix_or_says_what_to_use(spec):
    module = BlockSparseLinear.from_dense(nn.Linear(10, 7), spec)
    weight = module.weight
    assert (weight.numel(), weight.dim(), weight.ndim, weight.size(), weight.size(1)) == (
        70,
        2,
        2,
        (7, 10),
        10,
    )
    assert weight.requires_grad
    weight.requires_grad = False
    assert not weight.values.requires_grad and not weight.requires_grad
    assert weight.requires_grad_() is weight and weight.values.requires_grad
    advice = {"data": "weight.values.data", "T": "to_dense().T", "grad": "weight.values.grad"}
    for name, part in advice.items():
        with pytest.raises(
            AttributeError, match=rf"^\[\w+Weight\] {name} must .*; got a \w+Weight"
        ) as caught:
            getattr(weight, name)
        assert part in str(caught.value)
        assert not hasattr(weight, name)
    x = torch.randn(3, 10)
    for product in (
        lambda: weight @ x.T,
        lambda: torch.randn(3, 7) @ weight,
        lambda: torch.matmul(torch.randn(3, 7), weight),
    ):
        with pytest.raises(TypeError, match=r"^\[\w+Weight\] .*F\.linear\(x, weight\).*; got @"):
            product()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = weight.nonsense


# Padding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [nn.init.xavier_uniform_, lambda t: t.data.fill_(float("nan"))])
def test_what_was_written_to_padding_is_zeroed_before_use_and_save(fill, tmp_path):
    module = layer(10, 7, density=1.0)
    fill(module.weight.values)
    if module.weight.values.isnan().any():
        with torch.no_grad():  # only the padding is left NaN
            inside = BsrWeight.from_dense(torch.ones(7, 10), block_shape=(4, 3)).values.bool()
            module.weight.values[inside] = 0.5
    x = torch.randn(3, 10, requires_grad=True)
    dense = module.to_dense()
    y = module(x)
    torch.testing.assert_close(y, dense(x))
    y.sum().backward()
    assert x.grad.isfinite().all()
    fill(module.weight.values)
    other = copy.deepcopy(module)
    other.load_state_dict(module.state_dict())
    rarefy.save_file(nn.Sequential(module), tmp_path / "m.safetensors")
    rarefy.load_file(nn.Sequential(nn.Linear(10, 7)), tmp_path / "m.safetensors")
    rarefy.load_state_dict(layer(10, 7), module.state_dict())


# Files ---------------------------------------------------------------------------------------------


def test_a_loaded_model_owns_its_memory(tmp_path):
    model, path = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 32)), tmp_path / "m.safetensors"
    rarefy.sparsify(model, {"0": "block:4x4@0.5", "1": "csr@0.5"}, measure=False)
    rarefy.save_file(model, path)
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 32))
    loaded = [nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 32)), meta, copy.deepcopy(model)]
    loaded.append(nn.Sequential(*(layer(k, 32, (2, 2), density=0.1) for k in (40, 32))))
    for skeleton in loaded:
        rarefy.load_file(skeleton, path)
    mapped = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 32))
    rarefy.load_file(mapped, path, mmap=True)
    size = path.stat().st_size
    with path.open("r+b") as file:  # in place: the same file
        file.seek(size // 4)
        file.write(b"\xff" * (size - size // 4))
    x = torch.randn(3, 40)
    for skeleton in loaded:
        assert torch.equal(skeleton(x), model(x))
    assert not torch.equal(mapped(x), model(x))
    os.truncate(path, 16)
    for skeleton in loaded:
        assert torch.equal(skeleton(x), model(x))


@pytest.mark.parametrize("kind", ["bsr", "csr"])
def test_weights_tied_by_their_parameter_are_stored_once(kind, tmp_path):
    spec = "block:4x4@0.5" if kind == "bsr" else "csr@0.5"
    first = BlockSparseLinear.from_dense(nn.Linear(16, 16), spec)
    weight = type(first.weight).from_pattern(first.weight.values, first.weight.pattern)
    model = nn.Sequential(first, BlockSparseLinear.from_weight(weight, torch.ones(16)))
    rarefy.save_file(model, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size < 1.5 * first.weight.nbytes + 1500
    x = torch.randn(3, 16)
    twin = copy.deepcopy(model)
    assert twin[0].weight.values is twin[1].weight.values
    with torch.no_grad():
        twin[0].weight.values.zero_()
    for skeleton in (twin, nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))):
        rarefy.load_file(skeleton, tmp_path / "m.safetensors")
        assert torch.equal(skeleton(x), model(x))
        assert skeleton[0].weight.values is skeleton[1].weight.values
    assert len(rarefy.desparsify(model)) == 2 and model[0].weight is model[1].weight


def test_one_parameter_on_two_patterns_is_stored_for_each(tmp_path):
    first = layer(8, 8, (2, 2), density=0.5)
    weight = BsrWeight.from_pattern(first.weight.values, layer(8, 8, (2, 2), density=0.5).weight.pattern)
    model = nn.Sequential(first, BlockSparseLinear.from_weight(weight, torch.ones(8)))
    rarefy.save_file(model, tmp_path / "m.safetensors")
    x = torch.randn(3, 8)
    for skeleton in (copy.deepcopy(model), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))):
        rarefy.load_file(skeleton, tmp_path / "m.safetensors")
        assert torch.equal(skeleton(x), model(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), 1.0

    def get_extra_state(self):
        return torch.tensor([self.scale])

    def set_extra_state(self, state):
        self.scale = state.item()


def test_tensor_extra_state_loads(tmp_path):
    model, other = Scaled(), Scaled()
    model.scale = 2.5
    for outer, inner in ((model, other), (nn.Sequential(model), nn.Sequential(Scaled()))):
        rarefy.save_file(outer, tmp_path / "m.safetensors")
        rarefy.load_file(inner, tmp_path / "m.safetensors")
        assert next(m for m in inner.modules() if isinstance(m, Scaled)).scale == 2.5
        rarefy.load_state_dict(inner, outer.state_dict())


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"decoder.weight": "mine"}, ValueError),
        ({"note": "embeddings.weight"}, ValueError),
        ({"rarefy": "x"}, ValueError),
        ({"note": 1}, TypeError),
        ({"note": "\ud800"}, ValueError),
        ({"\udfff": "note"}, ValueError),
    ],
)
def test_metadata_that_would_not_load_is_refused(metadata, kind, tmp_path):
    with pytest.raises(kind, match=r"^\[save_file\] metadata .*; got "):
        rarefy.save_file(Tiny(), tmp_path / "m.safetensors", metadata=metadata)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "metadata", [{}, {"format": "pt"}, {"": ""}, {"é\n\x00": "\"{}'" * 99}, {"__metadata__": "x"}]
)
def test_metadata_that_saves_loads(metadata, tmp_path):
    model, other = Tiny(), Tiny()
    rarefy.sparsify(model, {FEED: "block:4x4@0.5"}, measure=False)
    rarefy.save_file(model, tmp_path / "m.safetensors", metadata=metadata)
    rarefy.load_file(other, tmp_path / "m.safetensors")
    assert torch.equal(other(ids()), model(ids()))


def test_an_expanded_buffer_is_named_before_anything_changes(tmp_path):
    model = nn.Module()
    model.fc = nn.Linear(8, 8)
    model.register_buffer("scale", torch.ones(8))
    rarefy.save_file(model, tmp_path / "m.safetensors")
    rarefy.sparsify(model, {"fc": "block:4x4@0.5"}, measure=False)
    model.scale = torch.zeros(1).expand(8)
    before = snapshot(model)
    for load in (
        lambda: rarefy.load_file(model, tmp_path / "m.safetensors"),
        lambda: rarefy.load_state_dict(model, model.state_dict()),
    ):
        with pytest.raises(ValueError, match=r"^\[load_\w+\] .*scale.*; got strides \(0,\)|every tensor"):
            load()
        assert_unchanged(model, before)


def test_two_forwards_before_a_backward_with_buffers_broadcast_between():
    module = layer(10, 7, density=1.0)  # padded
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        total = 0
        for _ in range(2):
            for buffer in module.buffers():
                buffer.copy_(buffer.clone())  # as DDP does before each forward
            total = total + module(torch.randn(3, 10)).square().sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("spec", ["block:4x3@0.5", "csr@0.5", "block:4x3@0.5:bf16"])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_exported_programs_are_saved_and_loaded(spec, strict, tmp_path):
    other = layer()  # alive, and written to: not for this export to look after
    nn.init.ones_(other.weight.values)
    other.weight.col_indices.copy_(other.weight.col_indices.clone())
    module, x = BlockSparseLinear.from_dense(nn.Linear(10, 7), spec), torch.randn(4, 10)
    batch = ({0: torch.export.Dim.DYNAMIC},)
    torch.export.save(
        torch.export.export(module, (x,), strict=strict, dynamic_shapes=batch), tmp_path / "m.pt2"
    )
    program = torch.export.load(tmp_path / "m.pt2")
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert len(calls) <= 3 and sum("rarefy" in call for call in calls) == 1, calls
    again = torch.cat([x, x])
    assert torch.equal(program.module()(again), module(again))
