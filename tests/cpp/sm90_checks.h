// What the tests of the Hopper kernels share: where they can run, which kernel a problem gets, and inputs
// that are not finite where many rows of W store nothing.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "cuda_device.h"
#include "product_checks.h"

namespace rarefy::test {

class Sm90Test : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
    if (backend_info().cuda_devices[0].arch != 90) GTEST_SKIP() << "no GPU of compute capability 9.0";
  }

  // Of a caller that holds what the kernel wants.
  static std::string kernel_of(ProblemIn<DeviceBuffer>& gpu, Op op) {
    rarefy::Problem asked = gpu.problem(op);
    asked.derived = kAnyDerived;
    return explain(asked).kernel;
  }
};

inline ::testing::Message text_of(const ProblemSpec& spec) {
  return ::testing::Message() << name(spec.dtype) << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k
                              << " block " << spec.block_rows << "x" << spec.block_cols << " density "
                              << spec.density << " x " << name(spec.x_layout) << " y " << name(spec.y_layout)
                              << (spec.integers ? " integers" : "");
}

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
