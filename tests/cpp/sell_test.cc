// linear for up to 4 tokens with single elements that are held a lane for each row (cpu/sell.h).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "held_checks.h"

namespace rarefy::test {
namespace {

// The instruction sets that have a kernel for them.
class SellTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!backend_info().machine.has(GetParam())) GTEST_SKIP() << "the processor lacks " << GetParam();
  }
  std::string kernel() const { return std::string(GetParam()) + "_linear_sell"; }
};

// Rows with as many elements as `length(row)` says, spread over the columns.
Problem problem_of_rows(std::int64_t tokens, std::int64_t rows, std::int64_t cols, bool integers,
                        const auto& length) {
  Problem problem = make_problem({tokens, rows, cols, 1, 1, 0.0, DType::f32, integers, 2});
  std::vector<std::int32_t> crow{0}, col;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t count = std::min<std::int64_t>(length(row), cols);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t begin = i * cols / count, end = (i + 1) * cols / count;
      col.push_back(static_cast<std::int32_t>(begin + (row * 31 + i * 17) % (end - begin)));
    }
    crow.push_back(static_cast<std::int32_t>(col.size()));
  }
  problem.pattern = *Pattern::create({rows, cols, 1, 1, 0}, crow, col);
  problem.values.resize(col.size());
  for (std::size_t e = 0; e < col.size(); ++e) {
    problem.values[e] =
        integers ? static_cast<double>(e % 5) - 2 : static_cast<float>(std::sin(static_cast<double>(e)));
  }
  return problem;
}

std::int64_t some_length(std::int64_t row) { return row % 9 == 4 ? 0 : row * row % 23; }

// Sets that are not whole; columns of 16 and of 32 bits; rows without elements; one thread and three.
TEST_P(SellTest, EveryShapeIsRight) {
  const Force force(GetParam());
  ThreadPool pool(3);
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{80, 1000},
                                   {90, 1280},
                                   {255, 4000},
                                   {256, 1000},
                                   {257, 1000},
                                   {120, 65'536},
                                   {120, 65'537}}) {
    for (const std::int64_t tokens : {1, 2, 3, 4}) {
      for (const bool integers : {true, false}) {
        SCOPED_TRACE(::testing::Message() << rows << 'x' << cols << ", " << tokens);
        const Problem problem = problem_of_rows(tokens, rows, cols, integers, some_length);
        for (const Activation activation : {Activation::none, Activation::relu}) {
          ProblemIn<HostBuffer> run(problem, tokens == 2 ? pool.executor() : Executor{});
          run.hold_derived();
          EXPECT_EQ(kernel_of(run), kernel());
          expect_ok(run.linear(activation));
          if (activation == Activation::none) expect_linear(problem, run);
        }
      }
    }
  }
}

// Rows of every length: groups with long tails, of many steps, and those with a row that is too long to be
// held, which are a set's first.
TEST_P(SellTest, RowsOfAnyLengthsAreRight) {
  const Force force(GetParam());
  constexpr std::int64_t kRows = 1100, kCols = 12'000;
  for (const bool integers : {true, false}) {
    for (const std::int64_t tokens : {1, 4}) {
      const Problem problem = problem_of_rows(tokens, kRows, kCols, integers, [](std::int64_t row) {
        return row % 400 == 399 ? 5000 : row % 100 == 7 ? 400 + row / 10 : row * row % 60;
      });
      ProblemIn<HostBuffer> run(problem);
      run.hold_derived();
      EXPECT_EQ(kernel_of(run), kernel());
      expect_ok(run.linear(Activation::none));
      expect_linear(problem, run);
    }
  }
}

// Lanes without an element in a step hold anything, and it reaches no sum.
TEST_P(SellTest, NaNReachesTheRowsThatStoreItsColumn) {
  const Force force(GetParam());
  Problem problem = problem_of_rows(2, 600, 3000, true, some_length);
  problem.x[5] = std::numeric_limits<double>::quiet_NaN();
  problem.x[3211] = std::numeric_limits<double>::infinity();
  problem.values[17] = -std::numeric_limits<double>::infinity();
  ProblemIn<HostBuffer> run(problem);
  run.hold_derived();
  EXPECT_EQ(kernel_of(run), kernel());
  expect_ok(run.linear(Activation::none));
  expect_same_or_nan(problem, run, {true, false, false});
}

TEST_P(SellTest, BitsDependOnNothingElse) {
  const Force force(GetParam());
  const Problem problem = problem_of_rows(4, 1000, 5000, false, some_length);
  expect_same_bits_in_any_batch(problem);
}

TEST_P(SellTest, OnlyShortRowsThatAreHeldGetThem) {
  const Force force(GetParam());
  const Problem problem = problem_of_rows(1, 900, 2000, false, some_length);
  ProblemIn<HostBuffer> run(problem);
  EXPECT_NE(kernel_of(run), kernel());
  const auto none = [](std::int64_t) { return 0; };
  const auto many = [](std::int64_t) { return 1100; };
  for (const Problem& other :
       {problem_of_rows(5, 900, 2000, false, some_length), problem_of_rows(1, 900, 2000, false, none),
        problem_of_rows(1, 50, 2000, false, some_length), problem_of_rows(1, 90, 20'000, false, many)}) {
    ProblemIn<HostBuffer> its(other);
    its.hold_derived();
    EXPECT_NE(kernel_of(its), kernel());
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, SellTest, testing::Values("avx512", "avx2"),
                         [](const auto& its) { return std::string(its.param); });

}  // namespace
}  // namespace rarefy::test
