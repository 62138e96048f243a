"""transformers: sparse models through save_pretrained and from_pretrained, also sparsified while they load.

Importing this module registers the method "rarefy" with transformers. `save_pretrained` then writes the
tensors of bsr-v1 and says in config.json's `quantization_config` which weights are sparse; `from_pretrained`
of that folder gives the same model. With a RarefyConfig of patterns it makes a dense folder sparse, a weight
at a time. docs/transformers.md is the user's page.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checks import fail
from .needs import need

need("transformers", "4.50")  # before names that earlier versions do not have

import transformers
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..backend import __version__
from ..fusing import fuse as fuse_networks
from ..layers import find_layers
from ..patcher import BlockSparseModelPatcher
from ..serialization import FORMAT, METHOD, entries_of, header
from ..sparse_weight import SparseWeight, reserved_endings
from ..spec import Spec
from .loading import Pending, headers
from .on_the_fly import SparsifyOnLoad

if hasattr(transformers, "core_model_loading"):
    from . import transformers_5 as library
else:
    from . import transformers_4 as library

# What config.json names as the file of the weights, and as their dtype for versions before 4.56, so that a
# transformers without this module stops there: it would else load the layers as dense ones and draw their
# weights at random.
STOP = "sparse weights need `pip install rarefy` and `import rarefy.integrations.transformers` first"


@register_quantization_config(METHOD)
class RarefyConfig(QuantizationConfigMixin):
    r"""What from_pretrained makes sparse, or what a saved folder says of its sparse weights.

    AutoModel.from_pretrained(dense, quantization_config=RarefyConfig({r".*\.dense": "block:16x16@0.5"}))

    Args:
        patterns: regular expressions for whole names of layers, and specs, as rarefy.sparsify takes them; or
            a spec for all layers.
        fuse: whether feed-forward networks run as one op where nothing is recorded; see rarefy.fuse.
        tokens: rows of x that "auto@…" predicts times for.

    The other arguments are those of a config.json, which save_pretrained writes.

    Raises:
        ValueError: a pattern or a spec that cannot be read; neither patterns nor modules; a newer format.
        TypeError: arguments of the wrong kind.
    """

    def __init__(
        self,
        patterns: Mapping[str, Any] | str | Spec | None = None,
        *,
        fuse: bool = True,
        tokens: int = 512,
        modules: Mapping[str, Any] | None = None,
        ties: Mapping[str, str] | None = None,
        format: str = FORMAT,  # noqa: A002 (its name in the file)
        version: str = __version__,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        op = "RarefyConfig"
        if format != FORMAT or unknown:
            got = f"format {format!r}" + "".join(f", {key}" for key in sorted(unknown))
            fail(op, f'quantization_config must be of format "{FORMAT}", as Rarefy {__version__} writes', got)
        if (patterns is None) == (modules is None):
            got = "neither" if patterns is None else "both"
            fail(op, "there must be patterns of layers to sparsify, or the modules of a saved model", got)
        for name, value in (("modules", modules), ("ties", ties)):
            if value is not None and not isinstance(value, Mapping):
                fail(op, f"{name} must be a mapping", type(value).__name__, TypeError)
        if patterns is not None:
            BlockSparseModelPatcher.of(op, patterns)
        self.quant_method, self.format, self.version = quant_method, format, version
        self.fuse, self.tokens = bool(fuse), tokens
        self.patterns = dict(patterns) if isinstance(patterns, Mapping) else patterns
        self.modules = None if modules is None else dict(modules)
        self.ties = dict(ties or {})

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        base = {"quant_method": METHOD, "format": self.format, "version": self.version, "fuse": self.fuse}
        if self.modules is not None:
            return base | {"modules": self.modules} | ({"ties": self.ties} if self.ties else {})
        found = self.patterns
        if isinstance(found, Mapping):
            texts = {name: str(s) if isinstance(s, Spec) else s for name, s in found.items()}
        else:
            texts = str(found)
        return base | {"patterns": texts, "tokens": self.tokens}


@register_quantizer(METHOD)
class RarefyQuantizer(HfQuantizer):
    """What from_pretrained calls on its way: layers that wait for their weights, or weights made sparse."""

    requires_calibration = False

    def __init__(self, quantization_config: RarefyConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # A saved folder, or a dense one; whoever calls says so, and the config must agree.
        saved = quantization_config.modules is not None
        if saved != self.pre_quantized:
            requirement = "quantization_config of config.json must have modules, of an argument patterns"
            fail("from_pretrained", requirement, "modules" if saved else "patterns")
        self.pending: dict[str, Pending] = {}
        self.pieces: set[str] = set()
        self.dtypes: dict[str, torch.dtype] = {}  # of the model's dense tensors
        self.on_load: SparsifyOnLoad | None = None

    # transformers' switches: a sparse model trains, saves and compiles as any other.
    is_trainable = is_qat_trainable = is_compileable = True

    # What 4 wants defined.
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None: ...

    _process_model_after_weight_loading = _process_model_before_weight_loading

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Yes."""
        return True

    # -- before the weights come ----------------------------------------------------------------

    def preprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """As transformers 5 calls it, which says here what the files are; 4 does later: transformers_4.py."""
        if "checkpoint_files" in kwargs:
            self.prepare(
                model,
                kwargs["checkpoint_files"],
                kwargs.get("dtype"),
                library.dtype_rule(model),
                lambda model, names, _: library.resolve(model, names),
            )

    def prepare(
        self,
        model: PreTrainedModel,
        files: list[str] | None,
        dtype: torch.dtype | None,
        rule: Callable[[str, torch.dtype], torch.dtype],
        resolve: Callable[[nn.Module, Iterable[str], Iterable[str]], dict[str, str]],
    ) -> None:
        """Puts layers that wait for their pieces into the skeleton, or notes which weights become sparse.

        Args:
            model: the skeleton, on the meta device.
            files: of the checkpoint; None for a state_dict.
            dtype: that of the model, None for the default.
            rule: what a tensor of a name and a dtype is cast to.
            resolve: the model's names, by those of weights in files that have tensors of the last names.
        """
        config = self.quantization_config
        if not self.pre_quantized:
            self.on_load = SparsifyOnLoad(model, config.patterns, config.tokens, mapped=bool(files))
            return
        found = headers(files)
        dtype = dtype or torch.get_default_dtype()
        floats = ((name, t) for name, t in model.state_dict().items() if t.is_floating_point())
        self.dtypes = {name: rule(name, t.dtype) for name, t in floats}
        names = resolve(model, [*config.modules, *config.ties], found)
        if not any(name in names for name in config.modules):
            first = next(iter(config.modules), "nothing")
            requirement = f"config.json must name sparse weights of layers that {type(model).__name__} has"
            fail("from_pretrained", requirement, first)
        layers = {name: layer for layer in find_layers(model, rewritten=True) for name in layer.weight_names}
        for name, entry in config.modules.items():
            if name in names:  # others are those of a head that this model is without
                wanted = rule(names[name], dtype)
                weight = Pending(names[name], name, entry, found, wanted, widens=wanted != dtype)
                self.pending[name] = weight.put(layers, names[name])
                self.pieces |= {f"{weight.name}.{piece}" for piece in weight.pieces}
        for name, target in config.ties.items():
            if name in names and target in self.pending:
                self.pending[target].put(layers, names[name])
        # Ties that transformers 5 would look up as Parameters: these are tied by being one module.
        sparse = {n for w in self.pending.values() for place in w.places for n in place.weight_names}
        ties = getattr(model, "all_tied_weights_keys", {})
        for alias in [alias for alias, target in ties.items() if {alias, target} & sparse]:
            del ties[alias]

    # -- while they come ------------------------------------------------------------------------

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """None for the pieces of sparse weights, which keep the file's dtype."""
        names = getattr(converter, "_original_target_patterns", None) or converter.target_patterns
        return (
            None
            if any(name in self.pieces for name in names)
            else super().get_new_dtype(converter, param, dtype)
        )

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Whether this tensor of a dense folder becomes sparse."""
        return self.on_load is not None and self.on_load.wants(param_name)

    def get_quantize_ops(self) -> Any:
        """What makes a tensor sparse."""
        return library.QuantizeOps(self.on_load) if self.on_load is not None else None

    # -- after they came ------------------------------------------------------------------------

    def all_pieces(self) -> set[str]:
        """The pieces of sparse weights under all names that their layers have in the model."""
        places = ((weight.pieces, place) for weight in self.pending.values() for place in weight.places)
        return {f"{n}.{piece}" for pieces, place in places for n in place.weight_names for piece in pieces}

    def finish(self) -> None:
        """Makes the weights whose pieces did not come, since they stay on disk."""
        for weight in self.pending.values():
            weight.finish()

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> None:
        """Checks that all came, and that it came as it should."""
        self.finish()
        # Older transformers leave a renamed tensor of a quantized model in the file's dtype.
        state = model.state_dict(keep_vars=True)
        for name in self.dtypes.keys() & state.keys():
            if state[name].dtype != self.dtypes[name]:
                state[name].data = state[name].data.to(self.dtypes[name])
        fuse_networks(model, self.quantization_config.fuse)


def _leave(model: PreTrainedModel) -> None:
    """Leaves a plain model: what it is sparse in, its layers say, and each save asks them anew."""
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        for holder in (part, part.config):
            for key in _TRACES & vars(holder).keys():
                delattr(holder, key)
        part.is_quantized = False


_TRACES = {"hf_quantizer", "quantization_method", "quantization_config", "_pre_quantization_dtype"}


# Saving --------------------------------------------------------------------------------------------


class _Saving(RarefyQuantizer):
    """What save_pretrained asks for the tensors and what the files say of them."""

    def __init__(
        self, config: RarefyConfig, state: dict[str, torch.Tensor], metadata: dict[str, str]
    ) -> None:
        super().__init__(config, pre_quantized=True)
        self._found_state, self._found_metadata = state, metadata

    def get_state_dict_and_metadata(
        self, model: nn.Module, *_: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return dict(self._found_state), dict(self._found_metadata)


def save_sparse(save: Any, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PreTrainedModel.save_pretrained of a model with sparse layers; `save` is the original."""
    kwargs = dict(kwargs)
    given = kwargs.pop("state_dict", None)
    modules, ties = entries_of("save_pretrained", model)
    state = dict(model.state_dict() if given is None else given)
    for alias, name in ties.items():
        for piece in model.get_submodule(name).pieces:
            state.pop(f"{alias}.{piece}", None)
    names = {name: _name_in_file(model, name, state) for name in (*modules, *ties)}
    modules = {names[name]: entry for name, entry in modules.items()}
    ties = {names[alias]: names[name] for alias, name in ties.items()}
    # A shard has a part of the pieces, so what it says of them would not be true: config.json says it.
    size = kwargs.get("max_shard_size", inspect.signature(save).parameters["max_shard_size"].default)
    metadata = {} if _is_sharded(state, size) else header(modules)
    config = RarefyConfig(modules=modules, ties=ties)
    quantizer = _Saving(config, state, metadata)
    with _attached(model, config, quantizer), library.saving(kwargs, state, metadata):
        return save(model, *args, **kwargs)


def _is_sharded(state: Mapping[str, torch.Tensor], size: int | str) -> bool:
    from huggingface_hub import split_torch_state_dict_into_shards

    return split_torch_state_dict_into_shards(dict(state), max_shard_size=size).is_sharded


def _name_in_file(model: PreTrainedModel, name: str, state: Mapping[str, torch.Tensor]) -> str:
    """The name that transformers gives a weight in its files."""
    piece = next((p for p in state if p.startswith(f"{name}.")), f"{name}.values")
    return library.key_in_file(model, piece).removesuffix(piece.removeprefix(name))


@contextlib.contextmanager
def _attached(model: PreTrainedModel, config: RarefyConfig, quantizer: RarefyQuantizer) -> Iterator[None]:
    """The model as transformers wants one with a quantizer, for as long as it is saved."""
    before = dict(vars(model)), dict(vars(model.config))
    model.hf_quantizer, model.config.quantization_config = quantizer, config
    computes = _first_dtype(model)
    dtype = str(computes).removeprefix("torch.")
    config._root = {"transformers_weights": STOP, "torch_dtype": STOP, "dtype": dtype}
    try:
        yield
    finally:
        for target, old, key in (
            (model, before[0], "hf_quantizer"),
            (model.config, before[1], "quantization_config"),
        ):
            if key in old:
                setattr(target, key, old[key])
            else:
                delattr(target, key)


def _first_dtype(model: nn.Module) -> torch.dtype:
    """The model's dtype as transformers sees it, that of its first tensor; of a sparse weight, that of x."""
    for module in model.modules():
        if isinstance(module, SparseWeight):
            return module.x_dtype or module.dtype
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.get_default_dtype()


# What transformers has no hook for -------------------------------------------------------------------


def _stop_in_config(to_json_file: Any) -> Any:
    @functools.wraps(to_json_file)
    def wrapped(self: PretrainedConfig, path: Any, *args: Any, **kwargs: Any) -> None:
        to_json_file(self, path, *args, **kwargs)
        root = getattr(getattr(self, "quantization_config", None), "_root", None)
        if root is not None:
            data = json.loads(Path(path).read_text("utf-8")) | root
            Path(path).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")

    return wrapped


def _go_in_config(read: Any) -> Any:
    @functools.wraps(read)
    def wrapped(cls: type, path: Any) -> dict[str, Any]:
        found = read(cls, path)
        if found.get("transformers_weights") == STOP:
            del found["transformers_weights"]
        if found.get("torch_dtype") == STOP:
            found["torch_dtype"] = found.get("dtype")
        return found

    return classmethod(wrapped)


def _no_pieces_left(from_pretrained: Any) -> Any:
    """from_pretrained that does not return a model whose sparse weights were left in the file."""

    @functools.wraps(from_pretrained)
    def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = from_pretrained(cls, *args, output_loading_info=True, **kwargs)
        if isinstance(getattr(model.config, "quantization_config", None), RarefyConfig):
            _leave(model)
        info = info or {}  # none from files of other frameworks
        missing = info.get("missing_keys", ())
        for key in sorted(info.get("unexpected_keys", ())):
            name = key.rpartition(".")[0]
            if key.endswith(reserved_endings()) and any(_same_but_prefix(name, other) for other in missing):
                requirement = f"quantization_config of config.json must describe the sparse weight {name}"
                fail("from_pretrained", requirement, f"no entry, but {key} in the file")
        return (model, info) if wants_info else model

    return classmethod(wrapped)


def _same_but_prefix(a: str, b: str) -> bool:
    return f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")


library.install(RarefyQuantizer)
PretrainedConfig.to_json_file = _stop_in_config(PretrainedConfig.to_json_file)
PretrainedConfig._dict_from_json_file = _go_in_config(PretrainedConfig._dict_from_json_file.__func__)
PreTrainedModel.from_pretrained = _no_pieces_left(PreTrainedModel.from_pretrained.__func__)
