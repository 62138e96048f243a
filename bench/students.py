"""Several sparse copies of the demo's encoder distilled at once, on one device: for experiments on a GPU.

A step of 512 tokens leaves a GPU idle; twenty students that learn from the same batches, each with its own
blocks and recipe, fill it. Their weights are stacked, (S, …), so that a layer of all of them is one batched
product. Blocks that left are masked: the same numbers as Rarefy's layers, none of their speed. Losses and
schedule are the demo's (examples/minilm/distill.py), budgets are steps in place of minutes, batches those of
`batches`, where launching kernels costs more than computing, or the demo's.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.minilm import distill
from examples.minilm.distill import rate
from examples.minilm.model import pad
from rarefy.prune import Mask


@dataclass(frozen=True)
class Recipe(distill.Recipe):
    """The demo's, and what long runs need that would otherwise learn their texts by heart."""

    average: float = 0.0  # the last share of the budget, the weights after whose steps are averaged
    pieces: float = 0.0  # share of the batches whose texts are cut out of longer ones, new ones each time
    more: int = 0  # 1: also the other words and the examples of the training entries (more_texts.py)


class Students:
    """Encoders of one architecture (transformers' BertModel), their weights stacked: (S, …) each.

    models: S of them, all with the same embeddings. masks: of each, what stays of a layer, by layers' names.
    All parameters of an encoder lie in one row of `weights`, (S, P) float32 on the device, so `gradients`.
    """

    def __init__(
        self, models: Sequence[nn.Module], masks: Sequence[Mapping[str, Mask]], device: torch.device | str
    ) -> None:
        first = models[0]
        self.config, self.embeddings = first.config, copy.deepcopy(first.embeddings).to(device)
        self.weights = torch.stack(
            [nn.utils.parameters_to_vector(m.encoder.parameters()).detach() for m in models]
        ).to(device)
        self.gradients = torch.zeros_like(self.weights)
        self.keep = torch.ones_like(self.weights, dtype=torch.bool)
        self.parts: dict[str, Tensor] = {}
        begin = 0
        for name, p in first.encoder.named_parameters():
            part, end = (len(models), *p.shape), begin + p.numel()
            self.parts[name] = self.weights[:, begin:end].view(part).requires_grad_()
            self.parts[name].grad = self.gradients[:, begin:end].view(part)
            layer = f"encoder.{name.removesuffix('.weight')}"
            for s, kept in enumerate(masks):
                if layer in kept:
                    self.keep[s, begin:end] = kept[layer].unpack().flatten().to(device)
            begin = end

    def states(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Token states after each layer, (S, B, T, H) each, of a batch (B, T)."""
        config, mask = self.config, batch["attention_mask"]
        with torch.no_grad():
            x = self.embeddings(batch["input_ids"])
        (b, t), s = mask.shape, len(self.weights)
        heads = (s, b, t, config.num_attention_heads, -1)
        hidden = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, torch.finfo(x.dtype).min)
        hidden, x, states = hidden[:, None, None], x.expand(s, b, t, -1).flatten(1, 2), []
        for i in range(config.num_hidden_layers):
            q, k, v = (
                self._linear(f"{i}.attention.self.{name}", x).view(heads).transpose(2, 3)
                for name in ("query", "key", "value")
            )
            likeness = (q @ k.mT) * q.shape[-1] ** -0.5 + hidden
            context = (likeness.softmax(-1).to(v.dtype) @ v).transpose(2, 3).reshape(s, b * t, -1)
            x = self._norm(f"{i}.attention.output", self._linear(f"{i}.attention.output.dense", context) + x)
            inner = functional.gelu(self._linear(f"{i}.intermediate.dense", x))
            x = self._norm(f"{i}.output", self._linear(f"{i}.output.dense", inner) + x)
            states.append(x.view(s, b, t, -1))
        return states

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.parts[f"layer.{name}.{kind}"] for kind in ("weight", "bias"))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale, shift = (self.parts[f"layer.{name}.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        normal = functional.layer_norm(x, x.shape[-1:], eps=self.config.layer_norm_eps)
        return normal * scale.unsqueeze(1) + shift.unsqueeze(1)

    def load_into(self, model: nn.Module, student: int) -> None:
        """Copies one student's weights into an encoder."""
        nn.utils.vector_to_parameters(self.weights[student].to(model.device), model.encoder.parameters())


def losses(got: list[Tensor], want: list[Tensor], mask: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The demo's loss_fn of each student, (S,).

    got, want: states of students, (S, B, T, H) for each of L layers, and of the teacher, (1, B, T, H).
    weights: of sentences, states and relations, (S,) each.
    """
    part = mask[None, :, :, None].to(torch.float32)
    ours, theirs = torch.stack(got, 1), torch.stack(want, 1)  # (S, L, B, T, H)
    count = part.sum() * ours.shape[-1]
    mean = (theirs * part).sum((2, 3, 4), keepdim=True) / count
    variance = ((theirs - mean).square() * part).sum((2, 3, 4)) / (count - 1)  # (1, L)
    errors = ((ours - theirs).square() * part).sum((2, 3, 4)) / count / variance
    ours, theirs = (functional.normalize((x[:, -1] * part).sum(2), dim=-1) for x in (ours, theirs))
    sentences = (1 - (ours * theirs).sum(-1)).mean(-1)  # of (S, B, H)
    relations = (ours @ ours.mT - theirs @ theirs.mT).square().mean((1, 2))
    return weights[0] * sentences + weights[1] * errors.mean(1) + weights[2] * relations


class Pieces:
    """Texts cut out of longer ones at random: pieces of n tokens begin where a word does.

    table: (texts, T) token ids. lengths: of the texts, their first and last token included, which every piece
    gets, too. continues: for each id of the vocabulary whether it goes on with a word.
    """

    def __init__(self, table: Tensor, lengths: Tensor, continues: Tensor, seed: int) -> None:
        self.lengths, order = lengths.sort(descending=True)
        self.table = table[order]
        places = torch.arange(table.shape[1], device=table.device).expand_as(table)
        begins = ~continues.to(table.device)[self.table.long()]
        self.word = places.where(begins, 0).cummax(1).values.int()  # where the word of each token begins
        at_least = torch.bincount(lengths, minlength=table.shape[1] + 1).flip(0).cumsum(0).flip(0)
        self.at_least = at_least  # how many texts have so many tokens: the first ones of the table
        self.rng = torch.Generator(table.device).manual_seed(seed)

    def like(self, mask: Tensor) -> Tensor:
        """Token ids (B, T) of pieces that are as long as a batch's mask says."""
        wanted, places = mask.sum(1), torch.arange(mask.shape[1], device=mask.device)
        text, at = torch.rand(2, len(wanted), device=mask.device, generator=self.rng, dtype=torch.float64)
        text = (text * self.at_least[wanted]).long()
        length = self.lengths[text]
        begin = self.word[text, 1 + (at * (length - wanted + 1)).long()].long()
        whole, at = self.table[text], begin.unsqueeze(1) + places - 1
        found = whole.gather(1, at.clamp(0, whole.shape[1] - 1))
        found[:, 0] = whole[:, 0]
        last = whole.gather(1, length.unsqueeze(1) - 1)
        return found.where(places < wanted.unsqueeze(1) - 1, last) * mask


def batches(
    ids: Sequence[Sequence[int]], tokens: int, seed: int, device: torch.device | str = "cpu", *,
    pieces: float = 0.0, continues: Tensor | None = None,
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    """Endless batches of few shapes, on the device: T a multiple of 4, ⌊tokens / T⌋ texts of such lengths.

    ids: of each text. Texts come in an order fixed by the seed, all of them before one comes again (but for
    those that wait for others of their length). Few shapes are few CUDA graphs: the demo's batches have 140.
    pieces: in about this share of the batches, pieces of texts (`Pieces`) of the same lengths come instead.
    """
    table, mask = pad(ids, 0).values()
    lengths = mask.sum(1)
    widths = (4 * ((lengths + 3) // 4)).tolist()
    beyond, rng = (0, -table.shape[1] % 4), random.Random(seed)
    table, mask = (functional.pad(x.int(), beyond).to(device) for x in (table, mask))
    cut = Pieces(table, lengths.to(device), continues, seed) if pieces else None
    waiting: dict[int, list[int]] = {width: [] for width in widths}
    while True:
        for text in rng.sample(range(len(ids)), len(ids)):
            width = widths[text]
            waiting[width].append(text)
            if len(waiting[width]) >= tokens // width:
                rows = torch.tensor(waiting[width], device=device)
                waiting[width].clear()
                here = mask[rows, :width].long()
                if cut is not None and rng.random() < pieces:
                    yield {"input_ids": cut.like(here).long(), "attention_mask": here}
                else:
                    yield {"input_ids": table[rows, :width].long(), "attention_mask": here}


def train(
    students: Students, teacher: Students, batches: Iterable[dict[str, Tensor]], steps: int,
    recipes: Sequence[Recipe], *, bf16: bool = False, seconds: float = 0.0,
) -> int:  # fmt: skip
    """So many steps of every student with its recipe, in place; or, without `steps`, for so many seconds.

    recipes: lr, warmup, clip, average and the loss's weights are each student's own, the batches those of the
    first. Students with an average end as the mean of their weights after each of the steps in that last
    share of the budget. bf16: steps under autocast, as the demo trains where bf16 is fast. Returns how many
    steps were made.
    """
    if steps <= 0 and seconds <= 0:
        raise ValueError("[train] steps or seconds must be above 0; got neither")
    device = students.weights.device
    weights = [
        torch.tensor([getattr(r, name) for r in recipes], device=device)
        for name in ("pooled", "states", "relations")
    ]
    clip = torch.tensor([r.clip for r in recipes], device=device)
    rows = [nn.Parameter(row) for row in students.weights]
    for row, gradient in zip(rows, students.gradients, strict=True):
        row.grad = gradient
    optimizer = torch.optim.AdamW(
        [{"params": [row]} for row in rows], lr=0.0, betas=(0.9, 0.98), weight_decay=0.0,
        fused=device.type == "cuda",
    )  # fmt: skip

    sums = [torch.zeros_like(row) if r.average else None for row, r in zip(rows, recipes, strict=True)]
    summed = [0] * len(rows)

    def differentiate(batch: Mapping[str, Tensor]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            with torch.no_grad():
                want = [x.float() for x in teacher.states(batch)]
            got = [x.float() for x in students.states(batch)]
        students.gradients.zero_()
        losses(got, want, batch["attention_mask"], weights).sum().backward()
        students.gradients.mul_(students.keep)

    start, done, made = time.monotonic(), 0.0, 0
    with on_a_stream(device):
        step_of = Graphs(differentiate) if device.type == "cuda" else differentiate
        for batch in batches:
            if steps:
                done = made / steps
            elif made % 50 == 0:  # the device is as far as the clock says
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                done = (time.monotonic() - start) / seconds
            if done >= 1:
                break
            step_of({name: tensor.to(device) for name, tensor in batch.items()})
            norms = torch.linalg.vector_norm(students.gradients, dim=1)
            students.gradients.mul_((clip / (norms + 1e-6)).clamp(max=1).unsqueeze(1))
            for group, recipe in zip(optimizer.param_groups, recipes, strict=True):
                group["lr"] = recipe.lr * rate(done, recipe.warmup)
            optimizer.step()
            made += 1
            for s, recipe in enumerate(recipes):
                if sums[s] is not None and done >= 1 - recipe.average:
                    summed[s] += 1
                    sums[s].lerp_(rows[s].detach(), 1 / summed[s])  # the mean so far
    for row, mean, count in zip(students.weights, sums, summed, strict=True):
        if count:
            row.copy_(mean)
    return made


@contextmanager
def on_a_stream(device: torch.device) -> Iterator[None]:
    """On a GPU a stream other than the default one, which graphs need; elsewhere nothing."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(device)


class Graphs:
    """A function of a batch as CUDA graphs, one for each shape that comes often: launching costs most."""

    def __init__(self, function: Callable[[Mapping[str, Tensor]], None]) -> None:
        self.function, self.seen, self.made = function, Counter(), {}
        self.often, self.pool = 4, torch.cuda.graph_pool_handle()
        gc.collect()
        gc.freeze()  # every capture collects garbage

    def __call__(self, batch: Mapping[str, Tensor]) -> None:  # noqa: D102
        shape = tuple(batch["input_ids"].shape)
        self.seen[shape] += 1
        if self.seen[shape] < self.often:
            self.function(batch)
            return
        if shape not in self.made:
            held, graph = {name: tensor.clone() for name, tensor in batch.items()}, torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
                    self.function(held)
            except RuntimeError as error:
                print(f"without graphs: {error}", file=sys.stderr)
                self.often = math.inf
                self.function(batch)
                return
            self.made[shape] = graph, held
        graph, held = self.made[shape]
        for name, tensor in batch.items():
            held[name].copy_(tensor)
        graph.replay()
