// Scores as unsigned integers of the same order, and the order among equal scores.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/scalar.h"

namespace rarefy::prune {

// The keys below are those of negative NaNs, which are mapped to kNanKey like all others.
inline constexpr int kRemovedKey = 0;  // what a previous mask has removed
inline constexpr int kNanKey = 1;

template <class Real>
using KeyOf = std::conditional_t<std::is_same_v<Real, double>, std::uint64_t, std::uint32_t>;

template <class Real>
KeyOf<Real> key_of(Real x) {
  using Key = KeyOf<Real>;
  constexpr Key kSign = Key{1} << (sizeof(Key) * 8 - 1);
  const auto bits = std::bit_cast<Key>(x + Real{0});  // −0 is +0
  const Key key = (bits & kSign) != 0 ? ~bits : bits | kSign;
  return std::isnan(x) ? Key{kNanKey} : key;
}

// Roberts' additive sequence in the plane, in 32 bits: the reciprocals of the plastic number and of its
// square. In each row and in each column alone it is as even as a multiple of an irrational number can be.
inline std::uint32_t tie_of(std::int64_t row, std::int64_t col) {
  constexpr std::uint64_t kRow = 0xc13fa9a902a6328fU, kCol = 0x91e10da5c79e7b1cU;
  return static_cast<std::uint32_t>(
      (static_cast<std::uint64_t>(row) * kRow + static_cast<std::uint64_t>(col) * kCol) >> 32);
}

// As load(), and inline for f16, since every score is read a few times.
inline float read(const float* p) { return *p; }
inline double read(const double* p) { return *p; }
inline float read(const bfloat16* p) { return to_float(*p); }
inline float read(const float16* p) {
  const std::uint32_t sign = (p->bits & 0x8000U) << 16, rest = p->bits & 0x7fffU;
  const float scaled = std::bit_cast<float>(rest << 13) * 0x1p112F;  // subnormals, too
  const std::uint32_t finite = std::bit_cast<std::uint32_t>(scaled), other = (rest << 13) | 0x7f800000U;
  return std::bit_cast<float>(sign | (rest >= 0x7c00U ? other : finite));
}

}  // namespace rarefy::prune
