// The weight gradient with lanes along a side of the blocks, where that is whole vectors: of X for blocks of
// 16, 32, … columns, of dY for such blocks of one column. A token's number of the other side is broadcast,
// and no sum crosses lanes. Per token: `Vectors` loads, `Tall` broadcasts and Tall · Vectors FMAs.
#pragma once

#include "cpu/asked.h"
#include "cpu/panel.h"

namespace rarefy::cpu {

constexpr int pick(bool first, int a, int b) { return first ? a : b; }

// Sums of Tall numbers × Vectors vectors. By row of dY: numbers are neighbours, vectors are anywhere, and
// `out` is a vector's; else numbers are of anywhere, vectors neighbours, and `out` is a number's.
template <class I, bool kByRow, int Tall, int Vectors>
[[gnu::always_inline]] inline void strip_tile(const float* const* numbers, std::int64_t number_step,
                                              const float* const* vectors, std::int64_t vector_step,
                                              std::int64_t tokens, float* const* out, std::int64_t out_step,
                                              bool add) {
  constexpr int w = I::kWidth;
  Vec<I> sum[Tall][Vectors];
  const auto each = [](auto f) {
#pragma GCC unroll 16
    for (int i = 0; i < Tall; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) f(i, v);
    }
  };
  each([&](int i, int v) { sum[i][v] = I::zero(); });
  constexpr int kNumbers = pick(kByRow, 1, Tall), kVectors = pick(kByRow, Vectors, 1);
  const float* number[kNumbers];
  const float* vector[kVectors];
  for (int i = 0; i < kNumbers; ++i) number[i] = numbers[i];
  for (int v = 0; v < kVectors; ++v) vector[v] = vectors[v];
  for (std::int64_t m = 0; m < tokens; ++m) {
    Vec<I> xv[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      xv[v] =
          I::load(kByRow ? vector[kByRow ? v : 0] + m * vector_step : vector[0] + m * vector_step + v * w);
    }
#pragma GCC unroll 16
    for (int i = 0; i < Tall; ++i) {
      const Vec<I> nv = I::set1(kByRow ? number[0][m * number_step + i] : number[kByRow ? 0 : i][m]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[i][v] = I::fma(nv, xv[v], sum[i][v]);
    }
  }
  each([&](int i, int v) {
    float* to = kByRow ? out[v] + i * out_step : out[i] + v * w;
    I::store(to, add ? I::add(I::load(to), sum[i][v]) : sum[i][v]);
  });
}

// Blocks of whole vectors of columns, from vector q of the block row on; what is left of `Vectors` goes to
// one less.
template <class I, int Vectors>
void strips_by_row(const DotTask& t, Asked<I>& next, std::int64_t q) {
  constexpr int w = I::kWidth;
  constexpr int kTall = I::kRegisters >= 32 ? 8 : 4;
  const std::int64_t cols = t.block_cols, rows = t.block_rows, per_block = cols / w;
  const std::int64_t all = (t.end - t.begin) * per_block;
  for (; q + Vectors <= all; q += Vectors) {
    next.few();
    const float* x[Vectors];
    float* out[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      const std::int64_t b = (q + v) / per_block, c = (q + v) % per_block * w;
      x[v] = t.x + t.col[t.begin + b] * t.lanes * cols + c;
      out[v] = t.out + b * rows * cols + c;
    }
    std::int64_t r = 0;
    const auto step = [&]<int Tall>() {
      const float* dy = t.dy + r;
      strip_tile<I, true, Tall, Vectors>(&dy, rows, x, cols, t.tokens, out, cols, t.accumulate);
      for (int v = 0; v < Vectors; ++v) out[v] += Tall * cols;
    };
    if constexpr (kTall >= 8) {
      for (; rows - r >= 8; r += 8) step.template operator()<8>();
    }
    for (; rows - r >= 4; r += 4) step.template operator()<4>();
    for (; rows - r >= 2; r += 2) step.template operator()<2>();
    for (; rows - r >= 1; ++r) step.template operator()<1>();
  }
  if constexpr (Vectors > 1) {
    if (q < all) strips_by_row<I, Vectors - 1>(t, next, q);
  }
}

// Blocks of one column and whole vectors of rows, from block b on.
template <class I, int Tall>
void strips_by_column(const DotTask& t, Asked<I>& next, std::int64_t b) {
  constexpr int w = I::kWidth;
  const std::int64_t rows = t.block_rows, all = t.end - t.begin;
  for (; b + Tall <= all; b += Tall) {
    next.few();
    const float* x[Tall];
    float* out[Tall];
    for (int i = 0; i < Tall; ++i) {
      x[i] = t.x + t.col[t.begin + b + i] * t.lanes;
      out[i] = t.out + (b + i) * rows;
    }
    std::int64_t r = 0;
    const auto step = [&]<int Vectors>() {
      const float* dy = t.dy + r;
      strip_tile<I, false, Tall, Vectors>(x, 1, &dy, rows, t.tokens, out, 0, t.accumulate);
      for (int i = 0; i < Tall; ++i) out[i] += Vectors * w;
    };
    for (; rows - r >= 2 * w; r += 2 * w) step.template operator()<2>();
    for (; rows - r >= w; r += w) step.template operator()<1>();
  }
  if constexpr (Tall > 1) {
    if (b < all) strips_by_column<I, Tall / 2>(t, next, b);
  }
}

template <class I>
void strips(const DotTask& t) {
  constexpr int tall = I::kRegisters >= 32 ? 8 : 4, vectors = 3;
  if (t.block_cols == 1) {
    Asked<I> next(t.next, (t.end - t.begin + tall - 1) / tall);
    strips_by_column<I, tall>(t, next, 0);
  } else {
    Asked<I> next(t.next, ((t.end - t.begin) * (t.block_cols / I::kWidth) + vectors - 1) / vectors);
    strips_by_row<I, vectors>(t, next, 0);
  }
}

}  // namespace rarefy::cpu
