// Four features of a panel of bytes as a line of fours: what AVX2 and AVX-512 do alike. Static, as units of
// both instruction sets have it: of weak twins the linker would keep any.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

namespace rarefy::cpu {

// Of 32 tokens. In each half of 16 the fours come out by 4 tokens of one 128-bit lane, then the other's.
// kHalf: of the first 16.
template <bool kHalf = false>
static inline void interleave_quad(const std::uint16_t* panel, const std::uint32_t* offsets,
                                   std::uint16_t* to) {
  const auto line = [&](int i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + offsets[i]));
  };
  const __m256i a = line(0), b = line(1), c = line(2), d = line(3);
  auto* out = reinterpret_cast<__m256i*>(to);
  const __m256i ab_low = _mm256_unpacklo_epi8(a, b), cd_low = _mm256_unpacklo_epi8(c, d);
  _mm256_storeu_si256(out, _mm256_unpacklo_epi16(ab_low, cd_low));
  _mm256_storeu_si256(out + 1, _mm256_unpackhi_epi16(ab_low, cd_low));
  if constexpr (kHalf) return;
  const __m256i ab_high = _mm256_unpackhi_epi8(a, b), cd_high = _mm256_unpackhi_epi8(c, d);
  _mm256_storeu_si256(out + 2, _mm256_unpacklo_epi16(ab_high, cd_high));
  _mm256_storeu_si256(out + 3, _mm256_unpackhi_epi16(ab_high, cd_high));
}

// Where a feature, or a line of four, of up to 4 or 8 tokens lies; offsets are made for panels of 32, in
// units of 16 bits.
template <int kTokens>
static inline const std::uint8_t* few_quads_at(const std::uint16_t* panel, std::uint32_t offset) {
  using Feature = std::conditional_t<kTokens == 8, std::uint64_t, std::uint32_t>;  // one shift less
  static_assert(sizeof(Feature) == kTokens);
  return reinterpret_cast<const std::uint8_t*>(reinterpret_cast<const Feature*>(panel) + offset / 16);
}

// Of 4 or 8 tokens.
template <int kTokens>
static inline void interleave_few(const std::uint16_t* panel, const std::uint32_t* offsets, void* to) {
  const auto feature = [&](int i) {
    const std::uint8_t* at = few_quads_at<kTokens>(panel, offsets[i]);
    if constexpr (kTokens == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    std::int32_t four;
    __builtin_memcpy(&four, at, sizeof(four));
    return _mm_cvtsi32_si128(four);
  };
  const __m128i ab = _mm_unpacklo_epi8(feature(0), feature(1));
  const __m128i cd = _mm_unpacklo_epi8(feature(2), feature(3));
  auto* out = static_cast<__m128i*>(to);
  _mm_storeu_si128(out, _mm_unpacklo_epi16(ab, cd));
  if constexpr (kTokens == 8) _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(ab, cd));
}

}  // namespace rarefy::cpu
