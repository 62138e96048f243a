// What is done to the stored elements of a row at a time: softmax and its gradient, products of integers.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/integers.h"
#include "core/message.h"
#include "core/padding.h"
#include "core/scalar.h"
#include "rarefy/sparse.h"

namespace rarefy {

namespace {

// Calls each(pointer offset, count) for the pieces of row n that lie in stored blocks, without padding.
template <class Each>
void for_each_piece(const PlanView& plan, std::int64_t n, Each&& each) {
  const BsrShape& s = plan.shape;
  const std::int64_t i = n / s.block_rows;
  for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
    const std::int64_t from = (e * s.block_rows + n % s.block_rows) * s.block_cols;
    each(from, std::min(s.block_cols, s.cols - plan.col[e] * s.block_cols));
  }
}

// Calls each(n) for all rows of the matrix, after the padding of theirs is zero.
template <class T, class Each>
void for_each_row(const PlanView& plan, T* values, const Executor& executor, Each&& each) {
  const BsrShape& s = plan.shape;
  executor.parallel_for(s.row_count(), [&](std::int64_t i) {
    if (has_padding(s)) clear_padding(plan, i, values, sizeof(T));
    for (std::int64_t n = i * s.block_rows; n < std::min(s.rows, (i + 1) * s.block_rows); ++n) each(n);
  });
}

template <class T>
void softmax_row(const PlanView& plan, std::int64_t n, const T* from, T* to) {
  using Sum = SumOf<T>;
  Sum most = -std::numeric_limits<Sum>::infinity();
  bool broken = false;  // NaN, which a maximum passes over
  for_each_piece(plan, n, [&](std::int64_t at, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c) {
      const auto v = static_cast<Sum>(load(from + at + c));
      most = std::max(most, v);
      broken |= std::isnan(v);
    }
  });
  if (broken) most = std::numeric_limits<Sum>::quiet_NaN();
  const bool empty = most == -std::numeric_limits<Sum>::infinity();
  const auto exponential = [&](const T* v) {
    return empty ? Sum{0} : std::exp(static_cast<Sum>(load(v)) - most);
  };
  constexpr bool kKeeps = std::is_same_v<T, Sum>;  // 16 bits would round twice
  double total = 0;
  for_each_piece(plan, n, [&](std::int64_t at, std::int64_t count) {
    Sum part = 0;
    for (std::int64_t c = at; c < at + count; ++c) {
      const Sum p = exponential(from + c);
      if constexpr (kKeeps) to[c] = p;
      part += p;
    }
    total += part;
  });
  const double scale = empty ? 0 : 1 / total;
  for_each_piece(plan, n, [&](std::int64_t at, std::int64_t count) {
    for (std::int64_t c = at; c < at + count; ++c) {
      if constexpr (kKeeps) {
        store(to + c, to[c] * scale);
      } else {
        store(to + c, exponential(from + c) * scale);
      }
    }
  });
}

template <class U>
void integer_row(const PlanView& plan, const U* x, const U* values, const U* bias, bool relu, std::int64_t n,
                 U* y) {
  U sum = bias == nullptr ? U{0} : bias[n];
  for_each_piece(plan, n, [&](std::int64_t at, std::int64_t count) {
    const std::int64_t k = plan.col[at / plan.shape.block_size()] * plan.shape.block_cols;
    for (std::int64_t c = 0; c < count; ++c) {
      // In 64 bits: two 16-bit factors would become signed ints, whose overflow is undefined.
      sum = static_cast<U>(sum + std::uint64_t{x[k + c]} * values[at + c]);
    }
  });
  y[n] = relu && static_cast<std::make_signed_t<U>>(sum) < 0 ? U{0} : sum;
}

Status check_floats(std::string_view op, DType dtype) {
  if (dtype != DType::i8) return {};
  return mismatch(op, "values must be f64, f32, bf16 or f16", name(dtype));
}

}  // namespace

Status stored_softmax(std::string_view op, const BsrView& w, void* values, const Executor& executor) {
  if (Status status = check_floats(op, w.dtype); !status.ok()) return status;
  visit_float(w.dtype, [&]<class T>(T) {
    T* to = static_cast<T*>(values);
    for_each_row(w.plan, to, executor,
                 [&](std::int64_t n) { softmax_row(w.plan, n, static_cast<const T*>(w.values), to); });
  });
  return {};
}

Status stored_softmax_gradient(std::string_view op, const BsrView& p, const void* gradient, void* values,
                               const Executor& executor) {
  if (Status status = check_floats(op, p.dtype); !status.ok()) return status;
  visit_float(p.dtype, [&]<class T>(T) {
    const T* of = static_cast<const T*>(p.values);
    const T* g = static_cast<const T*>(gradient);
    T* to = static_cast<T*>(values);
    for_each_row(p.plan, to, executor, [&](std::int64_t n) {
      double sum = 0;
      for_each_piece(p.plan, n, [&](std::int64_t at, std::int64_t count) {
        SumOf<T> part = 0;
        for (std::int64_t c = at; c < at + count; ++c)
          part += static_cast<SumOf<T>>(load(of + c)) * static_cast<SumOf<T>>(load(g + c));
        sum += part;
      });
      for_each_piece(p.plan, n, [&](std::int64_t at, std::int64_t count) {
        for (std::int64_t c = at; c < at + count; ++c) {
          const double stored = load(of + c);  // 0 · ∞ of an element that is masked is 0
          store(to + c, stored == 0 ? 0.0 : stored * (load(g + c) - sum));
        }
      });
    });
  });
  return {};
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
  const auto run = [&]<class U>(U) {
    executor.parallel_for(tokens, [&](std::int64_t m) {
      for (std::int64_t n = 0; n < s.rows; ++n) {
        integer_row(plan, static_cast<const U*>(x) + m * s.cols, static_cast<const U*>(values),
                    static_cast<const U*>(bias), activation == Activation::relu, n,
                    static_cast<U*>(y) + m * s.rows);
      }
    });
  };
  switch (bytes) {
    case 1: run(std::uint8_t{}); break;
    case 2: run(std::uint16_t{}); break;
    case 4: run(std::uint32_t{}); break;
    default: run(std::uint64_t{});
  }
  return {};
}

}  // namespace rarefy
