"""What transformers 4 calls otherwise than 5: it reads files itself, and knows no operations on the way.

The quantizer is prepared when the files are known, and hidden from the loading, which then treats the pieces
of sparse weights as any other tensors: a `Pending` takes them in, or hooks on dense layers make these sparse.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils
from transformers.modeling_utils import PreTrainedModel

from .on_the_fly import SparsifyOnLoad


def resolve(model: nn.Module, names: Iterable[str], keys: Iterable[str], mapping: Any) -> dict[str, str]:
    """The model's names for weights of the file, without those that it has no place for.

    Args:
        model: the skeleton.
        names: of weights, in the file.
        keys: of all tensors of the files.
        mapping: the user's key_mapping, or None.
    """
    prefix, keys = model.base_model_prefix, list(keys)
    in_file = bool(prefix) and any(key.startswith(prefix) for key in keys)
    in_model = bool(prefix) and hasattr(model, prefix)
    found = {}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in names:
        adding = not in_file and in_model and f"{prefix}.{name}" in known
        key = model._get_key_renaming_mapping([name], mapping, in_file and not in_model, adding).get(name)
        if key in known:
            found[name] = key
    return found


def key_in_file(model: nn.Module, key: str) -> str:
    """The name that save_pretrained gives a tensor of the model."""
    names = [kind.__name__.lower() for kind in type(model).__mro__[:-1]]
    if any(vlm in name for name in names for vlm in getattr(modeling_utils, "VLMS", ())):
        for new, old in model._checkpoint_conversion_mapping.items():
            key, count = re.subn(old, re.sub(r"\(.*\)", "", new.lstrip("^")), key)
            if count:
                break
    return model._fix_state_dict_key_on_save(key)[0]


def _dtype_rule(keep: Any) -> Callable[[str, torch.dtype], torch.dtype]:
    """What transformers casts a tensor to, by name: `keep` stays float32, a regex or parts of names."""
    if isinstance(keep, list | tuple):
        keep = re.compile("|".join(re.escape(part) for part in keep)) if keep else None
    return lambda name, dtype: torch.float32 if keep is not None and keep.search(name) else dtype


def _hook(model: nn.Module, on_load: SparsifyOnLoad) -> None:
    """Makes layers sparse as soon as their weights are loaded."""
    for name in on_load.waiting:
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)

        def loaded(module: nn.Module, _: Any, name: str = name, attribute: str = attribute) -> None:
            weight = getattr(module, attribute)
            if isinstance(weight, torch.Tensor) and not weight.is_meta and name not in on_load.taken:
                on_load.take(name, weight.detach())

        on_load.hooks.append(owner.register_load_state_dict_post_hook(loaded))


def install(quantizer: type) -> None:
    """Wraps what reads the files."""
    load = PreTrainedModel._load_pretrained_model.__func__
    signature = inspect.signature(load)

    @functools.wraps(load)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        mine = given.get("hf_quantizer")
        if not isinstance(mine, quantizer):
            return load(*args, **kwargs)
        model, dtype = given["model"], given.get("dtype")
        rule = _dtype_rule(given.get("keep_in_fp32_regex") or given.get("keep_in_fp32_modules"))
        mapping = given.get("key_mapping")
        mine.prepare(
            model,
            None if given.get("state_dict") is not None else given["checkpoint_files"],
            dtype,
            rule,
            lambda model, names, keys: resolve(model, names, keys, mapping),
        )
        if mine.on_load is not None:
            _hook(model, mine.on_load)
        given["hf_quantizer"] = None
        try:
            done = load(*call.args, **call.kwargs)
            mine.finish()  # before accelerate meets what stays on disk
            return done
        finally:
            for hook in mine.on_load.hooks if mine.on_load is not None else ():
                hook.remove()

    PreTrainedModel._load_pretrained_model = classmethod(wrapped)


@contextmanager
def saving(
    kwargs: dict[str, Any], state: dict[str, torch.Tensor], metadata: dict[str, str]
) -> Iterator[None]:
    """save_pretrained with these tensors, and with more metadata in its file."""
    save = modeling_utils.safe_save_file
    kwargs["state_dict"] = state

    def with_metadata(tensors: Any, filename: Any, **given: Any) -> Any:
        more = (given.get("metadata") or {}) | metadata
        return save(tensors, filename, metadata=more)

    modeling_utils.safe_save_file = with_metadata
    try:
        yield
    finally:
        modeling_utils.safe_save_file = save
