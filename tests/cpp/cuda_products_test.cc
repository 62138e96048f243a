// The CUDA families, each forced, against the host's products in double: blocks, layouts, activations,
// numbers that are not finite.
#include <gtest/gtest.h>

#include <limits>

#include "cuda_checks.h"

namespace rarefy::test {
namespace {

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

struct Blocks {
  const char* family;
  std::int64_t rows, cols;
};

class CudaProductsTest : public CudaFamilyTest, public ::testing::WithParamInterface<Blocks> {
 protected:
  void SetUp() override {
    CudaFamilyTest::SetUp();
    set_family(GetParam().family);
  }
};

TEST_P(CudaProductsTest, MatchHost) {
  const auto [family, rows, cols] = GetParam();
  // N and K are no multiples of anything, or of eight, with rows 16 bytes apart, for kernels that want it;
  // with 2 block columns the last one is padded.
  const std::int64_t n = 5 * rows + rows / 2 + 1, k = 6 * cols + cols / 2 + 1;
  for (const DType dtype : kDTypes) {
    for (const double density : {0.0, 0.3, 1.0}) {
      check_products({33, n, k, rows, cols, density, dtype, false, 3});
      check_products({77, (n + 7) / 8 * 8, (k + 7) / 8 * 8, rows, cols, density, dtype, true, 8});
      check_products({1, 3 * rows, 2 * cols, rows, cols, density, dtype, true, 0});
      check_products({131, 9 * rows - rows / 3, 2 * cols - cols / 3, rows, cols, density, dtype, true, -1});
    }
  }
}

// Each of x (and dx) and y (and dy) by token and by feature.
TEST_P(CudaProductsTest, EveryLayout) {
  const auto [family, rows, cols] = GetParam();
  for (const DType dtype : kDTypes) {
    for (const Layout x : kLayouts) {
      for (const Layout y : kLayouts) {
        check_products({67, 2 * rows + 2, 3 * cols + 1, rows, cols, 0.5, dtype, true, 3, x, y});
        check_products({80, 3 * rows, 24 * cols, rows, cols, 0.4, dtype, false, 8, x, y});
        check_products({16, 3 * rows, 24 * cols, rows, cols, 0.4, dtype, true, 8, x, y});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, CudaProductsTest,
    ::testing::Values(Blocks{"simt", 1, 1}, Blocks{"simt", 1, 7}, Blocks{"simt", 7, 1}, Blocks{"simt", 2, 2},
                      Blocks{"simt", 4, 1}, Blocks{"simt", 4, 4}, Blocks{"simt", 3, 5}, Blocks{"simt", 8, 16},
                      Blocks{"simt", 16, 16}, Blocks{"simt", 17, 33}, Blocks{"simt", 32, 32},
                      Blocks{"simt", 64, 64}, Blocks{"simt", 70, 130}, Blocks{"sm80", 16, 16},
                      Blocks{"sm80", 32, 32}, Blocks{"sm80", 64, 64}, Blocks{"sm80", 16, 64},
                      Blocks{"sm80", 128, 16}, Blocks{"sm80", 48, 32}, Blocks{"sm80", 96, 80},
                      Blocks{"sm80", 96, 64}, Blocks{"sm90", 16, 16}, Blocks{"sm90", 32, 32},
                      Blocks{"sm90", 64, 64}, Blocks{"sm90", 128, 64}, Blocks{"sm90", 64, 128},
                      Blocks{"sm90", 32, 1}, Blocks{"sm90", 64, 1}, Blocks{"sm90", 96, 1},
                      Blocks{"sm90", 128, 1}, Blocks{"sm90", 192, 1}),
    [](const auto& tested) {
      return std::string(tested.param.family) + '_' + std::to_string(tested.param.rows) + 'x' +
             std::to_string(tested.param.cols);
    });

// simt's kernel for few tokens: weights one by one, along rows, down columns; rows of more pieces than a warp
// has lanes; every number of tokens a thread may have; x and y in any layout.
class CudaFewTest : public CudaFamilyTest {
 protected:
  void SetUp() override {
    CudaFamilyTest::SetUp();
    set_family("simt");
  }
  void check(const ProblemSpec& spec) {
    SCOPED_TRACE(text_of(spec));
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu = make(problem);
    ASSERT_EQ(explain(gpu.problem(Op::linear)).kernel, "simt_few_linear");
    ASSERT_TRUE(takes(gpu, Op::linear));
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
  }
};

TEST_F(CudaFewTest, MatchHost) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 1},   {1, 7}, {7, 1},   {4, 4},   {3, 5},   {8, 8},   {16, 1},  {24, 1},  {40, 1},
      {128, 1}, {1, 8}, {1, 300}, {2, 256}, {16, 16}, {17, 33}, {64, 64}, {8, 296}, {96, 2}};
  for (const auto& [r, c] : blocks) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t tokens : {1, 2, 4, 5, 8, 9, 16}) {
        for (const double density : {0.0, 0.3, 1.0})
          check({tokens, (5 * r + 8) / 8 * 8, (9 * c + 7) / 8 * 8, r, c, density, dtype, true, 8});
        check({tokens, 5 * r + r / 2 + 1, 9 * c + c / 2 + 1, r, c, 0.4, dtype, false, 3});
      }
      for (const Layout x : kLayouts) {
        for (const Layout y : kLayouts) check({8, 3 * r + 1, 24 * c, r, c, 0.4, dtype, true, 8, x, y});
      }
    }
  }
}

// Rows long enough for every number of warps; one of them longer than all others.
TEST_F(CudaFewTest, EveryNumberOfWarps) {
  for (const auto& [r, c] : {std::pair{1, 1}, {16, 1}, {8, 8}}) {
    const Problem problem = make_problem({3, 40, 4096, r, c, 0.5, DType::bf16, true, 0});
    for (const int warps : {1, 2, 4, 8, 16}) {
      SCOPED_TRACE(::testing::Message() << r << 'x' << c << ' ' << warps);
      const Force force("cuda:simt,simt_few_linear(warps=" + std::to_string(warps) + ")");
      ProblemIn<DeviceBuffer> gpu(problem);
      taken_ = 1;
      expect_ok(gpu.linear(Activation::none));
      expect_linear(problem, gpu);
    }
    const Force force("cuda:simt,simt_few_linear(warps=17)");
    ProblemIn<DeviceBuffer> gpu(problem);
    EXPECT_EQ(gpu.linear(Activation::none).code(), StatusCode::invalid_argument);
  }
}

// A token's bits are the same in any batch of up to 16.
TEST_F(CudaFewTest, TokensDoNotDependOnTheBatch) {
  for (const auto& [r, c] : {std::pair{1, 1}, {16, 1}, {8, 8}, {4, 4}}) {
    const Problem problem = make_problem({16, 256, 2048, r, c, 0.3, DType::bf16, false, 0});
    ProblemIn<DeviceBuffer> batch = make(problem);
    ASSERT_TRUE(takes(batch, Op::linear));
    expect_ok(batch.linear(Activation::none));
    const std::vector<std::byte> all = batch.y().download();
    for (const std::int64_t tokens : {1, 3, 7}) {
      Problem few = problem;
      few.spec.m = tokens;
      few.x.resize(static_cast<std::size_t>(tokens * problem.x_stride()));
      ProblemIn<DeviceBuffer> gpu = make(few);
      expect_ok(gpu.linear(Activation::none));
      const std::vector<std::byte> its = gpu.y().download();
      EXPECT_TRUE(std::equal(its.begin(), its.end(), all.begin())) << tokens;
    }
  }
}

// What is special about a problem, for every family.
class CudaProductTest : public CudaFamilyTest, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    CudaFamilyTest::SetUp();
    set_family(GetParam());
  }
  bool simt() const { return GetParam() == "simt"; }
};

INSTANTIATE_TEST_SUITE_P(Cuda, CudaProductTest, ::testing::Values("simt", "sm80", "sm90"),
                         [](const auto& tested) { return tested.param; });

TEST_P(CudaProductTest, BlockLargerThanTheMatrix) {
  for (const DType dtype : kDTypes) {
    check_products({5, 7, 9, 40, 50, 1.0, dtype, true, 2});
    check_products({50, 40, 56, 64, 64, 1.0, dtype, true, 8});
    check_products({50, 40, 16, 128, 1, 1.0, dtype, true, 8});
  }
}

// Natively or by the core, the same: what is there, padding too, and the gradient.
TEST_P(CudaProductTest, AddsToAGradient) {
  for (const DType dtype : kDTypes) {
    for (const auto& [rows, cols] : {std::pair{16, 16}, {64, 64}, {128, 64}, {5, 3}}) {
      for (const bool integers : {true, false}) {
        const ProblemSpec spec{150, 5 * rows - 8 * (rows > 8), 6 * cols, rows, cols, 0.4, dtype, integers, 8};
        SCOPED_TRACE(text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu = make(problem);
        if (takes(gpu, Op::grad_weight)) expect_accumulated(problem, gpu);
      }
    }
  }
}

TEST_P(CudaProductTest, LongSums) {
  for (const DType dtype : kDTypes) {
    if (simt()) check_products({1030, 48, 2000, 16, 16, 0.5, dtype, false, 0});
    check_products({1030, 64, 2048, 64, 64, 0.5, dtype, false, 0});
    check_products({520, 64, 2048, 64, 1, 0.5, dtype, false, 0});
  }
}

TEST_P(CudaProductTest, MoreTokensThanTheGridIsHigh) {
  if (simt()) {
    check_products({65535 * 64 + 70, 5, 2, 5, 1, 1.0, DType::f16, true, -1});
  } else if (GetParam() == "sm80") {
    check_products({65535 * 8 + 72, 8, 8, 16, 16, 1.0, DType::f16, true, 0});
  } else {
    check_products({65535 * 8 + 72, 8, 8, 64, 1, 1.0, DType::f16, true, 0});
  }
}

TEST_P(CudaProductTest, Activations) {
  for (const DType dtype : kDTypes) {
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
      for (const ProblemSpec& spec : {ProblemSpec{65, 40, 50, 4, 4, 0.4, dtype, false, 1},
                                      ProblemSpec{5, 192, 256, 64, 64, 0.5, dtype, false, 8},
                                      ProblemSpec{200, 192, 256, 64, 64, 0.5, dtype, false, 8},
                                      ProblemSpec{200, 256, 120, 128, 1, 0.5, dtype, false, 8},
                                      ProblemSpec{200, 192, 120, 64, 1, 0.5, dtype, false, 8,
                                                  Layout::by_feature, Layout::by_feature}}) {
        SCOPED_TRACE(text_of(spec) << ' ' << name(activation));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu = make(problem);
        if (!takes(gpu, Op::linear, activation)) continue;
        expect_ok(gpu.linear(activation));
        expect_activation(problem, gpu, activation, !simt());
      }
    }
  }
}

TEST_P(CudaProductTest, EmptyBatch) {
  const Problem problem = make_problem({0, 192, 128, 64, 64, 0.5, DType::bf16, true, 0});
  ProblemIn<DeviceBuffer> gpu = make(problem);
  expect_ok(gpu.linear(Activation::none));
  expect_ok(gpu.grad_input());
  if (!simt()) force_.emplace("cuda:simt");  // Hopper's kernels want tokens
  taken_ = 1;
  expect_ok(gpu.grad_weight());
  for (const double number : decode(gpu.dvalues().download(), DType::bf16)) EXPECT_EQ(number, 0);
}

// A NaN in x reaches every y whose row has a block there, and nothing else; padding stays zero.
TEST_P(CudaProductTest, NanPassesThroughAndNotFurther) {
  for (const DType dtype : kDTypes) {
    for (const ProblemSpec& spec : {ProblemSpec{40, 21, 22, 4, 5, 0.4, dtype, true, 0},
                                    ProblemSpec{40, 200, 240, 64, 64, 0.4, dtype, true, 0},
                                    ProblemSpec{40, 200, 240, 128, 1, 0.4, dtype, true, 0}}) {
      SCOPED_TRACE(text_of(spec));
      Problem problem = make_problem(spec);
      const auto last_k = static_cast<std::size_t>(spec.k - 1), k = static_cast<std::size_t>(spec.k);
      const auto n = static_cast<std::size_t>(spec.n);
      problem.x[7 * k + last_k] = std::numeric_limits<double>::quiet_NaN();  // token 7, in the padded column
      problem.x[9 * k + 3] = std::numeric_limits<double>::infinity();
      problem.dy[11 * n + n - 1] = std::numeric_limits<double>::quiet_NaN();  // in the padded block row
      ProblemIn<DeviceBuffer> gpu = make(problem);
      const bool all[] = {takes(gpu, Op::linear), takes(gpu, Op::grad_input), takes(gpu, Op::grad_weight)};
      if (all[0]) expect_ok(gpu.linear(Activation::none));
      if (all[1]) expect_ok(gpu.grad_input());
      if (all[2]) expect_ok(gpu.grad_weight());
      expect_same_or_nan(problem, gpu, all);
    }
  }
}

}  // namespace
}  // namespace rarefy::test
