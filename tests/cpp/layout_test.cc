// Matrices by feature: the reference takes every layout of inputs and outputs, other kernels of the CPU say
// why they do not, and a layout is part of what a kernel is chosen by. On the GPU: cuda_test.cc.
#include "feed_forward_problem.h"

namespace rarefy::test {
namespace {

constexpr Layout kLayouts[] = {Layout::by_token, Layout::by_feature};

TEST(LayoutTest, TheReferenceTakesEveryLayout) {
  for (const Layout x : kLayouts) {
    for (const Layout y : kLayouts) {
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        for (const std::int64_t tokens : {0, 1, 13}) {
          for (const std::int64_t gap : {0, 3}) {
            SCOPED_TRACE(::testing::Message() << name(x) << ", " << name(y) << ", " << name(dtype) << ' '
                                              << tokens << " tokens, gap " << gap);
            const Problem problem =
                make_problem({tokens, 19, 23, 4, 3, 0.5, dtype, dtype != DType::f32, gap, x, y});
            ProblemIn<HostBuffer> run(problem);
            expect_ok(run.linear(Activation::none));
            expect_ok(run.grad_input());
            expect_ok(run.grad_weight());
            expect_products(problem, run);
          }
        }
      }
    }
  }
}

TEST(LayoutTest, FeedForwardToo) {
  const Layers layers({11, 20, 30, 14, all_of(4, 1), 0.5, DType::f32, false, 0, true, Activation::silu});
  const Chain by_token(layers), by_feature(layers);
  expect_ok(by_token.feed_forward(false));
  const Spec& s = layers.spec;
  const std::vector<double> x = decode(by_feature.x.download(), DType::f32);
  std::vector<float> turned(x.size()), y(static_cast<std::size_t>(s.m * s.n));
  for (std::int64_t m = 0; m < s.m; ++m) {
    for (std::int64_t k = 0; k < s.k; ++k)
      turned[static_cast<std::size_t>(k * s.m + m)] =
          static_cast<float>(x[static_cast<std::size_t>(m * by_feature.x_stride + k)]);
  }
  const MatrixView in{turned.data(), DType::f32, s.m, s.k, 1, Device::cpu, s.m};
  expect_ok(feed_forward(in, by_feature.layers(), {y.data(), DType::f32, s.m, s.n, 1, Device::cpu, s.m}));
  {
    const Force reference("ref");
    expect_ok(by_token.feed_forward(false));
  }
  const std::vector<double> want = decode(by_token.y.download(), DType::f32);
  for (std::int64_t m = 0; m < s.m; ++m) {
    for (std::int64_t n = 0; n < s.n; ++n) {
      EXPECT_EQ(y[static_cast<std::size_t>(n * s.m + m)], want[static_cast<std::size_t>(m * s.n + n)]);
    }
  }
}

TEST(LayoutTest, OthersSayWhyNot) {
  rarefy::Problem asked = make_problem(Op::linear, {64, 64, 4, 4, 100}, 40, DType::f32);
  const std::string by_token = explain(asked).kernel;
  asked.in_layout = Layout::by_feature;
  asked.in_stride = 40;
  const Explanation e = explain(asked);
  EXPECT_EQ(e.kernel, "ref_linear") << to_string(e);
  for (const Candidate& candidate : e.candidates) {
    if (candidate.kernel.name != by_token) continue;
    EXPECT_EQ(candidate.why_not, "takes and gives matrices by token; got one by feature");
  }
  EXPECT_NE(to_string(asked).find("40 tokens, f32 by feature -> f32, cpu"), std::string::npos)
      << to_string(asked);
  asked.out_layout = Layout::by_feature;
  EXPECT_NE(to_string(asked).find("f32 by feature -> f32 by feature"), std::string::npos) << to_string(asked);
  asked.op = Op::grad_weight;
  asked.in_layout = Layout::by_token;
  EXPECT_NE(to_string(asked).find("f32 and f32 by feature -> f32"), std::string::npos) << to_string(asked);
}

// What was chosen for one layout is not remembered for another, with all else equal.
TEST(LayoutTest, ChoicesAreNotMixedUp) {
  for (int round = 0; round < 2; ++round) {
    for (const Layout layout : kLayouts) {
      rarefy::Problem asked = make_problem(Op::linear, {32, 32, 4, 4, 20}, 32, DType::f32);
      asked.in_layout = layout;
      EXPECT_EQ(choose(asked)->kernel->name == "ref_linear", layout == Layout::by_feature);
      asked.in_layout = Layout::by_token;
      asked.out_layout = layout;
      EXPECT_EQ(choose(asked)->kernel->name == "ref_linear", layout == Layout::by_feature);
    }
  }
}

}  // namespace
}  // namespace rarefy::test
