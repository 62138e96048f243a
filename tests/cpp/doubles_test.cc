// The products in f64 on vectors: every instruction set of this machine against the reference, whose sums are
// in f64, too; integers exactly.
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "product_checks.h"

namespace rarefy::test {
namespace {

class DoublesTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::string kernel() const { return GetParam() + "_linear_doubles"; }

  // The kernel's own, not the reference: forced by its family, which has no other for f64.
  void check(const ProblemSpec& spec, Activation activation = Activation::none, Executor executor = {}) {
    SCOPED_TRACE(::testing::Message() << GetParam() << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k
                                      << " block " << spec.block_rows << 'x' << spec.block_cols);
    const Problem problem = make_problem(spec);
    ProblemIn<HostBuffer> run(problem, executor);
    {
      const Force force(GetParam());
      expect_ok(run.linear(activation));
    }
    if (activation == Activation::none) {
      expect_linear(problem, run);
    } else {
      expect_activation(problem, run, activation);
    }
  }
};

// Both gradients, by the family's own kernels.
void check_gradients(const std::string& family, const ProblemSpec& spec, Executor executor = {}) {
  SCOPED_TRACE(::testing::Message() << family << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k
                                    << " block " << spec.block_rows << 'x' << spec.block_cols);
  const Problem problem = make_problem(spec);
  ProblemIn<HostBuffer> run(problem, executor);
  {
    const Force force(family);
    expect_ok(run.grad_input());
    expect_ok(run.grad_weight());
  }
  expect_grad_input(problem, run);
  expect_grad_weight(problem, run);
}

std::vector<std::string> families() {
  std::vector<std::string> list;
  rarefy::Problem problem = make_problem(Op::linear, {8, 8, 1, 1, 8}, 1, DType::f64);
  problem.weight.dtype = DType::f64;
  for (const Candidate& candidate : explain(problem).candidates) {
    if (candidate.why_not.empty() && candidate.kernel.family != "ref") {
      list.push_back(candidate.kernel.family);
    }
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Cpu, DoublesTest, ::testing::ValuesIn(families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(DoublesTest, IsChosenBeforeTheReference) {
  rarefy::Problem problem = make_problem(Op::linear, {8, 8, 2, 4, 1}, 3, DType::f64);
  problem.weight.dtype = DType::f64;
  const Explanation chosen = explain(problem);
  EXPECT_EQ(chosen.kernel, families().front() + "_linear_doubles");
  problem.activation = Activation::silu;
  EXPECT_EQ(explain(problem).kernel, "ref_linear");
}

TEST_P(DoublesTest, EveryBlockShapeAndNumberOfTokens) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{1, 1}, {1, 2},  {1, 16}, {2, 1},  {3, 5},
                                                          {4, 1}, {16, 4}, {1, 9},  {80, 3}, {17, 33}};
  for (const auto& [rows, cols] : blocks) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 7, 8, 9, 16, 24, 31, 32, 33, 40, 41, 65, 96}) {
      for (const bool integers : {true, false}) {
        check({tokens, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, DType::f64,
               integers, tokens % 3 == 0 ? -1 : 2});
      }
    }
  }
}

TEST_P(DoublesTest, AsTheyLieByFeature) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{1, 1}, {1, 3}, {4, 1}, {5, 3}};
  for (const auto& [rows, cols] : blocks) {
    for (const std::int64_t tokens : {4, 5, 7, 8, 9, 15, 31, 32, 39, 40, 41, 72, 73}) {
      if (tokens < 8 && GetParam() == "neon") continue;
      for (const bool integers : {true, false}) {
        check({tokens, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, DType::f64,
               integers, 3, Layout::by_feature, Layout::by_feature});
      }
    }
  }
}

TEST_P(DoublesTest, Gradients) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 1}, {1, 2}, {1, 16}, {2, 1}, {3, 5}, {4, 1}, {4, 4}, {16, 4}, {1, 9}, {80, 3}, {8, 8}, {17, 33}};
  for (const auto& [rows, cols] : blocks) {
    for (const std::int64_t tokens : {1, 2, 3, 5, 8, 9, 17, 32, 33, 41, 96}) {
      for (const bool integers : {true, false}) {
        check_gradients(GetParam(), {tokens, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols,
                                     0.4, DType::f64, integers, 2});
      }
    }
  }
}

// Several chunks of tokens, tiles of columns, parts of sums.
TEST_P(DoublesTest, LongGradientsOnThreads) {
  ThreadPool pool(3);
  for (const bool integers : {true, false}) {
    check_gradients(GetParam(), {600, 150, 900, 4, 1, 0.3, DType::f64, integers, 0}, pool.executor());
    check_gradients(GetParam(), {300, 170, 2000, 1, 1, 0.3, DType::f64, integers, 0}, pool.executor());
    check_gradients(GetParam(), {300, 2000, 170, 8, 8, 0.3, DType::f64, integers, 1}, pool.executor());
  }
  for (const double density : {0.0, 1.0}) {
    check_gradients(GetParam(), {40, 33, 50, 4, 2, density, DType::f64, true, 2}, pool.executor());
  }
  rarefy::Problem asked = make_problem(Op::grad_weight, {48, 64, 4, 4, 9}, 8, DType::f64);
  for (const Op op : {Op::grad_input, Op::grad_weight}) {
    asked.op = op;
    asked.weight.dtype = DType::f64;
    EXPECT_EQ(explain(asked).kernel,
              families().front() + (op == Op::grad_input ? "_grad_input" : "_grad_weight") + "_doubles");
  }
}

// A token's gradient has the same bits in every batch and on any number of threads.
TEST_P(DoublesTest, GradInputOfEveryBatch) {
  const Force force(GetParam());
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {4, 2}, {2, 3}, {8, 16}}) {
    const Problem all = make_problem({70, 300, 120, rows, cols, 0.4, DType::f64, false, 0});
    std::vector<double> first;
    for (const std::int64_t count : {70, 33, 8, 3, 1}) {
      Problem some = all;
      some.spec.m = count;
      some.dy.resize(static_cast<std::size_t>(count * all.y_stride()));
      ThreadPool pool(static_cast<int>(count % 3 + 1));
      ProblemIn<HostBuffer> run(some, pool.executor());
      expect_ok(run.grad_input());
      std::vector<double> token = decode(run.dx().download(), DType::f64);
      token.resize(120);
      if (first.empty()) first = token;
      for (std::size_t i = 0; i < token.size(); ++i) ASSERT_EQ(token[i], first[i]) << count << ' ' << i;
    }
  }
}

TEST_P(DoublesTest, GradientsAreAdded) {
  const Problem problem = make_problem({300, 70, 90, 4, 2, 0.4, DType::f64, true, 0});
  ProblemIn<HostBuffer> run(problem);
  const Force force(GetParam());
  expect_ok(run.grad_weight());
  const std::vector<double> once = decode(run.dvalues().download(), DType::f64);
  expect_ok(run.grad_weight(nullptr, true));
  const std::vector<double> twice = decode(run.dvalues().download(), DType::f64);
  for (std::size_t i = 0; i < once.size(); ++i) ASSERT_EQ(twice[i], 2 * once[i]) << i;
}

// Sums of thousands of terms in several parts, and columns that take all of two bytes.
TEST_P(DoublesTest, LongRowsOnThreads) {
  ThreadPool pool(3);
  for (const bool integers : {true, false}) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 40}) {
      check({tokens, 40, 9001, 1, 1, 0.9, DType::f64, integers, 0}, Activation::none, pool.executor());
    }
    check({2, 6, 66'000, 1, 1, 0.1, DType::f64, integers, 0}, Activation::none, pool.executor());
    check({40, 43, 3001, 4, 1, 0.9, DType::f64, integers, 0}, Activation::none, pool.executor());
  }
  for (const double density : {0.0, 1.0}) {
    check({2, 33, 50, 1, 1, density, DType::f64, true, 2}, Activation::relu, pool.executor());
    check({40, 33, 50, 1, 1, density, DType::f64, true, 2}, Activation::relu, pool.executor());
  }
}

TEST_P(DoublesTest, ReluKeepsNaN) {
  for (const std::int64_t tokens : {1, 12}) {
    Problem problem = make_problem({tokens, 30, 40, 1, 1, 0.5, DType::f64, true, 0});
    problem.x[7] = std::numeric_limits<double>::quiet_NaN();
    check({tokens, 30, 40, 1, 1, 0.5, DType::f64, true, 0}, Activation::relu);
    ProblemIn<HostBuffer> run(problem);
    {
      const Force force(GetParam());
      expect_ok(run.linear(Activation::none));
    }
    expect_same_or_nan(problem, run, {true, false, false});
  }
}

// A token's bits do not depend on the batch, among up to four and among more, nor on threads; and those of
// columns in two bytes are those of four.
TEST_P(DoublesTest, BitsDependOnNothingElse) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {4, 1}, {2, 3}}) {
    const Problem problem = make_problem({70, 120, 700, rows, cols, 0.4, DType::f64, false, 0});
    const auto run = [&](std::int64_t first, std::int64_t count, int threads) {
      const Problem some = of_tokens(problem, first, count);
      ThreadPool pool(threads);
      ProblemIn<HostBuffer> one(some, pool.executor());
      const Force force(GetParam());
      expect_ok(one.linear(Activation::none));
      const std::vector<std::byte> y = one.y().download();
      return std::vector<std::byte>(y.begin(), y.begin() + 120 * 8);  // of its first token
    };
    const std::int64_t at = 9;
    std::set<std::vector<std::byte>> few, many;
    for (const std::int64_t count : {1, 2, 3, 4}) few.insert(run(at, count, static_cast<int>(count)));
    for (const std::int64_t count : {5, 8, 9, 16, 17, 31, 33, 61}) {
      many.insert(run(at, count, static_cast<int>(count % 3 + 1)));
    }
    EXPECT_EQ(few.size(), 1U) << rows << 'x' << cols;
    EXPECT_EQ(many.size(), 1U) << rows << 'x' << cols;
  }
}

}  // namespace
}  // namespace rarefy::test
