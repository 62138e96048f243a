// Row plans: the part of a plan that products by rows read, copied and checked at the speed of memory.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "core/checked.h"
#include "core/message.h"
#include "core/row_plan_out.h"
#include "rarefy/pattern.h"

namespace rarefy {

namespace {

constexpr std::int64_t kTaskIndices = 1 << 16;
constexpr std::int64_t kPiece = 2048;  // indices that are read again while they are in L1

bool valid_crow(const BsrShape& shape, const std::int32_t* crow) {
  bool valid = crow[0] == 0 && crow[shape.row_count()] == shape.nnzb;
  for (std::int64_t i = 0; i < shape.row_count(); ++i) valid &= crow[i] <= crow[i + 1];
  return valid;
}

// Copies the columns of rows [first, last) and says whether they ascend within [0, cols) in each row. What is
// looked at is the copy. Every fall must be at the start of a row: counted without a branch per index.
template <class Index>
bool copy_rows(const BsrShape& shape, const std::int32_t* crow, std::int64_t first, std::int64_t last,
               const Index* from, std::int32_t* to) {
  const std::int64_t begin = crow[first], end = crow[last];
  std::int64_t falls = 0;
  bool valid = true;
  for (std::int64_t piece = begin; piece < end; piece += kPiece) {
    const std::int64_t stop = std::min(piece + kPiece, end);
    if constexpr (sizeof(Index) == sizeof(std::int32_t)) {
      std::copy(from + piece, from + stop, to + piece);
    } else {
      std::int64_t high = 0;  // bits that a column in range does not have
      for (std::int64_t e = piece; e < stop; ++e) {
        const Index column = from[e];
        high |= column >> 31;
        to[e] = static_cast<std::int32_t>(column);
      }
      valid &= high == 0;
    }
    std::int32_t in_piece = 0;
    for (std::int64_t e = std::max(piece, begin + 1); e < stop; ++e) in_piece += to[e] <= to[e - 1] ? 1 : 0;
    falls += in_piece;
  }
  for (std::int64_t i = first; i < last; ++i) {
    const std::int32_t e = crow[i], stop = crow[i + 1];
    if (e == stop) continue;
    valid &= to[e] >= 0 && to[stop - 1] < shape.col_count();
    if (e > begin) falls -= to[e] <= to[e - 1] ? 1 : 0;
  }
  return valid && falls == 0;
}

template <class Index>
Status build(std::string_view op, const BsrShape& shape, std::span<const std::int32_t> crow_indices,
             std::span<const Index> col_indices, std::span<std::int32_t> plan, const Executor& executor) {
  if (Status status = check_index_sizes(op, shape, crow_indices.size(), col_indices.size()); !status.ok()) {
    return status;
  }
  const auto out = RowPlanOut::create(op, shape, plan);
  if (!out.ok()) return out.status();
  std::int32_t *crow = out->crow, *col = out->col;
  std::copy(crow_indices.begin(), crow_indices.end(), crow);
  std::atomic<bool> valid = valid_crow(shape, crow);
  if (valid) {
    // The rows of a task: those that begin among its indices.
    const auto row_of = [&](std::int64_t index) {
      return std::lower_bound(crow, crow + shape.row_count(), index) - crow;
    };
    const std::int64_t tasks = std::max<std::int64_t>(1, ceil_div(shape.nnzb, kTaskIndices));
    executor.parallel_for(tasks, [&](std::int64_t task) {
      const std::int64_t first = row_of(task * kTaskIndices);
      const std::int64_t last = task + 1 == tasks ? shape.row_count() : row_of((task + 1) * kTaskIndices);
      if (!copy_rows(shape, crow, first, last, col_indices.data(), col)) valid = false;
    });
  }
  if (!valid) {
    const std::vector<Index> rows(crow_indices.begin(), crow_indices.end());
    Status status = check_indices(op, shape, std::span<const Index>(rows), col_indices);
    return status.ok() ? invalid(op, "indices must not change during the call", "other ones") : status;
  }
  out->seal();
  return {};
}

bool equal(const std::int32_t* held, const std::int32_t* given, std::int64_t count) {
  return std::memcmp(held, given, static_cast<std::size_t>(count) * sizeof *given) == 0;
}

bool equal(const std::int32_t* held, const std::int64_t* given, std::int64_t count) {
  std::int64_t differing = 0;  // bits; no branch for each index
  for (std::int64_t e = 0; e < count; ++e) differing |= held[e] ^ given[e];
  return differing == 0;
}

template <class Index>
bool all_equal(std::span<const std::int32_t> held, std::span<const Index> given, const Executor& executor) {
  if (held.size() != given.size()) return false;
  const std::int64_t count = std::ssize(held);
  std::atomic<bool> same = true;
  executor.parallel_for(ceil_div(count, kTaskIndices), [&](std::int64_t task) {
    const std::int64_t end = std::min((task + 1) * kTaskIndices, count);
    for (std::int64_t e = task * kTaskIndices; e < end && same; e += kPiece) {
      if (!equal(held.data() + e, given.data() + e, std::min(kPiece, end - e))) same = false;
    }
  });
  return same;
}

}  // namespace

std::int64_t row_plan_size(const BsrShape& shape) { return PlanLayout(shape).ccol; }

Status build_row_plan(std::string_view op, const BsrShape& shape, std::span<const std::int32_t> crow_indices,
                      std::span<const std::int32_t> col_indices, std::span<std::int32_t> plan,
                      const Executor& executor) {
  return build(op, shape, crow_indices, col_indices, plan, executor);
}

Status build_row_plan(std::string_view op, const BsrShape& shape, std::span<const std::int32_t> crow_indices,
                      std::span<const std::int64_t> col_indices, std::span<std::int32_t> plan,
                      const Executor& executor) {
  return build(op, shape, crow_indices, col_indices, plan, executor);
}

bool equal_indices(std::span<const std::int32_t> held, std::span<const std::int32_t> given,
                   const Executor& executor) {
  return all_equal(held, given, executor);
}

bool equal_indices(std::span<const std::int32_t> held, std::span<const std::int64_t> given,
                   const Executor& executor) {
  return all_equal(held, given, executor);
}

}  // namespace rarefy
