// Whether a weight packed whole is faster than what leaves zeros out: what other rows yield to.
#pragma once

#include "core/message.h"
#include "cuda/sm90/register.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/whole.h"

namespace rarefy::sm90 {

// A front holds one derived weight for any number of tokens: of kernels that want one it has that of many.
inline constexpr std::int64_t kManyTokens = 4096;

inline WholeProblem whole_problem(const Problem& p) {
  auto problem = product<WholeProblem>(p);
  problem.x_layout = p.in_layout;
  return problem;
}

inline Reason supports_whole(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs outputs and bias aligned to 16 bytes; got ", p.out_alignment);
  if (p.out_layout == Layout::by_feature) return "gives Y by token";
  return unsupported(whole_problem(p));
}

// Of a kernel that takes so long for kManyTokens: where W whole is clearly faster, as it wants more memory.
inline Reason yields_to_whole(const Problem& p, const rarefy::Machine& machine, double mine) {
  if (!supports_whole(p, machine).empty()) return {};
  WholeProblem many = whole_problem(p);
  many.tokens = kManyTokens;
  const double its = best_whole(many, machine.gpu.sms).microseconds;
  return mine <= 1.04 * its + 3 ? Reason()
                                : cat("takes ", mine, " us of ", kManyTokens, " tokens, W whole ", its);
}

inline WholeGradient whole_gradient(const Problem& p) { return WholeGradient(product<Product>(p)); }

// All of W's gradient, and reading out what is stored.
inline double whole_gradient_microseconds(const Problem& p, const rarefy::Machine& machine) {
  const double values = static_cast<double>(p.weight.shape.rows * p.weight.shape.cols) * 1e-6;
  return best_whole(whole_gradient(p).product, machine.gpu.sms).microseconds + 4 + 0.6 * values;
}

}  // namespace rarefy::sm90
