// Conversions of the 16-bit floats, against definitions rather than against themselves.
#include "rarefy/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace rarefy {
namespace {

TEST(DTypeTest, NamesRoundTrip) {
  for (const DType dtype : kAllDTypes) EXPECT_EQ(parse_dtype(name(dtype)), dtype);
  EXPECT_EQ(parse_dtype("f8"), std::nullopt);
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

TEST(DTypeTest, Float16Overflows) {
  EXPECT_EQ(to_float16(65519.0F).bits, 0x7bff);
  EXPECT_EQ(to_float16(65520.0F).bits, 0x7c00);
  EXPECT_EQ(to_float16(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
  EXPECT_EQ(to_float16(1e300).bits, 0x7c00);
}

}  // namespace
}  // namespace rarefy
