"""What is packed and what is documented is all that there is; `make wheel` and `make docs` do the work."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import rarefy

ROOT = Path(__file__).resolve().parents[2]


def test_the_sdist_has_what_git_tracks(tmp_path):
    pytest.importorskip("scikit_build_core")
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    wanted = {
        name for name in tracked.stdout.splitlines() if not name.startswith((".ci/", "python/rarefy/lib"))
    }
    assert not {name for name in wanted if (ROOT / name).is_file()} - packed
    assert not [name for name in packed if name.endswith(".so") or name.startswith("build/")]


def test_every_header_and_every_guide_is_in_the_reference():
    cpp = (ROOT / "docs/api/cpp.md").read_text() + (ROOT / "docs/api/c.md").read_text()
    shown = set(re.findall(r"doxygenfile:: (\S+)", cpp))
    headers = {path.name for path in (ROOT / "include/rarefy").glob("*.h")}
    assert headers - shown == {"export.h", "rarefy.h"}  # the macro, and the one that includes the others
    index = (ROOT / "docs/index.md").read_text()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert not {page for page in pages if not re.search(rf"^{page}$", index, re.MULTILINE)}


def test_every_public_name_has_a_docstring():
    import rarefy.prune

    for module in (rarefy, rarefy.prune, rarefy.sparse):
        for name in module.__all__:
            value = getattr(module, name)
            assert name.startswith("__") or (value.__doc__ or "").strip(), f"{module.__name__}.{name}"


def test_the_wheel_has_one_version_with_the_headers():
    header = (ROOT / "include/rarefy/version.h").read_text()
    assert f'"{rarefy.__version__}"' in header
