// Whether a weight packed whole is faster than what leaves zeros out: what other rows yield to.
#pragma once

#include "core/message.h"
#include "cuda/sm90/register.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/unions.h"
#include "cuda/sm90/whole.h"

namespace rarefy::sm90 {

// A front holds one derived weight for any number of tokens: of kernels that want one it has that which takes
// least for many and for some together, so that large weights are what many tokens want, and small ones,
// where a microsecond of either is one of the other, what a small batch wants.
inline constexpr std::int64_t kManyTokens = 4096, kSomeTokens = 64;
template <class Microseconds>
double held_microseconds(Microseconds&& of_tokens) {
  return of_tokens(kManyTokens) + of_tokens(kSomeTokens);
}
inline std::string why_held(double mine, std::string_view name, double its) {
  return cat("takes ", mine, " us of ", kManyTokens, " and ", kSomeTokens, " tokens, ", name, ' ', its);
}

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

inline double held_union_microseconds(UnionProblem p, const rarefy::Machine& machine) {
  return held_microseconds([&](std::int64_t tokens) {
    p.tokens = tokens;
    return predicted_microseconds(p, sm90_machine(machine));
  });
}

// Of a kernel that takes so long (held_microseconds): where W whole is faster than it by a margin, of 4 % and
// so many microseconds or less.
inline Reason yields_to_whole(const Problem& p, const rarefy::Machine& machine, double mine,
                              double margin = 3) {
  if (!supports_whole(p, machine).empty()) return {};
  const double its = held_microseconds([&](std::int64_t tokens) {
    WholeProblem problem = whole_problem(p);
    problem.tokens = tokens;
    return best_whole(problem, machine.gpu.sms).microseconds;
  });
  return mine <= (margin > 0 ? 1.04 * its + margin : its) ? Reason() : why_held(mine, "W whole", its);
}

// Of fine blocks nearly all of a union is packed, so that W whole is no larger.
inline Reason unions_yield_to_whole(const Problem& p, const rarefy::Machine& machine) {
  const auto unions = product<UnionProblem>(p);
  return yields_to_whole(p, machine, held_union_microseconds(unions, machine), unions.fine() ? 0 : 3);
}

inline WholeGradient whole_gradient(const Problem& p) { return WholeGradient(product<Product>(p)); }

// All of W's gradient, and reading out what is stored.
inline double whole_gradient_microseconds(const Problem& p, const rarefy::Machine& machine) {
  const double values = static_cast<double>(p.weight.shape.rows * p.weight.shape.cols) * 1e-6;
  return best_whole(whole_gradient(p).product, machine.gpu.sms).microseconds + 4 + 0.6 * values;
}

}  // namespace rarefy::sm90
