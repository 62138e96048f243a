"""vLLM: bsr-v1 linear layers of a folder that save_pretrained wrote. docs/vllm.md.

The package names `register` as an entry point of the group vllm.general_plugins: each process of vLLM calls
it. A folder whose quant_method is "rarefy" then finds RarefyVllmConfig. Written against vLLM's interface for
quantization methods and tested against stubs of it, without a server.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..checks import fail
from ..serialization import FORMAT, METHOD, build, format_of
from ..sparse_weight import SparseWeight

OP = "vllm"
_PARTS = {"q": 0, "k": 1, "v": 2, None: 0}  # names that vLLM has for the parts of a fused layer


@functools.cache
def register() -> type:
    """Registers the method with vLLM; as often as one likes. Returns the class of its configs."""
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class RarefyVllmConfig(QuantizationConfig):
        """What config.json says: which weights are sparse, and in which format."""

        def __init__(self, modules: Mapping[str, Any]) -> None:
            super().__init__()
            self.modules = dict(modules)

        def get_name(self) -> str:
            return METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16, torch.float16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 80  # Ampere: what the CUDA kernels are built for

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []  # config.json itself

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> RarefyVllmConfig:
            if config.get("format") != FORMAT or not isinstance(config.get("modules"), Mapping):
                got = f"format {config.get('format')!r}"
                fail(OP, f'quantization_config must be of format "{FORMAT}", with modules', got)
            if config.get("ties"):
                fail(OP, "sparse weights must not be tied", next(iter(config["ties"])), NotImplementedError)
            return cls(config["modules"])

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None
            path, _, last = prefix.rpartition(".")
            parts = self.packed_modules_mapping.get(last, [last])
            names = [f"{path}.{part}.weight".lstrip(".") for part in parts]
            sparse = [name for name in names if name in self.modules]
            if not sparse:
                return UnquantizedLinearMethod()
            if sparse != names:
                requirement = f"all parts of {prefix}, which vLLM multiplies as one, must be sparse, or none"
                fail(OP, requirement, f"{', '.join(sparse)} alone", NotImplementedError)
            return method({name: self.modules[name] for name in names})

    class RarefyLinearMethod(SparseParts, LinearMethodBase):
        """SparseParts as vLLM knows methods of layers."""

    def method(entries: Mapping[str, Any]) -> Any:
        return RarefyLinearMethod(entries)

    register_quantization_config(METHOD)(RarefyVllmConfig)
    return RarefyVllmConfig


class SparseParts:
    """The weight of one layer of vLLM, in one part or in those that vLLM has fused (q, k and v)."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = {name: format_of(OP, name, entry) for name, entry in entries.items()}
        self.found: dict[str, torch.Tensor] = {}
        self.dtype = torch.get_default_dtype()

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Gives the layer places for the tensors of a file, `weight.values` and so on; they are empty."""
        if (input_size_per_partition, sum(output_partition_sizes)) != (input_size, output_size):
            got = f"{sum(output_partition_sizes)}x{input_size_per_partition} of {output_size}x{input_size}"
            fail(OP, "tensor_parallel_size must be 1: blocks are not divided", got, NotImplementedError)
        for (name, (_, entry)), rows in zip(self.entries.items(), output_partition_sizes, strict=True):
            if entry.get("shape") != [rows, input_size]:
                fail(OP, f"{name} must be of shape {[rows, input_size]}", entry.get("shape"))
        self.dtype = params_dtype
        places = nn.Module()
        for piece in dict.fromkeys(piece for kind, _ in self.entries.values() for piece in kind.pieces):
            place = nn.Parameter(torch.empty(0), requires_grad=False)
            place.weight_loader = functools.partial(self._load, piece)
            places.register_parameter(piece, place)
        layer.weight = places

    def _load(
        self, piece: str, place: nn.Parameter, tensor: torch.Tensor, part: str | int | None = None
    ) -> None:
        """What vLLM calls for each tensor of a file; `part` of a fused layer."""
        name = list(self.entries)[_PARTS.get(part, part)]
        self.found[f"{name}.{piece}"] = tensor.detach().to(place.device)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Makes the weights of their tensors, with all checks of a file."""
        weights: list[SparseWeight] = []
        for name, (kind, entry) in self.entries.items():
            weight = build(OP, name, self.found, kind, entry)
            if (weight.x_dtype or weight.dtype) != self.dtype:
                weight.to(self.dtype)
            weights.append(weight.requires_grad_(False))
        layer.weight = nn.ModuleList(weights)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product of x (…, K) and the parts, one behind the other: (…, N)."""
        rows = [weight.shape[0] for weight in layer.weight]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        parts = [functional.linear(x, weight, b) for weight, b in zip(layer.weight, biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
