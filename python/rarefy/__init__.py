"""Sparse linear layers for PyTorch that are really faster than dense ones."""

from . import ops
from .backend import __version__, backend_info
from .modules import BlockSparseLinear, PseudoBlockSparseLinear
from .patcher import BlockSparseModelPatcher, BlockSpec
from .report import Report
from .serialization import load_file, load_state_dict, save_file
from .sparsify import desparsify, sparsify
from .weight import BsrWeight

__all__ = [
    "BlockSparseLinear",
    "BlockSparseModelPatcher",
    "BlockSpec",
    "BsrWeight",
    "PseudoBlockSparseLinear",
    "Report",
    "__version__",
    "backend_info",
    "desparsify",
    "load_file",
    "load_state_dict",
    "ops",
    "save_file",
    "sparsify",
]
