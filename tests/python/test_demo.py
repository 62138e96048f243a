"""The parts of examples/minilm on tiny inputs: parser, split, metric, pruning, distillation, report."""

from __future__ import annotations

import copy
import io
import itertools
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("transformers")

import rarefy
from examples.minilm import data, distill, evaluate, measure, model, prune, report, run, summary
from rarefy.prune import Point, Sensitivity

pytestmark = pytest.mark.usefixtures("one_thread")  # the encoders here have matrices of 16 columns

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
NOUN = (
    "00029677 03 n 0a process 0 physical_process 1 a 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 001 @ 00001930 n 0000 | "
    'a phenomenon; or one marked by change; "events now in process"; "the process of calcification"  \n'
)
VERB = '00597385 31 v 02 master 0 control 0 001 * 00588888 v 0000 01 + 08 00 | be on top of; "Do you?"  \n'
ADJECTIVE = "00013887 00 s 03 abounding 0 galore(ip) 0 x 0 001 & 00013662 a 0000 | existing in abundance  \n"
POSITION = "00014285 00 s 02 well_heeled(p) 0 rich 0 001 & 00013662 a 0000 | in fortunate circumstances  \n"


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    (tmp_path / "data.noun").write_text(LICENCE + NOUN)
    (tmp_path / "data.verb").write_text(LICENCE + VERB)
    (tmp_path / "data.adj").write_text(LICENCE + ADJECTIVE + POSITION)
    (tmp_path / "data.adv").write_text(LICENCE)
    return tmp_path


def test_parser_reads_first_word_and_definition_without_examples(wordnet: Path) -> None:
    assert data.read_entries(wordnet) == [
        data.Entry("process", "a phenomenon; or one marked by change"),
        data.Entry("master", "be on top of"),
        data.Entry("abounding", "existing in abundance"),
        data.Entry("well heeled", "in fortunate circumstances"),
    ]


@pytest.mark.parametrize(
    "line", [LICENCE, "", "00000000 03 n 01 word 0 000\n", '1 03 n 01 w 0 000 | "only"\n']
)
def test_parser_skips_what_is_no_entry(line: str) -> None:
    assert data.parse_line(line) is None


def entries(n: int) -> list[data.Entry]:
    # Every headword twice, and every definition three times over the list.
    return [data.Entry(f"word{i // 2}", f"definition {i // 3} of some thing") for i in range(n)]


def test_split_is_deterministic_distinct_and_disjoint() -> None:
    first, second = (data.split(entries(300), held_out=20, validation=10) for _ in range(2))
    assert first == second
    chosen = first.held_out + first.validation
    assert (len(first.held_out), len(first.validation)) == (20, 10)
    assert len({e.headword for e in chosen}) == len({e.definition for e in chosen}) == 30
    assert len(set(first.train_texts)) == len(first.train_texts) > 100
    assert not set(first.train_texts) & {t for e in chosen for t in (e.headword, e.definition)}


def test_split_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"\[split\] entries must have 40 distinct .* got 3"):
        data.split(entries(8), held_out=20, validation=20)


def test_accuracy_counts_ranks_and_gives_nothing_for_ties() -> None:
    eye = torch.eye(3)
    # Row 0 finds its own first, row 1 second; row 2 ties with both others, which are listed before it.
    definitions = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.5, 0.5, 0.5]])
    embedded = evaluate.Embedded(definitions, eye)
    assert [evaluate.accuracy(embedded, k) for k in (1, 2, 3)] == [1 / 3, 2 / 3, 1.0]
    assert evaluate.mean_cosine(embedded, evaluate.Embedded(definitions, -eye)) == pytest.approx(
        0.0, abs=1e-7
    )


class Words:
    """A tokenizer as the demo uses one: a word's id is its length."""

    pad_token_id = 0

    def __call__(self, texts: list[str], truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1 + len(word) % 29 for word in text.split()][:max_length] for text in texts]}


TEXTS = [" ".join("x" * (1 + (i * j) % 13) for j in range(1, 3 + i % 7)) for i in range(120)]


def encoder(seed: int) -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return BertModel(config, add_pooling_layer=False).eval()


def test_batches_of_one_length_hold_every_text() -> None:
    batches = list(prune.same_lengths(Words(), TEXTS, most=8))
    assert sum(map(len, batches)) == len(TEXTS) and max(map(len, batches)) == 8
    assert sorted(row.tolist() for ids in batches for row in ids) == sorted(
        Words()(TEXTS, truncation=True, max_length=128)["input_ids"]
    )


def split_of() -> data.Split:
    entries = [data.Entry(text, " ".join(reversed(text.split()))) for text in TEXTS[:40]]
    return data.Split(entries, entries, TEXTS)


def test_pruning_keeps_more_than_plain_masks_do(tmp_path: Path) -> None:
    dense, batches = encoder(0), list(prune.same_lengths(Words(), TEXTS))
    want = model.embed(dense, Words(), TEXTS)
    prune.arranged(dense, batches, 4)
    torch.testing.assert_close(model.embed(dense, Words(), TEXTS), want)  # hidden features change places only
    path = tmp_path / "sensitivity.json"
    report = prune.measured(dense, Words(), batches, TEXTS[:40], "4x1", None, path)
    assert len(report.groups()) == 8 and path.is_file()
    assert prune.measured(dense, Words(), [], [], "4x1", report, path) is report
    plan = prune.allocated(report, 0.6)
    student, plain = copy.deepcopy(dense), copy.deepcopy(dense)
    masks = prune.prune(dense, student, batches, plan.sparsities, "4x1")
    pruned = {name for name, sparsity in plan.sparsities.items() if sparsity}
    assert len(plan.sparsities) == len(masks) == 12
    assert {name for name, mask in masks.items() if mask.density < 1} == pruned
    linear = {n: m for n, m in student.named_modules() if isinstance(m, torch.nn.Linear)}
    kept = sum(mask.kept for mask in masks.values())
    assert plan.parameters == kept <= 0.6 * sum(m.weight.numel() for m in linear.values())
    patterns, scores = prune.patterns_of(masks, "4x1")
    for name, mask in masks.items():
        assert (student.get_submodule(name).weight[~mask.unpack()] == 0).all()
    rarefy.sparsify(plain, patterns, measure=False)  # as many blocks of largest norm
    errors = [(model.embed(net, Words(), TEXTS) - want).norm() for net in (student, plain)]
    assert errors[0] < 0.7 * errors[1]
    before = model.embed(student, Words(), TEXTS)
    rarefy.sparsify(student, patterns, scores=scores, measure=False)
    torch.testing.assert_close(model.embed(student, Words(), TEXTS), before)


def test_batches_cover_every_text_once_a_round() -> None:
    wanted = sorted(len(text.split()) for text in TEXTS)
    lengths, made = [], 0
    for batch in distill.batches(Words(), TEXTS, tokens=64, seed=3):
        assert batch["input_ids"].numel() <= 64
        lengths += batch["attention_mask"].sum(1).tolist()
        made += 1
        if len(lengths) == len(TEXTS):
            break
    assert sorted(lengths) == wanted
    resumed = next(distill.batches(Words(), TEXTS, tokens=64, seed=3, skip=made - 1))
    assert torch.equal(resumed["input_ids"], batch["input_ids"])


def steps_of(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Gives the training a clock on which a step takes so long, whatever else the machine does."""
    clock = itertools.count(0, seconds)
    monkeypatch.setattr(distill, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))


def distiller(checkpoint: Path | None = None, **recipe) -> distill.Distiller:
    chosen = distill.Recipe(**{"lr": 3e-3, "tokens": 64, "check_seconds": 0.0} | recipe)
    return distill.Distiller(
        encoder(1),
        encoder(0),
        Words(),
        TEXTS[20:],
        TEXTS[:20],
        recipe=chosen,
        checkpoint=checkpoint,
        key="test",
    )


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Presses Ctrl-C in the middle of the given step, with the weights already spoilt."""
    real, left = distill.loss_fn, [steps]

    def loss_fn(student, teacher, batch, recipe):
        left[0] -= 1
        if left[0] < 0:
            with torch.no_grad():
                for p in student.encoder.parameters():
                    p.normal_()
            raise KeyboardInterrupt
        return real(student, teacher, batch, recipe)

    monkeypatch.setattr(distill, "loss_fn", loss_fn)


def validation_loss(run: distill.Distiller) -> float:
    return 1 - (model.embed(run.student, Words(), TEXTS[:20]) * run.target).sum(-1).mean().item()


def test_distillation_approaches_the_dense_encoder_and_leaves_embeddings_alone(monkeypatch) -> None:
    steps_of(monkeypatch, 0.05)
    job = distiller()
    before, embeddings = validation_loss(job), job.student.embeddings.word_embeddings.weight.clone()
    state = job.run(minutes=3 / 60)
    assert 55 < state.step < 65 and state.best < 0.7 * before and not state.interrupted
    assert validation_loss(job) == pytest.approx(state.best, abs=1e-5)
    assert torch.equal(job.student.embeddings.word_embeddings.weight, embeddings)


def test_interrupt_keeps_the_best_state(monkeypatch: pytest.MonkeyPatch) -> None:
    job = distiller()
    stop_after(monkeypatch, 12)
    state = job.run(minutes=10)
    assert state.interrupted and state.step == 12
    assert state.best == min(point["validation"] for point in state.curve) < state.curve[0]["validation"]
    assert validation_loss(job) == pytest.approx(state.best, abs=1e-5)


def test_a_rerun_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "training.pt"
    with monkeypatch.context() as patch:
        stop_after(patch, 12)
        first = distiller(path).run(minutes=10)
    assert [p.name for p in tmp_path.iterdir()] == ["training.pt"]
    again = distiller(path)
    assert (again.progress.step, again.progress.best) == (12, first.best)
    stop_after(monkeypatch, 5)
    assert again.run(minutes=10).step == 17
    assert distiller(path, lr=1e-3).progress.step == 0  # another recipe starts anew


def test_rate_warms_up_and_ends_at_zero() -> None:
    assert [distill.rate(p, 0.1) for p in (0.0, 0.05, 0.1, 1.0, 2.0)] == pytest.approx(
        [0, 0.5, 1, 0, 0], abs=1e-12
    )
    assert distill.rate(0.55, 0.1) == pytest.approx(0.5)


def test_likeness_of_sentences_is_compared_in_f32() -> None:
    """In bf16 cosines next to 1 have steps of 0.004: what is learned from would be noise."""

    class States:
        def __init__(self, shift: float) -> None:
            base = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0))
            self.states = [base, 1 + 0.1 * base + shift * base.flip(0)]

        def __call__(self, **batch):
            return types.SimpleNamespace(hidden_states=self.states)

    batch = {"attention_mask": torch.ones(6, 5, dtype=torch.long)}
    recipe = distill.Recipe(pooled=0.0, states=0.0, relations=1.0)
    want = distill.loss_fn(States(0.001), States(0.0), batch, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        got = distill.loss_fn(States(0.001), States(0.0), batch, recipe)
    assert want > 0
    torch.testing.assert_close(got, want)


def test_encoding_times_give_one_row_for_each_batch_and_dtype() -> None:
    many = [data.Entry(str(i), text) for i, text in enumerate(TEXTS)]
    dense = encoder(0)
    models = measure.contenders(dense, encoder(1))
    rows = measure.encoding_times(models, Words(), many, rounds=range(2, 3), batches=(1, 8))
    assert [(row["batch"], row["dtype"]) for row in rows] == [
        (1, "f32"),
        (8, "f32"),
        (1, "bf16"),
        (8, "bf16"),
    ]
    for row in rows:
        ratio = row["dense_ms"] / row["sparse_ms"]
        assert row["speedup"] is None if row["noise"] else row["speedup"] == pytest.approx(ratio)
    assert all(p.dtype == torch.float32 for p in dense.parameters())
    assert rows[1]["tokens"] == measure_tokens(many, 8)


def test_contest_of_the_fastest_that_are_good_enough() -> None:
    many = [data.Entry(str(i), text) for i, text in enumerate(TEXTS)]
    models = measure.contenders(encoder(0), encoder(1))
    assert {"dense f32", "dense bf16", "sparse f32", "sparse bf16"} <= set(models)
    found = {name: {"acc1": 0.4, "acc10": 0.6, "mean_cosine": 1.0} for name in models}
    found["sparse bf16"] = found["sparse bf16"] | {"acc10": 0.589}
    found["dense bf16"] = found["dense bf16"] | {"acc10": 0.59}
    rows, best = measure.contest(models, found, Words(), many, rounds=range(2, 3), batch=8)
    assert {row["name"]: row["good"] for row in rows} == {n: n != "sparse bf16" for n in models}
    assert best["sparse"] == "sparse f32" and best["dense"].startswith("dense") and best["good"]
    assert rows[0]["speedup"] == 1.0 and all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "says", "near"), [("int8", "int8", 0.99), ("bf16 layers", "bfloat16", 0.999)]
)
def test_the_same_blocks_join_in_other_dtypes(name: str, says: str, near: float) -> None:
    sparse = encoder(0)
    rarefy.sparsify(sparse, {model.FFN_LAYERS: "block:16x1@0.5"}, measure=False)
    models = measure.contenders(encoder(0), sparse)
    wide, narrow = (models[f"sparse {dtype}"] for dtype in ("f32", name))
    layers = [net.get_submodule("encoder.layer.0.output.dense") for net in (wide, narrow)]
    assert layers[0].weight.nnzb == layers[1].weight.nnzb and says in str(layers[1])
    embedded = [model.embed(net, Words(), TEXTS) for net in (wide, narrow)]
    assert near < (embedded[0] * embedded[1]).sum(-1).min() and not torch.equal(*embedded)
    assert embedded[1].dtype == torch.float32


def test_the_share_outside_of_layers_is_between_those_of_none_and_all() -> None:
    many = [data.Entry(str(i), text) for i, text in enumerate(TEXTS)]
    models = measure.contenders(encoder(0), encoder(1))
    layers = [name for name, m in models["dense f32"].named_modules() if isinstance(m, torch.nn.Linear)]
    some = measure.outside(models, layers, Words(), many, rounds=3)
    none = measure.outside(models, [], Words(), many, rounds=3)
    for dtype in ("f32", "bf16"):
        assert none[dtype] == {"share": 1.0, "bound": 1.0}
        assert 0 < some[dtype]["share"] < 1 and some[dtype]["bound"] == 1 / some[dtype]["share"]
    assert not models["dense f32"].get_submodule(layers[0])._forward_hooks


def measure_tokens(many: list[data.Entry], size: int) -> int:
    texts = measure.middle_batch(many, size)
    return size * max(len(text.split()) for text in texts)


def test_the_whole_chain_on_a_tiny_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_of(monkeypatch, 0.03)
    options = ["--out", str(tmp_path), "--block", "4x1", "--share", "0.5"]
    args, dense = run.options(options), encoder(0)
    student, layers, report, plan, key = run.sparsified(dense, Words(), split_of(), args)
    assert key == "block:4x1, 0.5 of the weights" and plan.parameters <= 0.5 * 2 * (4 * 256 + 2 * 512)
    asked = {name: 1 - sparsity for name, sparsity in plan.sparsities.items()}
    assert {row.name: row.density for row in layers.replaced} == pytest.approx(asked, abs=0.01)
    with monkeypatch.context() as patch:  # from what the first call kept, without its work
        patch.setattr(prune, "arranged", lambda *a: pytest.fail("put in order again"))
        again, _, kept, _, _ = run.sparsified(dense, Words(), split_of(), args)
    assert kept == report
    assert torch.equal(model.embed(student, Words(), TEXTS), model.embed(again, Words(), TEXTS))

    with torch.no_grad():  # so small a network is reconstructed almost exactly
        for p in student.encoder.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    job = distill.Distiller(student, dense, Words(), TEXTS[20:], TEXTS[:20], recipe=distill.Recipe(tokens=64))
    sparse = student.get_submodule(next(iter(asked)))
    before, values = validation_loss(job), sparse.weight.values.clone()
    assert job.run(minutes=2 / 60).best < 0.7 * before
    assert not torch.equal(sparse.weight.values, values)

    files = tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors"
    for net, path in zip((dense, student), files, strict=True):
        rarefy.save_file(net, path)
    loaded = encoder(5)
    rarefy.load_file(loaded, files[1])
    assert torch.equal(model.embed(loaded, Words(), TEXTS), model.embed(student, Words(), TEXTS))
    size = measure.sizes(dense, *files)
    linear = 2 * (4 * (16 * 16 + 16) + 2 * 16 * 32 + 16 + 32)  # weights and biases of two layers
    shapes = {name: dense.get_submodule(name).weight.shape for name in asked}
    gone = 2 * (4 * 256 + 2 * 512) - plan.parameters
    blocks = sum(n * k for n, k in shapes.values()) - gone  # values of the sparse layers
    indices = blocks // 4 + sum(n // 4 + 1 for n, _ in shapes.values())  # a column for each block, row starts
    assert size["linear_dense_bytes"] == 4 * linear
    assert size["linear_sparse_bytes"] == 4 * (linear - gone + indices)
    assert [size["file_dense_bytes"], size["file_sparse_bytes"]] == [path.stat().st_size for path in files]


def result(speedup: float = 1.5, acc10: float = 0.6, linear: int = 75) -> dict:
    row = {
        "batch": 32,
        "tokens": 400,
        "dtype": "f32",
        "dense_ms": 30.0,
        "sparse_ms": 30 / speedup,
        "speedup": speedup,
        "noise": None,
    }
    row |= {"dense_quartiles_ms": [29.0, 31.0], "sparse_quartiles_ms": [19.0, 21.0], "rounds": 25}
    bf16 = row | {"dtype": "bf16", "dense_ms": 15.0, "sparse_ms": 10.0, "speedup": 1.5}
    quality = {"acc1": 0.4, "mean_cosine": 0.98, "noise": None}
    models = {
        "dense f32": {"acc10": 0.605, "ms": 30.0, "speedup": 1.0},
        "sparse f32": {"acc10": acc10, "ms": 30 / speedup, "speedup": speedup},
        "dense bf16": {"acc10": 0.605, "ms": 15.0, "speedup": 2.0},
        "sparse bf16": {"acc10": acc10, "ms": 10.0, "speedup": 3.0},
    }
    best = {"dense": "dense bf16", "sparse": "sparse bf16", "dense_ms": 15.0, "sparse_ms": 10.0}
    return {
        "quality": {
            "dense": {"acc1": 0.4, "acc10": 0.605},
            "sparse": {"acc1": 0.4, "acc10": acc10},
            "mean_cosine": 0.98,
        },
        "speed": [row, bf16],
        "models": [
            {"name": name, "good": found["acc10"] >= 0.595 - 1e-9} | quality | found
            for name, found in models.items()
        ],
        "best": best | {"speedup": 1.5, "noise": None, "over_dense_f32": 3.0, "good": True},
        "outside": {"f32": {"share": 0.2, "bound": 5.0}, "bf16": {"share": 0.4, "bound": 2.5}},
        "size": {
            "linear_dense_bytes": 100,
            "linear_sparse_bytes": linear,
            "file_dense_bytes": 200,
            "file_sparse_bytes": 175,
        },
        "layers": [],
        "machine": {},
        "versions": {},
        "seconds_total": 1.0,
    }


def test_goals_are_named_when_missed() -> None:
    assert summary.missed_goals(result()) == []
    assert summary.missed_goals(result(acc10=0.595, speedup=1.3, linear=80)) == []
    missed = summary.missed_goals(result(acc10=0.594, speedup=1.29, linear=81))
    assert len(missed) == 4
    assert "1.29" in missed[0] and "19.0 %" in missed[3]
    assert all("0.594" in sentence and "sparse" in sentence for sentence in missed[1:3])
    slow = result()
    slow["speed"][1]["speedup"], slow["best"]["speedup"], slow["best"]["over_dense_f32"] = 1.39, 1.38, 2.37
    missed = summary.missed_goals(slow)
    assert [found in text for found, text in zip(("1.39×", "1.38×", "2.37×"), missed, strict=True)] == [
        True
    ] * 3
    assert "sparse bf16" in missed[1] and "dense bf16" in missed[1]


def test_missed_goals_are_an_exit_code_with_check_alone() -> None:
    missed = summary.missed_goals(result(speedup=1.2))
    assert run.exit_code(missed, check=False) == 0 and run.exit_code(missed, check=True) == 1
    assert run.exit_code([], check=True) == 0
    assert not run.options([]).check and run.options(["--check"]).check


def test_a_saved_encoder_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "quietest", lambda turns: turns())
    held_out = [data.Entry(str(i), text) for i, text in enumerate(TEXTS[:40])]
    monkeypatch.setattr(run.data, "read_entries", lambda folder: held_out)
    monkeypatch.setattr(run.data, "find_wordnet", lambda: tmp_path)
    monkeypatch.setattr(run.data, "split", lambda entries: data.Split(entries, entries, []))
    for name, made in (("load_dense", encoder(0)), ("skeleton", encoder(1)), ("load_tokenizer", Words())):
        monkeypatch.setattr(run, name, lambda made=made: made)
    options = ["--measure", "--out", str(tmp_path)]
    assert run.main(options) == 2  # nothing is there yet
    student = encoder(0)
    rarefy.sparsify(student, {model.FFN_LAYERS: "block:4x1@0.5"}, measure=False)
    rarefy.save_file(student, tmp_path / "sparse.safetensors")
    before = (tmp_path / "sparse.safetensors").read_bytes()
    assert run.main(options) == 0
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["quality"]["mean_cosine"] < 1 and len(found["speed"]) == 8
    assert 0 < found["size"]["linear_sparse_bytes"] < found["size"]["linear_dense_bytes"]
    assert (tmp_path / "sparse.safetensors").read_bytes() == before
    assert not (tmp_path / "report.json").exists()


def test_a_busy_machine_gives_no_speedup_and_says_so() -> None:
    noisy = result()
    noisy["speed"][0] |= {"speedup": None, "noise": "passes disagree: 1.20x to 1.90x"}
    assert summary.missed_goals(noisy) == [
        "Goal not measured: encoding at batch 32 in f32, for passes disagree: 1.20x to 1.90x."
    ]
    assert [row[-1] for row in summary.speed_rows(noisy)] == ["noise", "1.50×"]
    assert summary.slower_notes(noisy["speed"]) == []
    noisy["best"] |= {"speedup": None, "noise": "passes disagree"}
    assert "passes disagree" in summary.best_sentence(noisy["best"])


def test_a_slower_dtype_is_said() -> None:
    (note,) = summary.slower_notes(result(speedup=0.9)["speed"])
    assert note.startswith("Batch 32, f32: sparse is not faster than dense (33.33 against 30.00 ms)")


@pytest.mark.parametrize(
    "bad",
    [
        "--block=4",
        "--block=0x1",
        "--block=5x1",
        "--share=0.2",
        "--share=1.5",
        "--minutes=-1",
    ],
)
def test_bad_options_are_refused(bad: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        run.options([bad])
    assert caught.value.code == 2 and bad.partition("=")[2] in capsys.readouterr().err


def test_json_report_has_the_promised_keys(tmp_path: Path) -> None:
    points = ((0.0, None, 0.1), (9.0, 0.1, 0.02))
    curve = [{"seconds": at, "train": train, "validation": loss} for at, train, loss in points]
    progress = distill.Progress(step=3, seconds=9.0, train=0.1, best=0.02, curve=curve)
    details = {"spec": "block:4x1@0.5", "one_shot": {"acc1": 0.3, "acc10": 0.5}, "training": progress}
    layers = ("encoder.layer.1.output.dense.weight",)
    points = [Point("down, layer 1", layers, s, 0.01 * s, 100, 400, None) for s in (0.0, 0.5)]
    details |= {"sensitivity": Sensitivity("block:4x1", 512, 0.0, points)}
    details |= {"plan": details["sensitivity"].allocate(parameters=100)}
    rows = rarefy.sparsify(encoder(0), {model.FFN_LAYERS: "block:4x1@0.5"}).to_dict()["layers"]
    report.write(result() | {"layers": rows}, details, tmp_path)
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert list(read) == [
        "quality",
        "speed",
        "models",
        "best",
        "outside",
        "size",
        "layers",
        "machine",
        "versions",
        "seconds_total",
    ]
    assert set(read["speed"][0]) >= {"batch", "tokens", "dtype", "dense_ms", "sparse_ms", "speedup"}
    page = (tmp_path / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>") and "dense bf16" in page and "40% of dense" in page
    assert (
        page.count("<td>encoder.layer.1.output.dense</td>") == 1
        and page.count("<svg") == 5
        and page.count("The frontier") == 1
    )
    assert not re.search(
        r"""<script|<link|@import|(src|xlink:href|href)="(?!#|data:)""", page
    )  # self-contained


def test_what_is_measured_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "quietest", lambda turns: turns())
    dense, sparse = encoder(0), encoder(0)
    layers = rarefy.sparsify(sparse, {model.FFN_LAYERS: "block:4x1@0.5"}, measure=False)
    held_out = [data.Entry(str(i), text) for i, text in enumerate(TEXTS[:40])]
    split = data.Split(held_out, held_out, [])
    found = run.measured(dense, sparse, Words(), split, [row.name for row in layers.replaced])
    assert {row["name"] for row in found["models"]} >= {"dense f32", "sparse bf16"}
    assert [(row["dtype"], row["batch"]) for row in found["speed"]][:1] == [("f32", 1)]
    whole = result() | found
    details = {"spec": "block:4x1@0.5", "one_shot": {"acc1": 0.3, "acc10": 0.5}}
    console = Console(record=True, width=120, file=io.StringIO())
    report.show(whole, details, console)
    text = console.export_text()
    assert "Best against best at batch 32" in text and "of dense's time is not in" in text
    assert isinstance(summary.missed_goals(whole), list)
