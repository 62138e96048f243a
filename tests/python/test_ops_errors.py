"""What the ops refuse, by name: every argument, from every entry, with and without gradients."""

import numpy as np
import pytest
import torch

import rarefy
from helpers import random_bsr
from rarefy import ops


def _int32(*items):
    return torch.tensor(items, dtype=torch.int32)


GOOD = {
    "x": torch.ones(2, 8),
    "values": torch.ones(3, 4, 4),
    "plan": ops.bsr_plan(_int32(0, 2, 3), _int32(0, 1, 1), 8, 8, 4, 4),
    "bias": torch.ones(8),
    "out_features": 8,
    "in_features": 8,
}
# What is wrong, the changed arguments, the error and what its message must say.
BAD = {
    "values 2-d": ({"values": torch.ones(3, 16)}, ValueError, r"values.*\(nnzb, .*; got shape \(3, 16\)"),
    "values 4-d": ({"values": torch.ones(3, 4, 4, 1)}, ValueError, r"values.*; got shape \(3, 4, 4, 1\)"),
    "values count": ({"values": torch.ones(2, 4, 4)}, ValueError, "plan must have 20 elements.*; got 23"),
    "values block of 0": ({"values": torch.ones(3, 0, 4)}, ValueError, "block_shape must be at least 1"),
    "values strided": ({"values": torch.ones(3, 4, 8)[..., ::2]}, ValueError, "values must be contiguous"),
    "values float64": (
        {"values": torch.ones(3, 4, 4).double()},
        TypeError,
        "values must have the dtype of x, float32, or be bfloat16 or float16; got float64",
    ),
    "values narrower than float64": (
        {"x": torch.ones(2, 8).double(), "values": torch.ones(3, 4, 4).half()},
        TypeError,
        "values must have the dtype of x, float64; got float16",
    ),
    "values int8": ({"values": torch.ones(3, 4, 4).char()}, TypeError, "values must be float.*; got int8"),
    "values None": ({"values": None}, TypeError, "values must be a tensor; got None"),
    "x columns": ({"x": torch.ones(2, 7)}, ValueError, r"x's last dim.*in_features=8; got shape \(2, 7\)"),
    "x 0-d": ({"x": torch.ones(())}, ValueError, r"x's last dimension.*got shape \(\)"),
    "x int64": ({"x": torch.ones(2, 8).long()}, TypeError, "x must be float64.*; got int64"),
    "x bfloat16": ({"x": torch.ones(2, 8).bfloat16()}, TypeError, "values.*bfloat16.*; got float32"),
    "x complex": ({"x": torch.ones(2, 8, dtype=torch.complex64)}, TypeError, "x must be float64.*; got"),
    "x None": ({"x": None}, TypeError, "x must be a tensor; got None"),
    "bias size": ({"bias": torch.ones(7)}, ValueError, r"bias.*out_features=8.*got shape \(7,\)"),
    "bias 2-d": ({"bias": torch.ones(1, 8)}, ValueError, r"bias.*got shape \(1, 8\)"),
    "bias dtype": ({"bias": torch.ones(8).half()}, TypeError, "bias.*float32; got float16"),
    "bias strided": ({"bias": torch.ones(16)[::2]}, ValueError, "bias must be contiguous"),
    "out_features": ({"out_features": 9, "bias": None}, ValueError, "plan must have 24 elements.*; got 23"),
    "out_features in the edge": (
        {"out_features": 7, "bias": None},
        ValueError,
        r"plan must be made by bsr_plan for shape \(7, 8\).*; got a plan for shape \(8, 8\)",
    ),
    "out_features negative": ({"out_features": -8, "bias": None}, ValueError, "must not be negative"),
    "in_features": ({"in_features": 9, "x": torch.ones(2, 9)}, ValueError, "plan must have 24 elements"),
    "in_features small": (
        {"in_features": 4, "x": torch.ones(2, 4)},
        ValueError,
        r"stored blocks must be in \[0, 2\]; got 3",
    ),
    "out_features huge": ({"out_features": 2**40, "bias": None}, ValueError, "at most 2147483647"),
    "plan float": ({"plan": torch.ones(23)}, TypeError, "plan must be int32; got float32"),
    "plan int64": ({"plan": torch.ones(23).long()}, TypeError, r"plan must be int32; got int64; convert"),
    "plan None": ({"plan": None}, TypeError, "plan must be a tensor; got None"),
    "plan 2-d": ({"plan": _int32(*range(23))[None]}, ValueError, r"plan .* 1 dim.*got shape \(1, 23\)"),
    "plan strided": ({"plan": _int32(*range(46))[::2]}, ValueError, "plan must be contiguous"),
    "plan empty": ({"plan": _int32()}, ValueError, "plan must have 23 elements for this pattern; got 0"),
    "plan length": ({"plan": _int32(*range(22))}, ValueError, "plan must have 23 elements.*; got 22"),
    "plan of zeros": ({"plan": torch.zeros(23, dtype=torch.int32)}, ValueError, "got something else"),
    "plan averaged": (
        {"plan": (ops.bsr_plan(_int32(0, 2, 3), _int32(0, 1, 1), 8, 8, 4, 4) * 0.5).int()},
        ValueError,
        "plan must be made by bsr_plan",
    ),
    "plan of another block shape": (
        {"plan": ops.bsr_plan(_int32(0, 2, 3), _int32(0, 1, 1), 8, 8, 5, 4)},
        ValueError,
        r"block_shape \(4, 4\), 3 blocks; got a plan .* block_shape \(5, 4\), 3 blocks",
    ),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
ENTRIES = {
    "module": ops.bsr_linear,
    "packet": torch.ops.rarefy.bsr_linear,
    "overload": torch.ops.rarefy.bsr_linear.default,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name, mode, entry):
    changed, error, message = BAD[name]
    arguments = GOOD | changed
    x = arguments["x"]
    if mode == "grad" and isinstance(x, torch.Tensor) and x.is_floating_point():
        arguments["x"] = x.clone().requires_grad_()
    with MODES[mode](), pytest.raises(error, match=message) as caught:
        ENTRIES[entry](**arguments)
    assert type(caught.value) is error and str(caught.value).startswith("[bsr_linear] ")


def _plan_error(crow=(0, 2, 3), col=(0, 1, 1), size=(8, 8), block_shape=(4, 4)):
    crow, col = (t if t is None or isinstance(t, torch.Tensor) else _int32(*t) for t in (crow, col))
    return lambda: ops.bsr_plan(crow, col, *size, *block_shape)


def _grad_weight_error(dy=GOOD["x"], x=GOOD["x"], plan=GOOD["plan"], block_shape=(4, 4)):
    return lambda: ops.bsr_grad_weight(dy, x, plan, *block_shape, 8, 8)


OTHER_ERRORS = {
    "bsr_grad_input": {
        "size": (
            lambda: ops.bsr_grad_input(torch.ones(2, 7), GOOD["values"], GOOD["plan"], 8, 8),
            ValueError,
            "grad_output's last dimension must be out_features=8",
        ),
        "dtype": (
            lambda: ops.bsr_grad_input(torch.ones(2, 8).double(), GOOD["values"], GOOD["plan"], 8, 8),
            TypeError,
            "values must have the dtype of grad_output, float64; got float32",
        ),
    },
    "bsr_grad_weight": {
        "rows": (_grad_weight_error(x=torch.ones(3, 8)), ValueError, r"x must have 2 rows.*; got 3"),
        "block": (_grad_weight_error(block_shape=(0, 4)), ValueError, "block_shape must be at least 1"),
        "dtype": (
            _grad_weight_error(x=torch.ones(2, 8).half()),
            TypeError,
            "x must have the dtype of grad_output, float32; got float16",
        ),
        "block beyond the matrix": (
            _grad_weight_error(plan=_int32(*range(15)), block_shape=(2**31 - 1, 2**31 - 1)),
            ValueError,
            r"block_shape must be at most \(256, 256\)",
        ),
        "plan": (_grad_weight_error(plan=GOOD["plan"][1:]), ValueError, "plan must have 20 elements.*got 22"),
        "narrow dtype": (
            lambda: ops.bsr_grad_weight(GOOD["x"], GOOD["x"], GOOD["plan"], 4, 4, 8, 8, torch.float64),
            TypeError,
            "values must have the dtype of x, float32, or be bfloat16 or float16; got float64",
        ),
        "dtype int8": (
            lambda: ops.bsr_grad_weight(GOOD["x"], GOOD["x"], GOOD["plan"], 4, 4, 8, 8, torch.int8),
            TypeError,
            "dtype must be float64, float32, bfloat16 or float16; got int8",
        ),
        "plan float": (_grad_weight_error(plan=torch.ones(23)), TypeError, "plan must be int32; got float32"),
    },
    "bsr_plan": {
        "crow first": (_plan_error((1, 2, 3)), ValueError, r"crow_indices\[0\] must be 0; got 1"),
        "crow last": (_plan_error((0, 2, 2)), ValueError, r"crow_indices\[2\].*3; got 2"),
        "crow decreases": (_plan_error((0, 2, 1)), ValueError, r"crow_indices\[2\]=1 after"),
        "crow negative": (_plan_error((0, -1, 3)), ValueError, r"crow_indices\[1\]=-1"),
        "crow short": (_plan_error((0, 3)), ValueError, "crow_indices must have 3 elements.*got 2"),
        "crow empty": (_plan_error(()), ValueError, "crow_indices must have 3 elements.*got 0"),
        "crow 2-d": (_plan_error(_int32(0, 2, 3)[None]), ValueError, r"crow_indices.*1 dim.*\(1, 3\)"),
        "crow int64": (_plan_error(torch.tensor([0, 2, 3])), TypeError, "crow_indices.*int64; convert"),
        "crow float": (_plan_error(torch.ones(3)), TypeError, "crow_indices must be int32; got float32"),
        "crow None": (_plan_error(None), TypeError, "crow_indices must be a tensor; got None"),
        "crow strided": (_plan_error(_int32(0, 9, 2, 9, 3)[::2]), ValueError, "crow_indices.*contiguous"),
        "col out of range": (_plan_error(col=(0, 2, 1)), ValueError, r"col_indices\[1\]=2 out of range"),
        "col negative": (_plan_error(col=(-1, 1, 1)), ValueError, r"col_indices\[0\]=-1 out of range"),
        "col unsorted": (_plan_error(col=(1, 0, 1)), ValueError, r"sorted.*col_indices\[1\]=0 after 1"),
        "col duplicate": (_plan_error(col=(1, 1, 1)), ValueError, r"distinct.*col_indices\[1\]=1 after 1"),
        "col short": (_plan_error(col=(0, 1)), ValueError, r"crow_indices\[2\].* 2; got 3"),
        "col int64": (_plan_error(col=torch.tensor([0, 1, 1])), TypeError, "col_indices.*int64"),
        "col None": (_plan_error(col=None), TypeError, "col_indices must be a tensor; got None"),
        "block": (
            _plan_error((0,), (), (0, 0), (1, -1)),
            ValueError,
            r"block_shape must be at least 1 in each dimension; got \(1, -1\)",
        ),
        "size": (_plan_error(size=(-8, 8)), ValueError, r"shape must not be negative; got \(-8, 8\)"),
    },
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OTHER_ERRORS for name in OTHER_ERRORS[op]])
def test_bad_input_of_the_other_ops_is_named(op, name):
    call, error, message = OTHER_ERRORS[op][name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error and str(caught.value).startswith(f"[{op}] ")


@pytest.mark.parametrize("x", [[1.0] * 8, np.ones(8, np.float32), 1.0], ids=["list", "array", "float"])
def test_what_is_no_tensor_is_a_type_error_as_for_dense_layers(x):
    layer = rarefy.BlockSparseLinear(8, 8, density=1.0, block_shape=(4, 4))
    for call in (lambda: ops.bsr_linear(**GOOD | {"x": x}), lambda: layer(x), lambda: layer.to_dense()(x)):
        with pytest.raises(TypeError):
            call()


def test_inputs_on_two_devices_are_refused():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    arguments = GOOD | {"x": GOOD["x"].cuda()}
    with pytest.raises((TypeError, RuntimeError), match=r"\[bsr_linear\] .*(same device|build with CUDA)"):
        ops.bsr_linear(**arguments)


def test_errors_of_a_plan_speak_of_the_caller():
    with pytest.raises(ValueError, match=r"^\[mine\] crow_indices\[0\] must be 0; got 1"):
        ops.bsr_plan(_int32(1, 2, 3), _int32(0, 1, 1), 8, 8, 4, 4, caller="mine")
    with pytest.raises(TypeError, match=r"^\[mine\] crow_indices must be int32"):
        ops.bsr_plan(torch.ones(3), _int32(0, 1, 1), 8, 8, 4, 4, caller="mine")


@pytest.mark.parametrize("op", ["linear", "grad_input", "grad_weight", "backward"])
def test_freed_storage_is_an_error(op):
    bsr = random_bsr((8, 12), (4, 4), 0.5, dtype=torch.float32)
    dy, x, bias = torch.ones(5, 8), torch.ones(5, 12), torch.ones(8)
    values, plan = bsr.values.detach(), bsr.plan.clone()
    sizes = (8, 12)
    run, arguments = {
        "linear": (ops.bsr_linear, {"x": x, "values": values, "plan": plan, "bias": bias}),
        "grad_input": (ops.bsr_grad_input, {"grad_output": dy, "values": values, "plan": plan}),
        "grad_weight": (ops.bsr_grad_weight, {"grad_output": dy, "x": x, "plan": plan}),
        "backward": (
            torch.ops.rarefy._bsr_linear_backward,
            {"grad_output": dy, "x": x, "values": values, "plan": plan},
        ),
    }[op]
    rest = {"grad_weight": (4, 4, *sizes), "backward": (4, 4, *sizes, True)}.get(op, sizes)
    run(*arguments.values(), *rest)
    for name, tensor in arguments.items():
        freed = tensor.clone()
        freed.untyped_storage().resize_(0)
        call = arguments | {name: freed}
        with pytest.raises(ValueError, match=rf"{name} must point to its elements; got a null pointer"):
            run(*call.values(), *rest)


def test_gradients_want_as_many_rows_on_both_sides():
    bsr = random_bsr((8, 12), (4, 4), 0.5, dtype=torch.float32)
    x, dy = torch.ones(5, 12), torch.ones(4, 8)
    message = "x must have 4 rows, like grad_output; got 5"
    with pytest.raises(ValueError, match=rf"\[bsr_grad_weight\] {message}"):
        ops.bsr_grad_weight(dy, x, bsr.plan, 4, 4, 8, 12)
    with pytest.raises(ValueError, match=rf"\[bsr_linear_backward\] {message}"):
        torch.ops.rarefy._bsr_linear_backward(dy, x, None, bsr.plan, 4, 4, 8, 12, False)


def test_a_tensor_without_data_among_others_is_refused():
    """Not answered by what traces a graph, with memory that nobody wrote."""
    bsr = random_bsr((8, 12), (4, 4), 0.5, dtype=torch.float32)
    x, values, plan = torch.ones(5, 12), bsr.values.detach(), bsr.plan.clone()
    arguments = [x, values, plan, torch.ones(8)]
    for at in (1, 2, 3):
        mixed = [t.to("meta") if i == at else t for i, t in enumerate(arguments)]
        with pytest.raises(
            TypeError, match=r"\[bsr_linear\] tensors must be on one device; got cpu and meta"
        ):
            ops.bsr_linear(*mixed, 8, 12)
    assert ops.bsr_linear(*(t.to("meta") for t in arguments), 8, 12).shape == (5, 8)


def test_values_of_blocks_are_no_row_of_elements():
    bsr = random_bsr((8, 12), (4, 4), 0.5, dtype=torch.float32)
    row_plan = rarefy.BsrPattern(bsr.crow, bsr.col, shape=(8, 12), block_shape=(4, 4)).row_plan
    with pytest.raises(
        ValueError, match=r"\[sparse_transpose\] values of blocks must have 3 dimensions; got 1"
    ):
        torch.ops.rarefy._transposed(bsr.values.detach().flatten(), row_plan, [8, 12, 4, 4])
