"""What tests of moving patterns share: small layers and data, and a masked dense oracle in plain loops."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from rarefy import BlockSparseLinear
from rarefy.masks import expand_mask, to_blocks
from rarefy.prune import sparse_start

K, N, TOKENS = 30, 41, 24


def layer_of(form: str, density: float, seed: int = 1) -> BlockSparseLinear:
    """A float64 layer, (41, 30), with a random pattern."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(K, N, dtype=torch.float64))
    sparse_start(model, form, density, seed=seed)
    return model[0]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(TOKENS, K, dtype=torch.float64, generator=generator)
    return x, torch.randn(TOKENS, N, dtype=torch.float64, generator=generator)


def block_norms(dense: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Norms by plain loops."""
    rows, cols = -(-dense.shape[0] // block[0]), -(-dense.shape[1] // block[1])
    norms = torch.zeros(rows, cols, dtype=torch.float64)
    for i in range(rows):
        for j in range(cols):
            part = dense[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            norms[i, j] = math.sqrt(sum(v * v for v in part.flatten().tolist()))
    return norms


def best(scores: torch.Tensor, among: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """The `count` largest among some positions, by a plain sort."""
    places = sorted(map(tuple, among.nonzero().tolist()), key=lambda at: -float(scores[at]))
    return places[:count]


def mask_at(places, like: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(like)
    for at in places:
        mask[at] = True
    return mask


class Oracle:
    """The layer as an nn.Linear whose weight is zero outside a mask, and one step of a method."""

    def __init__(self, layer: BlockSparseLinear, optimizer_type, options) -> None:
        self.block, self.mask = layer.block_shape, layer.weight.block_mask()
        self.linear = layer.to_dense()
        self.optimizer = optimizer_type(self.linear.parameters(), **options)

    def elements(self) -> torch.Tensor:
        return expand_mask(self.mask, (N, K), self.block)

    def step(self, x, target) -> torch.Tensor:
        """A training step with masked gradients; the whole gradient."""
        self.optimizer.zero_grad()
        functional.mse_loss(self.linear(x), target).backward()
        whole = self.linear.weight.grad.clone()
        self.linear.weight.grad *= self.elements()
        self.optimizer.step()
        return whole

    def move(self, new: torch.Tensor) -> None:
        assert int(new.sum()) == int(self.mask.sum())
        old, self.mask = self.elements(), new
        kept = old & self.elements()
        with torch.no_grad():
            self.linear.weight *= kept
            for state in self.optimizer.state[self.linear.weight].values():
                if state.shape == self.linear.weight.shape:
                    state *= kept

    def drop(self, fraction: float) -> torch.Tensor:
        nnzb = int(self.mask.sum())
        norms = block_norms(self.linear.weight.detach(), self.block)
        return mask_at(best(norms, self.mask, nnzb - round(fraction * nnzb)), self.mask)

    def grow(self, kept: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return kept | mask_at(best(wanted, ~kept, int(self.mask.sum() - kept.sum())), self.mask)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
]
FORMS = ["block:4x3", "csr", "block:8x1", "block:16x16"]


def follow(method, layer, oracle, wanted, steps=13, every=3) -> None:
    """Trains layer and oracle alike; `wanted(oracle, whole gradient, fraction)` is the oracle's new mask."""
    values, memory = layer.weight.values, layer.weight.values.data_ptr()
    for step in range(1, steps + 1):
        x, target = data(step)
        method.optimizers[0].zero_grad()
        functional.mse_loss(layer(x), target).backward()
        method.optimizers[0].step()
        moves = method.step()
        whole = oracle.step(x, target)
        assert bool(moves) == (step % every == 0)
        if moves:
            fraction = 0.4 * (1 + math.cos(math.pi * step / 20)) / 2
            oracle.move(wanted(oracle, whole, fraction))
        assert torch.equal(layer.weight.block_mask(), oracle.mask), f"step {step}"
        torch.testing.assert_close(layer.weight.to_dense(), oracle.linear.weight, rtol=1e-9, atol=1e-12)
    assert layer.weight.values is values and values.data_ptr() == memory
    state = method.optimizers[0].state[values]
    other = oracle.optimizer.state[oracle.linear.weight]
    for key, tensor in other.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape == (N, K):
            blocks = to_blocks(tensor, layer.block_shape)[oracle.mask].reshape(values.shape)
            torch.testing.assert_close(state[key], blocks, rtol=1e-8, atol=1e-13)


def rigl(oracle, whole, fraction):
    return oracle.grow(oracle.drop(fraction), block_norms(whole, oracle.block))
