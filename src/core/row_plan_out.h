// Results by rows: tasks of block rows, and the row plan that a function writes for its caller.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/checked.h"
#include "core/message.h"
#include "core/plan_layout.h"
#include "rarefy/executor.h"

namespace rarefy {

// Calls each(begin, end, worker) for ranges of block rows, so many in a task that those have some 32 K of
// `entries`: 50 µs.
template <class Each>
void for_row_ranges(const Executor& executor, std::int64_t rows, std::int64_t entries, Each&& each) {
  const std::int64_t tasks = std::min(std::max<std::int64_t>(1, ceil_div(entries, 1 << 15)), rows);
  const std::int64_t per_task = rows == 0 ? 0 : ceil_div(rows, tasks);
  executor.parallel_for(tasks, [&](std::int64_t task, int worker) {
    each(std::min(rows, task * per_task), std::min(rows, (task + 1) * per_task), worker);
  });
}

// Calls each(i), or each(i, worker), for all block rows, in such tasks.
template <class Each>
void for_each_row(const Executor& executor, std::int64_t rows, std::int64_t entries, Each&& each) {
  for_row_ranges(executor, rows, entries, [&](std::int64_t begin, std::int64_t end, int worker) {
    for (std::int64_t i = begin; i < end; ++i) {
      if constexpr (std::is_invocable_v<Each&, std::int64_t, int>) {
        each(i, worker);
      } else {
        each(i);
      }
    }
  });
}

// For messages.
inline std::string sizes_text(const BsrShape& s) {
  return cat(s.rows, " × ", s.cols, " in blocks of ", s.block_rows, " × ", s.block_cols);
}

// Where the index of a result goes. Without `seal` it is no plan.
struct RowPlanOut {
  BsrShape shape;
  std::int32_t *words, *crow, *col;

  static Result<RowPlanOut> create(std::string_view op, const BsrShape& shape,
                                   std::span<std::int32_t> words) {
    if (std::ssize(words) != row_plan_size(shape)) {
      return invalid(op, cat("a row plan must have ", row_plan_size(shape), " elements for this pattern"),
                     cat(words.size()));
    }
    const PlanLayout layout(shape);
    return RowPlanOut{shape, words.data(), words.data() + layout.crow, words.data() + layout.col};
  }

  PlanView view() const { return {shape, crow, col}; }

  void seal() const {
    const PlanHeader header(shape);
    std::copy(std::begin(header.word), std::end(header.word), words);
  }
};

}  // namespace rarefy
