// How a token of x becomes int8 for Scaling::dynamic: one rule for every kernel, in float, so that all of
// them multiply the same integers (docs/numerics.md).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace rarefy {

inline constexpr float kLevels = 127;
// Below this a token's largest number counts as this: 127 / it and it / 127 are then floats for all of them.
inline constexpr float kSmallest = 0x1p-100F;

struct TokenScale {
  float scale;    // of the integers; NaN for a token with a NaN or an infinity, whose integers are 0
  float inverse;  // what x is multiplied with before it is rounded, to nearest even
};

// `bits`: the largest |x| of the token, as a float's bits. In this order NaN is past infinity.
inline TokenScale token_scale(std::uint32_t bits) {
  constexpr std::uint32_t kInfinity = 0x7f800000;
  if (bits >= kInfinity) return {std::numeric_limits<float>::quiet_NaN(), 0};
  const float most = std::max(std::bit_cast<float>(bits), kSmallest);
  return {most / kLevels, kLevels / most};
}

inline std::uint32_t magnitude_bits(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffU; }

// For numbers of a token that has no NaN or infinity: in −127 … 127.
inline std::int32_t quantized(float x, const TokenScale& token) {
  return static_cast<std::int32_t>(std::nearbyint(x * token.inverse));
}

}  // namespace rarefy
