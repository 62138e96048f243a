// Ops of rarefy.sparse on the host; python/rarefy/sparse knows what the arguments mean.
#include "rarefy/sparse.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "core/integers.h"
#include "sparse.h"

namespace rarefy::binding {

namespace {

// Values (nnz,) or (nnzb, R, C), of any dtype, and the row plan of the transposed matrix.
std::tuple<Tensor, Tensor> transposed(const Tensor& values, const Tensor& plan, const Sizes& sizes) {
  const Call call("sparse_transpose", "values", values);
  const PlanView from = plan_of(call, plan, sizes);
  if (values.numel() != from.shape.value_count() || !values.is_contiguous()) {
    raise(call.op(),
          invalid(call.op(), cat("values must be contiguous, of ", from.shape.value_count(), " elements"),
                  cat(values.numel())));
  }
  const BsrShape& s = from.shape;
  if (values.dim() == 1 && s.block_size() != 1) {
    raise(call.op(), invalid(call.op(), "values of blocks must have 3 dimensions", "1"));
  }
  Tensor row_plan = empty_row_plan(call, {s.cols, s.rows, s.block_cols, s.block_rows, s.nnzb});
  Tensor moved = values.dim() == 1 ? call.empty_elements(s.nnzb, values.scalar_type())
                                   : call.empty_values({s.cols, s.rows, s.block_cols, s.block_rows, s.nnzb},
                                                       values.scalar_type());
  check(call.op(),
        rarefy::transpose(call.op(), from, values.data_ptr(), static_cast<int>(values.element_size()),
                          words_of(row_plan), moved.mutable_data_ptr(), call.context().executor));
  return {moved, row_plan};
}

// Values, (nnzb, R, C), and row plan.
std::tuple<Tensor, Tensor> sparse_product(const Tensor& a, const Tensor& a_plan, const Sizes& a_sizes,
                                          const Tensor& b, const Tensor& b_plan, const Sizes& b_sizes) {
  const Call call("sparse_matmul", "a", a);
  const Operand left(call, a, a_plan, a_sizes), right(call, b, b_plan, b_sizes);
  const int integers = integers_of(call, a, b, left);
  const Executor executor = call.context().executor;
  const SparseProduct product =
      value_of(call.op(), rarefy::sparse_product(call.op(), left.view, right.view, executor, integers));
  Tensor row_plan = empty_row_plan(call, product.shape),
         values = call.empty_values(product.shape, a.scalar_type());
  check(call.op(), write_product(call.op(), left.view, right.view, product, words_of(row_plan),
                                 values.mutable_data_ptr(), executor, integers));
  return {values, row_plan};
}

Tensor sampled_product(const Tensor& a, const Tensor& a_plan, const Sizes& a_sizes, const Tensor& b,
                       const Tensor& b_plan, const Sizes& b_sizes, const Tensor& plan, const Sizes& sizes) {
  const Call call("sparse_matmul", "a", a);
  const PlanView pattern = plan_of(call, plan, sizes);
  const Operand left(call, a, a_plan, a_sizes), right(call, b, b_plan, b_sizes);
  Tensor values = call.empty_values(pattern.shape, a.scalar_type());
  check(call.op(),
        rarefy::sampled_product(call.op(), left.view, right.view, pattern, values.mutable_data_ptr(),
                                call.context().executor, integers_of(call, a, b, left)));
  return values;
}

// The blocks of x yᵀ on a pattern; x is (N, D) and y (K, D), of one integer dtype.
Tensor integer_sampled(const Tensor& x, const Tensor& y, const Tensor& plan, const Sizes& sizes,
                       std::int64_t blocks) {
  const Call call("sddmm", "x", x);
  const PlanView pattern = plan_of(call, plan, sizes);
  if (blocks != pattern.shape.nnzb) {
    raise(call.op(),
          invalid(call.op(), cat("blocks must be ", pattern.shape.nnzb, ", those of the plan"), cat(blocks)));
  }
  if (!is_integer(x.scalar_type()) || y.scalar_type() != x.scalar_type()) {
    raise(call.op(), mismatch(call.op(), "x and y must be of one integer dtype", "another"));
  }
  const auto check_one = [&](std::string_view argument, const Tensor& tensor, std::int64_t rows) {
    call.check_device(argument, tensor);
    if (tensor.dim() == 2 && tensor.size(0) == rows && tensor.is_contiguous()) return;
    raise(call.op(), invalid(call.op(), cat(argument, " must be contiguous, of ", rows, " rows"), "another"));
  };
  check_one("x", x, pattern.shape.rows);
  check_one("y", y, pattern.shape.cols);
  if (x.size(1) != y.size(1)) {
    raise(call.op(), invalid(call.op(), cat("y must have ", x.size(1), " columns"), cat(y.size(1))));
  }
  Tensor values = call.empty_values(pattern.shape, x.scalar_type());
  check(call.op(),
        rarefy::integer_sampled(call.op(), static_cast<int>(x.element_size()), x.data_ptr(), y.data_ptr(),
                                x.size(1), pattern, values.mutable_data_ptr(), call.context().executor));
  return values;
}

// W b + bias of each b (K, M) of (B, K, M), (B, N, M): by feature, as the core sees them, so that nothing is
// transposed.
Tensor product_in_place(Tensor b, const Tensor& values, const Tensor& plan, const Sizes& sizes,
                        const std::optional<Tensor>& bias, std::string_view activation) {
  const Call call("spmm", "b", b);
  const BsrView w = weight_of(call, values, plan, sizes);
  if (b.dim() != 3 || b.size(1) != sizes[1]) {
    raise(call.op(),
          invalid(call.op(), cat("b must be (B, ", sizes[1], ", M)"), cat(b.dim(), " dimensions")));
  }
  const std::int64_t columns = b.size(2);
  if (b.stride(2) != 1 || b.stride(1) < columns) b = torch::stable::contiguous(b);
  const DType dtype = call.float_dtype("b", b);
  const Activation fused = call.activation(activation);
  const void* bias_data = call.bias(bias, sizes[0], dtype);
  Tensor y = torch::stable::new_empty(b, {b.size(0), sizes[0], columns});
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const auto* from = static_cast<const char*>(call.elements("b", b));
  auto* to = static_cast<char*>(y.mutable_data_ptr());
  for (std::int64_t i = 0; i < b.size(0); ++i) {
    const MatrixView x{
        from + i * b.stride(0) * size, dtype, columns, sizes[1], 1, call.device(), b.stride(1)};
    const MutableMatrixView out{
        to + i * sizes[0] * columns * size, dtype, columns, sizes[0], 1, call.device(), columns};
    check(call.op(), linear(x, w, bias_data, fused, out, call.context()));
  }
  return y;
}

// W b of b (K, M) as it lies; nothing where b is another kind of tensor, for which there are other ways, or
// words. For eager calls, of which small ones take as long as their arguments: the plan says the sizes, and
// W's values may have one dimension.
std::optional<Tensor> rows_product(const Tensor& b, const Tensor& values, const Tensor& plan) {
  if (b.layout() != torch::headeronly::Layout::Strided || !b.is_cpu() || b.dim() != 2) return std::nullopt;
  const Call call("spmm", "values", values);
  const BsrView w = call.rows_weight(values, plan);
  const BsrShape& s = w.plan.shape;
  const std::int64_t columns = b.size(1), stride = b.stride(0);
  if (b.scalar_type() != values.scalar_type() || b.size(0) != s.cols || b.stride(1) != 1 || stride < columns)
    return std::nullopt;
  Tensor y = call.empty_matrix(s.rows, columns, b.scalar_type());
  const MatrixView x{call.elements("b", b), w.dtype, columns, s.cols, 1, Device::cpu, stride};
  const MutableMatrixView out{y.mutable_data_ptr(), w.dtype, columns, s.rows, 1, Device::cpu, columns};
  check(call.op(), linear(x, w, nullptr, Activation::none, out, call.context()));
  return y;
}

Tensor softmax(const Tensor& values, const Tensor& plan, const Sizes& sizes) {
  const Call call("sparse_softmax", "values", values);
  const BsrView w = weight_of(call, values, plan, sizes);
  Tensor out = call.empty_values(w.plan.shape, values.scalar_type());
  check(call.op(), stored_softmax(call.op(), w, out.mutable_data_ptr(), call.context().executor));
  return out;
}

Tensor softmax_gradient(const Tensor& p, const Tensor& gradient, const Tensor& plan, const Sizes& sizes) {
  const Call call("sparse_softmax", "values", p);
  const BsrView w = weight_of(call, p, plan, sizes);
  const BsrView g = weight_of(call, gradient, plan, sizes);
  if (g.dtype != w.dtype) {
    raise(call.op(), mismatch(call.op(), cat("gradient must be ", name(w.dtype)), name(g.dtype)));
  }
  Tensor out = call.empty_values(w.plan.shape, p.scalar_type());
  check(call.op(),
        stored_softmax_gradient(call.op(), w, g.values, out.mutable_data_ptr(), call.context().executor));
  return out;
}

// x and y are (tokens, K) and (tokens, N), contiguous; all of one integer dtype.
Tensor integers(const Tensor& x, const Tensor& values, const Tensor& plan, const std::optional<Tensor>& bias,
                const Sizes& sizes, std::string_view activation) {
  const Call call("sparse_dense", "x", x);
  if (sizes.size() != 4) raise(call.op(), invalid(call.op(), "sizes must be 4", cat(sizes.size())));
  const bool on_host = call.device() == Device::cpu;
  const PlanView pattern =
      on_host ? plan_of(call, plan, sizes) : call.plan(plan, sizes[0], sizes[1], sizes[2], sizes[3]);
  const auto check_one = [&](std::string_view argument, const Tensor& tensor, std::int64_t count) {
    call.check_device(argument, tensor);
    if (tensor.scalar_type() != x.scalar_type())
      raise(call.op(), mismatch(call.op(), cat(argument, " must be of the integer dtype of x"), "another"));
    if (tensor.numel() == count && tensor.is_contiguous()) return;
    raise(call.op(), invalid(call.op(), cat(argument, " must be contiguous, of ", count, " elements"),
                             cat(tensor.numel())));
  };
  if (!is_integer(x.scalar_type())) {
    raise(call.op(), mismatch(call.op(), "x must be of an integer dtype", "another"));
  }
  if (x.dim() != 2) raise(call.op(), invalid(call.op(), "x must have 2 dimensions", cat(x.dim())));
  check_one("x", x, x.size(0) * sizes[1]);
  check_one("data", values, pattern.shape.value_count());
  if (bias) check_one("bias", *bias, sizes[0]);
  const auto bytes = static_cast<int>(x.element_size());
  Tensor y = call.empty_rows(x, sizes[0]);
  const void* offsets = bias ? bias->data_ptr() : nullptr;
  const Activation of = call.activation(activation);
  check(call.op(),
        on_host
            ? integer_linear(call.op(), bytes, x.data_ptr(), x.size(0), pattern, values.data_ptr(), offsets,
                             of, y.mutable_data_ptr(), call.context().executor)
            : integer_linear_on_device(call.op(), bytes, x.data_ptr(), x.size(0), pattern, values.data_ptr(),
                                       offsets, of, y.mutable_data_ptr(), call.context()));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def("_transposed(Tensor values, Tensor plan, int[] sizes) -> (Tensor, Tensor)");
  m.def(
      "_sparse_product(Tensor a, Tensor a_plan, int[] a_sizes, Tensor b, Tensor b_plan, int[] b_sizes) -> "
      "(Tensor, Tensor)");
  m.def(
      "_sampled_product(Tensor a, Tensor a_plan, int[] a_sizes, Tensor b, Tensor b_plan, int[] b_sizes, "
      "Tensor plan, int[] sizes) -> Tensor");
  m.def(
      "_product_in_place(Tensor b, Tensor values, Tensor plan, int[] sizes, Tensor? bias=None, "
      "str activation=\"none\") -> Tensor");
  m.def("_integer_sampled(Tensor x, Tensor y, Tensor plan, int[] sizes, int blocks) -> Tensor");
  m.def("_rows_product(Tensor b, Tensor values, Tensor plan) -> Tensor?");
  m.def("_stored_softmax(Tensor values, Tensor plan, int[] sizes) -> Tensor");
  m.def("_stored_softmax_gradient(Tensor p, Tensor gradient, Tensor plan, int[] sizes) -> Tensor");
  m.def(
      "_integer_linear(Tensor x, Tensor values, Tensor plan, Tensor? bias, int[] sizes, str activation) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("_transposed", TORCH_BOX(&transposed));
  m.impl("_sparse_product", TORCH_BOX(&sparse_product));
  m.impl("_sampled_product", TORCH_BOX(&sampled_product));
  m.impl("_product_in_place", TORCH_BOX(&product_in_place));
  m.impl("_integer_sampled", TORCH_BOX(&integer_sampled));
  m.impl("_stored_softmax", TORCH_BOX(&softmax));
  m.impl("_stored_softmax_gradient", TORCH_BOX(&softmax_gradient));
  m.impl("_integer_linear", TORCH_BOX(&integers));
}

// Of any tensor: it says itself what it does not know.
STABLE_TORCH_LIBRARY_IMPL(rarefy, CompositeExplicitAutograd, m) {
  m.impl("_rows_product", TORCH_BOX(&rows_product));
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CUDA, m) { m.impl("_integer_linear", TORCH_BOX(&integers)); }

}  // namespace rarefy::binding
