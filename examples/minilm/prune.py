"""Which blocks to keep, and how the kept ones make up for the others: reconstruction, layer after layer.

For one linear layer the pruned weights should give, on calibration inputs, what the dense model has there.
Optimal Brain Surgeon (Hassibi & Stork 1993), layer by layer as in Optimal Brain Compression (Frantar &
Alistarh 2022), says from XᵀX which blocks may leave; here whole R×C blocks leave, C input features of R
neighbouring outputs. X is what the pruned layers before it give, and the aim is what the dense model has
after the residual sum, so that a layer also mends what those before it broke.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .model import pad, token_ids

INVERSE_BYTES = 256 << 20  # of inverse Hessians held at a time
RIDGE = 0.01  # of the mean of XᵀX's diagonal: how strongly weights are held to the dense ones


class Moments:
    """[X 1]ᵀ[X 1] and [X 1]ᵀY over all tokens: what a least-squares fit of weights and bias needs."""

    def __init__(self, inputs: int, outputs: int):
        self.gram = torch.zeros(inputs + 1, inputs + 1)
        self.cross = torch.zeros(inputs + 1, outputs)

    def add(self, x: Tensor, y: Tensor) -> None:
        """x: (..., K) inputs; y: (..., N), the outputs that are wanted for them."""
        x = torch.nn.functional.pad(x.flatten(0, -2), (0, 1), value=1.0)
        self.gram.addmm_(x.T, x)
        self.cross.addmm_(x.T, y.flatten(0, -2))

    def ridged(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Both in f64, with a pull of the weights towards these; the bias follows freely."""
        pull = torch.full((len(self.gram),), RIDGE * self.gram.diagonal()[:-1].mean(), dtype=torch.double)
        pull[-1] = 1e-6 * self.gram[-1, -1]
        near = torch.cat([weight.T, bias.unsqueeze(0)]).double()
        return self.gram.double() + torch.diag(pull), self.cross.double() + pull.unsqueeze(1) * near


def reconstruct(
    layer: nn.Linear, moments: Moments, block_shape: tuple[int, int], density: float, steps: int = 24
) -> Tensor:
    """Prunes a layer with a bias to the density in blocks, in place, and fits what stays to the aim.

    Returns the block mask (N/R, K/C) bool. The number of kept blocks is that of the density over the whole
    layer; block rows that need more get more.
    """
    (n, k), (r, c) = layer.weight.shape, block_shape
    gram, cross = moments.ridged(layer.weight, layer.bias)
    fitted = torch.cholesky_solve(cross, torch.linalg.cholesky(gram)).T.float()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram)).float()
    groups = fitted.reshape(n // r, r, k + 1)
    mask = torch.empty(n // r, k // c, dtype=torch.bool)
    drop, done = mask.numel() - round(density * mask.numel()), 0
    chunk = max(1, INVERSE_BYTES // (4 * (k + 1) ** 2))
    for start in range(0, len(groups), chunk):
        part = slice(start, min(start + chunk, len(groups)))
        share = drop * part.stop // len(groups) - done
        mask[part] = _kept(groups[part].clone(), inverse, c, share, steps)
        done += share
    for row, kept in enumerate(mask):
        rows = slice(row * r, (row + 1) * r)
        used = torch.cat([kept.repeat_interleave(c), torch.ones(1, dtype=torch.bool)]).nonzero().flatten()
        solved = torch.cholesky_solve(cross[used, rows], torch.linalg.cholesky(gram[used][:, used])).T
        layer.weight[rows] = (
            torch.zeros(r, k + 1, dtype=torch.double).index_copy(1, used, solved)[:, :k].float()
        )
        layer.bias[rows] = solved[:, -1].float()
    return mask


def _kept(w: Tensor, inverse: Tensor, c: int, drop: int, steps: int) -> Tensor:
    """Takes `drop` blocks of c input features out of block rows w (G, R, K + 1), the cheapest first.

    Some leave at a time; returns which stay, (G, K/c) bool. The last column, the bias, always stays.
    """
    g, r, size = w.shape
    h = inverse.repeat(g, 1, 1)
    keep = torch.ones(g, (size - 1) // c, dtype=torch.bool)
    done = 0
    for step in range(steps):
        count = drop * (step + 1) // steps - done
        if count == 0:
            continue
        done += count
        cost = _cost(w[:, :, :-1], h[:, :-1, :-1], c).masked_fill_(~keep, torch.inf)
        leaves = torch.zeros_like(keep)
        leaves.view(-1)[cost.flatten().topk(count, largest=False).indices] = True
        keep &= ~leaves
        # Rows lose different numbers of blocks: what fills up the shorter lists is 0, and 1 on the diagonal.
        most = int(leaves.sum(1).max())
        real, blocks = leaves.float().topk(most, dim=1)
        real = real.repeat_interleave(c, 1)
        gone = (blocks.unsqueeze(2) * c + torch.arange(c)).flatten(1)
        rows = h.gather(1, gone.unsqueeze(2).expand(-1, -1, size)) * real.unsqueeze(2)
        corner = rows.gather(2, gone.unsqueeze(1).expand(-1, most * c, -1)) * real.unsqueeze(1)
        solved = torch.cholesky_solve(rows, torch.linalg.cholesky(corner + torch.diag_embed(1 - real)))
        w.baddbmm_(w.gather(2, gone.unsqueeze(1).expand(-1, r, -1)) * real.unsqueeze(1), solved, alpha=-1)
        h.baddbmm_(rows.transpose(1, 2), solved, alpha=-1)
        w[:, :, :-1].masked_fill_(~keep.repeat_interleave(c, 1).unsqueeze(1), 0)
    return keep


def _cost(w: Tensor, h: Tensor, c: int) -> Tensor:
    """The change of the outputs if a block B leaves and the others adapt, tr(B (H⁻¹)_BB⁻¹ Bᵀ): (G, K/c)."""
    g, r, k = w.shape
    if c == 1:
        return w.square().sum(1) / h.diagonal(dim1=1, dim2=2).clamp(min=1e-30)
    corner = h.reshape(g, k // c, c, k // c, c).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    blocks = w.reshape(g, r, k // c, c).permute(0, 2, 3, 1)
    solved = torch.linalg.solve(corner + 1e-12 * torch.eye(c), blocks)
    return (blocks * solved).sum((2, 3))


def grouped(importance: Tensor, rows: int, kept: int, rounds: int = 12) -> Tensor:
    """An order of outputs in which `rows` neighbours care for the same inputs.

    importance: (N, K) f32, what leaving a weight out costs; N is a multiple of rows. Groups keep their `kept`
    best inputs; outputs go, those with most to lose first, to the group that keeps most of theirs and has
    room. The round that kept most wins; the first one is the order as it is.
    """
    n, groups = len(importance), len(importance) // rows
    order, best, most = torch.arange(n), torch.arange(n), -1.0
    for _ in range(rounds):
        sums = importance[order].view(groups, rows, -1).sum(1)
        top = torch.zeros_like(sums).scatter_(1, sums.topk(kept, dim=1).indices, 1.0)
        if (found := (sums * top).sum().item()) > most:
            best, most = order, found
        gain = importance @ top.T
        chosen, room = torch.empty(n, dtype=torch.long), [rows] * groups
        for row in (gain.max(1).values - gain.mean(1)).argsort(descending=True).tolist():
            chosen[row] = group = int(gain[row].argmax())
            room[group] -= 1
            if room[group] == 0:
                gain[:, group] = -torch.inf
        order = chosen.argsort(stable=True)
    return best


def _regroup(up: nn.Linear, down: nn.Linear, moments: Moments, rows: int, density: float) -> None:
    """Orders the hidden features between two layers, in place, so that blocks of `up` fit."""
    gram, cross = moments.ridged(up.weight, up.bias)
    factor = torch.linalg.cholesky(gram)
    fitted, inverse = torch.cholesky_solve(cross, factor).T, torch.cholesky_inverse(factor).diagonal()
    kept = round(density * up.in_features)
    order = grouped((fitted.square() / inverse)[:, :-1].float(), rows, max(1, kept))
    up.weight.copy_(up.weight[order])
    up.bias.copy_(up.bias[order])
    down.weight.copy_(down.weight[:, order])
    moments.cross = moments.cross[:, order]


def same_lengths(tokenizer, texts: list[str], most: int = 64) -> Iterator[Tensor]:
    """Batches of token ids (B, T), B ≤ most, of texts of one length each: nothing is padded."""
    by_length: dict[int, list[list[int]]] = {}
    for row in token_ids(tokenizer, texts):
        by_length.setdefault(len(row), []).append(row)
    for length in sorted(by_length):
        rows = by_length[length]
        for start in range(0, len(rows), most):
            yield pad(rows[start : start + most], 0)["input_ids"]


@torch.no_grad()
def prune(
    model: nn.Module,
    student: nn.Module,
    tokenizer,
    texts: list[str],
    densities: dict[str, float],
    block_shape: tuple[int, int],
) -> dict[str, Tensor]:
    """Reconstructs, in place, the student's linear layers; block masks of those that are pruned, by name.

    model, student: the dense encoder and a copy of it (transformers' BertModel). densities: by regular
    expressions for names. Linear layers that none matches are fitted, too: they mend what the pruned ones
    before them broke. Hidden features of pruned feed-forward networks change places.
    """

    def density_of(name: str) -> float | None:
        return next((density for pattern, density in densities.items() if re.fullmatch(pattern, name)), None)

    masks: dict[str, Tensor] = {}
    wanted = [model.embeddings(ids) for ids in same_lengths(tokenizer, texts)]
    given = list(wanted)
    for number, (dense, sparse) in enumerate(zip(model.encoder.layer, student.encoder.layer, strict=True)):

        def moments_of(name: str, inputs: list[Tensor], outputs: list[Tensor], dense=dense) -> Moments:
            layer = dense.get_submodule(name)
            moments = Moments(layer.in_features, layer.out_features)
            for x, y in zip(inputs, outputs, strict=True):
                moments.add(x, y)
            return moments

        def settle(name: str, moments: Moments, sparse=sparse, number=number) -> None:
            layer, full = sparse.get_submodule(name), f"encoder.layer.{number}.{name}"
            if (density := density_of(full)) is not None:
                masks[full] = reconstruct(layer, moments, block_shape, density)
            else:
                gram, cross = moments.ridged(layer.weight, layer.bias)
                fitted = torch.cholesky_solve(cross, torch.linalg.cholesky(gram)).T.float()
                layer.weight.copy_(fitted[:, :-1])
                layer.bias.copy_(fitted[:, -1])

        for part in ("query", "key", "value"):
            name = f"attention.self.{part}"
            settle(name, moments_of(name, given, [dense.get_submodule(name)(x) for x in wanted]))

        # After a residual sum, the aim is what the dense model has there.
        name = "attention.output.dense"
        context = [dense.attention.self(x)[0] for x in wanted]
        aims = [
            dense.attention.output.dense(c) + x - s for c, x, s in zip(context, wanted, given, strict=True)
        ]
        wanted = [dense.attention.output(c, x) for c, x in zip(context, wanted, strict=True)]
        context = [sparse.attention.self(x)[0] for x in given]
        settle(name, moments_of(name, context, aims))
        given = [sparse.attention.output(c, x) for c, x in zip(context, given, strict=True)]

        name = "intermediate.dense"
        moments = moments_of(name, given, [dense.intermediate.dense(x) for x in wanted])
        if (density := density_of(f"encoder.layer.{number}.{name}")) is not None:
            _regroup(sparse.intermediate.dense, sparse.output.dense, moments, block_shape[0], density)
        settle(name, moments)

        name = "output.dense"
        hidden = [dense.intermediate(x) for x in wanted]
        aims = [dense.output.dense(h) + x - s for h, x, s in zip(hidden, wanted, given, strict=True)]
        wanted = [dense.output(h, x) for h, x in zip(hidden, wanted, strict=True)]
        hidden = [sparse.intermediate(x) for x in given]
        settle(name, moments_of(name, hidden, aims))
        given = [sparse.output(h, x) for h, x in zip(hidden, given, strict=True)]
    return masks
