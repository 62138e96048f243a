// Eight doubles: what few_singles.h and in_place.h need of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/collect.h"

namespace rarefy::cpu {

struct Avx512Doubles {
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 32;
  using Vec = __m512d;

  static Vec zero() { return _mm512_setzero_pd(); }
  static Vec set1(double x) { return _mm512_set1_pd(x); }
  static Vec load(const double* p) { return _mm512_loadu_pd(p); }
  static void store(double* p, Vec v) { _mm512_storeu_pd(p, v); }
  static Vec add(Vec a, Vec b) { return _mm512_add_pd(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_pd(a, b); }  // b if either is NaN
  static double sum(Vec v) { return _mm512_reduce_add_pd(v); }
  static void sum4(Vec a, Vec b, Vec c, Vec d, double* out) {
    const Vec ab = add(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
    const Vec cd = add(_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
    const auto halves = [](Vec v) {
      return _mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
    };
    const __m256d p = halves(ab), q = halves(cd);
    _mm256_storeu_pd(out,
                     _mm256_add_pd(_mm256_permute2f128_pd(p, q, 0x20), _mm256_permute2f128_pd(p, q, 0x31)));
  }

  // As Avx512's.
  static Vec gather(const double* x, const std::int32_t* index) {
    return _mm512_i32gather_pd(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(index)), x, 8);
  }
  static Vec gather(const double* x, const std::uint16_t* index) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
    return _mm512_i32gather_pd(_mm256_cvtepu16_epi32(narrow), x, 8);
  }
  static Vec gather_first(const double* x, const std::int32_t* index, int count) {
    return gather_lanes(x, _mm256_maskz_loadu_epi32(mask(count), index), mask(count));
  }
  static Vec gather_first(const double* x, const std::uint16_t* index, int count) {
    return gather_lanes(x, _mm256_cvtepu16_epi32(_mm_maskz_loadu_epi16(mask(count), index)), mask(count));
  }
  static Vec gather_lanes(const double* x, __m256i index, __mmask8 lanes) {
    return _mm512_mask_i32gather_pd(zero(), lanes, index, x, 8);
  }
  template <class Index>
  static Vec collect(const double* x, const Index* index) {
    return _mm512_insertf64x4(_mm512_castpd256_pd512(collect4(x, index)), collect4(x, index + 4), 1);
  }
  static Vec first(Vec v, int count) { return _mm512_maskz_mov_pd(mask(count), v); }
  static Vec load_first(const double* p, int count) { return _mm512_maskz_loadu_pd(mask(count), p); }
  static __mmask8 mask(int count) { return static_cast<__mmask8>((1U << count) - 1); }
};

// Four, for in_place.h where there are fewer columns than eight.
struct Avx512DoublesHalf {
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 32;
  using Vec = __m256d;

  static Vec zero() { return _mm256_setzero_pd(); }
  static Vec set1(double x) { return _mm256_set1_pd(x); }
  static Vec load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, Vec v) { _mm256_storeu_pd(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_pd(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
  static double sum(Vec v) {
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }
};

}  // namespace rarefy::cpu
