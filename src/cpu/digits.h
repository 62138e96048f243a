// x as whole numbers of 24 bits, and these as three digits of −128 … 127: X = d₂ · 2¹⁶ + d₁ · 2⁸ + d₀. What
// linear_digits.cc multiplies. Loops that compilers turn into vectors; `I` is whose unit compiles them.
#pragma once

#include <cstdint>

namespace rarefy::cpu {

inline constexpr std::int32_t kMostOfDigits = 0x7f7f7f;

// Of round(x · up), which is at most that: its bytes, if 128 is added to each digit.
template <class I>
void digit(const float* x, std::int64_t count, float up, int digit, float* to) {
  constexpr std::int32_t kAdded = 0x808080;
  const int shift = 8 * digit;
  for (std::int64_t k = 0; k < count; ++k) {
    const float scaled = x[k] * up;
    const auto whole = static_cast<std::int32_t>(scaled + __builtin_copysignf(0.5F, scaled));
    to[k] = static_cast<float>((((whole + kAdded) >> shift) & 0xff) - 128);
  }
}

template <class I>
void join_digits(const float* low, const float* middle, const float* bias, std::int64_t count, float* y) {
  for (std::int64_t n = 0; n < count; ++n) y[n] = ((low[n] + middle[n]) + y[n]) + bias[n];
}

}  // namespace rarefy::cpu
