"""Each private hook of torch does what is wanted of it, and without them the ops still work."""

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

from helpers import random_bsr
from rarefy import _torch_private as private

BSR = random_bsr((8, 8), (4, 4), 1.0)
LINEAR = torch.ops.rarefy.bsr_linear.default
ALONE = torch.ops.rarefy._bsr_linear.default


def arguments(**leaves):
    return leaves.get("x", torch.ones(2, 8)), BSR.values, BSR.plan, None, 8, 8


def test_this_torch_has_all_hooks():
    assert private.autograd_kernels


def test_plain_is_false_wherever_a_call_meets_more_than_autograd():
    assert private.plain()
    with torch.no_grad():
        assert private.plain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not private.plain()
    with forward_ad.dual_level():
        assert not private.plain() and private.forward_mode()
    seen = []

    def f(x):
        seen.append(private.plain())
        return x.sum()

    for transform in (torch.func.grad, torch.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        transform(f)(torch.ones(2))
    assert seen == [False] * 3 and private.plain() and not private.forward_mode()


def test_eager_is_false_where_calls_are_written_down():
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []

    def f(x):
        seen.append((private.plain(), private.eager()))
        return x + 1

    f(torch.ones(2))
    make_fx(f)(torch.ones(2))
    torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert seen == [(True, True), (True, False), (True, False)]


def test_below_autograd_records_nothing():
    x = torch.ones(2, 8, requires_grad=True)
    assert LINEAR(*arguments(x=x)).requires_grad
    assert not private.below_autograd(LINEAR)(*arguments(x=x)).requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert torch.equal(private.eager_call(ALONE)(*arguments(x=x)), LINEAR(*arguments(x=x)))
        with pytest.raises(TypeError, match="bsr_linear"):
            private.eager_call(ALONE)(*arguments(x=x.double()))


def test_a_function_is_one_level_of_torch_func_as_a_kernel():
    class Square(private.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return private.below_autograd(op)(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    def kernel(x):
        with private.allow_function():
            return Square.apply(x)

    library = torch.library.Library("rarefy_test_private", "FRAGMENT")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x * x, "CPU")
    library.impl("square", kernel, "Autograd")
    op = torch.ops.rarefy_test_private.square.default
    x = torch.tensor(3.0)
    assert torch.func.grad(op)(x) == 6 and torch.func.grad(torch.func.grad(op))(x) == 2
    leaf = x.clone().requires_grad_()
    op(leaf).backward()
    assert leaf.grad == 6


def test_forward_mode_is_on_again_inside_a_jvp():
    modes = []

    class Same(private.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def jvp(ctx, tangent):
            modes.append(torch._C._is_fwd_grad_enabled())
            with private.forward_mode_enabled():
                modes.append(torch._C._is_fwd_grad_enabled())
            return tangent

    with forward_ad.dual_level():
        Same.apply(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    assert modes == [False, True]


def test_without_autocast_the_inputs_stay_as_they_are():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert LINEAR(*arguments()).dtype == torch.bfloat16
        assert private.without_autocast("cpu", LINEAR, *arguments()).dtype == torch.float32


@pytest.mark.parametrize("entry", [torch.ops.rarefy.bsr_linear, LINEAR], ids=["packet", "overload"])
def test_index_errors_of_the_library_are_type_errors(entry):
    with pytest.raises(TypeError, match=r"\[bsr_linear\] x must be float64"):
        entry(*arguments(x=torch.ones(2, 8, dtype=torch.int32)))


@pytest.mark.parametrize(
    "register",
    [
        lambda m, hook: m.register_forward_hook(hook),
        lambda m, hook: m.register_forward_pre_hook(hook),
        lambda m, hook: m.register_full_backward_hook(hook),
        lambda m, hook: m.register_full_backward_pre_hook(hook),
        lambda m, hook: m.register_state_dict_post_hook(hook),
        lambda m, hook: m.register_state_dict_pre_hook(hook),
        lambda m, hook: m.register_load_state_dict_pre_hook(hook),
        lambda m, hook: m.register_load_state_dict_post_hook(hook),
    ],
    ids=[name.strip("_") for name in private._HOOKS],
)
def test_every_hook_of_a_module_is_seen(register):
    module = torch.nn.Linear(2, 2)
    assert not private.has_hooks(module)
    register(module, lambda *_: None)
    assert private.has_hooks(module)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_every_hook_of_a_tensor_is_seen(register):
    tensor = torch.ones(2, requires_grad=True)
    assert not private.has_tensor_hooks(tensor)
    getattr(tensor, register)(print)
    assert private.has_tensor_hooks(tensor)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_a_storage_and_copies_do_not(device):
    tensor = torch.ones(4, 4, device=device)
    assert private.storage_of(tensor) == private.storage_of(tensor.T[1:])
    assert private.storage_of(tensor) != private.storage_of(tensor.clone())


def test_a_subclass_is_asked_nothing_without_torch_function():
    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("asked")

    tensor = torch.ones(2, 3).as_subclass(Asked)
    with pytest.raises(AssertionError, match="asked"):
        tensor.dim()
    with private.without_torch_function():
        assert tensor.dim() == 2


WITHOUT_HOOKS = """
import torch
import torch._functorch.utils
del torch._functorch.utils.enable_single_level_autograd_function
import rarefy
from rarefy import _torch_private
assert not _torch_private.autograd_kernels and not _torch_private.plain()
layer = rarefy.BlockSparseLinear(12, 8, density=0.5, block_shape=(4, 4), dtype=torch.float64)
dense = layer.to_dense()
x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
got = torch.autograd.grad(layer(x).square().sum(), (x, layer.bias), create_graph=True)
want = torch.autograd.grad(dense(x).square().sum(), (x, dense.bias), create_graph=True)
for g, w in zip(got, want):
    torch.testing.assert_close(g, w)
torch.testing.assert_close(*(torch.autograd.grad(t[0].square().sum(), x)[0] for t in (got, want)))
with torch.no_grad():
    torch.testing.assert_close(layer(x), dense(x))
try:
    torch.func.grad(lambda x: layer(x).sum())(x)
except RuntimeError as error:
    print("refused:", error)
"""


def test_without_the_hooks_autograd_works_and_torch_func_is_refused():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOOKS], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "refused:" in result.stdout
