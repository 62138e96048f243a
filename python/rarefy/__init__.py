"""Sparse linear layers for PyTorch that are really faster than dense ones."""

from . import ops
from .backend import __version__, backend_info
from .modules import BlockSparseLinear, PseudoBlockSparseLinear
from .weight import BsrWeight

__all__ = [
    "BlockSparseLinear",
    "BsrWeight",
    "PseudoBlockSparseLinear",
    "__version__",
    "backend_info",
    "ops",
]
