// What the products must give: the reference in double, the bound of docs/numerics.md for each element,
// exact integers.
#pragma once

#include <gtest/gtest.h>

#include <limits>

#include "problem.h"

namespace rarefy::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

// The families that this machine can run.
inline std::vector<std::string> cpu_impls() {
  std::vector<std::string> families;
  for (const Candidate& candidate :
       explain(make_problem(Op::grad_input, {4, 4, 4, 4, 1}, 8, DType::f32)).candidates) {
    if (candidate.why_not.empty()) families.push_back(candidate.kernel.family);
  }
  return families;
}

// Unit roundoff.
inline double roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::f16: return 0x1p-11;
    default: return 0x1p-8;
  }
}

// What the elements must be, and how far from it their sums may end up.
struct Expected {
  std::vector<double> value, magnitude;  // magnitude: the same product of absolute values
  std::vector<double> terms;             // of the sums, by column
  std::vector<double> inputs = {};       // what rounding of inputs may add; empty: they are taken as they are
};

// Of products of magnitudes that add up to these, when both factors are rounded to tf32's 11 bits.
inline std::vector<double> tf32_errors(const ProblemSpec& spec, std::vector<double> magnitude) {
  if (!spec.tf32) return {};
  for (double& m : magnitude) m *= 0x1p-10 + 0x1p-22;
  return magnitude;
}

// γ_n of docs/numerics.md: what n roundings make of a sum, relative to its magnitude.
inline double gamma(double terms, double unit) { return terms * unit / (1 - terms * unit); }

// Unit roundoff of the sums, and of storing them: 0 where an element is stored as it was summed.
inline double accumulator(DType dtype) { return dtype == DType::f64 ? 0x1p-53 : 0x1p-24; }
inline double storing(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 ? 0 : roundoff(dtype);
}

inline std::vector<double> absolute(std::vector<double> numbers) {
  for (double& number : numbers) number = std::abs(number);
  return numbers;
}

inline Context oracle_context() {
  static ThreadPool pool(0);
  return {pool.executor()};
}

// The three products on the host, in double, by the reference: forced by name, whatever the registry
// would choose.
struct Host {
  const Problem& problem;

  std::vector<double> linear(const std::vector<double>& x, const std::vector<double>& values,
                             const std::vector<double>* bias, Activation activation) const {
    const ProblemSpec& s = problem.spec;
    std::vector<double> y(static_cast<std::size_t>(s.m * s.n));
    const Force reference("ref");
    expect_ok(rarefy::linear({x.data(), DType::f64, s.m, s.k, problem.x_stride()},
                             {problem.pattern.view(), values.data(), DType::f64},
                             bias == nullptr ? nullptr : bias->data(), activation,
                             {y.data(), DType::f64, s.m, s.n, s.n}, oracle_context()));
    return y;
  }
  std::vector<double> grad_input(const std::vector<double>& dy, const std::vector<double>& values) const {
    const ProblemSpec& s = problem.spec;
    std::vector<double> dx(static_cast<std::size_t>(s.m * s.k));
    const Force reference("ref");
    expect_ok(rarefy::grad_input({dy.data(), DType::f64, s.m, s.n, problem.y_stride()},
                                 {problem.pattern.view(), values.data(), DType::f64},
                                 {dx.data(), DType::f64, s.m, s.k, s.k}, oracle_context()));
    return dx;
  }
  std::vector<double> grad_weight(const std::vector<double>& dy, const std::vector<double>& x) const {
    const ProblemSpec& s = problem.spec;
    std::vector<double> dvalues(problem.values.size());
    const Force reference("ref");
    expect_ok(rarefy::grad_weight({dy.data(), DType::f64, s.m, s.n, problem.y_stride()},
                                  {x.data(), DType::f64, s.m, s.k, problem.x_stride()},
                                  problem.pattern.view(), dvalues.data(), DType::f64, oracle_context()));
    return dvalues;
  }
};

// The same number: a NaN for a NaN, and a zero of the same sign.
inline bool same(double got, double expected) {
  if (std::isnan(expected)) return std::isnan(got);
  return got == expected && std::signbit(got) == std::signbit(expected);
}

// Per element: |got − value| ≤ γ · magnitude + u_out · |got|, with the terms of its own sum, and the
// reference's γ; integers exactly. Gaps between rows, `stride` apart (by feature: between columns, as far
// apart as spec says), must still be poison.
template <class Buffer>
void expect_close(const char* what, const ProblemSpec& spec, const Guarded<Buffer>& output, std::int64_t cols,
                  std::int64_t stride, const Expected& expected, bool exact,
                  Layout layout = Layout::by_token) {
  SCOPED_TRACE(what);
  const std::vector<std::byte> bytes = output.download();
  const std::vector<double> got = decode(bytes, spec.dtype);
  // An exact sum of integers is still rounded when the output dtype cannot hold it.
  const std::vector<double> rounded = decode(encode(expected.value, spec.dtype), spec.dtype);
  const double smallest = spec.dtype == DType::f16 ? 0x1p-25 : 0;  // half of a subnormal step
  const bool by_token = layout == Layout::by_token;
  if (!by_token) stride = spec.m + spec.stride;
  for (std::size_t t = 0; t < got.size(); ++t) {
    const auto line = static_cast<std::int64_t>(t) / stride, at = static_cast<std::int64_t>(t) % stride;
    const auto row = by_token ? line : at, col = by_token ? at : line;
    if (at >= (by_token ? cols : spec.m)) {
      const std::size_t size = size_of(spec.dtype);
      for (std::size_t b = 0; b < size; ++b) {
        ASSERT_EQ(bytes[t * size + b], kPoison) << "gap after row or column " << line;
      }
      continue;
    }
    const auto e = static_cast<std::size_t>(row * cols + col);
    if (exact) {
      ASSERT_TRUE(same(got[t], rounded[e]))
          << '(' << row << ", " << col << "): " << got[t] << " for " << rounded[e];
      continue;
    }
    const double terms = expected.terms[static_cast<std::size_t>(col)];
    const double bound = (gamma(terms, accumulator(spec.dtype)) + gamma(terms, 0x1p-53)) *
                             expected.magnitude[e] * (1 + storing(spec.dtype)) +
                         storing(spec.dtype) * std::abs(expected.value[e]) + smallest +
                         (expected.inputs.empty() ? 0 : expected.inputs[e]);
    ASSERT_LE(std::abs(got[t] - expected.value[e]), bound) << '(' << row << ", " << col << ')';
  }
}

// What `run` wrote, without an activation.
template <class Buffer>
void expect_linear(const Problem& problem, ProblemIn<Buffer>& run) {
  const Host host{problem};
  const auto abs_bias = absolute(problem.bias);
  std::vector<double> terms = problem.stored_per_row();
  for (double& count : terms) ++count;  // the bias
  const auto magnitude =
      host.linear(absolute(problem.x), absolute(problem.values), &abs_bias, Activation::none);
  expect_close("linear", problem.spec, run.y(), problem.spec.n, problem.y_stride(),
               {host.linear(problem.x, problem.values, &problem.bias, Activation::none), magnitude, terms,
                tf32_errors(problem.spec, magnitude)},
               problem.spec.integers, problem.spec.y_layout);
}

template <class Buffer>
void expect_grad_input(const Problem& problem, ProblemIn<Buffer>& run) {
  const Host host{problem};
  const auto magnitude = host.grad_input(absolute(problem.dy), absolute(problem.values));
  expect_close("grad_input", problem.spec, run.dx(), problem.spec.k, problem.dx_stride(),
               {host.grad_input(problem.dy, problem.values), magnitude, problem.stored_per_col(),
                tf32_errors(problem.spec, magnitude)},
               problem.spec.integers, problem.spec.x_layout);
}

template <class Buffer>
void expect_grad_weight(const Problem& problem, ProblemIn<Buffer>& run) {
  const ProblemSpec& spec = problem.spec;
  const Host host{problem};
  const std::int64_t value_count = problem.pattern.shape().value_count();
  const std::vector<double> tokens(static_cast<std::size_t>(value_count), static_cast<double>(spec.m));
  const auto magnitude = host.grad_weight(absolute(problem.dy), absolute(problem.x));
  expect_close("grad_weight", spec, run.dvalues(), value_count, std::max<std::int64_t>(value_count, 1),
               {host.grad_weight(problem.dy, problem.x), magnitude, tokens, tf32_errors(spec, magnitude)},
               spec.integers);
}

// Three gradients added up: written, and added twice. Of integers in 32 bits exactly; else each addition
// rounds once, and what is added is once rounded itself by kernels whose sums the core adds.
template <class Buffer>
void expect_accumulated(const Problem& problem, ProblemIn<Buffer>& run) {
  const ProblemSpec& spec = problem.spec;
  const Host host{problem};
  expect_ok(run.grad_weight());
  expect_ok(run.grad_weight(nullptr, true));
  expect_ok(run.grad_weight(nullptr, true));
  const std::int64_t value_count = problem.pattern.shape().value_count();
  std::vector<double> sum = host.grad_weight(problem.dy, problem.x),
                      magnitude = host.grad_weight(absolute(problem.dy), absolute(problem.x));
  for (double& value : sum) value *= 3;
  for (double& value : magnitude) value *= 3;
  std::vector<double> rounded = magnitude;
  for (std::size_t e = 0; e < sum.size(); ++e) rounded[e] = 5 * roundoff(spec.dtype) * std::abs(sum[e]);
  const std::vector<double> inputs = tf32_errors(spec, magnitude);
  for (std::size_t e = 0; e < inputs.size(); ++e) rounded[e] += inputs[e];
  const std::vector<double> tokens(static_cast<std::size_t>(value_count), static_cast<double>(spec.m));
  expect_close("accumulated", spec, run.dvalues(), value_count, std::max<std::int64_t>(value_count, 1),
               {sum, magnitude, tokens, rounded}, spec.integers && storing(spec.dtype) == 0);
}

template <class Buffer>
void expect_products(const Problem& problem, ProblemIn<Buffer>& run) {
  expect_linear(problem, run);
  expect_grad_input(problem, run);
  expect_grad_weight(problem, run);
}

// An activation adds to its argument's error, as far as its slope (below 1.2) passes it on, a few units of
// its own. These are relative, so that the left tails count; there e^a is as good as a, whose error is a
// few units of |a|. Results below kTail may become 0, where e^−x passes the largest float.
inline constexpr double kTail = 4e-37;

inline double activation_error(Activation activation, double x, double value, double unit) {
  if (activation == Activation::none || activation == Activation::relu) return 0;
  double a = 0;  // of e^a, where it is computed from x
  if (activation == Activation::gelu_erf && x < 0) a = x * x / 2;
  if (activation == Activation::gelu_tanh && x < 0) a = 1.6 * std::abs(x) * (1 + 0.0448 * x * x);
  return unit * (16 + 5 * a) * std::abs(value) + kTail;
}

// Kernels of bf16 pairs, and sm90's, compute activations as exactly as what results are rounded to needs: so
// much more, relative.
inline double pairs_activation_error(Activation activation, double value, DType dtype = DType::bf16) {
  if (activation == Activation::none || activation == Activation::relu) return 0;
  return (dtype == DType::f16 ? 0x1p-15 : 0x1p-12) * std::abs(value);
}

template <class Buffer>
void expect_activation(const Problem& problem, ProblemIn<Buffer>& run, Activation activation,
                       bool pairs = false) {
  const Host host{problem};
  const auto abs_bias = absolute(problem.bias);
  const DType dtype = problem.spec.dtype;
  const std::vector<double> argument =
      host.linear(problem.x, problem.values, &problem.bias, Activation::none);
  Expected expected{host.linear(problem.x, problem.values, &problem.bias, activation),
                    host.linear(absolute(problem.x), absolute(problem.values), &abs_bias, Activation::none),
                    problem.stored_per_row()};
  for (double& terms : expected.terms) ++terms;
  expected.inputs = tf32_errors(problem.spec, expected.magnitude);
  for (double& error : expected.inputs) error *= 1.2;
  // As magnitudes of the bound: 1.2 × those of the sums, and what makes γ times them the activation's error.
  for (std::size_t e = 0; e < expected.value.size(); ++e) {
    double own = activation_error(activation, argument[e], expected.value[e], accumulator(dtype));
    if (pairs) own += pairs_activation_error(activation, expected.value[e], dtype);
    const double terms = expected.terms[e % expected.terms.size()];
    expected.magnitude[e] = 1.2 * expected.magnitude[e] + own / gamma(terms, accumulator(dtype));
  }
  expect_close("linear", problem.spec, run.y(), problem.spec.n, problem.y_stride(), expected, false,
               problem.spec.y_layout);
}

// For integers with NaN or infinity among them: NaN where the reference has one, else the same. `which`: of
// linear, grad_input and grad_weight.
template <class Buffer>
void expect_same_or_nan(const Problem& problem, ProblemIn<Buffer>& run,
                        const bool (&which)[3] = {true, true, true}) {
  const Host host{problem};
  const auto expect_same = [&](const char* what, const Guarded<Buffer>& output,
                               const std::vector<double>& expected, std::int64_t cols, std::int64_t stride) {
    SCOPED_TRACE(what);
    const std::vector<double> got = decode(output.download(), problem.spec.dtype);
    for (std::size_t e = 0; e < expected.size(); ++e) {
      const std::size_t row = e / static_cast<std::size_t>(cols), col = e % static_cast<std::size_t>(cols);
      const double number = got.at(row * static_cast<std::size_t>(stride) + col);
      ASSERT_TRUE(same(number, expected[e]))
          << '(' << row << ", " << col << "): " << number << " for " << expected[e];
    }
  };
  if (which[0]) {
    expect_same("linear", run.y(), host.linear(problem.x, problem.values, &problem.bias, Activation::none),
                problem.spec.n, problem.y_stride());
  }
  if (which[1]) {
    expect_same("grad_input", run.dx(), host.grad_input(problem.dy, problem.values), problem.spec.k,
                problem.dx_stride());
  }
  if (!which[2]) return;
  const std::int64_t values = std::max<std::int64_t>(problem.pattern.shape().value_count(), 1);
  expect_same("grad_weight", run.dvalues(), host.grad_weight(problem.dy, problem.x), values, values);
}

}  // namespace rarefy::test
