// The three products on the CPU: every implementation this machine can run, forced one by one, against the
// reference in double. Numbers that are no ordinary ones: product_numbers_test.cc; the GPU's, with the same
// problems and bounds: cuda_products_test.cc.
#include <set>

#include "held_checks.h"
#include "product_families.h"

namespace rarefy::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, ProductsTest, ::testing::ValuesIn(cpu_impls()),
                         [](const auto& tested) { return tested.param; });

// Block shapes of every kind: columns, rows, squares, odd ones; edges that are padded.
TEST_P(ProductsTest, EveryBlockShape) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 1}, {1, 2}, {1, 16}, {2, 1},  {2, 64},  {3, 5},   {4, 1},   {4, 4}, {5, 3},
      {7, 1}, {8, 8}, {12, 6}, {16, 1}, {16, 16}, {17, 33}, {32, 32}, {64, 2}};
  for (const auto& [rows, cols] : blocks) {
    for (const DType dtype : kDTypes) {
      check({37, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, dtype, false, 3});
      check({65, 9 * rows, 7 * cols, rows, cols, 0.3, dtype, true, 0});
    }
  }
}

// Around every width of a panel, and with one row of x for all tokens.
TEST_P(ProductsTest, EveryNumberOfTokens) {
  for (const std::int64_t tokens :
       {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 128, 130, 255, 257, 300}) {
    check({tokens, 45, 50, 4, 1, 0.5, DType::f32, true, tokens % 2 == 0 ? 0 : -1});
    check({tokens, 50, 45, 1, 4, 0.5, DType::bf16, false, 1});
  }
}

// Up to 4 tokens have kernels of their own, for the shapes whose vectors are whole rows, repeated ones, or
// groups of entries; the rest of a group, and several slices of a block, included.
TEST_P(ProductsTest, FewTokens) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 1},  {2, 1},  {1, 2}, {2, 2},   {1, 4},   {2, 4},  {1, 8},  {3, 5},
      {1, 16}, {2, 8},  {4, 1}, {8, 1},   {16, 1},  {32, 1}, {4, 2},  {8, 2},
      {4, 4},  {16, 4}, {8, 8}, {16, 16}, {12, 16}, {5, 32}, {64, 2}, {32, 32}};
  for (const auto& [rows, cols] : blocks) {
    for (const std::int64_t tokens : {1, 2, 3, 4}) {
      for (const DType dtype : kDTypes) {
        check({tokens, 6 * rows + rows / 2, 37 * cols + cols / 2, rows, cols, 0.4, dtype, dtype == DType::f32,
               1});
      }
    }
  }
  ThreadPool pool(3);
  check({1, 700, 900, 16, 16, 0.3, DType::bf16, false, 0}, pool.executor());
  check({4, 900, 700, 4, 1, 0.3, DType::f32, false, -1}, pool.executor());
  for (const bool integers : {false, true}) {  // several chunks of values
    check({2, 70, 9000, 4, 1, 0.9, DType::f16, integers, 0}, pool.executor());
    check({3, 40, 9001, 1, 1, 0.9, DType::f32, integers, 0}, pool.executor());
    check({1, 40, 9001, 2, 2, 0.9, DType::f32, integers, 0}, pool.executor());
    check({4, 64, 3001, 32, 1, 0.9, DType::f32, integers, 0}, pool.executor());
    check({2, 42, 3001, 3, 5, 0.9, DType::f32, integers, 0}, pool.executor());
    check({2, 43, 3001, 1, 3, 0.9, DType::f32, integers, 0}, pool.executor());
    check({4, 64, 9000, 16, 16, 0.9, DType::bf16, integers, 0}, pool.executor());
  }
}

TEST_P(ProductsTest, EmptyFullAndLopsidedPatterns) {
  for (const double density : {0.0, 0.02, 1.0}) {
    for (const DType dtype : kDTypes) {
      check({70, 90, 80, 4, 4, density, dtype, true, 2});
      check({70, 33, 200, 1, 8, density, dtype, true, 2});
    }
  }
  check({5, 7, 9, 40, 50, 1.0, DType::f32, true, 2});  // one block larger than the matrix
  check({5, 7, 0, 4, 4, 0.0, DType::f32, true, 2});    // no input features
  check({5, 0, 9, 4, 4, 0.0, DType::f32, true, 2});    // no output features
}

// Several tiles of X in L2, several windows of y, and sums of thousands of terms: as reals, within the bound
// of so many terms, and as integers, where one lost term shows.
TEST_P(ProductsTest, LargeMatrices) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no tiles, and is slow";
  ThreadPool pool(3);
  for (const bool integers : {false, true}) {
    check({70, 64, 9000, 4, 1, 0.5, DType::f32, integers, 0}, pool.executor());
    check({70, 9000, 64, 1, 4, 0.5, DType::f32, integers, 0}, pool.executor());
    check({70, 512, 4100, 16, 16, 0.5, DType::f32, integers, 0}, pool.executor());
    check({66, 300, 5000, 2, 3, 0.2, DType::bf16, integers, 0}, pool.executor());
    check({9001, 20, 24, 4, 4, 0.5, DType::f32, integers, 0}, pool.executor());
  }
  for (const std::int64_t rows : {4, 8, 12}) {  // sums in several parts, whose X is one tile
    for (const bool integers : {false, true}) check({70, 150, 1400, rows, 1, 0.9, DType::f32, integers, 5});
  }
  // Rows that are whole pages apart are stored another way.
  check({70, 1024, 2048, 4, 4, 0.3, DType::f32, true, 0}, pool.executor());
  check({70, 2048, 1024, 4, 4, 0.3, DType::bf16, true, 0}, pool.executor());
}

// X is far larger than L2: its tiles are summed up before the activation, which comes once.
TEST_P(ProductsTest, ActivationAfterSeveralTiles) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no tiles, and is slow";
  ThreadPool pool(2);
  const auto run_activated = [&](const Problem& problem, Activation activation) {
    SCOPED_TRACE(::testing::Message()
                 << name(activation) << ' ' << problem.spec.block_rows << 'x' << problem.spec.block_cols);
    ProblemIn<HostBuffer> run(problem, pool.executor());
    {
      const Force force(GetParam());
      expect_ok(run.linear(activation));
    }
    expect_activation(problem, run, activation);
  };
  const Problem wide = make_problem({17, 24, 200'000, 4, 1, 0.02, DType::f32, false, 0});
  for (const Activation activation : {Activation::relu, Activation::gelu_tanh})
    run_activated(wide, activation);
  run_activated(make_problem({20, 32, 100'000, 16, 16, 0.02, DType::bf16, false, 0}), Activation::relu);
}

// Every family writes what is added; the core adds it.
TEST_P(ProductsTest, AddToAGradient) {
  const Force force(GetParam());
  for (const DType dtype : kDTypes) {
    for (const bool integers : {true, false}) {
      SCOPED_TRACE(name(dtype));
      const Problem problem = make_problem({40, 37, 30, 8, 4, 0.5, dtype, integers, 3});
      ProblemIn<HostBuffer> run(problem);
      expect_accumulated(problem, run);
    }
  }
  // The caller's workspace is asked for that room, too.
  rarefy::Problem asked = make_problem(Op::grad_weight, {64, 64, 8, 8, 32}, 40, DType::f32);
  const std::int64_t written = *workspace_size(asked);
  asked.accumulate = true;
  EXPECT_EQ(*workspace_size(asked), written + 32 * 64 * 4);
}

// grad_weight sums chunks of 512 tokens over tiles of columns: every number of rows a tile of dot products
// has.
TEST_P(ProductsTest, SeveralChunksOfTokens) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no chunks, and is slow";
  ThreadPool pool(3);
  for (const auto& [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 16}, {4, 1}, {7, 3}, {16, 16}}) {
    check({1030, 9 * rows + 1, 700, rows, cols, 0.4, DType::f32, rows == 4, 1}, pool.executor());
    check({513, 300, 40, rows, cols, 0.4, DType::bf16, false, 0}, pool.executor());
  }
}

// 18 MB of values: a set of panels shares each group of weights.
TEST_P(ProductsTest, WeightsLargerThanCaches) {
  if (GetParam() == "ref" || GetParam() == "scalar") GTEST_SKIP() << "slow; one blocking serves every ISA";
  ThreadPool pool(2);
  check({70, 2100, 2100, 32, 32, 1.0, DType::f32, true, 0}, pool.executor());
}

TEST_P(ProductsTest, GiveTheSameBitsOnAnyNumberOfThreads) {
  const Force force(GetParam());
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{4, 1}, {1, 16}, {16, 16}}) {
    const Problem problem = make_problem({150, 200, 170, rows, cols, 0.4, DType::f32, false, 0});
    std::set<std::vector<std::byte>> results;
    for (const int threads : {1, 2, 3, 5, 1}) {
      ThreadPool pool(threads);
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.linear(Activation::gelu_tanh));
      expect_ok(run.grad_input());
      expect_ok(run.grad_weight());
      std::vector<std::byte> all = run.y().download();
      for (const Guarded<HostBuffer>* output : {&run.dx(), &run.dvalues()}) {
        const std::vector<std::byte> bytes = output->download();
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
      results.insert(std::move(all));
    }
    // Scatter and gather sum in the same order, so even another blocking gives the same bits.
    EXPECT_EQ(results.size(), 1U) << rows << 'x' << cols;
  }
}

// Whether sums wait for other tiles of X, or go to Y along the way of the next ones (woven.h); in panels of
// any width, alone or several at a time.
TEST_P(ProductsTest, GiveTheSameBitsInAnyBlocking) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no blocking";
  for (const auto& [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{4, 1}, {4, 4}, {8, 1}, {8, 8}, {12, 2}, {8, 64}, {24, 300}}) {
    // With few blocks a row, what leaves along the way does so within them.
    const double density = cols < 8 ? 0.6 : 0.05;
    const Problem problem = make_problem({150, 203, 900, rows, cols, density, DType::f32, false, 1});
    std::set<std::vector<std::byte>> results;
    for (const char* config :
         {"tile_blocks=2", "vectors=1", "vectors=2", "panels=3", "splits=2", "asks=0", "asks=1"}) {
      const Force force(GetParam() + "," + GetParam() + "_linear(" + config + ")");
      ProblemIn<HostBuffer> run(problem);
      expect_ok(run.linear(Activation::gelu_tanh));
      results.insert(run.y().download());
    }
    EXPECT_EQ(results.size(), 1U) << rows << 'x' << cols;
  }
}

// The result of a token depends neither on the batch it is in nor on its place there, among batches of at
// most 4 tokens (or as many as go by fours) and among larger ones: the two have kernels of their own, with
// another order of sums.
TEST_P(ProductsTest, TokensDoNotDependOnTheBatch) {
  const Force force(GetParam());
  for (const auto& [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{4, 1}, {1, 16}, {8, 8}, {16, 1}, {32, 32}, {3, 5}}) {
    const Problem problem = make_problem({200, 120, 130, rows, cols, 0.4, DType::f32, false, 0});
    // Y of tokens first … first + count, as bytes.
    const auto run = [&](std::int64_t first, std::int64_t count) {
      const Problem some = of_tokens(problem, first, count);
      ProblemIn<HostBuffer> one(some);
      expect_ok(one.linear(Activation::silu));
      return one.y().download();
    };
    const auto expect_rows = [&](const std::vector<std::byte>& all, std::int64_t at,
                                 const std::vector<std::byte>& part, std::int64_t count) {
      const auto row = static_cast<std::ptrdiff_t>(part.size()) / count;
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + at * row))
          << problem.spec.block_rows << 'x' << problem.spec.block_cols << ", " << count << " from token "
          << at;
    };
    const std::vector<std::byte> all = run(0, 200);
    const std::vector<std::byte> few = run(40, 4);
    const std::int64_t least = least_of_many(problem);
    for (const std::int64_t token : {std::int64_t{0}, std::int64_t{63}, 200 - least})
      expect_rows(all, token, run(token, least), least);
    for (const std::int64_t token : {0, 2}) expect_rows(few, token, run(40 + token, 2), 2);
    for (const std::int64_t token : {0, 1, 3}) expect_rows(few, token, run(40 + token, 1), 1);
    expect_rows(few, 1, run(41, 3), 3);
  }
}

TEST_P(ProductsTest, EmptyBatch) {
  const Force force(GetParam());
  const Problem problem = make_problem({0, 20, 30, 4, 4, 0.5, DType::f32, true, 0});
  ProblemIn<HostBuffer> run(problem);
  expect_ok(run.linear(Activation::none));
  expect_ok(run.grad_input());
  expect_ok(run.grad_weight());
  for (const double number : decode(run.dvalues().download(), DType::f32)) EXPECT_EQ(number, 0);
}

}  // namespace
}  // namespace rarefy::test
