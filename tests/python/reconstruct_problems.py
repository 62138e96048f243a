"""What the tests of reconstruction share: a weight with correlated inputs, a small model, its data."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def problem(n=48, k=96, tokens=300, seed=0):
    """A weight, and inputs that are correlated and of different size."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g, dtype=torch.float64) / k**0.5 + torch.eye(k)
    x = torch.randn(tokens, k, generator=g, dtype=torch.float64) @ mix
    x *= torch.rand(k, generator=g, dtype=torch.float64) * 3 + 0.1
    return torch.randn(n, k, generator=g, dtype=torch.float64), x.T @ x


def optimal(weight, gram, mask):
    """Least squares row by row, in numpy."""
    h = gram.numpy() + 0.01 * np.mean(np.diag(gram.numpy())) * np.eye(len(gram))
    out = np.zeros(weight.shape)
    for r, row in enumerate(weight.numpy()):
        s = mask[r].numpy()
        if s.any():
            out[r, s] = np.linalg.solve(h[np.ix_(s, s)], h[s] @ row)
    return torch.from_numpy(out)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(torch.relu(self.conv(x)).mean((2, 3)))))


def data():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(64, 4, 6, 6, generator=g) for _ in range(3)]
