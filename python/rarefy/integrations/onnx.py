"""ONNX: sparse models with the op com.rarefy::SparseLinear, and its runtime in onnxruntime. docs/onnx.md."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._load import LIBRARY
from ..activations import NONE
from ..attention import SparseMultiheadAttention
from ..checks import fail
from ..modules import BlockSparseLinear
from ..pattern_weight import PatternWeight
from ..sparse_weight import SparseWeight
from .needs import need

need("onnx", "1.16")

import onnx

DOMAIN, NAME, VERSION = "com.rarefy", "SparseLinear", 1
_TYPES = ("float", "double", "float16", "bfloat16")


class _Exported(nn.Module):
    """A sparse layer while it is exported: the op's inputs, and the node that they become."""

    def __init__(self, layer: BlockSparseLinear) -> None:
        super().__init__()
        weight = layer.weight
        self.attributes = {
            "out_features": layer.out_features,
            "in_features": layer.in_features,
            "activation": layer.activation or NONE,
            "constant": 1,
        }
        self.values = nn.Parameter(weight.values.detach(), requires_grad=False)
        self.register_buffer("crow_indices", weight.crow_indices.to(torch.int32))
        self.register_buffer("col_indices", weight.col_indices.to(torch.int32))
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = [x, self.values, self.crow_indices, self.col_indices]
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{NAME}",
            inputs if self.bias is None else [*inputs, self.bias],
            self.attributes,
            dtype=x.dtype,
            shape=(*x.shape[:-1], self.attributes["out_features"]),
            version=VERSION,
        )


def export(
    model: nn.Module, args: tuple[Any, ...], path: str | os.PathLike[str], **options: Any
) -> torch.onnx.ONNXProgram:
    """torch.onnx.export of a model with sparse layers, each of which is a node com.rarefy::SparseLinear.

    Args:
        model: it stays as it is. Sparse linear layers in blocks or elements of floats are nodes of the op;
            others are refused: `rarefy.desparsify` makes them dense.
        args: as torch.onnx.export has them.
        path: where to.
        **options: of torch.onnx.export, such as `dynamic_shapes`.

    Raises:
        NotImplementedError: a sparse weight that the op does not have, by name.
        TypeError: `model` is no module.
    """
    op = "onnx.export"
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
    twin = copy.deepcopy(model)
    named = list(twin.named_modules(remove_duplicate=False))  # a layer may be used under several names
    layers = {name: m for name, m in named if type(m) is BlockSparseLinear}
    known = {id(layer.weight): layer.weight for layer in layers.values()}
    for name, module in named:
        weight = isinstance(module, SparseWeight)
        fits = isinstance(module, PatternWeight) and module.dtype.is_floating_point and id(module) in known
        if isinstance(module, SparseMultiheadAttention) or (weight and not fits):
            requirement = "a sparse weight must be of floats in blocks or elements, of a linear layer"
            fail(op, f"{requirement} (rarefy.desparsify makes others dense)", name, NotImplementedError)
    if "" in layers:
        twin = _Exported(twin)
    exported = {id(layer): _Exported(layer) for layer in layers.values()}
    for name, layer in layers.items():
        if name:
            parent, _, key = name.rpartition(".")
            setattr(twin.get_submodule(parent), key, exported[id(layer)])
    return torch.onnx.export(twin, args, os.fspath(path), dynamo=True, **options)


def library() -> str:
    """The path that SessionOptions.register_custom_ops_library takes.

    Raises FileNotFoundError where the optional library was not built.
    """
    path = Path(LIBRARY).with_name("librarefy_onnx.so")
    if not path.exists():
        advice = "built: cmake -DRAREFY_ONNX=ON in a source tree (make setup does)"
        fail("onnx.library", f"{path} must be {advice}", "no such file", FileNotFoundError)
    return str(path)


@functools.cache
def register_schema() -> onnx.defs.OpSchema:
    """Tells onnx the op's schema, for onnx.checker and shape inference; returns it."""
    schema = onnx.defs.OpSchema
    attribute, kinds = schema.Attribute, onnx.defs.OpSchema.AttrType
    floats = [f"tensor({name})" for name in _TYPES]
    found = schema(
        NAME,
        DOMAIN,
        VERSION,
        doc="y = activation(x Wᵀ + bias), W of which blocks or elements are stored.",
        inputs=[
            schema.FormalParameter("x", "T", description="(…, in_features)"),
            schema.FormalParameter("values", "V", description="(blocks, rows, columns), or (elements)"),
            schema.FormalParameter("crow_indices", "tensor(int32)", description="(block rows + 1)"),
            schema.FormalParameter("col_indices", "tensor(int32)", description="block columns, by row"),
            schema.FormalParameter(
                "bias", "T", param_option=schema.FormalParameterOption.Optional, description="(out_features)"
            ),
        ],
        outputs=[schema.FormalParameter("y", "T", description="(…, out_features)")],
        type_constraints=[
            ("T", floats, "of x, bias and y"),
            ("V", floats, "T, or bfloat16 or float16 where T is float"),
        ],
        attributes=[
            attribute("out_features", kinds.INT, "rows of W", required=True),
            attribute("in_features", kinds.INT, "columns of W", required=True),
            attribute("activation", onnx.helper.make_attribute("activation", "none"), _ACTIVATIONS),
            attribute("constant", onnx.helper.make_attribute("constant", 0), _CONSTANT),
            attribute("threads", onnx.helper.make_attribute("threads", 0), "0: one for each core"),
        ],
    )
    found.set_type_and_shape_inference_function(_infer)
    onnx.defs.register_schema(found)
    return found


_ACTIVATIONS = "none, relu, gelu, gelu_tanh or silu"
_CONSTANT = "1: values and indices are the same in all runs, and are checked and prepared in the first"


def _infer(context: Any) -> None:
    x = context.get_input_type(0)
    y = onnx.TypeProto()
    y.CopyFrom(x)
    if x.tensor_type.HasField("shape") and x.tensor_type.shape.dim:
        y.tensor_type.shape.dim[-1].Clear()
        y.tensor_type.shape.dim[-1].dim_value = context.get_attribute("out_features").i
    context.set_output_type(0, y)
