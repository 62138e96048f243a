"""A small sparse model with padding, its dense skeleton, and what a file of it holds."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

import rarefy
from rarefy import BlockSparseLinear, BsrWeight


def small() -> nn.Module:
    """fc: 9 x 11 with blocks of 4 x 3, padded at both edges; rows of blocks hold 2, 0 and 3."""
    torch.manual_seed(1)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]]).bool()
    weight = BsrWeight.from_dense(torch.randn(9, 11), block_shape=(4, 3), mask=mask)
    model = nn.Module()
    model.fc = BlockSparseLinear.from_weight(weight, torch.randn(9))
    model.norm = nn.LayerNorm(9)
    return model


def skeleton_of_small() -> nn.Module:
    model = nn.Module()
    model.fc, model.norm = nn.Linear(11, 9), nn.LayerNorm(9)
    return model


def saved(model: nn.Module, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    rarefy.save_file(model, folder / "m.safetensors")
    return read(folder / "m.safetensors")


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
