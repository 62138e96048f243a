"""What the tests of rarefy.prune share: a small model, its data, pruning in a few calls."""

from __future__ import annotations

import torch
from torch import nn

from rarefy.prune import Sparsifier


class Net(nn.Module):
    """A convolution with groups, and two layers with ragged sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 12, 3, padding=1, groups=2)
        self.up = nn.Linear(12, 30)
        self.down = nn.Linear(30, 10)

    def forward(self, x):
        return self.down(torch.relu(self.up(torch.relu(self.conv(x)).mean((2, 3)))))


def batch() -> torch.Tensor:
    return torch.randn(16, 4, 6, 6, generator=torch.Generator().manual_seed(5))


def observed(sparsifier: Sparsifier, model: nn.Module) -> None:
    sparsifier.calibrate([batch()])
    model(batch()).square().mean().backward()
    sparsifier.observe()


def same_state(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def squashed(model: nn.Module, *args, **options) -> Sparsifier:
    sparsifier = Sparsifier(*args, **options)
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    return sparsifier
