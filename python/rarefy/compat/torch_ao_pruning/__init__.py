"""torch.ao.pruning with its defects mended: the same names, groups, state and numerics.

from rarefy.compat.torch_ao_pruning import WeightNormSparsifier, CubicSL

Classes here are subclasses of torch's, so isinstance holds and torch's schedulers drive them. What is better
is in docs/migrating.md; rarefy.prune.Sparsifier has more criteria, patterns and scopes.
"""

from torch.ao.pruning import (
    BaseScheduler,
    CubicSL,
    LambdaSL,
    fqn_to_module,
    get_arg_info_from_tensor_fqn,
    get_dynamic_sparse_quantized_mapping,
    get_static_sparse_quantized_mapping,
    module_to_fqn,
)
from torch.ao.pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier
from torch.ao.pruning._experimental.data_scheduler import BaseDataScheduler
from torch.ao.pruning._experimental.data_sparsifier import BaseDataSparsifier
from torch.ao.pruning._experimental.data_sparsifier.quantization_utils import post_training_sparse_quantize
from torch.ao.pruning._experimental.pruner import BiasHook

from .experimental import (
    BaseStructuredSparsifier,
    DataNormSparsifier,
    FakeStructuredSparsity,
    FPGMPruner,
    LSTMSaliencyPruner,
    SaliencyPruner,
)
from .sparsifiers import BaseSparsifier, FakeSparsity, NearlyDiagonalSparsifier, WeightNormSparsifier

__all__ = [
    "ActivationSparsifier",
    "BaseDataScheduler",
    "BaseDataSparsifier",
    "BaseScheduler",
    "BaseSparsifier",
    "BaseStructuredSparsifier",
    "BiasHook",
    "CubicSL",
    "DataNormSparsifier",
    "FPGMPruner",
    "FakeSparsity",
    "FakeStructuredSparsity",
    "LSTMSaliencyPruner",
    "LambdaSL",
    "NearlyDiagonalSparsifier",
    "SaliencyPruner",
    "WeightNormSparsifier",
    "fqn_to_module",
    "get_arg_info_from_tensor_fqn",
    "get_dynamic_sparse_quantized_mapping",
    "get_static_sparse_quantized_mapping",
    "module_to_fqn",
    "post_training_sparse_quantize",
]
