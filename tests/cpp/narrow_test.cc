// linear for 5 to 16 tokens in blocks of a multiple of 4 rows (narrow.h): block rows of different lengths
// side by side, empty and full ones among them, sums of several parts, groups of outputs that end early; the
// bits of a large batch.
#include <gtest/gtest.h>

#include "product_checks.h"

namespace rarefy::test {
namespace {

struct Case {
  std::int64_t block_rows, block_cols, rows, cols;
  double density;
};

// Outputs that are no whole groups of 16; rows of up to seven parts; NaN beside what is stored below.
constexpr Case kCases[] = {{4, 1, 130, 2100, 0.6}, {4, 1, 16, 40, 0.0},   {8, 1, 77, 900, 0.9},
                           {12, 1, 100, 700, 0.5}, {4, 4, 94, 1230, 0.7}, {8, 8, 121, 2005, 0.6},
                           {16, 4, 75, 900, 0.5},  {12, 8, 61, 801, 0.7}, {4, 16, 55, 1000, 0.4},
                           {40, 4, 90, 300, 0.5},  {4, 3, 50, 300, 0.5},  {20, 1, 64, 500, 0.5}};

TEST(NarrowTest, HasTheBitsOfManyTokens) {
  if (!backend_info().machine.has("avx512")) GTEST_SKIP() << "the processor lacks avx512";
  const Force force("avx512");
  for (const Case& c : kCases) {
    for (const bool integers : {true, false}) {
      SCOPED_TRACE(::testing::Message() << c.block_rows << 'x' << c.block_cols << " integers " << integers);
      const Problem problem =
          make_problem({48, c.rows, c.cols, c.block_rows, c.block_cols, c.density, DType::f32, integers, 3});
      const auto run = [&](std::int64_t first, std::int64_t count) {
        const Problem some = of_tokens(problem, first, count);
        ProblemIn<HostBuffer> one(some);
        expect_ok(one.linear(Activation::none));
        expect_linear(some, one);
        return one.y().download();
      };
      const std::vector<std::byte> all = run(0, 48);
      const auto row = static_cast<std::ptrdiff_t>(all.size()) / 48;
      for (const std::int64_t count : {5, 7, 8, 9, 12, 16}) {
        const Force lanes("avx512,avx512_linear()");
        const std::vector<std::byte> part = run(20, count);
        EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + 20 * row)) << count << " tokens";
      }
    }
  }
}

// Rows that have ended meet nothing while others go on.
TEST(NarrowTest, NanStaysWithRowsThatStoreItsColumn) {
  if (!backend_info().machine.has("avx512")) GTEST_SKIP() << "the processor lacks avx512";
  const Force force("avx512");
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{4, 1}, {8, 1}, {4, 4}, {8, 8}}) {
    for (const std::int64_t tokens : {6, 14}) {
      SCOPED_TRACE(::testing::Message() << rows << 'x' << cols << ' ' << tokens);
      Problem problem = make_problem({tokens, 90, 640, rows, cols, 0.3, DType::f32, true, 0});
      for (std::int64_t m = 0; m < tokens; ++m) {
        problem.x[static_cast<std::size_t>(m * 640 + m * 37)] = std::numeric_limits<double>::quiet_NaN();
        problem.x[static_cast<std::size_t>(m * 640 + m * 41 + 5)] = std::numeric_limits<double>::infinity();
      }
      ProblemIn<HostBuffer> run(problem);
      expect_ok(run.linear(Activation::none));
      expect_same_or_nan(problem, run, {true, false, false});
    }
  }
}

}  // namespace
}  // namespace rarefy::test
