// What the tests of the CUDA kernels share: where they can run, families that are forced, and which kernel a
// problem gets.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "cuda_device.h"
#include "product_checks.h"

namespace rarefy::test {

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

inline bool runs_sm90() { return backend_info().cuda_devices[0].arch == 90; }
inline bool runs_sm80() { return backend_info().cuda_devices[0].arch >= 80; }

inline ::testing::Message text_of(const ProblemSpec& spec) {
  return ::testing::Message() << name(spec.dtype) << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k
                              << " block " << spec.block_rows << "x" << spec.block_cols << " density "
                              << spec.density << " stride " << spec.stride << ", x " << name(spec.x_layout)
                              << ", y " << name(spec.y_layout) << (spec.integers ? ", integers" : "");
}

// A family, forced. simt takes every problem; another family leaves out what it says it cannot have, and a
// test in which nothing is left fails. Callers hold what its kernels derive from a weight.
class CudaFamilyTest : public CudaTest {
 protected:
  void set_family(const std::string& family) {
    if (IsSkipped()) return;
    if (family == "sm90" && !runs_sm90()) GTEST_SKIP() << "no GPU of compute capability 9.0";
    if (family == "sm80" && !runs_sm80()) GTEST_SKIP() << "no GPU of compute capability 8.0";
    family_ = family;
    force_.emplace("cuda:" + family);
  }
  void TearDown() override {
    if (!IsSkipped()) {
      EXPECT_GT(taken_, 0) << family_ << " takes nothing of this";
    }
    force_.reset();
  }

  ProblemIn<DeviceBuffer> make(const Problem& problem) const {
    ProblemIn<DeviceBuffer> gpu(problem);
    if (family_ != "simt") gpu.hold_derived(4096);  // as a front does, for whatever tokens come
    return gpu;
  }
  bool takes(const ProblemIn<DeviceBuffer>& gpu, Op op, Activation activation = Activation::none) {
    rarefy::Problem asked = gpu.problem(op);
    asked.bias = op == Op::linear;
    asked.activation = activation;
    asked.derived = kAnyDerived;
    const bool takes = !explain(asked).kernel.empty();
    EXPECT_TRUE(takes || family_ != "simt") << to_string(explain(asked));
    taken_ += takes ? 1 : 0;
    return takes;
  }
  void check_products(const ProblemSpec& spec) {
    SCOPED_TRACE(text_of(spec));
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu = make(problem);
    if (takes(gpu, Op::linear)) {
      expect_ok(gpu.linear(Activation::none));
      expect_linear(problem, gpu);
    }
    if (takes(gpu, Op::grad_input)) {
      expect_ok(gpu.grad_input());
      expect_grad_input(problem, gpu);
    }
    if (problem.pattern.shape().nnzb == 0 || takes(gpu, Op::grad_weight)) {
      expect_ok(gpu.grad_weight());
      expect_grad_weight(problem, gpu);
    }
  }

  std::string family_;
  int taken_ = 0;
  std::optional<Force> force_;
};

}  // namespace rarefy::test
