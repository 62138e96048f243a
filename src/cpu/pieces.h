// Rows of W cut into pieces at the tiles of X that fit L1, for blocks of few rows: there a product is as fast
// as x comes, a line for each FMA, and L2 has no more than half of it. Pieces of one tile come sorted by
// their length, so that ends of loops are foreseen, and go side by side: enough sums under way to hide an
// FMA's latency. Sums are loaded and stored once a piece, and are made in gather.h's order and parts.
#pragma once

#include "cpu/gather.h"

namespace rarefy::cpu {

inline constexpr int kLineFloats = 16;

// Entries of `Side` pieces, the longest first, side by side.
template <class I, int Rows, int Cols, int Vectors, int Side>
[[gnu::always_inline]] inline const std::uint16_t* multiply_pieces(const PiecesTask& t, const Piece* piece,
                                                                   const std::uint16_t* columns) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  constexpr int w = I::kWidth;
  const std::uint16_t* column[Side];
  const float* values[Side];
  Vec<I> sum[Side][Rows][Vectors];
  const auto each_sum = [&](auto f) {
#pragma GCC unroll 8
    for (int s = 0; s < Side; ++s) {
      float* y = t.y + piece[s].row * (Rows * lanes);
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) f(sum[s][r][v], y + r * lanes + v * w);
      }
    }
  };
#pragma GCC unroll 8
  for (int s = 0; s < Side; ++s) {
    column[s] = columns;
    columns += padded_columns(piece[s]);
    values[s] = t.values + std::int64_t{piece[s].begin} * (Rows * Cols);
    // The next ones, from anywhere in W: no hardware foresees them.
    const float* later = t.values + std::int64_t{piece[s + kPiecesAhead].begin} * (Rows * Cols);
    __builtin_prefetch(later);
    __builtin_prefetch(later + kLineFloats);
  }
  each_sum([](Vec<I>& one, const float* y) { one = I::load(y); });
  const auto multiply = [&](int s, std::int64_t e, std::int64_t at) {
    const float* x = t.x + at * (Cols * lanes);
    const float* block = values[s] + e * (Rows * Cols);
#pragma GCC unroll 8
    for (int c = 0; c < Cols; ++c) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) {
        const Vec<I> xv = I::load(x + c * lanes + v * w);
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) {
          sum[s][r][v] = I::fma(I::set1(block[r * Cols + c]), xv, sum[s][r][v]);
        }
      }
    }
  };
  // Four at a time: one load for four columns, as loads are what bounds this; and loops of few turns, whose
  // ends branch predictors remember.
  const std::int64_t all = piece[Side - 1].count;
  const auto together = [&]<int Steps>(std::int64_t e) {
    std::uint64_t four[Side];
#pragma GCC unroll 8
    for (int s = 0; s < Side; ++s) __builtin_memcpy(&four[s], column[s] + e, sizeof(four[s]));
#pragma GCC unroll 4
    for (int i = 0; i < Steps; ++i) {
#pragma GCC unroll 8
      for (int s = 0; s < Side; ++s) multiply(s, e + i, four[s] >> (16 * i) & 0xffff);
    }
  };
  std::int64_t e = 0;
  for (; e + 4 <= all; e += 4) together.template operator()<4>(e);
  if ((all & 2) != 0) {
    together.template operator()<2>(e);
    e += 2;
  }
  if ((all & 1) != 0) together.template operator()<1>(e);
#pragma GCC unroll 8
  for (int s = 0; s < Side - 1; ++s) {
    for (std::int64_t i = all; i < piece[s].count; ++i) multiply(s, i, column[s][i]);
  }
  each_sum([](const Vec<I>& one, float* y) { I::store(y, one); });
  return columns;
}

// The pieces of one list, whose columns begin at `columns`; returns where they end.
template <class I, int Rows, int Cols, int Vectors>
const std::uint16_t* multiply_list(const PiecesTask& t, const Piece* piece, const Piece* end,
                                   const std::uint16_t* columns) {
  // Sums under way: two FMAs a cycle, four cycles each.
  constexpr int kSide = Rows * Vectors >= 8 ? 1 : Rows * Vectors >= 3 ? 2 : 4;
  for (; end - piece >= kSide; piece += kSide) {
    columns = multiply_pieces<I, Rows, Cols, Vectors, kSide>(t, piece, columns);
  }
  for (; piece != end; ++piece) columns = multiply_pieces<I, Rows, Cols, Vectors, 1>(t, piece, columns);
  return columns;
}

template <class I, int Rows, int Cols, int Vectors>
void multiply_lists(const PiecesTask& t) {
  constexpr std::int64_t size = Rows * Vectors * I::kWidth;
  const std::uint16_t* columns = multiply_list<I, Rows, Cols, Vectors>(t, t.piece, t.after, t.columns);
  if (t.after == t.end) return;
  for (const Piece* p = t.after; p != t.end; ++p) {
    float* y = t.y + p->row * size;
    add_total<I>(t.total + p->row * size, y, size, p->second != 0);
    clear<I>(y, size);
  }
  multiply_list<I, Rows, Cols, Vectors>(t, t.after, t.end, columns);
}

template <class I, int Rows, int Cols>
void pieces_vectors(const PiecesTask& t) {
  dispatch_vectors(t.vectors, [&]<int Vectors>() { multiply_lists<I, Rows, Cols, Vectors>(t); });
}

template <class I>
void pieces(const PiecesTask& t) {
  switch (8 * t.out_block + t.red_block) {
    case 8 + 1: return pieces_vectors<I, 1, 1>(t);
    case 8 + 2: return pieces_vectors<I, 1, 2>(t);
    case 16 + 1: return pieces_vectors<I, 2, 1>(t);
    case 16 + 2: return pieces_vectors<I, 2, 2>(t);
    default: return;
  }
}

}  // namespace rarefy::cpu
