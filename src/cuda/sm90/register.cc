// The sm90 family's rows: problems of the core as the kernels' own, and their plans as prepared buffers.
#include "cuda/sm90/register.h"

#include <vector>

#include "core/message.h"
#include "cuda/sm90/block_gradient.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/strips.h"
#include "cuda/status.h"

namespace rarefy::sm90 {

Reason supports_family(const Problem& p, const rarefy::Machine& machine) {
  if (machine.gpu.arch != 90) return cat("needs compute capability 9.0; got sm_", machine.gpu.arch);
  if (p.weight.dtype != p.in || p.out != p.in) {
    return cat("takes one dtype for inputs, values and outputs; got ", name(p.in), ", ", name(p.weight.dtype),
               " and ", name(p.out));
  }
  if (p.in_alignment < 16) return cat("needs inputs and values aligned to 16 bytes; got ", p.in_alignment);
  return {};
}

namespace {

// Up to 16 tokens ---------------------------------------------------------------------------------------

struct Split {
  std::int64_t split = 1;  // thread blocks of a cluster, which share a strip's stored blocks
  static constexpr std::string_view kFields[] = {"split"};
};

DecodeProblem decode_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in,         p.tokens, s.rows,      s.cols,       s.block_rows,
          s.block_cols, s.nnzb,   p.in_stride, p.out_stride, p.activation};
}

Reason supports_decode(const Problem& p, const rarefy::Machine& machine) {
  Reason reason = supports_family(p, machine);
  return reason.empty() ? unsupported(decode_problem(p)) : reason;
}

Config configure_decode(const Problem& p, const rarefy::Machine& machine) {
  return to_config(Split{configure(decode_problem(p), machine.gpu.sms).split});
}

std::vector<Config> candidates_decode(const Problem& p, const rarefy::Machine& /*machine*/) {
  std::vector<Config> all;
  for (const DecodeCandidate& c : decode_candidates(decode_problem(p))) {
    if (c.reason.empty()) all.push_back(to_config(Split{c.config.split}));
  }
  return all;
}

Status run_decode(const Call& call) {
  const DecodeOperands operands{call.x.data,   call.values, call.plan.crow,
                                call.plan.col, call.bias,   call.out.data};
  const DecodeConfig config{static_cast<int>(from_config<Split>(call.config).split)};
  return cuda::launch_status("linear", launch(decode_problem(call.problem), config, operands,
                                              static_cast<cudaStream_t>(call.stream)));
}

// Strips ------------------------------------------------------------------------------------------------

// StripConfig as the registry keeps it; `sms` are the thread blocks that the GPU runs at once.
struct StripChoice {
  std::int64_t strips = 2, tokens = 256, cluster = 1, slots = 5, w_slots = 8, sms = 132;
  static constexpr std::string_view kFields[] = {"strips", "tokens", "cluster", "slots", "w_slots", "sms"};

  StripConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(strips), n(tokens), n(cluster), n(slots), n(w_slots)};
  }
};

StripProblem strip_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.op == Op::grad_input, p.in,   p.tokens,    s.rows,       s.cols,      s.block_rows,
          s.block_cols,           s.nnzb, p.in_stride, p.out_stride, p.activation};
}

Reason supports_strips(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs outputs and bias aligned to 16 bytes; got ", p.out_alignment);
  return unsupported(strip_problem(p));
}

Machine sm90_machine(const rarefy::Machine& machine) {
  return {machine.gpu.sms, static_cast<int>(machine.gpu.shared_memory)};
}

Config choice_of(const StripConfig& c, const rarefy::Machine& machine) {
  return to_config(StripChoice{c.strips, c.tokens, c.cluster, c.slots, c.w_slots, machine.gpu.sms});
}

Config configure_strips(const Problem& p, const rarefy::Machine& machine) {
  return choice_of(configure(strip_problem(p), sm90_machine(machine)), machine);
}

std::vector<Config> candidates_strips(const Problem& p, const rarefy::Machine& machine) {
  std::vector<Config> all;
  for (const StripCandidate& c : strip_candidates(strip_problem(p), sm90_machine(machine))) {
    if (c.reason.empty()) all.push_back(choice_of(c.config, machine));
  }
  return all;
}

int sms_of(const Config& config) { return static_cast<int>(from_config<StripChoice>(config).sms); }

std::int64_t prepared_size(const Problem& p, const Config& config) {
  return StripPlan(strip_problem(p), sms_of(config)).words * static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status prepare_strips(const Call& call, void* prepared) {
  const PlanView& plan = call.plan;
  const StripProblem problem = strip_problem(call.problem);
  const StripIndex index = problem.transposed ? StripIndex{plan.ccol, plan.row, plan.perm}
                                              : StripIndex{plan.crow, plan.col, nullptr};
  return cuda::launch_status(name(call.problem.op), prepare(problem, sms_of(call.config), index,
                                                            static_cast<std::int32_t*>(prepared),
                                                            static_cast<cudaStream_t>(call.stream)));
}

Status run_strips(const Call& call) {
  const StripProblem problem = strip_problem(call.problem);
  const StripOperands operands{problem.transposed ? call.dy.data : call.x.data, call.values, call.bias,
                               call.out.data, static_cast<const std::int32_t*>(call.derived.prepared)};
  return cuda::launch_status(name(call.problem.op),
                             launch(problem, from_config<StripChoice>(call.config).config(),
                                    sms_of(call.config), operands, static_cast<cudaStream_t>(call.stream)));
}

Kernel strips(Op op, std::string_view name) {
  return {.op = op,
          .device = Device::cuda,
          .family = "sm90",
          .name = name,
          .supports = supports_strips,
          .run = run_strips,
          .configure = configure_strips,
          .fields = StripChoice::kFields,
          .candidates = candidates_strips,
          .prepared_size = prepared_size,
          .prepare = prepare_strips};
}

// The gradient of stored blocks -------------------------------------------------------------------------

struct GradientChoice {
  std::int64_t split = 1, strips = 2;
  static constexpr std::string_view kFields[] = {"split", "strips"};
  GradientConfig config() const { return {static_cast<int>(split), strips == 2}; }
};

GradientProblem gradient_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in, p.tokens, s.rows, s.cols, s.block_rows, s.block_cols, s.nnzb, p.in_stride, p.out_stride};
}

Reason supports_gradient(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs gradients aligned to 16 bytes; got ", p.out_alignment);
  return unsupported(gradient_problem(p));
}

Config gradient_config(const GradientConfig& c) { return to_config(GradientChoice{c.split, c.two ? 2 : 1}); }

Config configure_gradient(const Problem& p, const rarefy::Machine& machine) {
  return gradient_config(configure(gradient_problem(p), sm90_machine(machine)));
}

std::vector<Config> candidates_gradient(const Problem& p, const rarefy::Machine& machine) {
  std::vector<Config> all;
  for (const GradientCandidate& c : gradient_candidates(gradient_problem(p), sm90_machine(machine))) {
    if (c.reason.empty()) all.push_back(gradient_config(c.config));
  }
  return all;
}

std::int64_t gradient_prepared_size(const Problem& p, const Config& config) {
  return tiles_at_most(gradient_problem(p), from_config<GradientChoice>(config).config()) * kTileWords *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status prepare_gradient(const Call& call, void* prepared) {
  return cuda::launch_status(
      "grad_weight", prepare(gradient_problem(call.problem),
                             from_config<GradientChoice>(call.config).config(), call.plan.crow, call.plan.col,
                             static_cast<std::int32_t*>(prepared), static_cast<cudaStream_t>(call.stream)));
}

Status run_gradient(const Call& call) {
  const GradientOperands operands{call.dy.data,   call.x.data,
                                  call.plan.crow, call.plan.col,
                                  call.dvalues,   static_cast<const std::int32_t*>(call.derived.prepared)};
  return cuda::launch_status(
      "grad_weight", launch(gradient_problem(call.problem), from_config<GradientChoice>(call.config).config(),
                            operands, static_cast<cudaStream_t>(call.stream)));
}

}  // namespace

void add_rows(Registry& registry) {
  registry.push_back({.op = Op::linear,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_decode",
                      .supports = supports_decode,
                      .run = run_decode,
                      .configure = configure_decode,
                      .fields = Split::kFields,
                      .candidates = candidates_decode});
  registry.push_back(strips(Op::linear, "sm90_strips_linear"));
  registry.push_back(strips(Op::grad_input, "sm90_strips_grad_input"));
  add_tall_rows(registry);
  registry.push_back({.op = Op::grad_weight,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_block_gradient",
                      .supports = supports_gradient,
                      .run = run_gradient,
                      .configure = configure_gradient,
                      .fields = GradientChoice::kFields,
                      .candidates = candidates_gradient,
                      .derived_optional = true,
                      .prepared_size = gradient_prepared_size,
                      .prepare = prepare_gradient});
}

}  // namespace rarefy::sm90
