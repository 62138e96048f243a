// Matrices by feature: the reference takes every layout of inputs and outputs, and so does each family's
// linear; other kernels of the CPU say why they do not; and a layout is part of what a kernel is chosen by.
// On the GPU: cuda_products_test.cc.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "feed_forward_problem.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

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

// Panels are copied instead of transposed: tokens that end within a vector, outputs and inputs that end
// within a block, gaps between columns, 16-bit dtypes. The guards of the outputs see what is too much.
TEST(LayoutTest, EveryFamilysLinearTakesEveryLayout) {
  for (const std::string& family : cpu_impls()) {
    if (family == "ref") continue;
    const Force force("cpu:" + family);
    for (const Layout x : kLayouts) {
      for (const Layout y : kLayouts) {
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
          for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{4, 1}, {4, 3}, {2, 8}}) {
            for (const std::int64_t tokens : {1, 16, 49, 150}) {
              for (const bool integers : {true, false}) {
                SCOPED_TRACE(::testing::Message()
                             << family << ' ' << name(x) << ", " << name(y) << ", " << name(dtype) << ' '
                             << rows << 'x' << columns << ' ' << tokens << " tokens");
                const Problem problem =
                    make_problem({tokens, 46, 37, rows, columns, 0.4, dtype, integers, 5, x, y});
                ProblemIn<HostBuffer> run(problem);
                expect_ok(run.linear(Activation::none));
                expect_linear(problem, run);
                const std::vector<double> sums = decode(run.y().download(), dtype);
                expect_ok(run.linear(Activation::relu));
                const std::vector<double> got = decode(run.y().download(), dtype);
                for (std::size_t i = 0; i < sums.size(); ++i) {
                  if (std::isnan(sums[i])) continue;
                  ASSERT_EQ(got[i], std::max(sums[i], 0.0)) << i;
                }
              }
            }
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
  rarefy::Problem asked = make_problem(Op::grad_input, {64, 64, 4, 4, 100}, 40, DType::f32);
  const std::string by_token = explain(asked).kernel;
  asked.in_layout = Layout::by_feature;
  asked.in_stride = 40;
  const Explanation e = explain(asked);
  EXPECT_EQ(e.kernel, "ref_grad_input") << to_string(e);
  for (const Candidate& candidate : e.candidates) {
    if (candidate.kernel.name != by_token) continue;
    EXPECT_EQ(candidate.why_not, "takes and gives matrices by token; got one by feature");
  }
  asked.op = Op::linear;
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
      rarefy::Problem asked = make_problem(Op::grad_input, {32, 32, 4, 4, 20}, 32, DType::f32);
      asked.in_layout = layout;
      EXPECT_EQ(choose(asked)->kernel->name == "ref_grad_input", layout == Layout::by_feature);
      asked.in_layout = Layout::by_token;
      asked.out_layout = layout;
      EXPECT_EQ(choose(asked)->kernel->name == "ref_grad_input", layout == Layout::by_feature);
    }
  }
}

// Rows of W with both sides by feature: exact in integers, with ragged edges, gaps between rows, a bias and
// tokens that end within a vector, or fill none; long sums of reals within the bound of their parts.
TEST(LayoutTest, RowsInPlace) {
  ThreadPool pool(3);
  for (const char* family : {"avx512", "avx2", "neon", "scalar"}) {
    if (!backend_info().machine.has(family) && std::string_view(family) != "scalar") continue;
    const Force force(std::string("cpu:") + family);
    for (const auto& [rows, cols, c] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{70, 45, 1},
                                        {33, 45, 16},
                                        {9, 4001, 1},
                                        {40, 20, 1}}) {
      for (const std::int64_t tokens : {1, 3, 4, 5, 8, 9, 15, 16, 37, 100, 201}) {
        const bool masks = std::string_view(family).starts_with("avx");
        if (tokens < 4 && !masks) continue;  // less than a vector
        for (const bool integers : {true, false}) {
          const Problem p = make_problem({tokens, rows, cols, 1, c, 0.4, DType::f32, integers, 0}, 5);
          // Four tokens have another path where they lie without a gap, as they do with one kind of numbers.
          const std::int64_t x_stride = tokens + (integers == (rows == 70) ? 0 : 3), y_stride = tokens + 5;
          std::vector<float> x(static_cast<std::size_t>(cols * x_stride)),
              values(p.values.begin(), p.values.end());
          for (std::int64_t k = 0; k < cols; ++k) {
            for (std::int64_t m = 0; m < tokens; ++m) {
              x[static_cast<std::size_t>(k * x_stride + m)] =
                  static_cast<float>(p.x[static_cast<std::size_t>(m * p.x_stride() + k)]);
            }
          }
          std::vector<float> bias(static_cast<std::size_t>(rows));
          std::iota(bias.begin(), bias.end(), -4.0F);
          constexpr float kUntouched = 77;
          std::vector<float> y(static_cast<std::size_t>(rows * y_stride), kUntouched);
          expect_ok(linear({x.data(), DType::f32, tokens, cols, 1, Device::cpu, x_stride},
                           {p.pattern.view(), values.data(), DType::f32}, bias.data(), Activation::relu,
                           {y.data(), DType::f32, tokens, rows, 1, Device::cpu, y_stride},
                           {.executor = pool.executor()}));
          const PlanView& plan = p.pattern.view();
          for (std::int64_t n = 0; n < rows; ++n) {
            for (std::int64_t m = 0; m < tokens; ++m) {
              double sum = bias[static_cast<std::size_t>(n)], size = std::fabs(sum);
              for (std::int32_t e = plan.crow[n]; e < plan.crow[n + 1]; ++e) {
                for (std::int64_t i = 0; i < c && plan.col[e] * c + i < cols; ++i) {
                  const double term = double{values[static_cast<std::size_t>(e * c + i)]} *
                                      x[static_cast<std::size_t>((plan.col[e] * c + i) * x_stride + m)];
                  sum += term;
                  size += std::fabs(term);
                }
              }
              // A part of 288 and half as many terms, some parts, the bias.
              const double bound = integers ? 0 : (432 + 16) * 0x1p-24 * size;
              ASSERT_NEAR(y[static_cast<std::size_t>(n * y_stride + m)], std::max(sum, 0.0), bound)
                  << family << ' ' << rows << 'x' << cols << ' ' << tokens;
            }
            for (std::int64_t m = tokens; m < y_stride; ++m) {
              ASSERT_EQ(y[static_cast<std::size_t>(n * y_stride + m)], kUntouched);
            }
          }
        }
      }
    }
  }
}

// A turn of two, four or eight tokens reads on into the next row (in_place.h): what is there changes nothing,
// be it no number, and no bit follows from where a thread's rows end.
TEST(LayoutTest, RowsInPlaceAreTheSameHoweverTheyAreCut) {
  constexpr std::int64_t kRows = 300, kCols = 200;
  ThreadPool one(1), three(3);
  for (const double density : {0.3, 0.02}) {
    const Problem p = make_problem({4, kRows, kCols, 1, 1, density, DType::f32, false, 0}, 11);
    const PlanView& plan = p.pattern.view();
    const std::vector<float> values(p.values.begin(), p.values.end());
    for (const std::int64_t tokens : {2, 4, 8}) {
      std::vector<float> x(static_cast<std::size_t>(kCols * tokens));
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
      constexpr std::int64_t kColumn = 7;  // of which rows that store it make no numbers
      for (std::int64_t m = 0; m < tokens; ++m) {
        x[static_cast<std::size_t>(kColumn * tokens + m)] = std::numeric_limits<float>::infinity();
      }
      const auto product = [&](ThreadPool& pool) {
        std::vector<float> y(static_cast<std::size_t>(kRows * tokens));
        expect_ok(linear({x.data(), DType::f32, tokens, kCols, 1, Device::cpu, tokens},
                         {plan, values.data(), DType::f32}, nullptr, Activation::none,
                         {y.data(), DType::f32, tokens, kRows, 1, Device::cpu, tokens},
                         {.executor = pool.executor()}));
        return y;
      };
      const std::vector<float> y = product(one), cut = product(three);
      ASSERT_EQ(std::memcmp(y.data(), cut.data(), y.size() * sizeof(float)), 0) << density << ' ' << tokens;
      for (std::int64_t n = 0; n < kRows; ++n) {
        const std::int32_t *begin = plan.col + plan.crow[n], *end = plan.col + plan.crow[n + 1];
        const bool stores = std::find(begin, end, kColumn) != end;
        for (std::int64_t m = 0; m < tokens; ++m) {
          ASSERT_EQ(std::isfinite(y[static_cast<std::size_t>(n * tokens + m)]), !stores) << n;
        }
      }
    }
  }
}

TEST(LayoutTest, RowsInPlaceSayWhyNot) {
  rarefy::Problem asked = make_problem(Op::linear, {64, 64, 1, 1, 100}, 40, DType::f32);
  asked.in_layout = asked.out_layout = Layout::by_feature;
  asked.in_stride = asked.out_stride = 40;
  const auto reason = [](const rarefy::Problem& p) {
    for (const Candidate& candidate : explain(p).candidates) {
      if (candidate.kernel.name == "scalar_linear_in_place") return candidate.why_not;
    }
    return std::string("no such kernel");
  };
  EXPECT_EQ(reason(asked), "");
  // Panels take them, too, three times as slowly where a row stores little.
  EXPECT_TRUE(explain(asked).kernel.ends_with("_linear_in_place")) << explain(asked).kernel;
  rarefy::Problem other = asked;
  other.weight.shape.block_rows = 4;
  EXPECT_EQ(reason(other), "takes blocks of one row; got 4");
  other = asked;
  other.tokens = 3;
  EXPECT_EQ(reason(other), "takes 4 tokens and more; got 3");
  other = asked;
  other.in = other.out = DType::bf16;
  EXPECT_EQ(reason(other), "takes f32 alone");
  other = asked;
  other.out_layout = Layout::by_token;
  EXPECT_EQ(reason(other), "takes and gives matrices by feature; got one by token");
}

}  // namespace
}  // namespace rarefy::test
