"""Checkpoints of formats that their libraries no longer read, or that are gone: docs/legacy.md."""

from .load import Found, load_legacy, read_legacy

__all__ = ["Found", "load_legacy", "read_legacy"]
