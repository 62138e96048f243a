"""bsr_feed_forward and the activation of bsr_linear: against dense, derivatives, torch's own checks."""

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.nn import functional

from helpers import random_bsr
from rarefy import ops
from rarefy.activations import NAMES, activate

pytestmark = pytest.mark.usefixtures("one_thread")

UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
RAW = torch.ops.rarefy
K, H, N = 7, 10, 6


class Layers:
    """Random layers 7 → 10 → 6 with blocks at odd edges, as leaves, and the same as a dense function."""

    def __init__(self, gated, dtype=torch.float64, blocks=((4, 3), (2, 2), (3, 4)), density=0.6):
        shapes = ((H, K), (H, K), (N, H))
        self.bsr = [random_bsr(s, b, density, dtype=dtype) for s, b in zip(shapes, blocks, strict=True)]
        self.gated = gated
        self.inside = [b.gather(torch.ones(b.shape, dtype=dtype)) for b in self.bsr]
        self.values = [b.values.clone().requires_grad_() for b in self.bsr]
        self.biases = [torch.randn(n, dtype=dtype, requires_grad=True) for n in (H, H, N)]
        self.x = torch.randn(5, K, dtype=dtype, requires_grad=True)

    @property
    def leaves(self):
        used = [self.x, self.values[0], self.biases[0]]
        used += [self.values[1], self.biases[1]] if self.gated else []
        return (*used, self.values[2], self.biases[2])

    def _unpack(self, leaves):
        x, *rest = leaves
        gate = rest[2:4] if self.gated else (None, None)
        return x, rest[:2], gate, rest[-2:]

    def arguments(self, *leaves):
        """Of the op, but for the activation; padding masked, as nobody may write there."""
        x, *layers = self._unpack(leaves or self.leaves)
        flat = []
        for (values, bias), bsr, inside in zip(layers, self.bsr, self.inside, strict=True):
            known = values is not None
            flat += [values * inside if known else None, bsr.plan if known else None, bias]
        return (x, *flat, N, H, K)

    def op(self, activation):
        return lambda *leaves: ops.bsr_feed_forward(*self.arguments(*leaves), activation)

    def dense(self, activation):
        def forward(*leaves):
            x, *layers = self._unpack(leaves)
            up, gate, down = (
                None if v is None else (b.scatter(v * i), bias)
                for (v, bias), b, i in zip(layers, self.bsr, self.inside, strict=True)
            )
            hidden = functional.linear(x, *up)
            if gate is None:
                hidden = activate(hidden, activation)
            else:
                hidden = activate(functional.linear(x, *gate), activation) * hidden
            return functional.linear(hidden, *down)

        return forward


@pytest.fixture(params=[False, True], ids=["plain", "gated"])
def gated(request):
    return request.param


@pytest.mark.parametrize("activation", ["none", *NAMES])
def test_equals_dense(gated, activation):
    layers = Layers(gated)
    with torch.no_grad():
        wanted = layers.dense(activation)(*layers.leaves)
        torch.testing.assert_close(layers.op(activation)(*layers.leaves), wanted)
    y = layers.op(activation)(*layers.leaves)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, layers.leaves, dy)
    for mine, theirs in zip(
        got, torch.autograd.grad(layers.dense(activation)(*layers.leaves), layers.leaves, dy), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gradcheck(gated, activation):
    layers = Layers(gated)
    torch.autograd.gradcheck(layers.op(activation), layers.leaves, check_forward_ad=True)
    torch.autograd.gradgradcheck(layers.op(activation), layers.leaves)


def test_gradients_of_some_arguments(gated):
    """Whatever needs a gradient gets it, and nothing else."""
    layers = Layers(gated)
    dense = layers.dense("gelu")
    for at, leaf in enumerate(layers.leaves):
        for other in layers.leaves:
            other.requires_grad_(other is leaf)
        (mine,) = torch.autograd.grad(layers.op("gelu")(*layers.leaves).square().sum(), leaf)
        (theirs,) = torch.autograd.grad(dense(*layers.leaves).square().sum(), leaf)
        torch.testing.assert_close(mine, theirs, msg=lambda text, at=at: f"{at}: {text}")


def test_a_weight_that_depends_on_another_argument():
    """The gradient's own gradient does not count paths between arguments twice."""
    layers = Layers(False)

    def penalty(f):
        x, uv, *rest = layers.leaves
        shifted = uv + x.sum()
        (g,) = torch.autograd.grad(f(x, shifted, *rest).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    torch.testing.assert_close(penalty(layers.op("gelu")), penalty(layers.dense("gelu")))


def test_torch_func(gated):
    layers = Layers(gated)
    leaves = tuple(leaf.detach() for leaf in layers.leaves)
    mine, dense = layers.op("silu"), layers.dense("silu")
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    every = tuple(range(len(leaves)))
    for transform in (
        lambda f: jvp(f, leaves, tangents),
        lambda f: grad(lambda *p: f(*p).square().sum(), every)(*leaves),
        lambda f: hessian(lambda p: f(leaves[0], p, *leaves[2:]).square().sum())(leaves[1]),
        lambda f: vmap(f, (0, *(None,) * (len(leaves) - 1)))(torch.stack([leaves[0]] * 3), *leaves[1:]),
        lambda f: vmap(f)(*(torch.stack([leaf, leaf * 2]) for leaf in leaves)),
        lambda f: vmap(grad(lambda *p: f(*p).sum()), (0, *(None,) * (len(leaves) - 1)))(*leaves),
    ):
        torch.testing.assert_close(transform(mine), transform(dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(gated, dtype):
    layers = Layers(gated, dtype)
    arguments = [a.detach().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a
                 for a in layers.arguments()]  # fmt: skip
    torch.library.opcheck(
        RAW.bsr_feed_forward, (*arguments, "gelu"), test_utils=UTILS, rtol=2**-5, atol=2**-4
    )
    torch.library.opcheck(
        RAW._bsr_feed_forward_hidden, (*arguments, "gelu"), test_utils=("test_schema", "test_faketensor")
    )


def test_float32_has_the_bits_of_its_layers():
    layers = Layers(False, torch.float32, ((4, 1), (4, 1), (4, 1)))
    with torch.no_grad():
        x, uv, up, ub, *_, dv, down, db, n, h, k = layers.arguments()
        for activation in NAMES:
            hidden = ops.bsr_linear(x, uv, up, ub, h, k, activation=activation)
            apart = ops.bsr_linear(hidden, dv, down, db, n, h)
            assert torch.equal(layers.op(activation)(*layers.leaves), apart)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(gated, dtype):
    layers = Layers(gated, dtype)
    twin = Layers(gated)
    twin.bsr, twin.inside = layers.bsr, [inside.double() for inside in layers.inside]
    with torch.no_grad():
        exact = twin.dense("gelu")(*(leaf.double() for leaf in layers.leaves))
        y = layers.op("gelu")(*layers.leaves)
    roundoff = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(y.double(), exact, rtol=roundoff, atol=1e-5)


def test_compiled(gated):
    layers = Layers(gated, torch.float32)
    f = layers.op("gelu")
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*layers.leaves), f(*layers.leaves))
    one = torch.autograd.grad(compiled(*layers.leaves).square().sum(), layers.leaves)
    two = torch.autograd.grad(f(*layers.leaves).square().sum(), layers.leaves)
    torch.testing.assert_close(one, two)


def test_autocast(gated):
    layers = Layers(gated, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layers.op("gelu")(*layers.leaves)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layers.op("gelu")(*layers.leaves), rtol=2**-5, atol=2**-4)
    grads = torch.autograd.grad(y.float().square().sum(), layers.leaves)
    assert all(g.dtype == torch.float32 for g in grads)


def test_leading_dimensions_and_none_at_all(gated):
    layers = Layers(gated, torch.float32)
    x, rest = layers.x.detach(), layers.leaves[1:]
    f = layers.op("relu")
    with torch.no_grad():
        y = f(x, *rest)
        assert torch.equal(f(x.reshape(5, 1, 1, K), *rest).reshape(5, N), y)
        assert torch.equal(f(x[0], *rest), f(x[:1], *rest)[0])
        assert f(x[:0], *rest).shape == (0, N)
    empty = x[:0].clone().requires_grad_()
    dx, *grads = torch.autograd.grad(f(empty, *rest).sum(), (empty, *rest))
    assert dx.shape == (0, K) and all(not g.any() for g in grads)


def test_what_is_saved():
    """Hidden features once, before the activation; layers would keep them twice."""
    layers = Layers(False, torch.float32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        layers.op("gelu")(*layers.leaves)
    assert sizes.count((5, H)) == 1


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({0: torch.randn(5, 8, dtype=torch.float64)}, ValueError, "x's last dimension must be in_features=7"),
        ({0: torch.randn(5, 7)}, TypeError, "the up layer's values must have the dtype of x, float32"),
        ({1: torch.randn(2, 2)}, ValueError, "the up layer's values must have shape"),
        ({3: torch.randn(9, dtype=torch.float64)}, ValueError, "the up layer's bias must be contiguous"),
        (
            {4: torch.randn(1, 2, 2, dtype=torch.float64)},
            ValueError,
            "gate_values and gate_plan must come",
        ),
        ({7: None}, TypeError, "the down layer's values must be a tensor; got None"),
        ({8: torch.zeros(3, dtype=torch.int64)}, TypeError, "the down layer's plan must be int32"),
        ({11: 12}, ValueError, "plan must"),
        ({13: "tanh"}, ValueError, "activation must be None, relu, gelu, gelu_tanh, silu; got 'tanh'"),
    ],
)
def test_errors(change, kind, text):
    arguments = [*Layers(False).arguments(), "gelu"]
    for at, value in change.items():
        arguments[at] = value
    with torch.no_grad(), pytest.raises(kind) as error:
        ops.bsr_feed_forward(*arguments)
    message = str(error.value)
    assert message.startswith("[bsr_feed_forward] ") and text in message, message


# bsr_linear's activation --------------------------------------------------------------------------


@pytest.mark.parametrize("activation", NAMES)
def test_linear_activation(activation):
    bsr = random_bsr((9, 7), (4, 3), 0.6, dtype=torch.float64)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    values = bsr.values.clone().requires_grad_()
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)
    inside = bsr.gather(torch.ones(9, 7, dtype=torch.float64))

    def mine(x, v, b):
        return ops.bsr_linear(x, v * inside, bsr.plan, b, 9, 7, activation=activation)

    def dense(x, v, b):
        return activate(functional.linear(x, bsr.scatter(v * inside), b), activation)

    leaves = (x, values, bias)
    with torch.no_grad():
        torch.testing.assert_close(mine(*leaves), dense(*leaves))
    if activation != "relu":
        torch.autograd.gradcheck(mine, leaves, check_forward_ad=True)
        torch.autograd.gradgradcheck(mine, leaves)
    plain = tuple(leaf.detach() for leaf in leaves)
    for f in (
        lambda f: vmap(f, (0, None, None))(torch.stack([plain[0]] * 2), *plain[1:]),
        lambda f: vmap(grad(lambda *p: f(*p).sum(), (0, 1, 2)), (0, None, None))(*plain),
        lambda f: torch.autograd.grad(f(*leaves).square().sum(), leaves),
    ):
        torch.testing.assert_close(f(mine), f(dense))
    arguments = (x, values.detach() * inside, bsr.plan, bias, 9, 7, None, None, 0, activation)
    torch.library.opcheck(RAW.bsr_linear, arguments, test_utils=UTILS)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        half = ops.bsr_linear(
            x.float(), values.float() * inside.float(), bsr.plan, None, 9, 7, activation=activation
        )
    assert half.dtype == torch.bfloat16


def test_linear_refuses_other_activations():
    bsr = random_bsr((9, 7), (4, 3), 0.6)
    with pytest.raises(ValueError, match=r"\[bsr_linear\] activation must be None, relu.*; got 'tanh'"):
        ops.bsr_linear(torch.randn(2, 7), bsr.values, bsr.plan, None, 9, 7, activation="tanh")
    with pytest.raises(ValueError, match=r'\[bsr_linear\] activation must be none, relu.*; got "tanh"'):
        RAW.bsr_linear(torch.randn(2, 7), bsr.values, bsr.plan, None, 9, 7, None, None, 0, "tanh")


def test_recorded_and_batched_calls_may_hold_what_kernels_derive(gated):
    layers, held = Layers(gated, torch.float32), (None, None, None, None, 3)  # of a kernel that is not there
    wanted = layers.op("silu")(*layers.leaves)
    arguments = (*layers.arguments(), "silu")
    y = ops.bsr_feed_forward(*arguments, *held)
    assert torch.equal(y, wanted)
    dy = torch.randn_like(y)
    for mine, theirs in zip(
        torch.autograd.grad(y, layers.leaves, dy), torch.autograd.grad(wanted, layers.leaves, dy), strict=True
    ):
        assert torch.equal(mine, theirs)
    batched = vmap(lambda x: ops.bsr_feed_forward(x, *arguments[1:], *held))(layers.x.view(5, 1, K))
    torch.testing.assert_close(batched.view(5, N), wanted)
    many = vmap(lambda b: ops.bsr_feed_forward(*arguments[:3], b, *arguments[4:], *held))(arguments[3][None])
    torch.testing.assert_close(many[0], wanted)
