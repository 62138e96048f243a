"""Sparse linear layers for PyTorch that are really faster than dense ones."""

from . import ops
from .backend import __version__, backend_info

__all__ = ["__version__", "backend_info", "ops"]
