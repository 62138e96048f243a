// Products in bf16 pairs of few tokens, which have kernels of their own.
#include <limits>

#include "pairs_checks.h"

namespace rarefy::test {
namespace {

// Blocks of whole groups go by token where there are tiles, from two tokens on.
TEST_P(PairsTest, FewTokensInBlocksOfWholeGroups) {
  if (GetParam() == "avx512_bf16") GTEST_SKIP() << "has no tiles";
  for (const std::int64_t tokens : {2, 3, 4}) {
    check({tokens, 90, 130, 32, 32, 0.5, {}, true, 1});
    check({tokens, 130, 200, 64, 64, 0.5, {}, false, 0});
  }
}

// Up to 4 tokens read W where it lies: pairs of columns, blocks that fill no vector, more slices than
// registers, columns two at a time and a last one, sums of several parts.
TEST_P(PairsTest, FewTokens) {
  if (GetParam() != "avx512_bf16") GTEST_SKIP() << "has no kernel for them";
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 2},  {2, 2},  {4, 2},   {1, 4},   {4, 4},  {8, 4},  {16, 2}, {8, 8},  {4, 16},  {16, 16}, {2, 32},
      {1, 64}, {32, 8}, {32, 32}, {64, 64}, {32, 1}, {48, 1}, {64, 1}, {96, 1}, {128, 1}, {160, 1}};
  const Force force(GetParam());
  for (const auto& [rows, cols] : blocks) {
    for (const std::int64_t tokens : {1, 2, 3, 4}) {
      for (const bool integers : {true, false}) {
        for (const double density : {0.0, 0.3, 1.0}) {
          ProblemSpec spec{
              tokens,    3 * rows + rows / 2 + 1, 5 * cols + cols / 2 + 1, rows, cols, density, {}, integers,
              tokens % 2};
          if (cols == 1) spec.k = density == 0.3 ? 333 : 41;
          spec.dtype = DType::bf16;
          const Problem problem = make_problem(spec);
          SCOPED_TRACE(::testing::Message()
                       << "M=" << tokens << " block " << rows << 'x' << cols << " density " << density);
          ProblemIn<HostBuffer> run(problem);
          expect_ok(run.linear(Activation::none));
          expect_linear(problem, run);
        }
      }
    }
  }
}

// Up to 8 tokens of blocks whose rows meet products of others go by what is packed: pairs of columns put
// together, lines, whole groups; sums of one part and of two; threads.
TEST_P(PairsTest, FewTokensOfOddRows) {
  if (GetParam() != "avx512_bf16") GTEST_SKIP() << "has no kernel for them";
  ThreadPool pool(2);
  const auto check_linear = [&](ProblemSpec spec) {
    spec.dtype = DType::bf16;
    const Problem problem = make_problem(spec);
    SCOPED_TRACE(::testing::Message() << "M=" << spec.m << " K=" << spec.k << " block " << spec.block_rows
                                      << 'x' << spec.block_cols);
    ProblemIn<HostBuffer> run(problem, pool.executor());
    run_all(run);
    expect_linear(problem, run);
  };
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] :
       {Block{1, 1}, {1, 3}, {2, 1}, {3, 1}, {3, 5}, {3, 32}, {3, 64}, {5, 6}, {6, 6}, {10, 10}, {18, 34}}) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9}) {
      for (const bool integers : {true, false}) {
        check_linear({tokens,
                      3 * rows + rows / 2 + 1,
                      5 * cols + cols / 2 + 1,
                      rows,
                      cols,
                      0.5,
                      {},
                      integers,
                      tokens % 2});
      }
    }
  }
  for (const std::int64_t cols : {1, 2, 32}) check_linear({3, 7, 4100, 3, cols, 0.6, {}, false, 1});
}

// x in f32 is rounded to bf16; a token has the same bits beside up to seven others; NaN and infinity reach
// what stores their column, and other tokens not at all.
TEST_P(PairsTest, FewTokensOfOddRowsKeepTheirBits) {
  if (GetParam() != "avx512_bf16") GTEST_SKIP() << "has no kernel for them";
  const Force force(GetParam());
  for (const bool rounds_x : {false, true}) {
    for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 5}, {6, 2}, {3, 32}}) {
      ProblemSpec spec{8, 5 * rows + 1, 300, rows, cols, 0.6, DType::bf16, false, 0};
      if (rounds_x) spec.dtype = DType::f32;
      spec.rounds_x = rounds_x;
      Problem problem = make_problem(spec);
      const auto run = [&](std::int64_t first, std::int64_t count) {
        const Problem some = of_tokens(problem, first, count);
        ProblemIn<HostBuffer> one(some);
        one.hold_derived();
        expect_ok(one.linear(Activation::silu));
        return one.y().download();
      };
      const std::vector<std::byte> all = run(0, 8);
      const auto row = static_cast<std::ptrdiff_t>(all.size()) / 8;
      const auto expect_alike = [&](std::int64_t first, std::int64_t count) {
        const std::vector<std::byte> part = run(first, count);
        EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first * row))
            << first << " and " << count << " tokens, block " << spec.block_rows << 'x' << spec.block_cols
            << " rounding " << rounds_x;
      };
      for (const std::int64_t count : {1, 2, 3, 4, 5, 6, 7}) {
        for (std::int64_t first = 0; first + count <= 8; ++first) expect_alike(first, count);
      }
      problem.x[static_cast<std::size_t>(problem.x_stride())] = std::numeric_limits<double>::quiet_NaN();
      problem.x[static_cast<std::size_t>(3 * problem.x_stride() + 7)] =
          -std::numeric_limits<double>::infinity();
      const std::vector<std::byte> unlike = run(0, 8);
      for (const std::int64_t token : {0, 2, 4, 7}) {
        EXPECT_TRUE(std::equal(all.begin() + token * row, all.begin() + (token + 1) * row,
                               unlike.begin() + token * row));
      }
    }
  }
}

// A token with NaN or infinity changes no other, and nothing that does not store its column.
TEST_P(PairsTest, FewTokensPassNan) {
  if (GetParam() != "avx512_bf16") GTEST_SKIP() << "has no kernel for them";
  const Force force(GetParam());
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{16, 16}, {32, 1}}) {
    const std::int64_t n = 2 * rows, k = 4 * cols;
    const std::vector<std::int32_t> crow{0, 1, 2}, col{0, 2};
    const auto pattern = Pattern::create({n, k, rows, cols, 2}, crow, col);
    ASSERT_TRUE(pattern.ok());
    const std::vector<bfloat16> values(static_cast<std::size_t>(2 * rows * cols), to_bfloat16(1.0F));
    std::vector<bfloat16> x(static_cast<std::size_t>(2 * k), to_bfloat16(1.0F));
    x[0] = to_bfloat16(std::numeric_limits<float>::quiet_NaN());                              // stored once
    x[static_cast<std::size_t>(cols)] = to_bfloat16(std::numeric_limits<float>::infinity());  // nowhere
    std::vector<bfloat16> y(static_cast<std::size_t>(2 * n));
    expect_ok(linear({x.data(), DType::bf16, 2, k, k}, {pattern->view(), values.data(), DType::bf16}, nullptr,
                     Activation::none, {y.data(), DType::bf16, 2, n, n}));
    for (std::int64_t i = 0; i < 2 * n; ++i) {
      const float got = to_float(y[static_cast<std::size_t>(i)]);
      if (i < rows) {
        EXPECT_TRUE(std::isnan(got)) << rows << 'x' << cols << " at " << i;
      } else {
        EXPECT_EQ(got, static_cast<float>(cols)) << rows << 'x' << cols << " at " << i;
      }
    }
  }
}

// Up to a panel of tokens may have a kernel of its own (lanes of outputs): any number of them, rows of
// several chunks, activated sums and the last columns of Y have the bits that they have among many.
TEST_P(PairsTest, FewTokensHaveTheBitsOfMany) {
  const Force force(GetParam());
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const bool rounds_x : {false, true}) {
    for (const auto& [rows, cols] :
         {Block{16, 1}, {32, 1}, {48, 1}, {128, 1}, {32, 3}, {32, 2}, {16, 16}, {32, 32}, {64, 64}}) {
      ProblemSpec spec{100, 2 * rows + rows / 2 + 1, 330, rows, cols, 0.9, DType::bf16, false, 0};
      if (rounds_x) spec.dtype = DType::f32;
      spec.rounds_x = rounds_x;
      const Problem problem = make_problem(spec);
      const auto run = [&](std::int64_t first, std::int64_t count, Activation activation) {
        const Problem some = of_tokens(problem, first, count);
        ThreadPool pool(2);
        ProblemIn<HostBuffer> one(some, pool.executor());
        one.hold_derived();
        expect_ok(one.linear(activation));
        return one.y().download();
      };
      for (const Activation activation : {Activation::none, Activation::gelu_erf}) {
        const std::vector<std::byte> all = run(0, 100, activation);
        const auto row = static_cast<std::ptrdiff_t>(all.size()) / 100;
        for (std::int64_t count = 5; count < 34; count += GetParam() == "pairs" ? 9 : 1) {
          const std::vector<std::byte> part = run(count, count, activation);
          EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + count * row))
              << count << " tokens, block " << rows << 'x' << cols << (rounds_x ? " rounding x" : "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace rarefy::test
