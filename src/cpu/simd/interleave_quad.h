// Four lines of a panel of bytes as fours: what AVX2 and AVX-512 do alike.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace rarefy::cpu {

// Static, as units of both instruction sets have it: of weak twins the linker would keep any. In each half of
// 16 tokens the fours come out by 4 tokens of one 128-bit lane, then the other's.
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

}  // namespace rarefy::cpu
