// The rows of grad_weight by the block gradient kernel: of its own blocks, and of any other shape, whose
// gradient is made whole and read out where blocks are stored.
#include "core/message.h"
#include "cuda/sm90/block_gradient.h"
#include "cuda/sm90/dense_gradient.h"
#include "cuda/sm90/register.h"
#include "cuda/sm90/rows.h"
#include "cuda/status.h"

namespace rarefy::sm90 {
namespace {

struct GradientChoice {
  std::int64_t split = 1, wide = 64, strips = 2, pairs = 0, even = 0, most = 0, alone = 0, shared = 0,
               queues = 0;
  static constexpr std::string_view kFields[] = {"split", "wide",  "strips", "pairs", "even",
                                                 "most",  "alone", "shared", "queues"};
  GradientConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(split), n(wide), strips == 2, pairs != 0, even != 0, n(most), n(alone), n(shared), n(queues)};
  }
};

GradientProblem gradient_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in, p.tokens, s.rows, s.cols, s.block_rows, s.block_cols, s.nnzb, p.in_stride, p.out_stride};
}

Reason supports_gradient(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (Reason reason = refuses_f32(p); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs gradients aligned to 16 bytes; got ", p.out_alignment);
  return unsupported(gradient_problem(p));
}

Config gradient_config(const GradientConfig& c) {
  return to_config(GradientChoice{c.split, c.wide, c.two ? 2 : 1, c.pairs ? 1 : 0, c.even ? 1 : 0, c.most,
                                  c.alone, c.shared, c.queues});
}

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

double gradient_microseconds(const Problem& p, const Config& config, const rarefy::Machine& machine) {
  // A tile's way out takes longer than the model has it, which shows where steps are few: all takes 1.7 times
  // as long with 128 tokens, 1.3 with 300, 1.1 with 777. The choice is made without that, as all candidates
  // have it.
  const double around = 1 + 85 / static_cast<double>(p.tokens);
  return around * microseconds_of(gradient_candidates(gradient_problem(p), sm90_machine(machine)), config,
                                  gradient_config, kLateChainSaves);
}

std::int64_t gradient_prepared_size(const Problem& p, const Config& config) {
  return prepared_words(gradient_problem(p), from_config<GradientChoice>(config).config()) *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status check_gradient(const Call& call) {
  const GradientConfig config = from_config<GradientChoice>(call.config).config();
  if (valid(gradient_problem(call.problem), config)) return {};
  return invalid("grad_weight", "the config must be one that the blocks allow", config.text());
}

// Of a config that has been checked.
Status make_gradient_list(const Call& call, void* list) {
  return cuda::launch_status(
      "grad_weight", prepare(gradient_problem(call.problem),
                             from_config<GradientChoice>(call.config).config(), call.plan.crow, call.plan.col,
                             static_cast<std::int32_t*>(list), static_cast<cudaStream_t>(call.stream)));
}

Status prepare_gradient(const Call& call, void* prepared) {
  Status status = check_gradient(call);
  return status.ok() ? make_gradient_list(call, prepared) : status;
}

// Narrow panels want a list: callers that hold none make it in each call, at the start of the workspace.
std::int64_t gradient_list_bytes(const Problem& p, const Config& config) {
  if (p.derived != 0 || from_config<GradientChoice>(config).wide >= 64) return 0;
  return (gradient_prepared_size(p, config) + 255) / 256 * 256;
}

std::int64_t gradient_workspace(const Problem& p, const Config& config) {
  return gradient_list_bytes(p, config) +
         workspace_bytes(gradient_problem(p), from_config<GradientChoice>(config).config());
}

bool sums_dy(const Problem& p, const Config& config) {
  return sums_dy(gradient_problem(p), from_config<GradientChoice>(config).config());
}

Status run_gradient(const Call& call) {
  if (Status status = check_gradient(call); !status.ok()) return status;
  const void* prepared = call.derived.prepared;
  auto* workspace = static_cast<std::byte*>(call.workspace);
  if (const std::int64_t bytes = gradient_list_bytes(call.problem, call.config); bytes > 0) {
    if (Status status = make_gradient_list(call, workspace); !status.ok()) return status;
    prepared = workspace;
    workspace += bytes;
  }
  const GradientOperands operands{call.dy.data,   call.x.data,
                                  call.plan.crow, call.plan.col,
                                  call.dvalues,   static_cast<const std::int32_t*>(prepared),
                                  workspace,      call.problem.accumulate,
                                  call.dbias};
  return cuda::launch_status(
      "grad_weight", launch(gradient_problem(call.problem), from_config<GradientChoice>(call.config).config(),
                            operands, static_cast<cudaStream_t>(call.stream)));
}

// Blocks of any shape -----------------------------------------------------------------------------------

// All of W's gradient as blocks of the kernel's own, in workspace.
GradientProblem whole_problem(const Problem& p) {
  GradientProblem whole = gradient_problem(p);
  whole.block_rows = whole.block_cols = kDenseTile;
  whole.blocks = DenseGradient(gradient_problem(p)).tiles();
  return whole;
}

Reason supports_dense(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (Reason reason = refuses_f32(p); !reason.empty()) return reason;
  const BsrShape& s = p.weight.shape;
  if (s.block_rows > INT32_MAX / (s.cols + s.block_cols))
    return "values of a block row are counted in 32 bits";
  return unsupported(whole_problem(p));
}

Reason yields_dense(const Problem& p, const rarefy::Machine& /*machine*/) {
  const FineGradientTimes times(p.weight.shape, p.tokens);
  const double mine = times.whole(), plain = times.plain();
  return mine <= plain ? Reason() : cat("takes ", mine, " us, a plain kernel ", plain);
}

Config configure_dense(const Problem& p, const rarefy::Machine& machine) {
  return gradient_config(configure(whole_problem(p), sm90_machine(machine)));
}

std::int64_t dense_workspace(const Problem& p, const Config& config) {
  return DenseGradient(gradient_problem(p)).bytes() +
         workspace_bytes(whole_problem(p), from_config<GradientChoice>(config).config());
}

Status run_dense(const Call& call) {
  const GradientProblem problem = gradient_problem(call.problem), whole = whole_problem(call.problem);
  const GradientConfig config = from_config<GradientChoice>(call.config).config();
  if (!valid(whole, config) || config.wide != 64)
    return invalid("grad_weight", "the config must be one that blocks of 128x128 allow", config.text());
  const DenseGradient dense(problem);
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  auto* workspace = static_cast<std::byte*>(call.workspace);
  GradientOperands operands{call.dy.data, call.x.data};
  operands.crow = reinterpret_cast<const std::int32_t*>(workspace);
  operands.col = operands.crow + dense.crow_words();
  operands.dvalues = workspace + dense.index_bytes();
  operands.workspace = workspace + dense.bytes();
  cudaError_t status = fill_dense_index(dense, reinterpret_cast<std::int32_t*>(workspace), stream);
  if (status == cudaSuccess) status = launch(whole, config, operands, stream);
  if (status == cudaSuccess)
    status = read_stored(dense, call.plan.crow, call.plan.col, operands.dvalues, call.dvalues, stream);
  return cuda::launch_status("grad_weight", status);
}

}  // namespace

void add_gradient_rows(Registry& registry) {
  registry.push_back({.op = Op::grad_weight,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_block_gradient",
                      .supports = supports_gradient,
                      .run = run_gradient,
                      .accumulates = true,
                      .sums_dy = sums_dy,
                      .configure = configure_gradient,
                      .fields = GradientChoice::kFields,
                      .candidates = candidates_gradient,
                      .workspace = gradient_workspace,
                      .microseconds = gradient_microseconds,
                      .unheld = Unheld::runs,
                      .prepared_size = gradient_prepared_size,
                      .prepare = prepare_gradient});
  registry.push_back({.op = Op::grad_weight,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_dense_gradient",
                      .supports = supports_dense,
                      .run = run_dense,
                      .yields = yields_dense,
                      .configure = configure_dense,
                      .fields = GradientChoice::kFields,
                      .workspace = dense_workspace});
}

}  // namespace rarefy::sm90
