// What the products must give: the reference in double, a bound for each element, exact integers.
#pragma once

#include <gtest/gtest.h>

#include "problem.h"

namespace rarefy::test {

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

// Unit roundoff.
inline double roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::f16: return 0x1p-11;
    default: return 0x1p-8;
  }
}

// What an element must be, and how far from it a sum of `terms` products may end up.
struct Expected {
  std::vector<double> value, magnitude;  // magnitude: the same product of absolute values
  double terms;
};

inline std::vector<double> absolute(std::vector<double> numbers) {
  for (double& number : numbers) number = std::abs(number);
  return numbers;
}

inline Context oracle_context() {
  static ThreadPool pool(0);
  return {pool.executor()};
}

// The three products on the host, in double: the reference kernels.
struct Host {
  const Problem& problem;

  std::vector<double> linear(const std::vector<double>& x, const std::vector<double>& values,
                             const std::vector<double>* bias, Activation activation) const {
    const ProblemSpec& s = problem.spec;
    std::vector<double> y(static_cast<std::size_t>(s.m * s.n));
    expect_ok(rarefy::linear({x.data(), DType::f64, s.m, s.k, problem.x_stride()},
                             {problem.pattern.view(), values.data(), DType::f64},
                             bias == nullptr ? nullptr : bias->data(), activation,
                             {y.data(), DType::f64, s.m, s.n, s.n}, oracle_context()));
    return y;
  }
  std::vector<double> grad_input(const std::vector<double>& dy, const std::vector<double>& values) const {
    const ProblemSpec& s = problem.spec;
    std::vector<double> dx(static_cast<std::size_t>(s.m * s.k));
    expect_ok(rarefy::grad_input({dy.data(), DType::f64, s.m, s.n, problem.y_stride()},
                                 {problem.pattern.view(), values.data(), DType::f64},
                                 {dx.data(), DType::f64, s.m, s.k, s.k}, oracle_context()));
    return dx;
  }
  std::vector<double> grad_weight(const std::vector<double>& dy, const std::vector<double>& x) const {
    const ProblemSpec& s = problem.spec;
    std::vector<double> dvalues(problem.values.size());
    expect_ok(rarefy::grad_weight({dy.data(), DType::f64, s.m, s.n, problem.y_stride()},
                                  {x.data(), DType::f64, s.m, s.k, problem.x_stride()},
                                  problem.pattern.view(), dvalues.data(), DType::f64, oracle_context()));
    return dvalues;
  }
};

// Per element: |got − value| ≤ terms · u_acc · magnitude + u_out · |value|; integers exactly. Gaps
// between rows must still be poison.
template <class Buffer>
void expect_close(const char* what, const ProblemSpec& spec, const Guarded<Buffer>& output, std::int64_t cols,
                  std::int64_t stride, const Expected& expected, bool exact) {
  SCOPED_TRACE(what);
  const std::vector<std::byte> bytes = output.download();
  const std::vector<double> got = decode(bytes, spec.dtype);
  // An exact sum of integers is still rounded when the output dtype cannot hold it.
  const std::vector<double> rounded = decode(encode(expected.value, spec.dtype), spec.dtype);
  const double u_acc = spec.dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  const double u_out = roundoff(spec.dtype);
  const double smallest = spec.dtype == DType::f16 ? 0x1p-25 : 0;  // half of a subnormal step
  for (std::size_t t = 0; t < got.size(); ++t) {
    const auto row = static_cast<std::int64_t>(t) / stride;
    const auto col = static_cast<std::int64_t>(t) % stride;
    if (col >= cols) {
      const std::size_t size = size_of(spec.dtype);
      for (std::size_t b = 0; b < size; ++b) {
        ASSERT_EQ(bytes[t * size + b], kPoison) << "gap after row " << row;
      }
      continue;
    }
    const auto e = static_cast<std::size_t>(row * cols + col);
    const double value = expected.value[e];
    const double bound = (expected.terms + 2) * u_acc * expected.magnitude[e] * (1 + u_out) +
                         u_out * std::abs(value) + smallest;
    if (exact) {
      ASSERT_EQ(got[t], rounded[e]) << '(' << row << ", " << col << ')';
    } else {
      ASSERT_LE(std::abs(got[t] - value), bound) << '(' << row << ", " << col << ')';
    }
  }
}

// What `run` wrote, without an activation.
template <class Buffer>
void expect_products(const Problem& problem, ProblemIn<Buffer>& run) {
  const ProblemSpec& spec = problem.spec;
  const Host host{problem};
  const auto abs_x = absolute(problem.x), abs_dy = absolute(problem.dy),
             abs_values = absolute(problem.values), abs_bias = absolute(problem.bias);
  const std::int64_t value_count = std::max<std::int64_t>(problem.pattern.shape().value_count(), 1);
  expect_close("linear", spec, run.y(), spec.n, problem.y_stride(),
               {host.linear(problem.x, problem.values, &problem.bias, Activation::none),
                host.linear(abs_x, abs_values, &abs_bias, Activation::none), static_cast<double>(spec.k)},
               spec.integers);
  expect_close("grad_input", spec, run.dx(), spec.k, problem.dx_stride(),
               {host.grad_input(problem.dy, problem.values), host.grad_input(abs_dy, abs_values),
                static_cast<double>(spec.n)},
               spec.integers);
  expect_close(
      "grad_weight", spec, run.dvalues(), value_count, value_count,
      {host.grad_weight(problem.dy, problem.x), host.grad_weight(abs_dy, abs_x), static_cast<double>(spec.m)},
      spec.integers);
}

template <class Buffer>
void expect_activation(const Problem& problem, ProblemIn<Buffer>& run, Activation activation) {
  const Host host{problem};
  const auto abs_bias = absolute(problem.bias);
  // The slope of an activation is below 1.2, and it is computed to 8 units of |its argument| + 1.
  Expected expected{host.linear(problem.x, problem.values, &problem.bias, activation),
                    host.linear(absolute(problem.x), absolute(problem.values), &abs_bias, Activation::none),
                    1.2 * static_cast<double>(problem.spec.k) + 8};
  for (double& magnitude : expected.magnitude) magnitude += 1;
  expect_close("linear", problem.spec, run.y(), problem.spec.n, problem.y_stride(), expected, false);
}

// For integers with NaN or infinity among them: NaN where the reference has one, else the same.
template <class Buffer>
void expect_same_or_nan(const Problem& problem, ProblemIn<Buffer>& run) {
  const Host host{problem};
  const auto expect_same = [&](const Guarded<Buffer>& output, const std::vector<double>& expected) {
    const std::vector<double> got = decode(output.download(), problem.spec.dtype);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t e = 0; e < got.size(); ++e) {
      if (std::isnan(expected[e])) {
        ASSERT_TRUE(std::isnan(got[e])) << e;
      } else {
        ASSERT_EQ(got[e], expected[e]) << e;
      }
    }
  };
  expect_same(run.y(), host.linear(problem.x, problem.values, &problem.bias, Activation::none));
  expect_same(run.dx(), host.grad_input(problem.dy, problem.values));
  expect_same(run.dvalues(), host.grad_weight(problem.dy, problem.x));
}

}  // namespace rarefy::test
