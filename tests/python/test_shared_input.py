"""Layers that see one x run as one op, and nobody can tell but by the clock."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import rarefy
from rarefy import shared_input

K, N = 64, 48
SPECS = [
    ("block:4x1@0.5", torch.float32),
    ("block:16x16@0.5", torch.float32),
    ("block:16x1@0.5", torch.bfloat16),
    ("block:16x1@0.5:bf16x", torch.float32),
    ("block:16x1@0.5:bf16", torch.float32),
    ("block:16x1@0.5:int8", torch.float32),
    ("block:16x1@0.5:w8", torch.float32),
    ("csr@0.3", torch.float32),
]


@pytest.fixture(autouse=True)
def _few_tokens_share_too(monkeypatch):
    monkeypatch.setattr(shared_input, "_ELEMENTS", 0)


class Attention(nn.Module):
    """q, k and v of one x, or of two; o of the same width."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(K, K), nn.Linear(K, N), nn.Linear(K, N), nn.Linear(K, K)

    def forward(self, x, other=None):
        q = self.q(x)
        other = x if other is None else other
        return q, self.k(other), self.v(other), self.o(q)


def model(spec="block:4x1@0.5", dtype=torch.float32, fuse=True):
    torch.manual_seed(0)
    made = nn.ModuleDict({"attention": Attention()}).to(dtype)
    rarefy.sparsify(made, {".*": spec}, measure=False, fuse=fuse)
    return made["attention"].eval()


@pytest.fixture
def ran(monkeypatch):
    """How many weights each op had."""
    counts, op = [], shared_input._linears

    def counting(x, values, *rest):
        counts.append(len(values))
        return op(x, values, *rest)

    monkeypatch.setattr(shared_input, "_linears", counting)
    return counts


def same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous() and a.requires_grad == b.requires_grad


@pytest.mark.parametrize(("spec", "dtype"), SPECS)
@pytest.mark.parametrize("tokens", [1, 7, 80])
def test_the_same_bits_from_the_second_x_on(ran, spec, dtype, tokens):
    shared, alone = model(spec, dtype), model(spec, dtype, fuse=False)
    assert alone.q.shares is None
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, tokens, K, dtype=dtype)
            same(shared(x), alone(x))
    # What CSR's kernel derives depends on the number of rows, in which these layers differ.
    assert ran == ([] if spec.startswith("csr") else [3, 3, 3])


def test_recorded_calls_are_those_of_the_layers(ran):
    shared, alone = model(), model(fuse=False)
    for _ in range(3):
        x = torch.randn(9, K)
        grads = []
        for each in (shared, alone):
            each.zero_grad()
            mine = x.clone().requires_grad_()
            sum(y.square().sum() for y in each(mine)).backward()
            grads.append([mine.grad, *(p.grad for p in each.parameters())])
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)
    assert ran == []
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(9, K)
            same(shared(x), alone(x))
    assert ran == [3]


def test_two_inputs(ran):
    shared, alone = model(), model(fuse=False)
    with torch.no_grad():
        for _ in range(3):
            x, other = torch.randn(9, K), torch.randn(5, K)
            same(shared(x, other), alone(x, other))
    assert ran == [2, 2]
    with torch.no_grad():  # and back to one: the first x is a surprise
        for _ in range(2):
            x = torch.randn(9, K)
            same(shared(x), alone(x))
    assert ran == [2, 2, 3]


def test_what_changes_between_is_seen(ran):
    shared, alone = model(), model(fuse=False)
    with torch.no_grad():
        for each in (shared, alone):
            each(torch.randn(9, K))
        x = torch.randn(9, K)
        results = []
        for each in (shared, alone):
            mine = x.clone()
            q = each.q(mine)
            each.k.weight.values.mul_(2)  # a weight
            each.v.bias.add_(1)
            k, v = each.k(mine), each.v(mine)
            mine.add_(1)  # x itself
            results.append((q, k, v, each.k(mine), each.v(mine)))
        same(*results)
    assert ran == [3]


def layers_of(attention):
    return attention.q, attention.k, attention.v


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        ("block:16x1@0.5:int8", lambda weight: setattr(weight, "dynamic", False)),
        ("block:16x1@0.5:bf16x", lambda weight: weight.stored_as(None, rounds_x=False)),
        ("block:16x1@0.5", lambda weight: weight.stored_as(torch.bfloat16)),
    ],
)
def test_another_mode_of_the_weights_is_seen(ran, spec, change):
    shared, alone = model(spec), model(spec, fuse=False)
    with torch.no_grad():
        for _ in range(2):
            shared(torch.randn(80, K))
        before = shared(torch.ones(80, K))
        for each in (shared, alone):
            for layer in layers_of(each):
                change(layer.weight)
        for _ in range(2):
            x = torch.randn(80, K)
            same(shared(x), alone(x))
        assert not torch.equal(shared(torch.ones(80, K) / 3)[0], before[0])
    assert set(ran) == {3}


def test_frozen_weights_stay_packed_when_gradients_are_on(monkeypatch):
    held, op = [], shared_input._linears
    monkeypatch.setattr(shared_input, "_linears", lambda *args: (held.append(args[8]), op(*args))[1])
    shared = model("block:16x1@0.5:int8").requires_grad_(False)
    for _ in range(2):
        shared(torch.randn(80, K))
    for layer in layers_of(shared):
        layer.weight.values.copy_(layer.weight.values.clone())  # as load_state_dict does
    for _ in range(2):
        shared(torch.randn(80, K))
    packs = shared.q.weight.derived(torch.randn(80, K)) != ()
    assert len(held) == 3 and all((packed is not None) == packs for call in held for packed in call)


def test_an_x_that_a_buffer_fills_anew_finds_nothing_old():
    shared, alone = model(), model(fuse=False)
    with torch.no_grad():
        shared(torch.randn(9, K))
        x = torch.randn(9, K)
        shared.q(x)  # and what follows does not come: an error, say
        x.numpy()[:] *= 2  # no version counts this
        same(shared(x), alone(x))
        for _ in range(9):
            for layer in layers_of(shared):
                layer(x)
        assert len(shared.q.shares[0]._round.called) == 3  # not one for every call


def test_x_that_do_not_fit_go_the_layers_way():
    shared, alone = model(), model(fuse=False)
    with torch.no_grad():
        for _ in range(2):
            shared(torch.randn(9, K))
        for x in (torch.randn(9, K + 1), torch.randn(()), torch.ones(9, K, dtype=torch.int32)):
            with pytest.raises((ValueError, TypeError)) as wanted:
                alone.q(x)
            with pytest.raises(type(wanted.value)) as got:
                shared.q(x)
            assert str(got.value) == str(wanted.value)
        assert shared.q(torch.empty(9, K, device="meta")).shape == (9, K)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls its nested tensors a prototype
            parts = [torch.randn(3, K), torch.randn(5, K)]
            for _ in range(3):
                x = torch.nested.nested_tensor(parts)
                for got, wanted in zip(shared(x), alone(x), strict=True):
                    same(got.unbind(), wanted.unbind())


def test_weights_of_inference_mode_run_alone(ran):
    """Nothing counts the writes to them: one between q and k must be seen."""
    with torch.inference_mode():
        shared = model()
    with torch.no_grad():
        for _ in range(2):
            shared(torch.randn(9, K))
        x = torch.randn(9, K)
        shared.q(x)
        with torch.inference_mode():
            shared.k.weight.values.mul_(2)
            shared.k.bias.zero_()
        want = x @ shared.k.weight.to_dense().T
        torch.testing.assert_close(shared.k(x), want, rtol=1e-4, atol=1e-4)
    assert ran == []


def test_a_result_of_inference_mode_stays_there():
    shared = model()
    with torch.no_grad():
        shared(torch.randn(9, K))
        x = torch.randn(9, K)
        with torch.inference_mode():
            assert shared.q(x).is_inference()
        assert not shared.k(x).is_inference()


def test_a_trace_says_nothing_of_it():
    shared = model()
    with torch.no_grad(), warnings.catch_warnings():
        shared(torch.randn(9, K))
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced, x = torch.jit.trace(shared, torch.randn(9, K), check_trace=False), torch.randn(9, K)
        same(traced(x), shared(x))


def test_a_model_leaves_its_memory():
    shared = model()
    with torch.no_grad():
        for _ in range(3):
            shared(torch.randn(9, K))
    gone = weakref.ref(shared.k.weight.values)
    gc.collect()
    gc.disable()
    try:
        del shared
        assert gone() is None  # at once: nothing that only the collector finds
    finally:
        gc.enable()


def test_results_are_handed_out_once():
    shared = model()
    with torch.no_grad():
        shared(torch.randn(9, K))
        x = torch.randn(9, K)
        shared.q(x)
        first, second = shared.k(x), shared.k(x)
        assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)


def test_hooks_run(ran):
    shared, seen = model(), []
    shared.k.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    with torch.no_grad():
        for _ in range(2):
            shared(torch.randn(9, K))
    assert ran == [3] and seen == [(9, N)] * 2


def test_copies_and_pickles_have_their_own(ran):
    shared = model()
    with torch.no_grad():
        shared(torch.randn(9, K))
        for other in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
            assert other.q.shares[0] is other.k.shares[0] is not shared.q.shares[0]
            other.k.weight.values.zero_()
            for _ in range(2):
                x = torch.randn(9, K)
                _, k, v, _ = other(x)
                assert torch.equal(k, other.k.bias.expand_as(k)) and not torch.equal(v, shared.k(x))
        assert ran == [3, 3]
        lone = copy.deepcopy(shared.q)
        for _ in range(2):
            x = torch.randn(9, K)
            assert torch.equal(lone(x), shared.q(x))


def test_what_does_not_fit_runs_alone(ran):
    torch.manual_seed(0)
    made = nn.ModuleDict({"attention": Attention()})
    rarefy.sparsify(made, {".*q": "block:16x1@0.5:int8", ".*[kv]": "block:16x1@0.5"}, measure=False)
    attention = made["attention"].eval()
    with torch.no_grad():
        for _ in range(2):
            attention(torch.randn(9, K))
    assert ran == [2]  # k and v
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        attention(torch.randn(9, K))
    with torch.inference_mode():
        attention(torch.randn(9, K))
    assert ran == [2]


def test_little_work_is_not_worth_it(ran, monkeypatch):
    shared = model()
    monkeypatch.setattr(shared_input, "_ELEMENTS", 10 * K)
    with torch.no_grad():
        for tokens in (9, 9, 10, 10):
            shared(torch.randn(tokens, K))
    assert ran == [3]


def test_fuse_takes_it_back():
    made = nn.ModuleDict({"attention": model()})
    rarefy.fuse(made, False)
    assert made["attention"].q.shares is None
    rarefy.fuse(made)
    assert made["attention"].q.shares is not None


def test_compiles():
    shared = model()
    with torch.no_grad():
        x = torch.randn(9, K)
        for a, b in zip(torch.compile(shared)(x), shared(x), strict=True):
            torch.testing.assert_close(a, b)


def test_other_devices_are_not_watched():
    """There each layer goes its own way; to watch would only cost the host its time."""
    shared = model().to("meta")
    with torch.no_grad():
        for _ in range(2):
            shared(torch.randn(9, K, device="meta"))
    assert shared.q.shares[0]._round is None
