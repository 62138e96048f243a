// Ops of rarefy.sparse that change where a matrix stores; python/rarefy/sparse/structure.py knows what for.
#include "rarefy/sparse_structure.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "sparse.h"

namespace rarefy::binding {

namespace {

using Matrix = std::tuple<Tensor, Tensor>;  // values and row plan

Matrix sum(const Tensor& a, const Tensor& a_plan, const Sizes& a_sizes, const Tensor& b, const Tensor& b_plan,
           const Sizes& b_sizes) {
  const Call call("sparse_add", "a", a);
  const Operand left(call, a, a_plan, a_sizes), right(call, b, b_plan, b_sizes);
  const int integers = integers_of(call, a, b, left);
  const Executor executor = call.context().executor;
  const StoredRows rows = value_of(call.op(), sum_rows(call.op(), left.view.plan, right.view.plan, executor));
  Tensor plan = empty_row_plan(call, rows.shape), values = call.empty_values(rows.shape, a.scalar_type());
  check(call.op(), write_sum(call.op(), left.view, right.view, rows, words_of(plan),
                             values.mutable_data_ptr(), executor, integers));
  return {values, plan};
}

// x + W; x is (N, K), with rows anywhere.
Tensor sum_with_dense(Tensor x, const Tensor& values, const Tensor& plan, const Sizes& sizes) {
  const Call call("sparse_add", "values", values);
  const Operand w(call, values, plan, sizes);
  call.check_device("dense", x);
  if (x.scalar_type() != values.scalar_type())
    raise(call.op(), mismatch(call.op(), "dense must be of the dtype of values", "another"));
  if (x.dim() != 2) raise(call.op(), invalid(call.op(), "dense must have 2 dimensions", cat(x.dim())));
  if (x.stride(1) != 1) x = torch::stable::contiguous(x);
  Tensor y = call.empty_matrix(x.size(0), x.size(1), x.scalar_type());
  const MatrixView from{call.elements("dense", x), w.view.dtype, x.size(0), x.size(1), x.stride(0)};
  const MutableMatrixView to{y.mutable_data_ptr(), w.view.dtype, x.size(0), x.size(1), x.size(1)};
  check(call.op(), add_dense(call.op(), from, w.view, to, call.context().executor, w.integers));
  return y;
}

// range: first and end of the rows, and of the columns.
Matrix slice(const Tensor& values, const Tensor& plan, const Sizes& sizes,
             const std::vector<std::int64_t>& range) {
  const Call call("sparse_slice", "values", values);
  const PlanView w = plan_of(call, plan, sizes);
  check_blocks(call, values, w);
  if (range.size() != 4) raise(call.op(), invalid(call.op(), "range must be 4 numbers", cat(range.size())));
  const Range rows{range[0], range[1]}, cols{range[2], range[3]};
  const Executor executor = call.context().executor;
  const StoredRows stored = value_of(call.op(), slice_rows(call.op(), w, rows, cols, executor));
  Tensor part = empty_row_plan(call, stored.shape),
         moved = call.empty_values(stored.shape, values.scalar_type());
  check(call.op(),
        write_slice(call.op(), w, call.elements("values", values), static_cast<int>(values.element_size()),
                    rows, cols, stored, words_of(part), moved.mutable_data_ptr(), executor));
  return {moved, part};
}

// Matrices below one another, or beside one another; `sizes` are those of all, one after the other.
Matrix joined(const std::vector<Tensor>& values, const std::vector<Tensor>& plans, const Sizes& sizes,
              bool beside) {
  if (values.empty() || values.size() != plans.size() || sizes.size() != 4 * plans.size())
    raise("sparse_concat",
          invalid("sparse_concat", "there must be as many plans as values", cat(plans.size())));
  const Call call("sparse_concat", "matrices[0]", values[0]);
  std::vector<PlanView> parts;
  std::vector<const void*> elements;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    call.check_device(cat("matrices[", i, ']'), values[i]);
    if (values[i].scalar_type() != values[0].scalar_type())
      raise(call.op(),
            mismatch(call.op(), cat("matrices[", i, "] must be of the first one's dtype"), "another"));
    parts.push_back(plan_of(call, plans[i], std::span(sizes).subspan(4 * i, 4)));
    check_blocks(call, values[i], parts.back());
    elements.push_back(call.elements("values", values[i]));
  }
  const Side side = beside ? Side::beside : Side::below;
  const BsrShape shape = value_of(call.op(), joined_shape(call.op(), parts, side));
  Tensor plan = empty_row_plan(call, shape), moved = call.empty_values(shape, values[0].scalar_type());
  check(call.op(), join(call.op(), parts, elements, static_cast<int>(values[0].element_size()), side,
                        words_of(plan), moved.mutable_data_ptr(), call.context().executor));
  return {moved, plan};
}

// The blocks of another pattern of the same sizes, zero where values have none.
Tensor placed(const Tensor& values, const Tensor& plan, const Sizes& sizes, const Tensor& other_plan,
              std::int64_t blocks) {
  const Call call("sparse_add", "values", values);
  const PlanView from = plan_of(call, plan, sizes), to = plan_of(call, other_plan, sizes);
  check_blocks(call, values, from);
  if (blocks != to.shape.nnzb) {
    raise(call.op(),
          invalid(call.op(), cat("blocks must be ", to.shape.nnzb, ", those of the plan"), cat(blocks)));
  }
  Tensor out = call.empty_values(to.shape, values.scalar_type());
  check(call.op(),
        on_pattern(call.op(), from, call.elements("values", values), static_cast<int>(values.element_size()),
                   to, {}, out.mutable_data_ptr(), call.context().executor));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "_sparse_sum(Tensor a, Tensor a_plan, int[] a_sizes, Tensor b, Tensor b_plan, int[] b_sizes) -> "
      "(Tensor, Tensor)");
  m.def("_sum_with_dense(Tensor x, Tensor values, Tensor plan, int[] sizes) -> Tensor");
  m.def("_sparse_slice(Tensor values, Tensor plan, int[] sizes, int[] range) -> (Tensor, Tensor)");
  m.def("_sparse_joined(Tensor[] values, Tensor[] plans, int[] sizes, bool beside) -> (Tensor, Tensor)");
  m.def("_on_pattern(Tensor values, Tensor plan, int[] sizes, Tensor other_plan, int blocks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("_sparse_sum", TORCH_BOX(&sum));
  m.impl("_sum_with_dense", TORCH_BOX(&sum_with_dense));
  m.impl("_sparse_slice", TORCH_BOX(&slice));
  m.impl("_sparse_joined", TORCH_BOX(&joined));
  m.impl("_on_pattern", TORCH_BOX(&placed));
}

}  // namespace rarefy::binding
