// What tests of kernels ask that run where the caller holds values in another order.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "product_checks.h"

namespace rarefy::test {

// The kernel that a linear call gets with what its weight holds.
inline std::string kernel_of(ProblemIn<HostBuffer>& run) {
  rarefy::Problem asked = run.problem(Op::linear);
  asked.derived = run.weight().derived.key;
  return explain(asked).kernel;
}

// The fewest tokens whose bits are those of larger batches: up to four, and where a processor takes more of
// them by fours, have their own.
inline std::int64_t least_of_many(const Problem& problem) {
  for (std::int64_t tokens = 5;; ++tokens) {
    Problem some = of_tokens(problem, 0, tokens);
    ProblemIn<HostBuffer> run(some);
    if (!kernel_of(run).ends_with("_few")) return tokens;
  }
}

// A token's bits depend neither on the batch, of 1 to 4, nor on threads; what is held and packed in the call
// has the same.
inline void expect_same_bits_in_any_batch(const Problem& problem) {
  std::set<std::vector<std::byte>> bits;
  for (const std::int64_t tokens : {1, 2, 3, 4}) {
    for (const bool packed : {true, false}) {
      Problem some = problem;
      some.spec.m = tokens;
      some.x.resize(static_cast<std::size_t>(tokens * problem.x_stride()));
      ThreadPool pool(static_cast<int>(tokens));
      ProblemIn<HostBuffer> run(some, pool.executor());
      packed ? run.hold_derived() : run.hold_prepared_alone();
      expect_ok(run.linear(Activation::none));
      const std::vector<std::byte> y = run.y().download();
      bits.insert(std::vector<std::byte>(y.begin(), y.begin() + 4 * problem.spec.n));
    }
  }
  EXPECT_EQ(bits.size(), 1U);
}

}  // namespace rarefy::test
