// What products make of numbers at the edges: tails of activations, NaN, infinity, subnormal numbers, zeros.
#include <cmath>
#include <numbers>

#include "product_families.h"

namespace rarefy::test {
namespace {

TEST_P(ProductsTest, Activations) {
  for (const DType dtype : kDTypes) {
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
      SCOPED_TRACE(::testing::Message() << name(activation) << ' ' << name(dtype));
      const Problem problem = make_problem({65, 40, 50, 4, 4, 0.4, dtype, false, 1});
      ProblemIn<HostBuffer> run(problem);
      {
        const Force force(GetParam());
        expect_ok(run.linear(activation));
      }
      expect_activation(problem, run, activation);
    }
  }
}

// What an activation is, in long double, without the cancellation of 1 + erf and 1 + tanh.
double exact_activation(Activation activation, double x) {
  const auto z = static_cast<long double>(x);
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 ? x : 0;
    case Activation::gelu_erf:
      return static_cast<double>(z / 2 * std::erfc(-z / std::numbers::sqrt2_v<long double>));
    case Activation::gelu_tanh: {
      const long double u = std::sqrt(2 / std::numbers::pi_v<long double>) * (z + 0.044715L * z * z * z);
      return static_cast<double>(z / (1 + std::exp(-2 * u)));
    }
    case Activation::silu: return static_cast<double>(z / (1 + std::exp(-z)));
  }
  return kNan;
}

constexpr Activation kActivations[] = {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh,
                                       Activation::silu};

// From far left, where only a relative bound means anything, to far right; many tokens of one feature, and
// one token of many features, which the kernels of few tokens take.
TEST_P(ProductsTest, ActivationsKeepTheirTails) {
  const DType dtype = GetParam() == "ref" ? DType::f64 : DType::f32;
  std::vector<double> numbers;
  for (int i = -4000; i <= 4000; ++i) numbers.push_back(i / 40.0);
  for (int exponent = -30; exponent <= 30; exponent += 3) {
    for (const double sign : {-1.0, 1.0}) numbers.push_back(std::ldexp(sign * 1.25, exponent));
  }
  numbers = decode(encode(numbers, dtype), dtype);
  const auto count = static_cast<std::int64_t>(numbers.size());
  for (const bool tokens : {true, false}) {
    Problem problem = make_problem({tokens ? count : 1, tokens ? 1 : count, 1, 1, 1, 1.0, dtype, true, 0});
    problem.bias.assign(problem.bias.size(), 0);
    problem.x.assign(problem.x.size(), 1);
    problem.values.assign(problem.values.size(), 1);
    (tokens ? problem.x : problem.values) = numbers;
    for (const Activation activation : kActivations) {
      ProblemIn<HostBuffer> run(problem);
      {
        const Force force(GetParam());
        expect_ok(run.linear(activation));
      }
      const std::vector<double> got = decode(run.y().download(), dtype);
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const double exact = exact_activation(activation, numbers[i]);
        ASSERT_LE(std::abs(got[i] - exact),
                  activation_error(activation, numbers[i], exact, accumulator(dtype)))
            << name(activation) << '(' << numbers[i] << ") = " << exact << ", got " << got[i];
      }
    }
  }
}

// The kernels of 1 to 4 tokens, and a panel.
constexpr std::int64_t kTokenCounts[] = {1, 2, 3, 4, 40};
// Their shapes, padded edges, and a flat one.
constexpr std::pair<std::int64_t, std::int64_t> kSpecialBlocks[] = {
    {1, 1}, {4, 1}, {8, 1}, {2, 8}, {1, 16}, {16, 16}, {4, 5}, {1, 6}, {6, 1}, {3, 2}, {3, 19}};

TEST_P(ProductsTest, ActivationsOfNanInfinityAndZero) {
  const double inputs[] = {kNan, kInfinity, -kInfinity, 0.0, -0.0};
  const auto expected = [](Activation activation, double x) {
    if (std::isnan(x) || x > 0) return x;
    if (x == 0 || activation == Activation::relu) return 0.0;
    return kNan;  // −∞ · 0, as in torch
  };
  for (const std::int64_t tokens : kTokenCounts) {
    for (const Activation activation : kActivations) {
      // One feature for each number, in its bias: no block is stored.
      Problem problem = make_problem({tokens, std::ssize(inputs), 3, 1, 1, 0.0, DType::f32, true, 0});
      problem.bias.assign(std::begin(inputs), std::end(inputs));
      ProblemIn<HostBuffer> run(problem);
      {
        const Force force(GetParam());
        expect_ok(run.linear(activation));
      }
      const std::vector<double> got = decode(run.y().download(), DType::f32);
      for (std::size_t e = 0; e < got.size(); ++e) {
        const double input = inputs[e % std::size(inputs)];
        EXPECT_TRUE(same(got[e], expected(activation, input)))
            << name(activation) << '(' << input << ") is " << got[e];
      }
    }
  }
}

// A NaN or an infinity reaches what a stored element carries it to, in every product, and nothing else:
// the padding of edge blocks stays zero, absent blocks are skipped.
TEST_P(ProductsTest, NanPassesThroughAndNotFurther) {
  for (const auto& [rows, cols] : kSpecialBlocks) {
    for (const std::int64_t tokens : kTokenCounts) {
      for (const DType dtype : kDTypes) {
        SCOPED_TRACE(::testing::Message()
                     << name(dtype) << " M=" << tokens << " block " << rows << 'x' << cols);
        const Problem clean = make_problem({tokens, 37, 38, rows, cols, 0.4, dtype, true, 1});
        const auto expect_spoiled = [&](auto spoil) {
          Problem problem = clean;
          spoil(problem);
          ProblemIn<HostBuffer> run(problem);
          run_all(run);
          expect_same_or_nan(problem, run);
        };
        const std::int64_t last = tokens - 1;
        expect_spoiled([&](Problem& p) {
          p.x[static_cast<std::size_t>(last * p.x_stride() + 37)] = kNan;  // in a padded block column
          p.x[3] = kInfinity;
        });
        expect_spoiled([&](Problem& p) {  // in every block row, the padded one among them
          for (std::int64_t n = 0; n < 37; n += 4)
            p.dy[static_cast<std::size_t>(last * p.y_stride() + n)] = kNan;
          p.dy[5] = -kInfinity;
        });
        expect_spoiled([&](Problem& p) {
          p.values[0] = kNan;
          p.values[p.values.size() / 2] = kInfinity;
          p.bias[7] = kNan;
          p.bias[8] = -kInfinity;
        });
      }
    }
  }
}

// Numbers below the normal ones are numbers: products of them with integers are exact, and not flushed.
TEST_P(ProductsTest, SubnormalNumbersAreExact) {
  for (const auto& [rows, cols] : kSpecialBlocks) {
    for (const std::int64_t tokens : kTokenCounts) {
      for (const DType dtype : kDTypes) {
        SCOPED_TRACE(::testing::Message()
                     << name(dtype) << " M=" << tokens << " block " << rows << 'x' << cols);
        const double tiny = dtype == DType::f32 ? 0x1p-145 : dtype == DType::bf16 ? 0x1p-132 : 0x1p-23;
        const auto scale = [&](std::vector<double>& numbers) {
          for (double& number : numbers) number *= tiny;
        };
        const Problem clean = make_problem({tokens, 37, 38, rows, cols, 0.2, dtype, true, 1});
        Problem weights = clean;
        scale(weights.values);
        scale(weights.bias);
        Problem gradients = clean;
        scale(gradients.dy);
        for (const Problem* problem : {&weights, &gradients}) {
          ProblemIn<HostBuffer> run(*problem);
          run_all(run);
          expect_products(*problem, run);
        }
      }
    }
  }
}

// A bias of −0, and products that are −0, give +0: a sum starts there.
TEST_P(ProductsTest, SumsStartFromPositiveZero) {
  for (const auto& [rows, cols] : kSpecialBlocks) {
    for (const std::int64_t tokens : kTokenCounts) {
      for (const double density : {0.0, 0.5, 1.0}) {
        Problem problem = make_problem({tokens, 37, 38, rows, cols, density, DType::f32, true, 1});
        for (std::vector<double>* numbers : {&problem.x, &problem.dy, &problem.bias}) {
          numbers->assign(numbers->size(), -0.0);
        }
        ProblemIn<HostBuffer> run(problem);
        run_all(run);
        SCOPED_TRACE(::testing::Message() << "M=" << tokens << " block " << rows << 'x' << cols);
        expect_products(problem, run);
      }
    }
  }
}

}  // namespace
}  // namespace rarefy::test
