"""transformers: no save_pretrained of sparse models, as long as from_pretrained does not read them."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from .checks import fail


def guard_save_pretrained(kind: type[nn.Module]) -> None:
    """Makes save_pretrained refuse models with a module of `kind`; nothing where transformers is not used.

    from_pretrained would build dense layers and draw the sparse ones anew: another model, without an error.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    base = getattr(modeling, "PreTrainedModel", None)
    save = getattr(base, "save_pretrained", None)
    if save is None or getattr(save, "_rarefy_guard", False):
        return

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sparse = next((name for name, module in self.named_modules() if isinstance(module, kind)), None)
        if sparse is not None:
            requirement = "a model with sparse layers must be saved by rarefy.save_file and loaded by"
            requirement += " rarefy.load_file, since from_pretrained does not read it yet"
            fail("save_pretrained", requirement, sparse, NotImplementedError)
        return save(self, *args, **kwargs)

    save_pretrained._rarefy_guard = True
    base.save_pretrained = save_pretrained
