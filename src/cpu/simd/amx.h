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
  static constexpr bool kByToken = true, kByLine = false;
  static constexpr double kTileCycles = 50;

  static void enter() {
    const tile::Config config;
    tile::configure(config);
  }
  static void leave() { tile::release(); }

  template <int kOutputs, int kHalves, class Work>
  static void multiply(const PairSteps& s, Work work) {
    multiply_tiles<Bf16Tiles, kOutputs, kHalves>(s, work);
  }

  template <class Tiles, int kOutputs, int kHalves, class Work>
  static void multiply_tiles(const PairSteps& s, Work work) {
    const auto w = [&](std::int32_t step) { return s.w + (step & s.w_ring) * s.w_stride; };
    const auto x = [&](std::int32_t step) { return s.x[step]; };
    squares<Tiles, kOutputs == 32, kHalves == 2>(s, w, x, kPairLine * 2, 32, work);
  }

  // x by token is the first operand: what comes out are rows of Y.
  template <int kHalves>
  static void multiply_tokens(const PairSteps& s) {
    const auto w = [&](std::int32_t step) { return s.w + step * s.w_stride; };
    const auto x = [&](std::int32_t step) { return s.x[step]; };
    squares<Bf16Tiles, kHalves == 2, true>(s, x, w, kGroup * 2, kTileSize, NoWork{});
  }

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
  // rows[step] · columns[step] summed up.
  template <class Tiles, bool kTall, bool kWide, class Rows, class Columns, class Work>
  [[gnu::always_inline]] static void squares(const PairSteps& s, Rows rows, Columns columns, int stride,
                                             int second, Work work) {
    using Sums = Squares<Tiles, kTall, kWide>;
    if (s.first) {
      Sums::zero();
    } else {
      Sums::load(s.sums);
    }
    for (std::int32_t step = 0; step < s.steps; ++step) {
      s.fetch(step);
      Sums::add(rows(step), columns(step), stride, second, work.at(step));
    }
    Sums::store(s.sums);
  }

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
