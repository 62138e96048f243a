// The dense product of weights packed whole: every block shape and configuration against the host's products
// in double, through the registry; that what is not stored is skipped, whatever X holds; and the same bits in
// each run. What is chosen, and what is refused, without a GPU.
#include "cuda/sm90/whole.h"

#include <gtest/gtest.h>

#include <limits>

#include "sm90_checks.h"
#include "sm90_patterns.h"

namespace rarefy::test {
namespace {

using sm90::WholeConfig;

constexpr std::pair<std::int64_t, std::int64_t> kBlocks[] = {
    {8, 8},   {1, 1},   {4, 4},   {16, 1}, {64, 1}, {128, 1}, {32, 1},  {1, 16},  {2, 1},   {24, 24},
    {12, 20}, {64, 64}, {16, 16}, {64, 4}, {3, 5},  {17, 33}, {1, 100}, {100, 1}, {32, 64}, {48, 2}};
constexpr WholeConfig kConfigs[] = {{256, 1},       {128, 1},        {256, 2},       {128, 3},
                                    {256, 4},       {128, 2},        {256, 3},       {208, 1},
                                    {192, 1},       {160, 1},        {64, 1, 0, 64}, {64, 4, 0, 64},
                                    {64, 3, 0, 64}, {128, 1, 0, 64}, {128, 2, 0, 64}};

class Sm90WholeTest : public Sm90Test {
 protected:
  static Kernels kernels(const WholeConfig& c = {}) {
    const std::string config = '(' + c.text() + ')';
    std::string forced = "cuda:sm90,sm90_whole_linear" + config + ",sm90_whole_grad_input" + config;
    const bool by_token = c.single() || c.more > 0 || (c.tokens != 256 && c.tokens != 128);
    if (by_token) return {"sm90_whole_linear", "sm90_whole_grad_input", "", forced};
    return {"sm90_whole_linear", "sm90_whole_grad_input", "sm90_whole_gradient",
            forced + ",sm90_whole_gradient" + config};
  }
};

// Ragged edges of everything; tokens behind the last one; weights that store nothing, and all.
TEST_F(Sm90WholeTest, MatchHost) {
  for (const auto& [r, c] : kBlocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      check_products({300, 216, 328, r, c, 0.3, dtype, true, 8}, kernels({256, 1}));
      check_products({130, 328, 216, r, c, 1.0, dtype, true, 0}, kernels({128, 1}));
      check_products({513, 328, 336, r, c, 0.1, dtype, false, 8}, kernels({256, 1}));
      check_products({40, 264, 400, r, c, 0.5, dtype, false, 0}, kernels({128, 4}));
    }
    check_products({64, 200, 208, r, c, 0.0, DType::bf16, true, 8}, kernels({256, 2}));
  }
}

TEST_F(Sm90WholeTest, EveryConfigurationMatchesHost) {
  for (const WholeConfig& config : kConfigs) {
    for (const std::int64_t tokens : {1, 64, 127, 257, 700}) {
      for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {64, 1}})
        check_products({tokens, 456, 648, r, c, 0.4, DType::bf16, true, 8}, kernels(config));
    }
  }
  // Several rounds of tiles, and more token tiles than are walked side by side.
  check_products({4100, 1032, 200, 4, 4, 0.3, DType::bf16, true, 0}, kernels({256, 1}));
  check_products({2500, 1544, 264, 64, 1, 0.3, DType::f16, true, 0}, kernels({128, 1}));
}

TEST_F(Sm90WholeTest, RowsThatSeveralThreadBlocksPackMatchHost) {
  for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 16}, {3, 5}, {16, 1}, {8, 8}})
    check_products({40, 48, 17000, r, c, 0.05, DType::bf16, true, 8}, kernels({256, 1}));
  check_products({40, 72, 27008, 3, 9001, 0.3, DType::bf16, true, 8}, kernels({256, 1}));
  check_products({40, 2304, 72, 1100, 3, 0.3, DType::f16, true, 8}, kernels({256, 1}));  // of a block, too
}

// Tiles of 248 tokens: one of 33 wide, none, most; tokens that end within the last one.
TEST_F(Sm90WholeTest, NarrowTilesMatchHost) {
  for (const std::int64_t tokens : {8192, 7936, 8189, 16384 + 100}) {
    for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {64, 1}}) {
      for (const DType dtype : {DType::bf16, DType::f16})
        check_products({tokens, 200, 136, r, c, 0.4, dtype, true, 8}, kernels({256, 1, 1}));
    }
  }
  const Force force(kernels({256, 1, 1}).forced);
  Problem problem = make_problem({8192, 136, 72, 8, 8, 0.3, DType::bf16, true, 8});
  add_specials(problem);
  ProblemIn<DeviceBuffer> gpu(problem);
  gpu.hold_derived(4096);
  expect_ok(gpu.linear(Activation::none));
  expect_ok(gpu.grad_input());
  expect_same_or_nan(problem, gpu, {true, true, false});
}

// X by feature, which a caller may have whose X by token is another's.
TEST_F(Sm90WholeTest, XByFeature) {
  for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {32, 1}}) {
    for (const int wide : {256, 128}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        const ProblemSpec spec{136, 4096, 2040, r, c, 0.5, dtype, true, 8, Layout::by_feature};
        SCOPED_TRACE(text_of(spec));
        const Force force(kernels({wide, 1}).forced);
        Problem problem = make_problem(spec);
        for (const bool specials : {false, true}) {
          if (specials && dtype == DType::bf16) continue;  // whose sums are no integers above 256
          if (specials) add_specials(problem);
          ProblemIn<DeviceBuffer> gpu(problem);
          gpu.hold_derived(4096);
          ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_whole_linear");
          expect_ok(gpu.linear(Activation::none));
          if (specials) {
            expect_same_or_nan(problem, gpu, {true, false, false});
          } else {
            expect_linear(problem, gpu);
          }
        }
      }
    }
  }
}

TEST_F(Sm90WholeTest, AbsentBlocksAreSkippedWhateverXHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [r, c] : kBlocks) {
    for (const WholeConfig& config : kConfigs) {
      SCOPED_TRACE(::testing::Message() << r << 'x' << c << ' ' << config.text());
      const Force force(kernels(config).forced);
      const ProblemSpec spec{300, 272, 336, r, c, 0.2, DType::bf16, true, 0};
      Problem problem = make_problem(spec);
      add_specials(problem);
      std::fill_n(problem.x.begin() + 7 * spec.k, spec.k, nan);  // a token of nothing else
      std::fill_n(problem.dy.begin() + 11 * spec.n, spec.n, nan);
      ProblemIn<DeviceBuffer> gpu(problem);
      gpu.hold_derived(4096);
      ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_whole_linear");
      expect_ok(gpu.linear(Activation::none));
      expect_ok(gpu.grad_input());
      expect_ok(gpu.grad_weight());
      expect_same_or_nan(problem, gpu);
    }
  }
}

TEST_F(Sm90WholeTest, GradientsAreAddedToWhatIsThere) {
  for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {16, 1}}) {
    const Force force(kernels().forced);
    const Problem problem = make_problem({200, 192, 256, r, c, 0.3, DType::bf16, false, 8});
    ProblemIn<DeviceBuffer> gpu(problem);
    ASSERT_EQ(kernel_of(gpu, Op::grad_weight), "sm90_whole_gradient");
    expect_accumulated(problem, gpu);
  }
}

TEST_F(Sm90WholeTest, Activations) {
  for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {16, 1}}) {
    for (const WholeConfig& config :
         {WholeConfig{256, 1}, {128, 1}, {256, 3}, {128, 2}, {64, 2, 0, 64}, {128, 1, 0, 64}}) {
      const Force force(kernels(config).forced);
      for (const Activation activation :
           {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
        const Problem problem = make_problem({200, 192, 256, r, c, 0.3, DType::bf16, false, 8});
        ProblemIn<DeviceBuffer> gpu(problem);
        gpu.hold_derived(4096);
        ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_whole_linear");
        expect_ok(gpu.linear(activation));
        expect_activation(problem, gpu, activation);
      }
    }
  }
}

TEST_F(Sm90WholeTest, RepeatsOfPartsAreEqual) {
  for (const WholeConfig& config : {WholeConfig{256, 4}, {128, 2}, {64, 4, 0, 64}}) {
    const Force force(kernels(config).forced);
    const Problem problem = make_problem({700, 544, 512, 8, 4, 0.3, DType::bf16, false, 0});
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    expect_equal_repeats(gpu, Op::linear);
    expect_equal_repeats(gpu, Op::grad_input);
  }
}

// Half of its blocks are stored.
sm90::WholeProblem problem_of(std::int64_t tokens, std::int64_t rows, std::int64_t cols, std::int64_t r,
                              std::int64_t c, bool transposed = false) {
  return sm90::product_problem<sm90::WholeProblem>(transposed, tokens, rows, cols, r, c,
                                                   (rows + r - 1) / r * ((cols + c - 1) / c) / 2);
}

TEST(Whole, ChoosesWhatItCanRun) {
  for (const std::int64_t tokens : {1, 17, 100, 512, 8192}) {
    for (const std::int64_t cols : {8, 64, 200, 4096}) {
      const sm90::WholeProblem p = problem_of(tokens, 4096, cols, 8, 8);
      ASSERT_EQ(unsupported(p), "");
      const sm90::WholeCandidate best = best_whole(p, 132);
      EXPECT_EQ(refuse(p, best.config), "") << best.config.text();
      EXPECT_GT(best.microseconds, 0);
      EXPECT_LE(best.config.shared_bytes(), 227 << 10);
      if (tokens == 8192) {
        EXPECT_EQ(best.config.split, 1) << "tiles for all SMs";
        if (cols == 4096) {
          EXPECT_EQ(best.config.more, 1) << "33 × 32 tiles are eight rounds of 132";
        }
      }
      if (tokens == 17 && cols == 4096) {
        EXPECT_GT(best.config.split, 1);
      }
    }
  }
}

// Values of single columns stay side by side; both products take either order.
TEST(Whole, WhatIsPackedIsOfTheWeightAlone) {
  for (const auto& [r, c, by_column] : {std::tuple{64, 1, true},
                                        {64, 4, false},
                                        {12, 1, false},
                                        {8, 8, false},
                                        {1, 1, false},
                                        {32, 8, false},
                                        {1, 16, false},
                                        {5, 3, false}}) {
    const sm90::WholeWeight w(problem_of(100, 1000, 200, r, c)), input(problem_of(7, 1000, 200, r, c, true));
    EXPECT_EQ(w.by_column, by_column) << r << 'x' << c;
    EXPECT_EQ(w.bytes(), by_column ? 200 * 1024 * 2 : 1000 * 256 * 2);
    EXPECT_EQ(input.by_column, w.by_column);
    EXPECT_EQ(input.bytes(), w.bytes());
  }
}

TEST(Whole, SaysWhyNot) {
  sm90::WholeProblem p = problem_of(100, 1000, 200, 8, 8);
  EXPECT_EQ(unsupported(p), "");
  for (const WholeConfig& c : {WholeConfig{64, 1}, {512, 1}, {256, 0}, {256, 5}}) EXPECT_NE(refuse(p, c), "");
  EXPECT_EQ(refuse(p, {256, 4}), "");
  EXPECT_NE(refuse(p, {256, 1, 1}), "") << "tiles of fewer than 248 tokens";
  EXPECT_EQ(refuse(p, {192, 1}), "");
  EXPECT_EQ(refuse(p, {64, 4, 0, 64}), "");
  EXPECT_NE(refuse(p, {256, 1, 0, 64}), "") << "64 features have 128 tokens or 64";
  EXPECT_NE(refuse(p, {128, 1, 0, 32}), "");
  EXPECT_NE(refuse(p, {192, 2}), "") << "parts of 256 or 128 tokens";
  p.activation = Activation::relu;
  EXPECT_NE(refuse(p, {160, 1}), "") << "activations of 256 or 128";
  p.activation = Activation::none;
  const sm90::WholeProblem many = problem_of(8192, 1000, 200, 8, 8);
  EXPECT_EQ(refuse(many, {256, 1, 1}), "");
  for (const WholeConfig& c : {WholeConfig{256, 1, 2}, {256, 1, -1}, {256, 2, 1}, {128, 1, 1}})
    EXPECT_NE(refuse(many, c), "") << c.text();
  EXPECT_NE(refuse(problem_of(100, 1000, 64, 8, 8), {256, 2}), "") << "fewer steps than parts";
  p.x_stride = 204;
  EXPECT_EQ(unsupported(p), "TMA needs rows of X and Y 16 bytes apart");
  p.x_stride = 192;
  EXPECT_EQ(unsupported(p), "TMA needs rows that do not overlap");
  p.x_layout = Layout::by_feature;
  EXPECT_EQ(unsupported(p), "") << "192 are more than its tokens";
  EXPECT_NE(refuse(p, {208, 1}), "") << "X by feature in tiles of 256 or 128";
  EXPECT_NE(refuse(p, {256, 2}), "") << "no parts of X by feature";
  EXPECT_NE(refuse(p, {64, 1, 0, 64}), "") << "no small tiles of X by feature";
  p = problem_of(100, 1004, 200, 4, 4);
  p.y_stride = 1008;
  EXPECT_EQ(unsupported(p), "TMA writes rows of Y in pieces of 16 bytes");
  p = problem_of(0, 1000, 200, 8, 8);
  EXPECT_EQ(unsupported(p), "there are no tokens");
  p = problem_of(100, 1000, 200, 8, 8);
  p.dtype = DType::f32;
  EXPECT_EQ(unsupported(p), "tensor cores of this kernel take bf16 and f16");
}

}  // namespace
}  // namespace rarefy::test
