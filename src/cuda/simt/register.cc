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
  registry.push_back(row(Op::linear, "simt_linear", run<launch_linear>));
  registry.push_back(row(Op::grad_input, "simt_grad_input", run<launch_grad_input>));
  registry.push_back(row(Op::grad_weight, "simt_grad_weight", run<launch_grad_weight>));
}

}  // namespace rarefy::cuda::simt
