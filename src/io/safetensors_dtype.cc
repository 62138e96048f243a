// The element types of the safetensors format: names and widths.
#include <algorithm>
#include <iterator>

#include "rarefy/safetensors.h"

namespace rarefy {

namespace {

struct Row {
  SafetensorsDType dtype;
  std::string_view name;
  std::int64_t bits;
};

// In the order of the enumeration, so that an enumerator is its own index.
constexpr Row kRows[] = {
    {SafetensorsDType::boolean, "BOOL", 8},
    {SafetensorsDType::f4, "F4", 4},
    {SafetensorsDType::f6_e2m3, "F6_E2M3", 6},
    {SafetensorsDType::f6_e3m2, "F6_E3M2", 6},
    {SafetensorsDType::u8, "U8", 8},
    {SafetensorsDType::i8, "I8", 8},
    {SafetensorsDType::f8_e5m2, "F8_E5M2", 8},
    {SafetensorsDType::f8_e4m3, "F8_E4M3", 8},
    {SafetensorsDType::f8_e8m0, "F8_E8M0", 8},
    {SafetensorsDType::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
    {SafetensorsDType::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
    {SafetensorsDType::i16, "I16", 16},
    {SafetensorsDType::u16, "U16", 16},
    {SafetensorsDType::f16, "F16", 16},
    {SafetensorsDType::bf16, "BF16", 16},
    {SafetensorsDType::i32, "I32", 32},
    {SafetensorsDType::u32, "U32", 32},
    {SafetensorsDType::f32, "F32", 32},
    {SafetensorsDType::c64, "C64", 64},
    {SafetensorsDType::f64, "F64", 64},
    {SafetensorsDType::i64, "I64", 64},
    {SafetensorsDType::u64, "U64", 64},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < std::size(kRows); ++i) {
    if (static_cast<std::size_t>(kRows[i].dtype) != i) return false;
  }
  return true;
}
static_assert(in_order());

const Row& row(SafetensorsDType dtype) { return kRows[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::string_view name(SafetensorsDType dtype) { return row(dtype).name; }

std::int64_t bits_of(SafetensorsDType dtype) { return row(dtype).bits; }

std::optional<SafetensorsDType> parse_safetensors_dtype(std::string_view text) {
  const auto* const found = std::find_if(std::begin(kRows), std::end(kRows),
                                         [&](const Row& candidate) { return candidate.name == text; });
  return found == std::end(kRows) ? std::nullopt : std::optional(found->dtype);
}

SafetensorsDType to_safetensors(DType dtype) {
  switch (dtype) {
    case DType::f64: return SafetensorsDType::f64;
    case DType::f32: return SafetensorsDType::f32;
    case DType::bf16: return SafetensorsDType::bf16;
    case DType::f16: return SafetensorsDType::f16;
    case DType::i8: return SafetensorsDType::i8;
  }
  return SafetensorsDType::f32;
}

std::optional<DType> from_safetensors(SafetensorsDType dtype) {
  for (const DType candidate : kAllDTypes) {
    if (to_safetensors(candidate) == dtype) return candidate;
  }
  return std::nullopt;
}

}  // namespace rarefy
