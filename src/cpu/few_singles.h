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

// `count` elements of one row.
struct Singles {
  const char* values;
  const std::int32_t* index;
  std::int32_t count;
  std::int32_t readable;  // indices from the first on, those of rows below too
  const float* x;         // token-major
  std::int64_t x_stride;
};

// kStream: gathered by one instruction, which leaves more room for loads in flight where X misses L1, too
// (Zen 4: 0.38 ns an element from L1, 0.48–0.7 from memory). Else element by element, in fewer cycles (0.22;
// from memory 0.4 with X in L1, 0.6–0.9 beyond).
template <class I, Storage kStorage, int Tokens, bool kStream>
void add_singles(const Singles& row, float* y, std::int64_t y_stride) {
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
    alignas(64) std::int32_t own[w];
    const std::int32_t* index = row.index + e;
    if (row.readable - e < w) {  // W's last ones: column 0 beside them
      std::fill_n(std::copy_n(index, rest, own), w - rest, 0);
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

template <class I, Storage kStorage, int Tokens>
void few_singles(const FewTask& task) {
  const SparseOperand& w = task.w;
  constexpr std::int32_t most = kSinglesParts * kSinglesPart * I::kWidth;
  const auto rows = [&]<bool kStream>() {
    float* y = task.y;
    for (std::int32_t o = task.begin; o < task.end; ++o, ++y) {
      const std::int32_t end = task.entry_begin[o + 1];
      for (std::int32_t e = task.entry_begin[o], count = 0; e < end; e += count) {
        count = end - e < most ? end - e : most;
        add_singles<I, kStorage, Tokens, kStream>(
            {static_cast<const char*>(w.values) + e * bytes_of(kStorage), w.index + e, count,
             task.entries - e, task.x, task.x_stride},
            y, task.y_stride);
      }
    }
  };
  task.stream ? rows.template operator()<true>() : rows.template operator()<false>();
}

}  // namespace rarefy::cpu
