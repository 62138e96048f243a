// Sums of up to 2 × 2 of AMX's tiles: rows of the first operand by columns of the second. Sums lie in tiles
// 0 … 3, a row of them 128 bytes; rows in 4 and 5, columns in 6 and 7.
#pragma once

#include "cpu/pairs.h"
#include "cpu/simd/amx_tiles.h"

namespace rarefy::cpu {

struct Bf16Tiles {
  template <int kSums, int kA, int kB>
  [[gnu::always_inline]] static void dot() {
    tile::dot_bf16<kSums, kA, kB>();
  }
};

// kTall: of 32 rows, else 16; kWide: of 32 columns.
template <class Tiles, bool kTall, bool kWide>
struct Squares {
  static constexpr int kSumsStride = kPanelTokens * 4, kRowsStride = kGroup * 2;

  [[gnu::always_inline]] static void zero() {
    tile::zero<0>();
    if constexpr (kWide) tile::zero<1>();
    if constexpr (kTall) tile::zero<2>();
    if constexpr (kTall && kWide) tile::zero<3>();
  }
  [[gnu::always_inline]] static void store(float* sums) {
    float* below = sums + 16 * kPanelTokens;
    tile::store<0>(sums, kSumsStride);
    if constexpr (kWide) tile::store<1>(sums + 16, kSumsStride);
    if constexpr (kTall) tile::store<2>(below, kSumsStride);
    if constexpr (kTall && kWide) tile::store<3>(below + 16, kSumsStride);
  }

  // A step; columns' lines are `stride` bytes apart, those of their second tile lie `second` elements behind.
  // `along` is called for each of 16 pairs between the instructions, if there are any (NoWork).
  template <class Along>
  [[gnu::always_inline]] static void add(const std::uint16_t* rows, const std::uint16_t* columns, int stride,
                                         int second, Along along) {
    __asm__ volatile("" ::: "memory");  // tile loads are asm that GCC moves across stores
    const auto quarter = [along](int from) {
      if (!along.any()) return;
#pragma GCC unroll 4
      for (int p = from; p < from + 4; ++p) along(p);
    };
    tile::load<6>(columns, stride);
    tile::load<4>(rows, kRowsStride);
    quarter(0);
    Tiles::template dot<0, 4, 6>();
    if constexpr (kWide) tile::load<7>(columns + second, stride);
    quarter(4);
    if constexpr (kWide) Tiles::template dot<1, 4, 7>();
    if constexpr (kTall) tile::load<5>(rows + kTileSize, kRowsStride);
    quarter(8);
    if constexpr (kTall) Tiles::template dot<2, 5, 6>();
    quarter(12);
    if constexpr (kTall && kWide) Tiles::template dot<3, 5, 7>();
  }
};

}  // namespace rarefy::cpu
