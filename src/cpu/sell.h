// A few tokens and single elements in short rows, a lane for each row (SELL-C-σ: Kreutzer et al., 2014). Rows
// come sorted by length, the longest first, among 256; as many as lanes are a group, so a step is a vector of
// values and one of columns, sums are lanes, and groups, not rows, have ends. Nothing is padded: behind its
// shortest row a group's steps have an element of each row that goes on, and those are the first lanes.
// An Ice Lake, ns an element, rows of 5 in 10⁶ columns 6.3 → 2.5, of 20 in 2·10⁵ 1.9 → 1.2, of 41 in 4096
// .89 → .57: bound by loads of x then.
#pragma once

#include "cpu/few_singles.h"
#include "cpu/sell_task.h"

namespace rarefy::cpu {

// Sums in two levels: two of 16 steps by turns, then these. Tails, of few rows, one of 16.
inline constexpr int kSellPart = 32;

template <class I, int Tokens, class Index>
struct SellGroup {
  static constexpr int w = I::kWidth;
  const SellTask& t;
  const float* values;
  const Index* columns;

  // The next step, of all lanes or of the first ones.
  [[gnu::always_inline]] void add(Vec<I> (&sum)[Tokens]) {
    __builtin_prefetch(values + kSinglesAhead);
    __builtin_prefetch(columns + kSinglesAhead);
    const Vec<I> wv = I::load(values);
#pragma GCC unroll 4
    for (int m = 0; m < Tokens; ++m) sum[m] = I::fma(wv, I::collect(t.x + m * t.x_stride, columns), sum[m]);
    values += w;
    columns += w;
  }
  [[gnu::always_inline]] void add_first(int lanes, Vec<I> (&sum)[Tokens]) {
    const Vec<I> wv = I::load_first(values, lanes);
#pragma GCC unroll 4
    for (int m = 0; m < Tokens; ++m) {
      sum[m] = I::fma(wv, I::first(I::collect(t.x + m * t.x_stride, columns), lanes), sum[m]);
    }
    values += lanes;
    columns += lanes;
  }

  static void clear(Vec<I> (&sum)[Tokens]) {
    for (Vec<I>& v : sum) v = I::zero();
  }
  static void move(Vec<I> (&from)[Tokens], Vec<I> (&to)[Tokens]) {
    for (int m = 0; m < Tokens; ++m) to[m] = I::add(to[m], from[m]);
    clear(from);
  }

  void multiply(const std::uint16_t* length, Vec<I> (&total)[Tokens]) {
    Vec<I> even[Tokens], odd[Tokens];
    clear(total);
    clear(even);
    clear(odd);
    int s = 0;
    for (const int full = length[w - 1]; s < full;) {
      const int stop = full - s > 3 * kSellPart / 2 ? s + kSellPart : full;
      for (; stop - s >= 2; s += 2) {
        add(even);
        add(odd);
      }
      for (; s < stop; ++s) add(even);
      move(even, total);
      move(odd, total);
    }
    if (length[0] == s) return;
    for (int lanes = w - 1; lanes > 0; --lanes) {
      while (s < length[lanes - 1]) {
        add_first(lanes, even);
        if (++s % (kSellPart / 2) == 0) move(even, total);
      }
    }
    move(even, total);
  }
};

template <class I, int Tokens, class Index>
void sell_groups(const SellTask& t) {
  constexpr int w = I::kWidth;
  float* y = t.y;
  for (std::int64_t g = t.begin; g < t.end; ++g, y += w) {
    SellGroup<I, Tokens, Index> group{t, t.values + t.first[g],
                                      static_cast<const Index*>(t.columns) + t.first[g]};
    Vec<I> total[Tokens];
    group.multiply(t.length + g * w, total);
    for (int m = 0; m < Tokens; ++m) I::store(y + m * t.y_stride, total[m]);
  }
}

template <class I>
void sell(const SellTask& t) {
  const auto of = [&]<class Index>(Index) {
    if (t.tokens == 1) return sell_groups<I, 1, Index>(t);
    if (t.tokens == 2) return sell_groups<I, 2, Index>(t);
    sell_groups<I, 4, Index>(t);
  };
  if (t.narrow) return of(std::uint16_t{});
  of(std::int32_t{});
}

}  // namespace rarefy::cpu
