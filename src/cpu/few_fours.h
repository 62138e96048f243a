// Four tokens of R×1 blocks that are several to a vector.
#pragma once

#include <algorithm>

#include "cpu/few_parts.h"
#include "cpu/panel.h"

namespace rarefy::cpu {

// A block's lanes, of one vector or two or half of one, are its rows × the tokens, as x has them side by
// side, [column][token], and each of the several has sums of its own: the additions of few_slices, where they
// are the lanes.
template <class I, Storage kStorage, int Size, int Sets>
void few_quads(const FewTask& task) {
  constexpr int w = I::kWidth, entries = w / Size, halves = std::max(1, 4 * Size / w), rows = Size / halves;
  constexpr int share = std::max(1, w / (4 * Size)), vectors = entries / share;  // entries that share one
  constexpr std::int64_t kBytes = bytes_of(kStorage);
  constexpr std::int32_t kMost = Sets * kFewParts * kFewPart * entries;
  // Floats in fours are loaded as often as they are wanted, not spread from one register.
  constexpr bool kSpreads = kStorage == Storage::f32 && Size == 4 && share == 1 && requires(const float* p) {
    I::each_four_times(p, 0);
  };
  using Set = Vec<I>[vectors][halves];
  const auto each = [](auto f) {
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) {
#pragma GCC unroll 2
      for (int h = 0; h < halves; ++h) f(i, h);
    }
  };
  float* y = task.y;
  for (std::int32_t o = task.begin; o < task.end; ++o, y += Size) {
    const std::int32_t end = task.entry_begin[o + 1];
    for (std::int32_t e = task.entry_begin[o]; e < end;) {
      const std::int32_t stop = end - e < kMost ? end : e + kMost;
      const std::int32_t whole = stop - (stop - e) % entries;
      alignas(64) float total[vectors][halves][w] = {};
      Set sum[Sets];
      const auto clear = [&] {
#pragma GCC unroll 4
        for (auto& set : sum) each([&](int i, int h) { set[i][h] = I::zero(); });
      };
      const auto add_up = [&] {
        each([&](int i, int h) {
          Vec<I> v = sum[0][i][h];
          if constexpr (Sets >= 2) v = I::add(v, sum[1][i][h]);
          if constexpr (Sets == 4) v = I::add(v, I::add(sum[2][i][h], sum[3][i][h]));
          I::store(total[i][h], I::add(I::load(total[i][h]), v));
        });
      };
      const auto x_of = [&](std::int32_t entry) { return task.x + std::int64_t{task.w.index[entry]} * 4; };
      const auto x_or_none = [&](std::int32_t entry) {
        static constexpr float kNone[4] = {};
        return entry < stop ? x_of(entry) : kNone;
      };
      // Those of vector i, whose weights are the i-th of as many, which lie at `values`.
      const auto add_entry = [&](Set& to, std::int32_t from, Vec<I> wv, const char* values, int i,
                                 const auto& x) {
        Vec<I> xv;
        if constexpr (share == 1) {
          xv = I::template repeat<4>(x(from + i));
        } else {
          xv = I::two_fours(x(from + 2 * i), x(from + 2 * i + 1));
        }
#pragma GCC unroll 2
        for (int h = 0; h < halves; ++h) {
          Vec<I> spread;
          if constexpr (kSpreads) {
            spread = I::each_four_times(reinterpret_cast<const float*>(values) + i * Size, h * rows);
          } else {
            spread = I::each_four_times(wv, i * share * Size + h * rows);
          }
          to[i][h] = I::fma(spread, xv, to[i][h]);
        }
      };
      const auto add = [&](Set& to, std::int32_t from) {
        const char* values = static_cast<const char*>(task.w.values) + std::int64_t{from} * Size * kBytes;
        Vec<I> wv = I::zero();
        if constexpr (!kSpreads) wv = load_as<I>(kStorage, values, 0);
#pragma GCC unroll 4
        for (int i = 0; i < vectors; ++i) add_entry(to, from, wv, values, i, x_of);
      };
      const auto add_sets = [&](std::int32_t from) {
        const char* values = static_cast<const char*>(task.w.values) + std::int64_t{from} * Size * kBytes;
        ask_for<1>(task.ask, task.w.index + from + kFewIndices);
        ask_for<lines_of(Sets * w * kBytes)>(task.ask, values + kFewFourAhead);
#pragma GCC unroll 4
        for (int i = 0; i < Sets; ++i) add(sum[i], from + i * entries);
      };
      clear();
      while (whole - e > kFewPart * Sets * entries) {
        const std::int32_t part = e + kFewPart * Sets * entries;
        for (; e != part; e += Sets * entries) add_sets(e);
        add_up();
        clear();
      }
      for (; e + Sets * entries <= whole; e += Sets * entries) add_sets(e);
      for (; e < whole; e += entries) add(sum[0], e);
      if (e < stop) {
        const Vec<I> wv = load_part<I>(kStorage, task.w.values, std::int64_t{e} * Size, (stop - e) * Size);
        alignas(64) float four[w];
        I::store(four, wv);
#pragma GCC unroll 4
        for (int i = 0; i < vectors; ++i) {
          if (e + i * share < stop)
            add_entry(sum[0], e, wv, reinterpret_cast<const char*>(four), i, x_or_none);
        }
        e = stop;
      }
      add_up();
      each([&](int i, int h) {
        for (int lane = 0; lane < w; ++lane)
          y[lane % 4 * task.y_stride + h * rows + lane / 4 % rows] += total[i][h][lane];
      });
    }
  }
}

}  // namespace rarefy::cpu
