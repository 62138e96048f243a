// Blocks that no Hopper kernel has tiles for (8×8, 16×1, single weights, odd ones) on its tensor cores:
// all products as unions (grad_weight: made whole) and as tall columns; against the host's products in
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
  static const Kernels& unions() {
    static const Kernels kernels{
        "sm90_unions_linear", "sm90_unions_grad_input", "sm90_dense_gradient",
        "cuda:sm90,sm90_unions_linear(),sm90_unions_grad_input(),sm90_dense_gradient()"};
    return kernels;
  }
  static const Kernels& tall() {
    static const Kernels kernels{
        "sm90_tall_packed", "sm90_tall_packed_grad_input", "sm90_tall_packed_gradient",
        "cuda:sm90,sm90_tall_packed(),sm90_tall_packed_grad_input(),sm90_tall_packed_gradient()"};
    return kernels;
  }
  // The same, and dX without zeros.
  static const Kernels& scatter() {
    static const Kernels kernels{"sm90_tall_packed", "sm90_tall_packed_grad_input", "",
                                 "cuda:sm90,sm90_tall_packed(),sm90_tall_packed_grad_input("
                                 "scatter=1 tokens=64 columns=128 slots=4)"};
    return kernels;
  }
  static const Kernels& transposed() {
    static const Kernels kernels{"sm90_unions_linear", "sm90_tall_packed_transposed", "",
                                 "cuda:sm90,sm90_unions_linear(),sm90_tall_packed_transposed()"};
    return kernels;
  }
  static void check(const ProblemSpec& spec) {
    check_products(spec, unions());
    if (spec.dtype == DType::f32) return;
    for (const Kernels& way : {tall(), scatter(), transposed()}) check_products(spec, way);
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

// X and Y by feature, which unions do not take; where columns are what a front holds.
TEST_F(Sm90FineTest, LayoutsOfTallColumns) {
  struct Block {
    std::int64_t r, c;
    double density;
  };
  for (const auto& [r, c, density] : {Block{32, 1, 0.05}, {48, 1, 0.05}, {128, 4, 0.2}, {64, 2, 0.1}}) {
    for (const Layout x : kLayouts) {
      for (const Layout y : kLayouts) {
        const ProblemSpec spec{520, 1000, 2000, r, c, density, DType::bf16, true, 8, x, y};
        SCOPED_TRACE(text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu(problem);
        gpu.hold_derived(4096);
        ASSERT_EQ(kernel_of(gpu, Op::linear), "sm90_tall_packed");
        expect_ok(gpu.linear(Activation::none));
        expect_linear(problem, gpu);
      }
    }
  }
}

TEST_F(Sm90FineTest, Activations) {
  for (const Kernels& way : {unions(), tall()}) {
    const Force force(way.forced);
    for (const std::int64_t rows : {8, 128}) {
      for (const Activation activation :
           {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
        const Problem problem = make_problem({200, 192, 256, rows, 8, 0.3, DType::bf16, false, 8});
        ProblemIn<DeviceBuffer> gpu(problem);
        gpu.hold_derived();
        ASSERT_EQ(kernel_of(gpu, Op::linear), way.linear);
        expect_ok(gpu.linear(activation));
        expect_activation(problem, gpu, activation);
      }
    }
  }
}

// What a row does not store it gets nothing of, whatever X holds there, and however many zeros lie between.
TEST_F(Sm90FineTest, AbsentBlocksAreSkippedWhateverXHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [r, c] : kBlocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const Kernels& way : {unions(), tall(), scatter(), transposed()}) {
        SCOPED_TRACE(::testing::Message() << r << 'x' << c << ' ' << name(dtype) << ' ' << way.forced);
        const Force force(way.forced);
        const ProblemSpec spec{300, 272, 336, r, c, 0.2, dtype, true, 0};
        Problem problem = make_problem(spec);
        add_specials(problem);
        std::fill_n(problem.x.begin() + 7 * spec.k, spec.k, nan);  // a token of nothing else
        ProblemIn<DeviceBuffer> gpu(problem);
        gpu.hold_derived(4096);
        ASSERT_EQ(kernel_of(gpu, Op::linear), way.linear);
        expect_ok(gpu.linear(Activation::none));
        expect_ok(gpu.grad_input());
        expect_ok(gpu.grad_weight());
        expect_same_or_nan(problem, gpu);
      }
    }
  }
}

TEST_F(Sm90FineTest, GradientsAreAddedToWhatIsThere) {
  for (const Kernels& way : {unions(), tall()}) {
    const Force force(way.forced);
    const Problem problem = make_problem({200, 192, 256, 8, 8, 0.3, DType::bf16, false, 8});
    ProblemIn<DeviceBuffer> gpu(problem);
    ASSERT_EQ(kernel_of(gpu, Op::grad_weight), way.grad_weight);
    expect_accumulated(problem, gpu);
  }
}

TEST_F(Sm90FineTest, RepeatsAreEqual) {
  for (const Kernels& way : {unions(), tall()}) {
    const Force force(way.forced);
    const Problem problem = make_problem({700, 544, 512, 8, 4, 0.3, DType::bf16, false, 0});
    std::vector<std::byte> first;
    for (int i = 0; i < 20; ++i) {  // prepared anew: groups find their columns' places in any order
      ProblemIn<DeviceBuffer> gpu(problem);
      gpu.hold_derived(4096);
      for (int repeat = 0; repeat < 5; ++repeat) {
        gpu.poison();
        expect_ok(gpu.linear(Activation::none));
        if (first.empty()) first = gpu.y().download();
        ASSERT_EQ(gpu.y().download(), first) << i;
      }
    }
  }
}

}  // namespace
}  // namespace rarefy::test
