// Products of integers modulo their bits: of unsigned ones, whose bits are those of signed ones.
#include "core/integers.h"

#include <algorithm>
#include <type_traits>

#include "core/elements.h"
#include "core/message.h"
#include "core/padding.h"
#include "rarefy/sparse.h"

namespace rarefy {

namespace {

template <class U>
IntegerSum<U> dot(const U* x, const U* y, std::int64_t count) {
  IntegerSum<U> sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += IntegerSum<U>{x[i]} * y[i];
  return sum;
}

template <class U>
void integer_row(const PlanView& plan, const U* x, const U* values, const U* bias, bool relu, std::int64_t n,
                 U* y) {
  const BsrShape& s = plan.shape;
  U sum = bias == nullptr ? U{0} : bias[n];
  for (std::int32_t e = plan.crow[n / s.block_rows]; e < plan.crow[n / s.block_rows + 1]; ++e) {
    const std::int64_t k = plan.col[e] * s.block_cols;
    sum = static_cast<U>(sum + dot(x + k, values + (e * s.block_rows + n % s.block_rows) * s.block_cols,
                                   std::min(s.block_cols, s.cols - k)));
  }
  y[n] = relu && static_cast<std::make_signed_t<U>>(sum) < 0 ? U{0} : sum;
}

}  // namespace

Status check_elements(std::string_view op, const BsrView& a, const BsrView& b, int integers) {
  if (integers != 0) return check_integers(op, integers, Activation::none);
  if (a.dtype != b.dtype) {
    return mismatch(op, "a and b must have one dtype", cat(name(a.dtype), " and ", name(b.dtype)));
  }
  if (a.dtype != DType::i8) return {};
  return mismatch(op, "a and b must be f64, f32, bf16 or f16", name(a.dtype));
}

Status check_element_bytes(std::string_view op, int bytes) {
  if (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8) return {};
  return invalid(op, "an element must have 1, 2, 4 or 8 bytes", cat(bytes));
}

Status check_integers(std::string_view op, int bytes, Activation activation) {
  if (activation != Activation::none && activation != Activation::relu) {
    return invalid(op, "activation of integers must be none or relu", name(activation));
  }
  if (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8) return {};
  return invalid(op, "integers must have 1, 2, 4 or 8 bytes", cat(bytes));
}

Status integer_linear(std::string_view op, int bytes, const void* x, std::int64_t tokens,
                      const PlanView& plan, const void* values, const void* bias, Activation activation,
                      void* y, const Executor& executor) {
  if (Status status = check_integers(op, bytes, activation); !status.ok()) return status;
  const BsrShape& s = plan.shape;
  visit_integers(bytes, [&]<class U>(U) {
    executor.parallel_for(tokens, [&](std::int64_t m) {
      for (std::int64_t n = 0; n < s.rows; ++n) {
        integer_row(plan, static_cast<const U*>(x) + m * s.cols, static_cast<const U*>(values),
                    static_cast<const U*>(bias), activation == Activation::relu, n,
                    static_cast<U*>(y) + m * s.rows);
      }
    });
  });
  return {};
}

Status integer_sampled(std::string_view op, int bytes, const void* x, const void* y, std::int64_t depth,
                       const PlanView& plan, void* values, const Executor& executor) {
  if (Status status = check_integers(op, bytes, Activation::none); !status.ok()) return status;
  const BsrShape& s = plan.shape;
  visit_integers(bytes, [&]<class U>(U) {
    executor.parallel_for(s.row_count(), [&](std::int64_t i) {
      const std::int64_t rows = std::min(s.block_rows, s.rows - i * s.block_rows);
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        const std::int64_t k = plan.col[e] * s.block_cols, columns = std::min(s.block_cols, s.cols - k);
        U* const block = static_cast<U*>(values) + e * s.block_size();
        for (std::int64_t r = 0; r < rows; ++r) {
          const U* const of = static_cast<const U*>(x) + (i * s.block_rows + r) * depth;
          for (std::int64_t c = 0; c < columns; ++c) {
            const U* const with = static_cast<const U*>(y) + (k + c) * depth;
            block[r * s.block_cols + c] = static_cast<U>(dot(of, with, depth));
          }
        }
      }
      if (has_padding(s)) clear_padding(plan, i, values, sizeof(U));
    });
  });
  return {};
}

}  // namespace rarefy
