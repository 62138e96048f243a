// Products in int8 on AVX2. vpmaddubsw multiplies bytes without sign by bytes with one and adds two products
// to 16 bits, which may saturate: 255 · 127 · 2 is too much. So W's signs go to x: |w| · (sign(w) · x), at
// most 128 · 127 · 2 = 32,512, is exact.
#pragma once

#include "cpu/simd/avx2.h"
#include "cpu/simd/interleave_quad.h"
#include "cpu/simd/quads_plain.h"

namespace rarefy::cpu {

struct Avx2Quads : QuadsPlain<Avx2Quads, Avx2> {
  static constexpr int kRows = 2, kLeast = kTileRows;
  static constexpr double kTileCycles = 1800;

  // In fours of tokens 0, 2, 4, 6, 1, 3, 5, 7: as interleaving halves of vectors undoes it.
  static constexpr int position(int token) {
    const int four = token / 4;
    return (four % 2 * 4 + four / 2) * 4 + token % 4;
  }
  static void quad(const std::uint16_t* panel, const std::uint32_t* offsets, std::uint16_t* to) {
    interleave_quad(panel, offsets, to);
  }

  template <int kOutputs, int kHalves, class Work>
  static void multiply(const PairSteps& s, Work work) {
    constexpr int kVectors = 2 * kHalves;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[kOutputs][kVectors];
    const auto each = [](auto f) {
#pragma GCC unroll 2
      for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) f(o, v);
      }
    };
    const auto at = [&](int o, int v) {
      return reinterpret_cast<__m256i*>(s.sums + o * kPanelTokens + v * 8);
    };
    each([&](int o, int v) { sum[o][v] = s.first ? _mm256_setzero_si256() : _mm256_loadu_si256(at(o, v)); });
    for (std::int32_t step = 0; step < s.steps; ++step) {
      const std::uint16_t* x = s.x[step];
      const std::uint16_t* w = s.w + step * s.w_stride;
      const int lines = step + 1 == s.steps ? s.last_pairs : kGroup / 2;
      const auto along = work.at(step);
      for (int p = 0; p < kGroup / 2 && along.any(); ++p) along(p);
      for (int p = 0; p < lines; ++p, x += kPairLine, w += 2) {
#pragma GCC unroll 2
        for (int o = 0; o < kOutputs; ++o) {
          std::int32_t four;
          std::memcpy(&four, w + o * kGroup, sizeof(four));
          const __m256i wv = _mm256_set1_epi32(four), magnitude = _mm256_abs_epi8(wv);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            const __m256i xv = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + v * 16));
            const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(xv, wv));
            sum[o][v] = _mm256_add_epi32(sum[o][v], _mm256_madd_epi16(pairs, ones));
          }
        }
      }
    }
    each([&](int o, int v) { _mm256_storeu_si256(at(o, v), sum[o][v]); });
  }
};

}  // namespace rarefy::cpu
