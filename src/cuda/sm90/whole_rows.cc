// The rows of the dense product of weights packed whole: linear and grad_input, which share what is packed,
// and grad_weight.
#include <algorithm>

#include "cuda/sm90/register.h"
#include "cuda/sm90/unions.h"
#include "cuda/sm90/whole_choice.h"
#include "cuda/status.h"

namespace rarefy::sm90 {
namespace {

struct WholeChoice {
  std::int64_t tokens = 256, split = 1, more = 0, sms = 132, features = 128;
  static constexpr std::string_view kFields[] = {"tokens", "split", "more", "sms", "features"};
  WholeConfig config() const {
    return {static_cast<int>(tokens), static_cast<int>(split), static_cast<int>(more),
            static_cast<int>(features)};
  }
};

WholeChoice choice_of(const WholeConfig& c, const rarefy::Machine& machine) {
  return {c.tokens, c.split, c.more, machine.gpu.sms, c.features};
}

// X by feature only where this is what callers hold for X by token.
Reason supports_linear(const Problem& p, const rarefy::Machine& machine) {
  if (p.in_layout == Layout::by_feature) {
    const BsrShape& s = p.weight.shape;
    if (s.block_rows % 64 == 0 && (s.block_cols % 64 == 0 || s.block_cols == 1))
      return "leaves blocks with kernels of their own to these, where X is by feature";
    if (unions_yield_to_whole(p, machine).empty())
      return "leaves X by feature to others, as unions are as fast by token";
  }
  return supports_whole(p, machine);
}

// What simt_few_linear takes of few tokens, in us: 4, and so much for each MB of values with 1, 4, 8 and 16
// tokens (an H200, 4096→14336 and 4096², .05 to .75; docs/design/hopper/sweep.md).
double few_microseconds(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  constexpr double kRows[] = {.6, .75, 1.1, 2}, kColumns[] = {.7, 1.1, 1.3, 2.5};
  constexpr double kOthers[] = {1.35, 1.8, 1.8, 1.8}, kSingle[] = {2.4, 3.8, 3.8, 3.8};  // of up to four
  const double* rates = s.block_cols % 8 == 0                        ? kRows
                        : s.block_cols == 1 && s.block_rows % 8 == 0 ? kColumns
                        : s.block_size() == 1                        ? kSingle
                                                                     : kOthers;
  const int at = p.tokens == 1 ? 0 : p.tokens <= 4 ? 1 : p.tokens <= 8 ? 2 : 3;
  return 4 + rates[at] * static_cast<double>(s.value_count()) * 2e-6;
}

// Many blocks are as many reads, and all of W may be less work.
Reason yields_few(const Problem& p, const rarefy::Machine& machine) {
  Reason reason = refuses_few(p);
  if (reason.empty()) return reason;
  const BsrShape& s = p.weight.shape;
  const double few = few_microseconds(p);
  if (few <= reading_microseconds(s.rows * s.cols * 2, machine)) return reason;
  return few > in_a_chain(best_whole(whole_problem(p), machine.gpu.sms).microseconds) ? Reason() : reason;
}

Config configure(const Problem& p, const rarefy::Machine& machine) {
  return to_config(choice_of(best_whole(whole_problem(p), machine.gpu.sms).config, machine));
}

std::vector<Config> candidates(const Problem& p, const rarefy::Machine& machine) {
  std::vector<Config> all;
  for (const WholeCandidate& c : whole_candidates(whole_problem(p), machine.gpu.sms)) {
    if (c.reason.empty()) all.push_back(to_config(choice_of(c.config, machine)));
  }
  return all;
}

double microseconds(const Problem& p, const Config& config, const rarefy::Machine& machine) {
  return microseconds_of(whole_candidates(whole_problem(p), machine.gpu.sms), config,
                         [&](const WholeConfig& c) { return to_config(choice_of(c, machine)); });
}

double gradient_microseconds(const Problem& p, const Config& /*config*/, const rarefy::Machine& machine) {
  return in_a_chain(whole_gradient_microseconds(p, machine));
}

std::int64_t packed_size(const Problem& p, const Config& /*config*/) {
  return WholeWeight(whole_problem(p)).bytes();
}

Status pack_whole(const Call& call, void* packed) {
  return cuda::launch_status(
      name(call.problem.op),
      pack(whole_problem(call.problem), ProductIndex{call.plan.crow, call.plan.col, nullptr}, call.values,
           packed, static_cast<cudaStream_t>(call.stream)));
}

// A forced config may hold anything.
Status check(const Problem& p, const WholeProblem& problem, const WholeChoice& choice) {
  if (choice.sms < 1 || choice.sms > INT32_MAX)
    return invalid(name(p.op), "sms of the config must be positive", cat(choice.sms));
  for (const std::int64_t field : {choice.tokens, choice.split, choice.more, choice.features}) {
    if (field < 0 || field > INT32_MAX)
      return invalid(name(p.op), "fields of the config are in 32 bits", cat(field));
  }
  if (const std::string reason = refuse(problem, choice.config()); !reason.empty())
    return invalid(name(p.op), reason, choice.config().text());
  return {};
}

Status run(const Call& call) {
  const Problem& p = call.problem;
  const auto choice = from_config<WholeChoice>(call.config);
  const WholeProblem problem = whole_problem(p);
  if (Status status = check(p, problem, choice); !status.ok()) return status;
  const WholeOperands operands{p.op == Op::grad_input ? call.dy.data : call.x.data,
                               call.derived.packed,
                               call.bias,
                               call.out.data,
                               {problem, index_of(call), call.values}};
  return cuda::launch_status(
      name(p.op), launch(problem, choice.config(), static_cast<int>(choice.sms), WholeWeight(problem),
                         operands, static_cast<cudaStream_t>(call.stream)));
}

// grad_weight of blocks of any shape: made whole in workspace, and what is stored read out of it ------------

Reason supports_gradient(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.in != DType::bf16 && p.in != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  const BsrShape& s = p.weight.shape;
  for (const auto& [stride, size] : {std::pair{p.in_stride, s.rows}, {p.out_stride, s.cols}}) {
    if (stride % 8 != 0 || stride < size) return "TMA needs rows of dY and X 16 bytes apart";
  }
  if (s.block_rows > INT32_MAX / (s.cols + s.block_cols))
    return "values of a block row are counted in 32 bits";
  return unsupported(whole_gradient(p).product);
}

Reason yields_gradient(const Problem& p, const rarefy::Machine& machine) {
  const BsrShape& s = p.weight.shape;
  if (s.block_rows % 16 == 0 && s.block_cols % 16 == 0)
    return "leaves blocks of 16 to kernels with tiles of them";
  const FineGradientTimes times(s, p.tokens);
  const double mine = whole_gradient_microseconds(p, machine), its = std::min(times.plain(), times.whole());
  return mine <= its ? Reason() : cat("takes ", mine, " us, others ", its);
}

Config configure_gradient(const Problem& p, const rarefy::Machine& machine) {
  return to_config(choice_of(best_whole(whole_gradient(p).product, machine.gpu.sms).config, machine));
}

std::int64_t gradient_workspace(const Problem& p, const Config& /*config*/) {
  return whole_gradient(p).lies.bytes();
}

Status run_gradient(const Call& call) {
  const Problem& p = call.problem;
  const auto choice = from_config<WholeChoice>(call.config);
  const WholeGradient gradient = whole_gradient(p);
  if (Status status = check(p, gradient.product, choice); !status.ok()) return status;
  const bool by_column = gradient.lies.by_column;
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  WholeOperands operands;
  operands.x = by_column ? call.x.data : call.dy.data;
  operands.packed = by_column ? call.dy.data : call.x.data;
  operands.y = call.workspace;
  cudaError_t error = launch(gradient.product, choice.config(), static_cast<int>(choice.sms),
                             gradient.operand, operands, stream);
  if (error == cudaSuccess)
    error = read_stored(product<Product>(p), {call.plan.crow, call.plan.col, nullptr}, call.workspace,
                        call.dvalues, stream);
  return cuda::launch_status("grad_weight", error);
}

Kernel whole(Op op, std::string_view name) {
  return {.op = op,
          .device = Device::cuda,
          .family = "sm90",
          .name = name,
          .supports = op == Op::linear ? supports_linear : supports_whole,
          .run = run,
          .yields = yields_few,
          .any_layout = op == Op::linear,
          .configure = configure,
          .fields = WholeChoice::kFields,
          .candidates = candidates,
          .microseconds = microseconds,
          .derives_as = "sm90_whole",
          .packed_size = packed_size,
          .pack = pack_whole};
}

}  // namespace

void add_whole_rows(Registry& registry) {
  registry.push_back(whole(Op::linear, "sm90_whole_linear"));
  registry.push_back(whole(Op::grad_input, "sm90_whole_grad_input"));
  registry.push_back({.op = Op::grad_weight,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_whole_gradient",
                      .supports = supports_gradient,
                      .run = run_gradient,
                      .yields = yields_gradient,
                      .configure = configure_gradient,
                      .fields = WholeChoice::kFields,
                      .workspace = gradient_workspace,
                      .microseconds = gradient_microseconds});
}

}  // namespace rarefy::sm90
