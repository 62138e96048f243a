// Scaled int8 values with x as three digits of int8 (src/cpu/linear_digits.cc), forced by name: layers that
// choose them by themselves are larger.
#include <cmath>

#include "core/registry.h"
#include "int8_checks.h"

namespace rarefy::test::int8 {
namespace {

struct Digits {
  std::string family;
  std::vector<std::string> kernels;  // that for many tokens, and that for fewer
};

std::vector<Digits> digit_kernels() {
  std::vector<Digits> all;
  const auto add = [&](const char* feature, const Digits& digits) {
    if (backend_info().machine.has(feature)) all.push_back(digits);
  };
  add("amx_int8", {"amx", {"amx_linear_digits_tokens", "amx_linear_digits"}});
  add("amx_int8", {"amx", {"amx_linear_digits"}});
  add("avx512_vnni", {"avx512", {"avx512_linear_digits_rows", "avx512_linear_digits"}});
  add("avx512_vnni", {"avx512", {"avx512_linear_digits"}});
  add("avx_vnni", {"avx_vnni", {"avx_vnni_linear_digits"}});
  return all;
}

constexpr const char* kAnyConfig = "rest=0";  // names a kernel and says little else

class DigitsTest : public ::testing::TestWithParam<Digits> {
 protected:
  static std::string forced(const std::string& config) {
    std::string text = GetParam().family;
    for (const std::string& kernel : GetParam().kernels) text += ',' + kernel + '(' + config + ')';
    return text;
  }
  static std::vector<double> run(const Layer& layer, Executor executor = {},
                                 const std::string& config = kAnyConfig) {
    const Force force(forced(config));
    EXPECT_TRUE(as_digits(layer, Scaling::weight));
    LinearRun linear(layer, Scaling::weight, executor);
    expect_ok(linear.linear());
    return linear.y();
  }
  static void check(const Spec& spec, Executor executor = {}, const std::string& config = kAnyConfig) {
    SCOPED_TRACE(::testing::Message()
                 << forced(config) << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k << " block "
                 << spec.block_rows << 'x' << spec.block_cols << ' ' << name(spec.dtype));
    const Layer layer(spec);
    const std::vector<double> y = run(layer, executor, config);
    const Force force(forced(config));
    expect_linear(layer, Scaling::weight, y);
  }
};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DigitsTest);
INSTANTIATE_TEST_SUITE_P(Cpu, DigitsTest, ::testing::ValuesIn(digit_kernels()),
                         [](const auto& tested) { return tested.param.kernels.front(); });

TEST_P(DigitsTest, EveryBlockShapeAndNumberOfTokens) {
  for (const auto& [rows, cols] :
       {std::pair{16, 1}, {32, 1}, {48, 3}, {16, 16}, {32, 32}, {64, 64}, {8, 8}, {4, 1}, {128, 1}}) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 11, 21, 32, 33, 64, 65, 97, 130, 200}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        const bool integers = (tokens + rows) % 2 == 0;
        check({tokens, 3 * rows + rows / 2, 5 * cols + 37, rows, cols, 0.6, dtype, integers, tokens % 3});
      }
    }
  }
}

// More outputs than sums are held of at a time, on several threads; and nothing at all.
TEST_P(DigitsTest, PartsOfTheOutputs) {
  ThreadPool pool(3);
  for (const std::int64_t tokens : {1, 40, 150}) {
    check({tokens, 2000, 70, 32, 1, 0.4, DType::f32, false, 0}, pool.executor());
    check({tokens, 1500, 100, 16, 16, 0.4, DType::bf16, true, 1}, pool.executor());
  }
  check({5, 70, 0, 16, 1, 0.0}, pool.executor());
  check({9, 100, 90, 16, 4, 0.0}, pool.executor());
  for (const char* config :
       {"panels=1 splits=1 rest=0", "panels=2 splits=3 rest=0", "panels=2 splits=1 rest=1"}) {
    check({150, 700, 200, 32, 1, 0.4, DType::f32, true, 0}, pool.executor(), config);
  }
}

// Rows of sums whose length is no whole number of vectors as well: each is activated once.
TEST_P(DigitsTest, ActivationsFollowTheBias) {
  for (const std::int64_t rows : {16, 8, 4}) {
    Spec spec{70, 150, 170, rows, 4, 0.6, DType::f32, false, 0};
    const std::vector<double> sums = run(Layer(spec));
    for (const Activation activation : {Activation::relu, Activation::gelu_erf}) {
      spec.activation = activation;
      const std::vector<double> got = run(Layer(spec));
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double x = sums[i], gelu = 0.5 * x * std::erfc(-x / std::sqrt(2.0));
        if (activation == Activation::relu) {
          ASSERT_EQ(got[i], std::max(x, 0.0)) << i;
        } else {
          ASSERT_NEAR(got[i], gelu, 1e-6 * (1 + std::abs(x))) << i;
        }
      }
    }
  }
}

// 2⁻²³ of the largest |x| of the token, over 60 orders of magnitude, and finite below the smallest scale.
TEST_P(DigitsTest, ScalesFollowTheLargest) {
  for (const int exponent : {-110, -99, -30, 0, 1, 40, 100, 108}) {
    Layer layer({6, 64, 90, 16, 1, 0.7, DType::f32, false, 0});
    for (double& x : layer.x) x = static_cast<float>(std::ldexp(x, exponent - 3));
    for (double& bias : layer.bias) bias = 0;
    const std::vector<double> y = run(layer);
    for (const double number : y) ASSERT_TRUE(std::isfinite(number)) << exponent;
    if (exponent < -100) continue;
    const Force force(forced(kAnyConfig));
    expect_linear(layer, Scaling::weight, y);
  }
  // The largest numbers that 23 bits hold, and the first that they do not.
  for (const double most : {8355711.0, 8355712.0, 16777215.0, 1.0 - std::ldexp(1, -24)}) {
    Layer layer({3, 16, 4, 16, 1, 1.0, DType::f32, false, 0});
    for (std::size_t i = 0; i < layer.x.size(); ++i) layer.x[i] = i % 2 == 0 ? most : -most;
    const std::vector<double> y = run(layer);
    const Force force(forced(kAnyConfig));
    expect_linear(layer, Scaling::weight, y);
  }
}

// A token with a NaN or an infinity gives what floats do: others do not notice, nor outputs that do not store
// its column.
TEST_P(DigitsTest, NumbersThatAreNoneAreMultipliedAsTheyAre) {
  for (const double bad : {static_cast<double>(kNan), static_cast<double>(kInfinity)}) {
    for (const std::int64_t tokens : {3, 40}) {
      Layer layer({tokens, 160, 90, 16, 1, 0.5, DType::f32, true, 0});
      const std::vector<double> before = run(layer);
      layer.x[static_cast<std::size_t>(layer.x_stride() + 7)] = bad;
      const std::vector<double> y = run(layer);
      const PlanView plan = layer.pattern.view();
      for (std::int64_t n = 0; n < 160; ++n) {
        bool stores = false;
        double w = 0;
        for (std::int32_t e = plan.crow[n / 16]; e < plan.crow[n / 16 + 1]; ++e) {
          if (plan.col[e] != 7) continue;
          stores = true;
          w = layer.values[static_cast<std::size_t>(e * 16 + n % 16)];
        }
        for (std::int64_t m = 0; m < tokens; ++m) {
          const auto at = static_cast<std::size_t>(m * layer.y_stride() + n);
          if (m != 1) {
            ASSERT_EQ(y[at], before[at]) << m << ' ' << n;
          } else if (!stores) {
            ASSERT_TRUE(std::isfinite(y[at])) << n;
          } else if (std::isnan(bad) || w == 0) {
            ASSERT_TRUE(std::isnan(y[at])) << n;
          } else {
            ASSERT_EQ(y[at], w > 0 ? bad : -bad) << n;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace rarefy::test::int8
