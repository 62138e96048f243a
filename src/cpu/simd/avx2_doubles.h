// Four doubles: what few_singles.h and in_place.h need of AVX2 with FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/collect.h"

namespace rarefy::cpu {

struct Avx2Doubles {
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 16;
  using Vec = __m256d;

  static Vec zero() { return _mm256_setzero_pd(); }
  static Vec set1(double x) { return _mm256_set1_pd(x); }
  static Vec load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, Vec v) { _mm256_storeu_pd(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_pd(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }  // b if either is NaN
  static double sum(Vec v) {
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }

  static void sum4(Vec a, Vec b, Vec c, Vec d, double* out) {
    const Vec p = add(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
    const Vec q = add(_mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d));
    store(out, add(_mm256_permute2f128_pd(p, q, 0x20), _mm256_permute2f128_pd(p, q, 0x31)));
  }

  // As Avx2's. Of all lanes under a mask: GCC 12 warns inside its header of the gather without one.
  static Vec gather_lanes(const double* x, __m128i index, __m256i lanes) {
    return _mm256_mask_i32gather_pd(zero(), x, index, _mm256_castsi256_pd(lanes), 8);
  }
  static Vec gather(const double* x, const std::int32_t* index) {
    return gather_lanes(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(index)), mask(kWidth));
  }
  static Vec gather(const double* x, const std::uint16_t* index) {
    return gather_lanes(x, _mm_cvtepu16_epi32(_mm_loadu_si64(index)), mask(kWidth));
  }
  static Vec gather_first(const double* x, const std::int32_t* index, int count) {
    const __m128i lanes = _mm_cmpgt_epi32(_mm_set1_epi32(count), _mm_setr_epi32(0, 1, 2, 3));
    return gather_lanes(x, _mm_maskload_epi32(index, lanes), mask(count));
  }
  static Vec gather_first(const double* x, const std::uint16_t* index, int count) {  // there is room behind
    return gather_lanes(x, _mm_cvtepu16_epi32(_mm_loadu_si64(index)), mask(count));
  }
  template <class Index>
  static Vec collect(const double* x, const Index* index) {
    return collect4(x, index);
  }
  static Vec first(Vec v, int count) { return _mm256_and_pd(v, _mm256_castsi256_pd(mask(count))); }
  static Vec load_first(const double* p, int count) { return _mm256_maskload_pd(p, mask(count)); }
  static __m256i mask(int count) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
  }
};

}  // namespace rarefy::cpu
