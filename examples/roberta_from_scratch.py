"""A RoBERTa of 84 million parameters from scratch, with 68 million: half of its encoder's dense blocks.

    python -m examples.roberta_from_scratch --steps 200
    python -m examples.roberta_from_scratch --small --steps 100 --text my.txt

The example of pytorch_block_sparse on rarefy.compat.pytorch_block_sparse: RobertaForMaskedLM, 6 layers, a
vocabulary of 52,000, every dense layer of its encoder at density 0.5 in 32×32 blocks, trained on any text, a
sentence a line, with Hugging Face's Trainer; every --every steps SparseOptimizer moves a part of the blocks.
Without --text the text is WordNet's definitions; the tokenizer is trained on it. Exits with 1 if the loss
did not fall by a tenth.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import rarefy
from rarefy.compat.pytorch_block_sparse import BlockSparseModelPatcher, SparseOptimizer

DENSE = r"roberta\.encoder\.layer\.[0-9]+\.(attention\.output|intermediate|output)\.dense"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@dataclass(frozen=True)
class Size:
    """A model, and how many parameters it has dense and at density 0.5."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    dense: int
    sparse: int


FULL = Size(52_000, 768, 3072, 6, 12, dense=83_504_416, sparse=67_579_168)
SMALL = Size(1_000, 64, 256, 2, 2, dense=202_344, sparse=165_480)


def wordnet() -> list[str]:
    """WordNet's definitions."""
    from examples.minilm.data import find_wordnet, read_entries

    return [entry.definition for entry in read_entries(find_wordnet())]


def tokenizer_of(lines: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most so many pieces, trained on the text."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    bpe._tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = dict(zip(("bos", "pad", "eos", "unk", "mask"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        model_max_length=128,
        **{f"{name}_token": piece for name, piece in names.items()},
        cls_token="<s>",
        sep_token="</s>",
    )


class Lines(Dataset):
    """Sentences as token ids."""

    def __init__(self, lines: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> None:
        self.ids = tokenizer(lines, truncation=True, max_length=length)["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": self.ids[at]}


def count(model: torch.nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def sparse_model(size: Size) -> RobertaForMaskedLM:
    """The model with half of its encoder's dense blocks; its counts are asserted."""
    config = RobertaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=514,
        type_vocab_size=1,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    model = RobertaForMaskedLM(config)
    assert count(model) == size.dense, f"{count(model)} parameters where {size.dense} are expected"
    patcher = BlockSparseModelPatcher()
    patcher.add_pattern(DENSE, {"density": 0.5})
    patcher.patch_model(model)
    assert count(model) == size.sparse, f"{count(model)} parameters where {size.sparse} are expected"
    return model


class MoveBlocks(TrainerCallback):
    """Every so many steps a part of the blocks begins anew elsewhere."""

    def __init__(self, model: torch.nn.Module, every: int, part: float) -> None:
        self.sparse, self.every = SparseOptimizer(SparseOptimizer.sparse_objects(model), lr=part), every

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.sparse.attach_optimizer(
            getattr(optimizer, "optimizer", optimizer)
        )  # the one inside accelerate's

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step < 3 * state.max_steps // 4:
            self.sparse.step()


def main(argv: list[str] | None = None) -> int:
    """Trains; 0 if the loss fell by a tenth."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--text", type=Path, help="a sentence a line; default: WordNet's definitions")
    parser.add_argument("--small", action="store_true", help="2 layers of 64 features, 1,000 pieces")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sentence at most")
    parser.add_argument("--every", type=int, default=50, help="steps from one move of blocks to the next")
    parser.add_argument("--part", type=float, default=0.05, help="of the blocks that move")
    parser.add_argument("--out", type=Path, help="where the model goes, as safetensors")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    size = SMALL if args.small else FULL
    lines = wordnet() if args.text is None else args.text.read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        parser.error(f"--text must have lines; got none in {args.text}")
    random.Random(0).shuffle(lines)
    tokenizer = tokenizer_of(lines, size.vocabulary)
    model = sparse_model(size)
    print(f"{size.dense:,} parameters dense, {size.sparse:,} at density 0.5; {len(lines):,} sentences")
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=5e-4,
            warmup_steps=max(1, args.steps // 20),
            logging_steps=max(1, args.steps // 10),
            save_strategy="no",
            report_to=[],
            seed=0,
            disable_tqdm=not sys.stderr.isatty(),
        )
        trainer = Trainer(
            model=model,
            args=options,
            train_dataset=Lines(lines[: args.steps * args.batch], tokenizer, args.length),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
            callbacks=[MoveBlocks(model, args.every, args.part)],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("loss:", " ".join(f"{loss:.3f}" for loss in losses))
    if args.out is not None:
        rarefy.save_file(model, args.out)
    return 0 if losses[-1] < 0.9 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
