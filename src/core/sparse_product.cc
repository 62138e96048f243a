// Products of two sparse matrices, by rows (Gustavson's algorithm): the pattern, and the values on a pattern.
#include <algorithm>
#include <limits>
#include <new>
#include <span>

#include "core/checked.h"
#include "core/message.h"
#include "core/scalar.h"
#include "rarefy/sparse.h"

namespace rarefy {

namespace {

constexpr std::int64_t kTaskRows = 32;
// A row that stores one of so many columns is found in order by a look at all of them, others are sorted.
constexpr std::int64_t kSorting = 32;

Status check_operands(std::string_view op, const BsrShape& a, const BsrShape& b) {
  if (a.cols != b.rows)
    return invalid(op, cat("b must have ", a.cols, " rows, as a has columns"), cat(b.rows));
  if (a.block_cols == b.block_rows) return {};
  return invalid(op, cat("blocks of b must have ", a.block_cols, " rows, as those of a have columns"),
                 cat(b.block_rows));
}

Status too_large(std::string_view op) {
  return error(StatusCode::out_of_memory, op, "the product must fit in memory", "an allocation failure");
}

// Calls each(i, worker) for all block rows.
template <class Each>
void for_each_row(const Executor& executor, std::int64_t rows, Each&& each) {
  executor.parallel_for(ceil_div(rows, kTaskRows), [&](std::int64_t task, int worker) {
    const std::int64_t end = std::min(rows, (task + 1) * kTaskRows);
    for (std::int64_t i = task * kTaskRows; i < end; ++i) each(i, worker);
  });
}

// The block columns of a row of A B, each once, in the order in which they are met.
template <class Take>
void for_each_column(const PlanView& a, const PlanView& b, std::int64_t i, std::span<std::int32_t> last,
                     Take&& take) {
  for (std::int32_t e = a.crow[i]; e < a.crow[i + 1]; ++e) {
    for (std::int32_t f = b.crow[a.col[e]]; f < b.crow[a.col[e] + 1]; ++f) {
      std::int32_t& seen =
          last[static_cast<std::size_t>(b.col[f])];  // the last row that had this column, plus one
      if (seen == i + 1) continue;
      seen = static_cast<std::int32_t>(i + 1);
      take(b.col[f]);
    }
  }
}

// What a worker needs for the rows that it takes: where a column's block is, and sums.
template <class Sum>
struct Scratch {
  std::vector<std::int32_t> slot;
  std::vector<Sum> sums;
};

// A row of single elements.
template <class T>
void multiply_elements(const BsrView& a, const BsrView& b, std::int64_t i, Scratch<SumOf<T>>& scratch) {
  using Sum = SumOf<T>;
  const auto *left = static_cast<const T*>(a.values), *right = static_cast<const T*>(b.values);
  for (std::int32_t e = a.plan.crow[i]; e < a.plan.crow[i + 1]; ++e) {
    const auto x = static_cast<Sum>(load(left + e));
    const std::int32_t end = b.plan.crow[a.plan.col[e] + 1];
    for (std::int32_t f = b.plan.crow[a.plan.col[e]]; f < end; ++f) {
      const std::int32_t slot = scratch.slot[b.plan.col[f]];
      if (slot >= 0) scratch.sums[slot] += x * static_cast<Sum>(load(right + f));
    }
  }
}

// The blocks of one row of the product, in `sums`.
template <class T>
void multiply_row(const BsrView& a, const BsrView& b, const PlanView& c, std::int64_t i,
                  Scratch<SumOf<T>>& scratch) {
  using Sum = SumOf<T>;
  const BsrShape &sa = a.plan.shape, &sb = b.plan.shape, &sc = c.shape;
  const std::int64_t inner = sa.block_cols, size = sc.block_size();
  const std::int64_t rows = std::min(sc.block_rows, sc.rows - i * sc.block_rows);
  std::fill_n(scratch.sums.data(), (std::int64_t{c.crow[i + 1]} - c.crow[i]) * size, Sum{0});
  if (size == 1 && inner == 1) return multiply_elements<T>(a, b, i, scratch);
  for (std::int32_t e = a.plan.crow[i]; e < a.plan.crow[i + 1]; ++e) {
    const T* left = static_cast<const T*>(a.values) + e * sa.block_size();
    const std::int64_t k = a.plan.col[e];
    for (std::int32_t f = b.plan.crow[k]; f < b.plan.crow[k + 1]; ++f) {
      const std::int64_t j = b.plan.col[f];
      if (scratch.slot[j] < 0) continue;
      const T* right = static_cast<const T*>(b.values) + f * sb.block_size();
      Sum* sums = scratch.sums.data() + scratch.slot[j] * size;
      const std::int64_t cols = std::min(sc.block_cols, sc.cols - j * sc.block_cols);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t s = 0; s < std::min(inner, sa.cols - k * inner); ++s) {
          const auto x = static_cast<Sum>(load(left + r * inner + s));
          for (std::int64_t n = 0; n < cols; ++n) {
            sums[r * sc.block_cols + n] += x * static_cast<Sum>(load(right + s * sc.block_cols + n));
          }
        }
      }
    }
  }
}

template <class T>
void multiply(const BsrView& a, const BsrView& b, const PlanView& c, T* values, const Executor& executor) {
  const BsrShape& s = c.shape;
  std::int64_t most = 0;
  for (std::int64_t i = 0; i < s.row_count(); ++i)
    most = std::max<std::int64_t>(most, c.crow[i + 1] - c.crow[i]);
  std::vector<Scratch<SumOf<T>>> scratch(static_cast<std::size_t>(executor.threads));
  for (auto& own : scratch) {
    own.slot.assign(static_cast<std::size_t>(s.col_count()), -1);
    own.sums.resize(static_cast<std::size_t>(most * s.block_size()));
  }
  for_each_row(executor, s.row_count(), [&](std::int64_t i, int worker) {
    auto& own = scratch[static_cast<std::size_t>(worker)];
    const std::int32_t first = c.crow[i], end = c.crow[i + 1];
    for (std::int32_t e = first; e < end; ++e) own.slot[c.col[e]] = e - first;
    multiply_row<T>(a, b, c, i, own);
    for (std::int32_t e = first; e < end; ++e) own.slot[c.col[e]] = -1;
    T* out = values + first * s.block_size();
    for (std::int64_t n = 0; n < (std::int64_t{end} - first) * s.block_size(); ++n)
      store(out + n, own.sums[n]);
  });
}

}  // namespace

Result<Indices> product_pattern(std::string_view op, const PlanView& a, const PlanView& b,
                                const Executor& executor) try {
  if (Status status = check_operands(op, a.shape, b.shape); !status.ok()) return status;
  const std::int64_t rows = a.shape.row_count(), columns = b.shape.col_count();
  std::vector<std::vector<std::int32_t>> last(static_cast<std::size_t>(executor.threads));
  const auto forget = [&] {
    for (auto& own : last) own.assign(static_cast<std::size_t>(columns), 0);
  };
  forget();
  Indices c;
  c.crow.assign(static_cast<std::size_t>(rows + 1), 0);
  for_each_row(executor, rows, [&](std::int64_t i, int worker) {
    std::int32_t count = 0;
    for_each_column(a, b, i, last[static_cast<std::size_t>(worker)], [&](std::int32_t) { ++count; });
    c.crow[i + 1] = count;
  });
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    total += c.crow[i + 1];
    if (total > std::numeric_limits<std::int32_t>::max()) {
      return invalid(op, "the product must have less than 2^31 blocks",
                     cat("more, in ", i + 1, " block rows"));
    }
    c.crow[i + 1] = static_cast<std::int32_t>(total);
  }
  c.col.resize(static_cast<std::size_t>(total));
  forget();
  for_each_row(executor, rows, [&](std::int64_t i, int worker) {
    std::int32_t* to = c.col.data() + c.crow[i];
    const std::span<std::int32_t> own = last[static_cast<std::size_t>(worker)];
    if ((std::int64_t{c.crow[i + 1]} - c.crow[i]) * kSorting > columns) {
      for_each_column(a, b, i, own, [](std::int32_t) {});
      for (std::int32_t j = 0; j < columns; ++j) {
        if (own[static_cast<std::size_t>(j)] == i + 1) *to++ = j;
      }
    } else {
      for_each_column(a, b, i, own, [&](std::int32_t j) { *to++ = j; });
      std::sort(c.col.data() + c.crow[i], to);
    }
  });
  return c;
} catch (const std::bad_alloc&) {
  return too_large(op);
}

Status sampled_product(std::string_view op, const BsrView& a, const BsrView& b, const PlanView& pattern,
                       void* values, const Executor& executor) try {
  const BsrShape &sa = a.plan.shape, &sb = b.plan.shape, &sc = pattern.shape;
  if (Status status = check_operands(op, sa, sb); !status.ok()) return status;
  if (sc.rows != sa.rows || sc.cols != sb.cols || sc.block_rows != sa.block_rows ||
      sc.block_cols != sb.block_cols) {
    return invalid(op,
                   cat("the pattern must be of ", sa.rows, " × ", sb.cols, " in blocks of ", sa.block_rows,
                       " × ", sb.block_cols),
                   cat(sc.rows, " × ", sc.cols, " in blocks of ", sc.block_rows, " × ", sc.block_cols));
  }
  if (a.dtype != b.dtype) {
    return mismatch(op, "a and b must have one dtype", cat(name(a.dtype), " and ", name(b.dtype)));
  }
  if (a.dtype == DType::i8) return mismatch(op, "a and b must be f64, f32, bf16 or f16", name(a.dtype));
  visit_float(a.dtype, [&]<class T>(T) { multiply(a, b, pattern, static_cast<T*>(values), executor); });
  return {};
} catch (const std::bad_alloc&) {
  return too_large(op);
}

}  // namespace rarefy
