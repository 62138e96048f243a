// The transposed matrix: its row plan and its values, on all threads.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "core/checked.h"
#include "core/column_sort.h"
#include "core/integers.h"
#include "core/message.h"
#include "core/row_plan_out.h"
#include "rarefy/sparse.h"

namespace rarefy {

namespace {

constexpr std::int64_t kTaskEntries = 1 << 15;

// Calls each(begin, end) for ranges of entries.
template <class Each>
void for_entries(const Executor& executor, std::int64_t entries, std::int64_t per_task, Each&& each) {
  executor.parallel_for(ceil_div(entries, per_task), [&](std::int64_t task) {
    each(task * per_task, std::min(entries, (task + 1) * per_task));
  });
}

// Block number perm[e] of `from`, (R, C), becomes block e of `to`, (C, R).
template <class Word>
void move_blocks(const BsrShape& s, const std::int32_t* perm, const Word* from, Word* to,
                 const Executor& executor) {
  const std::int64_t r = s.block_rows, c = s.block_cols, size = s.block_size();
  for_entries(executor, s.nnzb, std::max<std::int64_t>(1, kTaskEntries / size),
              [&](std::int64_t begin, std::int64_t end) {
                if (size == 1) {
                  for (std::int64_t e = begin; e < end; ++e) to[e] = from[perm[e]];
                  return;
                }
                for (std::int64_t e = begin; e < end; ++e) {
                  const Word* block = from + perm[e] * size;
                  Word* moved = to + e * size;
                  for (std::int64_t j = 0; j < c; ++j) {
                    for (std::int64_t i = 0; i < r; ++i) moved[j * r + i] = block[i * c + j];
                  }
                }
              });
}

template <class Word>
void transpose_as(const PlanView& plan, const Word* values, std::int32_t* crow, std::int32_t* col, Word* out,
                  const Executor& executor) {
  const BsrShape& s = plan.shape;
  if (plan.perm != nullptr) {
    std::copy_n(plan.ccol, s.col_count() + 1, crow);
    for_entries(executor, s.nnzb, kTaskEntries, [&](std::int64_t begin, std::int64_t end) {
      std::copy(plan.row + begin, plan.row + end, col + begin);
    });
    return move_blocks(s, plan.perm, values, out, executor);
  }
  if (s.block_size() == 1) {
    return sort_by_column(plan, crow, col, out, executor, [=](std::int32_t e) { return values[e]; });
  }
  std::vector<std::int32_t> perm(static_cast<std::size_t>(s.nnzb));
  sort_by_column(plan, crow, col, perm.data(), executor, [](std::int32_t e) { return e; });
  move_blocks(s, perm.data(), values, out, executor);
}

}  // namespace

Status transpose(std::string_view op, const PlanView& plan, const void* values, int bytes,
                 std::span<std::int32_t> row_plan, void* out, const Executor& executor) try {
  const BsrShape& s = plan.shape;
  const BsrShape shape{s.cols, s.rows, s.block_cols, s.block_rows, s.nnzb};
  const auto turned = RowPlanOut::create(op, shape, row_plan);
  if (!turned.ok()) return turned.status();
  if (Status status = check_element_bytes(op, bytes); !status.ok()) return status;
  visit_integers(bytes, [&]<class Word>(Word) {
    transpose_as(plan, static_cast<const Word*>(values), turned->crow, turned->col, static_cast<Word*>(out),
                 executor);
  });
  turned->seal();
  return {};
} catch (const std::bad_alloc&) {
  return error(StatusCode::out_of_memory, op, "the transposed index must fit in memory",
               "an allocation failure");
}

}  // namespace rarefy
