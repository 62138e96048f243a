// Products in pairs on AMX's tiles: 2 × 2 of them hold 32 outputs × 32 tokens. A tile of W is the first
// operand as it is packed, 16 pairs of features by 16 tokens are the second.
#pragma once

#include "cpu/simd/avx512_pairs.h"

namespace rarefy::cpu {

struct Amx : Avx512Pairs {
  static constexpr int kRows = 32;
  static constexpr double kTileCycles = 50;

  // Eight tiles of 16 rows of 64 bytes. GCC 12's _tile_loadconfig tells the compiler of 8 bytes that are
  // read, and the other stores go.
  static void enter() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof(config) == 64);
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static void leave() { _tile_release(); }

  // Sums in tiles 0 … 3: [output / 16][token / 16]; W in 4 and 5, X in 6 and 7.
  template <int kOutputs, int kHalves, class Work>
  static void multiply(const PairSteps& s, Work work) {
    constexpr bool kTall = kOutputs == 32, kWide = kHalves == 2;
    constexpr int kSumsStride = kPanelTokens * 4, kXStride = kPairLine * 2, kWStride = kGroup * 2;
    float* below = s.sums + 16 * kPanelTokens;
    if (s.first) {
      _tile_zero(0);
      if constexpr (kWide) _tile_zero(1);
      if constexpr (kTall) _tile_zero(2);
      if constexpr (kTall && kWide) _tile_zero(3);
    } else {
      _tile_loadd(0, s.sums, kSumsStride);
      if constexpr (kWide) _tile_loadd(1, s.sums + 16, kSumsStride);
      if constexpr (kTall) _tile_loadd(2, below, kSumsStride);
      if constexpr (kTall && kWide) _tile_loadd(3, below + 16, kSumsStride);
    }
    for (std::int32_t step = 0; step < s.steps; ++step) {
      const std::uint16_t* x = s.x[step];
      const std::uint16_t* w = s.w + step * s.w_stride;
      s.fetch(step);
      __asm__ volatile("" ::: "memory");  // tile loads are asm that GCC moves across stores
      const auto quarter = [&](int from) {
        if (!work.any(step)) return;
#pragma GCC unroll 4
        for (int p = from; p < from + 4; ++p) work(step, p);
      };
      _tile_loadd(6, x, kXStride);
      _tile_loadd(4, w, kWStride);
      quarter(0);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kWide) _tile_loadd(7, x + 32, kXStride);
      quarter(4);
      if constexpr (kWide) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTall) _tile_loadd(5, w + kTileSize, kWStride);
      quarter(8);
      if constexpr (kTall) _tile_dpbf16ps(2, 5, 6);
      quarter(12);
      if constexpr (kTall && kWide) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s.sums, kSumsStride);
    if constexpr (kWide) _tile_stored(1, s.sums + 16, kSumsStride);
    if constexpr (kTall) _tile_stored(2, below, kSumsStride);
    if constexpr (kTall && kWide) _tile_stored(3, below + 16, kSumsStride);
  }
};

}  // namespace rarefy::cpu
