// What the tests of the three products on the CPU share: a test for each family that this machine can run,
// which checks it against the reference.
#pragma once

#include "product_checks.h"

namespace rarefy::test {

inline constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

class ProductsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void check(const ProblemSpec& spec, Executor executor = {}) {
    const Problem problem = make_problem(spec);
    SCOPED_TRACE(::testing::Message()
                 << GetParam() << ' ' << name(spec.dtype) << " M=" << spec.m << " N=" << spec.n
                 << " K=" << spec.k << " block " << spec.block_rows << 'x' << spec.block_cols << " density "
                 << spec.density << " stride " << spec.stride);
    ProblemIn<HostBuffer> run(problem, executor);
    run_all(run);
    expect_products(problem, run);
  }

  static void run_all(ProblemIn<HostBuffer>& run) {
    const Force force(GetParam());
    expect_ok(run.linear(Activation::none));
    expect_ok(run.grad_input());
    expect_ok(run.grad_weight());
  }
};

}  // namespace rarefy::test
