"""ModelPatcher and BlockSparseModelPatcher, as in pytorch_block_sparse."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...checks import fail
from .linear import BlockSparseLinear, PseudoBlockSparseLinear

_OPTIONS = ("density", "pseudo_linear", "block_shape")


class ModelPatcher:
    """Replaces modules of a model whose names begin with what a regular expression matches (re.match).

    Subclasses say which modules can be replaced, and by what.
    """

    def __init__(self) -> None:
        self.patterns: list[dict[str, Any]] = []

    def is_patchable(self, module_name: str, module: nn.Module, raiseError: bool) -> bool:
        """Whether a module can be replaced; with `raiseError` an error says why not."""
        return True

    def get_patchable_layers(self, model: nn.Module) -> list[dict[str, Any]]:
        """For each module that can be replaced {"regexp": its name, escaped, "layer": the module}."""
        named = model.named_modules()
        return [{"regexp": re.escape(k), "layer": v} for k, v in named if self.is_patchable(k, v, False)]

    def add_pattern(self, pattern: str, patch_info: Mapping[str, Any]) -> None:
        """Adds an expression and what its modules become; of several that match the first counts."""
        try:
            re.compile(pattern)
        except re.error as error:
            fail("add_pattern", "pattern must be a regular expression", f"{pattern!r}: {error}")
        self.patterns.append({"pattern": pattern, "patch_info": dict(patch_info)})

    def pattern_match(self, module_name: str) -> tuple[bool, Any]:
        """(True, patch_info) of the first pattern that a name begins with, or (False, -1)."""
        for entry in self.patterns:
            if re.match(entry["pattern"], module_name):
                return True, entry["patch_info"]
        return False, -1

    def new_child_module(
        self, child_module_name: str, child_module: nn.Module, patch_info: Mapping[str, Any]
    ) -> nn.Module | None:
        """What a module becomes; None: it stays. To be defined."""
        raise NotImplementedError(f"[{type(self).__name__}] new_child_module must be defined; got none")

    def replace_module(
        self, father: nn.Module, child_module_name: str, child_name: str, child_module: nn.Module,
        patch_info: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Puts the new module in place of `father.child_name`."""
        new = self.new_child_module(child_module_name, child_module, patch_info)
        if new is not None:
            setattr(father, child_name, new)

    def patch_model(self, model: nn.Module) -> None:
        """Replaces what matches, in place; a module with several names everywhere by the same new one.

        Warns of patterns that match nothing.

        Raises what is_patchable raises for a module that matches and cannot be replaced; nothing has
        changed then.
        """
        found = []
        for name, module in list(model.named_modules(remove_duplicate=False)):
            matches, info = self.pattern_match(name) if name else (False, -1)
            if matches and self.is_patchable(name, module, True):
                found.append((name, module, info))
        for entry in self.patterns:
            if not any(re.match(entry["pattern"], name) for name, _, _ in found):
                text = f"[patch_model] pattern {entry['pattern']!r} matches no module"
                warnings.warn(text, stacklevel=2)
        new: dict[int, nn.Module] = {}
        for name, module, info in found:
            path, _, child = name.rpartition(".")
            father = model.get_submodule(path)
            if id(module) in new:
                setattr(father, child, new[id(module)])
            else:
                self.replace_module(father, name, child, module, info)
                new[id(module)] = getattr(father, child)


class BlockSparseModelPatcher(ModelPatcher):
    r"""Makes nn.Linear layers BlockSparseLinear.

    patcher = BlockSparseModelPatcher()
    patcher.add_pattern(r"encoder\.layer\.[0-9]+\.output\.dense", {"density": 0.5})
    patcher.patch_model(model)

    `patch_info`: "density"; "pseudo_linear": True for the masked dense twin; "block_shape": (32, 32).
    """

    def is_patchable(self, module_name: str, module: nn.Module, raiseError: bool) -> bool:
        """Whether it is an nn.Linear."""
        if isinstance(module, nn.Linear):
            return True
        if raiseError:
            fail("patch_model", f"{module_name} must be an nn.Linear", type(module).__name__, TypeError)
        return False

    def add_pattern(self, pattern: str, patch_info: Mapping[str, Any]) -> None:
        """See ModelPatcher; ValueError for keys that are not known, and without a density."""
        if "density" not in patch_info or not patch_info.keys() <= set(_OPTIONS):
            fail("add_pattern", f"patch_info must have a density, and keys of {_OPTIONS}", sorted(patch_info))
        super().add_pattern(pattern, patch_info)

    def new_child_module(
        self, child_module_name: str, child_module: nn.Module, patch_info: Mapping[str, Any]
    ) -> nn.Module:
        """A BlockSparseLinear of the layer, or its twin."""
        self.is_patchable(child_module_name, child_module, True)
        shape = patch_info.get("block_shape", (32, 32))
        density = patch_info["density"]
        new = BlockSparseLinear(0, 0, torch_nn_linear=child_module, density=density, block_shape=shape)
        return PseudoBlockSparseLinear(new) if patch_info.get("pseudo_linear") else new
