"""Pruning: which weights a model can do without, found once or while it trains.

Criteria, patterns, scopes with allocations, and schedules are objects that know nothing of each other;
Sparsifier puts them together. docs/pruning.md walks from a model to a faster model.
"""

from . import criteria, patterns, schedules, scopes
from .criteria import Criterion, parse_criterion
from .masked import Masked
from .masks import Mask, Scores, allocate_global, make_mask
from .patterns import Pattern, parse_pattern
from .reconstruct import Reconstruction, layer_error, reconstruct, reconstruct_weight
from .schedules import Schedule, parse_schedule
from .scopes import Allocation, Scope, parse_allocation, parse_scope
from .sparsifier import Sparsifier
from .table import Row, Table

__all__ = [
    "Allocation",
    "Criterion",
    "Mask",
    "Masked",
    "Pattern",
    "Reconstruction",
    "Row",
    "Schedule",
    "Scope",
    "Scores",
    "Sparsifier",
    "Table",
    "allocate_global",
    "criteria",
    "layer_error",
    "make_mask",
    "parse_allocation",
    "parse_criterion",
    "parse_pattern",
    "parse_schedule",
    "parse_scope",
    "patterns",
    "reconstruct",
    "reconstruct_weight",
    "schedules",
    "scopes",
]
