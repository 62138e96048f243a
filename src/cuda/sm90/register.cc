// The sm90 family's rows: problems of the core as the kernels' own, and their plans as prepared buffers.
// The tall kernel has no row yet: it wants X by feature, which a Problem cannot say.
#include "cuda/sm90/register.h"

#include <algorithm>
#include <vector>

#include "core/message.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/strips.h"
#include "cuda/status.h"

namespace rarefy::sm90 {
namespace {

Reason supports_family(const Problem& p, const rarefy::Machine& machine) {
  if (machine.gpu.arch != 90) return cat("needs compute capability 9.0; got sm_", machine.gpu.arch);
  if (p.weight.dtype != p.in || p.out != p.in) {
    return cat("takes one dtype for inputs, values and outputs; got ", name(p.in), ", ", name(p.weight.dtype),
               " and ", name(p.out));
  }
  if (p.in_alignment < 16) return cat("needs inputs and values aligned to 16 bytes; got ", p.in_alignment);
  return {};
}

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

// StripConfig as the registry keeps it; `workers` are the clusters that the GPU runs at once.
struct StripChoice {
  std::int64_t strips = 2, tokens = 256, cluster = 1, slots = 5, w_slots = 8, workers = 132;
  static constexpr std::string_view kFields[] = {"strips", "tokens",  "cluster",
                                                 "slots",  "w_slots", "workers"};

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
  return to_config(
      StripChoice{c.strips, c.tokens, c.cluster, c.slots, c.w_slots, machine.gpu.sms / c.cluster});
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

// A StripPlan in a buffer whose size and offsets follow from problem and config alone: the launch must not
// read it. What one pattern leaves unused is never looked at.
struct Layout {
  std::int64_t tiles_at, steps_at, words;

  Layout(const StripProblem& p, const StripChoice& c) {
    const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
    const auto line = [&](std::int64_t count) { return up(count, 32) * 32; };
    const std::int64_t groups = up(up(p.out_features(), 64), c.strips);
    const std::int64_t tiles = groups * up(up(p.tokens, c.tokens), c.cluster) + c.workers * c.strips;
    const std::int64_t blocks = p.blocks * (p.block_rows / 64) * (p.block_cols / 64);
    tiles_at = line(c.workers + 1);
    steps_at = line(tiles_at + 8 * tiles);
    words = steps_at + 4 * 2 * blocks;  // of groups, and of single strips at the end
  }
};

std::int64_t prepared_size(const Problem& p, const Config& config) {
  return Layout(strip_problem(p), from_config<StripChoice>(config)).words *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

// The plan lists tiles of tokens; of the config, only the depth of the rings leaves it as it is.
std::int64_t variant(const Problem& p, const Config& config) {
  const auto c = from_config<StripChoice>(config);
  return (((p.tokens * 8 + c.strips) * 1024 + c.tokens) * 1024 + c.workers) * 4 + c.cluster;
}

// On the host for now: the index comes over once, the plan goes back.
Status prepare_strips(const Call& call, void* prepared) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const BsrShape& shape = call.plan.shape;
  const StripProblem problem = strip_problem(call.problem);
  const auto choice = from_config<StripChoice>(call.config);
  const std::string_view op = name(call.problem.op);
  const auto to_host = [&](const std::int32_t* device, std::int64_t count) {
    std::vector<std::int32_t> host(static_cast<std::size_t>(count));
    cudaMemcpyAsync(host.data(), device, host.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost, stream);
    return host;
  };
  const bool by_column = problem.transposed;
  const auto offsets = by_column ? to_host(call.plan.ccol, shape.col_count() + 1)
                                 : to_host(call.plan.crow, shape.row_count() + 1);
  const auto others = to_host(by_column ? call.plan.row : call.plan.col, shape.nnzb);
  const auto entries = to_host(call.plan.perm, by_column ? shape.nnzb : 0);
  if (const cudaError_t code = cudaStreamSynchronize(stream); code != cudaSuccess) {
    return cuda::launch_status(op, code);
  }
  const Machine machine{static_cast<int>(choice.workers * choice.cluster), 0};
  const StripPlan plan = prepare(problem, choice.config(), machine,
                                 {offsets.data(), others.data(), by_column ? entries.data() : nullptr});
  const Layout layout(problem, choice);
  std::vector<std::int32_t> words(static_cast<std::size_t>(layout.words));
  const auto ranges = plan.words.begin();
  const auto tiles = ranges + plan.tiles_at;
  const auto steps = ranges + plan.steps_at;
  if (plan.steps_at - plan.tiles_at > layout.steps_at - layout.tiles_at || plan.clusters > choice.workers ||
      plan.words.end() - steps > layout.words - layout.steps_at) {
    return error(StatusCode::internal, op, "the plan must fit in its buffer",
                 cat(plan.words.size(), " words"));
  }
  std::copy(ranges, ranges + plan.clusters + 1, words.begin());
  std::fill(words.begin() + plan.clusters + 1, words.begin() + choice.workers + 1, ranges[plan.clusters]);
  std::copy(tiles, steps, words.begin() + layout.tiles_at);
  std::copy(steps, plan.words.end(), words.begin() + layout.steps_at);
  cudaMemcpyAsync(prepared, words.data(), words.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice,
                  stream);
  return cuda::launch_status(op, cudaStreamSynchronize(stream));
}

Status run_strips(const Call& call) {
  const StripProblem problem = strip_problem(call.problem);
  const auto choice = from_config<StripChoice>(call.config);
  const Layout layout(problem, choice);
  StripPlan plan;
  plan.tiles_at = layout.tiles_at;
  plan.steps_at = layout.steps_at;
  plan.clusters = static_cast<int>(choice.workers);
  const StripOperands operands{problem.transposed ? call.dy.data : call.x.data, call.values, call.bias,
                               call.out.data, static_cast<const std::int32_t*>(call.derived.prepared)};
  return cuda::launch_status(name(call.problem.op), launch(problem, choice.config(), plan, operands,
                                                           static_cast<cudaStream_t>(call.stream)));
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
          .variant = variant,
          .prepared_size = prepared_size,
          .prepare = prepare_strips};
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
}

}  // namespace rarefy::sm90
