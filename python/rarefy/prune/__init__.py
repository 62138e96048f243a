"""Pruning: which weights a model can do without, found once or while it trains.

Criteria, patterns, scopes with allocations, and schedules are objects that know nothing of each other;
Sparsifier puts them together. docs/pruning.md walks from a model to a faster model.
"""

from . import criteria, drop_fractions, patterns, schedules, scopes
from .couplings import Coupling, find_couplings
from .criteria import Criterion, parse_criterion
from .drop_fractions import DropFraction, parse_fraction
from .elimination import Elimination, eliminations
from .granet import GraNet
from .groups import grams
from .growth import gradient_norms
from .layer_by_layer import Reconstruction, reconstruct
from .low_rank import (
    Factorization,
    LowRankConv2d,
    LowRankLinear,
    factorize,
    factorize_weight,
    factorize_with_blocks,
)
from .masked import Masked
from .masks import Mask, Scores, allocate_global, make_mask
from .moments import Moments, arrange, arrange_hidden, reconstruct_layer
from .moving import SET, MagnitudeRegrow, Move, MovingPattern, RigL, SRigL
from .patterns import Pattern, parse_pattern
from .reconstruct import layer_error, reconstruct_weight
from .schedules import Schedule, parse_schedule
from .scopes import Allocation, Scope, parse_allocation, parse_scope
from .sensitivity import Plan, Point, Sensitivity, sensitivity
from .sparsifier import Sparsifier
from .start import sparse_start
from .structured import shrink
from .table import Row, Table
from .top_kast import TopKAST
from .traced import trace_couplings

__all__ = [
    "SET",
    "Allocation",
    "Coupling",
    "Criterion",
    "DropFraction",
    "Elimination",
    "Factorization",
    "GraNet",
    "LowRankConv2d",
    "LowRankLinear",
    "MagnitudeRegrow",
    "Mask",
    "Masked",
    "Moments",
    "Move",
    "MovingPattern",
    "Pattern",
    "Plan",
    "Point",
    "Reconstruction",
    "RigL",
    "Row",
    "SRigL",
    "Schedule",
    "Scope",
    "Scores",
    "Sensitivity",
    "Sparsifier",
    "Table",
    "TopKAST",
    "allocate_global",
    "arrange",
    "arrange_hidden",
    "criteria",
    "drop_fractions",
    "eliminations",
    "factorize",
    "factorize_weight",
    "factorize_with_blocks",
    "find_couplings",
    "gradient_norms",
    "grams",
    "layer_error",
    "make_mask",
    "parse_allocation",
    "parse_criterion",
    "parse_fraction",
    "parse_pattern",
    "parse_schedule",
    "parse_scope",
    "patterns",
    "reconstruct",
    "reconstruct_layer",
    "reconstruct_weight",
    "schedules",
    "scopes",
    "sensitivity",
    "shrink",
    "sparse_start",
    "trace_couplings",
]
