"""Sparse linear layers for PyTorch that are really faster than dense ones."""

from . import ops, sparse
from .advice import Advice, advise
from .backend import __version__, backend_info, explain, force_impl
from .bitmap import BitmapSpec, BitmapWeight, TwoOfFourSpec
from .bitmap_pattern import BitmapPattern
from .conv import BlockSparseConv2d
from .csr import CsrSpec, CsrWeight
from .folder import report_folder
from .fusing import fuse
from .int8 import Int8Spec, Int8Weight
from .legacy import load_legacy
from .loading import load_file, load_state_dict, set_strict_pattern
from .log import nvtx
from .modules import BlockSparseLinear
from .patcher import BlockSparseModelPatcher
from .pattern import BsrPattern
from .pattern_change import PatternChange
from .pseudo import PseudoBlockSparseLinear
from .report import Report
from .serialization import save_file
from .sparse import sparse_dense
from .sparse_weight import SparseWeight, register_format
from .sparsify import desparsify, sparsify
from .spec import Spec
from .weight import BlockSpec, BsrWeight

__all__ = [
    "Advice",
    "BitmapPattern",
    "BitmapSpec",
    "BitmapWeight",
    "BlockSparseConv2d",
    "BlockSparseLinear",
    "BlockSparseModelPatcher",
    "BlockSpec",
    "BsrPattern",
    "BsrWeight",
    "CsrSpec",
    "CsrWeight",
    "Int8Spec",
    "Int8Weight",
    "PatternChange",
    "PseudoBlockSparseLinear",
    "Report",
    "SparseWeight",
    "Spec",
    "TwoOfFourSpec",
    "__version__",
    "advise",
    "backend_info",
    "desparsify",
    "explain",
    "force_impl",
    "fuse",
    "load_file",
    "load_legacy",
    "load_state_dict",
    "nvtx",
    "ops",
    "register_format",
    "report_folder",
    "save_file",
    "set_strict_pattern",
    "sparse",
    "sparse_dense",
    "sparsify",
]
