// A few tokens and single elements (CSR): lanes along a row, X by index. Also SpMV.
#pragma once

#include <algorithm>

#include "cpu/panel.h"

namespace rarefy::cpu {

// Elements that are asked for ahead where W is a stream from memory: 2 KB of each array, past the end of a
// page, where the hardware stops (Zen 4: 0.70 → 0.48 ns an element).
inline constexpr std::int64_t kSinglesAhead = 512;

// Sums in three levels, as in few.h: 16 vectors (the last ones up to 24), 8 of these, y.
inline constexpr int kSinglesPart = 16;
inline constexpr std::int32_t kSinglesParts = 8;

// `count` elements of one row, their columns in 32 or 16 bits.
template <class Index>
struct Singles {
  const char* values;
  const Index* index;
  std::int32_t count;
  std::int32_t readable;  // indices from the first on, those of rows below too
  const float* x;         // token-major
  std::int64_t x_stride;
};

// kStream: gathered by one instruction, which leaves more room for loads in flight where X misses L1, too
// (Zen 4: 0.38 ns an element from L1, 0.48–0.7 from memory). Else element by element, in fewer cycles (0.22;
// from memory 0.4 with X in L1, 0.6–0.9 beyond).
template <class I, Storage kStorage, int Tokens, bool kStream, class Index>
void add_singles(const Singles<Index>& row, float* y, std::int64_t y_stride) {
  constexpr int w = I::kWidth;
  constexpr std::int64_t bytes = bytes_of(kStorage);
  Vec<I> total[Tokens], sum[Tokens];
  for (int m = 0; m < Tokens; ++m) total[m] = sum[m] = I::zero();
  std::int32_t e = 0;
  const std::int32_t whole = row.count - row.count % w;
  while (e < whole) {
    const std::int32_t stop = 2 * (whole - e) > 3 * kSinglesPart * w ? e + kSinglesPart * w : whole;
    for (; e != stop; e += w) {
      if constexpr (kStream) {
        __builtin_prefetch(row.index + e + kSinglesAhead);
        __builtin_prefetch(row.values + (e + kSinglesAhead) * bytes);
      }
      const Vec<I> wv = load_as<I>(kStorage, row.values, e);
#pragma GCC unroll 4
      for (int m = 0; m < Tokens; ++m) {
        const float* x = row.x + m * row.x_stride;
        sum[m] = I::fma(wv, kStream ? I::gather(x, row.index + e) : I::collect(x, row.index + e), sum[m]);
      }
    }
    for (int m = 0; m < Tokens; ++m) {
      total[m] = I::add(total[m], sum[m]);
      sum[m] = I::zero();
    }
  }
  if (const int rest = row.count - e; rest > 0) {
    const Vec<I> wv = kStorage == Storage::f32
                          ? I::load_first(reinterpret_cast<const float*>(row.values) + e, rest)
                          : load_part<I>(kStorage, row.values, e, rest);
    alignas(64) Index own[w];
    const Index* index = row.index + e;
    // W's last ones in the plan: column 0 beside them.
    if (sizeof(Index) == sizeof(std::int32_t) && row.readable - e < w) {
      std::fill_n(std::copy_n(index, rest, own), w - rest, Index{0});
      index = own;
    }
    for (int m = 0; m < Tokens; ++m) {
      const float* x = row.x + m * row.x_stride;
      const Vec<I> xv = kStream ? I::gather(x, index) : I::collect(x, index);
      total[m] = I::fma(wv, I::first(xv, rest), total[m]);
    }
  }
  for (int m = 0; m < Tokens; ++m) y[m * y_stride] += I::sum(total[m]);
}

// Rows of a task. What a row needs lies in locals: beside stores to y the compiler would read the task again.
template <class I, Storage kStorage, int Tokens, bool kStream, class Index>
void single_rows(const FewTask& task, const Index* index, std::int32_t readable) {
  constexpr std::int32_t most = kSinglesParts * kSinglesPart * I::kWidth;
  const auto* values = static_cast<const char*>(task.w.values);
  const std::int32_t* const begin = task.entry_begin;
  const float* const x = task.x;
  const std::int64_t x_stride = task.x_stride, y_stride = task.y_stride;
  float* y = task.y;
  for (std::int32_t o = task.begin, last = task.end; o < last; ++o, ++y) {
    const std::int32_t end = begin[o + 1];
    for (std::int32_t e = begin[o], count = 0; e < end; e += count) {
      count = end - e < most ? end - e : most;
      add_singles<I, kStorage, Tokens, kStream, Index>(
          {values + e * bytes_of(kStorage), index + e, count, readable - e, x, x_stride}, y, y_stride);
    }
  }
}

template <class I, Storage kStorage, int Tokens>
void few_singles(const FewTask& task) {
  const auto rows = [&]<class Index>(const Index* index, std::int32_t readable) {
    task.stream ? single_rows<I, kStorage, Tokens, true>(task, index, readable)
                : single_rows<I, kStorage, Tokens, false>(task, index, readable);
  };
  static_assert(kColumnsAhead >= I::kWidth);
  task.columns != nullptr ? rows(task.columns, task.entries + kColumnsAhead)
                          : rows(task.w.index, task.entries);
}

}  // namespace rarefy::cpu
