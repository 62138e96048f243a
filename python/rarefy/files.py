"""Files that appear at their path complete or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_ATTEMPTS = 1000  # names can be taken: by processes that crashed, or of other machines
_opened = itertools.count()


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path in the folder of `path`; what is there when the block ends becomes `path`.

    The bytes are on disk before the name is, and the permissions are those that the umask leaves. If the
    block raises, `path` is as before. Safe from several threads and processes at once: the last one wins.

    Raises OSError where the folder cannot be written.
    """
    path = Path(path)
    temporary, mode = _create(path.parent)
    try:
        yield temporary
        temporary.chmod(mode)  # the writer may have put a file of its own there
        _sync(temporary)
        temporary.replace(path)
        with contextlib.suppress(OSError):  # not every file system can sync a folder
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _create(folder: Path) -> tuple[Path, int]:
    """A new empty file and its mode. Its name is short, for that of `path` may be as long as can be."""
    for _ in range(_ATTEMPTS):
        temporary = folder / f".rarefy-{os.getpid()}-{next(_opened)}.tmp"
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                return temporary, os.fstat(descriptor).st_mode & 0o777
            finally:
                os.close(descriptor)
    raise FileExistsError(f"no free temporary name in {folder}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
