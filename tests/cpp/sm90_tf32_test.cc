// f32 multiplied as tf32 on Hopper against the host's products in double, where calls allow it; and that no
// other call is rounded.
#include <gtest/gtest.h>

#include "sm90_checks.h"

namespace rarefy::test {
namespace {

constexpr Op kGradients[] = {Op::grad_input, Op::grad_weight};

class Sm90Tf32Test : public Sm90Test {
 protected:
  static ProblemSpec allowed(ProblemSpec spec) {
    spec.dtype = DType::f32;
    spec.tf32 = true;
    return spec;
  }

  // All products, of a front that holds what was made for 4096 tokens.
  static void check(const ProblemSpec& spec) {
    SCOPED_TRACE(text_of(spec));
    const Problem problem = make_problem(allowed(spec));
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_unions_linear");
    ASSERT_EQ(kernel_of(gpu, Op::grad_input), "sm90_unions_grad_input");
    ASSERT_EQ(kernel_of(gpu, Op::grad_weight), "sm90_block_gradient");
    const Force force("cuda:sm90");
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
    expect_ok(gpu.grad_input());
    expect_grad_input(problem, gpu);
    if (problem.pattern.shape().nnzb == 0) return;
    expect_ok(gpu.grad_weight());
    expect_grad_weight(problem, gpu);
    expect_accumulated(problem, gpu);
  }
};

TEST_F(Sm90Tf32Test, MatchHost) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {16, 16}, {32, 32}, {64, 64}, {128, 128}, {16, 64}, {64, 16}, {48, 32}, {128, 32}, {64, 128}, {96, 96}};
  for (const auto& [r, c] : blocks) {
    for (const double density : {0.0, 0.3, 1.0}) {
      check({130, 7 * r, 6 * c, r, c, density, DType::f32, true, 0});
      check({259, 5 * r - 4, 4 * c - 12, r, c, density, DType::f32, false, 4});
    }
    check({17, 9 * r, 2 * c, r, c, 0.4, DType::f32, true, 16});
  }
}

// Ragged token tiles, shares of the tokens; many groups; halves of the boxes of X.
TEST_F(Sm90Tf32Test, ManyTokensAndRows) {
  for (const std::int64_t tokens : {31, 33, 257, 1281}) {
    check({tokens, 320, 448, 32, 32, 0.4, DType::f32, true, 0});
    check({tokens, 384, 256, 16, 16, 0.1, DType::f32, true, 8});
    check({tokens, 384, 640, 128, 64, 0.3, DType::f32, true, 8});
  }
  check({9000, 64, 128, 64, 64, 0.6, DType::f32, true, 0});
  check({300, 32 * 200, 64, 32, 32, 0.5, DType::f32, true, 0});
  check({300, 64, 16 * 300, 16, 16, 0.2, DType::f32, true, 0});
}

TEST_F(Sm90Tf32Test, Activations) {
  for (const Activation activation :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    SCOPED_TRACE(name(activation));
    const Problem problem = make_problem(allowed({200, 192, 256, 32, 16, 0.3, DType::f32, false, 8}));
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived();
    const Force force("cuda:sm90");
    expect_ok(gpu.linear(activation));
    expect_activation(problem, gpu, activation);
  }
}

// What is packed beside stored blocks meets nothing; numbers beyond tf32's largest are infinite or are not.
TEST_F(Sm90Tf32Test, AbsentBlocksAreSkippedWhateverXHolds) {
  for (const std::int64_t b : {16, 32, 64}) {
    SCOPED_TRACE(b);
    const ProblemSpec spec = allowed({300, 272, 336, b, b, 0.3, DType::f32, true, 0});
    Problem problem = make_problem(spec);
    add_specials(problem);
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_unions_linear");
    expect_ok(gpu.linear(Activation::none));
    expect_ok(gpu.grad_input());
    expect_ok(gpu.grad_weight());
    expect_same_or_nan(problem, gpu);
  }
}

// Without the switch the same problem is exact to f32, by another kernel, which wants nothing of the weight.
TEST_F(Sm90Tf32Test, IsOffByDefault) {
  rarefy::Problem asked = make_problem(Op::linear, {256, 256, 64, 64, 8}, 300, DType::f32, Device::cuda);
  EXPECT_EQ(derived_sizes(asked)->key, 0U);
  EXPECT_EQ(explain(asked).kernel, "sm80_float_linear");
  for (const Op op : kGradients) {
    EXPECT_EQ(
        explain(make_problem(op, asked.weight.shape, 300, DType::f32, Device::cuda)).kernel.substr(0, 10),
        "sm80_float");
  }
  asked.tf32 = true;
  const auto sizes = derived_sizes(asked);
  ASSERT_TRUE(sizes.ok() && sizes->key != 0) << to_string(explain(asked));
  EXPECT_EQ(explain(asked).kernel, "sm80_float_linear");  // nothing is at hand
  asked.derived = sizes->key;
  EXPECT_EQ(explain(asked).kernel, "sm90_unions_linear") << to_string(explain(asked));
  EXPECT_NE(to_string(asked).find("as tf32"), std::string::npos);
  for (const DType dtype : {DType::f64, DType::bf16}) {  // of no other dtype does it change anything
    rarefy::Problem other = make_problem(Op::linear, {256, 256, 64, 64, 8}, 300, dtype, Device::cuda);
    const auto before = derived_sizes(other);
    other.tf32 = true;
    EXPECT_EQ(derived_sizes(other)->key, before->key);
  }
}

}  // namespace
}  // namespace rarefy::test
