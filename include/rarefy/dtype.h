// Element types of values and activations, and the two 16-bit floats C++20 lacks.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "rarefy/export.h"

namespace rarefy {

enum class DType : std::uint8_t { f64, f32, bf16, f16, i8 };

inline constexpr DType kAllDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i8};

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::i8: return 1;
  }
  return 0;
}

RAREFY_API std::string_view name(DType dtype);                       // "f32"
RAREFY_API std::optional<DType> parse_dtype(std::string_view text);  // the inverse of name()

// Storage only: arithmetic happens after conversion to float or double.
struct bfloat16 {
  std::uint16_t bits = 0;
  bool operator==(const bfloat16&) const = default;
};
struct float16 {
  std::uint16_t bits = 0;
  bool operator==(const float16&) const = default;
};

// Conversions round to nearest even, keep infinities and turn every NaN into a quiet NaN.
constexpr float to_float(bfloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

constexpr bfloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

RAREFY_API float to_float(float16 x);
RAREFY_API float16 to_float16(float x);

// A double is rounded once, not twice, on its way into 16 bits.
RAREFY_API bfloat16 to_bfloat16(double x);
RAREFY_API float16 to_float16(double x);

}  // namespace rarefy
