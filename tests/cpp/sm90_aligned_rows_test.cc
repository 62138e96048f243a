// Matrices whose rows begin or end anywhere, which Hopper's kernels get as copies with aligned rows
// (aligned_rows.h): every kernel, against the host's products in double. What lies between rows is NaN, and
// is not written.
#include <gtest/gtest.h>

#include <limits>

#include "core/aligned_rows.h"
#include "sm90_checks.h"

namespace rarefy::test {
namespace {

class Sm90AlignedRowsTest : public Sm90Test {
 protected:
  static void check(const ProblemSpec& spec, bool gradients = true) {
    SCOPED_TRACE(text_of(spec));
    Problem problem = make_problem(spec);
    spoil_gaps(problem.x, spec.k, problem.x_stride());
    spoil_gaps(problem.dy, spec.n, problem.y_stride());
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    gpu.poison();
    expect_sm90(gpu, Op::linear);
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
    if (!gradients) return;
    expect_sm90(gpu, Op::grad_input);
    expect_ok(gpu.grad_input());
    expect_grad_input(problem, gpu);
    expect_sm90(gpu, Op::grad_weight);
    expect_ok(gpu.grad_weight());
    expect_grad_weight(problem, gpu);
  }

 private:
  static void spoil_gaps(std::vector<double>& matrix, std::int64_t columns, std::int64_t stride) {
    for (std::size_t i = 0; i < matrix.size(); ++i) {
      if (static_cast<std::int64_t>(i) % stride >= columns)
        matrix[i] = std::numeric_limits<double>::quiet_NaN();
    }
  }
  static void expect_sm90(ProblemIn<DeviceBuffer>& gpu, Op op) {
    rarefy::Problem asked = gpu.problem(op);
    asked.derived = kAnyDerived;
    const Explanation found = explain(asked);
    EXPECT_TRUE(found.kernel.starts_with("sm90_")) << to_string(found);
    EXPECT_EQ(found.aligned_copies, aligned_rows_bytes(asked));
    EXPECT_GE(found.workspace, found.aligned_copies);
  }
};

using Block = std::pair<std::int64_t, std::int64_t>;

class Sm90AlignedBlocksTest : public Sm90AlignedRowsTest, public ::testing::WithParamInterface<Block> {};

TEST_P(Sm90AlignedBlocksTest, MatchHost) {
  const auto [r, c] = GetParam();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t gap : {0, 1, 5}) {  // 5: 331 features in rows of 336
      check({130, 333, 331, r, c, 0.3, dtype, true, gap});
    }
    check({300, 328, 331, r, c, 0.3, dtype, false, 0});
    check({257, 333, 328, r, c, 0.3, dtype, false, 0});
  }
}

INSTANTIATE_TEST_SUITE_P(Sm90, Sm90AlignedBlocksTest,
                         ::testing::Values(Block{64, 64}, Block{128, 128}, Block{32, 32}, Block{16, 16},
                                           Block{64, 16}, Block{8, 8}, Block{128, 1}, Block{64, 1},
                                           Block{32, 1}, Block{3, 5}, Block{1, 1}),
                         [](const auto& tested) {
                           return std::to_string(tested.param.first) + 'x' +
                                  std::to_string(tested.param.second);
                         });

TEST_F(Sm90AlignedRowsTest, ManyTokensAndRows) {
  check({4100, 517, 131, 64, 64, 0.4, DType::bf16, true, 0});
  check({1025, 2051, 130, 16, 16, 0.1, DType::bf16, true, 3});
  check({1030, 1029, 259, 128, 1, 0.3, DType::bf16, true, 0});
  check({17, 131, 133, 8, 8, 0.5, DType::f16, true, 0});
}

TEST_F(Sm90AlignedRowsTest, AsTf32) {
  for (const auto& [r, c] : {Block{32, 32}, {16, 16}}) {
    ProblemSpec spec{130, 333, 331, r, c, 0.3, DType::f32, true, 1};
    spec.tf32 = true;
    check(spec);
  }
}

TEST_F(Sm90AlignedRowsTest, ByFeature) {
  for (const std::int64_t r : {128, 64}) {
    for (const Layout x : kLayouts) {
      for (const Layout y : kLayouts) {
        check({203, 5 * r, 331, r, 1, 0.3, DType::bf16, true, 1, x, y}, false);
        check({203, 5 * r - 3, 331, r, 1, 0.3, DType::bf16, true, 0, x, y}, false);
      }
    }
  }
}

TEST_F(Sm90AlignedRowsTest, GradientsAreAddedToWhatIsThere) {
  for (const auto& [r, c] : {Block{64, 64}, {16, 16}, {8, 8}, {64, 1}}) {
    const Problem problem = make_problem({130, 333, 331, r, c, 0.3, DType::bf16, true, 0});
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    expect_accumulated(problem, gpu);
  }
}

}  // namespace
}  // namespace rarefy::test
