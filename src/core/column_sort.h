// The entries of a plan sorted by column, each with a word of its own, on all threads: a stable radix sort in
// two passes. The first moves entries to their bucket of columns, the second sorts a bucket, which L2 holds.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/column_runs.h"
#include "rarefy/executor.h"
#include "rarefy/pattern.h"

namespace rarefy {

// Buckets of 32 K entries take some 300 KB of L2. Of 256 buckets the first pass writes to three lines each,
// which L2 and its TLB hold: with 490 it took 7.5 ns an entry where rows have ten, with 245 2.8 (Zen 4). So
// few entries as one bucket has are put into place at once.
constexpr std::int64_t kBucketEntries = 1 << 15;
constexpr std::int64_t kBuckets = 256;
constexpr int kLargestShift = 16;  // a column within its bucket is 16 bits

// Columns a bucket, as a shift.
inline int bucket_shift(const BsrShape& s) {
  const std::int64_t buckets = std::clamp<std::int64_t>(s.nnzb / kBucketEntries, 1, kBuckets);
  int shift = 0;
  while (shift < kLargestShift && ceil_div(s.col_count(), std::int64_t{1} << shift) > buckets) ++shift;
  return shift;
}

// crow, col_count() + 1 words, and row, nnzb, of the transposed pattern; word[at] = word_of(e) where entry e
// goes.
template <class Word, class WordOf>
void sort_at_once(const PlanView& plan, std::int32_t* crow, std::int32_t* row, Word* word, WordOf word_of) {
  const std::int64_t columns = plan.shape.col_count();
  std::fill(crow, crow + columns + 1, 0);
  for (std::int64_t e = 0; e < plan.shape.nnzb; ++e) ++crow[plan.col[e] + 1];
  for (std::int64_t c = 0; c < columns; ++c) crow[c + 1] += crow[c];
  // crow[c] is the next free entry of column c while filling, and its end afterwards: shift back.
  for (std::int64_t i = 0; i < plan.shape.row_count(); ++i) {
    for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      const std::int32_t at = crow[plan.col[e]]++;
      row[at] = static_cast<std::int32_t>(i);
      word[at] = word_of(e);
    }
  }
  std::copy_backward(crow, crow + columns, crow + columns + 1);
  crow[0] = 0;
}

// Where an entry's column within its bucket waits between the passes: above the row, in the same word. Beside
// it in an array, where both do not fit, it is a third stream to each bucket (Zen 5, 10⁷ entries: 47 for 43
// ms).
struct AboveRow {
  int row_bits;
  std::int32_t join(std::int64_t row, std::int32_t column, std::int32_t /*at*/) const {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(row) | static_cast<std::uint32_t>(column)
                                                                           << row_bits);
  }
  std::uint32_t column(std::int32_t word, std::int32_t /*at*/) const {
    return static_cast<std::uint32_t>(word) >> row_bits;
  }
  std::int32_t row(std::int32_t word) const { return word & static_cast<std::int32_t>((1U << row_bits) - 1); }
};
struct BesideRow {
  std::uint16_t* columns;
  std::int32_t join(std::int64_t row, std::int32_t column, std::int32_t at) const {
    columns[at] = static_cast<std::uint16_t>(column);
    return static_cast<std::int32_t>(row);
  }
  std::uint32_t column(std::int32_t /*word*/, std::int32_t at) const { return columns[at]; }
  static std::int32_t row(std::int32_t word) { return word; }
};

// What a thread keeps of a bucket while it sorts it.
template <class Word>
struct Bucket {
  std::unique_ptr<std::int32_t[]> row, next;
  std::unique_ptr<Word[]> word;

  Bucket(std::int64_t entries, std::int64_t columns)
      : row(std::make_unique_for_overwrite<std::int32_t[]>(static_cast<std::size_t>(entries))),
        next(std::make_unique_for_overwrite<std::int32_t[]>(static_cast<std::size_t>(columns))),
        word(std::make_unique_for_overwrite<Word[]>(static_cast<std::size_t>(entries))) {}

  // Sorts entries begin … end by their columns in the bucket, and says where each column begins.
  template <class Columns>
  void sort(Columns columns, std::int32_t begin, std::int32_t end, std::span<std::int32_t> crow,
            std::int32_t* rows, Word* words) {
    std::fill_n(next.get(), crow.size(), 0);
    for (std::int32_t e = begin; e < end; ++e) {
      row[static_cast<std::size_t>(e - begin)] = rows[e];
      ++next[columns.column(rows[e], e)];
    }
    std::copy(words + begin, words + end, word.get());
    std::int32_t at = begin;
    for (std::size_t c = 0; c < crow.size(); ++c) {
      crow[c] = at;
      at += std::exchange(next[c], at);
    }
    for (std::int32_t e = begin; e < end; ++e) {
      const auto from = static_cast<std::size_t>(e - begin);
      const std::int32_t to = next[columns.column(row[from], e)]++;
      rows[to] = columns.row(row[from]);
      words[to] = word[from];
    }
  }
};

// The same on all threads, by buckets of 2^shift columns. Throws std::bad_alloc before it writes rows and
// words.
template <class Word, class WordOf, class Columns>
void sort_by_bucket(const PlanView& plan, int shift, std::int32_t* crow, std::int32_t* row, Word* word,
                    const Executor& executor, WordOf word_of, Columns in_bucket) {
  const BsrShape& s = plan.shape;
  const std::int64_t columns = s.col_count(), width = std::int64_t{1} << shift;
  const std::int64_t buckets = ceil_div(columns, width), parts = executor.threads;
  const auto first_row = [&](std::int64_t part) { return first_row_of(plan, part, parts); };

  // Parts are ranges of rows; where each puts the entries of a bucket follows from what those before it have.
  std::vector<std::int32_t> next(static_cast<std::size_t>(parts * buckets), 0);
  executor.parallel_for(parts, [&](std::int64_t part) {
    std::int32_t* count = next.data() + part * buckets;
    const std::int32_t end = plan.crow[first_row(part + 1)];
    for (std::int32_t e = plan.crow[first_row(part)]; e < end; ++e) ++count[plan.col[e] >> shift];
  });
  std::vector<std::int32_t> begin(static_cast<std::size_t>(buckets + 1), 0);
  std::int32_t at = 0, most = 0;
  for (std::int64_t b = 0; b < buckets; ++b) {
    begin[b] = at;
    for (std::int64_t part = 0; part < parts; ++part) at += std::exchange(next[part * buckets + b], at);
    most = std::max(most, at - begin[b]);
  }
  begin[buckets] = at;

  std::vector<Bucket<Word>> scratch;
  scratch.reserve(static_cast<std::size_t>(parts));
  for (std::int64_t part = 0; part < parts; ++part) scratch.emplace_back(most, width);
  executor.parallel_for(parts, [&](std::int64_t part) {
    std::int32_t* own = next.data() + part * buckets;
    const std::int64_t last = first_row(part + 1);
    // The place in the bucket at hand is no load that waits for the store before it.
    std::int32_t bucket = 0, to = own[0];
    for (std::int64_t i = first_row(part); i < last; ++i) {
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        const std::int32_t c = plan.col[e];
        if (c >> shift != bucket) {
          own[bucket] = to;
          bucket = c >> shift;
          to = own[bucket];
        }
        row[to] = in_bucket.join(i, c & static_cast<std::int32_t>(width - 1), to);
        word[to++] = word_of(e);
      }
    }
  });
  executor.parallel_for(buckets, [&](std::int64_t b, int worker) {
    const auto has = static_cast<std::size_t>(std::min(width, columns - b * width));
    scratch[static_cast<std::size_t>(worker)].sort(in_bucket, begin[b], begin[b + 1], {crow + b * width, has},
                                                   row, word);
  });
  crow[columns] = at;
}

// The same, however it is fastest.
template <class Word, class WordOf>
void sort_by_column(const PlanView& plan, std::int32_t* crow, std::int32_t* row, Word* word,
                    const Executor& executor, WordOf word_of) {
  const BsrShape& s = plan.shape;
  if (s.nnzb <= kBucketEntries) return sort_at_once(plan, crow, row, word, word_of);
  if (const int runs = run_shift(s); runs > 0) {
    return sort_runs_by_column(plan, runs, crow, row, word, executor, word_of);
  }
  const int shift = bucket_shift(s);
  const auto row_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(s.row_count() - 1)));
  if (row_bits + shift <= 32) {
    return sort_by_bucket(plan, shift, crow, row, word, executor, word_of, AboveRow{row_bits});
  }
  const auto beside = std::make_unique_for_overwrite<std::uint16_t[]>(static_cast<std::size_t>(s.nnzb));
  sort_by_bucket(plan, shift, crow, row, word, executor, word_of, BesideRow{beside.get()});
}

}  // namespace rarefy
