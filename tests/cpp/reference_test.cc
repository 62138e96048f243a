// The reference that everything else is compared with: against sums over the dense matrix in long double.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "product_checks.h"
#include "ref/sum.h"

namespace rarefy::test {
namespace {

// int8 is storage: the reference computes it, exactly, into floats.
TEST(ProductsOfInt8Test, AreExact) {
  const std::array<std::int32_t, 2> crow{0, 1};
  const std::array<std::int32_t, 1> col{0};
  const Pattern pattern = *Pattern::create({1, 3, 1, 3, 0}, crow, col);
  const std::array<std::int8_t, 3> w{-128, 127, 3};
  const std::array<std::int8_t, 3> x{-128, 127, -1};
  float y = 0;
  expect_ok(linear({x.data(), DType::i8, 1, 3, 3}, {pattern.view(), w.data(), DType::i8}, nullptr,
                   Activation::none, {&y, DType::f32, 1, 1, 1}));
  EXPECT_EQ(y, 128 * 128 + 127 * 127 - 3);
  double wide = 0;
  expect_ok(linear({x.data(), DType::i8, 1, 3, 3}, {pattern.view(), w.data(), DType::i8}, nullptr,
                   Activation::none, {&wide, DType::f64, 1, 1, 1}));
  EXPECT_EQ(wide, 128 * 128 + 127 * 127 - 3);
}

// In eight parts a sum is off by less: each part's roundings are those of an eighth of the terms.
TEST(ReferenceTest, SumsAreInParts) {
  ref::Sum parts;
  double one = 0;
  constexpr int kTerms = 1 << 16;
  for (int i = 0; i < kTerms; ++i) {
    parts.add(0.1);
    one += 0.1;
  }
  const long double exact = static_cast<long double>(0.1) * kTerms;
  EXPECT_LT(std::fabs(parts.total() - exact), 0.25 * std::fabs(one - exact));
}

// The reference itself, against sums over the dense matrix in long double.
TEST(ReferenceTest, EqualsTheDenseProducts) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 5}, {4, 1}, {40, 40}}) {
    const ProblemSpec spec{9, 23, 31, rows, cols, 0.5, DType::f64, false, 2};
    const Problem p = make_problem(spec);
    const PlanView& plan = p.pattern.view();
    std::vector<double> dense(static_cast<std::size_t>(spec.n * spec.k), 0.0);
    for (std::int64_t i = 0; i < plan.shape.row_count(); ++i) {
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t c = 0; c < cols; ++c) {
            const std::int64_t n = i * rows + r;
            const std::int64_t k = plan.col[e] * cols + c;
            if (n < spec.n && k < spec.k) {
              dense[static_cast<std::size_t>(n * spec.k + k)] =
                  p.values[static_cast<std::size_t>((e * rows + r) * cols + c)];
            }
          }
        }
      }
    }
    const Host host{p};
    const std::vector<double> y = host.linear(p.x, p.values, &p.bias, Activation::none);
    const std::vector<double> dx = host.grad_input(p.dy, p.values);
    for (std::int64_t m = 0; m < spec.m; ++m) {
      for (std::int64_t n = 0; n < spec.n; ++n) {
        long double sum = p.bias[static_cast<std::size_t>(n)];
        for (std::int64_t k = 0; k < spec.k; ++k) {
          sum += static_cast<long double>(p.x[static_cast<std::size_t>(m * p.x_stride() + k)]) *
                 dense[static_cast<std::size_t>(n * spec.k + k)];
        }
        EXPECT_NEAR(y[static_cast<std::size_t>(m * spec.n + n)], static_cast<double>(sum), 1e-13);
      }
      for (std::int64_t k = 0; k < spec.k; ++k) {
        long double sum = 0;
        for (std::int64_t n = 0; n < spec.n; ++n) {
          sum += static_cast<long double>(p.dy[static_cast<std::size_t>(m * p.y_stride() + n)]) *
                 dense[static_cast<std::size_t>(n * spec.k + k)];
        }
        EXPECT_NEAR(dx[static_cast<std::size_t>(m * spec.k + k)], static_cast<double>(sum), 1e-13);
      }
    }
  }
}

}  // namespace
}  // namespace rarefy::test
