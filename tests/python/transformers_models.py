"""What the tests of transformers share: tiny random models of ten architectures, sparse or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import rarefy

transformers = pytest.importorskip("transformers")

from rarefy.integrations import transformers as integration  # noqa: E402, F401
from rarefy.integrations.transformers import RarefyConfig  # noqa: E402, F401

VERSION = TorchVersion(transformers.__version__)
DTYPE = "dtype" if VERSION >= "4.56" else "torch_dtype"  # the argument's name
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
}
IDS = torch.arange(12).reshape(2, 6)
FEED = r".*(intermediate|layer\.\d+\.output)\.dense"
# One of each format, also with values stored in another dtype.
FORMATS = {
    FEED: "block:4x4@0.5",
    r".*query": "csr@0.3",
    r".*key": "block:4x4@0.5:bf16",
    r".*value": "block:4x1@0.5:w8",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)


def pixels() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def architecture(name: str) -> tuple[Any, Any, dict[str, torch.Tensor], int]:
    """Class, configuration, inputs and how many layers are nn.Linear or Conv1D and tied to nothing."""
    t, ids = transformers, {"input_ids": IDS}
    whisper = {"d_model": 16, "vocab_size": 40, "num_mel_bins": 8, "max_source_positions": 10}
    whisper |= {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in _SIDE.items()}
    whisper |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    patches = {"image_size": 8, "patch_size": 4}
    tower = {key: SIZES[key] for key in SIZES if key != "vocab_size"}
    text = {**SIZES, "max_position_embeddings": 12, "eos_token_id": 11}
    both = {"text_config": text, "vision_config": {**tower, **patches}, "projection_dim": 8}
    distil = {"vocab_size": 40, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
    gpt2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    t5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    heads = {**SIZES, "num_key_value_heads": 1}
    seq = {**ids, "decoder_input_ids": IDS}
    return {
        "bert": lambda: (t.BertForMaskedLM, t.BertConfig(**SIZES), ids, 13),
        "roberta": lambda: (t.RobertaForMaskedLM, t.RobertaConfig(**SIZES, pad_token_id=1), ids, 13),
        "distilbert": lambda: (t.DistilBertForMaskedLM, t.DistilBertConfig(**distil), ids, 13),
        "vit": lambda: (t.ViTModel, t.ViTConfig(**tower, **patches), {"pixel_values": pixels()}, 14),
        "gpt2": lambda: (t.GPT2LMHeadModel, t.GPT2Config(**gpt2), ids, 8),
        "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**heads), ids, 15),
        "t5": lambda: (t.T5ForConditionalGeneration, t.T5Config(**t5), seq, 32),
        "whisper": lambda: (
            t.WhisperForConditionalGeneration,
            t.WhisperConfig(**whisper, max_target_positions=12),
            {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": IDS},
            16,
        ),
        "mixtral": lambda: (
            t.MixtralForCausalLM,
            t.MixtralConfig(**heads, num_local_experts=2),
            ids,
            17 if VERSION >= "5" else 21,  # an expert's gate and up are one layer, or two
        ),
        "clip": lambda: (t.CLIPModel, t.CLIPConfig(**both), {**ids, "pixel_values": pixels()}, 27),
    }[name]()


_SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
ARCHITECTURES = ["bert", "roberta", "distilbert", "vit", "gpt2", "llama", "t5", "whisper", "clip", "mixtral"]


def sparse_bert(patterns: dict[str, str] | None = None) -> Any:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()
    rarefy.sparsify(model, FORMATS if patterns is None else patterns, measure=False)
    return model


def output_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return next(value for value in out.values() if isinstance(value, torch.Tensor))


def assert_same(a: Any, b: Any) -> None:
    """Classes of all modules, and names, dtypes and bits of all tensors."""
    assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor, theirs[key]), key
