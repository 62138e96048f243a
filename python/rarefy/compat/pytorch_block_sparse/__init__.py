"""The public surface of huggingface/pytorch_block_sparse 0.1.2: any block shape, CPU and GPU.

from rarefy.compat.pytorch_block_sparse import BlockSparseLinear, BlockSparseModelPatcher, SparseOptimizer

Names, arguments and what they mean are the original's; docs/migrating.md lists what is better. Unlike there,
a block of `data` holds its elements as the matrix does (the original stores it transposed), in the order of
the matrix's block rows. state_dicts of the original load.
"""

from .linear import BlockSparseLinear, BlockSparseLinearFunction, PseudoBlockSparseLinear
from .matrix import BlockSparseMatrix, BlockSparseMatrixBase, BlockSparseMatrixEmulator
from .optimizer import (
    AdamOptimizerStateUpdater,
    MagnitudeSparseOptimizerStrategy,
    OptimizerStateUpdater,
    SparseOptimizer,
    SparseOptimizerStrategy,
)
from .patchers import BlockSparseModelPatcher, ModelPatcher

__all__ = [
    "AdamOptimizerStateUpdater",
    "BlockSparseLinear",
    "BlockSparseLinearFunction",
    "BlockSparseMatrix",
    "BlockSparseMatrixBase",
    "BlockSparseMatrixEmulator",
    "BlockSparseModelPatcher",
    "MagnitudeSparseOptimizerStrategy",
    "ModelPatcher",
    "OptimizerStateUpdater",
    "PseudoBlockSparseLinear",
    "SparseOptimizer",
    "SparseOptimizerStrategy",
]
