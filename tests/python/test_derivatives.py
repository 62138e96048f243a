"""Derivatives of the ops: forward and reverse mode, torch.func, vmap, DDP, and what is saved for backward."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import linear as dense_linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rarefy
from helpers import random_bsr
from ranks import one_rank
from rarefy import ops

torch.manual_seed(0)
BSR = random_bsr((9, 7), (4, 3), 0.6, dtype=torch.float64)  # blocks at both edges stick out
INSIDE = BSR.gather(torch.ones(9, 7, dtype=torch.float64))  # 0 where a stored block is padding
X, DY = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 9, dtype=torch.float64)
BIAS = torch.randn(9, dtype=torch.float64)
RAW = torch.ops.rarefy

pytestmark = pytest.mark.usefixtures("one_thread")


# Each op as a function of its differentiable inputs, and its dense twin.
def _w(values):
    return BSR.scatter(values * INSIDE)


PRODUCTS = {
    "linear": (
        lambda x, v, b: ops.bsr_linear(x, v * INSIDE, BSR.plan, b, 9, 7),
        lambda x, v, b: RAW.bsr_linear(x, v * INSIDE, BSR.plan, b, 9, 7),
        lambda x, v, b: dense_linear(x, _w(v), b),
        (X, BSR.values, BIAS),
    ),
    "grad_input": (
        lambda dy, v: ops.bsr_grad_input(dy, v * INSIDE, BSR.plan, 9, 7),
        lambda dy, v: RAW.bsr_grad_input(dy, v * INSIDE, BSR.plan, 9, 7),
        lambda dy, v: dy @ _w(v),
        (DY, BSR.values),
    ),
    "grad_weight": (
        lambda dy, x: ops.bsr_grad_weight(dy, x, BSR.plan, 4, 3, 9, 7),
        lambda dy, x: RAW.bsr_grad_weight(dy, x, BSR.plan, 4, 3, 9, 7),
        lambda dy, x: BSR.gather(dy.transpose(-1, -2) @ x),
        (DY, X),
    ),
}


def _all(f):
    return tuple(range(len(f)))


def _tangents(inputs):
    return tuple(torch.randn_like(t) for t in inputs)


def _both_twice(f, inputs):
    """Forward over forward, with all tangents at once: terms of each product meet in a sum."""
    one, two = _tangents(inputs), _tangents(inputs)
    return jvp(lambda *p: jvp(f, p, one)[1], inputs, two)


def _dual(f, inputs):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(*map(forward_ad.make_dual, inputs, _tangents(inputs))))


def _each_dual(f, inputs):
    results = []
    for i, tangent in enumerate(_tangents(inputs)):
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(t, tangent) if i == j else t for j, t in enumerate(inputs)]
            results.append(forward_ad.unpack_dual(f(*dual)))
    return results


TRANSFORMS = {
    "grad": lambda f, t: grad(lambda *p: (f(*p) ** 3).sum(), _all(t))(*t),
    "vjp": lambda f, t: vjp(f, *t)[1](torch.ones_like(f(*t))),
    "vjp of vjp": lambda f, t: vjp(lambda *p: vjp(f, *p)[1](f(*p)), *t)[1](t),
    "jvp": lambda f, t: jvp(f, t, _tangents(t)),
    "jvp of jvp": _both_twice,
    "jacrev": lambda f, t: jacrev(f, _all(t))(*t),
    "jacfwd": lambda f, t: jacfwd(f, _all(t))(*t),
    "hessian": lambda f, t: hessian(lambda *p: (f(*p) ** 3).sum(), _all(t))(*t),
    "jacrev of jacfwd": lambda f, t: jacrev(jacfwd(lambda *p: (f(*p) ** 3).sum(), _all(t)), _all(t))(*t),
    "jacfwd of jacfwd": lambda f, t: jacfwd(jacfwd(lambda *p: (f(*p) ** 3).sum(), _all(t)), _all(t))(*t),
    "dual numbers": _dual,
    "one dual number": _each_dual,
}


def assert_close(got, want):
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (got, want)), strict=True)
    for g, w in pairs:
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("entry", ["ops", "dispatcher"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_equals_the_dense_twin(transform, product, entry):
    module, raw, dense, inputs = PRODUCTS[product]
    sparse = module if entry == "ops" else raw
    results = []
    for f in (sparse, dense):
        torch.manual_seed(1)
        results.append(TRANSFORMS[transform](f, inputs))
    assert_close(*results)


# Dimensions of a batch, and which of the inputs (x or dy, values or x, bias) have one.
BATCHED = {
    "first": (0, None, None),
    "inner": (1, None, None),
    "second": (None, 0, None),
    "second inside": (None, 2, None),
    "both": (1, 0, None),
    "all": (0, 1, 0),
    "bias": (None, None, 0),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("batched", BATCHED)
def test_vmap_equals_a_loop(batched, product):
    module, raw, dense, inputs = PRODUCTS[product]
    dims = BATCHED[batched][: len(inputs)]
    if all(dim is None for dim in dims):
        pytest.skip("no bias here")
    stacked = [
        t if d is None else torch.stack([t, 2 * t, t - 1], d) for t, d in zip(inputs, dims, strict=True)
    ]
    for f in (module, raw):
        assert_close(vmap(f, dims)(*stacked), vmap(dense, dims)(*stacked))
        assert_close(vmap(f, dims, out_dims=1)(*stacked), vmap(dense, dims, out_dims=1)(*stacked))
        nested = vmap(vmap(f, dims), (0,) + (None,) * (len(inputs) - 1))
        more = torch.stack([stacked[0]] * 2), *stacked[1:]
        assert_close(nested(*more), torch.stack([vmap(dense, dims)(*stacked)] * 2))


class Calls(TorchDispatchMode):
    """Counts the calls of each op."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_batch_of_inputs_is_one_call():
    with Calls() as calls:
        vmap(vmap(PRODUCTS["linear"][0], (0, None, None)), (1, None, None))(
            X.expand(5, 2, 3, 7), BSR.values, BIAS
        )
    assert calls.names.count("rarefy::bsr_linear") == 1


def test_plans_cannot_be_batched():
    plans = torch.stack([BSR.plan] * 2)
    calls = (
        lambda p: ops.bsr_linear(X, BSR.values, p, None, 9, 7),
        lambda p: ops.bsr_grad_input(DY, BSR.values, p, 9, 7),
        lambda p: ops.bsr_grad_weight(DY, X, p, 4, 3, 9, 7),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"\[bsr_\w+\] plan must be one for the whole batch of a vmap"):
            vmap(call)(plans)


def test_gradients_of_each_sample_of_a_layer():
    layer = rarefy.BlockSparseLinear(20, 12, density=0.5, block_shape=(4, 5), dtype=torch.float64)
    parameters = {n: p.detach() for n, p in layer.named_parameters()}
    x = torch.randn(6, 20, dtype=torch.float64)

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).square().sum()

    each = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(6):
        layer.zero_grad()
        layer(x[i]).square().sum().backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(each[name][i], parameter.grad)


def test_gradcheck_in_both_directions(device):
    bsr = random_bsr((5, 6), (2, 3), 0.7, dtype=torch.float64, device=device)

    def leaf(*size):
        return torch.randn(*size, dtype=torch.float64, device=device, requires_grad=True)

    x, dy, values, bias = leaf(2, 6), leaf(2, 5), leaf(*bsr.values.shape), leaf(5)
    calls = [
        (lambda x, v, b: ops.bsr_linear(x, v, bsr.plan, b, 5, 6), (x, values, bias)),
        (lambda dy, v: ops.bsr_grad_input(dy, v, bsr.plan, 5, 6), (dy, values)),
        (lambda dy, x: ops.bsr_grad_weight(dy, x, bsr.plan, 2, 3, 5, 6), (dy, x)),
    ]
    for call, inputs in calls:
        assert torch.autograd.gradcheck(
            call, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
        )
        assert torch.autograd.gradgradcheck(
            call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
        )


def test_compiled_autograd_and_checkpoints_give_the_same_gradients():
    layers = [rarefy.BlockSparseLinear(16, 16, density=0.5, block_shape=(4, 4)) for _ in range(2)]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
    x = torch.randn(4, 16, requires_grad=True)
    leaves = (x, *model.parameters())

    def gradients(call, *arguments, **options):
        for leaf in leaves:
            leaf.grad = None
        call(*arguments, **options).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    want = gradients(model, x)
    for use_reentrant in (False, True):
        got = gradients(checkpoint, model, x, use_reentrant=use_reentrant)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(gradients, backend="aot_eager")
        got = compiled(model, x)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_batched_gradients_of_a_layer():
    layer = rarefy.BlockSparseLinear(12, 8, density=0.5, block_shape=(4, 4), dtype=torch.float64)
    x = torch.randn(12, dtype=torch.float64, requires_grad=True)
    (jacobian,) = torch.autograd.grad(layer(x), x, torch.eye(8, dtype=torch.float64), is_grads_batched=True)
    assert torch.equal(jacobian, layer.to_dense().weight)


# What backward keeps -----------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [ops, RAW], ids=["ops", "dispatcher"])
@pytest.mark.parametrize("needs", ["x", "values", "bias", "x values", "x values bias", ""])
def test_an_operand_is_saved_only_if_the_other_needs_a_gradient(needs, entry):
    tensors = {"x": X.clone(), "values": BSR.values.clone(), "bias": BIAS.clone()}
    for name in needs.split():
        tensors[name].requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = entry.bsr_linear(tensors["x"], tensors["values"], BSR.plan, tensors["bias"], 9, 7)
        dx = entry.bsr_grad_input(DY, tensors["values"], BSR.plan, 9, 7)
        dvalues = entry.bsr_grad_weight(DY, tensors["x"], BSR.plan, 4, 3, 9, 7)
    x, values = tensors["x"].data_ptr(), tensors["values"].data_ptr()
    expected = [x] * ("values" in needs) + [values] * ("x" in needs)  # of linear
    expected += [DY.data_ptr()] * ("values" in needs) + [DY.data_ptr()] * ("x" in needs)
    assert sorted(saved) == sorted(expected)
    assert [y.requires_grad, dx.requires_grad, dvalues.requires_grad] == [
        bool(needs),
        "values" in needs,
        "x" in needs,
    ]


@pytest.mark.parametrize("entry", [ops, RAW], ids=["ops", "dispatcher"])
def test_a_copy_over_the_plan_is_no_change(entry):
    """DDP broadcasts buffers before every forward, also between a forward and its backward."""
    values, plan = BSR.values.clone().requires_grad_(), BSR.plan.clone()
    x = X.clone().requires_grad_()
    y = entry.bsr_linear(x, values, plan, None, 9, 7)
    plan.copy_(BSR.plan)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(DY) @ BSR.dense())


def test_a_change_of_an_operand_is_still_noticed():
    values = BSR.values.clone().requires_grad_()
    x = X.clone()
    y = ops.bsr_linear(x, values, BSR.plan, None, 9, 7)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_two_forwards_under_ddp_train_like_the_dense_layer(tmp_path):
    with one_rank(tmp_path):
        sparse = rarefy.BlockSparseLinear(16, 12, density=1.0, block_shape=(4, 4))
        layers = torch.nn.Sequential(sparse.to_dense()), torch.nn.Sequential(sparse)
        for layer in layers:
            model = torch.nn.parallel.DistributedDataParallel(layer)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = torch.arange(64.0).reshape(4, 16).sin() + step
                optimizer.zero_grad()
                (model(x).square().sum() + model(x + 1).square().sum()).backward()
                optimizer.step()
        torch.testing.assert_close(sparse.to_dense().weight, layers[0][0].weight)
        torch.testing.assert_close(sparse.bias, layers[0][0].bias)
