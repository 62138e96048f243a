// Products in pairs on AMX's tiles: 2 × 2 of them hold 32 outputs × 32 tokens. A tile of W is the first
// operand as it is packed, 16 pairs of features by 16 tokens are the second.
#pragma once

#include "cpu/simd/amx_range.h"
#include "cpu/simd/avx512_pairs.h"

namespace rarefy::cpu {

struct Amx : Avx512Pairs<Amx> {
  static constexpr int kRows = 32, kLeast = 32;
  static constexpr int kEarly = 2;          // tiles are not loaded from stores that are under way
  static constexpr int kRangeOutputs = 32;  // whose rows of Y are lines of 64 bytes
  static constexpr int kTokensOutputs = kRangeOutputs;
  static constexpr bool kByToken = true, kByLine = false;
  static constexpr double kTileCycles = 50;

  static void enter() {
    const tile::Config config;
    tile::configure(config);
  }
  static void leave() { tile::release(); }

  // Of the weight gradient, whose sums start from 0 and which asks for nothing ahead.
  template <int kOutputs, int kHalves, class Work>
  static void multiply(const PairSteps& s, Work work) {
    using Sums = Squares<Bf16Tiles, kOutputs == 32, kHalves == 2>;
    Sums::zero();
    for (std::int32_t step = 0; step < s.steps; ++step) {
      Sums::add(s.w + (step & s.w_ring) * s.w_stride, s.x[step], kPairLine * 2, 32, work.at(step));
    }
    Sums::store(s.sums);
  }
  static void range(const PairRange& t) { multiply_range<Amx, Bf16Tiles>(t); }

  // 32 columns at a time; while tiles work on these, the ones before are added to their sums.
  static void spread(const PairSpread& t) {
    alignas(64) float done[2][32 * kPanelTokens];
    const auto add = [&](std::int32_t first, const float* from) {
      const std::int32_t count = t.entries - first < 32 ? t.entries - first : 32;
      for (std::int32_t i = 0; i < count; ++i, from += kPanelTokens) {
        float* to = t.sums + std::int64_t{t.columns[first + i]} * kPanelTokens;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(from)));
        _mm512_storeu_ps(to + 16, _mm512_add_ps(_mm512_loadu_ps(to + 16), _mm512_load_ps(from + 16)));
      }
    };
    for (std::int32_t e = 0; e < t.entries; e += 32) {
      spread_columns(t, e);
      if (e > 0) add(e - 32, done[e / 32 % 2 ^ 1]);
      float* to = done[e / 32 % 2];
      tile::store<0>(to, kPanelTokens * 4);
      tile::store<1>(to + 16, kPanelTokens * 4);
      tile::store<2>(to + 16 * kPanelTokens, kPanelTokens * 4);
      tile::store<3>(to + 16 * kPanelTokens + 16, kPanelTokens * 4);
    }
    if (t.entries > 0) add((t.entries - 1) / 32 * 32, done[(t.entries - 1) / 32 % 2]);
  }

 private:
  static void spread_columns(const PairSpread& t, std::int32_t first) {
    constexpr int kXStride = kPairLine * 2;
    const std::uint16_t* w = t.w + std::int64_t{first} * t.rows;
    const std::int32_t count = t.entries - first < 32 ? t.entries - first : 32;
    alignas(64) std::uint16_t edge[32 * kGroup];
    tile::zero<0>();
    tile::zero<1>();
    tile::zero<2>();
    tile::zero<3>();
    for (std::int32_t o = 0; o < t.rows; o += kGroup) {
      const std::uint16_t* from = w + o;
      std::int64_t stride = std::int64_t{t.rows} * 2;
      const bool half = t.rows - o < kGroup;
      if (count < 32 || half) {  // what is no entry's, or another's, is 0
        if (count < 32) __builtin_memset(edge, 0, sizeof(edge));
        for (std::int32_t i = 0; i < count; ++i) {
          const std::uint16_t* entry = from + std::int64_t{i} * t.rows;
          const auto* sixteen = reinterpret_cast<const __m256i*>(entry);
          _mm512_store_si512(edge + i * kGroup, half ? _mm512_zextsi256_si512(_mm256_loadu_si256(sixteen))
                                                     : _mm512_loadu_si512(entry));
        }
        from = edge;
        stride = kGroup * 2;
      }
      const std::uint16_t* dy = t.dy + std::int64_t{o} * kPanelTokens;
      __asm__ volatile("" ::: "memory");  // as in multiply
      tile::load<6>(dy, kXStride);
      tile::load<4>(from, stride);
      tile::dot_bf16<0, 4, 6>();
      tile::load<7>(dy + 32, kXStride);
      tile::dot_bf16<1, 4, 7>();
      tile::load<5>(from + 8 * stride, stride);  // 16 rows further, in elements
      tile::dot_bf16<2, 5, 6>();
      tile::dot_bf16<3, 5, 7>();
    }
  }
};

}  // namespace rarefy::cpu
