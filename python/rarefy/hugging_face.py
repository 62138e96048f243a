"""transformers: save_pretrained of sparse models goes by way of the integration, or is refused."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .checks import fail


def guard_save_pretrained(kind: type[nn.Module]) -> None:
    """Makes save_pretrained look for modules of `kind`; nothing where transformers is not used.

    Without, config.json would be silent about them, and from_pretrained would build dense layers and draw
    their weights anew: another model, without an error.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    base = getattr(modeling, "PreTrainedModel", None)
    save = getattr(base, "save_pretrained", None)
    if save is None or getattr(save, "_rarefy_guard", False):
        return

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sparse = [(name, module) for name, module in self.named_modules() if isinstance(module, kind)]
        if not sparse or getattr(self, "_hf_peft_config_loaded", False):  # then it saves the adapter alone
            return save(self, *args, **kwargs)
        advice = "(rarefy.save_file writes it for rarefy.load_file)"
        for name, module in sparse:
            if is_parametrized(module):
                requirement = f"a sparse weight must be no parametrized one {advice}"
                fail("save_pretrained", requirement, name, NotImplementedError)
        try:
            from .integrations.transformers import save_sparse
        except ImportError as error:
            requirement = f"transformers must be 4.50 or later to save sparse layers {advice}"
            fail("save_pretrained", requirement, error, NotImplementedError)
        return save_sparse(save, self, args, kwargs)

    save_pretrained._rarefy_guard = True
    base.save_pretrained = save_pretrained
