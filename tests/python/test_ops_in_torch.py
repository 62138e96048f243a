"""The ops inside PyTorch: autograd of any order, autocast, opcheck, torch.compile and torch.export."""

import copy

import pytest
import torch
from torch.nn.functional import linear as dense_linear
from torch.utils._python_dispatch import TorchDispatchMode

import rarefy
from helpers import random_bsr
from rarefy import ops

# Odd edges, an empty block row, CSR, no block at all.
SHAPES = [((9, 7), (4, 3), 0.6), ((5, 6), (1, 1), 0.4), ((6, 8), (3, 4), 0.0)]
WITHOUT_AUTOGRAD = ("test_schema", "test_faketensor")
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def weight(shape, block_shape, density, dtype=torch.float64, device="cpu"):
    return random_bsr(shape, block_shape, density, dtype=dtype, device=device, empty_first_row=True)


def linear(bsr, x, values, bias):
    return ops.bsr_linear(x, values, bsr.plan, bias, *bsr.shape)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_first_and_second_order(shape, device):
    bsr = weight(*shape, device=device)
    (n, k), (r, c), plan = bsr.shape, bsr.block_shape, bsr.plan

    def leaf(*size):
        return torch.randn(*size, dtype=torch.float64, device=device, requires_grad=True)

    x, dy, values, bias = leaf(2, 3, k), leaf(2, 3, n), leaf(*bsr.values.shape), leaf(n)
    calls = [
        (lambda *t: ops.bsr_linear(*t[:2], plan, t[2], n, k), (x, values, bias)),
        (lambda *t: ops.bsr_grad_input(*t, plan, n, k), (dy, values)),
        (lambda *t: ops.bsr_grad_weight(*t, plan, r, c, n, k), (dy, x)),
    ]
    for call, inputs in calls:
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("rows", [(), (0,), (5,), (2, 3)])
def test_gradients_equal_those_of_the_dense_layer(rows, device):
    bsr = weight((12, 20), (4, 5), 0.5, device=device)
    w = bsr.dense().requires_grad_()
    x = torch.randn(*rows, 20, dtype=torch.float64, device=device, requires_grad=True)
    values = bsr.values.clone().requires_grad_()
    bias = torch.randn(12, dtype=torch.float64, device=device, requires_grad=True)
    dy = torch.randn(*rows, 12, dtype=torch.float64, device=device)
    got = torch.autograd.grad(linear(bsr, x, values, bias), (x, values, bias), dy)
    want = torch.autograd.grad(dense_linear(x, w, bias), (x, w, bias), dy)
    for g, e in zip(got, (want[0], bsr.gather(want[1]), want[2]), strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=1e-13)


class Calls(TorchDispatchMode):
    """Keeps the name and the arguments of each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.name(), args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needs", ["x", "values", "bias", "x values", "values bias", "x values bias"])
def test_only_the_gradients_asked_for_are_computed(needs):
    bsr = weight((8, 8), (4, 4), 0.5)
    tensors = {"x": torch.randn(3, 8).double(), "values": bsr.values, "bias": torch.randn(8).double()}
    wanted = needs.split()
    for name in wanted:
        tensors[name].requires_grad_()
    gradients = []
    for create_graph in (False, True):
        y = linear(bsr, *tensors.values())
        with Calls() as mode:
            inputs = [tensors[name] for name in wanted]
            gradients.append(torch.autograd.grad(y, inputs, torch.ones_like(y), create_graph=create_graph))
        called = {name: args for name, args in mode.calls if name.startswith("rarefy::")}
        if create_graph:
            names = {"rarefy::bsr_grad_input": "x", "rarefy::bsr_grad_weight": "values"}
            assert set(called) == {op for op, name in names.items() if name in wanted}
        else:
            assert set(called) == {"rarefy::_bsr_linear_backward"}
            _, x, values, *_, bias = called["rarefy::_bsr_linear_backward"]  # no dtype: it is that of dY
            assert [values is not None, x is not None, bias] == [n in wanted for n in tensors]
    for fused, separate in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, separate)


# One token, none, few, and more than the binding sums by itself; contiguous and expanded.
@pytest.mark.parametrize("rows", [(), (1,), (0,), (3, 2), (700,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_backward_equals_the_separate_ops(dtype, rows, device):
    bsr = weight((20, 14), (4, 3), 0.5, dtype, device)
    x = torch.randn(*rows, 14, device=device).to(dtype).requires_grad_()
    values = bsr.values.clone().requires_grad_()
    bias = torch.randn(20, device=device).to(dtype).requires_grad_()
    y = linear(bsr, x, values, bias)
    whole = torch.randn(*rows, 20, device=device).to(dtype)
    for dy in (whole, whole[..., :1].expand_as(whole)):
        got = torch.autograd.grad(y, (x, values, bias), dy, retain_graph=True)
        flat = dy.reshape(-1, 20)
        want = (
            ops.bsr_grad_input(dy, bsr.values, bsr.plan, 20, 14),
            ops.bsr_grad_weight(dy, x.detach(), bsr.plan, 4, 3, 20, 14),
            flat.double().sum(0).to(dtype),
        )
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        bound = 4 * torch.finfo(dtype).eps * flat.double().abs().sum(0) + 1e-30
        assert got[2].shape == bias.shape and ((got[2].double() - want[2].double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_dense_linear_does(dtype, device):
    bsr = weight((12, 8), (4, 4), 0.5, dtype=torch.float32, device=device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    values, bias = bsr.values.clone().requires_grad_(), torch.randn(12, device=device, requires_grad=True)
    with torch.autocast(device, dtype=dtype):
        y = linear(bsr, x, values, bias)
        assert y.dtype == dense_linear(x, bsr.dense().float(), bias).dtype == dtype
        half = linear(bsr, x.to(dtype), values.to(dtype), bias)
        assert torch.equal(y, half)
        in_double = linear(bsr, x.double(), values.double(), bias.double())
        assert in_double.dtype == torch.float64  # float64 is left alone
        packet = torch.ops.rarefy.bsr_linear(x, values, bsr.plan, bias, *bsr.shape)
        assert torch.equal(packet, y)
    y.float().square().sum().backward()
    assert [t.grad.dtype for t in (x, values, bias)] == [torch.float32] * 3
    with torch.autocast(device, dtype=dtype, enabled=False):
        assert linear(bsr, x, values, bias).dtype == torch.float32


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("trace", ["make_fx", "jit"])
def test_what_traces_write_down_has_derivatives(trace):
    """The short way of eager calls ends in an op without; it must not end up in a graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    bsr = weight((8, 8), (4, 4), 0.5)
    x = torch.randn(3, 8).double()

    def f(x):
        return linear(bsr, x, bsr.values, None)

    graph = make_fx(f)(x) if trace == "make_fx" else torch.jit.trace(f, x, check_trace=False)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(graph(leaf).sum(), leaf), torch.autograd.grad(f(leaf).sum(), leaf)
    )


@pytest.mark.parametrize("spec", ["block:4x1@0.5", "block:16x1@0.5:int8", "csr@0.5"])
def test_a_layer_that_never_ran_is_traced_and_its_trace_follows_the_weights(spec):
    layer = rarefy.BlockSparseLinear.from_dense(torch.nn.Linear(64, 48), spec).eval().requires_grad_(False)
    with torch.no_grad():
        new = copy.deepcopy(layer)
        for each in (new, layer):  # nothing derived from the weight, then all of it
            traced, x = torch.jit.trace(each, torch.randn(80, 64), check_trace=False), torch.randn(80, 64)
            torch.testing.assert_close(traced(x), each(x))
            layer(x)
            each.weight.values.zero_()
            assert torch.equal(traced(x), each.bias.expand(80, 48))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(dtype, device):
    bsr = weight((9, 7), (4, 3), 0.6, dtype, device)
    (n, k), (r, c), plan = bsr.shape, bsr.block_shape, bsr.plan

    def leaf(*size):
        return torch.randn(*size, dtype=dtype, device=device, requires_grad=True)

    x, dy, values = leaf(5, k), leaf(5, n), leaf(*bsr.values.shape)
    rarefy_ops = torch.ops.rarefy
    bound = {} if dtype == torch.float64 else {"rtol": 2**-7, "atol": 2**-7}
    for bias in (leaf(n), None):
        arguments = (x, values, plan, bias, n, k)
        torch.library.opcheck(rarefy_ops.bsr_linear, arguments, test_utils=UTILS, **bound)
        for op, more in ((rarefy_ops._bsr_linear, ()), (rarefy_ops._bsr_linear_held, (None, None, 0))):
            torch.library.opcheck(op, (*arguments, *more), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(rarefy_ops.bsr_grad_input, (dy, values, plan, n, k), test_utils=UTILS, **bound)
    torch.library.opcheck(rarefy_ops.bsr_grad_weight, (dy, x, plan, r, c, n, k), test_utils=UTILS, **bound)
    for saved in ((x, values, True), (x, None, False), (None, values, False)):
        arguments = (dy, *saved[:2], plan, r, c, n, k, saved[2])
        torch.library.opcheck(rarefy_ops._bsr_linear_backward, arguments, test_utils=WITHOUT_AUTOGRAD)
    torch.library.opcheck(rarefy_ops.bsr_plan, (bsr.crow, bsr.col, n, k, r, c), test_utils=UTILS)


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]
)
def test_values_narrower_than_x_train(dtype, stored):
    """Each gradient has the dtype of its tensor; backward, compiled and with a graph it is the same."""
    bsr = weight((12, 20), (4, 5), 0.5, stored)
    x = torch.randn(3, 20).to(dtype).requires_grad_()
    values, bias = bsr.values.clone().requires_grad_(), torch.randn(12).to(dtype).requires_grad_()
    tensors = (x, values, bias)

    def gradients(call, **options):
        y = call(bsr, *tensors)
        assert y.dtype == dtype
        return torch.autograd.grad(y, tensors, torch.ones_like(y), **options)

    got = gradients(linear)
    assert [g.dtype for g in got] == [dtype, stored, dtype]
    wide = bsr.values.float().requires_grad_()
    want = torch.autograd.grad(linear(bsr, x.float(), wide, bias.float()), (x, wide, bias), torch.ones(3, 12))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.float(), w.float(), rtol=2**-7, atol=2**-7)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for other in (gradients(linear, create_graph=True), gradients(compiled)):
        assert all(torch.equal(g, o) for g, o in zip(got, other, strict=True))
    torch.library.opcheck(
        torch.ops.rarefy.bsr_grad_weight,
        (torch.randn(3, 12).to(dtype), x, bsr.plan, 4, 5, 12, 20, stored),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


class TwoLayers(torch.nn.Module):
    """Two sparse layers with an activation, as a user would write them on the ops."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = weight((24, 16), (4, 4), 0.5, torch.float32, device)
        self.second = weight((10, 24), (5, 2), 0.5, torch.float32, device)
        for name, bsr in (("first", self.first), ("second", self.second)):
            self.register_parameter(name + "_values", torch.nn.Parameter(bsr.values))
            self.register_buffer(f"{name}_plan", bsr.plan)
        self.bias = torch.nn.Parameter(torch.randn(24, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = ops.bsr_linear(x, self.first_values, self.first_plan, self.bias, 24, 16)
        h = torch.nn.functional.gelu(h)
        return ops.bsr_linear(h, self.second_values, self.second_plan, None, 10, 24)


@pytest.fixture
def quick_inductor():
    """Without processes and headers that pay off for many graphs."""
    inductor = pytest.importorskip("torch._inductor.config")
    with inductor.patch(  # pytest's monkeypatch would leave settings behind that nothing can read
        {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    ):
        yield


# Inductor adds what it generates around the ops, and runs a C++ compiler for it: one case.
@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
@pytest.mark.usefixtures("quick_inductor")
@pytest.mark.timeout(600)
def test_compile_without_graph_breaks(backend, dynamic, device):
    torch.compiler.reset()
    model = TwoLayers(device)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 8) if dynamic else (3,):
        x = torch.randn(2, rows, 16, device=device, requires_grad=True)
        parameters = (x, *model.parameters())
        got, want = compiled(x), model(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(want.sum(), parameters)
        )
        if backend != "inductor":
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), want)


def test_compile_of_autocast(device):
    torch.compiler.reset()
    model = TwoLayers(device)
    x = torch.randn(3, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_compiled_errors_keep_their_text():
    torch.compiler.reset()
    bsr = weight((8, 8), (4, 4), 0.5)
    compiled = torch.compile(lambda x: linear(bsr, x, bsr.values, None), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"\[bsr_linear\] x's last dimension must be in_features=8"):
        compiled(torch.ones(2, 7).double())


def test_export_with_a_dynamic_batch(device):
    model = TwoLayers(device).eval()
    x = torch.randn(4, 16, device=device)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}})
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.rarefy.bsr_linear.default) == 2
    for rows in (4, 7):
        x = torch.randn(rows, 16, device=device)
        torch.testing.assert_close(program.module()(x), model(x))


def test_meta_tensors_have_the_right_shape():
    bsr = weight((9, 7), (4, 3), 0.6)
    values, plan, x = (t.to("meta") for t in (bsr.values, bsr.plan, torch.ones(2, 7).double()))
    y = ops.bsr_linear(x, values, plan, None, 9, 7)
    assert y.shape == (2, 9) and y.is_meta
    assert ops.bsr_grad_input(y, values, plan, 9, 7).shape == (2, 7)
    assert ops.bsr_grad_weight(y, x, plan, 4, 3, 9, 7).shape == bsr.values.shape
