"""Sphinx: the pages of docs/, and a reference made of docstrings and headers. `make docs` builds it."""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT)]

import rarefy  # noqa: E402
from bench import gallery  # noqa: E402

project, copyright = "Rarefy", "the Rarefy authors"  # noqa: A001
version = release = rarefy.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "breathe", "myst_parser"]
html_theme = "furo"
html_title = f"Rarefy {version}"
exclude_patterns = ["design/**"]  # for those who change the code
default_role = "code"
nitpicky = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Links to files that are no pages (HACKING.md, the sources) are checked by tools/check_links.py.
# A namespace and a C typedef are declared in each file that opens or names them.
suppress_warnings = ["myst.xref_missing", "duplicate_declaration.cpp"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "show-inheritance": True, "undoc-members": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Headers: doxygen reads them through a filter, since their comments are plain ones.
DOXYGEN = ROOT / "build/doxygen"
breathe_projects = {"rarefy": str(DOXYGEN / "xml")}
breathe_default_project = "rarefy"
breathe_default_members = ("members", "undoc-members")

_CODE = re.compile(r"(``?[^`]+``?)")


def _plain(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code`: what reStructuredText would take for markup is not meant."""
    for i, line in enumerate(lines):
        parts = _CODE.split(line)
        parts[::2] = [re.sub(r"([*|\\])|(?<=\w)(_)(?=\W|$)", r"\\\1\2", part) for part in parts[::2]]
        lines[i] = "".join(parts)


def _plots(app: object, page: str, source: list[str]) -> None:
    """Draws the plots of the gallery and puts them into its page."""
    if page == "gallery":
        source[0] += "\n" + gallery.markdown(gallery.gallery(ROOT / "build/gallery"), ROOT / "docs")


def setup(app: object) -> None:
    """Runs doxygen, whose warnings are errors, and makes docstrings plain before napoleon reads them."""
    DOXYGEN.mkdir(parents=True, exist_ok=True)
    subprocess.run(["doxygen", HERE / "Doxyfile"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    app.connect("source-read", _plots)
    app.connect("autodoc-process-docstring", _plain, priority=400)
