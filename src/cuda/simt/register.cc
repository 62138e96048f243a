// The simt family's rows: what it takes, and its tiles.
#include "core/message.h"
#include "cuda/simt/kernels.h"
#include "cuda/status.h"

namespace rarefy::cuda::simt {
namespace {

// One element type for all operands: float, bf16 and f16 are summed in float, double in double.
Reason supports(const Problem& p, const Machine& /*machine*/) {
  if (p.in == DType::i8 || p.weight.dtype == DType::i8) return "takes f64, f32, bf16 or f16; got i8";
  if (p.in != p.weight.dtype || p.out != p.in) {
    return cat("takes one dtype for inputs, values and outputs; got ", name(p.in), ", ", name(p.weight.dtype),
               " and ", name(p.out));
  }
  return {};
}

// The tile whose rows fit a block best.
Config configure(const Problem& p, const Machine& /*machine*/) {
  const BsrShape& s = p.weight.shape;
  const std::int64_t rows = p.op == Op::grad_input ? s.block_cols : s.block_rows;
  return to_config(TileChoice{rows > 16 ? 32 : rows > 4 ? 16 : rows > 1 ? 4 : 1});
}

std::vector<Config> candidates(const Problem& /*problem*/, const Machine& /*machine*/) {
  std::vector<Config> all;
  for (const std::int64_t rows : {32, 16, 4, 1}) all.push_back(to_config(TileChoice{rows}));
  return all;
}

Reason supports_few(const Problem& p, const Machine& machine) {
  if (Reason reason = supports(p, machine); !reason.empty()) return reason;
  if (p.tokens < 1 || p.tokens > kFewTokens) return cat("takes 1 to ", kFewTokens, " tokens; got ", p.tokens);
  const BsrShape& s = p.weight.shape;
  if (s.rows > INT32_MAX / 2 || s.cols > INT32_MAX / 2 || s.block_rows > INT32_MAX / 2)
    return "features are counted in 32 bits";
  return {};
}

Config configure_warps(const Problem& p, const Machine& machine) {
  return to_config(configure_few(p, machine.gpu.sms));
}

std::vector<Config> candidates_warps(const Problem& /*problem*/, const Machine& /*machine*/) {
  std::vector<Config> all;
  for (const std::int64_t warps : {1, 2, 4, 8, 16}) all.push_back(to_config(FewChoice{warps}));
  return all;
}

Status run_few(const Call& call) {
  const std::int64_t warps = from_config<FewChoice>(call.config).warps;
  if (warps < 1 || warps > 16) return invalid("linear", "warps of the config must be in [1, 16]", cat(warps));
  return launch_status("linear", launch_few(call, static_cast<int>(warps)));
}

template <cudaError_t (*launch)(const Call&)>
Status run(const Call& call) {
  return launch_status(name(call.problem.op), launch(call));
}

Kernel row(Op op, std::string_view name, Status (*run)(const Call&)) {
  return {
      .op = op,
      .device = Device::cuda,
      .family = "simt",
      .name = name,
      .supports = supports,
      .run = run,
      .any_layout = true,
      .configure = configure,
      .fields = TileChoice::kFields,
      .candidates = candidates,
  };
}

}  // namespace

void add_rows(Registry& registry) {
  registry.push_back({.op = Op::linear,
                      .device = Device::cuda,
                      .family = "simt",
                      .name = "simt_few_linear",
                      .supports = supports_few,
                      .run = run_few,
                      .any_layout = true,
                      .configure = configure_warps,
                      .fields = FewChoice::kFields,
                      .candidates = candidates_warps,
                      .workspace = [](const Problem& p, const Config&) { return few_workspace(p); }});
  registry.push_back(row(Op::linear, "simt_linear", run<launch_linear>));
  registry.push_back(row(Op::grad_input, "simt_grad_input", run<launch_grad_input>));
  registry.push_back(row(Op::grad_weight, "simt_grad_weight", run<launch_grad_weight>));
}

}  // namespace rarefy::cuda::simt
