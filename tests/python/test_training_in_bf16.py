"""Training in bfloat16 with float32 master values: autocast and the usual optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rarefy

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.3),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=4),
}


def task(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    sparse = copy.deepcopy(model)
    rarefy.sparsify(sparse, {"0": "block:16x1@0.5", "2": "block:4x4@0.5"}, measure=False)
    x = torch.randn(128, 32)
    return sparse.to(device), x.to(device), torch.tanh(x[:, :16] * 2).to(device)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_usual_optimizers_train_float32_values(device, name):
    model, x, wanted = task(device)
    optimizer = OPTIMIZERS[name](model.parameters())

    def loss():
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        value = (y.float() - wanted).square().mean()
        value.backward()
        return value

    losses = [float(optimizer.step(loss).detach()) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32 and bool(parameter.isfinite().all())
        assert parameter.grad.dtype == torch.float32 and bool(parameter.grad.isfinite().all())
    state = [
        t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.ndim
    ]
    assert all(t.dtype == torch.float32 for t in state)


def test_a_step_is_that_of_a_masked_dense_layer(device):
    """Which multiplies in bfloat16 as well: gradients differ by its roundings alone."""
    model, x, _ = task(device)
    layer = model[0]
    dense = layer.to_dense()
    kept = layer.weight.to_dense() != 0
    for each in (layer, dense):
        with torch.autocast(device, torch.bfloat16):
            y = each(x)
        y.float().square().mean().backward()
    gradient = torch.zeros_like(dense.weight)
    gradient[kept] = dense.weight.grad[kept]
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.values.copy_(layer.weight.values.grad)
    mine = twin.weight.to_dense()
    scale = float(gradient.abs().max())
    torch.testing.assert_close(mine, gradient, rtol=2**-6, atol=2**-7 * scale)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad, rtol=2**-6, atol=2**-7)


# Adafactor's state is of a matrix's rows and columns, which values in blocks are not.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adafactor"])
def test_a_step_of_an_optimizer_is_that_of_a_masked_dense_network(device, name):
    """Values and biases move as those of dense layers whose other weights stay zero."""
    model, x, wanted = task(device)
    dense = copy.deepcopy(model)
    rarefy.desparsify(dense)
    masks = {at: model[int(at)].weight.to_dense().detach() != 0 for at in "02"}
    before = {at: dense[int(at)].weight.detach().clone() for at in "02"}
    for at, mask in masks.items():
        dense[int(at)].weight.register_hook(lambda grad, mask=mask: grad * mask)
    for net in (model, dense):
        optimizer = OPTIMIZERS[name](net.parameters())

        def loss(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                y = net(x)
            value = (y.float() - wanted).square().mean()
            value.backward()
            return value

        if name == "LBFGS":
            optimizer.param_groups[0]["max_iter"] = 1
        optimizer.step(loss)
    for at, mask in masks.items():
        moved, twin = (net[int(at)] for net in (model, dense))
        steps = [w.detach() - before[at] for w in (moved.weight.to_dense(), twin.weight)]
        # Where a gradient is little more than bfloat16's roundings, steps by its sign may go either way.
        gradient = twin.weight.grad.abs()
        clear = mask & (gradient > 2**-4 * gradient.max())
        assert clear.sum() > mask.sum() // 4
        size = float(steps[1].abs().max())
        torch.testing.assert_close(steps[0][clear], steps[1][clear], rtol=2**-5, atol=2**-6 * size)
        assert not steps[0][~mask].any()
