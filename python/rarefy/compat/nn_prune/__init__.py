"""torch.nn.utils.prune as parametrizations: functions, classes and numerics, on modules that deep-copy.

from rarefy.compat import nn_prune as prune
prune.l1_unstructured(module, "weight", amount=0.3)

There `module.weight` becomes a plain tensor beside `weight_orig` and `weight_mask`, so that deepcopy fails
after a forward; here it is computed by a parametrization, `Pruned`, of a mask and the original.
Ties are spread over rows (there whole rows are lost). `load_state_dict` reads checkpoints of the original.
"""

from .functions import (
    custom_from_mask,
    global_unstructured,
    identity,
    l1_unstructured,
    ln_structured,
    load_state_dict,
    random_structured,
    random_unstructured,
)
from .methods import (
    BasePruningMethod,
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    PruningContainer,
    RandomStructured,
    RandomUnstructured,
)
from .pruned import Pruned, is_pruned, remove

__all__ = [
    "BasePruningMethod",
    "CustomFromMask",
    "Identity",
    "L1Unstructured",
    "LnStructured",
    "Pruned",
    "PruningContainer",
    "RandomStructured",
    "RandomUnstructured",
    "custom_from_mask",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_unstructured",
    "ln_structured",
    "load_state_dict",
    "random_structured",
    "random_unstructured",
    "remove",
]
