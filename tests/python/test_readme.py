"""The Python of README.md and of pages of docs runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    pytest.param(code, id=f"{page}, Python block {i}")
    for page in ("README.md", "docs/pruning.md", "docs/sparse.md")
    for i, code in enumerate(
        re.findall(
            r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    )
]


def test_the_pages_have_python():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "a page", "exec"), {})
    assert "Traceback" not in capsys.readouterr().err


def test_pruning_is_a_page_of_40_lines_of_code():
    code = re.search(
        r"^```python\n(.*?)^```", (ROOT / "docs/pruning.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(code[1].splitlines()) <= 40
