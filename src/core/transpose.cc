// The transposed matrix: its row plan and its values, on all threads.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "core/checked.h"
#include "core/message.h"
#include "core/plan_layout.h"
#include "rarefy/sparse.h"

namespace rarefy {

namespace {

constexpr std::int64_t kTaskEntries = 1 << 15;
// Columns that are written to at a time: two open lines each, which L1 holds (stores that miss it wait for
// one another: 10 ns an entry instead of 5). Runs of a row in a stripe are at least kRun entries long, as
// each costs a mispredicted branch, and are read kAhead rows early: nothing else foresees where a row goes
// on.
constexpr std::int64_t kStripe = 256;
constexpr std::int64_t kRun = 16;
constexpr std::int64_t kAhead = 8;

// Calls each(begin, end) for ranges of entries.
template <class Each>
void for_entries(const Executor& executor, std::int64_t entries, std::int64_t per_task, Each&& each) {
  executor.parallel_for(ceil_div(entries, per_task), [&](std::int64_t task) {
    each(task * per_task, std::min(entries, (task + 1) * per_task));
  });
}

std::int64_t stripe_of(const BsrShape& s) {
  const auto rows = static_cast<double>(s.row_count()), columns = static_cast<double>(s.col_count());
  const double run = kRun * rows * columns / static_cast<double>(std::max<std::int64_t>(1, s.nnzb));
  return std::max(kStripe, static_cast<std::int64_t>(std::min(run, columns)));
}

// A stable counting sort by column: crow and col of the result; put(at, e) puts entry e there, ahead(e) is a
// hint. Threads count ranges of entries, then each writes columns of its own, a stripe of them at a time
// through all rows.
template <class Put, class Ahead>
void sort_by_column(const PlanView& plan, std::int32_t* crow, std::int32_t* col, const Executor& executor,
                    Put put, Ahead ahead) {
  const BsrShape& s = plan.shape;
  const std::int64_t rows = s.row_count(), columns = s.col_count(), entries = s.nnzb;
  const std::int64_t parts =
      std::clamp<std::int64_t>(entries / std::max({kTaskEntries, rows, columns}), 1, executor.threads);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(parts * columns));
  executor.parallel_for(parts, [&](std::int64_t part) {
    std::int32_t* count = counts.data() + part * columns;
    const std::int64_t end = entries * (part + 1) / parts;
    for (std::int64_t e = entries * part / parts; e < end; ++e) ++count[plan.col[e]];
  });
  crow[0] = 0;
  for (std::int64_t c = 0; c < columns; ++c) {
    std::int32_t count = 0;
    for (std::int64_t part = 0; part < parts; ++part) count += counts[part * columns + c];
    crow[c + 1] = crow[c] + count;
  }
  const std::int64_t stripe = stripe_of(s);
  executor.parallel_for(parts, [&](std::int64_t part) {
    const auto column_of = [&](std::int64_t entry) {
      return std::lower_bound(crow, crow + columns, entry) - crow;
    };
    const std::int64_t first = part == 0 ? 0 : column_of(entries * part / parts);
    const std::int64_t last = part + 1 == parts ? columns : column_of(entries * (part + 1) / parts);
    std::vector<std::int32_t> next(crow + first, crow + last);
    std::vector<std::int32_t> from(plan.crow, plan.crow + rows);  // where each row goes on
    if (first > 0) {
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int32_t *begin = plan.col + plan.crow[i], *end = plan.col + plan.crow[i + 1];
        from[i] = static_cast<std::int32_t>(std::lower_bound(begin, end, first) - plan.col);
      }
    }
    for (std::int64_t begin = first; begin < last; begin += stripe) {
      const std::int64_t end = std::min(begin + stripe, last);
      for (std::int64_t i = 0; i < rows; ++i) {
        if (i + kAhead < rows) {
          __builtin_prefetch(plan.col + from[i + kAhead]);
          ahead(from[i + kAhead]);
        }
        std::int32_t e = from[i];
        for (const std::int32_t stop = plan.crow[i + 1]; e < stop && plan.col[e] < end; ++e) {
          const std::int32_t at = next[plan.col[e] - first]++;
          col[at] = static_cast<std::int32_t>(i);
          put(at, e);
        }
        from[i] = e;
      }
    }
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
    return sort_by_column(
        plan, crow, col, executor, [=](std::int32_t at, std::int32_t e) { out[at] = values[e]; },
        [=](std::int32_t e) { __builtin_prefetch(values + e); });
  }
  std::vector<std::int32_t> perm(static_cast<std::size_t>(s.nnzb));
  sort_by_column(
      plan, crow, col, executor, [&](std::int32_t at, std::int32_t e) { perm[at] = e; }, [](std::int32_t) {});
  move_blocks(s, perm.data(), values, out, executor);
}

}  // namespace

Status transpose(std::string_view op, const PlanView& plan, const void* values, int bytes,
                 std::span<std::int32_t> row_plan, void* out, const Executor& executor) try {
  const BsrShape& s = plan.shape;
  const BsrShape shape{s.cols, s.rows, s.block_cols, s.block_rows, s.nnzb};
  if (static_cast<std::int64_t>(row_plan.size()) != row_plan_size(shape)) {
    return invalid(op, cat("a row plan must have ", row_plan_size(shape), " elements for this pattern"),
                   cat(row_plan.size()));
  }
  const PlanLayout layout(shape);
  std::int32_t *crow = row_plan.data() + layout.crow, *col = row_plan.data() + layout.col;
  const auto as = [&]<class Word>(Word) {
    transpose_as(plan, static_cast<const Word*>(values), crow, col, static_cast<Word*>(out), executor);
  };
  switch (bytes) {
    case 1: as(std::uint8_t{}); break;
    case 2: as(std::uint16_t{}); break;
    case 4: as(std::uint32_t{}); break;
    case 8: as(std::uint64_t{}); break;
    default: return invalid(op, "an element must have 1, 2, 4 or 8 bytes", cat(bytes));
  }
  const PlanHeader header(shape);
  std::copy(std::begin(header.word), std::end(header.word), row_plan.data());
  return {};
} catch (const std::bad_alloc&) {
  return error(StatusCode::out_of_memory, op, "the transposed index must fit in memory",
               "an allocation failure");
}

}  // namespace rarefy
