// What the tests of products in bf16 pairs share: a test for each family that has them, which checks it
// against the reference.
#pragma once

#include "product_checks.h"

namespace rarefy::test {

// The families whose rows take bf16 in pairs, of those that this machine can run.
inline std::vector<std::string> pair_families() {
  rarefy::Problem asked = make_problem(Op::linear, {16, 2, 16, 2, 1}, 8, DType::bf16);
  asked.derived = kAnyDerived;
  std::vector<std::string> families;
  for (const Candidate& candidate : explain(asked).candidates) {
    const bool pairs = candidate.kernel.family == "amx" || candidate.kernel.family == "avx512_bf16" ||
                       candidate.kernel.family == "pairs";
    if (pairs && candidate.why_not.empty()) families.push_back(candidate.kernel.family);
  }
  return families;
}

class PairsTest : public ::testing::TestWithParam<std::string> {
 protected:
  static void run_all(ProblemIn<HostBuffer>& run) {
    const Force force(GetParam());
    run.hold_derived();
    expect_ok(run.linear(Activation::none));
  }
  static bool stores_a_fifth(const Problem& problem) {
    const BsrShape& s = problem.pattern.shape();
    return 5 * s.nnzb >= s.row_count() * s.col_count();
  }
  static void check_grad_weight(const Problem& problem, ProblemIn<HostBuffer>& run) {
    const ProblemSpec& spec = problem.spec;
    const bool columns = spec.block_cols == 1 && spec.block_rows % 16 == 0;
    const bool tiles = GetParam() != "avx512_bf16" && stores_a_fifth(problem);  // of 32 x 32
    if (!tiles && !columns && (spec.block_cols % 16 != 0 || spec.block_rows < 8)) return;
    if (spec.m < 32) return;
    const Force force(GetParam());
    expect_ok(run.grad_weight());
    expect_grad_weight(problem, run);
  }
  void check(ProblemSpec spec, Executor executor = {}) {
    spec.dtype = DType::bf16;
    const Problem problem = make_problem(spec);
    SCOPED_TRACE(::testing::Message()
                 << GetParam() << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k << " block "
                 << spec.block_rows << 'x' << spec.block_cols << " density " << spec.density);
    ProblemIn<HostBuffer> run(problem, executor);
    run_all(run);
    expect_linear(problem, run);
    check_grad_weight(problem, run);
    const bool columns = spec.block_cols == 1 && spec.block_rows % 16 == 0;
    const bool on_tiles =
        GetParam() != "avx512_bf16" && spec.m >= 256 && spec.block_rows >= 8 && stores_a_fifth(problem);
    if (spec.block_cols < 4 && !columns && !on_tiles) return;
    const Force force(GetParam());
    expect_ok(run.grad_input());
    expect_grad_input(problem, run);
  }
};

}  // namespace rarefy::test
