// A few tokens and single elements that are held in an order of their own, 16 rows at a time: a step takes of
// each row at most one element, all of them in a window of 64 columns, whose part of x is four vectors. So x
// costs two shuffles where few_singles.h has a load for each element, sums are lanes, and no row has an end
// that is not foreseen (Zen 5, ns an element from L2: .19 → .115; X beyond L1 .37 → .13).
#pragma once

#include "cpu/kernels.h"

namespace rarefy::cpu {

inline constexpr std::int64_t kWindowsAhead = 2048;  // values that are asked for ahead, 8 KB

// Sums in three levels: two of 16 steps by turns, 32 of these, y.
inline constexpr std::int32_t kWindowsPart = 32;
inline constexpr std::int32_t kWindowsTotal = 32 * kWindowsPart;

// The elements of a step onto the sums, and how many they were.
template <class I, int Tokens>
[[gnu::always_inline]] inline int add_step(const WindowsTask& t, WindowStep step, std::int64_t at,
                                           Vec<I> (&sum)[Tokens]) {
  const auto which = I::expand_columns(step.rows, t.columns + at);
  const Vec<I> w = I::spread(step.rows, t.values + at);
  const float* x = t.x + std::int64_t{step.window} * kWindowGrain;
  __builtin_prefetch(t.values + at + kWindowsAhead);
#pragma GCC unroll 4
  for (int m = 0; m < Tokens; ++m) {
    sum[m] = I::fma_in(step.rows, w, I::pick64(x + m * t.x_stride, which), sum[m]);
  }
  return I::count(step.rows);
}

template <class I, int Tokens>
void window_groups(const WindowsTask& t) {
  static_assert(I::kWidth == kWindowRows);
  const auto add = [](Vec<I>(&to)[Tokens], const Vec<I>(&from)[Tokens]) {
    for (int m = 0; m < Tokens; ++m) to[m] = I::add(to[m], from[m]);
  };
  float* y = t.y;
  for (std::int64_t g = t.begin; g < t.end; ++g, y += kWindowRows) {
    const WindowStep* step = t.steps + t.step_begin[g];
    const WindowStep* const end = t.steps + t.step_begin[g + 1];
    std::int64_t at = t.row_begin[g * kWindowRows];
    while (step != end) {
      const WindowStep* const all = end - step > kWindowsTotal ? step + kWindowsTotal : end;
      Vec<I> total[Tokens];
      for (Vec<I>& v : total) v = I::zero();
      while (step != all) {
        const WindowStep* const part = all - step > kWindowsPart ? step + kWindowsPart : all;
        Vec<I> even[Tokens], odd[Tokens];
        for (int m = 0; m < Tokens; ++m) even[m] = odd[m] = I::zero();
        for (; part - step >= 2; step += 2) {
          at += add_step<I, Tokens>(t, step[0], at, even);
          at += add_step<I, Tokens>(t, step[1], at, odd);
        }
        if (step != part) at += add_step<I, Tokens>(t, *step++, at, even);
        add(total, even);
        add(total, odd);
      }
      for (int m = 0; m < Tokens; ++m) {
        float* const sums = y + m * t.y_stride;
        I::store(sums, I::add(I::load(sums), total[m]));
      }
    }
  }
}

template <class I>
void windows(const WindowsTask& t) {
  switch (t.tokens) {
    case 1: return window_groups<I, 1>(t);
    case 2: return window_groups<I, 2>(t);
    default: return window_groups<I, 4>(t);
  }
}

}  // namespace rarefy::cpu
