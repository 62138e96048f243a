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

// Elements of one row and those behind them, their columns in 32 or 16 bits.
template <class T, class Index>
struct Singles {
  const char* values;
  const Index* index;
  std::int32_t readable;  // indices from the first on, those of rows below too
  const T* x;             // token-major
  std::int64_t x_stride;
};

// Columns of 16 bits have room behind them: no row must look whether a vector of them can be read.
template <class Index>
inline constexpr bool kHasRoom = sizeof(Index) == sizeof(std::uint16_t);

// W: in kStorage, or, in sums of doubles, in f64.
template <class I, Storage kStorage>
inline constexpr std::int64_t kValueBytes = kDoubles<I> ? sizeof(double) : bytes_of(kStorage);
template <class I, Storage kStorage>
Vec<I> load_values(const char* values, std::int64_t at) {
  if constexpr (kDoubles<I>) {
    return I::load(reinterpret_cast<const double*>(values) + at);
  } else {
    return load_as<I>(kStorage, values, at);
  }
}

// kStream: gathered by one instruction, which leaves more room for loads in flight where X misses L1, too
// (Zen 4: 0.38 ns an element from L1, 0.48–0.7 from memory). Else element by element, in fewer cycles (0.22;
// from memory 0.4 with X in L1, 0.6–0.9 beyond).
template <class I, bool kStream, class Index>
Vec<I> take_x(const Element<I>* x, const Index* index) {
  return kStream ? I::gather(x, index) : I::collect(x, index);
}

template <class I, Storage kStorage, class Index>
void ask_ahead(const Singles<Element<I>, Index>& row, std::int32_t e) {
  __builtin_prefetch(row.index + e + kSinglesAhead);
  __builtin_prefetch(row.values + (e + kSinglesAhead) * kValueBytes<I, kStorage>);
}

// Of four tokens x may lie by column, [column][token] (kFours): then a vector has a quarter, four tokens, of
// each of some elements, and four of them have what four tokens' vectors have; turned, the same lanes.
template <class I, class Index>
[[gnu::always_inline]] inline void add_fours(Vec<I> wv, const Element<I>* x, const Index* index,
                                             Vec<I> (&sum)[4]) {
  sum[0] = I::fma(I::template one_of_four<0>(wv), I::quads(x, index), sum[0]);
  sum[1] = I::fma(I::template one_of_four<1>(wv), I::quads(x, index + 1), sum[1]);
  sum[2] = I::fma(I::template one_of_four<2>(wv), I::quads(x, index + 2), sum[2]);
  sum[3] = I::fma(I::template one_of_four<3>(wv), I::quads(x, index + 3), sum[3]);
}

// Onto `sum`: whole vectors, elements e … stop.
template <class I, Storage kStorage, int Tokens, bool kStream, bool kFours, class Index>
[[gnu::always_inline]] inline void add_vectors(const Singles<Element<I>, Index>& row, std::int32_t e,
                                               std::int32_t stop, Vec<I> (&sum)[Tokens]) {
  for (; e != stop; e += I::kWidth) {
    if constexpr (kStream) ask_ahead<I, kStorage>(row, e);
    const Vec<I> wv = load_values<I, kStorage>(row.values, e);
    if constexpr (kFours) {
      add_fours<I>(wv, row.x, row.index + e, sum);
      continue;
    }
#pragma GCC unroll 4
    for (int m = 0; m < Tokens; ++m) {
      sum[m] = I::fma(wv, take_x<I, kStream>(row.x + m * row.x_stride, row.index + e), sum[m]);
    }
  }
}

// The last elements, fewer than a vector has lanes; maybe none.
template <class I, Storage kStorage, int Tokens, bool kStream, bool kFours, class Index>
[[gnu::always_inline]] inline void add_rest(const Singles<Element<I>, Index>& row, std::int32_t e, int rest,
                                            Vec<I> (&total)[Tokens]) {
  constexpr int w = I::kWidth;
  Vec<I> wv;
  if constexpr (kValueBytes<I, kStorage> == sizeof(Element<I>)) {
    wv = I::load_first(reinterpret_cast<const Element<I>*>(row.values) + e, rest);
  } else {
    wv = load_part<I>(kStorage, row.values, e, rest);
  }
  const Index* index = row.index + e;
  if constexpr (kFours) {
    alignas(64) Element<I> x[w][4] = {};  // 0 beside what there is, on both sides
    alignas(64) Index lanes[w] = {};
    for (int i = 0; i < rest; ++i) {
      lanes[i] = static_cast<Index>(i);
      std::copy_n(row.x + std::int64_t{index[i]} * 4, 4, x[i]);
    }
    for (int i = rest; i < w; ++i) lanes[i] = static_cast<Index>(w - 1);
    add_fours<I>(wv, &x[0][0], lanes, total);
    return;
  }
  if constexpr (kStream) {  // X beyond L1: no line of it is read for what lies behind the row
    ask_ahead<I, kStorage>(row, e);
#pragma GCC unroll 4
    for (int m = 0; m < Tokens; ++m) {
      total[m] = I::fma(wv, I::gather_first(row.x + m * row.x_stride, index, rest), total[m]);
    }
    return;
  }
  alignas(64) Index own[w];
  if (!kHasRoom<Index> && row.readable - e < w) {  // W's last ones: column 0 beside them
    std::fill_n(std::copy_n(index, rest, own), w - rest, Index{0});
    index = own;
  }
  for (int m = 0; m < Tokens; ++m) {
    const Vec<I> xv = take_x<I, kStream>(row.x + m * row.x_stride, index);
    total[m] = I::fma(wv, I::first(xv, rest), total[m]);
  }
}

// So many elements are one part of a sum, and whatever does not fill a vector.
template <class I>
inline constexpr std::int32_t kOnePart = (3 * kSinglesPart / 2 + 1) * I::kWidth - 1;

// `count` elements, of one part: summed straight on. A row must not look at more than it has: its end is not
// foreseen, and what follows waits for it (Zen 5: 2 % of rows of 300, 9 % of 20).
template <class I, Storage kStorage, int Tokens, bool kStream, bool kFours, class Index>
[[gnu::always_inline]] inline void add_part(const Singles<Element<I>, Index>& row, std::int32_t count,
                                            Element<I>* y, std::int64_t y_stride) {
  constexpr int w = I::kWidth;
  Vec<I> total[Tokens];
  for (int m = 0; m < Tokens; ++m) total[m] = I::zero();
  if constexpr (kStream) {
    // One loop through both kinds of vectors has one end to foresee (Zen 5, rows of 20: 0.84 → 0.77 ns an
    // element; 5: 2.1 → 1.5).
    for (std::int32_t e = 0; e < count; e += w) {
      if (count - e >= w) {
        add_vectors<I, kStorage, Tokens, kStream, kFours>(row, e, e + w, total);
      } else {
        add_rest<I, kStorage, Tokens, kStream, kFours>(row, e, count - e, total);
      }
    }
  } else {
    const std::int32_t whole = count - count % w;
    add_vectors<I, kStorage, Tokens, kStream, kFours>(row, 0, whole, total);
    if (count > whole || (kHasRoom<Index> && !kFours)) {
      add_rest<I, kStorage, Tokens, kStream, kFours>(row, whole, count - whole, total);
    }
  }
  if constexpr (kFours) I::transpose_quads(total);
  for (int m = 0; m < Tokens; ++m) y[m * y_stride] += I::sum(total[m]);
}

// The same of several parts, up to kSinglesParts.
template <class I, Storage kStorage, int Tokens, bool kStream, bool kFours, class Index>
[[gnu::noinline]] void add_parts(const Singles<Element<I>, Index>& row, std::int32_t count, Element<I>* y,
                                 std::int64_t y_stride) {
  constexpr int w = I::kWidth;
  const std::int32_t whole = count - count % w;
  Vec<I> total[Tokens];
  for (int m = 0; m < Tokens; ++m) total[m] = I::zero();
  for (std::int32_t e = 0, stop = 0; e < whole; e = stop) {
    stop = 2 * (whole - e) > 3 * kSinglesPart * w ? e + kSinglesPart * w : whole;
    Vec<I> sum[Tokens];
    for (int m = 0; m < Tokens; ++m) sum[m] = I::zero();
    add_vectors<I, kStorage, Tokens, kStream, kFours>(row, e, stop, sum);
    for (int m = 0; m < Tokens; ++m) total[m] = I::add(total[m], sum[m]);
  }
  if (count > whole) add_rest<I, kStorage, Tokens, kStream, kFours>(row, whole, count - whole, total);
  if constexpr (kFours) I::transpose_quads(total);
  for (int m = 0; m < Tokens; ++m) y[m * y_stride] += I::sum(total[m]);
}

// Rows of a task. What a row needs lies in locals: beside stores to y the compiler would read the task again.
template <class I, Storage kStorage, int Tokens, bool kStream, bool kFours, class Index>
void single_rows(const FewTaskOf<Element<I>>& task, const Index* index) {
  constexpr std::int32_t most = kSinglesParts * kSinglesPart * I::kWidth;
  const auto* values = static_cast<const char*>(task.w.values);
  const std::int32_t* const begin = task.entry_begin;
  const Element<I>* const x = task.x;
  const std::int64_t x_stride = task.x_stride, y_stride = task.y_stride;
  const std::int32_t entries = task.entries;
  const auto from = [=](std::int32_t e) -> Singles<Element<I>, Index> {
    return {values + e * kValueBytes<I, kStorage>, index + e, entries - e, x, x_stride};
  };
  Element<I>* y = task.y;
  std::int32_t e = begin[task.begin];
  for (std::int32_t o = task.begin, last = task.end; o < last; ++o, ++y) {
    const std::int32_t end = begin[o + 1];
    while (end - e > kOnePart<I>) {
      const std::int32_t count = end - e < most ? end - e : most;
      add_parts<I, kStorage, Tokens, kStream, kFours>(from(e), count, y, y_stride);
      e += count;
    }
    if (e < end) add_part<I, kStorage, Tokens, kStream, kFours>(from(e), end - e, y, y_stride);
    e = end;
  }
}

template <class I, Storage kStorage, int Tokens>
void few_singles(const FewTaskOf<Element<I>>& task) {
  static_assert(kColumnsAhead >= I::kWidth);
  const auto rows = [&](const auto* index) {
    if constexpr (Tokens == 4 && !kDoubles<I>) {
      if (task.by_column) {
        return task.stream ? single_rows<I, kStorage, 4, true, true>(task, index)
                           : single_rows<I, kStorage, 4, false, true>(task, index);
      }
    }
    task.stream ? single_rows<I, kStorage, Tokens, true, false>(task, index)
                : single_rows<I, kStorage, Tokens, false, false>(task, index);
  };
  task.columns != nullptr ? rows(task.columns) : rows(task.w.index);
}

}  // namespace rarefy::cpu
