// The entries of a plan sorted by column where rows hold runs of them in each bucket of columns: where a run
// ends is found once, while columns are counted, so that runs move whole and no branch of an entry is
// guessed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "rarefy/executor.h"
#include "rarefy/pattern.h"

namespace rarefy {

// Ranges of rows with equal shares of the entries: where the part-th begins.
inline std::int64_t first_row_of(const PlanView& plan, std::int64_t part, std::int64_t parts) {
  const BsrShape& s = plan.shape;
  const std::int32_t* end = plan.crow + s.row_count();
  return part == parts ? s.row_count() : std::lower_bound(plan.crow, end, s.nnzb * part / parts) - plan.crow;
}

// A bucket's columns take two lines each of L1 while it is sorted, 256 of them all of it; what is read comes
// in order, from L2 or L3.
constexpr int kMostRunColumns = 8;  // as a shift
constexpr std::int64_t kRunBucketEntries = 1 << 19;
constexpr std::int32_t kShortestRun = 8;
constexpr std::int64_t kPartEntries = 1 << 15, kPerColumn = 8;  // the fewest of a part

// Columns a bucket, as a shift; 0 where runs would be short, or a row and a column in its bucket no word.
inline int run_shift(const BsrShape& s) {
  for (int shift = kMostRunColumns; shift > 0; --shift) {
    const std::int64_t buckets = ceil_div(s.col_count(), std::int64_t{1} << shift);
    if (s.nnzb / buckets > kRunBucketEntries) continue;
    const bool fits = std::bit_width(static_cast<std::uint64_t>(s.row_count())) + shift < 32;
    return fits && s.nnzb / std::max<std::int64_t>(1, s.row_count()) / kShortestRun >= buckets ? shift : 0;
  }
  return 0;
}

// As sort_by_column (column_sort.h). Throws std::bad_alloc before it writes rows and words.
template <class Word, class WordOf>
void sort_runs_by_column(const PlanView& plan, int shift, std::int32_t* crow, std::int32_t* row, Word* word,
                         const Executor& executor, WordOf word_of) {
  const BsrShape& s = plan.shape;
  const std::int64_t columns = s.col_count(), width = std::int64_t{1} << shift;
  const std::int64_t buckets = ceil_div(columns, width);
  // The counts of a part must take less time than its entries.
  const std::int64_t parts =
      std::clamp<std::int64_t>(s.nnzb / std::max(kPartEntries, kPerColumn * columns), 1, executor.threads);
  const auto place = [](std::int64_t at) { return static_cast<std::size_t>(at); };

  // ends[i][b]: the entry after those of row i in bucket b. columns_of[part][c]: how many a part has.
  const auto ends = std::make_unique_for_overwrite<std::int32_t[]>(place(s.row_count() * buckets));
  std::vector<std::int32_t> columns_of(place(parts * columns), 0);
  executor.parallel_for(parts, [&](std::int64_t part) {
    std::int32_t* count = columns_of.data() + part * columns;
    for (std::int64_t i = first_row_of(plan, part, parts); i < first_row_of(plan, part + 1, parts); ++i) {
      std::int32_t e = plan.crow[i];
      const std::int32_t end = plan.crow[i + 1];
      for (std::int64_t b = 0; b < buckets; ++b) {
        const std::int64_t limit = (b + 1) * width;
        for (; end - e >= kShortestRun && plan.col[e + kShortestRun - 1] < limit; e += kShortestRun) {
          for (int j = 0; j < kShortestRun; ++j) ++count[plan.col[e + j]];  // columns of a row ascend
        }
        for (; e < end && plan.col[e] < limit; ++e) ++count[plan.col[e]];
        ends[place(i * buckets + b)] = e;
      }
    }
  });

  // Where columns begin, and where each part puts its entries of a bucket.
  std::vector<std::int32_t> next(place(parts * buckets), 0);
  std::int32_t at = 0, most = 0;
  for (std::int64_t b = 0; b < buckets; ++b) {
    const std::int32_t begin = at;
    for (std::int64_t c = b * width; c < std::min(columns, (b + 1) * width); ++c) {
      crow[c] = at;
      for (std::int64_t part = 0; part < parts; ++part) {
        at += columns_of[place(part * columns + c)];
        next[place(part * buckets + b)] += columns_of[place(part * columns + c)];
      }
    }
    std::int32_t to = begin;
    for (std::int64_t part = 0; part < parts; ++part) {
      to += std::exchange(next[place(part * buckets + b)], to);
    }
    most = std::max(most, at - begin);
  }
  crow[columns] = at;

  struct Scratch {
    std::unique_ptr<std::uint32_t[]> packed;
    std::unique_ptr<Word[]> word;
  };
  std::vector<Scratch> scratch(place(executor.threads));
  for (Scratch& own : scratch) {
    own.packed = std::make_unique_for_overwrite<std::uint32_t[]>(place(most));
    own.word = std::make_unique_for_overwrite<Word[]>(place(most));
  }
  // To its bucket: a row in the low bits, above it the column within the bucket.
  const auto row_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(s.row_count())));
  executor.parallel_for(parts, [&](std::int64_t part) {
    std::int32_t* own = next.data() + part * buckets;
    for (std::int64_t i = first_row_of(plan, part, parts); i < first_row_of(plan, part + 1, parts); ++i) {
      std::int32_t e = plan.crow[i];
      for (std::int64_t b = 0; b < buckets; ++b) {
        const std::int32_t count = ends[place(i * buckets + b)] - e,
                           to = std::exchange(own[b], own[b] + count);
        for (std::int32_t j = 0; j < count; ++j) {
          const std::int64_t local = plan.col[e + j] & (width - 1);
          row[to + j] = static_cast<std::int32_t>(i | local << row_bits);
        }
        for (std::int32_t j = 0; j < count; ++j) word[to + j] = word_of(e + j);
        // Where this bucket's next run goes: no hardware follows so many streams (1.7 → 1.4 ns an entry).
        for (const std::int32_t line : {16, 32}) {
          __builtin_prefetch(row + to + count + line, 1);
          __builtin_prefetch(word + to + count + line, 1);
        }
        e += count;
      }
    }
  });
  // From there to its column.
  executor.parallel_for(buckets, [&](std::int64_t b, int worker) {
    Scratch& own = scratch[place(worker)];
    const std::int64_t first = b * width, end = std::min(columns, first + width);
    const std::int32_t begin = crow[first], count = crow[end] - begin;
    std::copy_n(row + begin, count, own.packed.get());
    std::copy_n(word + begin, count, own.word.get());
    std::int32_t to_column[1 << kMostRunColumns];
    std::copy(crow + first, crow + end, to_column);
    for (std::int32_t e = 0; e < count; ++e) {
      const std::uint32_t packed = own.packed[place(e)];
      const std::int32_t to = to_column[packed >> row_bits]++;
      row[to] = static_cast<std::int32_t>(packed & ((1U << row_bits) - 1));
      word[to] = own.word[place(e)];
    }
  });
}

}  // namespace rarefy
