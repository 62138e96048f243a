// What the tests of the Hopper kernels share: where they can run, which kernel a problem gets, and inputs
// that are not finite where many rows of W store nothing.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_checks.h"

namespace rarefy::test {

class Sm90Test : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && !runs_sm90()) GTEST_SKIP() << "no GPU of compute capability 9.0";
  }

  // Of a caller that holds what the kernel wants.
  static std::string kernel_of(ProblemIn<DeviceBuffer>& gpu, Op op) {
    rarefy::Problem asked = gpu.problem(op);
    asked.derived = kAnyDerived;
    return explain(asked).kernel;
  }

  // The kernels that a front gets which holds what was made for 4096 tokens.
  struct Kernels {
    std::string_view linear, grad_input, grad_weight;  // grad_weight: empty where it is not asked about
    std::string forced = "cuda:sm90";
  };
  static void check_products(const ProblemSpec& spec, const Kernels& kernels) {
    SCOPED_TRACE(text_of(spec));
    const Force force(kernels.forced);
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    ASSERT_EQ(kernel_of(gpu, Op::linear), kernels.linear);
    ASSERT_EQ(kernel_of(gpu, Op::grad_input), kernels.grad_input);
    if (!kernels.grad_weight.empty()) {
      ASSERT_EQ(kernel_of(gpu, Op::grad_weight), kernels.grad_weight);
    }
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
    expect_ok(gpu.grad_input());
    expect_grad_input(problem, gpu);
    if (kernels.grad_weight.empty()) return;
    expect_ok(gpu.grad_weight());
    expect_grad_weight(problem, gpu);
  }

  // 1,000 calls, each of which must leave the bits of the first. Results come back 50 at a time.
  static void expect_equal_repeats(ProblemIn<DeviceBuffer>& gpu, Op op) {
    constexpr int kTogether = 50;
    const auto run = [&] {
      return op == Op::linear       ? gpu.linear(Activation::none)
             : op == Op::grad_input ? gpu.grad_input()
                                    : gpu.grad_weight();
    };
    Guarded<DeviceBuffer>& out = op == Op::linear ? gpu.y() : op == Op::grad_input ? gpu.dx() : gpu.dvalues();
    out.poison();
    expect_ok(run());
    const std::vector<std::byte> first = out.download();
    const DeviceBuffer results(kTogether * first.size());
    for (int call = 0; call < 1000; call += kTogether) {
      for (int i = 0; i < kTogether; ++i) {
        require(cudaMemsetAsync(out.data(), 0xff, first.size(), nullptr), "cudaMemset");
        expect_ok(run());
        auto* const to = static_cast<std::byte*>(results.data()) + static_cast<std::size_t>(i) * first.size();
        require(cudaMemcpyAsync(to, out.data(), first.size(), cudaMemcpyDeviceToDevice, nullptr), "copy");
      }
      const std::vector<std::byte> got = results.download();
      for (auto at = got.begin(); at != got.end(); at += std::ssize(first)) {
        ASSERT_TRUE(std::equal(first.begin(), first.end(), at)) << name(op) << ", of calls from " << call;
      }
    }
  }

  // `kernel` is what linear must get.
  static void check(const ProblemSpec& spec, std::string_view kernel) {
    SCOPED_TRACE(text_of(spec));
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(kernel == "sm90_decode" ? 0 : 4096);  // as a front does, for whatever tokens come
    rarefy::Problem asked = gpu.problem(Op::linear);
    asked.bias = true;
    asked.derived = kAnyDerived;
    ASSERT_EQ(explain(asked).kernel, kernel) << to_string(explain(asked));
    const Force force("cuda:sm90");
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
    if (spec.x_layout == Layout::by_feature || spec.y_layout == Layout::by_feature) return;
    asked = gpu.problem(Op::grad_input);
    asked.derived = kAnyDerived;
    if (explain(asked).kernel.empty()) return;
    expect_ok(gpu.grad_input());
    expect_grad_input(problem, gpu);
  }
};

// An Inf, a NaN or both in some tokens of x and of dy.
inline void add_specials(Problem& problem) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const ProblemSpec& spec = problem.spec;
  for (std::int64_t t = 0; t < spec.m; ++t) {
    double* x = &problem.x[static_cast<std::size_t>(t * spec.k)];
    double* dy = &problem.dy[static_cast<std::size_t>(t * spec.n)];
    if (t % 3 == 0) x[t * 31 % spec.k] = t % 2 == 0 ? inf : -inf;
    if (t % 5 == 0) x[t * 17 % spec.k] = nan;
    if (t % 3 == 1) dy[t * 29 % spec.n] = t % 2 == 0 ? inf : -inf;
    if (t % 7 == 0) dy[t * 13 % spec.n] = nan;
  }
}

}  // namespace rarefy::test
