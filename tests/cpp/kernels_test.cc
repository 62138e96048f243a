// The table of each instruction set, below the drivers: what no product reaches on every machine, or by
// chance.
#include "cpu/kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/registry.h"
#include "cpu/simd/scalar.h"
#include "rarefy/dtype.h"

namespace rarefy::cpu {
namespace {

// What this machine can run.
std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> all{&kScalar};
#if defined(__x86_64__)
  if (cpu_machine().has("avx2")) all.push_back(&kAvx2);
  if (cpu_machine().has("avx512")) all.push_back(&kAvx512);
#endif
  return all;
}

// Every kind of float: both signs, NaN whose payload would round up to −0 or down to infinity, ties, the
// largest.
std::vector<float> floats() {
  std::vector<float> all;
  for (const std::uint32_t bits :
       {0x00000000U, 0x7fffffffU, 0x7f800001U, 0x7fc00000U, 0x7fbfffffU, 0x7f800000U, 0x7f7fffffU,
        0x7f7f7fffU, 0x3f808000U, 0x3f818000U, 0x3f807fffU, 0x3f808001U, 0x00000001U, 0x00008000U,
        0x00018000U, 0x477fefffU, 0x477ff000U, 0x33000000U, 0x33000001U, 0x387fe000U}) {
    for (const std::uint32_t sign : {0U, 0x80000000U}) all.push_back(std::bit_cast<float>(bits | sign));
  }
  return all;
}

// Rounding to 16 bits is the core's, and a NaN stays one.
TEST(KernelTableTest, RoundsAsTheCore) {
  const std::vector<float> values = floats();
  for (const Kernels* table : tables()) {
    for (std::size_t count : {values.size(), values.size() - 3}) {  // whole vectors, and part of one
      std::vector<std::uint16_t> bf16(count), f16(count);
      table->round(Storage::bf16, values.data(), static_cast<std::int64_t>(count), bf16.data());
      table->round(Storage::f16, values.data(), static_cast<std::int64_t>(count), f16.data());
      for (std::size_t i = 0; i < count; ++i) {
        SCOPED_TRACE(::testing::Message()
                     << table->family << std::hex << " 0x" << std::bit_cast<std::uint32_t>(values[i]));
        const std::uint16_t in_bf16 = to_bfloat16(values[i]).bits, in_f16 = to_float16(values[i]).bits;
        EXPECT_EQ(bf16[i], in_bf16);
        const std::uint16_t told =
            std::isnan(values[i]) ? 0xfe00 : 0xffff;  // of NaN the sign, and that it is quiet
        EXPECT_EQ(f16[i] & told, in_f16 & told);
        EXPECT_EQ(std::isnan(values[i]), std::isnan(to_float(bfloat16{bf16[i]})));
      }
    }
  }
}

// As the x86 instructions: the second operand, if either is NaN.
TEST(KernelTableTest, ScalarMinAndMaxOfNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto of = [](auto f, float a, float b) { return f(Scalar::set1(a), Scalar::set1(b)).lane[0]; };
  for (const auto f : {Scalar::min, Scalar::max}) {
    EXPECT_EQ(of(f, nan, 3.0F), 3.0F);
    EXPECT_TRUE(std::isnan(of(f, 3.0F, nan)));
  }
  EXPECT_EQ(of(Scalar::min, 2.0F, 3.0F), 2.0F);
  EXPECT_EQ(of(Scalar::min, 3.0F, 2.0F), 2.0F);
  EXPECT_EQ(of(Scalar::max, 2.0F, 3.0F), 3.0F);
  EXPECT_EQ(of(Scalar::max, 3.0F, 2.0F), 3.0F);
}

}  // namespace
}  // namespace rarefy::cpu
