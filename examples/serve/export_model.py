"""Writes the AOTInductor package that serve.cc runs, an input and what the model makes of it.

python examples/serve/export_model.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import rarefy


def main(folder: Path) -> None:
    """A feed-forward network in blocks of 16×4, for any number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval().requires_grad_(False)
    rarefy.sparsify(model, "block:16x4@0.5", measure=False)
    x = torch.randn(8, 64)
    rows = ({0: torch.export.Dim("rows", min=1, max=4096)},)
    program = torch.export.export(model, (x,), dynamic_shapes=rows)
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    x = torch.randn(5, 64)
    x.numpy().tofile(folder / "x.bin")
    model(x).numpy().tofile(folder / "y.bin")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
