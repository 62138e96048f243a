// The Hopper kernel for blocks of 16 and 32 against the host's products in double, through the registry, with
// what callers hold of a weight; and that blocks which are not stored are skipped, whatever X holds there.
#include <gtest/gtest.h>

#include <limits>

#include "sm90_checks.h"

namespace rarefy::test {
namespace {

class Sm90UnionsTest : public Sm90Test {
 protected:
  static void check(const ProblemSpec& spec) {
    check_products(spec, {"sm90_unions_linear",
                          "sm90_unions_grad_input",
                          {},
                          "cuda:sm90,sm90_unions_linear(),sm90_unions_grad_input()"});
  }
};

TEST_F(Sm90UnionsTest, MatchHost) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{16, 16}, {32, 32}, {16, 64}, {64, 16},
                                                          {32, 64}, {48, 16}, {32, 96}, {128, 32}};
  for (const auto& [r, c] : blocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const double density : {0.0, 0.3, 1.0}) {
        check({130, 9 * r, 8 * c, r, c, density, dtype, true, 0});
        check({513, 7 * r - 8, 5 * c - 8, r, c, density, dtype, false, 8});
      }
      check({17, 9 * r, 2 * c, r, c, 0.4, dtype, true, 16});
      check({1000, 21 * r, 13 * c, r, c, 0.15, dtype, true, 0});
    }
  }
}

// Ragged token tiles; more of them than one list has; many groups, and one.
TEST_F(Sm90UnionsTest, ManyTokensAndRows) {
  for (const std::int64_t tokens : {255, 257, 1281, 4100}) {
    check({tokens, 320, 448, 32, 32, 0.4, DType::bf16, true, 0});
    check({tokens, 384, 256, 16, 16, 0.1, DType::bf16, true, 8});
  }
  check({40000, 64, 128, 32, 32, 0.6, DType::bf16, true, 0});
  check({600, 32 * 600, 128, 32, 32, 0.5, DType::f16, true, 0});
  check({300, 128, 16 * 900, 16, 16, 0.2, DType::f16, true, 0});
}

// Strips of the weight gradient are made of units of 32 rows that store anything: neighbours, apart, or with
// none beside the last one; one or two strips a tile, panels of 32 and of 16, in one share and in four.
TEST_F(Sm90UnionsTest, GradientsOfRowsThatStoreNothing) {
  const auto rows_stored = [](const ProblemSpec& spec, auto&& stores) {
    Problem problem = make_problem(spec);
    const PlanView& plan = problem.pattern.view();
    std::vector<std::int32_t> crow{0}, col;
    for (std::int32_t i = 0; i < plan.shape.row_count(); ++i) {
      if (stores(i)) col.insert(col.end(), plan.col + plan.crow[i], plan.col + plan.crow[i + 1]);
      crow.push_back(static_cast<std::int32_t>(col.size()));
    }
    problem.pattern = *Pattern::create({spec.n, spec.k, spec.block_rows, spec.block_cols, 0}, crow, col);
    problem.values.resize(static_cast<std::size_t>(problem.pattern.shape().value_count()));
    return problem;
  };
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{16, 16}, {32, 32}, {48, 16}, {96, 32}, {32, 64}};
  for (const auto& [r, c] : blocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const ProblemSpec spec{150, 23 * r - 8, 13 * c - 8, r, c, 0.4, dtype, true, 8};
      for (const int period : {2, 3, 5, 22}) {
        const Problem problem = rows_stored(spec, [=](int row) { return row % period == 1; });
        for (const std::string config : {"split=1 wide=32 strips=1 pairs=1 even=0 most=14",
                                         "split=4 wide=32 strips=2 pairs=0 even=1 most=8",
                                         "split=2 wide=16 strips=1 pairs=1 even=0 most=27",
                                         "split=1 wide=16 strips=2 pairs=1 even=0 most=16"}) {
          SCOPED_TRACE(::testing::Message() << text_of(spec) << ' ' << period << ' ' << config);
          const Force force("cuda:sm90,sm90_block_gradient(" + config + ")");
          ProblemIn<DeviceBuffer> gpu(problem);
          expect_ok(gpu.grad_weight());
          expect_grad_weight(problem, gpu);
        }
      }
    }
  }
}

TEST_F(Sm90UnionsTest, Activations) {
  for (const Activation activation :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(::testing::Message() << name(activation) << ' ' << name(dtype));
      const Problem problem = make_problem({200, 192, 256, 16, 16, 0.3, dtype, false, 8});
      ProblemIn<DeviceBuffer> gpu(problem);
      gpu.hold_derived();
      const Force force("cuda:sm90");
      expect_ok(gpu.linear(activation));
      expect_activation(problem, gpu, activation);
    }
  }
}

// A row that does not store a column gets nothing of the Inf or NaN that X has there: its zeros, packed
// beside other rows' blocks, are not multiplied by it. Rows that store it get what they would have got.
TEST_F(Sm90UnionsTest, AbsentBlocksAreSkippedWhateverXHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const std::int64_t b : {16, 32}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(::testing::Message() << b << ' ' << name(dtype));
      const ProblemSpec spec{300, 272, 336, b, b, 0.3, dtype, true, 0};  // the last strip is not full
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

TEST_F(Sm90UnionsTest, DerivedDataServesAnyTokens) {
  rarefy::Problem asked = make_problem(Op::linear, {256, 256, 16, 16, 80}, 300, DType::bf16, Device::cuda);
  const auto first = derived_sizes(asked);
  ASSERT_TRUE(first.ok() && first->key != 0 && first->packed > 0) << to_string(explain(asked));
  asked.tokens = 3000;
  asked.bias = true;
  asked.activation = Activation::relu;
  EXPECT_EQ(derived_sizes(asked)->key, first->key);
  EXPECT_EQ(derived_sizes(asked)->prepared, first->prepared);
  EXPECT_EQ(derived_sizes(asked)->packed, first->packed);
  asked.derived = first->key;
  EXPECT_EQ(explain(asked).kernel, "sm90_unions_linear") << to_string(explain(asked));
  asked.tokens = 3;
  EXPECT_EQ(explain(asked).kernel, "sm90_decode") << to_string(explain(asked));
}

}  // namespace
}  // namespace rarefy::test
