// Rows of a bitmap times a few tokens: a vector of W is as many neighbouring columns as it has lanes. Its
// stored ones come as one load from where the row's values have got to, are spread to their lanes by the
// bits, and meet the same columns of X. Lanes that store nothing keep their sums: X may be infinite there.
#pragma once

#include <algorithm>

#include "cpu/asked.h"
#include "cpu/panel.h"

namespace rarefy::cpu {

// A token or two: reading W is the work, and a row's sums of several vectors are as far apart as a product
// takes; two tokens' X does not stay in L1 from row to row, so that rows share it as well. More tokens: rows
// alone.
template <class I, int Tokens, int Steps>
constexpr int bitmap_rows_at_once() {
  constexpr int most = I::kRegisters / 2 / (Tokens * Steps);
  return Tokens == 1 || most < 1 ? 1 : std::min(4, most);
}
template <int Tokens, int Most>
inline constexpr int kBitmapSteps = Tokens <= 2 ? Most : 1;

template <class I, int Rows, int Steps, int Tokens>
void clear_sums(Vec<I> (&sum)[Rows][Steps][Tokens]) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < Steps; ++s) {
#pragma GCC unroll 8
      for (int m = 0; m < Tokens; ++m) sum[r][s][m] = I::zero();
    }
  }
}

// Onto the task's rows from `first` on. One row or several, a row's sum is added up in one order.
template <class I, int Rows, int Steps, int Tokens>
void fold_sums(const BitmapTask& task, std::int32_t first, const Vec<I> (&sum)[Rows][Steps][Tokens]) {
  for (int r = 0; r < Rows; ++r) {
    for (int m = 0; m < Tokens; ++m) {
      Vec<I> all = sum[r][0][m];
      for (int s = 1; s < Steps; ++s) all = I::add(all, sum[r][s][m]);
      task.y[m * task.y_stride + first + r] += I::sum(all);
    }
  }
}

// Rows first … first + Rows of the task. Without kWithin a load may reach past the last value.
template <class I, Storage kStorage, bool kWithin, int Rows, int Steps, int Tokens>
void bitmap_rows(const BitmapTask& task, std::int32_t first) {
  constexpr int w = I::kWidth;
  Vec<I> sum[Rows][Steps][Tokens];
  clear_sums<I>(sum);
  std::int64_t at[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) at[r] = task.at[first + r];
  const std::uint8_t* bits = task.bits + first * task.row_bytes;
  const float* x = task.x;
  const Ask ask = task.ask;
  const char* const ahead = static_cast<const char*>(task.values) + task.ahead;
  for (std::int32_t k = 0; k < task.columns; k += Steps * w) {
    // Bits of all steps: counted from mask registers, they take 10 % longer.
    std::uint64_t group[Rows] = {};
    if constexpr (Steps > 1) {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r)
        __builtin_memcpy(&group[r], bits + r * task.row_bytes + k / 8, Steps * w / 8);
    }
#pragma GCC unroll 4
    for (int s = 0; s < Steps; ++s, x += w) {
      const std::uint64_t before = (std::uint64_t{1} << (s * w)) - 1;
      Vec<I> xv[Tokens];
#pragma GCC unroll 8
      for (int m = 0; m < Tokens; ++m) xv[m] = I::load(x + m * task.x_stride);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const std::int64_t from = at[r] + __builtin_popcountll(group[r] & before);
        // 16 columns have no more than a line.
        if (s % (16 / w) == 0) ask_for<1>(ask, ahead + from * bytes_of(kStorage));
        const std::uint8_t* its = bits + r * task.row_bytes;
        const bool bytes = Steps * w % 8 == 0;  // one address for all steps
        const auto stored = bytes ? I::lanes(its + k / 8, s * w) : I::lanes(its, k + s * w);
        const std::int64_t left = task.count - from;
        const Vec<I> run = kWithin || left >= w
                               ? load_as<I>(kStorage, task.values, from)
                               : load_part<I>(kStorage, task.values, from, static_cast<int>(left));
        const Vec<I> wv = I::expand(run, stored);
        if constexpr (Steps == 1) at[r] += I::count(stored);
#pragma GCC unroll 8
        for (int m = 0; m < Tokens; ++m) sum[r][s][m] = I::fma_in(stored, wv, xv[m], sum[r][s][m]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) at[r] += __builtin_popcountll(group[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) task.at[first + r] = static_cast<std::int32_t>(at[r]);
  fold_sums<I>(task, first, sum);
}

template <class I, Storage kStorage, int Tokens>
void bitmap_tokens(const BitmapTask& task) {
  constexpr int Steps = kBitmapSteps<Tokens, 4>, Rows = bitmap_rows_at_once<I, Tokens, Steps>();
  std::int32_t r = 0;
  for (; r + Rows <= task.rows && std::int64_t{task.end[r + Rows - 1]} + I::kWidth <= task.count; r += Rows) {
    bitmap_rows<I, kStorage, true, Rows, Steps, Tokens>(task, r);
  }
  for (; r < task.rows; ++r) bitmap_rows<I, kStorage, false, 1, Steps, Tokens>(task, r);
}

template <class I>
void bitmap(const BitmapTask& task) {
  dispatch_storage(task.storage, [&]<Storage kStorage>() {
    switch (task.tokens) {
      case 1: return bitmap_tokens<I, kStorage, 1>(task);
      case 2: return bitmap_tokens<I, kStorage, 2>(task);
      case 4: return bitmap_tokens<I, kStorage, 4>(task);
      case 8: return bitmap_tokens<I, kStorage, 8>(task);
      default: return;
    }
  });
}

// Two of each four: a vector of stored values, all of them, meets those of twice as many columns that their
// positions pick. Nothing is spread, and rows have their values at the same places. Without kWithin a row may
// end in the tile.
template <class I, Storage kStorage, bool kWithin, int Rows, int Steps, int Tokens>
void two_of_four_rows(const BitmapTask& task, std::int32_t first) {
  constexpr int w = I::kWidth;
  Vec<I> sum[Rows][Steps][Tokens];
  clear_sums<I>(sum);
  std::int64_t at[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) at[r] = task.at[first + r];
  const std::uint8_t* codes = task.bits + first * task.row_bytes;
  const float* x = task.x;
  const Ask ask = task.ask;
  const char* const ahead = static_cast<const char*>(task.values) + task.ahead;
  std::int64_t done = 0;
  for (std::int32_t k = 0; k < task.columns; k += Steps * 2 * w) {
#pragma GCC unroll 4
    for (int s = 0; s < Steps; ++s, x += 2 * w, done += w) {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        ask_for<1>(ask, ahead + (at[r] + done) * bytes_of(kStorage));
        const std::int64_t left = kWithin ? w : task.end[first + r] - at[r] - done;
        const Vec<I> wv = left >= w ? load_as<I>(kStorage, task.values, at[r] + done)
                                    : load_part<I>(kStorage, task.values, at[r] + done,
                                                   static_cast<int>(left > 0 ? left : 0));
        const auto which = I::positions(codes + r * task.row_bytes + (k + s * 2 * w) / 8);
#pragma GCC unroll 4
        for (int m = 0; m < Tokens; ++m) {
          sum[r][s][m] = I::fma(wv, I::pick(x + m * task.x_stride, which), sum[r][s][m]);
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    const std::int64_t next = at[r] + done, end = task.end[first + r];
    task.at[first + r] = static_cast<std::int32_t>(next < end ? next : end);
  }
  fold_sums<I>(task, first, sum);
}

template <class I, Storage kStorage, int Tokens>
void two_of_four_tokens(const BitmapTask& task) {
  // Tiles are of 64 columns. Of AVX2's 16 registers the sums of four rows, which may lie apart
  // (linear_bitmap.cc), or of two rows and tokens are half.
  constexpr bool few = I::kRegisters < 32;
  constexpr int Steps = kBitmapSteps<Tokens, std::min(few ? 2 : 4, 32 / I::kWidth)>;
  constexpr int Rows = !few ? bitmap_rows_at_once<I, Tokens, Steps>() : Tokens <= 2 ? 4 / Tokens : 1;
  std::int32_t r = 0;
  const bool within = task.rows > 0 && task.end[0] - task.at[0] >= task.columns / 2;
  for (; within && r + Rows <= task.rows; r += Rows) {
    two_of_four_rows<I, kStorage, true, Rows, Steps, Tokens>(task, r);
  }
  for (; r < task.rows; ++r) two_of_four_rows<I, kStorage, false, 1, Steps, Tokens>(task, r);
}

template <class I>
void two_of_four(const BitmapTask& task) {
  dispatch_storage(task.storage, [&]<Storage kStorage>() {
    switch (task.tokens) {
      case 1: return two_of_four_tokens<I, kStorage, 1>(task);
      case 2: return two_of_four_tokens<I, kStorage, 2>(task);
      case 4: return two_of_four_tokens<I, kStorage, 4>(task);
      default: return;
    }
  });
}

}  // namespace rarefy::cpu
