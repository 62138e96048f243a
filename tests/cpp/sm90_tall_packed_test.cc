// The tall kernel on blocks of 32×1 and odd multiples of it, whose rows go in groups of 64, packed: against
// the host's products in double, through the registry; and that what a row does not store is skipped,
// whatever X holds. Other blocks: sm90_fine_test.cc.
#include <gtest/gtest.h>

#include <limits>

#include "sm90_checks.h"

namespace rarefy::test {
namespace {

// By name, as many of them are faster packed whole.
constexpr const char* kForced = "cuda:sm90,sm90_tall_packed()";

class Sm90TallPackedTest : public Sm90Test {
 protected:
  // Of a front that holds what was made for 4096 tokens.
  static void check(const ProblemSpec& spec) {
    SCOPED_TRACE(text_of(spec));
    const Force force(kForced);
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_tall_packed");
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
  }
};

TEST_F(Sm90TallPackedTest, MatchHost) {
  for (const std::int64_t r : {32, 96}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const Layout x : kLayouts) {
        for (const Layout y : kLayouts) {
          for (const double density : {0.0, 0.3, 1.0}) {
            check({136, 5 * r - 8, 80, r, 1, density, dtype, true, 8, x, y});
          }
          check({520, 4 * r - 24, 328, r, 1, 0.3, dtype, false, 8, x, y});
          const bool by_token = x == Layout::by_token && y == Layout::by_token;
          check({by_token ? 17 : 24, 3 * r - 8, 40, r, 1, 0.5, dtype, true, 8, x, y});
        }
      }
    }
  }
}

// Ragged token tiles, many groups, and columns that fill several words for each thread of the plan.
TEST_F(Sm90TallPackedTest, ManyTokensRowsAndColumns) {
  for (const std::int64_t tokens : {255, 257, 1281, 4100}) {
    check({tokens, 320, 96, 32, 1, 0.4, DType::bf16, true, 8});
  }
  check({40000, 64, 32, 32, 1, 0.6, DType::bf16, true, 0});
  check({600, 32 * 599, 64, 32, 1, 0.5, DType::f16, true, 0});
  check({64, 64, 20000, 32, 1, 0.02, DType::bf16, true, 0});
}

// A row that does not store a column gets nothing of the Inf or NaN that X has there: its zeros, packed
// beside the other row's weights, are not multiplied by it.
TEST_F(Sm90TallPackedTest, AbsentBlocksAreSkippedWhateverXHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const Layout x : kLayouts) {
      for (const Layout y : kLayouts) {
        SCOPED_TRACE(::testing::Message() << name(dtype) << ' ' << name(x) << ' ' << name(y));
        const ProblemSpec spec{304, 5 * 32, 336, 32, 1, 0.3, dtype, true, 0, x, y};
        Problem problem = make_problem(spec);
        add_specials(problem);
        std::fill_n(problem.x.begin() + 7 * spec.k, spec.k, nan);  // a token of nothing else
        ProblemIn<DeviceBuffer> gpu(problem);
        const Force force(kForced);
        gpu.hold_derived(4096);
        expect_ok(gpu.linear(Activation::none));
        const std::vector<double> got = decode(gpu.y().download(), dtype);
        const std::vector<double> exact = decode(
            encode(Host{problem}.linear(problem.x, problem.values, &problem.bias, Activation::none), dtype),
            dtype);
        for (std::int64_t t = 0; t < spec.m; ++t) {
          for (std::int64_t n = 0; n < spec.n; ++n) {
            const double mine =
                got[static_cast<std::size_t>(y == Layout::by_token ? t * spec.n + n : n * spec.m + t)];
            const double its = exact[static_cast<std::size_t>(t * spec.n + n)];
            ASSERT_TRUE(std::isnan(its) ? std::isnan(mine) : mine == its)
                << t << ' ' << n << ": " << mine << ' ' << its;
          }
        }
      }
    }
  }
}

TEST_F(Sm90TallPackedTest, Activations) {
  for (const Activation activation :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(::testing::Message() << name(activation) << ' ' << name(dtype));
      const Problem problem = make_problem({200, 192, 256, 32, 1, 0.3, dtype, false, 8});
      ProblemIn<DeviceBuffer> gpu(problem);
      const Force force(kForced);
      gpu.hold_derived();
      expect_ok(gpu.linear(activation));
      expect_activation(problem, gpu, activation);
    }
  }
}

}  // namespace
}  // namespace rarefy::test
