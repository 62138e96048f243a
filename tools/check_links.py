"""Check that every relative link in the Markdown files leads to a file, and every #anchor to a heading."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a file's headings, as code hosts make them."""
    headings = re.findall(r"^#+\s+(.+?)\s*#*$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links of one page that lead nowhere."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue  # another site or a mail address
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        wrong_anchor = (
            anchor
            and target.suffix == ".md"
            and target.exists()
            and (anchor not in anchors(target.read_text(encoding="utf-8")))
        )
        if not target.exists() or wrong_anchor:
            broken.append(f"{page}: {link}")
    return broken


def main() -> int:
    """Check every Markdown file that git knows or could add; print the broken links."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pages = [page for page in map(Path, listing.splitlines()) if page.exists()]
    broken = [link for page in pages for link in broken_links(page)]
    for link in broken:
        print("broken link", link)
    print(f"{len(pages)} pages, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
