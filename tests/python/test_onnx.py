"""Sparse models in ONNX: dense with zeros in plain onnxruntime, and as the op com.rarefy::SparseLinear."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rarefy

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from rarefy.integrations import onnx as integration  # noqa: E402

BATCH = ({0: torch.export.Dim.DYNAMIC},)
TYPES = {
    "f32": (torch.float32, 1),
    "f64": (torch.float64, 11),
    "f16": (torch.float16, 10),
}


def _model() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 24, bias=False), nn.ReLU(), nn.Linear(24, 9)
    )
    rarefy.sparsify(model, {"0": "block:8x4@0.5", "2": "csr@0.3", "4": "block:4x4@0.5:bf16"}, measure=False)
    return model.eval()


def _library() -> str:
    if not Path(integration.LIBRARY).with_name("librarefy_onnx.so").exists():
        pytest.skip("librarefy_onnx.so is not built (RAREFY_ONNX)")
    return integration.library()


def _session(model: Any, library: bool = True) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if library:
        options.register_custom_ops_library(_library())
    model = model if isinstance(model, bytes) else str(model)
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def test_dense_with_zeros_runs_in_plain_onnxruntime(tmp_path):
    model = _model()
    dense = copy.deepcopy(model)
    rarefy.desparsify(dense)
    x = torch.randn(3, 20)
    torch.onnx.export(dense, (x,), tmp_path / "a.onnx", dynamo=True, dynamic_shapes=BATCH, verbose=False)
    session = _session(tmp_path / "a.onnx", library=False)
    for rows in (1, 5):
        x = torch.randn(rows, 20)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x).detach())


def test_sparse_layers_are_nodes_of_the_op(tmp_path):
    model = _model()
    before = [type(m) for m in model.modules()]
    x = torch.randn(2, 3, 20)
    path = tmp_path / "a.onnx"
    integration.export(model, (x,), path, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verbose=False)
    assert [type(m) for m in model.modules()] == before
    graph = onnx.load(path)
    nodes = [node for node in graph.graph.node if node.domain == "com.rarefy"]
    assert [node.op_type for node in nodes] == ["SparseLinear"] * 3
    assert [len(node.input) for node in nodes] == [5, 4, 5]
    integration.register_schema()
    onnx.checker.check_model(graph, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(graph, strict_mode=True).graph
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.value_info}
    assert sizes[nodes[0].output[0]][1:] == [3, 48]

    session = _session(path)
    for rows in (1, 4):
        x = torch.randn(rows, 3, 20)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x).detach())
    with pytest.raises(Exception, match="SparseLinear"):
        _session(path, library=False)


def test_a_layer_with_an_activation_is_one_node(tmp_path):
    model = nn.Sequential(
        *(
            rarefy.BlockSparseLinear(20, 20, density=0.5, block_shape=(4, 4), activation=name)
            for name in (None, "relu", "gelu", "gelu_tanh", "silu")
        )
    )
    x = torch.randn(3, 20)
    integration.export(model, (x,), tmp_path / "a.onnx", verbose=False)
    nodes = onnx.load(tmp_path / "a.onnx").graph.node
    assert [node.op_type for node in nodes] == ["SparseLinear"] * 5
    session = _session(tmp_path / "a.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach())


def test_weights_that_the_op_does_not_have_are_refused_by_name(tmp_path):
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(8, 8))
    rarefy.sparsify(model, {"0": "block:4x1@0.5"}, measure=False)
    with pytest.raises(NotImplementedError, match=r"^\[onnx\.export\] .*desparsify.*; got 0\.weight$"):
        integration.export(model, (torch.randn(1, 4, 1, 1),), tmp_path / "a.onnx")
    model = nn.ModuleList([nn.MultiheadAttention(8, 2)])
    rarefy.sparsify(model, {"0.in_proj": "block:4x1@0.5"}, measure=False)
    with pytest.raises(NotImplementedError, match=r"; got 0$"):
        integration.export(model, (), tmp_path / "a.onnx")
    with pytest.raises(TypeError, match=r"model must be an nn\.Module; got str"):
        integration.export("model", (), tmp_path / "a.onnx")


# The op itself ----------------------------------------------------------------------------------------


def _graph(x: str = "f32", values: str | None = None, bias: bool = True, **attributes: Any) -> bytes:
    """A model of one node whose weights are inputs, too."""
    helper, kind, stored = onnx.helper, TYPES[x][1], TYPES[values or x][1]
    inputs = {"x": kind, "values": stored, "crow": 6, "col": 6} | ({"bias": kind} if bias else {})
    node = helper.make_node("SparseLinear", list(inputs), ["y"], domain="com.rarefy", **attributes)
    infos = [helper.make_tensor_value_info(name, type_, None) for name, type_ in inputs.items()]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", kind, None)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.rarefy", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def _feeds(layer: nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    weight = layer.weight
    found = {"x": x, "values": weight.values, "crow": weight.crow_indices, "col": weight.col_indices}
    found |= {} if layer.bias is None else {"bias": layer.bias}
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def _layer(n: int, k: int, spec: str, dtype: torch.dtype, bias: bool = True) -> nn.Module:
    dense = nn.Linear(k, n, bias=bias, dtype=dtype)
    return rarefy.BlockSparseLinear.from_dense(dense, spec)


ACTIVATIONS = {
    "none": lambda y: y,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda y: nn.functional.gelu(y, approximate="tanh"),
    "silu": nn.functional.silu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("spec", ["block:16x1@0.5", "block:4x8@0.4", "csr@0.2"])
@pytest.mark.parametrize(
    ("dtype", "stored"), [("f32", "f32"), ("f64", "f64"), ("f16", "f16"), ("f32", "f16")]
)
def test_the_op_is_the_layer(dtype, stored, spec, activation):
    of_x, of_values = TYPES[dtype][0], TYPES[stored][0]
    for shape, bias in (((3, 5, 37), True), ((37,), False), ((0, 37), True), ((300, 37), False)):
        layer = _layer(50, 37, spec, of_values, bias)
        x = torch.randn(shape, dtype=of_x)
        sizes = {"out_features": 50, "in_features": 37, "activation": activation}
        feeds = _feeds(layer, x)
        if bias:
            feeds["bias"] = layer.bias.detach().to(of_x).numpy()
        exact = nn.functional.linear(x.double(), layer.weight.to_dense().double())
        exact = exact if not bias else exact + layer.bias.double()
        wanted = ACTIVATIONS[activation](exact).detach()
        for constant in (0, 1):
            session = _session(_graph(dtype, stored, bias, constant=constant, **sizes))
            for _ in range(2):
                (y,) = session.run(None, feeds)
                assert y.shape == (*shape[:-1], 50)
                limit = {"f64": 1e-12, "f32": 1e-5, "f16": 4e-3}[dtype]
                torch.testing.assert_close(torch.from_numpy(y).double(), wanted, rtol=limit, atol=limit)


def test_weights_that_are_not_constant_are_read_in_each_run():
    sizes = {"out_features": 8, "in_features": 8}
    session = _session(_graph(bias=False, **sizes))
    for spec in ("block:4x4@0.5", "block:2x2@0.5", "csr@0.5"):
        layer, x = _layer(8, 8, spec, torch.float32, bias=False), torch.randn(2, 8)
        (y,) = session.run(None, _feeds(layer, x))
        torch.testing.assert_close(torch.from_numpy(y), layer(x).detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 9), np.float32)}, r"x must end with in_features = 8; got \(2, 9\)"),
        ({"x": np.zeros((), np.float32)}, r"x must end with in_features = 8; got \(\)"),
        ({"bias": np.zeros(7, np.float32)}, r"bias must be of shape \(8\); got \(7\)"),
        ({"values": np.zeros((2, 16), np.float32)}, r"values must be \(elements\) or .*; got \(2, 16\)"),
        ({"values": np.zeros((2, 0, 4), np.float32)}, r"blocks must have rows and columns; got \(2, 0, 4\)"),
        ({"crow": np.zeros(2, np.int32)}, r"crow_indices must be of shape \(3\); got \(2\)"),
        ({"col": np.zeros(3, np.int32)}, r"col_indices must be of shape \(2\); got \(3\)"),
        ({"col": np.array([0, 2], np.int32)}, r"col_indices.* got col_indices\[1\]=2"),
        (
            {"crow": np.array([0, 3, 2], np.int32)},
            r"a block row must have at most 2 entries; got crow_indices\[1\]",
        ),
    ],
)
def test_bad_inputs_fail_the_run_by_name(change, message):
    layer = _layer(8, 8, "block:4x4@0.5", torch.float32)
    feeds = _feeds(layer, torch.randn(2, 8))
    session = _session(_graph(out_features=8, in_features=8))
    with pytest.raises(Exception, match=rf"\[com\.rarefy::SparseLinear\] .*{message}"):
        session.run(None, feeds | change)
    (y,) = session.run(None, feeds)  # and nothing else
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "the attribute out_features must be an int; got none"),
        ({"out_features": 8}, "the attribute in_features must be an int; got none"),
        ({"out_features": -1, "in_features": 8}, "out_features must be at least 0; got -1"),
        (
            {"out_features": 8, "in_features": 8, "activation": "tanh"},
            "activation must be none, .*; got 'tanh'",
        ),
        ({"out_features": 8, "in_features": 8, "threads": -1}, "threads must be at least 0; got -1"),
        ({"out_features": 8, "in_features": 8, "threads": 9999}, "threads must be at most 1024; got 9999"),
    ],
)
def test_bad_attributes_are_refused_when_the_session_is_made(attributes, message):
    with pytest.raises(Exception, match=rf"\[com\.rarefy::SparseLinear\] {message}"):
        _session(_graph(**attributes))


def test_the_library_needs_neither_torch_nor_python(tmp_path):
    done = subprocess.run(["ldd", _library()], capture_output=True, text=True, check=True)
    assert "libtorch" not in done.stdout and "libpython" not in done.stdout
    layer, x = _layer(32, 16, "block:8x4@0.5", torch.float32), torch.randn(4, 16)
    (tmp_path / "a.onnx").write_bytes(_graph(out_features=32, in_features=16, constant=1))
    np.savez(tmp_path / "in.npz", **_feeds(layer, x))
    code = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
session = onnxruntime.InferenceSession(sys.argv[2] + "/a.onnx", options)
numpy.save(sys.argv[2] + "/y.npy", session.run(None, dict(numpy.load(sys.argv[2] + "/in.npz")))[0])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, _library(), str(tmp_path)], check=True)
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), layer(x).detach())


def test_a_library_that_was_not_built_is_named(monkeypatch):
    monkeypatch.setattr(integration, "LIBRARY", Path("/nowhere/librarefy_torch.so"))
    with pytest.raises(FileNotFoundError, match=r"/nowhere/librarefy_onnx\.so must be built: .*RAREFY_ONNX"):
        integration.library()


class _Twice(nn.Module):
    """A layer under two names, and a block with one under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = self.first
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12))] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.second(self.first(x).relu())))


def test_a_layer_under_two_names_is_a_node_at_each(tmp_path):
    model = _Twice().eval()
    rarefy.sparsify(model, "block:4x4@0.5", measure=False)
    program = integration.export(model, (torch.randn(3, 12),), tmp_path / "twice.onnx")
    nodes = [node for node in program.model_proto.graph.node if node.op_type == integration.NAME]
    assert len(nodes) == 4 and nodes[0].input[1] == nodes[1].input[1] != nodes[2].input[1]
