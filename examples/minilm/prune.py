"""Which blocks to keep, and how the kept ones make up for the others: layer-wise reconstruction.

For one linear layer with calibration inputs X, the pruned weights should change X Wᵀ least. Optimal Brain
Surgeon (Hassibi & Stork 1993), layer by layer as in Optimal Brain Compression (Frantar & Alistarh 2022),
answers both questions from H = XᵀX; here whole R×C blocks leave, C input features of R neighbouring outputs.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from .model import embed_batch, tokenize

INVERSE_BYTES = 256 << 20  # of inverse Hessians held at a time


@torch.inference_mode()
def input_grams(
    model: nn.Module, tokenizer, texts: list[str], pattern: str, batch_size: int = 64
) -> dict[str, Tensor]:
    """XᵀX (K, K) f32 of the inputs of each linear layer whose name matches; padding tokens are left out."""
    grams: dict[str, Tensor] = {}
    keep: Tensor | None = None

    def observer(name: str):
        def observe(_module, inputs):
            x = inputs[0].flatten(0, -2)[keep].float()
            grams[name] = grams.get(name, 0) + x.T @ x

        return observe

    layers = {name: m for name, m in model.named_modules() if re.fullmatch(pattern, name)}
    hooks = [layer.register_forward_pre_hook(observer(name)) for name, layer in layers.items()]
    try:
        texts = sorted(texts, key=len)
        for start in range(0, len(texts), batch_size):
            batch = tokenize(tokenizer, texts[start : start + batch_size])
            keep = batch["attention_mask"].flatten().bool()
            embed_batch(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return grams


def reconstruct(
    weight: Tensor, gram: Tensor, block_shape: tuple[int, int], density: float, steps: int = 16
) -> tuple[Tensor, Tensor]:
    """Prunes (N, K) weights to the density in blocks, and corrects what stays.

    weight: (N, K) f32, divisible by the block shape (R, C). gram: (K, K), XᵀX of calibration inputs.
    Returns the pruned weights (N, K) and the block mask (N/R, K/C) bool; every block row keeps
    round(density·K/C) blocks, so the work stays balanced.
    """
    (n, k), (r, c) = weight.shape, block_shape
    drop = k // c - round(density * (k // c))
    gram = gram.double()
    gram.diagonal().add_(0.01 * gram.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram)).float()
    groups = weight.detach().reshape(n // r, r, k)
    out = torch.empty_like(groups)
    mask = torch.empty(n // r, k // c, dtype=torch.bool)
    chunk = max(1, INVERSE_BYTES // (4 * k * k))
    for start in range(0, len(groups), chunk):
        part = slice(start, start + chunk)
        out[part], mask[part] = _remove(groups[part].clone(), inverse, c, drop, steps)
    return out.view(n, k), mask


def _remove(w: Tensor, inverse: Tensor, c: int, drop: int, steps: int) -> tuple[Tensor, Tensor]:
    """Takes `drop` blocks of c input features out of every block row of w (G, R, K), a few at a time."""
    g, r, k = w.shape
    h = inverse.repeat(g, 1, 1)
    keep = torch.ones(g, k // c, dtype=torch.bool)
    done = 0
    for step in range(steps):
        count = drop * (step + 1) // steps - done
        done += count
        blocks = _cost(w, h, c).masked_fill_(~keep, torch.inf).topk(count, dim=1, largest=False).indices
        keep.scatter_(1, blocks, False)
        gone = (blocks.unsqueeze(2) * c + torch.arange(c)).flatten(1)
        rows = h.gather(1, gone.unsqueeze(2).expand(-1, -1, k))
        corner = rows.gather(2, gone.unsqueeze(1).expand(-1, count * c, -1))
        solved = torch.linalg.solve(corner, rows)
        w.baddbmm_(w.gather(2, gone.unsqueeze(1).expand(-1, r, -1)), solved, alpha=-1)
        h.baddbmm_(rows.transpose(1, 2), solved, alpha=-1)
        w.masked_fill_(~keep.repeat_interleave(c, 1).unsqueeze(1), 0)
    return w, keep


def _cost(w: Tensor, h: Tensor, c: int) -> Tensor:
    """The change of the outputs if a block B leaves and the others adapt, tr(B (H⁻¹)_BB⁻¹ Bᵀ): (G, K/c)."""
    g, r, k = w.shape
    if c == 1:
        return w.square().sum(1) / h.diagonal(dim1=1, dim2=2).clamp(min=1e-30)
    corner = h.view(g, k // c, c, k // c, c).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    blocks = w.view(g, r, k // c, c).permute(0, 2, 3, 1)
    solved = torch.linalg.solve(corner + 1e-12 * torch.eye(c), blocks)
    return (blocks * solved).sum((2, 3))


def prune(
    model: nn.Module, tokenizer, texts: list[str], pattern: str, block_shape: tuple[int, int], density: float
) -> dict[str, Tensor]:
    """Reconstructs, in place, each linear layer whose name matches; returns their block masks by name."""
    masks = {}
    for name, gram in input_grams(model, tokenizer, texts, pattern).items():
        layer = model.get_submodule(name)
        weight, masks[name] = reconstruct(layer.weight, gram, block_shape, density)
        layer.weight.data.copy_(weight)
    return masks
