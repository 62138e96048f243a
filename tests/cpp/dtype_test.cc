// Conversions of the 16-bit floats, against definitions rather than against themselves.
#include "rarefy/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace rarefy {
namespace {

TEST(DTypeTest, NamesRoundTrip) {
  for (const DType dtype : kAllDTypes) EXPECT_EQ(parse_dtype(name(dtype)), dtype);
  for (const char* other : {"f8", "f32x", "f3", "", "F32"}) EXPECT_EQ(parse_dtype(other), std::nullopt);
}

TEST(DTypeTest, EveryFloat16SurvivesFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float16 half{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(half);
    if (std::isnan(wide)) {
      EXPECT_EQ(bits & 0x7c00U, 0x7c00U);
      EXPECT_TRUE(std::isnan(to_float(to_float16(wide))));
      continue;
    }
    EXPECT_EQ(to_float16(wide), half) << bits;
    EXPECT_EQ(to_float16(static_cast<double>(wide)), half) << bits;
  }
}

TEST(DTypeTest, EveryBfloat16SurvivesFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const bfloat16 half{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(half);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(wide))));
      continue;
    }
    EXPECT_EQ(to_bfloat16(wide), half) << bits;
    EXPECT_EQ(to_bfloat16(static_cast<double>(wide)), half) << bits;
  }
}

TEST(DTypeTest, Float16RoundsToNearestEven) {
  // Between each pair of finite neighbours: the midpoint goes to the even one, a nudge decides.
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = to_float(float16{bits});
    const double high = to_float(float16{static_cast<std::uint16_t>(bits + 1)});
    const double middle = (low + high) / 2;
    const auto even = static_cast<std::uint16_t>(bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(to_float16(middle).bits, even);
    ASSERT_EQ(to_float16(static_cast<float>(middle)).bits, even);  // 12 bits: exact in float
    ASSERT_EQ(to_float16(std::nextafter(middle, low)).bits, bits);
    ASSERT_EQ(to_float16(std::nextafter(middle, high)).bits, bits + 1);
  }
}

TEST(DTypeTest, Bfloat16RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7f7fU; ++bits) {
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    const auto middle = std::bit_cast<float>((bits << 16) | 0x8000U);
    ASSERT_EQ(to_bfloat16(middle).bits, even);
    ASSERT_EQ(to_bfloat16(static_cast<double>(middle)).bits, even);
    ASSERT_EQ(to_bfloat16(std::bit_cast<float>((bits << 16) | 0x7fffU)).bits, bits);
    ASSERT_EQ(to_bfloat16(std::bit_cast<float>((bits << 16) | 0x8001U)).bits, bits + 1);
    // A double beside the middle is rounded once: through float it would become the middle first.
    ASSERT_EQ(to_bfloat16(std::nextafter(static_cast<double>(middle), 0.0)).bits, bits);
    ASSERT_EQ(to_bfloat16(std::nextafter(static_cast<double>(middle), 1e300)).bits, bits + 1);
  }
}

// Also where what is left of the payload would be an infinity.
TEST(DTypeTest, EveryNanBecomesAQuietOne) {
  constexpr std::uint32_t kQuiet = 0x400000U;
  for (const std::uint32_t bits : {0x7f800001U, 0xff800001U, 0x7fc00000U, 0x7fffffffU, 0x7f80ffffU}) {
    const auto nan = std::bit_cast<float>(bits);
    EXPECT_EQ(to_float16(nan).bits & 0x7e00U, 0x7e00U) << bits;
    EXPECT_EQ(to_float16(nan).bits >> 15, bits >> 31) << bits;
    EXPECT_EQ(to_bfloat16(nan).bits & 0x7fc0U, 0x7fc0U) << bits;
    EXPECT_EQ(to_bfloat16(nan).bits >> 15, bits >> 31) << bits;
  }
  EXPECT_NE(std::bit_cast<std::uint32_t>(to_float(float16{0x7c01})) & kQuiet, 0U);
}

TEST(DTypeTest, Float16Overflows) {
  EXPECT_EQ(to_float16(65519.0F).bits, 0x7bff);
  EXPECT_EQ(to_float16(65520.0F).bits, 0x7c00);
  EXPECT_EQ(to_float16(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
  EXPECT_EQ(to_float16(1e300).bits, 0x7c00);
}

}  // namespace
}  // namespace rarefy
