// Products in int8 on AVX2, on lanes of outputs, and the packing of x for them.
#pragma once

#include "cpu/quad_kernels.h"
#include "cpu/simd/avx2.h"
#include "cpu/simd/quad_lanes.h"

namespace rarefy::cpu {

// vpmaddubsw multiplies bytes without sign by bytes with one and adds two products to 16 bits, which may
// saturate: 255 · 127 · 2 is too much. So W's signs go to x: |w| · (sign(w) · x) is exact, 127 · 128 · 2 =
// 32,512 at most. Where w is negative ~x, which is −x − 1, stands for −x, and sums start from Σ |w| of these:
// vpsignb has the two ports of the multiplications, vpxor any of four.
struct Avx2QuadLanes : EightQuads<Avx2, false> {
  // 8 sums, not 12: with signs, magnitudes and a product on its way 16 registers hold no more.
  static constexpr int kVectors = 1;
  struct Vector {
    __m256i negative, magnitudes;
  };
  template <Storage kStorage>
  static Vector weights(const char* w) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    return {_mm256_cmpgt_epi8(_mm256_setzero_si256(), v), _mm256_abs_epi8(v)};
  }
  static Sum dot(Sum sum, __m256i x, const Vector& w) {
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitudes, _mm256_xor_si256(x, w.negative));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

// vpdpbusd, which processors without AVX-512 have since 2021 (AVX-VNNI). By name, so that no other code of
// this unit is compiled for them.
struct Avx2VnniLanes : EightQuads<Avx2, true> {
  using Vector = __m256i;
  template <Storage kStorage>
  static Vector weights(const char* w) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  }
  static Sum dot(Sum sum, __m256i x, Vector w) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
    return sum;
  }
};

// Packing. kUnsigned: x plus 128.
template <bool kUnsigned>
struct Avx2Quads {
  static constexpr int kTokens = kPanelTokens;
  static constexpr bool kByToken = false;

  static __m256 load(const float* x) { return Avx2::load(x); }
  static __m256 load(const std::uint16_t* x) { return Avx2::load_bf16(x); }

  template <class T>
  static std::uint32_t absmax(const T* x, std::int32_t count) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (std::int32_t k = 0; k < count; k += Avx2::kWidth) {
      alignas(32) T edge[Avx2::kWidth] = {};
      const bool whole = k + Avx2::kWidth <= count;
      if (!whole) __builtin_memcpy(edge, x + k, static_cast<std::size_t>(count - k) * sizeof(T));
      const __m256i v = _mm256_castps_si256(load(whole ? x + k : edge));
      most = _mm256_max_epu32(most, _mm256_and_si256(v, magnitude));
    }
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_srli_epi64(two, 32))));
  }

  // 32 features of a token. Dword r has features 4 · line(r) … : the order in which packing leaves them.
  template <class T>
  static __m256i rounded(const T* x, float inverse) {
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + 8 * i), by));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return kUnsigned ? _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80))) : bytes;
  }
  static constexpr int kFeatures = 32, kLines = kFeatures / kQuad;
  static constexpr int line(int r) { return r % 4 * 2 + r / 4; }
  static __m256i transposed(__m256i v) {  // each 4 × 4 bytes
    const __m128i bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(bytes));
  }
  static void transpose(__m256i (&m)[kLines]) {
    __m256 t[kLines];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) t[i] = _mm256_castsi256_ps(m[i]);
    Avx2::transpose(t);
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) m[i] = _mm256_castps_si256(t[i]);
  }

  // 32 tokens × 64 features. Feature by feature, tokens lie in fours 0, 2, 4, 6, 1, 3, 5, 7, which
  // interleaving halves of vectors (interleave_quad) undoes.
  template <class T>
  static void pack(const T* x, std::int64_t stride, const float* inverse, int live, bool quads,
                   std::uint8_t* panel) {
    for (int k = 0; k < kQuadGroup; k += kFeatures, panel += kFeatures * kTokens) {
      alignas(32) __m256i fours[kLines][4] = {};
      for (int j = 0; j < 2 * live; ++j) {
        __m256i v[8];
#pragma GCC unroll 8
        for (int m = 0; m < 8; ++m) v[m] = rounded(x + (8 * j + m) * stride + k, inverse[8 * j + m]);
        transpose(v);
#pragma GCC unroll 8
        for (int r = 0; r < kLines; ++r) fours[line(r)][j] = quads ? v[r] : transposed(v[r]);
      }
      for (int r = 0; r < kLines; ++r) {
        __m256 v[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) v[j] = _mm256_castsi256_ps(fours[r][j]);
        if (!quads) Avx2::transpose_quads(v);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          Avx2::store(reinterpret_cast<float*>(panel + r * kQuadLine) + j * Avx2::kWidth, v[j]);
        }
      }
    }
  }
};

// Up to 4 or 8 tokens: lines of four features, [token][4]; or a feature's tokens side by side.
template <bool kUnsigned, int kTokens>
struct Avx2FewQuads {
  using Quads = Avx2Quads<kUnsigned>;

  static void pack(const QuadPack& t) {
    if (t.bf16) return pack_of<std::uint16_t>(t);
    pack_of<float>(t);
  }

 private:
  template <class T>
  static void pack_of(const QuadPack& t) {
    constexpr std::int32_t kFeatures = Quads::kFeatures;
    const T* x = static_cast<const T*>(t.x);
    float inverse[kTokens];
    for (std::int32_t m = 0; m < kTokens; ++m) {
      scale_row<Quads>(t, m, x + m * t.row_stride, t.scales[m], inverse[m]);
    }
    for (std::int32_t k = 0; k < t.padded; k += kFeatures) {
      const std::int32_t cols = t.cols - k < 0 ? 0 : t.cols - k < kFeatures ? t.cols - k : kFeatures;
      __m256i v[8] = {};
      for (std::int32_t m = 0; m < kTokens && m < t.rows; ++m) {
        alignas(32) T edge[kFeatures] = {};
        const T* from = x + m * t.row_stride + k;
        if (cols < kFeatures) __builtin_memcpy(edge, from, static_cast<std::size_t>(cols) * sizeof(T));
        v[m] = Quads::rounded(cols < kFeatures ? edge : from, inverse[m]);
      }
      Quads::transpose(v);
      alignas(32) std::uint8_t to[kFeatures * kTokens];
      const bool quads = t.order == PairOrder::paired;
      for (int r = 0; r < Quads::kLines; ++r) put(v[r], quads, to + Quads::line(r) * kQuad * kTokens);
      const std::int32_t width = t.padded - k < kFeatures ? t.padded - k : kFeatures;
      __builtin_memcpy(t.panel + std::int64_t{k} * kTokens, to, static_cast<std::size_t>(width) * kTokens);
    }
  }
  // A line; tokens 0 … 3 are its first half.
  static void put(__m256i line, bool quads, std::uint8_t* to) {
    const __m256i v = quads ? line : Quads::transposed(line);
    if constexpr (kTokens == 4) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(v));
    } else {
      const __m256i in_turn = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                          quads ? v : _mm256_permutevar8x32_epi32(v, in_turn));
    }
  }
};

}  // namespace rarefy::cpu
