// A few tokens of some entries of one block row: slices of it (vectors of its blocks) keep their sums in
// registers while the entries stream by; the sums are folded into output features once at the end.
#pragma once

#include <algorithm>

#include "cpu/few_parts.h"
#include "cpu/panel.h"

namespace rarefy::cpu {

// How X meets a vector of W.
enum class Spread : std::uint8_t {
  whole,   // C is a multiple of the width: a vector of one row of the block, and as many of X
  repeat,  // C = N divides the width: N elements of X, once for each row of the block in the vector
  group,   // R × C = Size divides the width: several entries, and each one's C = N elements of X for all its
           // rows
  edge,    // others: vectors from the block's first element on, the last one not full; C = N = 1, or x's
           // columns are put where they belong by their numbers
  four,  // repeat of one column where X has four or eight tokens' side by side: four are loaded once, spread
         // in registers
};

// Some entries of one block row.
struct FewRow {
  const char* values;
  const std::int32_t* index;
  std::int32_t count;
  std::int32_t red_block;
  std::int64_t block_size;
  const float* x;  // token-major
  std::int64_t x_stride;
  float* y;
  std::int64_t y_stride;
  const char* ahead;  // what to ask for next: W from beginning to end, whatever the order of the slices
  bool once;          // all slices in one pass
  Ask ask;
  const std::int32_t* columns;  // edge: of each element of a block, up to a whole vector
};

// Slices that leave their sums in registers. Where two sets of them do not, the sets of a part follow each
// other, and the first one's sums wait in memory: one pass through W for two.
template <class I, Spread kSpread, int Sets, int Tokens>
constexpr int few_slices_at_once() {
  if (kSpread == Spread::group) return 1;
  constexpr int sums = I::kRegisters / 2 / Tokens;
  if (kSpread != Spread::whole && Sets == 2) return std::min(2, sums);  // of two slices or three: few_sets
  return sums / Sets;
}

// The sums of a slice that is no row, onto those rows of y that its lanes belong to.
template <class I, Spread kSpread, int Size, int N>
[[gnu::always_inline]] inline void add_slice(const FewRow& row, float* y, std::int64_t slice, Vec<I> sums) {
  constexpr int w = I::kWidth;
  const std::int64_t first = slice * w;  // element of a block
  if constexpr (kSpread == Spread::edge) {
    const auto lanes = static_cast<int>(row.block_size - first < w ? row.block_size - first : w);
    if constexpr (N == 1) {
      I::store_first(y + first, I::add(I::load_first(y + first, lanes), sums), lanes);
      return;
    }
    float lane[w];
    I::store(lane, sums);
    const std::int32_t* column = row.columns + first;
    y += (first - *column) / row.red_block;
    for (int i = 0; i < lanes; ++i) {
      *y += lane[i];
      if (column[i] + 1 == row.red_block) ++y;
    }
  } else if constexpr (kSpread == Spread::group) {
    float lane[w];
    I::store(lane, sums);
    for (int i = 0; i < w; ++i) y[i % Size / N] += lane[i];
  } else if constexpr (N == 1) {
    I::store(y + first, I::add(I::load(y + first), sums));
  } else {
    float row_sums[w];
    I::template fold<N>(sums, row_sums);
    y += first / N;
    for (int i = 0; i < w / N; ++i) y[i] += row_sums[i];
  }
}

// Adds slices first … first + Slices of every entry to y.
template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Slices, int Sets, int Tokens>
void few_slices(FewRow& row, int first) {
  constexpr int w = I::kWidth;
  constexpr int entries = kSpread == Spread::group ? w / Size : 1;  // of a vector
  constexpr bool kParts = kSpread != Spread::whole;
  constexpr std::int64_t kBytes = bytes_of(kStorage);
  constexpr bool kInTurn = kParts && Sets == 2 && 2 * Slices * Tokens > I::kRegisters / 2;
  Vec<I> sum[1 + (kInTurn ? 0 : Sets - 1)][Slices][Tokens];
  const auto each = [&](auto f) {
#pragma GCC unroll 16
    for (int s = 0; s < Slices; ++s) {
#pragma GCC unroll 16
      for (int m = 0; m < Tokens; ++m) f(s, m);
    }
  };
  const auto clear = [&](int s, int m) {
#pragma GCC unroll 4
    for (auto& set : sum) set[s][m] = I::zero();
  };
  const auto all_sets = [&](int s, int m) {
    Vec<I> v = sum[0][s][m];
    if constexpr (Sets >= 2 && !kInTurn) v = I::add(v, sum[1][s][m]);
    if constexpr (Sets == 4) v = I::add(v, I::add(sum[2][s][m], sum[3][s][m]));
    return v;
  };
  const std::int64_t slice = kSpread == Spread::whole ? row.red_block : w;  // elements from one to the next
  const std::int64_t step = entries * row.block_size * kBytes;
  const char* values = row.values + first * slice * kBytes;
  const char* ahead = row.ahead;
  // Of four tokens' whole vectors not: a branch in that loop cost 8 % out of L3.
  const Ask ask = kSpread == Spread::whole && Tokens >= 4 ? Ask::far : row.ask;
  constexpr std::int64_t kAtOnce = Slices * w * kBytes;                // bytes of W that follow one another
  const std::int64_t left = row.block_size - first * std::int64_t{w};  // edge: of a block's elements
  const std::int64_t passed = kSpread == Spread::edge && left < Slices * w ? left * kBytes : kAtOnce;
  const auto ask_ahead = [&]<int Times>() {
    ask_for<lines_of(Times * kAtOnce)>(ask, ahead);
    ahead += Times * passed;
  };
  // One vector of entries, those from e on.
  const auto add = [&](auto& to, std::int32_t e) {
    const std::int64_t elements = kSpread == Spread::four ? Tokens : row.red_block;
    const float* x = row.x + static_cast<std::int64_t>(row.index[e]) * elements;
    const auto column = [&](std::int64_t c) {
      Vec<I> xv[Tokens];
      if constexpr (kSpread == Spread::four && Tokens == 4) I::four(x, xv);
#pragma GCC unroll 16
      for (int m = 0; m < Tokens; ++m) {
        if constexpr (kSpread == Spread::whole) {
          Vec<I> v = I::load(x + m * row.x_stride + c);
          // Else GCC loads x for each row, ten loads beside eight FMAs (AVX2: a Zen 3, 768→3072 at .5, 16×16
          // .218 → .184 ms with sums of both rows folded together).
          if constexpr (I::kRegisters == 16 && Slices == 2 && Tokens == 4) __asm__("" : "+x"(v));
          xv[m] = v;
        }
        if constexpr (kSpread == Spread::four && Tokens == 8) xv[m] = I::set1(x[m]);
        if constexpr (kSpread == Spread::edge && N == 1) xv[m] = I::set1(x[m * row.x_stride]);
        if constexpr (kSpread == Spread::edge && N != 1) {
          xv[m] = I::load_first(x + m * row.x_stride, static_cast<int>(row.red_block));
        }
        if constexpr (kSpread == Spread::repeat) xv[m] = I::template repeat<N>(x + m * row.x_stride);
        if constexpr (kSpread == Spread::group)
          xv[m] = I::template group<Size, N>(row.x + m * row.x_stride, row.index + e);
      }
#pragma GCC unroll 16
      for (int s = 0; s < Slices; ++s) {
        const Vec<I> wv = load_as<I>(kStorage, values + (s * slice + c) * kBytes, 0);
        if (!kParts && s * w * kBytes % 64 == 0) ask_for<1>(ask, ahead + s * w * kBytes);
#pragma GCC unroll 16
        for (int m = 0; m < Tokens; ++m) {
          if constexpr (kSpread == Spread::edge && N != 1) {
            to[s][m] = I::fma(wv, I::permute(xv[m], row.columns + (first + s) * w), to[s][m]);
          } else {
            to[s][m] = I::fma(wv, xv[m], to[s][m]);
          }
        }
      }
    };
    if constexpr (kSpread == Spread::whole) {
      for (std::int64_t c = 0; c < row.red_block; c += w, ahead += kAtOnce) column(c);
    } else {
      column(0);
    }
    values += step;
  };
  const std::int32_t whole = row.count - row.count % entries;
  // Entries from … stop, one set of sums after the other.
  const auto add_in_turn = [&](std::int32_t from, std::int32_t stop) {
    const char* const begin = values;
    const auto every_second = [&](std::int32_t i, auto also) {
      for (values = begin + (i - from) * step; i < stop; i += 2, values += step) {
        also(i);
        add(sum[0], i);
      }
    };
    every_second(from, [&](std::int32_t i) {
      ask_for<1>(ask, row.index + i + kFewIndices);
      ask_ahead.template operator()<2>();
    });
    alignas(64) float kept[Slices][Tokens][w];
    each([&](int s, int m) { I::store(kept[s][m], sum[0][s][m]); });
    each([&](int s, int m) { clear(s, m); });
    every_second(from + 1, [](std::int32_t) {});
    each([&](int s, int m) { sum[0][s][m] = I::add(I::load(kept[s][m]), sum[0][s][m]); });
    values = begin + (stop - from) * step;
  };
  alignas(64) float total[Slices][Tokens][w];  // of the parts before
  each([&](int s, int m) {
    clear(s, m);
    if (kParts) I::store(total[s][m], I::zero());
  });
  std::int32_t e = 0;
  for (;;) {
    constexpr std::int32_t kFull = kFewPart * Sets * entries;
    const std::int32_t stop = kParts && whole - e > kFull ? e + kFull : whole;
    if constexpr (kInTurn) {
      add_in_turn(e, stop);
      e = stop;
    } else {
      for (; e + Sets * entries <= stop; e += Sets * entries) {
        if constexpr (kParts) {
          ask_for<1>(ask, row.index + e + kFewIndices);
          ask_ahead.template operator()<Sets>();
        }
#pragma GCC unroll 4
        for (int i = 0; i < Sets; ++i) add(sum[i], e + i * entries);
      }
      for (; e < stop; e += entries) {
        if constexpr (kParts) ask_ahead.template operator()<1>();
        add(sum[0], e);
      }
    }
    if (!kParts || stop == whole) break;
    each([&](int s, int m) {
      I::store(total[s][m], I::add(I::load(total[s][m]), all_sets(s, m)));
      clear(s, m);
    });
  }
  row.ahead = ahead;
  // Rows are added up now: nothing would be under way meanwhile (16×16 from memory, one token: 2.9 → 2.35
  // ms).
  if (kSpread == Spread::whole && row.once) ask_for<16>(Ask::far, ahead);
  if constexpr (kSpread == Spread::group) {  // the rest is less than a group: 0 beside it, on both sides
    const std::int32_t rest = row.count - e;
    if (rest > 0) {
      const Vec<I> wv = load_part<I>(kStorage, values, 0, rest * Size);
      for (int m = 0; m < Tokens; ++m) {
        float spread[w] = {};
        for (int i = 0; i < rest * Size; ++i) {
          spread[i] = row.x[m * row.x_stride + row.index[e + i / Size] * std::int64_t{N} + i % N];
        }
        sum[0][0][m] = I::fma(wv, I::load(spread), sum[0][0][m]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Tokens; ++m) {
    float* y = row.y + m * row.y_stride;
    if constexpr (kSpread == Spread::whole && Slices % 4 == 0) {
#pragma GCC unroll 4
      for (int s = 0; s < Slices; s += 4) {
        I::add_sums(all_sets(s, m), all_sets(s + 1, m), all_sets(s + 2, m), all_sets(s + 3, m),
                    y + first + s);
      }
    } else if constexpr (kSpread == Spread::whole) {  // one row or two, of as many tokens as make four sums,
      constexpr int kTogether = 4 / Slices;           // each with the bits that it has alone
      if (m % kTogether != 0) continue;
      const auto of = [&](int i) {
        const int token = m + i / Slices;
        return token < Tokens ? all_sets(i % Slices, token < Tokens ? token : 0) : I::zero();
      };
      float four[4];
      I::sum4(of(0), of(1), of(2), of(3), four);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if (m + i / Slices < Tokens) y[i / Slices * row.y_stride + first + i % Slices] += four[i];
      }
    } else {
#pragma GCC unroll 16
      for (int s = 0; s < Slices; ++s) {
        const Vec<I> v = I::add(I::load(total[s][m]), all_sets(s, m));
        add_slice<I, kSpread, Size, N>(row, y, first + s, v);
      }
    }
  }
}

}  // namespace rarefy::cpu
