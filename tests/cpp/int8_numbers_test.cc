// What products of int8 make of numbers at the edges: the largest sums, NaN and infinity, tiny and huge
// tokens, the rounding of x itself.
#include <gtest/gtest.h>

#include "core/quantize.h"
#include "int8_checks.h"

namespace rarefy::test::int8 {
namespace {

// The largest sums: no instruction may saturate. Values may be −128 here, whatever fronts let through.
TEST_P(Int8Test, LargestNumbers) {
  for (const auto& [value, sign] : {std::pair{127, 1}, {127, -1}, {-127, 1}, {-128, 1}, {-128, -1}}) {
    Layer layer({33, 32, 4096, 32, 32, 1.0, DType::f32, true, 0});
    std::fill(layer.values.begin(), layer.values.end(), static_cast<std::int8_t>(value));
    std::fill(layer.x.begin(), layer.x.end(), sign * 127.0);
    std::fill(layer.scales.begin(), layer.scales.end(), 0x1p-20F);
    std::fill(layer.bias.begin(), layer.bias.end(), 0.0);
    const Force force(GetParam().family);
    LinearRun run(layer, GetParam().scaling);
    expect_ok(run.linear());
    const double expected = static_cast<float>(4096.0 * value * sign * 127) * 0x1p-20;
    for (const double y : run.y()) ASSERT_EQ(y, expected) << value << ' ' << sign;
  }
}

TEST_P(Int8Test, Activations) {
  for (const Activation activation :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    SCOPED_TRACE(name(activation));
    Spec spec{40, 70, 90, 24, 1, 0.5, DType::f32, true, 0, activation};
    const Layer layer(spec);
    spec.activation = Activation::none;
    const Layer plain(spec);
    const Force force(GetParam().family);
    LinearRun run(layer, GetParam().scaling), sums(plain, GetParam().scaling);
    expect_ok(run.linear());
    expect_ok(sums.linear());
    const std::vector<double> got = run.y(), arguments = sums.y();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double x = arguments[i];
      const double value = activation == Activation::relu       ? std::max(x, 0.0)
                           : activation == Activation::gelu_erf ? x * std::erfc(-x / std::sqrt(2.0)) / 2
                           : activation == Activation::gelu_tanh
                               ? x / (1 + std::exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)))
                               : x / (1 + std::exp(-x));
      ASSERT_LE(std::abs(got[i] - value), activation_error(activation, x, value, 0x1p-24) + 1e-30) << x;
    }
  }
}

// Rounded: a token with a NaN or an infinity has no scale, and all of its results are NaN; the others do not
// notice. As it is: NaN where a value is stored.
TEST_P(Int8Test, NanAndInfinity) {
  const bool dynamic = GetParam().scaling == Scaling::dynamic;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Activation activation : {Activation::none, Activation::relu}) {
      Layer layer({40, 48, 70, 16, 1, 0.4, dtype, true, 0, activation});
      for (const auto& [m, number] : {std::pair{3, kNan}, {17, kInfinity}, {38, -kInfinity}}) {
        layer.x[static_cast<std::size_t>(m * layer.x_stride() + m)] = number;
      }
      const Force force(GetParam().family);
      LinearRun run(layer, GetParam().scaling);
      expect_ok(run.linear());
      const std::vector<double> got = run.y();
      std::vector<double> x;
      const std::vector<bool> stored = [&] {  // by block row and column
        std::vector<bool> at(3 * 70);
        const PlanView plan = layer.pattern.view();
        for (std::size_t i = 0; i < 3; ++i) {
          for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
            at[i * 70 + static_cast<std::size_t>(plan.col[e])] = true;
          }
        }
        return at;
      }();
      for (std::size_t m = 0; m < 40; ++m) {
        const bool bad = m == 3 || m == 17 || m == 38;
        for (std::size_t n = 0; n < 48; ++n) {
          const double y = got[m * 48 + n];
          if (bad && dynamic) {
            ASSERT_TRUE(std::isnan(y)) << m << ' ' << n;
          } else if (!bad || !stored[n / 16 * 70 + m]) {
            ASSERT_TRUE(std::isfinite(y)) << m << ' ' << n;
          } else if (m == 3) {
            ASSERT_TRUE(std::isnan(y)) << n;
          }
        }
      }
    }
  }
}

// Tokens of zeros, of subnormal and of the largest numbers.
TEST_P(Int8Test, TinyAndHugeTokens) {
  Layer layer({34, 32, 64, 16, 1, 1.0, DType::f32, false, 0});
  for (float& scale : layer.scales) scale *= 0x1p-12F;
  for (std::size_t k = 0; k < 64; ++k) {
    layer.x[k] = 0;
    layer.x[64 + k] = static_cast<float>(std::ldexp(static_cast<double>(k) - 32, -140));
    layer.x[128 + k] = static_cast<float>(layer.x[128 + k] * 0x1p-90);
    layer.x[192 + k] =
        k % 2 == 0 ? std::numeric_limits<float>::max() : -std::numeric_limits<float>::max() / 3;
  }
  const Force force(GetParam().family);
  LinearRun run(layer, GetParam().scaling);
  expect_ok(run.linear());
  std::vector<double> got = run.y();
  for (std::size_t n = 0; n < 32; ++n) EXPECT_EQ(got[n], layer.bias[n]);
  // Sums near the largest float may pass it on the way.
  std::vector<double> rest(got.begin() + 4 * 32, got.end());
  for (std::size_t n = 0; n < 32; ++n) EXPECT_FALSE(std::isnan(got[3 * 32 + n])) << n;
  Layer small = layer;
  small.spec.m = 3;
  expect_linear(small, GetParam().scaling, got);
}

// The largest products of all, next to one another: sums of 16 bits on the way, where an instruction set has
// no others, must hold them.
TEST_P(Int8Test, NoSumSaturates) {
  const Force force(GetParam().family);
  for (const std::int64_t m : {1, 4, 8, 16, 40}) {
    for (const std::int64_t cols : {1, 4, 64}) {
      for (const int w : {-128, -127, 127}) {
        Layer layer({m, 32, 128, 16, cols, 1.0, DType::f32, true, 0});
        std::fill(layer.values.begin(), layer.values.end(), static_cast<std::int8_t>(w));
        for (std::size_t i = 0; i < layer.x.size(); ++i) layer.x[i] = i / 128 % 2 == 0 ? 127 : -127;
        LinearRun run(layer, GetParam().scaling);
        expect_ok(run.linear());
        expect_linear(layer, GetParam().scaling, run.y());
      }
    }
  }
}

// The rule that every kernel follows, at its edges.
TEST(QuantizeTest, Tokens) {
  const auto scale = [](float most) { return token_scale(magnitude_bits(most)); };
  EXPECT_EQ(scale(127).scale, 1);
  EXPECT_EQ(scale(-127).inverse, 1);
  EXPECT_EQ(scale(0).scale, 0x1p-100F / 127);
  EXPECT_EQ(scale(1e-40F).scale, 0x1p-100F / 127);
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    EXPECT_TRUE(std::isnan(scale(bad).scale));
    EXPECT_EQ(scale(bad).inverse, 0);
  }
  EXPECT_EQ(quantized(2.5F, scale(127)), 2);
  EXPECT_EQ(quantized(-3.5F, scale(127)), -4);
  std::mt19937 random(1);
  std::uniform_int_distribution<std::uint32_t> bits(1, 0x7f7fffff);
  for (int i = 0; i < 100000; ++i) {
    const float most = std::bit_cast<float>(bits(random));
    const TokenScale token = scale(most);
    ASSERT_TRUE(std::isfinite(token.scale) && std::isfinite(token.inverse) && token.scale > 0) << most;
    ASSERT_LE(std::abs(quantized(most, token)), 127) << most;
    if (most >= 0x1p-100F) {
      ASSERT_EQ(quantized(-most, token), -127) << most;
    }
  }
}

}  // namespace
}  // namespace rarefy::test::int8
