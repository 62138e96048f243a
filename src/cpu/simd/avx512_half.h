// Eight floats on AVX-512's 32 registers: for outputs that fill half a vector. A trait of its own, not
// Avx2's: its functions are compiled with AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace rarefy::cpu {

struct Avx512Half {
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 32;
  using Vec = __m256;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec set1(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  static Vec select_negative(Vec x, Vec if_negative, Vec otherwise) {
    return _mm256_mask_blend_ps(_mm256_cmp_ps_mask(x, zero(), _CMP_LT_OQ), otherwise, if_negative);
  }
  static Vec round(Vec x) { return _mm256_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec scale(Vec v, Vec n) { return _mm256_scalef_ps(v, n); }

  static Vec load_bf16(const std::uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store_bf16(std::uint16_t* p, Vec v) {  // to nearest even; NaN stays a (quiet) NaN
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __mmask8 nan = _mm256_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m256i words = _mm256_srli_epi32(_mm256_mask_blend_epi32(nan, rounded, quiet), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtepi32_epi16(words));
  }
  static Vec load_f16(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f16(std::uint16_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  static Vec load_i8(const std::int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
  }

  // The first `count` alone: nothing else is read or written.
  static Vec load_first(const float* p, int count) { return _mm256_maskz_loadu_ps(mask(count), p); }
  static void store_first(float* p, Vec v, int count) { _mm256_mask_storeu_ps(p, mask(count), v); }
  static Vec first(Vec v, int count) { return _mm256_maskz_mov_ps(mask(count), v); }
  static __mmask8 mask(int count) { return static_cast<__mmask8>((1U << count) - 1); }

  static float sum(Vec v) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
    const Vec sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
  }
};

}  // namespace rarefy::cpu
