"""Products with a sparse operand: dense × sparse, sparse × dense, sampled, sparse × sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _load, ops
from .._torch_private import eager, eager_call, in_autocast, unrecorded
from ..activations import NONE, activate, check_activation
from ..checks import fail
from ..op_rules import meets_nothing, register_fake
from ..pattern import BsrPattern, row_plan_size
from ..sparse_weight import SparseWeight
from . import expanded, integers
from .arrays import CHECKS, FLOATS, INTEGERS, as_tensor, refuse_check
from .blocks import to_csr
from .kinds import as_matrix
from .matrix import SparseMatrix, rows_product
from .recent import find

_integers, _integer_sampled, _sparse_product, _sampled_product, product_in_place = map(
    _load.op,
    ("_integer_linear", "_integer_sampled", "_sparse_product", "_sampled_product", "_product_in_place"),
)
_arrays_product = eager_call(_load.op("_arrays_product"))
_LEAST_DOUBLES = 4  # columns that spmm multiplies as they lie
# In float32, of single elements: up to so many columns, up to so many elements a row; beyond, packing b
# first is faster (cpu/single_weights.md). Of CSR also from 1 / density on, as short rows of wide matrices
# leave tiles of packed b empty; and few columns of small matrices.
_IN_PLACE = ((3, 64), (8, None), (15, 128), (32, 224), (128, 96), (None, 64))
_SPARSE, _SPARSE_FOR_SOME, _SMALL = 64, 16, 1 << 16
# Of blocks of 4 rows and more: 1.0–1.5 times as fast, beyond .7–1.
_BY_ROWS = range(16, 129)


def sparse_dense(
    x: Any,
    weight: Any,
    bias: Tensor | None = None,
    *,
    sparse_lhs: bool = False,
    activation: str | None = None,
    check: str = "once",
) -> Tensor:
    """Return ``x @ W.T + bias``, or its activation, of which one matrix is sparse: TVM's op, with gradients.

    Args:
        x: (…, K), any leading dimensions and strides, of the dtype of data; or float32 and 16-bit data, on
            the CPU. With `sparse_lhs` the dense weight, (N, K).
        weight: W, (N, K), sparse: `(data, indices, indptr)` with exactly scipy's arrays (CSR if data has 1
            dimension, BSR if it has 3), a SparseMatrix, a SparseWeight, or a matrix of scipy.sparse or torch
            (CSR and BSR as they are, other formats converted). A SparseMatrix is validated once; the others
            in each call. With `sparse_lhs` the sparse left side S, (M, K).
        bias: (N,) of x's dtype; with `sparse_lhs` too, whose columns are N.
        sparse_lhs: the sparse matrix is on the left: ``S @ x.T``, (M, N).
        activation: "relu", "gelu", "gelu_tanh", "silu" or None; integers know "relu" alone.
        check: "once", "always" or "trusted" for arrays; see SparseMatrix.

    Returns:
        (…, N), or (M, N) with `sparse_lhs`, of x's dtype. Floats are summed in float32 (float64 in float64).
        Integers are exact modulo 2 to their bits, as in NumPy.

    Raises:
        ValueError: an index, a size or a shape is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """
    op = "sparse_dense"
    if check not in CHECKS:
        refuse_check(op, check)
    if type(weight) is SparseMatrix and activation is None and not sparse_lhs:
        try:
            y = weight.at_once(x, bias)
        except (TypeError, ValueError):  # of an op behind: the long way has this one's names for it
            y = None
        if y is not None and (bias is None or not bias.is_meta):
            return y
    x = as_tensor(op, "x", x)
    if activation is None and not sparse_lhs:
        y = _with_arrays(x, weight, bias, check)
        if y is not None:
            return y
    if x.ndim == 0 or (sparse_lhs and x.ndim != 2):
        fail(op, f"x must have {'2' if sparse_lhs else 'at least 1'} dimensions", x.ndim)
    name = check_activation(op, activation)
    if not sparse_lhs and isinstance(weight, SparseWeight):  # of any format, and it keeps what kernels derive
        return activate(weight.linear(x, bias), name)
    if name not in (NONE, "relu") and not x.is_floating_point():
        fail(op, "activation of integers must be none or relu", name)
    matrix = as_matrix(op, "weight", weight, columns=x.shape[-1], check=check)
    if matrix.shape[1] != x.shape[-1]:
        fail(op, f"x must have {matrix.shape[1]} columns, as the sparse matrix has", x.shape[-1])
    if bias is not None:
        bias = checked_bias(op, bias, x, len(x) if sparse_lhs else matrix.shape[0])
    if not sparse_lhs:
        return _linear(op, matrix, x, bias, name)
    y = _linear(op, matrix, x, None, NONE).t()
    return activate(y if bias is None else y + bias, name)


def _with_arrays(x: Tensor, weight: Any, bias: Any, check: str) -> Tensor | None:
    """The product with arrays in scipy's order of an eager call: read, checked and used by one op.

    Or compared with those of the calls before, if they come again (recent.py).
    None where they are of another kind, not valid, not sorted and new, or someone wants gradients: the long
    way has an answer to each, and what it makes of the arrays first takes as long as a small product.
    """
    if type(weight) is tuple:
        arrays = weight
    elif getattr(weight, "format", None) in ("csr", "bsr") and hasattr(weight, "tocsr"):
        if x.ndim == 0 or tuple(weight.shape)[1:] != tuple(x.shape[-1:]):
            return None
        arrays = weight.data, weight.indices, weight.indptr
    else:
        return None
    if len(arrays) != 3:
        return None
    names = "data", "indices", "indptr"
    tensors = [as_tensor("sparse_dense", name, array) for name, array in zip(names, arrays, strict=True)]
    if not meets_nothing(x, *tensors, bias):
        return None
    recent = find(*tensors, x.shape[-1], check) if x.ndim else None
    y = None if recent is None else recent.product(x, tensors[0], bias)
    return _arrays_product(x, *tensors, bias) if y is None else y


def checked_bias(op: str, bias: Any, x: Tensor, size: int) -> Tensor:
    """The bias, contiguous, if it has `size` elements of x's dtype."""
    bias = as_tensor(op, "bias", bias)
    if tuple(bias.shape) != (size,):
        fail(op, f"bias must have shape ({size},)", tuple(bias.shape))
    if bias.dtype != x.dtype and not in_autocast():
        fail(op, f"bias must be of the dtype of x, {x.dtype}", bias.dtype, TypeError)
    if bias.device != x.device:
        fail(op, f"bias must be on the device of x, {x.device}", bias.device, TypeError)
    return bias.contiguous()


def _linear(op: str, matrix: SparseMatrix, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The product with a matrix, x Wᵀ + bias, for any dtype that matrices have."""
    blocks, (n, k) = matrix.blocks(), matrix.shape
    if not x.is_floating_point():
        if x.dtype != blocks.dtype:
            fail(op, f"x must be of the dtype of data, {blocks.dtype}", x.dtype, TypeError)
        plan = matrix.pattern.row_plan if x.device.type == "cpu" else matrix.pattern.plan
        rows = x.reshape(x.shape[:-1].numel(), k).contiguous()  # k may be 0, of which no -1 follows
        y = _integers(rows, blocks, plan, bias, [n, k, *matrix.block_shape], activation)
        return y.reshape(*x.shape[:-1], n)
    _check_floats(op, matrix, x)
    derived = matrix.derived(x, blocks)
    fused = {} if activation == NONE else {"activation": activation}
    plan = _plan_of_rows(matrix) if unrecorded(x, blocks, bias) else matrix.pattern.plan
    return ops.bsr_linear(x, blocks, plan, bias, n, k, *derived, **fused)


def _check_floats(op: str, matrix: SparseMatrix, x: Tensor) -> None:
    """Raises unless data are of x's dtype, or of 16 bits where x is float32, or autocast decides."""
    halves = x.dtype == torch.float32 and matrix.dtype in (torch.bfloat16, torch.float16)
    if x.dtype != matrix.dtype and not halves and not (matrix.dtype.is_floating_point and in_autocast()):
        fail(op, f"data must be of the dtype of x, {x.dtype}", matrix.dtype, TypeError)


def times_matrix(x: Any, matrix: SparseMatrix) -> Tensor:
    """``x @ matrix``, (…, K), of a dense x, (…, N)."""
    op = "SparseMatrix.__rmatmul__"
    matrix = matrix.settled()
    x, (n, k) = as_tensor(op, "x", x), matrix.shape
    if x.ndim == 0 or x.shape[-1] != n:
        fail(op, f"x must have {n} columns, as the matrix has rows", tuple(x.shape))
    if not x.is_floating_point():
        return _linear(op, matrix.T, x, None, NONE)
    _check_floats(op, matrix, x)
    return ops.bsr_grad_input(x, matrix.blocks(), matrix.pattern.plan, n, k)


def spmm(a: Any, b: Tensor, *, check: str = "once") -> Tensor:
    """Return ``a @ b``, (M, N), of a sparse a, (M, K), and a dense b, (K, N); scipy's and torch's `@`.

    Args:
        a: sparse; see `sparse_dense`'s weight.
        b: of a's dtype, any that a SparseMatrix has, on its device, with any strides.
        check: see SparseMatrix.

    Returns:
        A tensor of b's dtype, by row or by column. Gradients flow to a's data and b.

    Raises:
        ValueError: an index, a size or a shape is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """
    op = "spmm"
    if check not in CHECKS:
        refuse_check(op, check)
    if type(a) is SparseMatrix and type(b) is Tensor:
        y = a.in_place(b)
        if y is not None:
            return y
    b = as_tensor(op, "b", b)
    if b.ndim != 2:
        fail(op, "b must have 2 dimensions", b.ndim)
    matrix = as_matrix(op, "a", a, columns=b.shape[0], check=check)
    if matrix.shape[1] != b.shape[0]:
        fail(op, f"b must have {matrix.shape[1]} rows, as a has columns", b.shape[0])
    columns = b.shape[1]
    if eager() and _is_in_place(matrix, columns) and unrecorded(b, matrix.data):
        plan = _plan_of_rows(matrix)
        matrix.remember_in_place(columns, plan)
        y = rows_product(b, matrix.values(), plan)
        if y is not None:
            return y
    return _linear(op, matrix, b.t(), None, NONE).t()


def _plan_of_rows(matrix: SparseMatrix) -> Tensor:
    """What a product by rows reads: of blocks that are wider than tall, for more than one call, all.

    Some kernels read all of those, and make it in each call where it is not there.
    """
    again = matrix._keeps or matrix._recent is not None
    return matrix.pattern.plan_by_rows if again else matrix.pattern.row_plan


def _is_in_place(matrix: SparseMatrix, columns: int) -> bool:
    """Whether a's rows meet so many columns of b as both lie: packing them would take longer."""
    if matrix.device.type != "cpu":
        return False
    if matrix.dtype == torch.float64:  # which has kernels of its own for this, and no others
        return columns >= _LEAST_DOUBLES
    rows, stored = matrix.block_shape[0], len(matrix.data)
    if matrix.dtype != torch.float32 or columns < 2:
        return False
    if rows > 1:
        return rows % 4 == 0 and columns in _BY_ROWS
    most = next(most for last, most in _IN_PLACE if last is None or columns <= last)
    if most is None or stored <= most * matrix.shape[0]:
        return True
    if matrix.data.ndim != 1:
        return False
    share = _SPARSE_FOR_SOME if 4 < columns < 16 else _SPARSE
    return stored * share <= matrix.shape[0] * matrix.shape[1] or (columns <= 4 and stored <= _SMALL)


def spmv(a: Any, v: Tensor, *, check: str = "once") -> Tensor:
    """Return ``a @ v``, (M,), of a sparse a, (M, K), and a vector v, (K,); see `spmm`."""
    op = "spmv"
    if check not in CHECKS:
        refuse_check(op, check)
    if type(a) is SparseMatrix and type(v) is Tensor and v.ndim == 1:
        y = a.at_once(v, None)
        if y is not None:
            return y
    v = as_tensor(op, "v", v)
    if v.ndim != 1:
        fail(op, "v must have 1 dimension", v.ndim)
    matrix = as_matrix(op, "a", a, columns=len(v), check=check)
    if matrix.shape[1] != len(v):
        fail(op, f"v must have {matrix.shape[1]} elements, as a has columns", len(v))
    return _linear(op, matrix, v, None, NONE)


def sddmm(a: Any, x: Tensor, y: Tensor, *, weighted: bool = False, check: str = "once") -> SparseMatrix:
    """Return ``x @ y.T`` where `a` is stored, as a matrix on its pattern; a product sampled by a sparse one.

    Args:
        a: (M, N), sparse; see `sparse_dense`. Only its pattern matters, unless `weighted`.
        x: (M, D) of any dtype that a SparseMatrix has.
        y: (N, D) of the same.
        weighted: multiply by a's values, the textbook's ``a ∘ (x yᵀ)``.
        check: see SparseMatrix.

    Returns:
        A SparseMatrix on a's pattern, which it shares, of x's dtype. Gradients flow to x, y, and with
        `weighted` to a's data. Integers wrap around as in NumPy.

    Raises:
        ValueError: an index, a size or a shape is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """
    op = "sddmm"
    x, y = as_tensor(op, "x", x), as_tensor(op, "y", y)
    for name, tensor in (("x", x), ("y", y)):
        if tensor.ndim != 2:
            fail(op, f"{name} must have 2 dimensions", tensor.ndim)
        if tensor.dtype not in FLOATS + INTEGERS:
            fail(op, f"{name} must be of a dtype of floats or of signed integers", tensor.dtype, TypeError)
    matrix = as_matrix(op, "a", a, columns=len(y), check=check)
    if (len(x), len(y)) != tuple(matrix.shape):
        fail(op, f"x and y must have {matrix.shape[0]} and {matrix.shape[1]} rows", f"{len(x)} and {len(y)}")
    if (x.dtype, x.device) != (y.dtype, y.device):
        fail(op, f"y must be of {x.dtype} on {x.device}, as x is", f"{y.dtype} on {y.device}", TypeError)
    if x.shape[1] != y.shape[1]:
        fail(op, "x and y must have as many columns", f"{x.shape[1]} and {y.shape[1]}")
    if x.dtype in INTEGERS:
        if weighted and matrix.dtype != x.dtype:
            fail(op, f"data must be of the dtype of x, {x.dtype}", matrix.dtype, TypeError)
        pattern = matrix.pattern
        if x.device.type != "cpu":
            blocks = integers.sampled(x, y, pattern)
        else:
            blocks = _integer_sampled(x.contiguous(), y.contiguous(), *_plan(pattern), pattern.nnzb)
    else:
        blocks = ops.bsr_grad_weight(x.t(), y.t(), matrix.pattern.plan, *matrix.block_shape, *matrix.shape)
    if weighted:
        blocks = blocks * matrix.blocks()
    return SparseMatrix.of_blocks(blocks, matrix.pattern, matrix)


def sparse_matmul(a: Any, b: Any, *, dense: bool = False, check: str = "once") -> SparseMatrix | Tensor:
    """Return ``a @ b`` of two sparse matrices, sparse, or dense if asked.

    Args:
        a: (M, K), in blocks (R, S), or CSR; see `sparse_dense`.
        b: (K, N), in blocks (T, C), or CSR, of a's dtype; integers wrap around as in NumPy. The cost follows
            the products, not the sizes: on the CPU by rows (Gustavson, 1978), elsewhere all of them are
            sorted (Bell, Dalton and Olson, 2012), and the host waits for their number.
        dense: give an (M, N) tensor. Faster where most of the result is not zero.
        check: see SparseMatrix.

    Returns:
        A SparseMatrix that stores what may differ from zero, also where sums cancel: in blocks (R, C) if S
        is T, else CSR, and CSR if both are. Gradients flow to the data of both.

    Raises:
        ValueError: an index, a size or a shape is not valid, with the position.
        TypeError: a wrong dtype, device or kind of object.
    """
    op = "sparse_matmul"
    left = as_matrix(op, "a", a, check=check)
    right = as_matrix(op, "b", b, check=check)
    if left.shape[1] != right.shape[0] and isinstance(a, tuple | list):
        left = as_matrix(op, "a", a, columns=right.shape[0], check=check)  # a tuple does not say it
    if left.dtype != right.dtype:
        fail(op, "a and b must have one dtype", f"{left.dtype} and {right.dtype}", TypeError)
    if left.device != right.device:
        fail(op, f"b must be on a's device, {left.device}", right.device, TypeError)
    if left.shape[1] != right.shape[0]:
        fail(op, f"b must have {left.shape[1]} rows, as a has columns", right.shape[0])
    if dense:
        return spmm(left, right.to_dense())
    if left.block_shape[1] != right.block_shape[0]:
        left, right = to_csr(left), to_csr(right)
    blocks, pattern = _SparseProduct.apply(left.blocks(), right.blocks(), left.pattern, right.pattern)
    return SparseMatrix.of_blocks(blocks, pattern, left, right)


def _plan(pattern: BsrPattern) -> tuple[Tensor, list[int]]:
    return pattern.row_plan, pattern.sizes


def _product(a: Tensor, pa: BsrPattern, b: Tensor, pb: BsrPattern) -> tuple[Tensor, BsrPattern]:
    """Blocks and pattern of the product."""
    if a.device.type != "cpu":
        return expanded.product(a, pa, b, pb)
    blocks, plan = _sparse_product(a.contiguous(), *_plan(pa), b.contiguous(), *_plan(pb))
    shape, block = (pa.shape[0], pb.shape[1]), (pa.block_shape[0], pb.block_shape[1])
    return blocks, BsrPattern._of_rows(plan, shape, block, blocks.shape[0])


class _SparseProduct(torch.autograd.Function):
    """A B where it may differ from zero, and its pattern; the gradients are sampled products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, pa: BsrPattern, pb: BsrPattern) -> tuple[Tensor, BsrPattern]:
        blocks, pattern = _product(a, pa, b, pb)
        ctx.patterns = pa, pb, pattern
        ctx.save_for_backward(a, b)
        return blocks, pattern

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        return *_SampledProduct.gradients(ctx, gradient), None, None


class _SampledProduct(torch.autograd.Function):
    """The blocks of A B on a pattern; both gradients are sampled products of it and a transposed operand."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, patterns: tuple[BsrPattern, BsrPattern, BsrPattern]
    ) -> Tensor:
        ctx.patterns = pa, pb, pc = patterns
        ctx.save_for_backward(a, b)
        if a.device.type != "cpu":
            return expanded.sampled(a, pa, b, pb, pc)
        return _sampled_product(a.contiguous(), *_plan(pa), b.contiguous(), *_plan(pb), *_plan(pc))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return *_SampledProduct.gradients(ctx, gradient), None

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Those of the operands that `ctx` saved, with the patterns of both and of the product."""
        from .structure import transposed

        a, b = ctx.saved_tensors
        pa, pb, pc = ctx.patterns
        da = db = None
        if ctx.needs_input_grad[0]:  # dC Bᵀ where A is stored
            bt, pbt = transposed(b, pb)
            da = _SampledProduct.apply(gradient, bt, (pc, pbt, pa))
        if ctx.needs_input_grad[1]:  # Aᵀ dC where B is stored
            at, pat = transposed(a, pa)
            db = _SampledProduct.apply(at, gradient, (pat, pc, pb))
        return da, db


# Fake kernels ---------------------------------------------------------------------------------------


def _fake_integers(x: Tensor, values: Tensor, plan: Tensor, bias: Any, sizes: list[int], *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], sizes[0]))


def _fake_sampled(x: Tensor, y: Tensor, plan: Tensor, sizes: list[int], blocks: int) -> Tensor:
    return x.new_empty((blocks, *sizes[2:]))


def _fake_product(
    a: Tensor, a_plan: Tensor, a_sizes: list[int], b: Tensor, b_plan: Tensor, b_sizes: list[int]
) -> tuple[Tensor, Tensor]:
    blocks = torch.library.get_ctx().new_dynamic_size()  # follows from the indices
    plan = a_plan.new_empty((row_plan_size(-(-a_sizes[0] // a_sizes[2]), blocks),))
    return a.new_empty((blocks, a_sizes[2], b_sizes[3])), plan


if _load.problem is None:
    register_fake("_sparse_product", _fake_product)
    register_fake("_integer_linear", _fake_integers)
    register_fake("_integer_sampled", _fake_sampled)
