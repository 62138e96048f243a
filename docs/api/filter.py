"""What doxygen reads instead of a header: its comments as comments of documentation."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def documented(line: str) -> str:
    """A line of a header with // as ///, and behind code as ///<."""
    if "NOLINT" in line or "namespace" in line:
        return line
    line = re.sub(r"-{8,}", "", line)
    line = re.sub(r"^(\s*)// ?", r"\1/// ", line)
    line = re.sub(r"^(\s*)/\* ", r"\1/** ", line)
    line = re.sub(r"(\S)\s+// (.*)", r"\1  ///< \2", line)
    return re.sub(r"(\S)\s+/\* (.*)", r"\1  /**< \2", line)


text = "\n".join(map(documented, Path(sys.argv[1]).read_text("utf-8").splitlines()))
# The first comment is the file's.
sys.stdout.write(
    re.sub(r"\A/\*\* |\A(?=///)", lambda m: "/** @file\n" if m[0] else "/// @file\n", text) + "\n"
)
