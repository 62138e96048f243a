// The sm80 family's rows: what its kernels take.
#include "core/message.h"
#include "cuda/sm80/kernels.h"
#include "cuda/status.h"

namespace rarefy::cuda::sm80 {
namespace {

Reason supports(const Problem& p, const Machine& machine) {
  if (machine.gpu.arch < 80) return cat("needs compute capability 8.0; got sm_", machine.gpu.arch);
  if (p.in != DType::bf16 && p.in != DType::f16) return cat("takes bf16 or f16; got ", name(p.in));
  if (p.weight.dtype != p.in || p.out != p.in) {
    return cat("takes one dtype for inputs, values and outputs; got ", name(p.in), ", ", name(p.weight.dtype),
               " and ", name(p.out));
  }
  const BsrShape& s = p.weight.shape;
  if (s.block_rows % 16 != 0 || s.block_cols % 16 != 0)
    return cat("takes blocks whose sides are multiples of 16; got ", s.block_rows, "x", s.block_cols);
  if (p.in_alignment < 16 || p.out_alignment < 16) {
    return cat("needs operands aligned to 16 bytes; got ", p.in_alignment, " and ", p.out_alignment);
  }
  if (p.in_stride % 8 != 0 || p.out_stride % 8 != 0) return "copies of 16 bytes need rows 16 bytes apart";
  // Padding of the last blocks, and tokens of the last tile.
  constexpr std::int64_t kMost = INT32_MAX / 2;
  if (p.tokens > kMost || s.rows > kMost || s.cols > kMost || s.block_rows * s.block_cols > kMost)
    return "coordinates are 32-bit";
  return {};
}

template <cudaError_t (*launch)(const Call&)>
Status run(const Call& call) {
  return launch_status(name(call.problem.op), launch(call));
}

Kernel row(Op op, std::string_view name, Status (*run)(const Call&)) {
  return {.op = op, .device = Device::cuda, .family = "sm80", .name = name, .supports = supports, .run = run};
}

}  // namespace

void add_rows(Registry& registry) {
  registry.push_back(row(Op::linear, "sm80_linear", run<launch_product>));
  registry.push_back(row(Op::grad_input, "sm80_grad_input", run<launch_product>));
  registry.push_back(row(Op::grad_weight, "sm80_grad_weight", run<launch_gradient>));
}

}  // namespace rarefy::cuda::sm80
