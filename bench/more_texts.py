"""Other texts of the entries that the demo trains on: their other words, and their examples."""

from __future__ import annotations

import re
from pathlib import Path

from examples.minilm import data


def more_texts(folder: Path, split: data.Split) -> list[str]:
    """Words and examples of WordNet's entries that are no training texts yet, each once, in file order.

    None are of entries that are held out or validate, and none says what such an entry's texts say.
    """
    kept_out = {*split.held_out, *split.validation}
    known = {text.lower() for text in (*split.train_texts, *data.texts_of([*kept_out]))}
    found: dict[str, str] = {}
    for part in data.PARTS:
        with (folder / f"data.{part}").open(encoding="utf-8") as lines:
            for line in lines:
                entry = data.parse_line(line)
                if entry is None or entry in kept_out:
                    continue
                for text in (*words(line), *examples(line)):
                    if text.lower() not in known:
                        found.setdefault(text.lower(), text)
    return list(found.values())


def words(line: str) -> list[str]:
    """All words of a line ``offset lex_file part word_count word lex_id word lex_id … | gloss``."""
    fields = line.split()
    names = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    return [re.sub(r"\([^()]*\)$", "", name).replace("_", " ") for name in names]


def examples(line: str) -> list[str]:
    """The quoted examples of a line's gloss."""
    return [text for text in map(str.strip, re.findall(r'"([^"]+)"', line.partition(" | ")[2])) if text]
