// linear for up to 4 tokens with single elements that are held in windows of columns (cpu/windows.h).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "held_checks.h"

namespace rarefy::test {
namespace {

class WindowsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!backend_info().machine.has("avx512")) GTEST_SKIP() << "has no kernel for them";
  }
};

// Rows of every length in each group: some are empty, some full; groups that are not whole; windows that
// begin anywhere and end behind the matrix; sums of several parts and totals; and those of one thread on
// three.
TEST_F(WindowsTest, EveryShapeIsRight) {
  struct Shape {
    std::int64_t rows, cols;
    double density;
  };
  const Force force("avx512");
  ThreadPool pool(3);
  for (const auto& [rows, cols, density] : {Shape{1, 1, 1.0},
                                            {5, 63, 1.0},
                                            {16, 64, 0.5},
                                            {33, 65, 0.5},
                                            {48, 1000, 0.02},
                                            {70, 500, 0.1},
                                            {31, 2000, 0.1},
                                            {40, 6000, 0.9},
                                            {200, 300, 0.3},
                                            {35, 70'000, 0.05},
                                            {2100, 40, 0.4}}) {
    for (const std::int64_t tokens : {1, 2, 3, 4}) {
      for (const bool integers : {true, false}) {
        SCOPED_TRACE(::testing::Message() << rows << 'x' << cols << " at " << density << ", " << tokens);
        const Problem problem = make_problem({tokens, rows, cols, 1, 1, density, DType::f32, integers, 2});
        for (const Activation activation : {Activation::none, Activation::relu}) {
          ProblemIn<HostBuffer> run(problem, tokens == 2 ? pool.executor() : Executor{});
          run.hold_derived();
          EXPECT_EQ(kernel_of(run), "avx512_linear_windows");
          expect_ok(run.linear(activation));
          if (activation == Activation::none) expect_linear(problem, run);
        }
      }
    }
  }
}

TEST_F(WindowsTest, BitsDependOnNothingElse) {
  const Force force("avx512");
  const Problem problem = make_problem({4, 100, 5000, 1, 1, 0.3, DType::f32, false, 0});
  expect_same_bits_in_any_batch(problem);
}

// Groups whose rows have nothing in common beside others: one full row among empty ones takes as many steps
// as it has elements, and is read as it lies.
TEST_F(WindowsTest, RowsThatShareNoWindowsAreReadAsTheyLie) {
  const Force force("avx512");
  constexpr std::int64_t kRows = 160, kCols = 900;
  std::vector<std::int32_t> crow{0}, col;
  for (std::int32_t i = 0; i < kRows; ++i) {
    const bool alone = i / 16 % 2 == 0;  // every other group
    for (std::int32_t j = 0; j < kCols; ++j) {
      if (alone ? i % 16 == 7 : (i * 31 + j * 17) % 11 == 0) col.push_back(j);
    }
    crow.push_back(static_cast<std::int32_t>(col.size()));
  }
  for (const std::int64_t tokens : {1, 3}) {
    Problem problem = make_problem({tokens, kRows, kCols, 1, 1, 0.0, DType::f32, true, 0});
    problem.pattern = *Pattern::create({kRows, kCols, 1, 1, 0}, crow, col);
    problem.values.resize(col.size());
    for (std::size_t e = 0; e < col.size(); ++e) problem.values[e] = static_cast<double>(e % 5) - 2;
    ProblemIn<HostBuffer> run(problem);
    run.hold_derived();
    EXPECT_EQ(kernel_of(run), "avx512_linear_windows");
    expect_ok(run.linear(Activation::none));
    expect_linear(problem, run);
  }
}

// Lanes without an element in a step hold anything, and it reaches no sum.
TEST_F(WindowsTest, NaNReachesTheRowsThatStoreItsColumn) {
  const Force force("avx512");
  Problem problem = make_problem({2, 90, 200, 1, 1, 0.2, DType::f32, true, 0});
  problem.x[5] = std::numeric_limits<double>::quiet_NaN();
  problem.x[211] = std::numeric_limits<double>::infinity();
  problem.values[17] = -std::numeric_limits<double>::infinity();
  ProblemIn<HostBuffer> run(problem);
  run.hold_derived();
  EXPECT_EQ(kernel_of(run), "avx512_linear_windows");
  expect_ok(run.linear(Activation::none));
  expect_same_or_nan(problem, run, {true, false, false});
}

TEST_F(WindowsTest, OnlyWhoHoldsValuesTwiceGetsThem) {
  const Force force("avx512");
  const Problem problem = make_problem({1, 90, 200, 1, 1, 0.2});
  ProblemIn<HostBuffer> run(problem);
  EXPECT_EQ(kernel_of(run), "avx512_linear_few");
  run.hold_of_the_pattern();
  EXPECT_EQ(kernel_of(run), "avx512_linear_few");
  for (const auto& [m, n, k, density] : {std::tuple{5, 90, 200, 0.2}, {1, 90, 200, 0.0}}) {
    const Problem outside = make_problem({m, n, k, 1, 1, density});
    ProblemIn<HostBuffer> other(outside);
    other.hold_derived();
    EXPECT_NE(kernel_of(other), "avx512_linear_windows") << m << ' ' << density;
  }
}

}  // namespace
}  // namespace rarefy::test
