// Up to eight tokens in bf16 on what linear_pairs.cc packs, output blocks of 4 that meet parts of block rows:
// a vector of W is four lines (pairs of columns) × 4 outputs as it lies in memory. Four lines of x, each the
// pairs of four tokens, are put together as a vector, from which one shuffle spreads a token's over the
// outputs: the gathering is the same for one token and for four. 768→3072 at .5 on a Zen 4, × dense bf16 with
// one and four tokens: single weights .97 and 1.10 (.58 and .47 entry by entry), 6×6 2.07 and 2.24.
#pragma once

#include "cpu/simd/avx512_pairs.h"

namespace rarefy::cpu {

struct Avx512FewGroups {
  static constexpr int kOutputs = 4, kTokens = 4;

  // Panels of four tokens: [feature][token], or [pair][token][2], whole groups of features.
  static void pack(const PairPack& t) {
    const std::int32_t end = (t.padded + kGroup - 1) / kGroup * kGroup;
    for (std::int32_t m = 0; m < t.rows; m += kTokens) pack_four(t, m, end, t.panel + std::int64_t{m} * end);
  }

  static void multiply(const PairFew& t) {
    switch (t.source) {
      case PairSource::columns: return multiply_source<PairSource::columns>(t);
      case PairSource::lines: return multiply_source<PairSource::lines>(t);
      default: multiply_source<PairSource::whole>(t);
    }
  }

 private:
  static constexpr int kFeatures = 8;              // that are packed at a time
  static constexpr std::int32_t kPart = 64;        // groups whose sums are one part of all
  static constexpr std::int64_t kAhead = 4 << 10;  // bytes of W

  static void pack_four(const PairPack& t, std::int32_t first, std::int32_t end, std::uint16_t* panel) {
    const bool pairs = t.order == PairOrder::paired;
    for (std::int32_t k = 0; k < end; k += kFeatures) {
      __m128i of[kTokens];
#pragma GCC unroll 4
      for (std::int32_t i = 0; i < kTokens; ++i) {
        const std::int32_t m = first + i;
        of[i] = m < t.rows ? features(t, m * t.row_stride + k, t.cols - k) : _mm_setzero_si128();
      }
      __m128i to[kTokens];  // two features of all tokens, or a pair
      const __m128i a = _mm_unpacklo_epi16(of[0], of[1]), b = _mm_unpacklo_epi16(of[2], of[3]);
      const __m128i c = _mm_unpackhi_epi16(of[0], of[1]), d = _mm_unpackhi_epi16(of[2], of[3]);
      to[0] = _mm_unpacklo_epi32(a, b), to[1] = _mm_unpackhi_epi32(a, b);
      to[2] = _mm_unpacklo_epi32(c, d), to[3] = _mm_unpackhi_epi32(c, d);
      // Two features, [feature][token], as pairs.
      const __m128i in_pairs = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
      if (pairs) {
        for (__m128i& two : to) two = _mm_shuffle_epi8(two, in_pairs);
      }
      __builtin_memcpy(panel + std::int64_t{k} * kTokens, to, sizeof(to));
    }
  }

  // Eight from element `at` of x, of which `left` are there, rounded if they are floats.
  static __m128i features(const PairPack& t, std::int64_t at, std::int32_t left) {
    const std::int64_t size = t.floats ? 4 : 2;
    const char* from = static_cast<const char*>(t.x) + at * size;
    alignas(32) char edge[kFeatures * 4] = {};
    if (left < kFeatures) {
      if (left > 0) __builtin_memcpy(edge, from, static_cast<std::size_t>(left * size));
      from = edge;
    }
    if (t.floats) return (__m128i)_mm256_cvtneps_pbh(_mm256_loadu_ps(reinterpret_cast<const float*>(from)));
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  // Lines 4 · i … 4 · i + 3 of a group. Offsets are those of panels of 32 tokens.
  template <PairSource kSource>
  static __m512i lines(const std::uint16_t* panel, const std::uint32_t* offsets, int i) {
    const auto at = [&](int o) { return panel + (offsets[o] >> 3); };
    const auto whole = [](const std::uint16_t* p) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    const auto half = [](const std::uint16_t* p) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    };
    if constexpr (kSource == PairSource::whole) return _mm512_loadu_si512(at(0) + 32 * i);
    const auto line = [&](int l) {
      if constexpr (kSource == PairSource::lines) return whole(at(l));
      return _mm_unpacklo_epi16(half(at(2 * l)), half(at(2 * l + 1)));
    };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(line(4 * i)), line(4 * i + 1), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(line(4 * i + 2)), line(4 * i + 3), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }

  template <PairSource kSource>
  static void multiply_source(const PairFew& t) {
    switch (t.tokens) {
      case 1: return multiply_some<kSource, 1>(t);
      case 2: return multiply_some<kSource, 2>(t);
      case 3: return multiply_some<kSource, 3>(t);
      case 4: return multiply_some<kSource, 4>(t);
      case 5:
      case 6: return multiply_some<kSource, 6>(t);
      default: multiply_some<kSource, 8>(t);
    }
  }

  template <PairSource kSource, int Tokens>
  static void multiply_some(const PairFew& t) {
    constexpr std::int32_t kOffsets = offsets_of(kSource), kVectors = kGroup / 2 / 4;  // of a group
    const std::uint16_t* w = t.w;
    const std::uint32_t* offsets = t.offsets;
    float* sums = t.sums;
    for (std::int32_t b = 0; b < t.blocks; ++b, sums += kOutputs * kPanelTokens) {
      __m512 total[Tokens] = {};
      for (std::int32_t left = t.first[b + 1] - t.first[b]; left > 0; left -= kPart) {
        __m512 sum[2][Tokens] = {};
        for (std::int32_t g = 0; g < (left < kPart ? left : kPart); ++g, offsets += kOffsets) {
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; ++i, w += 32) {
            __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead);
            const auto wv = (__m512bh)_mm512_loadu_si512(w);
            __m512i x;
            const auto add = [&]<int kToken>() {
              if constexpr (kToken < Tokens) {
                constexpr auto kSpread = static_cast<_MM_PERM_ENUM>(0x55 * (kToken % kTokens));
                const auto xv = (__m512bh)_mm512_shuffle_epi32(x, kSpread);
                sum[i % 2][kToken] = _mm512_dpbf16_ps(sum[i % 2][kToken], wv, xv);
              }
            };
            x = lines<kSource>(t.x, offsets, i);
            add.template operator()<0>();
            add.template operator()<1>();
            add.template operator()<2>();
            add.template operator()<3>();
            if constexpr (Tokens > kTokens) x = lines<kSource>(t.x + t.x_stride, offsets, i);
            add.template operator()<4>();
            add.template operator()<5>();
            add.template operator()<6>();
            add.template operator()<7>();
          }
        }
#pragma GCC unroll 8
        for (int m = 0; m < Tokens; ++m) {
          total[m] = _mm512_add_ps(total[m], _mm512_add_ps(sum[0][m], sum[1][m]));
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < Tokens; ++m) put(total[m], sums + m);
    }
  }

  // The four lines' sums of each output as one.
  static void put(__m512 v, float* sums) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    alignas(16) float outputs[kOutputs];
    _mm_store_ps(outputs, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#pragma GCC unroll 4
    for (int r = 0; r < kOutputs; ++r) sums[r * kPanelTokens] = outputs[r];
  }
};

}  // namespace rarefy::cpu
