// The rows of the tall vectors' gradients.
#include "core/message.h"
#include "cuda/sm90/register.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/tall_choice.h"
#include "cuda/sm90/tall_columns.h"
#include "cuda/status.h"

namespace rarefy::sm90 {
namespace {

Reason supports_columns(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.weight.shape.block_cols != 1)
    return cat("takes blocks of one column; got ", p.weight.shape.block_cols);
  if (p.out_alignment < 16) return cat("needs outputs aligned to 16 bytes; got ", p.out_alignment);
  return {};
}

// dX ------------------------------------------------------------------------------------------------------

Product input_problem(const Problem& p) { return product<Product>(p); }

Reason supports_grad_input(const Problem& p, const rarefy::Machine& machine) {
  Reason reason = supports_columns(p, machine);
  return reason.empty() ? tall_input_unsupported(input_problem(p)) : reason;
}

// Odd multiples of 32 rows have no kernel without zeros here, but in columns of 64.
Reason yields_grad_input(const Problem& p, const rarefy::Machine& machine) {
  const double own = held_microseconds([&](std::int64_t tokens) {
    Product mine = input_problem(p);
    mine.tokens = tokens;
    return best_input(mine, machine).microseconds;
  });
  if (p.weight.shape.block_rows % 64 != 0) {
    const double its = held_input_microseconds(p, machine);
    if (own > its) return why_held(own, "columns", its);
  }
  return yields_to_whole(p, machine, own);
}

Config configure_grad_input(const Problem& p, const rarefy::Machine& machine) {
  return to_config(input_choice(best_input(input_problem(p), machine).config, machine));
}

std::vector<Config> grad_input_candidates(const Problem& p, const rarefy::Machine& machine) {
  std::vector<Config> list;
  for (const TallInputCandidate& candidate : tall_input_candidates(
           input_problem(p), machine.gpu.sms, static_cast<int>(machine.gpu.shared_memory))) {
    if (candidate.reason.empty()) list.push_back(to_config(input_choice(candidate.config, machine)));
  }
  return list;
}

double input_microseconds(const Problem& p, const Config& config, const rarefy::Machine& machine) {
  return microseconds_of(
      tall_input_candidates(input_problem(p), machine.gpu.sms, static_cast<int>(machine.gpu.shared_memory)),
      config, [&](const auto& c) { return to_config(input_choice(c, machine)); });
}

std::int64_t input_prepared_size(const Problem& p, const Config& /*config*/) {
  return tall_input_words(input_problem(p)) * static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status prepare_grad_input(const Call& call, void* prepared) {
  return cuda::launch_status(
      "grad_input",
      prepare_tall_input(input_problem(call.problem), call.plan.crow, call.plan.col,
                         static_cast<std::int32_t*>(prepared), static_cast<cudaStream_t>(call.stream)));
}

Status run_grad_input(const Call& call) {
  const Product problem = input_problem(call.problem);
  const auto choice = from_config<TallInputChoice>(call.config);
  if (!valid(problem, choice.config()) || choice.sms < 1 || choice.sms > INT32_MAX)
    return invalid("grad_input", "the config must be one that the blocks allow", choice.config().text());
  const TallInputOperands operands{call.dy.data,
                                   call.values,
                                   call.out.data,
                                   call.plan.col,
                                   {problem, index_of(call), call.values},
                                   static_cast<const std::int32_t*>(call.derived.prepared)};
  return cuda::launch_status(
      "grad_input", launch_tall_input(problem, choice.config(), static_cast<int>(choice.sms), operands,
                                      static_cast<cudaStream_t>(call.stream)));
}

// dW ------------------------------------------------------------------------------------------------------

TallGradientProblem weight_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in, p.tokens, s.rows, s.cols, s.block_rows, s.nnzb, p.in_stride, p.out_stride, p.out_layout};
}

Reason supports_grad_weight(const Problem& p, const rarefy::Machine& machine) {
  if (p.in_layout == Layout::by_feature) return "takes dY by token";
  Reason reason = supports_columns(p, machine);
  return reason.empty() ? unsupported(weight_problem(p)) : reason;
}

// Odd multiples of 32 rows: half of a tile's rows would be for nothing (32×1 at .25, 8192 × 4096²: 382 us
// here, 284 as columns of 64; at .5 593, and 355 made whole).
Reason yields_grad_weight(const Problem& p, const rarefy::Machine& /*machine*/) {
  return p.weight.shape.block_rows % 64 == 0 ? Reason() : "leaves odd multiples of 32 rows to columns of 64";
}

Config configure_grad_weight(const Problem& p, const rarefy::Machine& machine) {
  return to_config(gradient_choice(weight_problem(p), machine));
}

// Of a config that may hold anything.
Status check_config(const Problem& p, const Config& config) {
  const TallGradientConfig c = from_config<TallGradientChoice>(config).config();
  if (valid(weight_problem(p), c)) return {};
  return invalid("grad_weight", "the config must be one that the blocks allow", c.text());
}

std::int64_t weight_prepared_size(const Problem& p, const Config& config) {
  if (!check_config(p, config).ok()) return sizeof(std::int32_t);  // `prepare` says why
  return TallGradientPlan(weight_problem(p), from_config<TallGradientChoice>(config).config()).words *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

std::int64_t weight_workspace(const Problem& p, const Config& config) {
  if (!check_config(p, config).ok()) return 0;
  return workspace(weight_problem(p), from_config<TallGradientChoice>(config).config());
}

Status prepare_grad_weight(const Call& call, void* prepared) {
  if (Status status = check_config(call.problem, call.config); !status.ok()) return status;
  return cuda::launch_status(
      "grad_weight",
      prepare(weight_problem(call.problem), from_config<TallGradientChoice>(call.config).config(),
              call.plan.crow, call.plan.col, static_cast<std::int32_t*>(prepared),
              static_cast<cudaStream_t>(call.stream)));
}

Status run_grad_weight(const Call& call) {
  if (Status status = check_config(call.problem, call.config); !status.ok()) return status;
  const TallGradientOperands operands{call.dy.data,
                                      call.x.data,
                                      call.plan.col,
                                      call.dvalues,
                                      static_cast<const std::int32_t*>(call.derived.prepared),
                                      call.workspace};
  return cuda::launch_status("grad_weight", launch(weight_problem(call.problem),
                                                   from_config<TallGradientChoice>(call.config).config(),
                                                   operands, static_cast<cudaStream_t>(call.stream)));
}

}  // namespace

void add_tall_backward_rows(Registry& registry) {
  registry.push_back({.op = Op::grad_input,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_tall_grad_input",
                      .supports = supports_grad_input,
                      .run = run_grad_input,
                      .yields = yields_grad_input,
                      .configure = configure_grad_input,
                      .fields = TallInputChoice::kFields,
                      .candidates = grad_input_candidates,
                      .microseconds = input_microseconds,
                      .unheld = Unheld::made,
                      .prepared_size = input_prepared_size,
                      .prepare = prepare_grad_input});
  registry.push_back({.op = Op::grad_weight,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_tall_gradient",
                      .supports = supports_grad_weight,
                      .run = run_grad_weight,
                      .yields = yields_grad_weight,
                      .any_layout = true,
                      .configure = configure_grad_weight,
                      .fields = TallGradientChoice::kFields,
                      .workspace = weight_workspace,
                      .unheld = Unheld::made,
                      .prepared_size = weight_prepared_size,
                      .prepare = prepare_grad_weight});
}

}  // namespace rarefy::sm90
