"""A call of a layer that ran before allocates what it returns, and nothing else."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import rarefy

CASES = [  # out, in, block, tokens: small, a few tokens, several tiles and threads
    (48, 64, (4, 4), 512),
    (48, 64, (16, 16), 1),
    (768, 3072, (4, 1), 512),
    (256, 4096, (32, 32), 2048),
]


def allocations(call):
    """Sizes of what torch's CPU allocator gives in a call, in order, and what the call returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = call()
    events = profiled.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0], result


def sizes(*tensors):
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def test_the_profiler_sees_allocations():
    assert allocations(lambda: torch.ones(100) + torch.ones(100))[0] == [400] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features", "block_shape", "tokens"), CASES)
def test_a_steady_call_allocates_its_outputs_alone(out_features, in_features, block_shape, tokens, dtype):
    layer = rarefy.BlockSparseLinear(
        in_features, out_features, density=0.5, block_shape=block_shape, dtype=dtype
    )
    x = torch.randn(tokens, in_features, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
        given, y = allocations(lambda: layer(x))
    assert given == sizes(y)
    y, leaves = layer(x), (x, layer.weight.values, layer.bias)

    def backward():
        return torch.autograd.grad(y, leaves, grad_output, retain_graph=True)

    grad_output = torch.ones_like(y)
    for _ in range(2):
        backward()
    given, gradients = allocations(backward)
    assert sorted(given) == sorted(sizes(*gradients))


@torch.no_grad()
def test_rows_at_even_strides_are_not_copied():
    """A dimension of one element has no say, whatever its stride."""
    layer = rarefy.BlockSparseLinear(48, 32, block_shape=(4, 4))
    memory = torch.randn(600)
    for size, stride in (((4, 48), (50, 1)), ((2, 1, 3, 48), (144, 7, 48, 1)), ((1, 5, 48), (3, 48, 1))):
        x = memory.as_strided(size, stride)
        layer(x)
        given, y = allocations(lambda x=x: layer(x))
        assert given == sizes(y), (size, stride)
        torch.testing.assert_close(y, layer(x.contiguous()))
