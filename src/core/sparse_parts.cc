// Parts of sparse matrices, several joined to one, and values on another pattern: blocks move, whole.
#include <algorithm>
#include <cstdint>
#include <new>

#include "core/integers.h"
#include "core/padding.h"
#include "core/row_plan_out.h"
#include "rarefy/sparse_structure.h"

namespace rarefy {

namespace {

Status check_range(std::string_view op, std::string_view what, const Range& range, std::int64_t size,
                   std::int64_t block) {
  if (range.begin < 0 || range.begin > range.end || range.end > size) {
    return invalid(op, cat(what, " must be a range within 0 … ", size), cat(range.begin, " … ", range.end));
  }
  for (const std::int64_t edge : {range.begin, range.end}) {
    if (edge % block == 0 || edge == size) continue;
    return invalid(op, cat(what, " must begin and end at a multiple of the block's ", block), cat(edge));
  }
  return {};
}

// A row's entries in a range of block columns.
struct Entries {
  std::int64_t begin, end;

  Entries(const PlanView& plan, std::int64_t i, std::int64_t low, std::int64_t high) {
    const std::int32_t *first = plan.col + plan.crow[i], *last = plan.col + plan.crow[i + 1];
    const std::int32_t* from = low == 0 ? first : std::lower_bound(first, last, low);
    begin = from - plan.col;
    end = (high == plan.shape.col_count() ? last : std::lower_bound(from, last, high)) - plan.col;
  }
};

// Block rows and columns that a slice takes.
struct Blocks {
  std::int64_t top, rows, left, right;

  Blocks(const BsrShape& s, const Range& of_rows, const Range& of_cols)
      : top(ceil_div(of_rows.begin, s.block_rows)),
        rows(ceil_div(of_rows.end, s.block_rows) - top),
        left(ceil_div(of_cols.begin, s.block_cols)),
        right(ceil_div(of_cols.end, s.block_cols)) {}

  Entries entries(const PlanView& w, std::int64_t i) const { return {w, top + i, left, right}; }
};

// Row i of `to` from row `at` of `from`.
template <class Word>
void move_row(const PlanView& from, std::int64_t at, const Word* values, const PlanView& to, std::int64_t i,
              std::int64_t offset, Word* out) {
  const std::int64_t size = to.shape.block_size();
  std::int64_t e = to.crow[i], f = 0, have = 0;
  const std::int64_t end = to.crow[i + 1];
  const auto column = [&](std::int64_t entry) { return to.col[entry] + offset; };  // in `from`
  if (at >= 0 && at < from.shape.row_count() && e < end) {
    f = std::lower_bound(from.col + from.crow[at], from.col + from.crow[at + 1], column(e)) - from.col;
    have = from.crow[at + 1];
  }
  while (e < end) {
    std::int64_t run = e;
    if (f == have || column(e) < from.col[f]) {  // nothing up to the next that is stored
      while (run < end && (f == have || column(run) < from.col[f])) ++run;
      std::fill(out + e * size, out + run * size, Word{0});
    } else if (column(e) == from.col[f]) {
      while (run < end && f + run - e < have && column(run) == from.col[f + run - e]) ++run;
      std::copy(values + f * size, values + (f + run - e) * size, out + e * size);
      f += run - e;
    } else {
      ++f;
    }
    e = run;
  }
}

std::int64_t& along(BsrShape& s, Side side) { return side == Side::below ? s.rows : s.cols; }

}  // namespace

Result<StoredRows> slice_rows(std::string_view op, const PlanView& w, const Range& rows, const Range& cols,
                              const Executor& executor) try {
  const BsrShape& s = w.shape;
  if (Status status = check_range(op, "rows", rows, s.rows, s.block_rows); !status.ok()) return status;
  if (Status status = check_range(op, "columns", cols, s.cols, s.block_cols); !status.ok()) return status;
  const Blocks blocks(s, rows, cols);
  StoredRows stored{{rows.end - rows.begin, cols.end - cols.begin, s.block_rows, s.block_cols, 0}, {}};
  stored.crow.resize(static_cast<std::size_t>(blocks.rows + 1));
  for_each_row(executor, blocks.rows, blocks.rows, [&](std::int64_t i) {
    const Entries entries = blocks.entries(w, i);
    stored.crow[static_cast<std::size_t>(i + 1)] = static_cast<std::int32_t>(entries.end - entries.begin);
  });
  for (std::int64_t i = 0; i < blocks.rows; ++i)
    stored.crow[static_cast<std::size_t>(i + 1)] += stored.crow[static_cast<std::size_t>(i)];
  stored.shape.nnzb = stored.crow.back();
  return stored;
} catch (const std::bad_alloc&) {
  return error(StatusCode::out_of_memory, op, "the index must fit in memory", "an allocation failure");
}

Status write_slice(std::string_view op, const PlanView& w, const void* values, int bytes, const Range& rows,
                   const Range& cols, const StoredRows& stored, std::span<std::int32_t> row_plan, void* out,
                   const Executor& executor) {
  if (Status status = check_element_bytes(op, bytes); !status.ok()) return status;
  const auto plan = RowPlanOut::create(op, stored.shape, row_plan);
  if (!plan.ok()) return plan.status();
  const Blocks blocks(w.shape, rows, cols);  // which slice_rows has checked
  const auto left = static_cast<std::int32_t>(blocks.left);
  const std::int64_t size = w.shape.block_size() * bytes;
  std::copy(stored.crow.begin(), stored.crow.end(), plan->crow);
  const auto* from = static_cast<const std::byte*>(values);
  for_each_row(executor, blocks.rows, stored.shape.value_count(), [&](std::int64_t i) {
    const Entries entries = blocks.entries(w, i);
    const std::int64_t first = plan->crow[i];
    std::transform(w.col + entries.begin, w.col + entries.end, plan->col + first,
                   [=](std::int32_t column) { return column - left; });
    std::copy(from + entries.begin * size, from + entries.end * size,
              static_cast<std::byte*>(out) + first * size);
    if (has_padding(stored.shape)) clear_padding(plan->view(), i, out, bytes);
  });
  plan->seal();
  return {};
}

Result<BsrShape> joined_shape(std::string_view op, std::span<const PlanView> parts, Side side) {
  if (parts.empty()) return invalid(op, "there must be at least one matrix", "0");
  BsrShape whole = parts.front().shape;
  const BsrShape one = whole;
  const Side across = side == Side::below ? Side::beside : Side::below;
  along(whole, side) = whole.nnzb = 0;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    BsrShape s = parts[p].shape, first = one;
    const auto refuse = [&](const auto& requirement, std::int64_t got) {
      return invalid(op, cat("matrices[", p, "] must ", requirement), cat(got));
    };
    const std::int64_t block = side == Side::below ? s.block_rows : s.block_cols;
    if (s.block_rows != one.block_rows || s.block_cols != one.block_cols) {
      return invalid(op,
                     cat("matrices[", p, "] must be in blocks of ", one.block_rows, " × ", one.block_cols),
                     cat(s.block_rows, " × ", s.block_cols));
    }
    if (along(s, across) != along(first, across)) {
      return refuse(cat("have ", along(first, across), side == Side::below ? " columns" : " rows"),
                    along(s, across));
    }
    if (p + 1 < parts.size() && along(s, side) % block != 0)
      return refuse(cat("end at a multiple of the block's ", block), along(s, side));
    along(whole, side) += along(s, side);
    whole.nnzb += s.nnzb;
  }
  if (Status status = check_shape(op, whole); !status.ok()) return status;
  return whole;
}

Status join(std::string_view op, std::span<const PlanView> parts, std::span<const void* const> values,
            int bytes, Side side, std::span<std::int32_t> row_plan, void* out, const Executor& executor) {
  if (Status status = check_element_bytes(op, bytes); !status.ok()) return status;
  if (values.size() != parts.size())
    return invalid(op, cat("there must be values of ", parts.size(), " matrices"), cat(values.size()));
  const auto shape = joined_shape(op, parts, side);
  if (!shape.ok()) return shape.status();
  const auto plan = RowPlanOut::create(op, *shape, row_plan);
  if (!plan.ok()) return plan.status();
  const std::int64_t size = shape->block_size() * bytes;
  plan->crow[0] = 0;
  std::int32_t* crow = plan->crow;
  if (side == Side::below) {
    for (const PlanView& part : parts) {
      for (std::int64_t i = 0; i < part.shape.row_count(); ++i, ++crow)
        crow[1] = crow[0] + part.crow[i + 1] - part.crow[i];
    }
  } else {
    for (std::int64_t i = 0; i < shape->row_count(); ++i, ++crow) {
      crow[1] = crow[0];
      for (const PlanView& part : parts) crow[1] += part.crow[i + 1] - part.crow[i];
    }
  }
  // Rows of a part, `at` entries into the result.
  const auto move = [&](std::size_t p, std::int64_t row, std::int64_t end_row, std::int64_t at,
                        std::int32_t shift) {
    const PlanView& part = parts[p];
    const std::int64_t first = part.crow[row], end = part.crow[end_row];
    std::transform(part.col + first, part.col + end, plan->col + at,
                   [=](std::int32_t c) { return c + shift; });
    const auto* from = static_cast<const std::byte*>(values[p]);
    std::copy(from + first * size, from + end * size, static_cast<std::byte*>(out) + at * size);
    return at + end - first;
  };
  if (side == Side::below) {
    std::int64_t top = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const std::int64_t rows = parts[p].shape.row_count();
      for_row_ranges(executor, rows, parts[p].shape.value_count(),
                     [&](std::int64_t begin, std::int64_t end, int) {
                       move(p, begin, end, plan->crow[top + begin], 0);
                     });
      top += rows;
    }
  } else {
    for_each_row(executor, shape->row_count(), shape->value_count(), [&](std::int64_t i) {
      std::int64_t at = plan->crow[i], shift = 0;
      for (std::size_t p = 0; p < parts.size(); ++p) {
        at = move(p, i, i + 1, at, static_cast<std::int32_t>(shift));
        shift += parts[p].shape.col_count();
      }
    });
  }
  if (has_padding(*shape)) {
    for_each_row(executor, shape->row_count(), shape->nnzb,
                 [&](std::int64_t i) { clear_padding(plan->view(), i, out, bytes); });
  }
  plan->seal();
  return {};
}

Status on_pattern(std::string_view op, const PlanView& from, const void* values, int bytes,
                  const PlanView& to, const Offset& offset, void* out, const Executor& executor) {
  if (Status status = check_element_bytes(op, bytes); !status.ok()) return status;
  const BsrShape &s = to.shape, &f = from.shape;
  if (s.block_rows != f.block_rows || s.block_cols != f.block_cols) {
    return invalid(op, cat("the pattern must be in blocks of ", f.block_rows, " × ", f.block_cols),
                   cat(s.block_rows, " × ", s.block_cols));
  }
  visit_integers(bytes, [&]<class Word>(Word) {
    for_each_row(executor, s.row_count(), s.value_count(), [&](std::int64_t i) {
      move_row(from, i + offset.rows, static_cast<const Word*>(values), to, i, offset.cols,
               static_cast<Word*>(out));
      if (has_padding(s)) clear_padding(to, i, out, bytes);
    });
  });
  return {};
}

}  // namespace rarefy
