"""Which versions of other libraries work: one sentence instead of a name that cannot be imported."""

from __future__ import annotations

from importlib import metadata

from torch.torch_version import TorchVersion

from ..checks import fail


def need(library: str, minimum: str) -> None:
    """Raises ImportError unless a library is installed in this version or a later one."""
    op = f"rarefy.integrations.{library}"
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        fail(op, f"{library} must be installed", "none", ImportError)
    if TorchVersion(found) < minimum:  # torch's own way to compare versions
        fail(op, f"{library} must be {minimum} or later", found, ImportError)
