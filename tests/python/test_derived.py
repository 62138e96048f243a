"""What kernels derive from a weight: when it is made, what is kept, when it is dropped."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import rarefy
from rarefy import derived

KEY = 12345  # of no kernel: results must not change


class Stand:
    """Stands for a kernel that wants some bytes; counts what is made. No kernel has its key."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, prepared: int, packed: int, gradient: int = 0
    ) -> None:
        self.prepared, self.packed, self.gradient = prepared, packed, gradient
        self.asked: list[torch.dtype] = []
        self.asked_tf32: list[bool] = []
        self.made: list[str] = []
        for name in ("sizes", "prepare", "pack"):
            monkeypatch.setattr(derived, f"_{name}", getattr(self, name))

    def sizes(self, values, plan, n, k, dtype, tf32):
        assert values.ndim == 3
        self.asked.append(dtype)
        self.asked_tf32.append(tf32)
        return KEY, self.prepared, self.packed, self.gradient

    def prepare(self, values, plan, n, k, dtype, tf32):
        self.made.append("prepared")
        return torch.zeros(self.prepared, dtype=torch.uint8)

    def pack(self, values, plan, prepared, n, k, dtype, tf32, gradient):
        assert (prepared is None) == (self.prepared == 0)
        assert not values.requires_grad
        self.made.append("packed for both" if gradient else "packed")
        return torch.zeros(self.gradient if gradient else self.packed + 512, dtype=torch.uint8)


def layer(dtype: torch.dtype = torch.float32, seed: int = 0) -> rarefy.BlockSparseLinear:
    generator = torch.Generator().manual_seed(seed)
    return rarefy.BlockSparseLinear(24, 32, density=0.5, block_shape=(8, 4), dtype=dtype, generator=generator)


X = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def both(monkeypatch):
    return Stand(monkeypatch, 16, 32)


def test_nothing_is_kept_for_kernels_that_want_nothing(monkeypatch):
    stand = Stand(monkeypatch, 0, 0)
    monkeypatch.setattr(derived, "_sizes", lambda *a: (0, 0, 0, 0))
    linear = layer()
    linear(X)
    assert linear.weight.derived(X) == () and linear.weight.derived_nbytes == 0
    assert stand.made == []


def test_float32_that_may_be_rounded_has_its_own(both):
    """On a GPU; here a weight that says so. torch's switch decides at each call, and the default is off."""
    linear = layer()
    linear(X)
    kept = linear.weight._kept[torch.float32]
    assert not kept.may_round and both.asked_tf32 == [False]
    kept.may_round = True
    assert derived.TF32 not in linear.weight._kept
    linear(X)
    assert both.asked_tf32 == [False]
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        linear(X)
        rounded = linear.weight._kept[derived.TF32]
        assert both.asked_tf32 == [False, True] and not rounded.may_round
        assert linear.weight.derived(X)[0] is rounded.prepared
        assert linear.weight.derived(X.double()) is not None and derived.TF32 in linear.weight._kept
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert linear.weight.derived(X)[0] is kept.prepared


def test_values_are_packed_at_the_second_call_with_them(both):
    linear = layer()
    want = linear.weight.to_dense().detach()
    for call, made in enumerate((["prepared"], ["prepared", "packed"], ["prepared", "packed"])):
        torch.testing.assert_close(linear(X), X @ want.T + linear.bias)
        assert both.made == made, call
    assert both.asked == [torch.float32]
    assert linear.weight.derived_nbytes == 16 + 32 + 512
    prepared, packed, key = linear.weight.derived(X)
    assert (prepared.numel(), packed.numel(), key) == (16, 32 + 512, KEY)


def test_prepare_packs_at_once_where_gradients_are_recorded_too(both):
    weight = layer().weight
    assert torch.is_grad_enabled() and both.made == []
    weight.prepare()
    assert both.made == ["prepared", "packed"]
    weight.values.detach().mul_(2)
    weight.prepare()
    assert both.made == ["prepared", "packed", "packed"]


def test_a_training_step_packs_nothing(both):
    linear = layer()
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        linear(X).square().sum().backward()
        optimizer.step()
    assert both.made == ["prepared"]
    with torch.no_grad():
        linear(X)
    assert both.made == ["prepared", "packed"]


def test_values_that_stay_are_packed_for_the_gradient_of_x_too(monkeypatch):
    """At the second call with them that records it: not of a training step's, nor where x wants none."""
    stand = Stand(monkeypatch, 16, 32, gradient=2048)
    linear, wants = layer(), X.clone().requires_grad_()
    made = ["prepared"]
    for x, made_next in ((wants, ()), (X, ("packed",)), (X, ()), (wants, ("packed for both",)), (X, ())):
        linear(x).sum().backward()
        made += made_next
        assert stand.made == made
    assert linear.weight.derived_nbytes == 16 + 2048
    assert linear.weight.derived(wants)[1].numel() == 2048
    with torch.no_grad():
        linear(wants)  # what both have serves linear alone
        linear.weight.values.mul_(2)
        linear(wants)
    assert stand.made == [*made, "packed"]


def test_a_gradient_alone_may_want_something_packed(monkeypatch):
    stand = Stand(monkeypatch, 16, 0, gradient=2048)
    linear, wants = layer(), X.clone().requires_grad_()
    for x, packed in ((X, 0), (wants, 0), (wants, 1), (X, 1), (wants, 1)):
        linear(x)
        assert stand.made.count("packed for both") == packed
    assert linear.weight.derived(X)[1] is None
    assert linear.weight.derived(wants)[1].numel() == 2048


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.values.mul_(2),
        lambda w: setattr(w, "values", nn.Parameter(w.values.detach().clone())),
        lambda w: setattr(w.values, "data", w.values.data.clone()),
        lambda w: w.load_state_dict(w.state_dict()),
        lambda w: w.load_state_dict(copy.deepcopy(w.state_dict()), assign=True),
        lambda w: w.change_pattern(layer(seed=3).weight.pattern),
        lambda w: w.assign_(layer(seed=4).weight),
        lambda w: w.double().float(),
        lambda w: w.reset_parameters(),
    ],
    ids=["in_place", "parameter", "data", "load", "assign", "pattern", "assign_", "cast", "reset"],
)
@torch.no_grad()
def test_what_changes_values_drops_what_was_packed(both, change):
    linear = layer()
    linear.weight.prepare()
    assert both.made == ["prepared", "packed"]
    assert linear.weight.derived(X)[1] is not None
    change(linear.weight)
    with torch.enable_grad():
        assert linear.weight.derived(X) == (), "a training step may be about to change them again"
    assert linear.weight.derived(X)[1] is not None
    assert both.made.count("packed") == 2


@torch.no_grad()
def test_the_pattern_keeps_what_follows_from_it(both):
    linear = layer()
    twin = copy.deepcopy(linear)
    tied = rarefy.BlockSparseLinear.from_weight(linear.weight)
    for other in (linear, twin, tied):
        other.weight.prepare()
    assert both.made.count("prepared") == 1, "copies share the pattern"
    assert both.made.count("packed") == 2, "copies have values of their own, tied layers have not"
    linear.weight.values.zero_()
    linear.weight.prepare()
    assert both.made.count("prepared") == 1 and both.made.count("packed") == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@torch.no_grad()
def test_copies_and_files_have_none_of_it(both, duplicate, tmp_path):
    linear = layer()
    linear.weight.prepare()
    assert duplicate(linear).weight.derived_nbytes == 0
    assert "derived" not in str(linear.state_dict().keys())
    torch.save(linear.state_dict(), tmp_path / "state")
    assert set(torch.load(tmp_path / "state")) == set(linear.state_dict())


def test_another_choice_of_kernels_asks_again(both):
    linear = layer()
    linear.weight.prepare()
    before = rarefy.force_impl("ref")
    try:
        assert linear.weight.derived_nbytes == 0
    finally:
        rarefy.force_impl(before)


def test_gradients_get_it_too(both, monkeypatch):
    linear, x = layer(), X.clone().requires_grad_()
    linear.weight.prepare()
    seen = []
    run = rarefy.derivatives.run_backward
    monkeypatch.setattr(rarefy.derivatives, "run_backward", lambda *a: seen.append(a) or run(*a))
    linear(x).sum().backward()
    assert seen[0][-1] == KEY and seen[0][-2] is linear.weight.derived(X)[1]
    torch.testing.assert_close(x.grad, torch.ones(5, 32) @ linear.weight.to_dense())
    dense = linear.weight.to_dense().detach().double()
    weights = [linear.weight.values.detach().double(), X.double()]
    assert torch.autograd.gradcheck(
        lambda values, x: torch.ops.rarefy.bsr_linear(
            x, values, linear.weight.plan, None, 32, 24, *linear.weight.derived(X)
        ),
        [w.requires_grad_() for w in weights],
    )
    assert dense.shape == (32, 24)


def test_products_with_other_values_get_nothing_packed(both, monkeypatch):
    """Gradients of gradients multiply by values that are not the weight's."""
    linear, x = layer(), X.clone().requires_grad_()
    linear.weight.prepare()
    y = linear(x)
    (dvalues,) = torch.autograd.grad(y.square().sum(), linear.weight.values, create_graph=True)
    seen = []
    real = rarefy.derivatives.linear
    monkeypatch.setattr(rarefy.derivatives, "linear", lambda *a: seen.append(a) or real(*a))
    dvalues.square().sum().backward()
    assert seen and all(len(a) == 6 for a in seen)


def test_under_autocast_the_products_dtype_counts(both):
    linear = layer()
    with torch.autocast("cpu"):
        assert linear(X).dtype == torch.bfloat16
        assert linear.weight.derived(X) == (), "values are cast in each call: nothing can be packed"
    assert both.asked == [torch.bfloat16] and both.made == []
    with torch.autocast("cpu"):
        assert layer(torch.bfloat16).weight.prepare().derived_nbytes > 0


def test_a_compiled_layer_sees_values_that_change(both):
    linear = layer()
    linear.weight.prepare()
    compiled = torch.compile(linear, fullgraph=True)
    torch.testing.assert_close(compiled(X), linear(X))
    with torch.no_grad():
        linear.weight.values.mul_(3)
    torch.testing.assert_close(compiled(X), X @ linear.weight.to_dense().T + linear.bias)


def test_parametrized_values_are_never_packed(both):
    linear = layer()
    nn.utils.parametrize.register_parametrization(linear.weight, "values", nn.Tanh())
    for _ in range(3):
        torch.testing.assert_close(linear(X), X @ linear.weight.to_dense().T + linear.bias)
    assert "packed" not in both.made


def test_layers_of_inference_mode_are_packed_until_values_are_written_to(both):
    with torch.inference_mode():
        linear = layer()
        for _ in range(3):
            linear(X)
        assert both.made == ["prepared", "packed"]
        linear.weight.values.mul_(2)
        torch.testing.assert_close(linear(X), X @ linear.weight.to_dense().T + linear.bias)
    assert both.made == ["prepared", "packed", "packed"]
    linear(X).sum().backward()
    assert linear.weight.values.grad is not None


def test_parameters_of_inference_mode_are_never_packed(both):
    pattern = layer().weight.pattern
    with torch.inference_mode():
        values = nn.Parameter(torch.randn(pattern.nnzb, 8, 4))
        weight = rarefy.BsrWeight.from_pattern(values, pattern)
        assert weight.values is values
        for _ in range(3):
            weight.linear(X)
    assert "packed" not in both.made


def test_threads_share_a_layer(both):
    linear = layer()
    want, failures = linear(X), []

    def work():
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(linear(X), want):
                    failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


BAD = [
    ("prepared", (torch.zeros(3), None, KEY), TypeError, "prepared must be a contiguous tensor of bytes"),
    ("packed", (None, torch.zeros(2, 300, dtype=torch.uint8), KEY), TypeError, "packed must be a contiguous"),
    ("short", (None, torch.zeros(100, dtype=torch.uint8), KEY), ValueError, "packed must have at least 512"),
]


@pytest.mark.parametrize(("_id", "arguments", "error", "text"), BAD, ids=[b[0] for b in BAD])
def test_bad_derived_arguments(_id, arguments, error, text):
    weight = layer().weight
    with pytest.raises(error, match=text):
        torch.ops.rarefy.bsr_linear(X, weight.values, weight.plan, None, 32, 24, *arguments)


def test_the_ops_that_make_it_check_their_arguments():
    weight = layer().weight
    with pytest.raises(TypeError, match="dtype must be float64"):
        torch.ops.rarefy.bsr_prepare(weight.values, weight.plan, 32, 24, torch.int32)
    with pytest.raises(ValueError, match="values must have shape"):
        torch.ops.rarefy.bsr_pack(weight.values[0], weight.plan, None, 32, 24, torch.float32)


# A kernel that packs: bf16 in pairs, portable, so on any machine -----------------------------------


@pytest.fixture
def pairs():
    before = rarefy.force_impl("cpu:pairs")
    yield
    rarefy.force_impl(before)


def tall() -> tuple[rarefy.BlockSparseLinear, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    linear = rarefy.BlockSparseLinear(
        48, 64, density=0.5, block_shape=(16, 1), dtype=torch.bfloat16, generator=generator
    )
    with torch.no_grad():  # small integers: sums are exact
        linear.weight.values.copy_(torch.randint(-3, 4, linear.weight.values.shape, generator=generator))
        linear.bias.zero_()
    return linear, torch.randint(-3, 4, (20, 48), generator=generator).bfloat16()


@torch.no_grad()
def test_packed_values_are_multiplied(pairs):
    linear, x = tall()
    linear.weight.prepare()
    assert rarefy.explain(linear, x)["kernel"] == "pairs_linear"
    for _ in range(2):
        assert torch.equal(linear(x), x @ linear.weight.to_dense().T)
        linear.weight.values.neg_()
        linear.weight.prepare()


@torch.no_grad()
def test_a_write_that_torch_does_not_count_is_noticed():
    linear, x = tall()
    before = rarefy.force_impl("cpu:pairs")
    try:
        linear.weight.prepare()
        derived_of_old = linear.weight.derived(x)
    finally:
        rarefy.force_impl(before)
    arguments = (linear.weight.values, linear.weight.plan, None, 64, 48)
    linear.weight.values.data.mul_(2)
    want = x @ linear.weight.to_dense().T
    assert torch.equal(torch.ops.rarefy.bsr_linear(x, *arguments, *derived_of_old), want)


@torch.no_grad()
def test_packed_bytes_of_another_size_are_refused(pairs):
    linear, x = tall()
    prepared, packed, key = linear.weight.prepare().derived(x)
    with pytest.raises(ValueError, match=r"\[bsr_linear\] derived.packed must have at least \d+ bytes"):
        torch.ops.rarefy.bsr_linear(
            x, linear.weight.values, linear.weight.plan, None, 64, 48, prepared, packed[:-64].clone(), key
        )
    packed_for_other_values = torch.ops.rarefy.bsr_pack(
        linear.weight.values + 1, linear.weight.plan, prepared, 64, 48, torch.bfloat16
    )
    with pytest.raises(RuntimeError, match=r"a kernel|an implementation"):  # pairs is forced: no other
        torch.ops.rarefy.bsr_linear(
            x, linear.weight.values, linear.weight.plan, None, 64, 48, prepared, packed_for_other_values, key
        )


def test_both_products_have_one_weight_that_is_packed_whole():
    """Where Hopper leaves no zeros out, linear and grad_input share the copy of W."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    layer = rarefy.BlockSparseLinear(
        2048, 2048, density=0.5, block_shape=(8, 8), device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(300, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert rarefy.explain(layer, x)["kernel"] == "sm90_whole_linear"
    for _ in range(2):  # the second time values are packed
        layer.weight.derived(x)
    packed = layer.weight.derived(x)[1]
    assert packed.numel() == 2 * 2048 * 2048
    assert layer.weight.derived(x.detach())[1] is packed
    layer(x).sum().backward()
    want = layer.weight.to_dense().double().sum(0).expand(300, -1)
    torch.testing.assert_close(x.grad.double(), want, rtol=2**-7, atol=2**-6)


def test_values_packed_in_the_call_are_those_of_the_call(device):
    """Blocks whose kernel wants W packed, where machines have one: in training, graphs and captures."""
    generator = torch.Generator().manual_seed(0)
    layer = rarefy.BlockSparseLinear(
        256, 192, density=0.4, block_shape=(32, 32), dtype=torch.bfloat16, generator=generator
    ).to(device)
    weight, x = layer.weight, torch.randn(300, 256, device=device).bfloat16()
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)

    def check(y: torch.Tensor) -> None:
        want = x.double() @ weight.to_dense().double().T + layer.bias.double()
        torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=2**-6)

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):  # nothing packed is held: each step has other values
        inputs = x.detach().requires_grad_()
        y = layer(inputs)
        check(y)
        y.sum().backward()
        dx = weight.to_dense().double().sum(0).expand(300, -1)
        torch.testing.assert_close(inputs.grad.double(), dx, rtol=2**-7, atol=2**-6)
        if hopper:
            prepared, packed, _ = weight._kept[torch.bfloat16].unpacked()
            assert prepared is not None and packed is None
            assert rarefy.explain(layer, x)["kernel"] == "sm90_unions_linear"
        optimizer.step()
        optimizer.zero_grad()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            check(layer(x))
            check(compiled(x))
            weight.values.mul_(-2)
    if device != "cuda":
        return
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(2):
            graph.replay()
            check(y)
            weight.values.mul_(0.5)


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no GPU of compute capability 9.0",
)


@on_hopper
@pytest.mark.parametrize("block", [(32, 32), (16, 16), (32, 1), (16, 1), (64, 64)])
def test_gradients_of_what_is_packed_for_both_are_those_of_calls_that_pack(block):
    torch.manual_seed(0)
    weight = rarefy.BlockSparseLinear(
        1024, 768, density=0.1, block_shape=block, device="cuda", dtype=torch.bfloat16
    ).weight
    x = torch.randn(700, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(700, 768, device="cuda", dtype=torch.bfloat16)
    gradients, outputs = [], []
    for call in range(4):
        x.grad = None
        outputs.append(weight.linear(x))
        outputs[-1].backward(dy)
        gradients.append(x.grad)
        packed = weight._kept[torch.bfloat16]._packed[1]
        wanted = weight._kept[torch.bfloat16].gradient_bytes
        assert (packed is not None and packed.numel() == wanted) == (call > 0 and wanted > 0)
    assert (wanted > 0) == (block != (64, 64))
    for y, dx in zip(outputs[1:], gradients[1:], strict=True):
        assert torch.equal(y, outputs[0]) and torch.equal(dx, gradients[0])
    with torch.no_grad():
        weight.values.mul_(2)
    x.grad = None
    weight.linear(x).backward(dy)
    assert torch.equal(x.grad, 2 * gradients[0])


@on_hopper
def test_tf32_follows_torchs_switch():
    """Off: f32. On: errors of tf32's size, in all three products, compiled too; off again: f32."""
    linear = rarefy.BlockSparseLinear(512, 768, density=0.3, block_shape=(32, 32), device="cuda")
    x = torch.randn(1000, 512, device="cuda", requires_grad=True)
    dy = torch.randn(1000, 768, device="cuda")
    w, x64, dy64 = linear.weight.to_dense().detach().double(), x.detach().double(), dy.double()
    dw = (dy64.T @ x64).view(24, 32, 16, 32).transpose(1, 2)[linear.weight.block_mask()]
    want = (x64 @ w.T + linear.bias.detach().double(), dy64 @ w, dw)
    compiled = torch.compile(linear, fullgraph=True, backend="eager")

    def errors(layer):
        x.grad = linear.weight.values.grad = None
        y = layer(x)
        y.backward(dy)
        got = (y.detach(), x.grad, linear.weight.values.grad)
        return [float((g.double() - r).norm() / r.norm()) for g, r in zip(got, want, strict=True)]

    def is_exact(layer):
        return all(error < 1e-6 for error in errors(layer))

    def is_rounded(layer):
        return all(1e-5 < error < 1e-3 for error in errors(layer))

    try:
        assert is_exact(linear) and is_exact(compiled)
        torch.backends.cuda.matmul.allow_tf32 = True
        for _ in range(3):  # values packed in the call, then kept
            assert is_rounded(linear)
        assert is_rounded(compiled)
        torch.backends.cuda.matmul.allow_tf32 = False
        assert is_exact(linear) and is_exact(compiled)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert is_rounded(linear)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert is_exact(linear)
