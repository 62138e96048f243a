// Products in bf16 pairs, by every family that this machine has and by its portable twin: against the
// reference, on weights that are packed anew for each call. Their accumulation is docs/numerics.md's.
#include <set>
#include <tuple>

#include "held_checks.h"
#include "pairs_checks.h"

namespace rarefy::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, PairsTest, ::testing::ValuesIn(pair_families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(PairsTest, EveryBlockShape) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {4, 1},   {8, 1},   {4, 2},   {8, 3},   {4, 4},   {8, 8},   {4, 16},  {8, 32},   {4, 33},
      {16, 4},  {48, 8},  {16, 1},  {32, 1},  {48, 1},  {64, 1},  {128, 1}, {16, 2},   {32, 3},
      {16, 16}, {32, 8},  {48, 16}, {32, 32}, {64, 64}, {16, 96}, {16, 31}, {160, 33}, {12, 1},
      {24, 1},  {20, 3},  {12, 12}, {24, 16}, {24, 24}, {40, 2},  {36, 32}, {5, 1},    {6, 6},
      {7, 2},   {10, 10}, {9, 32},  {14, 1},  {13, 33}, {25, 4}};  // cut into 4 or 8 rows
  for (const auto& [rows, cols] : blocks) {
    for (const bool integers : {true, false}) {
      check({37, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, {}, integers, 3});
      check({64, 3 * rows, 7 * cols, rows, cols, 0.2, {}, integers, 0});
      if (rows < 16 || rows % 16 != 0)
        check({40, 21 * rows + 1, 19 * cols, rows, cols, 0.07, {}, integers, 1});  // joined, sparse
    }
  }
}

// Rows of which several meet in each output block: taken where much is stored.
TEST_P(PairsTest, FewRows) {
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] :
       {Block{1, 1}, {1, 4}, {1, 16}, {1, 32}, {1, 3}, {2, 1}, {2, 2}, {3, 1}, {3, 5}, {3, 32}}) {
    for (const bool integers : {true, false}) {
      check({37, 35 * rows + rows / 2, 8 * cols + cols / 2 + 1, rows, cols, 0.6, {}, integers, 3});
      check({64, 70, 40 * cols, rows, cols, 0.8, {}, integers, 0});
    }
  }
}

// Both halves of a panel, part of one, several panels; one row of x for all tokens.
TEST_P(PairsTest, EveryNumberOfTokens) {
  for (const std::int64_t tokens : {5, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 128, 130, 300}) {
    check({tokens, 70, 90, 32, 1, 0.5, {}, true, tokens % 2 == 0 ? 0 : -1});
    check({tokens, 90, 70, 16, 4, 0.5, {}, false, 1});
    check({tokens, 90, 130, 32, 32, 0.5, {}, false, 1});
    for (const double density : {0.05, 0.3}) {
      check({tokens, 70, 90, 4, 1, density, {}, true, 0});
      check({tokens, 90, 70, 8, 8, density, {}, false, 1});
    }
  }
}

// More groups than a chunk has, last groups of every number of pairs, and patterns without any.
TEST_P(PairsTest, GroupsAndChunks) {
  for (std::int64_t columns = 1; columns <= 70; ++columns) {
    check({33, 32, columns, 32, 1, 1.0, {}, true, 0});
    check({20, 16, 2 * columns, 16, 2, 1.0, {}, true, 0});
    check({20, 36, columns, 4, 1, 0.4, {}, true, 0});
    check({20, 24, 2 * columns, 8, 2, 0.4, {}, true, 0});
  }
  for (const std::int64_t columns : {255, 256, 257, 289, 511, 512, 513, 1100}) {
    check({40, 80, columns, 32, 1, 0.9, {}, true, 0});
    check({40, 80, columns, 64, 1, 1.0, {}, false, 0});
    check({40, 80, columns, 32, 32, 0.9, {}, true, 0});
    check({40, 80, 4 * columns, 4, 1, 0.9, {}, true, 0});
    check({40, 80, columns, 8, 32, 0.9, {}, false, 0});
  }
  for (const double density : {0.0, 0.02, 1.0}) {
    check({70, 90, 80, 32, 1, density, {}, true, 2});
    check({70, 90, 80, 16, 16, density, {}, true, 2});
    check({70, 90, 80, 4, 1, density, {}, true, 2});
    check({70, 90, 80, 8, 4, density, {}, true, 2});
  }
  check({5, 70, 0, 16, 1, 0.0, {}, true, 2});  // no input features
  check({5, 0, 90, 16, 1, 0.0, {}, true, 2});  // no output features
}

// Chunks of tokens, their sums kept between them; ranges of rows and columns; what is no line and no lane.
TEST_P(PairsTest, GradWeightOfManyTokens) {
  ThreadPool pool(3);
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{32, 1}, {48, 1}, {128, 1}, {16, 1}, {8, 16}, {32, 32}, {20, 48}}) {
    for (const bool integers : {true, false}) {
      for (const std::int64_t tokens : {32, 511, 512, 513, 1100}) {
        const Problem problem = make_problem(
            {tokens, 3 * rows + 5, 4 * cols + 37, rows, cols, 0.4, DType::bf16, integers, tokens % 2});
        ProblemIn<HostBuffer> run(problem, pool.executor());
        check_grad_weight(problem, run);
      }
    }
  }
}

// Blocks that are no products go by tiles of 32 × 32 where there are tiles: blocks across several of them and
// beyond the last row and column by more than one, several chunks of tokens, threads.
TEST_P(PairsTest, GradWeightByTiles) {
  if (GetParam() == "avx512_bf16") GTEST_SKIP() << "has no tiles";
  ThreadPool pool(3);
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{1, 1},
                                   {1, 7},
                                   {2, 1},
                                   {3, 1},
                                   {3, 5},
                                   {40, 1},
                                   {50, 9},
                                   {100, 3},
                                   {3, 100},
                                   {33, 65},
                                   {100, 1}}) {
    for (const std::int64_t tokens : {33, 600}) {
      check({tokens, 33, 70, rows, cols, 0.5, {}, true, 1}, pool.executor());
      check({tokens, 70, 133, rows, cols, 0.4, {}, false, 0}, pool.executor());
    }
  }
}

// Equal bits on any number of threads; NaN and infinity in what a block meets, and zeros in padding whatever
// x and dy hold.
TEST_P(PairsTest, GradWeightOfNanAndOnThreads) {
  const Force force(GetParam());
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{32, 1}, {16, 16}, {16, 32}, {3, 5}}) {
    Problem problem = make_problem({600, 3 * rows + 5, 4 * cols + 37, rows, cols, 0.4, DType::bf16, true, 0});
    problem.x[7] = kNan;
    problem.dy[3] = kInfinity;
    std::set<std::vector<std::byte>> results;
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.grad_weight());
      results.insert(run.dvalues().download());
    }
    ASSERT_EQ(results.size(), 1U);
    const std::vector<double> got = decode(*results.begin(), DType::bf16);
    const std::vector<double> expected = Host{problem}.grad_weight(problem.dy, problem.x);
    const std::vector<double> rounded = decode(encode(expected, DType::bf16), DType::bf16);
    bool some = false;
    for (std::size_t i = 0; i < rounded.size(); ++i) {
      ASSERT_TRUE(same(got[i], rounded[i])) << i << ": " << got[i] << " for " << rounded[i];
      some = some || std::isnan(got[i]);
    }
    EXPECT_TRUE(some);
  }
}

TEST_P(PairsTest, OnSeveralThreads) {
  ThreadPool pool(3);
  for (const bool integers : {true, false}) {
    check({400, 700, 500, 32, 1, 0.3, {}, integers, 0}, pool.executor());
    check({70, 1000, 777, 64, 1, 0.3, {}, integers, 1}, pool.executor());
    check({33, 2048, 512, 16, 16, 0.4, {}, integers, 0}, pool.executor());
    check({400, 700, 500, 4, 1, 0.3, {}, integers, 0}, pool.executor());
  }
}

// Bits do not depend on threads, nor on the batch that a token is in.
TEST_P(PairsTest, TheSameBitsInEveryBatchAndOnEveryThread) {
  const Force force(GetParam());
  using Block = std::tuple<std::int64_t, std::int64_t, double>;
  for (const auto& [rows, cols, density] : {Block{32, 1, 0.4},
                                            {32, 4, 0.4},
                                            {32, 32, 0.4},
                                            {4, 1, 0.4},
                                            {4, 1, 0.05},
                                            {16, 1, 0.4},
                                            {8, 8, 0.4}}) {
    Problem problem = make_problem({200, 130, 600, rows, cols, density, DType::bf16, false, 0});
    problem.x[static_cast<std::size_t>(70 * problem.x_stride() + 5)] = kInfinity;  // of one token
    const auto run = [&](std::int64_t first, std::int64_t count, int threads) {
      const Problem some = of_tokens(problem, first, count);
      ThreadPool pool(threads);
      ProblemIn<HostBuffer> one(some, pool.executor());
      one.hold_derived();
      expect_ok(one.linear(Activation::none));
      return one.y().download();
    };
    const std::vector<std::byte> all = run(0, 200, 1);
    for (const int threads : {2, 5}) EXPECT_EQ(run(0, 200, threads), all);
    const auto row = static_cast<std::ptrdiff_t>(all.size()) / 200;
    const std::int64_t least = least_of_many(problem);
    for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, least}, {17, 16}, {63, 40}}) {
      const std::vector<std::byte> part = run(first, count, 2);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first * row)) << first << ' ' << count;
    }
  }
}

// Columns without stored blocks may hold anything, beside the padding of groups too; what meets a stored
// block passes through, stored zeros included.
TEST_P(PairsTest, NanAndInfinityPassWhereBlocksAreStored) {
  using Block = std::tuple<std::int64_t, std::int64_t, double>;
  for (const auto& [rows, cols, density] : {Block{16, 1, 0.4},
                                            {32, 2, 0.4},
                                            {16, 32, 0.4},
                                            {4, 1, 0.4},
                                            {4, 1, 0.1},
                                            {8, 1, 0.4},
                                            {4, 4, 0.4},
                                            {8, 16, 0.4},
                                            {8, 16, 0.1},
                                            {16, 16, 0.4},
                                            {24, 1, 0.4},
                                            {6, 6, 0.4},
                                            {10, 3, 0.2},
                                            {3, 5, 0.6},
                                            {1, 4, 0.6}}) {
    const bool few = GetParam() == "avx512_bf16" && rows % 4 != 0;  // has a kernel for them
    for (const std::int64_t tokens :
         few ? std::vector<std::int64_t>{40, 3, 7} : std::vector<std::int64_t>{40}) {
      Problem problem =
          make_problem({tokens, 7 * rows + 1, 9 * cols, rows, cols, density, DType::bf16, true, 0});
      for (std::int64_t m = 0; m < tokens; ++m) {
        problem.x[static_cast<std::size_t>(m * problem.x_stride() + m % problem.spec.k)] = m % 3 == 0 ? kNan
                                                                                           : m % 3 == 1
                                                                                               ? kInfinity
                                                                                               : -kInfinity;
      }
      problem.values[3] = kNan;
      problem.bias[1] = kInfinity;
      ProblemIn<HostBuffer> run(problem);
      run_all(run);
      const std::vector<double> expected =
          Host{problem}.linear(problem.x, problem.values, &problem.bias, Activation::none);
      const std::vector<double> got = decode(run.y().download(), DType::bf16);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const std::size_t n = static_cast<std::size_t>(problem.spec.n);
        ASSERT_TRUE(same(got[i / n * static_cast<std::size_t>(problem.y_stride()) + i % n], expected[i]))
            << i;
      }
    }
  }
}

// Subnormal numbers may count as 0, in x, in the weight and as a result: each changes a result by less than
// 2⁻¹²⁶ times the other factor.
TEST_P(PairsTest, SubnormalNumbersMayBeZero) {
  Problem problem = make_problem({40, 32, 64, 16, 1, 1.0, DType::bf16, true, 0});
  for (std::size_t i = 0; i < problem.x.size(); i += 3) problem.x[i] = 0x1p-130;
  for (std::size_t i = 0; i < problem.values.size(); i += 5) problem.values[i] = -0x1p-127;
  for (double& bias : problem.bias) bias = 0;
  ProblemIn<HostBuffer> run(problem);
  run_all(run);
  const std::vector<double> expected =
      Host{problem}.linear(problem.x, problem.values, &problem.bias, Activation::none);
  const std::vector<double> got = decode(run.y().download(), DType::bf16);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - expected[i]), 64 * 2 * 0x1p-126 + 0x1p-9 * std::abs(expected[i])) << i;
  }
}

TEST_P(PairsTest, NanInDyReachesWhatIsStored) {
  for (const double density : {0.1, 0.6}) {
    for (const std::int64_t rows : {32, 64, 160}) {
      Problem problem = make_problem({150, 3 * rows + 20, 77, rows, 1, density, DType::bf16, true, 0});
      const std::int64_t stride = problem.y_stride();
      problem.dy[static_cast<std::size_t>(3 * stride + 5)] = kNan;
      problem.dy[static_cast<std::size_t>(70 * stride + rows + 1)] = kInfinity;
      problem.dy[static_cast<std::size_t>(149 * stride)] = -kInfinity;
      ProblemIn<HostBuffer> run(problem);
      expect_ok(run.grad_input());
      expect_same_or_nan(problem, run, {false, true, false});
    }
  }
}

TEST_P(PairsTest, EveryConfigurationComputesTheSame) {
  ThreadPool pool(3);  // each of which takes a part of `rest`
  for (const char* config : {"panels=1 splits=1", "panels=3 splits=2", "panels=2 splits=7"}) {
    const Force force(GetParam() + "," + GetParam() + "_grad_input_columns(" + config + ")");
    const Problem problem = make_problem({150, 170, 200, 32, 1, 0.4, DType::bf16, true, 0});
    ProblemIn<HostBuffer> run(problem, pool.executor());
    expect_ok(run.grad_input());
    expect_grad_input(problem, run);
  }
  for (const char* config : {"rows=1 columns=1", "rows=7 columns=3", "rows=100 columns=500"}) {
    const Force force(GetParam() + "," + GetParam() + "_grad_weight(" + config + ")");
    for (const std::int64_t cols : {1, 16}) {
      const Problem problem = make_problem({150, 170, 200, 32, cols, 0.4, DType::bf16, true, 0});
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.grad_weight());
      expect_grad_weight(problem, run);
    }
  }
  for (const char* config :
       {"panels=1 splits=1 rest=0", "panels=3 splits=2 rest=0", "panels=16 splits=5 rest=0",
        "panels=2 splits=1 rest=1", "panels=4 splits=3 rest=2", "panels=9 splits=1 rest=9"}) {
    const Force force(GetParam() + "," + GetParam() + "_linear(" + config + ")");
    const Problem problem = make_problem({150, 170, 200, 32, 1, 0.4, DType::bf16, true, 0});
    ProblemIn<HostBuffer> run(problem, pool.executor());
    run.hold_derived();
    expect_ok(run.linear(Activation::none));
    expect_linear(problem, run);
  }
}

}  // namespace
}  // namespace rarefy::test
