// What is done to the stored elements of a row at a time: softmax and its gradient.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/memory.h"
#include "core/message.h"
#include "core/padding.h"
#include "core/registry.h"
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

// The plain loops; those of an instruction set are in src/cpu/softmax.h.
template <class T>
void softmax_row(const StoredRow& row, const T* from, T* to) {
  constexpr T kLeast = -std::numeric_limits<T>::infinity();
  const auto each = [&](auto&& run) {
    for (std::int64_t p = 0; p < row.pieces; ++p) {
      const std::int64_t begin = p * row.stride;
      run(begin, begin + (p + 1 < row.pieces ? row.length : row.last));
    }
  };
  T most = kLeast;
  bool broken = false;  // NaN, which a maximum passes over
  each([&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; ++at) {
      most = std::max(most, from[at]);
      broken |= std::isnan(from[at]);
    }
  });
  if (broken) most = std::numeric_limits<T>::quiet_NaN();
  const bool empty = most == kLeast;
  double total = 0;
  each([&](std::int64_t begin, std::int64_t end) {
    T part = 0;
    for (std::int64_t at = begin; at < end; ++at) part += to[at] = empty ? T{0} : std::exp(from[at] - most);
    total += part;
  });
  const double scale = empty ? 0 : 1 / total;
  each([&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; ++at) to[at] = static_cast<T>(to[at] * scale);
  });
}

// Any row of block row i, without padding.
StoredRow stored_row(const PlanView& plan, std::int64_t i) {
  const BsrShape& s = plan.shape;
  const std::int64_t blocks = plan.crow[i + 1] - plan.crow[i];
  if (blocks == 0) return {0, 0, 0, 0};
  const std::int64_t last = std::min(s.block_cols, s.cols - plan.col[plan.crow[i + 1] - 1] * s.block_cols);
  if (s.block_rows == 1) return {1, 0, 0, (blocks - 1) * s.block_cols + last};
  return {blocks, s.block_cols, s.block_size(), last};
}

Status check_floats(std::string_view op, DType dtype) {
  if (dtype != DType::i8) return {};
  return mismatch(op, "values must be f64, f32, bf16 or f16", name(dtype));
}

}  // namespace

Status stored_softmax(std::string_view op, const BsrView& w, void* values, const Executor& executor) {
  if (Status status = check_floats(op, w.dtype); !status.ok()) return status;
  Status status;
  const BsrShape& s = w.plan.shape;
  const RowKernels* fast = chosen_row_kernels();
  visit_float(w.dtype, [&]<class T>(T) {
    using Sum = SumOf<T>;
    void (*softmax)(const StoredRow&, const Sum*, Sum*) = softmax_row<Sum>;
    if constexpr (std::is_same_v<Sum, float>) softmax = fast == nullptr ? softmax : fast->softmax;
    constexpr bool kWide = !std::is_same_v<T, Sum>;  // 16 bits, which would round twice
    const std::int64_t all = w.plan.crow[s.row_count()] * s.block_size();
    const Memory floats = aligned_memory(kWide ? all * static_cast<std::int64_t>(sizeof(Sum)) : 0);
    if (kWide && all > 0 && floats == nullptr) {
      status = error(StatusCode::out_of_memory, op, "its values must fit in memory as floats", cat(all));
      return;
    }
    executor.parallel_for(s.row_count(), [&](std::int64_t i) {
      const std::int64_t first = w.plan.crow[i] * s.block_size();
      const std::int64_t count = w.plan.crow[i + 1] * s.block_size() - first;
      const T* from = static_cast<const T*>(w.values) + first;
      T* to = static_cast<T*>(values) + first;
      const StoredRow row = stored_row(w.plan, i);
      const auto rows = [&](const Sum* read, Sum* write) {
        for (std::int64_t r = 0; r < std::min(s.block_rows, s.rows - i * s.block_rows); ++r) {
          softmax(row, read + r * s.block_cols, write + r * s.block_cols);
        }
      };
      if constexpr (std::is_same_v<T, Sum>) {
        rows(from, to);
      } else {
        Sum* wide = static_cast<Sum*>(floats.get()) + first;
        for (std::int64_t at = 0; at < count; ++at) wide[at] = static_cast<Sum>(load(from + at));
        rows(wide, wide);
        for (std::int64_t at = 0; at < count; ++at) store(to + at, wide[at]);
      }
      if (has_padding(s)) clear_padding(w.plan, i, values, sizeof(T));
    });
  });
  return status;
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

}  // namespace rarefy
