// Products of two sparse matrices, by rows (Gustavson's algorithm): all that may differ from zero, and the
// values on a pattern.
#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/elements.h"
#include "core/message.h"
#include "core/row_plan_out.h"
#include "rarefy/sparse.h"

namespace rarefy {

namespace {

constexpr std::int64_t kTaskRows = 32;

Status check_operands(std::string_view op, const BsrView& left, const BsrView& right, int integers) {
  const BsrShape &a = left.plan.shape, &b = right.plan.shape;
  if (Status status = check_elements(op, left, right, integers); !status.ok()) return status;
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

// A set of columns: a bit each, and a bit for each word of those. L1 holds it where an array of columns is in
// L2, and what is in it comes out in order, without sorting.
class ColumnSet {
 public:
  explicit ColumnSet(std::int64_t columns)
      : words_(static_cast<std::size_t>(ceil_div(columns, 64)), 0), filled_((words_.size() + 63) / 64, 0) {}

  void insert(std::int32_t column) {
    const auto c = static_cast<std::uint32_t>(column);
    words_[c / 64] |= std::uint64_t{1} << c % 64;
    filled_[c / 4096] |= std::uint64_t{1} << c / 64 % 64;
    low_ = std::min(low_, std::size_t{c / 4096});
    high_ = std::max(high_, std::size_t{c / 4096} + 1);
  }

  // Writes the columns to `to`, in order, empties the set, and says where they end.
  std::int32_t* drain(std::int32_t* to) {
    for (std::size_t f = low_; f < high_; ++f) {
      for (std::uint64_t left = std::exchange(filled_[f], 0); left != 0; left &= left - 1) {
        const std::size_t w = f * 64 + static_cast<std::size_t>(std::countr_zero(left));
        for (std::uint64_t word = std::exchange(words_[w], 0); word != 0; word &= word - 1) {
          *to++ = static_cast<std::int32_t>(w * 64) + std::countr_zero(word);
        }
      }
    }
    low_ = filled_.size();
    high_ = 0;
    return to;
  }

 private:
  std::vector<std::uint64_t> words_, filled_;
  std::size_t low_ = filled_.size(), high_ = 0;  // of `filled_`, what an emptying looks at
};

// What a worker needs for the rows that it takes: where a column's block is, and sums.
template <class Sum>
struct Scratch {
  std::vector<std::int32_t> slot;
  std::vector<Sum> sums;
};

// A row of single elements.
template <class T>
void multiply_elements(const BsrView& a, const BsrView& b, std::int64_t i, Scratch<ElementSum<T>>& scratch) {
  using Sum = ElementSum<T>;
  const auto *left = static_cast<const T*>(a.values), *right = static_cast<const T*>(b.values);
  for (std::int32_t e = a.plan.crow[i]; e < a.plan.crow[i + 1]; ++e) {
    const Sum x = read(left + e);
    const std::int32_t end = b.plan.crow[a.plan.col[e] + 1];
    for (std::int32_t f = b.plan.crow[a.plan.col[e]]; f < end; ++f) {
      const std::int32_t slot = scratch.slot[b.plan.col[f]];
      if (slot >= 0) scratch.sums[slot] += x * read(right + f);
    }
  }
}

// The blocks of one row of the product, in `sums`.
template <class T>
void multiply_row(const BsrView& a, const BsrView& b, const PlanView& c, std::int64_t i,
                  Scratch<ElementSum<T>>& scratch) {
  using Sum = ElementSum<T>;
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
          const Sum x = read(left + r * inner + s);
          for (std::int64_t n = 0; n < cols; ++n) {
            sums[r * sc.block_cols + n] += x * read(right + s * sc.block_cols + n);
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
  std::vector<Scratch<ElementSum<T>>> scratch(static_cast<std::size_t>(executor.threads));
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
      write(out + n, own.sums[n]);
  });
}

// What a worker needs to find rows of the product: columns met, the same in order, sums of single elements.
template <class Sum>
struct Finder {
  ColumnSet met;
  std::vector<std::int32_t> columns;
  std::vector<Sum> sums;

  Finder(std::int64_t count, bool elements)
      : met(count),
        columns(static_cast<std::size_t>(count)),
        sums(elements ? static_cast<std::size_t>(count) : 0, Sum{0}) {}
};

// Row i of A B at the end of `to`: its columns, and its values where blocks are single elements.
template <class T>
void append_row(const BsrView& a, const BsrView& b, std::int64_t i, Finder<ElementSum<T>>& own,
                SparseProduct::Piece& to) {
  using Sum = ElementSum<T>;
  const auto *left = static_cast<const T*>(a.values), *right = static_cast<const T*>(b.values);
  const bool elements = !own.sums.empty();
  for (std::int32_t e = a.plan.crow[i]; e < a.plan.crow[i + 1]; ++e) {
    const std::int32_t k = a.plan.col[e], end = b.plan.crow[k + 1];
    if (!elements) {
      for (std::int32_t f = b.plan.crow[k]; f < end; ++f) own.met.insert(b.plan.col[f]);
      continue;
    }
    const Sum x = read(left + e);
    for (std::int32_t f = b.plan.crow[k]; f < end; ++f) {
      own.met.insert(b.plan.col[f]);
      own.sums[static_cast<std::size_t>(b.plan.col[f])] += x * read(right + f);
    }
  }
  const std::span<const std::int32_t> found(own.columns.data(), own.met.drain(own.columns.data()));
  to.col.insert(to.col.end(), found.begin(), found.end());
  if (!elements) return;
  const std::size_t size = to.values.size();
  to.values.resize(size + found.size() * sizeof(T));
  T* values = reinterpret_cast<T*>(to.values.data() + size);
  for (const std::int32_t c : found)
    write(values++, std::exchange(own.sums[static_cast<std::size_t>(c)], Sum{0}));
}

template <class T>
void find(const BsrView& a, const BsrView& b, SparseProduct& product, const Executor& executor) {
  const bool elements = product.shape.block_size() == 1 && a.plan.shape.block_cols == 1;
  std::vector<Finder<ElementSum<T>>> finders(static_cast<std::size_t>(executor.threads),
                                             {product.shape.col_count(), elements});
  std::atomic<bool> failed = false;
  for_each_row(executor, product.shape.row_count(), [&](std::int64_t i, int worker) {
    SparseProduct::Piece& piece = product.pieces[static_cast<std::size_t>(i / kTaskRows)];
    const std::size_t before = piece.col.size();
    try {  // threads of another executor may have nobody to catch it
      append_row<T>(a, b, i, finders[static_cast<std::size_t>(worker)], piece);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    product.crow[static_cast<std::size_t>(i + 1)] = static_cast<std::int32_t>(piece.col.size() - before);
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace

Result<SparseProduct> sparse_product(std::string_view op, const BsrView& a, const BsrView& b,
                                     const Executor& executor, int integers) try {
  const BsrShape &sa = a.plan.shape, &sb = b.plan.shape;
  if (Status status = check_operands(op, a, b, integers); !status.ok()) return status;
  SparseProduct product{{sa.rows, sb.cols, sa.block_rows, sb.block_cols, 0}, {}, {}};
  const std::int64_t rows = product.shape.row_count();
  product.crow.assign(static_cast<std::size_t>(rows + 1), 0);
  product.pieces.resize(static_cast<std::size_t>(ceil_div(rows, kTaskRows)));
  visit_elements(a.dtype, integers, [&]<class T>(T) { find<T>(a, b, product, executor); });
  for (std::int64_t i = 0; i < rows; ++i) {
    product.shape.nnzb += product.crow[i + 1];
    if (product.shape.nnzb > std::numeric_limits<std::int32_t>::max()) {
      return invalid(op, "the product must have less than 2^31 blocks",
                     cat("more, in ", i + 1, " block rows"));
    }
    product.crow[i + 1] = static_cast<std::int32_t>(product.shape.nnzb);
  }
  return product;
} catch (const std::bad_alloc&) {
  return too_large(op);
}

Status write_product(std::string_view op, const BsrView& a, const BsrView& b, const SparseProduct& product,
                     std::span<std::int32_t> row_plan, void* values, const Executor& executor, int integers) {
  const BsrShape& s = product.shape;
  const std::int64_t bytes = integers == 0 ? static_cast<std::int64_t>(size_of(a.dtype)) : integers;
  const auto out = RowPlanOut::create(op, s, row_plan);
  if (!out.ok()) return out.status();
  std::copy(product.crow.begin(), product.crow.end(), out->crow);
  executor.parallel_for(std::ssize(product.pieces), [&](std::int64_t task) {
    const SparseProduct::Piece& piece = product.pieces[static_cast<std::size_t>(task)];
    const std::int64_t first = out->crow[task * kTaskRows];
    std::copy(piece.col.begin(), piece.col.end(), out->col + first);
    std::copy(piece.values.begin(), piece.values.end(), static_cast<std::byte*>(values) + first * bytes);
  });
  out->seal();
  if (s.block_size() == 1 && a.plan.shape.block_cols == 1) return {};
  return sampled_product(op, a, b, out->view(), values, executor, integers);
}

Status sampled_product(std::string_view op, const BsrView& a, const BsrView& b, const PlanView& pattern,
                       void* values, const Executor& executor, int integers) try {
  const BsrShape &sa = a.plan.shape, &sb = b.plan.shape, &sc = pattern.shape;
  if (Status status = check_operands(op, a, b, integers); !status.ok()) return status;
  if (sc.rows != sa.rows || sc.cols != sb.cols || sc.block_rows != sa.block_rows ||
      sc.block_cols != sb.block_cols) {
    return invalid(
        op, cat("the pattern must be of ", sizes_text({sa.rows, sb.cols, sa.block_rows, sb.block_cols})),
        sizes_text(sc));
  }
  visit_elements(a.dtype, integers,
                 [&]<class T>(T) { multiply(a, b, pattern, static_cast<T*>(values), executor); });
  return {};
} catch (const std::bad_alloc&) {
  return too_large(op);
}

}  // namespace rarefy
