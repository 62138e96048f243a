"""Recovery: the sparse encoder learns the dense one's embeddings and token states on training texts.

Distillation as in DistilBERT (Sanh et al. 2019): no labels, only the dense model's outputs. The budget is
wall-clock time, the best state so far survives Ctrl-C, and a checkpoint lets a later run go on from there.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rarefy.files import replacing

from .model import embed, pad, pool, token_ids


@dataclass(frozen=True)
class Recipe:
    """What was found best on validation texts; see docs/demo.md."""

    lr: float = 5e-4
    warmup: float = 0.05  # share of the budget
    tokens: int = 512  # a batch holds about so many tokens
    pooled: float = 1.0  # weight of 1 − cosine of the sentence embeddings
    states: float = 1.0  # weight of the normalised squared error of the token states, every layer alike
    relations: float = 0.0  # weight of the squared error of the cosines between sentences of a batch
    clip: float = 1.0
    seed: int = 0
    check_seconds: float = 30.0


@dataclass
class Progress:
    """Everything a rerun needs to go on, and the report to draw."""

    step: int = 0
    seconds: float = 0.0
    train: float | None = None  # running mean of the training loss
    best: float = math.inf
    curve: list[dict[str, float | None]] = field(default_factory=list)  # seconds, train, validation
    interrupted: bool = False


def batches(
    tokenizer, texts: list[str], tokens: int, seed: int, skip: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Endless batches of about `tokens` tokens, texts of like length together, in an order fixed by the seed.

    `skip` batches are left out at the start (made, but not returned), so that a resumed run sees new texts.
    """
    rng = random.Random(seed)
    made = 0
    while True:
        order = rng.sample(range(len(texts)), len(texts))
        for start in range(0, len(order), 4096):
            chunk = [texts[i] for i in order[start : start + 4096]]
            ids = sorted(token_ids(tokenizer, chunk), key=len)
            groups: list[list[list[int]]] = [[]]
            for row in ids:
                if groups[-1] and len(row) * (len(groups[-1]) + 1) > tokens:
                    groups.append([])
                groups[-1].append(row)
            rng.shuffle(groups)
            for group in groups:
                made += 1
                if made > skip:
                    yield pad(group, tokenizer.pad_token_id)


def loss_fn(student: nn.Module, teacher: nn.Module, batch: dict[str, Tensor], recipe: Recipe) -> Tensor:
    """What student and teacher differ in on a batch: sentences, token states, and how like sentences are.

    pooled·(1 − cosine) + states·(squared error / variance of the dense token states, mean over layers) +
    relations·(squared error of the cosines between sentences, by which headwords are found).
    """
    mask = batch["attention_mask"]
    with torch.no_grad():
        want = [state.float() for state in teacher(**batch, output_hidden_states=True).hidden_states]
    got = [state.float() for state in student(**batch, output_hidden_states=True).hidden_states]
    keep = mask.bool()
    errors = [
        (g[keep] - w[keep]).square().mean() / w[keep].var() for g, w in zip(got[1:], want[1:], strict=True)
    ]
    ours, theirs = pool(got[-1], mask), pool(want[-1], mask)
    with torch.autocast(
        mask.device.type, enabled=False
    ):  # bf16 cannot tell cosines apart that differ by 0.004
        relations = (ours @ ours.T - theirs @ theirs.T).square().mean()
    return (
        recipe.pooled * (1 - (ours * theirs).sum(-1)).mean()
        + recipe.states * torch.stack(errors).mean()
        + recipe.relations * relations
    )


def rate(progress: float, warmup: float) -> float:
    """Share of the peak learning rate at this share of the budget: linear warm-up, half a cosine to 0."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def write_checkpoint(kept: dict, path: Path) -> None:
    """torch.save in one step: the file is the old or the new one, never half of it."""
    with replacing(path) as part:
        torch.save(kept, part)


class Distiller:
    """One distillation: student, optimizer and progress; made, then run.

    student, teacher: encoders of the same architecture in evaluation mode (no dropout); everything of the
    student but its embeddings is trained. texts: to learn from. validation: texts on which the best state is
    chosen. checkpoint: where to keep the run (None: nowhere); a file there with the same `key` and recipe is
    resumed. bf16: whether steps run under autocast, for processors that multiply bf16 faster; checks do not.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        tokenizer,
        texts: list[str],
        validation: list[str],
        *,
        recipe: Recipe | None = None,
        checkpoint: Path | None = None,
        key: str = "",
        bf16: bool = False,
    ):
        self.student, self.teacher, self.tokenizer, self.texts = student, teacher, tokenizer, texts
        self.validation, self.recipe = validation, recipe or Recipe()
        self.checkpoint, self.key, self.bf16 = checkpoint, f"{key} {self.recipe}", bf16
        if bf16:  # torch's fused attention is slow in bf16 on CPUs, at these lengths
            student.set_attn_implementation("eager")
        student.embeddings.requires_grad_(False)
        self.parameters = {name: p for name, p in student.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.progress = Progress()
        self.target = embed(teacher, tokenizer, validation)
        self.best = self._values()
        if checkpoint is not None and checkpoint.is_file():
            self._resume()

    def run(self, minutes: float) -> Progress:
        """Trains until `minutes` of training are spent in all (earlier runs counted), or until Ctrl-C.

        Leaves the student in the state that was best on the validation texts.
        """
        state = self.progress
        state.interrupted = False
        if not state.curve or state.seconds < 60 * minutes:
            try:
                self._train(60 * minutes)
            except KeyboardInterrupt:
                state.interrupted = True
            self._check()
        self._load(self.best)
        return state

    def _train(self, budget: float) -> None:
        state, recipe = self.progress, self.recipe
        spent, start, next_check = state.seconds, time.monotonic(), state.seconds
        quiet = not sys.stderr.isatty()
        with tqdm(total=round(budget), initial=round(spent), unit="s", desc="distil", disable=quiet) as bar:
            for batch in batches(self.tokenizer, self.texts, recipe.tokens, recipe.seed, skip=state.step):
                if state.seconds >= next_check:
                    self._check()
                    next_check = state.seconds + recipe.check_seconds
                if state.seconds >= budget:
                    return
                loss = self._step(batch, recipe.lr * rate(state.seconds / budget, recipe.warmup))
                state.train = loss if state.train is None else 0.95 * state.train + 0.05 * loss
                state.step += 1
                state.seconds = spent + time.monotonic() - start
                bar.update(min(round(state.seconds), bar.total) - bar.n)
                bar.set_postfix(loss=f"{state.train:.4f}", best=f"{state.best:.4f}", refresh=False)

    def _step(self, batch: dict[str, Tensor], lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = loss_fn(self.student, self.teacher, batch, self.recipe)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.clip)
        self.optimizer.step()
        return loss.item()

    def _check(self) -> None:
        """Measures 1 − mean cosine to the dense embeddings, keeps the best state, writes the checkpoint."""
        state = self.progress
        loss = 1 - (embed(self.student, self.tokenizer, self.validation) * self.target).sum(-1).mean().item()
        state.curve.append({"seconds": state.seconds, "train": state.train, "validation": loss})
        if loss < state.best:
            state.best, self.best = loss, self._values()
        if self.checkpoint is not None:
            kept = {
                "key": self.key,
                "progress": asdict(state),
                "student": self._values(),
                "best": self.best,
                "optimizer": self.optimizer.state_dict(),
            }
            write_checkpoint(kept, self.checkpoint)

    def _resume(self) -> None:
        kept = torch.load(self.checkpoint, weights_only=True)
        if kept["key"] != self.key:
            return
        self._load(kept["student"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.best, self.progress = kept["best"], Progress(**kept["progress"])

    def _values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def _load(self, values: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(values[name])
