"""bench/students.py: several students at once learn what each learns alone in the demo's distiller."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parent))

import more_texts
import rarefy
import students
from demo_encoder import TEXTS, Words, encoder
from examples.minilm import data, distill, model, prune

pytestmark = pytest.mark.usefixtures("one_thread")


def test_states_are_those_of_transformers() -> None:
    both = [encoder(0), encoder(1)]
    both[1].embeddings.load_state_dict(both[0].embeddings.state_dict())
    together = students.Students(both, [{}, {}], "cpu")
    batch = model.tokenize(Words(), TEXTS[:9])
    keep = batch["attention_mask"].bool()
    with torch.no_grad():
        found = together.states(batch)
        for s, one in enumerate(both):
            wanted = one(**batch, output_hidden_states=True).hidden_states[1:]
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got[s][keep], want[keep])
    copied = copy.deepcopy(both[0])
    together.load_into(copied, 1)
    for p, q in zip(copied.parameters(), both[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_batches_have_few_shapes_and_every_text_in_turn() -> None:
    ids = model.token_ids(Words(), TEXTS)
    made = list(itertools.islice(students.batches(ids, 64, 0), 40))
    assert {tuple(b["input_ids"].shape) for b in made} == {(16, 4), (8, 8)}
    rows = [
        tuple(row[mask.bool()].tolist())
        for batch in made
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    known = Counter(map(tuple, ids))
    assert Counter(rows[: len(ids)]).keys() <= known.keys()
    counts = Counter(rows)
    turns = [counts[text] / often for text, often in known.items()]
    assert max(turns) - min(turns) <= 1 + 1e-9  # all texts before one comes again, but for those that wait
    again = itertools.islice(students.batches(ids, 64, 0), 40)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(made, again, strict=True))
    assert not torch.equal(made[0]["input_ids"], next(students.batches(ids, 64, 1))["input_ids"])


def test_pieces_are_cut_out_of_texts_where_words_begin() -> None:
    first, last, words = 1, 2, itertools.count(10)
    continues = torch.zeros(200, dtype=torch.bool)
    texts = []
    for length in (1, 2, 3, 5, 7, 12):  # each token is of one text and place; every third goes on with a word
        inner = [next(words) for _ in range(length)]
        continues[inner[2::3]] = True
        texts.append([first, *inner, last])
    whole = {tuple(text[1:-1]) for text in texts}
    made = students.batches(texts, 16, 0, pieces=1.0, continues=continues)
    cut = Counter()
    for batch in itertools.islice(made, 300):
        for row, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
            got = row[mask].tolist()
            assert (got[0], got[-1]) == (first, last) and (row[~mask] == 0).all()
            inner = tuple(got[1:-1])
            assert any(inner == text[i : i + len(inner)] for text in whole for i in range(len(text)))
            assert not continues[inner[0]]
            cut[inner] += 1
    assert len(cut) > 2 * len(texts) and whole <= cut.keys()
    lengths = Counter(map(len, cut.elements()))
    assert lengths.keys() == {len(text) for text in whole}  # as long as the texts
    plain = students.batches(texts, 16, 0)
    both = students.batches(texts, 16, 0, pieces=0.5, continues=continues)
    known = [tuple(row.tolist()) for b in itertools.islice(plain, 60) for row in b["input_ids"]]
    mixed = [all(tuple(r.tolist()) in known for r in b["input_ids"]) for b in itertools.islice(both, 200)]
    assert 60 < sum(mixed) < 180  # short pieces may be whole texts


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_an_average_is_the_mean_after_the_last_steps(share: float) -> None:
    dense, steps = encoder(0), 8
    recipe = students.Recipe(lr=1e-2, tokens=64)
    teacher = students.Students([encoder(1)], [{}], "cpu")

    class Watched(torch.optim.AdamW):
        def step(self) -> None:
            super().step()
            seen.append([p.detach().clone() for group in self.param_groups for p in group["params"]])

    seen: list[list[torch.Tensor]] = []
    together = students.Students([dense, dense], [{}, {}], "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Watched)
        made = distill.batches(Words(), TEXTS, tokens=64, seed=0)
        recipes = [recipe, dataclasses.replace(recipe, average=share)]
        students.train(together, teacher, made, steps, recipes)
    last, mean = together.weights.detach()
    assert torch.equal(last, seen[-1][0])
    counted = [weights[1] for weights in seen[-round(share * steps) :]]
    torch.testing.assert_close(mean, torch.stack(counted).double().mean(0).float(), rtol=1e-5, atol=1e-6)
    assert (mean - last).abs().max() > 1e-4


def test_other_texts_are_of_no_entry_that_is_kept_out(tmp_path: Path) -> None:
    lines = {
        "noun": [
            '00 03 n 03 cat 0 true_cat 0 Felis 0 000 | a feline; "the cat sat"; "a cat\'s life"  ',
            '01 03 n 02 dog 0 hound 0 000 | a canine; "the dog barked"  ',
            '02 03 n 02 pet 0 Dog 0 000 | a tame animal; "a feline"; "all pets"  ',
        ],
        "adj": ['03 00 s 02 galore(ip) 0 aplenty(ip) 0 000 | in great numbers; "daffodils galore"  '],
    }
    for part in data.PARTS:
        (tmp_path / f"data.{part}").write_text("\n".join(lines.get(part, [])), encoding="utf-8")
    cat, dog, pet, galore = data.read_entries(tmp_path)
    split = data.Split([dog], [], data.texts_of([cat, pet, galore]))
    found = more_texts.more_texts(tmp_path, split)
    assert found == [
        "true cat",
        "Felis",
        "the cat sat",
        "a cat's life",
        "all pets",
        "aplenty",
        "daffodils galore",
    ]


def test_steps_are_those_of_the_demo() -> None:
    dense, batches = encoder(0), list(prune.same_lengths(Words(), TEXTS))
    recipes = [students.Recipe(lr=3e-3, tokens=64), students.Recipe(lr=1e-3, tokens=64, pooled=3.0, clip=0.5)]
    pruned, masks = [], []
    for density in (0.5, 0.75):
        student = copy.deepcopy(dense)
        names = [n for n, m in student.named_modules() if isinstance(m, torch.nn.Linear) and "self" not in n]
        masks.append(prune.prune(dense, student, batches, dict.fromkeys(names, 1 - density), "4x1"))
        pruned.append(student)
    steps = 12
    teacher = students.Students([dense], [{}], "cpu")
    together = students.Students(pruned, masks, "cpu")
    made = distill.batches(Words(), TEXTS, tokens=64, seed=0)
    assert students.train(together, teacher, made, steps, recipes) == steps
    probe = model.tokenize(Words(), TEXTS[:9])
    for s, (student, mask, recipe) in enumerate(zip(pruned, masks, recipes, strict=True)):
        patterns, scores = prune.patterns_of(mask, "4x1")
        rarefy.sparsify(student, patterns, scores=scores, measure=False)
        with torch.no_grad():
            before = student(**probe).last_hidden_state
        job = distill.Distiller(student, dense, Words(), TEXTS, TEXTS[:4], recipe=recipe)
        for step, batch in enumerate(itertools.islice(distill.batches(Words(), TEXTS, 64, 0), steps)):
            job._step(batch, recipe.lr * distill.rate(step / steps, recipe.warmup))
        found = copy.deepcopy(dense)
        together.load_into(found, s)
        assert all(
            (found.get_submodule(name).weight[~kept.unpack()] == 0).all() for name, kept in mask.items()
        )
        with torch.no_grad():
            got, want = (net(**probe).last_hidden_state for net in (found, student))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            assert (got - before).abs().max() > 0.005


def test_a_run_without_steps_and_without_time_is_refused() -> None:
    both = [encoder(0)]
    together = students.Students(both, [{}], "cpu")
    batches = [{"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4)}]
    with pytest.raises(ValueError, match="steps or seconds must be above 0"):
        students.train(together, together, batches, 0, [students.Recipe()])
