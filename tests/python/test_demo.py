"""The parts of examples/minilm on tiny inputs: parser, split, metric, pruning, distillation, all in a row."""

from __future__ import annotations

import copy
import itertools
import types
from pathlib import Path

import pytest
import torch

import rarefy
from demo_encoder import TEXTS, Words, encoder, entries, split_of
from examples.minilm import data, distill, evaluate, measure, model, prune, run

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


def test_batches_of_one_length_hold_every_text() -> None:
    batches = list(prune.same_lengths(Words(), TEXTS, most=8))
    assert sum(map(len, batches)) == len(TEXTS) and max(map(len, batches)) == 8
    assert sorted(row.tolist() for ids in batches for row in ids) == sorted(
        Words()(TEXTS, truncation=True, max_length=128)["input_ids"]
    )


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
