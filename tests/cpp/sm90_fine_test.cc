// Blocks that no Hopper kernel has tiles for (8×8, 16×1, single weights, odd ones) on its tensor cores:
// linear and grad_input packed as unions, grad_weight made whole and read out; against the host's products in
// double, through the registry.
#include <gtest/gtest.h>

#include <limits>

#include "sm90_checks.h"

namespace rarefy::test {
namespace {

constexpr std::pair<std::int64_t, std::int64_t> kBlocks[] = {
    {8, 8},  {4, 4},  {1, 1},   {16, 1}, {8, 1},   {1, 16},  {2, 1},   {24, 24}, {40, 8},
    {12, 4}, {64, 4}, {128, 8}, {3, 5},  {17, 33}, {16, 24}, {1, 100}, {100, 1}, {48, 2}};

class Sm90FineTest : public Sm90Test {
 protected:
  static void check(const ProblemSpec& spec) {
    check_products(spec, {"sm90_unions_linear", "sm90_unions_grad_input", "sm90_dense_gradient"});
  }
};

TEST_F(Sm90FineTest, MatchHost) {
  for (const auto& [r, c] : kBlocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const double density : {0.0, 0.3, 1.0}) check({130, 216, 184, r, c, density, dtype, true, 0});
      check({513, 328, 136, r, c, 0.1, dtype, false, 8});
      check({64, 8, 16, r, c, 0.6, dtype, true, 8});
    }
    ProblemSpec tf32{130, 216, 184, r, c, 0.3, DType::f32, true, 4};
    tf32.tf32 = true;
    check(tf32);
  }
}

TEST_F(Sm90FineTest, ManyTokensRowsAndColumns) {
  for (const std::int64_t tokens : {255, 257, 1281, 4100}) {
    check({tokens, 320, 448, 8, 8, 0.2, DType::bf16, true, 0});
  }
  check({40000, 64, 128, 4, 4, 0.3, DType::bf16, true, 0});
  check({100, 16 * 1200, 64, 16, 1, 0.1, DType::f16, true, 0});
  check({100, 64, 16 * 1200, 1, 1, 0.02, DType::f16, true, 0});
}

TEST_F(Sm90FineTest, Activations) {
  for (const Activation activation :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    const Problem problem = make_problem({200, 192, 256, 8, 8, 0.3, DType::bf16, false, 8});
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived();
    const Force force("cuda:sm90");
    expect_ok(gpu.linear(activation));
    expect_activation(problem, gpu, activation);
  }
}

// What a row does not store it gets nothing of, whatever X holds there, and however many zeros lie between.
TEST_F(Sm90FineTest, AbsentBlocksAreSkippedWhateverXHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [r, c] : kBlocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(::testing::Message() << r << 'x' << c << ' ' << name(dtype));
      const ProblemSpec spec{300, 272, 336, r, c, 0.2, dtype, true, 0};
      Problem problem = make_problem(spec);
      add_specials(problem);
      std::fill_n(problem.x.begin() + 7 * spec.k, spec.k, nan);  // a token of nothing else
      ProblemIn<DeviceBuffer> gpu(problem);
      gpu.hold_derived(4096);
      ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_unions_linear");
      expect_ok(gpu.linear(Activation::none));
      expect_ok(gpu.grad_input());
      expect_ok(gpu.grad_weight());
      expect_same_or_nan(problem, gpu);
    }
  }
}

TEST_F(Sm90FineTest, GradientsAreAddedToWhatIsThere) {
  const Problem problem = make_problem({200, 192, 256, 8, 8, 0.3, DType::bf16, false, 8});
  ProblemIn<DeviceBuffer> gpu(problem);
  ASSERT_EQ(kernel_of(gpu, Op::grad_weight), "sm90_dense_gradient");
  expect_accumulated(problem, gpu);
}

TEST_F(Sm90FineTest, RepeatsAreEqual) {
  const Problem problem = make_problem({700, 544, 512, 8, 4, 0.3, DType::bf16, false, 0});
  ProblemIn<DeviceBuffer> gpu(problem);
  gpu.hold_derived(4096);
  expect_ok(gpu.linear(Activation::none));
  const std::vector<std::byte> first = gpu.y().download();
  for (int i = 0; i < 100; ++i) {
    gpu.poison();
    expect_ok(gpu.linear(Activation::none));
    ASSERT_EQ(gpu.y().download(), first) << i;
  }
}

}  // namespace
}  // namespace rarefy::test
