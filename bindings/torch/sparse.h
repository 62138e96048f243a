// Arguments of the ops of rarefy.sparse: a matrix is values, (nnzb, R, C), a row plan and its four sizes.
#pragma once

#include <span>
#include <vector>

#include "adapt.h"
#include "core/message.h"

namespace rarefy::binding {

using Sizes = std::vector<std::int64_t>;  // N, K, R, C

inline PlanView plan_of(const Call& call, const Tensor& plan, std::span<const std::int64_t> sizes) {
  if (sizes.size() != 4)
    raise(call.op(), invalid(call.op(), "sizes must be 4 of each matrix", cat(sizes.size())));
  return call.row_plan(plan, {sizes[0], sizes[1], sizes[2], sizes[3]});
}

// Values of a plan's matrix, of one of the dtypes of products.
inline BsrView weight_of(const Call& call, const Tensor& values, const Tensor& plan, const Sizes& sizes) {
  return call.weight(values, plan_of(call, plan, sizes));
}

inline bool is_integer(ScalarType type) {
  return type == ScalarType::Char || type == ScalarType::Short || type == ScalarType::Int ||
         type == ScalarType::Long;
}

inline void check_blocks(const Call& call, const Tensor& values, const PlanView& plan) {
  if (values.numel() == plan.shape.value_count() && values.is_contiguous()) return;
  raise(call.op(), invalid(call.op(), "values must be contiguous, the stored blocks", cat(values.numel())));
}

// An operand of sparse × sparse or a sum; `integers`: the bytes of an element where those are integers, else
// 0.
struct Operand {
  BsrView view;
  int integers;

  Operand(const Call& call, const Tensor& values, const Tensor& plan, const Sizes& sizes)
      : integers(is_integer(values.scalar_type()) ? static_cast<int>(values.element_size()) : 0) {
    view = integers == 0 ? weight_of(call, values, plan, sizes)
                         : BsrView{plan_of(call, plan, sizes), call.elements("values", values), DType::i8};
    check_blocks(call, values, view.plan);
  }
};

// The bytes of both, or 0 for floats.
inline int integers_of(const Call& call, const Tensor& a, const Tensor& b, const Operand& left) {
  if (a.scalar_type() == b.scalar_type()) return left.integers;
  raise(call.op(), mismatch(call.op(), "a and b must have one dtype", "two"));
}

inline Tensor empty_row_plan(const Call& call, const BsrShape& shape) {
  return call.empty_words(row_plan_size(shape));
}

inline std::span<std::int32_t> words_of(const Tensor& plan) {
  return {static_cast<std::int32_t*>(plan.mutable_data_ptr()), static_cast<std::size_t>(plan.numel())};
}

}  // namespace rarefy::binding
