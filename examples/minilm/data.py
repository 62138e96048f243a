"""WordNet as a reverse dictionary: definitions and their headwords, with a split that never changes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

PARTS = ("noun", "verb", "adj", "adv")
SEED = 20260101


@dataclass(frozen=True)
class Entry:
    """One sense: a headword (spaces, no underscores) and its definition without the example sentences."""

    headword: str
    definition: str


@dataclass(frozen=True)
class Split:
    """Held-out and validation entries have distinct headwords; no training text occurs in either."""

    held_out: list[Entry]
    validation: list[Entry]
    train_texts: list[str]


def texts_of(entries: list[Entry]) -> list[str]:
    """Definition and headword of each entry, in turns."""
    return [text for entry in entries for text in (entry.definition, entry.headword)]


def find_wordnet() -> Path:
    """The folder with WordNet's data.noun, data.verb, data.adj and data.adv.

    Raises FileNotFoundError that says what to install where there is none.
    """
    for folder in sorted(Path("/usr/share").glob("wordnet*")):
        if all((folder / f"data.{part}").is_file() for part in PARTS):
            return folder
    raise FileNotFoundError(
        "[wordnet] the dictionary files data.noun … must be under /usr/share/wordnet*; got none. "
        "Install them with: apt-get install wordnet-base"
    )


def parse_line(line: str) -> Entry | None:
    """The entry of one line of a data file (format: wndb(5WN)); None for the licence lines at its top.

    A line is ``offset lex_file part word_count word lex_id … | gloss``; word_count is hexadecimal, the gloss
    holds definitions and then quoted examples, an adjective may carry its position, as in ``galore(ip)``.
    """
    head, bar, gloss = line.partition(" | ")
    fields = head.split()
    if not bar or line.startswith("  ") or len(fields) < 6 or int(fields[3], 16) < 1:
        return None
    word = fields[4]
    if word.endswith(")") and "(" in word:
        word = word[: word.rindex("(")]
    definition = gloss.partition('"')[0].strip().rstrip(";:,").strip()
    return Entry(word.replace("_", " "), definition) if definition else None


def read_entries(folder: Path) -> list[Entry]:
    """All entries of a WordNet folder, in file order: nouns, verbs, adjectives, adverbs."""
    entries = []
    for part in PARTS:
        with (folder / f"data.{part}").open(encoding="utf-8") as lines:
            entries += [entry for entry in map(parse_line, lines) if entry is not None]
    return entries


def split(entries: list[Entry], held_out: int = 1000, validation: int = 1000, seed: int = SEED) -> Split:
    """Deterministic split: the same entries, counts and seed give the same lists in the same order.

    Training texts are the definitions and headwords of the other entries, shuffled, each once, without any
    text (compared without case) that is held out or used for validation.
    Raises ValueError if there are too few distinct headwords.
    """
    order = list(range(len(entries)))
    random.Random(seed).shuffle(order)
    chosen: list[Entry] = []
    taken: set[str] = set()
    rest = []
    for i in order:
        texts = {entries[i].headword.lower(), entries[i].definition.lower()}
        if len(chosen) < held_out + validation and not texts & taken:
            chosen.append(entries[i])
            taken |= texts
        else:
            rest.append(entries[i])
    if len(chosen) < held_out + validation:
        raise ValueError(
            f"[split] entries must have {held_out + validation} distinct headwords and definitions; "
            f"got {len(chosen)}"
        )
    texts = dict.fromkeys(texts_of(rest))
    train = [text for text in texts if text.lower() not in taken]
    return Split(chosen[:held_out], chosen[held_out:], train)
