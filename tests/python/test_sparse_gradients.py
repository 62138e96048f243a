"""Derivatives of products of sparse matrices, forward mode and torch.func, and torch.compile and export."""

from __future__ import annotations

import pytest
import torch

import rarefy
from rarefy import sparse
from rarefy.sparse import SparseMatrix
from sparse_matrices import csr, random_blocks, whole


def test_a_weights_gradients_are_those_of_its_parameter():
    weight = rarefy.CsrWeight.from_dense(torch.randn(6, 5), density=0.5)
    x = torch.randn(4, 5, requires_grad=True)
    sparse.spmm(weight, x.t()).square().sum().backward()
    dense = weight.to_dense().detach().requires_grad_()
    (dense @ x.detach().t()).square().sum().backward()
    rows = weight.pattern.block_rows()
    torch.testing.assert_close(weight.values.grad, dense.grad[rows, weight.pattern.indices()[1].long()])


@pytest.mark.filterwarnings("ignore:.*not sorted")
@pytest.mark.parametrize("repeated", [False, True])
def test_gradients_of_every_product(device, repeated):
    """By finite differences in float64: data with unsorted indices, and with some that occur twice."""
    columns = [2, 0, 1, 3, 0] if not repeated else [2, 2, 1, 3, 3]
    indices = torch.tensor(columns, device=device)
    indptr = torch.tensor([0, 2, 5, 5], device=device)

    def matrix(data):
        return SparseMatrix(data, indices, indptr, shape=(6, 8))

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)

    data, x, bias = normal(5, 2, 2), normal(3, 8), normal(6)
    check = torch.autograd.gradcheck
    assert check(lambda d, x, b: sparse.sparse_dense(x, matrix(d), b, activation="gelu"), (data, x, bias))
    assert check(lambda d, x: sparse.sparse_dense(x, matrix(d), sparse_lhs=True), (data, x))
    assert check(lambda d, x: sparse.spmm(matrix(d), x.t()), (data, x))
    assert check(lambda d, x: sparse.spmv(matrix(d), x[0]), (data, x))
    assert check(lambda d: sparse.sparse_transpose(matrix(d)).data, (data,))
    assert check(lambda d: (matrix(d) + matrix(d * d)).data, (data,))
    assert check(lambda d, y: sparse.sparse_add(matrix(d), y), (data, normal(6, 8)))
    assert check(lambda d: matrix(d)[2:6, 2:8].data, (data,))
    assert check(lambda d: sparse.sparse_concat([matrix(d), matrix(2 * d)], 1).data, (data,))
    assert check(
        lambda d, x, y: sparse.sddmm(matrix(d), x, y, weighted=True).data, (data, normal(6, 3), normal(8, 3))
    )
    assert check(lambda d: sparse.sparse_softmax(matrix(d)).data, (data,))
    assert torch.autograd.gradgradcheck(lambda d: sparse.sparse_softmax(matrix(d)).data, (data,))


@pytest.mark.filterwarnings("ignore:.*not sorted")
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.timeout(300)  # 300 000 small operations on a GPU, whose host may be busy
def test_gradients_of_sparse_times_sparse(device, repeated):
    columns = [2, 0, 1, 3, 0] if not repeated else [2, 2, 1, 3, 3]
    indices = torch.tensor(columns, device=device)
    indptr = torch.tensor([0, 2, 5, 5], device=device)

    def product(d, e):
        left, right = (SparseMatrix(data, indices, indptr, shape=(6, 8)) for data in (d, e))
        return (left @ right.T).data

    data = tuple(
        torch.randn(5, 2, 2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)
    )
    assert torch.autograd.gradcheck(product, data)
    assert torch.autograd.gradgradcheck(product, data)


class Uses(torch.nn.Module):
    """A product with a matrix that it holds, in both orders."""

    def __init__(self, blocks):
        super().__init__()
        make = random_blocks(6, 4, *blocks, 0.5)[0] if blocks else csr(24, 16, 0.3)[0]
        r, c = blocks or (4, 4)
        self.data = torch.nn.Parameter(torch.as_tensor(make[0]))
        self.matrix = sparse.SparseMatrix(self.data, *make[1:], shape=(6 * r, 4 * c))

    def forward(self, x):
        return sparse.sparse_dense(x, self.matrix, activation="relu"), sparse.spmm(self.matrix, x.t())


@pytest.mark.parametrize("blocks", [None, (4, 2), (1, 8)])
@pytest.mark.parametrize("train", [False, True])
def test_matrices_compile_and_export_whole(blocks, train):
    torch.manual_seed(0)
    model = Uses(blocks)
    x = torch.randn(5, model.matrix.shape[1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(train):
        got = compiled(x)  # first: nothing has made a plan or asked what kernels derive
        want = model(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if train:
        gradients = [torch.autograd.grad(sum(y.square().sum() for y in ys), model.data) for ys in (want, got)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
        return
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        torch.testing.assert_close(exported.module()(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", [None, (4, 2)])
def test_matrices_that_were_used_eagerly_compile_and_export(blocks):
    """What eager calls hold of a matrix is nothing that a graph can look at."""
    torch.manual_seed(0)
    model = Uses(blocks)
    x = torch.randn(5, model.matrix.shape[1])
    with torch.no_grad():
        for _ in range(3):
            want = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)
        exported = torch.export.export(model, (x,), strict=True)
        torch.testing.assert_close(exported.module()(x), want, rtol=1e-5, atol=1e-5)


class Multiplies(torch.nn.Module):
    """Sparse × sparse, whose sizes follow from indices, and what is done with the product."""

    def __init__(self, blocks):
        super().__init__()
        left = random_blocks(6, 4, 2, 2, 0.4)[0] if blocks else csr(12, 8, 0.3)[0]
        right = random_blocks(4, 5, 2, 3, 0.4)[0] if blocks else csr(8, 15, 0.3)[0]
        self.data = torch.nn.Parameter(left[0])
        self.matrix = sparse.SparseMatrix(self.data, *left[1:], shape=(12, 8))
        self.other = sparse.SparseMatrix(*right, shape=(8, 15))

    def forward(self, x):
        product = sparse.sparse_matmul(self.matrix, self.other)
        arrays = product.data, product.indices.clone(), product.indptr.clone()
        return *arrays, sparse.spmm(product, x), product.to_dense()


@pytest.mark.parametrize("blocks", [False, True])
def test_sparse_products_compile_and_export_whole(blocks):
    model, x = Multiplies(blocks), torch.randn(15, 3)
    with torch.no_grad():
        want = model(x)
        exported = torch.export.export(model, (x,))
        compiled = torch.compile(model, fullgraph=True)
        for got in (exported.module()(x), compiled(x)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        model.data.mul_(2)
        for got in (exported.module()(x), compiled(x)):
            torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)


def test_patterns_keep_nothing_that_a_graph_made():
    """Export on fake tensors once left one in the transposed pattern that eager calls share."""
    (data, indices, indptr), dense = csr(6, 8, 0.5)
    data = data.requires_grad_()
    matrix = sparse.SparseMatrix(data, indices, indptr, shape=(6, 8))

    class Turns(torch.nn.Module):
        def forward(self, x):
            return sparse.spmm(sparse.sparse_transpose(matrix), x)

    x = torch.randn(6, 2)
    torch.export.export(Turns(), (x,), strict=False)
    sparse.sparse_transpose(matrix).data.sum().backward()
    torch.testing.assert_close(Turns()(x), dense.T @ x)


class Attends(torch.nn.Module):
    """Attention on blocks of scores, and a product of integers."""

    def __init__(self):
        super().__init__()
        blocks = torch.ones(4, 4).tril() > 0
        self.scores = rarefy.BsrPattern.from_mask(blocks, shape=(16, 16), block_shape=(4, 4))
        (data, indices, indptr), _ = csr(6, 8, 0.5)
        data = (torch.as_tensor(data) * 5).to(torch.int32)
        self.matrix = sparse.SparseMatrix(data, indices, indptr, shape=(6, 8))

    def forward(self, x):
        attended = sparse.sparse_attention(x, x, x, self.scores, causal=True)
        return attended, sparse.sparse_dense((x * 10).to(torch.int32), self.matrix)


def test_attention_and_integers_compile_and_export_whole():
    model, x = Attends(), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    want = model(x)
    for got in (
        torch.compile(model, fullgraph=True, backend="aot_eager")(x),
        torch.export.export(model, (x,)).module()(x),
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    leaf = [x.clone().requires_grad_() for _ in range(2)]
    model(leaf[0])[0].square().sum().backward()
    torch.compile(model, fullgraph=True, backend="aot_eager")(leaf[1])[0].square().sum().backward()
    torch.testing.assert_close(leaf[0].grad, leaf[1].grad, rtol=1e-4, atol=1e-4)


def test_forward_mode_and_torch_func_through_matrices():
    """Products and transposes whose matrix is made in the call, from a row plan."""
    (data, indices, indptr), dense = csr(24, 16, 0.3, torch.float64)
    data, x = torch.as_tensor(data), torch.randn(5, 16, dtype=torch.float64)

    def turned(data):
        matrix = sparse.SparseMatrix(data, indices, indptr, shape=(24, 16))
        return sparse.sparse_transpose(matrix).to_dense()

    def product(data, x):
        return sparse.sparse_dense(x, sparse.SparseMatrix(data, indices, indptr, shape=(24, 16))).square()

    ones = torch.ones_like(data)
    stored = sparse.SparseMatrix(ones, indices, indptr, shape=(24, 16)).to_dense()
    value, tangent = torch.func.jvp(turned, (data,), (ones,))
    assert torch.equal(value, dense.T)
    assert torch.equal(tangent, stored.T)
    assert torch.equal(torch.func.grad(lambda d: turned(d).sum())(data), ones)
    _, tangent = torch.func.jvp(product, (data, x), (ones, torch.ones_like(x)))
    change = torch.ones_like(x) @ dense.T + x @ stored.T
    torch.testing.assert_close(tangent, 2 * (x @ dense.T) * change)
    # Reverse over forward: the tangent's product is recorded though its operands are not.
    second = torch.func.grad(lambda x: torch.func.jvp(lambda x: product(data, x), (x,), (x,))[1].sum())(x)
    torch.testing.assert_close(second, 4 * (x @ dense.T) @ dense)


@pytest.mark.parametrize("train", [False, True])
def test_transposes_compile_whole(train):
    (data, indices, indptr), dense = csr(24, 16, 0.3)
    data = torch.as_tensor(data).clone().requires_grad_(train)
    matrix = sparse.SparseMatrix(data, indices, indptr, shape=(24, 16))
    x = torch.randn(24, 3)
    compiled = torch.compile(lambda x: sparse.spmm(sparse.sparse_transpose(matrix), x), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    y = compiled(x)
    torch.testing.assert_close(y, dense.T @ x, rtol=1e-4, atol=1e-4)
    assert y.requires_grad == train


@pytest.mark.parametrize("block", [(1, 1), (4, 2)])
def test_opcheck_of_the_ops_behind(block):
    """Schemas and fake kernels."""
    arrays, dense = random_blocks(3, 4, *block, 0.5)
    pattern = SparseMatrix(*arrays, shape=tuple(dense.shape)).pattern
    sizes, values = [*pattern.shape, *block], arrays[0]
    ops = torch.ops.rarefy
    x = whole(3, dense.shape[1], dtype=torch.int32)
    bias = whole(dense.shape[0], dtype=torch.int32)
    for given in (None, bias):
        call = (x, values.to(torch.int32), pattern.row_plan, given, sizes, "relu")
        torch.library.opcheck(ops._integer_linear.default, call)
    y = whole(dense.shape[0], 3, dtype=torch.int32)
    call = (y, x.t().contiguous(), pattern.row_plan, sizes, pattern.nnzb)
    torch.library.opcheck(ops._integer_sampled.default, call)
    torch.library.opcheck(ops._stored_softmax.default, (values, pattern.row_plan, sizes))
    call = (values, values.clone(), pattern.row_plan, sizes)
    torch.library.opcheck(ops._stored_softmax_gradient.default, call)
    other = sparse.sparse_transpose(SparseMatrix(*arrays, shape=tuple(dense.shape)))
    schema = {"test_utils": "test_schema"}
    call = (values, pattern.row_plan, sizes, other.blocks(), other.pattern.row_plan)
    torch.library.opcheck(ops._sparse_product.default, (*call, [*other.shape, *other.block_shape]))
    if block[0] == 1:
        b = torch.randn(dense.shape[1], 5)
        torch.library.opcheck(
            ops._product_in_place.default, (b[None], values, pattern.row_plan, sizes), **schema
        )
        torch.library.opcheck(ops._rows_product.default, (b, values, pattern.row_plan), **schema)


@pytest.mark.parametrize("block", [(1, 1), (4, 2)])
def test_opcheck_of_the_ops_that_no_graph_meets(block):
    """Schemas, and that autograd has no say. Eager calls and Functions alone use them: they have no fakes."""
    arrays, dense = random_blocks(3, 4, *block, 0.5)
    a = SparseMatrix(*arrays, shape=tuple(dense.shape))
    b = sparse.sparse_transpose(a)
    product = sparse.sparse_matmul(a, b)
    values, plan, sizes = arrays[0], a.pattern.row_plan, [*a.shape, *block]
    ops, tests = torch.ops.rarefy, ("test_schema", "test_autograd_registration")

    def of(matrix):
        return matrix.blocks(), matrix.pattern.row_plan, [*matrix.shape, *matrix.block_shape]

    calls = [
        (ops._sampled_product, (*of(a), *of(b), *of(product)[1:])),
        (ops._transposed, (values, plan, sizes)),
        (ops._transposed, (values, a.pattern.plan, sizes)),
        (ops._row_plan, (arrays[2], arrays[1], sizes)),
        (ops._row_plan, (arrays[2].long(), arrays[1].flip(0), sizes)),  # not sorted: an empty tensor
        (ops._row_plan_is_of, (plan, arrays[1], arrays[2])),
        (ops._row_plan_is_of, (plan, arrays[1] + 1, arrays[2])),
    ]
    x, bias = torch.randn(2, dense.shape[1]), torch.randn(dense.shape[0])
    calls += [(ops._arrays_product, (x, *arrays, given)) for given in (None, bias)]
    calls.append((ops._arrays_product, (x.double(), *arrays, None)))  # another dtype: None
    if block == (1, 1):
        calls.append((ops._transposed, (values.flatten().to(torch.int16), plan, sizes)))
    for op, call in calls:
        torch.library.opcheck(op.default, call, test_utils=tests)
