// The weight gradient of blocks that are whole vectors along one side, by dot products and by strips
// (strips.h).
#include <gtest/gtest.h>

#include "product_checks.h"

namespace rarefy::test {
namespace {

std::vector<std::string> families() {
  std::vector<std::string> found;
  for (const std::string& family : cpu_impls()) {
    if (family == "avx512" || family == "avx2") found.push_back(family);
  }
  return found;
}

class GradWeightTest : public ::testing::TestWithParam<std::string> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GradWeightTest);  // on AArch64, whose family has no strips
INSTANTIATE_TEST_SUITE_P(Cpu, GradWeightTest, ::testing::ValuesIn(families()),
                         [](const auto& tested) { return tested.param; });

std::string forced(const std::string& family, const std::string& config) {
  return "cpu:" + family + "," + family + "_grad_weight(" + config + ")";
}

// Either way integers come out exactly, and reals within the bound: padded edges, rows of blocks that fill no
// register tile, tokens that fill no chunk, sums of several chunks, gradients added up.
TEST_P(GradWeightTest, StripsComputeTheSame) {
  ThreadPool pool(3);
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{16, 16},
                                   {32, 32},
                                   {17, 48},
                                   {7, 64},
                                   {1, 32},
                                   {16, 1},
                                   {32, 1},
                                   {48, 1},
                                   {80, 1}}) {
    for (const auto& [tokens, dtype, integers] : {std::tuple{1, DType::f32, true},
                                                  {15, DType::bf16, true},
                                                  {130, DType::f32, false},
                                                  {700, DType::f32, true},
                                                  {257, DType::f16, false}}) {
      const Problem problem = make_problem(
          {tokens, 6 * rows - rows / 3, 9 * cols + cols / 2, rows, cols, 0.5, dtype, integers, 3});
      for (const char* config : {"strips=1", "strips=0", "strips=1 chunk=32 columns=2 ranges=3 features=1"}) {
        SCOPED_TRACE(::testing::Message() << config << ' ' << rows << 'x' << cols << " M=" << tokens);
        const Force force(forced(GetParam(), config));
        ProblemIn<HostBuffer> one(problem, pool.executor());
        expect_ok(one.grad_weight());
        expect_grad_weight(problem, one);
        expect_accumulated(problem, one);
      }
    }
  }
}

// What a token has as NaN or infinity comes to the blocks that it meets, and not to padding.
TEST_P(GradWeightTest, NanComesToItsBlocks) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{32, 32}, {64, 1}}) {
    const Force force(forced(GetParam(), "strips=1"));
    Problem problem =
        make_problem({45, 3 * rows - 5, 7 * cols - cols / 2, rows, cols, 0.5, DType::f32, true, 3});
    problem.x[3] = std::numeric_limits<double>::quiet_NaN();
    problem.dy[static_cast<std::size_t>(problem.spec.n - 1)] = std::numeric_limits<double>::infinity();
    ProblemIn<HostBuffer> one(problem);
    expect_ok(one.grad_weight());
    expect_same_or_nan(problem, one, {false, false, true});
  }
}

TEST_P(GradWeightTest, StripsAreChosenForTwoVectorsAndFewTokens) {
  const Force force(GetParam());
  const auto strips = [](std::int64_t rows, std::int64_t cols, std::int64_t tokens = 256) {
    return explain(make_problem(Op::grad_weight, {128, 128, rows, cols, 2}, tokens, DType::f32))
               .config.find("strips=1") != std::string::npos;
  };
  EXPECT_TRUE(strips(32, 32));
  EXPECT_TRUE(strips(1, 64));
  EXPECT_TRUE(strips(32, 1));
  EXPECT_FALSE(strips(8, 1));
  EXPECT_FALSE(strips(4, 8));
  const bool eight = GetParam() == "avx2";  // lanes
  EXPECT_EQ(strips(8, 8), eight);
  EXPECT_EQ(strips(32, 8), eight);
  EXPECT_TRUE(strips(16, 1, 64));
  EXPECT_EQ(strips(16, 1, 65), eight);  // two vectors
  EXPECT_TRUE(strips(16, 16, 64));
  EXPECT_EQ(strips(16, 16, 65), eight);
  EXPECT_EQ(strips(4, 8, 8), eight);
  EXPECT_FALSE(strips(4, 8, 9));
  const Problem problem = make_problem({45, 64, 64, 4, 4, 0.5, DType::f32, true, 3});
  for (const char* config : {"strips=1", "strips=-1"}) {
    const Force other(forced(GetParam(), config));
    ProblemIn<HostBuffer> one(problem);
    const Status status = one.grad_weight();
    EXPECT_NE(status.message().find("strips of the config must be in [0, 0]"), std::string::npos)
        << status.message();
  }
}

// Pairs of tokens in bf16, in blocks of any shape: an odd last token, tokens that fill no line of pairs,
// several chunks, features that fill no line.
TEST(GradWeightDotsTest, PairsOfTokensComputeTheSame) {
  if (!backend_info().machine.has("avx512_bf16_fast")) GTEST_SKIP() << "has no kernel for them";
  ThreadPool pool(3);
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                                   {1, 4},
                                   {2, 2},
                                   {3, 5},
                                   {4, 1},
                                   {4, 4},
                                   {8, 8},
                                   {16, 8},
                                   {16, 1},
                                   {16, 16},
                                   {24, 1}}) {
    for (const auto& [tokens, integers] : {std::pair{32, true}, {33, true}, {95, false}, {1100, false}}) {
      for (const char* config : {"(features=256)", "(chunk=64 columns=2 ranges=3 features=32)"}) {
        SCOPED_TRACE(::testing::Message() << config << ' ' << rows << 'x' << cols << " M=" << tokens);
        const Problem problem = make_problem(
            {tokens, 6 * rows - rows / 3, 70 * cols + cols / 2, rows, cols, 0.5, DType::bf16, integers, 3});
        const Force force(std::string("cpu:avx512_bf16,avx512_bf16_grad_weight_dots") + config);
        ProblemIn<HostBuffer> one(problem, pool.executor());
        expect_ok(one.grad_weight());
        expect_grad_weight(problem, one);
        expect_accumulated(problem, one);
      }
    }
  }
}

TEST(GradWeightDotsTest, TakesWhatIsNoVectorAlongASide) {
  if (!backend_info().machine.has("avx512_bf16_fast")) GTEST_SKIP() << "has no kernel for them";
  const auto chosen = [](std::int64_t rows, std::int64_t cols, std::int64_t tokens) {
    return explain(make_problem(Op::grad_weight, {96, 96, rows, cols, 2}, tokens, DType::bf16)).kernel;
  };
  const Force force("");
  for (const auto& [rows, cols] : {std::pair{1, 1}, {4, 1}, {4, 4}, {3, 5}, {16, 8}, {16, 1}, {16, 16}}) {
    EXPECT_EQ(chosen(rows, cols, 32), "avx512_bf16_grad_weight_dots");
    EXPECT_NE(chosen(rows, cols, 31), "avx512_bf16_grad_weight_dots");
  }
  EXPECT_EQ(chosen(32, 1, 32), "avx512_bf16_grad_weight");
  EXPECT_EQ(chosen(32, 32, 32), "avx512_bf16_grad_weight");
}

}  // namespace
}  // namespace rarefy::test
