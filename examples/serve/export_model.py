"""Writes the AOTInductor packages that serve.cc runs, each with an input and what the model makes of it.

python examples/serve/export_model.py FOLDER      # FOLDER/layers, FOLDER/sparse
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import rarefy
from rarefy import sparse


def feed_forward() -> nn.Module:
    """A feed-forward network in blocks of 16×4."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval().requires_grad_(False)
    rarefy.sparsify(model, "block:16x4@0.5", measure=False)
    return model


class Family(nn.Module):
    """Products of `rarefy.sparse`: a CSR matrix, attention on blocks of scores, a convolution.

    Of 32 tokens of 64 features, which the convolution sees as images of 8 × 8 with 32 channels.
    """

    def __init__(self) -> None:
        super().__init__()
        stored = torch.rand(64, 64) < 0.2
        start = torch.cat((torch.zeros(1), stored.sum(1).cumsum(0))).int()
        indices = stored.nonzero()[:, 1].int()
        self.matrix = sparse.SparseMatrix(torch.randn(len(indices)), indices, start, shape=(64, 64))
        causal = torch.ones(4, 4).tril() > 0
        self.scores = rarefy.BsrPattern.from_mask(causal, shape=(32, 32), block_shape=(8, 8))
        conv = nn.Conv2d(32, 32, 3, padding=1)
        self.conv = rarefy.BlockSparseConv2d.from_dense(conv, block_shape=(8, 1), density=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(32, 64) to (32, 64)."""
        y = sparse.sparse_dense(x, self.matrix, activation="silu")
        y = sparse.sparse_attention(y, y, y, self.scores, causal=True)
        return self.conv(y.view(1, 32, 8, 8)).reshape(32, 64)


def export(model: nn.Module, folder: Path, x: Tensor, dynamic_shapes: object = None) -> None:
    """The package, for shapes like x's, and the files x.bin and y.bin."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=dynamic_shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        x.numpy().tofile(folder / "x.bin")
        model(x).contiguous().numpy().tofile(folder / "y.bin")


def main(folder: Path) -> None:
    """Both models; the layers for any number of rows."""
    torch.manual_seed(0)
    rows = ({0: torch.export.Dim("rows", min=1, max=4096)},)
    export(feed_forward(), folder / "layers", torch.randn(5, 64), rows)
    export(Family().eval().requires_grad_(False), folder / "sparse", torch.randn(32, 64))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
