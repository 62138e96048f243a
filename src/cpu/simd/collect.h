// Floats and doubles from anywhere, load by load: Zen 4's gather takes 81 instructions of its own for 16.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace rarefy::cpu {

// As integers: GCC folds the loads of these into their insertion, not those of floats.
static inline __m128 four_of(const float* x, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                             std::uint64_t d) {
  const auto at = [x](std::uint64_t i) {
    std::int32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof(bits));
    return bits;
  };
  const __m128i v = _mm_insert_epi32(_mm_cvtsi32_si128(at(a)), at(b), 1);
  return _mm_castsi128_ps(_mm_insert_epi32(_mm_insert_epi32(v, at(c), 2), at(d), 3));
}

// Of doubles, whose loads go to either half.
static inline __m256d four_of(const double* x, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                              std::uint64_t d) {
  const __m128d low = _mm_loadh_pd(_mm_load_sd(x + a), x + b), high = _mm_loadh_pd(_mm_load_sd(x + c), x + d);
  return _mm256_insertf128_pd(_mm256_castpd128_pd256(low), high, 1);
}

// x[index[0]] … x[index[3]], two or four indices a load.
template <class T>
static inline auto collect4(const T* x, const std::int32_t* index) {
  std::uint64_t low, high;
  __builtin_memcpy(&low, index, sizeof(low));
  __builtin_memcpy(&high, index + 2, sizeof(high));
  return four_of(x, low & 0xffffffffU, low >> 32, high & 0xffffffffU, high >> 32);
}
template <class T>
static inline auto collect4(const T* x, const std::uint16_t* index) {
  std::uint64_t all;
  __builtin_memcpy(&all, index, sizeof(all));
  const auto middle = [all](unsigned first) { return _bextr_u64(all, first, 16); };
  return four_of(x, all & 0xffffU, middle(16), middle(32), all >> 48);
}

template <class Index>
static inline __m256 collect8(const float* x, const Index* index) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(collect4(x, index)), collect4(x, index + 4), 1);
}

}  // namespace rarefy::cpu
