// Names of dtypes and the conversions that are too long for a header.
#include "rarefy/dtype.h"

#include <cmath>
#include <limits>

namespace rarefy {

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::i8: return "i8";
  }
  return "?";
}

std::optional<DType> parse_dtype(std::string_view text) {
  for (const DType dtype : kAllDTypes) {
    if (text == name(dtype)) return dtype;
  }
  return std::nullopt;
}

namespace {

// Rounds to odd: a later rounding to fewer bits then gives what one rounding would have given.
float round_to_odd(double x) {
  const auto nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || std::isnan(x) || std::isinf(x)) return nearest;
  const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const std::uint32_t toward_zero = away ? bits - 1 : bits;
  return std::bit_cast<float>(toward_zero | 1U);
}

}  // namespace

bfloat16 to_bfloat16(double x) { return to_bfloat16(round_to_odd(x)); }
float16 to_float16(double x) { return to_float16(round_to_odd(x)); }

float to_float(float16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000U} << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fU;
  const std::uint32_t mantissa = x.bits & 0x3ffU;
  if (exponent == 0) {  // zero or subnormal: mantissa · 2⁻²⁴ is exact in float
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t widened = exponent == 31 ? 255U : exponent + 112U;
  std::uint32_t bits = sign | (widened << 23) | (mantissa << 13);
  if (exponent == 31 && mantissa != 0) bits |= 0x400000U;  // quiet
  return std::bit_cast<float>(bits);
}

float16 to_float16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const auto with_sign = [sign](std::uint32_t half) {
    return float16{static_cast<std::uint16_t>(sign | half)};
  };
  if (magnitude > 0x7f800000U) return with_sign(0x7e00U | ((magnitude >> 13) & 0x3ffU));
  if (magnitude >= 0x47800000U) return with_sign(0x7c00U);  // ≥ 65536, and infinity
  if (magnitude < 0x38800000U) {                            // below 2⁻¹⁴: subnormal or zero
    // Adding 0.5 lines the last kept bit up with float's last bit, so the hardware rounds for us.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return with_sign(std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U);
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return with_sign((rounded - 0x38000000U) >> 13);  // may round up to infinity
}

}  // namespace rarefy
