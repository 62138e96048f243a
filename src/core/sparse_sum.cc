// Sums of two sparse matrices, merged row by row, and of a sparse and a dense one.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>

#include "core/elements.h"
#include "core/padding.h"
#include "core/row_plan_out.h"
#include "rarefy/sparse_structure.h"

namespace rarefy {

namespace {

Status check_alike(std::string_view op, const BsrShape& a, const BsrShape& b) {
  if (a.rows == b.rows && a.cols == b.cols && a.block_rows == b.block_rows && a.block_cols == b.block_cols)
    return {};
  return invalid(op, cat("b must be ", sizes_text(a), ", as a is"), sizes_text(b));
}

// Columns of a row, and how many come before.
struct Row {
  const std::int32_t *next, *end;
  std::int64_t first;

  Row(const PlanView& plan, std::int64_t i)
      : next(plan.col + plan.crow[i]), end(plan.col + plan.crow[i + 1]), first(plan.crow[i]) {}
};

// How many columns two rows have in common, by marks of the first's in as many bytes as there are columns,
// all zero before and after: nothing waits for anything, .3 ns a column where merging takes 2.
std::int64_t common(Row a, Row b, std::uint8_t* marks) {
  std::int64_t count = 0;
  for (const std::int32_t* c = a.next; c != a.end; ++c) marks[*c] = 1;
  for (const std::int32_t* c = b.next; c != b.end; ++c) count += marks[*c];
  for (const std::int32_t* c = a.next; c != a.end; ++c) marks[*c] = 0;
  return count;
}

// `value` or, without a branch, what adds nothing to any other: of floats −0, to which −0 adds up to −0.
template <class Sum>
Sum value_if(bool taken, Sum value) {
  if constexpr (std::is_floating_point_v<Sum>) {
    using Bits = std::conditional_t<sizeof(Sum) == 8, std::uint64_t, std::uint32_t>;
    const Bits mask = Bits{0} - Bits{taken}, bits = std::bit_cast<Bits>(value);
    return std::bit_cast<Sum>((bits & mask) | (std::bit_cast<Bits>(Sum{-0.0}) & ~mask));
  } else {
    return value & (Sum{0} - Sum{taken});
  }
}

// Row i of single elements. No step branches on which row is next: of random patterns half would be guessed
// wrong, 8 ns a step and not 2.
template <class T>
void add_elements(const BsrView& a, const BsrView& b, std::int64_t i, std::int32_t* col, T* out) {
  Row left(a.plan, i), right(b.plan, i);
  const T* x = static_cast<const T*>(a.values) + left.first;
  const T* y = static_cast<const T*>(b.values) + right.first;
  while (left.next != left.end && right.next != right.end) {
    const std::int32_t l = *left.next, r = *right.next;
    const bool of_left = l <= r, of_right = r <= l;
    *col++ = std::min(l, r);
    write(out++, static_cast<ElementSum<T>>(value_if(of_left, read(x)) + value_if(of_right, read(y))));
    left.next += of_left, x += of_left;
    right.next += of_right, y += of_right;
  }
  const std::int64_t more = left.end - left.next;
  std::copy(left.next, left.end, col);
  std::copy_n(x, more, out);
  std::copy(right.next, right.end, col + more);
  std::copy_n(y, right.end - right.next, out + more);
}

template <class T>
void add_blocks(const BsrView& a, const BsrView& b, std::int64_t i, std::int32_t* col, T* out) {
  const std::int64_t size = a.plan.shape.block_size();
  Row left(a.plan, i), right(b.plan, i);
  const T* x = static_cast<const T*>(a.values) + left.first * size;
  const T* y = static_cast<const T*>(b.values) + right.first * size;
  while (left.next != left.end || right.next != right.end) {
    constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
    const std::int32_t l = left.next != left.end ? *left.next : kNone;
    const std::int32_t r = right.next != right.end ? *right.next : kNone;
    *col++ = std::min(l, r);
    if (l == r) {
      for (std::int64_t n = 0; n < size; ++n) write(out + n, read(x + n) + read(y + n));
    } else {
      std::copy_n(l < r ? x : y, size, out);
    }
    if (l <= r) ++left.next, x += size;
    if (r <= l) ++right.next, y += size;
    out += size;
  }
}

// Block row i of Y = X + W.
template <class T>
void add_row(const MatrixView& x, const PlanView& plan, const T* values, std::int64_t i,
             const MutableMatrixView& y) {
  const BsrShape& s = plan.shape;
  const std::int64_t top = i * s.block_rows, rows = std::min(s.block_rows, s.rows - top);
  T* to = static_cast<T*>(y.data) + top * y.row_stride;
  if (x.data != y.data) {
    const T* from = static_cast<const T*>(x.data) + top * x.row_stride;
    for (std::int64_t r = 0; r < rows; ++r)
      std::copy_n(from + r * x.row_stride, s.cols, to + r * y.row_stride);
  }
  for (std::int64_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
    const std::int64_t first = plan.col[e] * s.block_cols, cols = std::min(s.block_cols, s.cols - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* from = values + (e * s.block_rows + r) * s.block_cols;
      T* row = to + r * y.row_stride + first;
      for (std::int64_t c = 0; c < cols; ++c) write(row + c, read(row + c) + read(from + c));
    }
  }
}

}  // namespace

Result<StoredRows> sum_rows(std::string_view op, const PlanView& a, const PlanView& b,
                            const Executor& executor) try {
  if (Status status = check_alike(op, a.shape, b.shape); !status.ok()) return status;
  StoredRows sum{a.shape, {}};
  const std::int64_t rows = a.shape.row_count();
  sum.crow.resize(static_cast<std::size_t>(rows + 1));
  std::vector<std::int32_t> shared(static_cast<std::size_t>(rows));
  std::vector<std::vector<std::uint8_t>> marks(static_cast<std::size_t>(executor.threads));
  for (auto& own : marks) own.resize(static_cast<std::size_t>(a.shape.col_count()));
  for_each_row(executor, rows, a.shape.nnzb + b.shape.nnzb, [&](std::int64_t i, int worker) {
    std::uint8_t* own = marks[static_cast<std::size_t>(worker)].data();
    shared[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(common(Row(a, i), Row(b, i), own));
  });
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    total += std::int64_t{a.crow[i + 1]} - a.crow[i] + b.crow[i + 1] - b.crow[i] -
             shared[static_cast<std::size_t>(i)];
    if (total > std::numeric_limits<std::int32_t>::max())
      return invalid(op, "the sum must have less than 2^31 blocks", cat("more, in ", i + 1, " block rows"));
    sum.crow[static_cast<std::size_t>(i + 1)] = static_cast<std::int32_t>(total);
  }
  sum.shape.nnzb = total;
  return sum;
} catch (const std::bad_alloc&) {
  return error(StatusCode::out_of_memory, op, "the sum must fit in memory", "an allocation failure");
}

Status write_sum(std::string_view op, const BsrView& a, const BsrView& b, const StoredRows& rows,
                 std::span<std::int32_t> row_plan, void* values, const Executor& executor, int integers) {
  if (Status status = check_alike(op, a.plan.shape, b.plan.shape); !status.ok()) return status;
  if (Status status = check_elements(op, a, b, integers); !status.ok()) return status;
  const auto out = RowPlanOut::create(op, rows.shape, row_plan);
  if (!out.ok()) return out.status();
  std::copy(rows.crow.begin(), rows.crow.end(), out->crow);
  const std::int64_t size = rows.shape.block_size();
  visit_elements(a.dtype, integers, [&]<class T>(T) {
    for_each_row(executor, rows.shape.row_count(), rows.shape.value_count(), [&](std::int64_t i) {
      std::int32_t* col = out->col + out->crow[i];
      T* sums = static_cast<T*>(values) + out->crow[i] * size;
      size == 1 ? add_elements<T>(a, b, i, col, sums) : add_blocks<T>(a, b, i, col, sums);
      if (has_padding(rows.shape)) clear_padding(out->view(), i, values, sizeof(T));
    });
  });
  out->seal();
  return {};
}

Status add_dense(std::string_view op, const MatrixView& x, const BsrView& w, const MutableMatrixView& y,
                 const Executor& executor, int integers) {
  const BsrShape& s = w.plan.shape;
  for (const MatrixView& dense : {x, static_cast<MatrixView>(y)}) {
    if (Status status = check_elements(op, {{}, nullptr, dense.dtype}, w, integers); !status.ok())
      return status;
    if (dense.rows == s.rows && dense.cols == s.cols && dense.col_stride == 1) continue;
    return invalid(op, cat("dense must be ", s.rows, " × ", s.cols, ", by rows"),
                   cat(dense.rows, " × ", dense.cols, ", columns ", dense.col_stride, " apart"));
  }
  if (y.row_stride < y.cols)
    return invalid(op, "rows of the sum must not overlap", cat(y.row_stride, " apart"));
  visit_elements(w.dtype, integers, [&]<class T>(T) {
    for_each_row(executor, s.row_count(), s.rows * s.cols,
                 [&](std::int64_t i) { add_row(x, w.plan, static_cast<const T*>(w.values), i, y); });
  });
  return {};
}

}  // namespace rarefy
