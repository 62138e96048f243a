// The sm80 family's rows: what its kernels take.
#include <algorithm>

#include "core/message.h"
#include "cuda/simt/kernels.h"
#include "cuda/sm80/kernels.h"
#include "cuda/status.h"

namespace rarefy::cuda::sm80 {
namespace {

// Elements of `size` bytes, blocks whose sides are multiples of `side`.
Reason supports_layout(const Problem& p, const Machine& machine, std::int64_t size, std::int64_t side) {
  if (machine.gpu.arch < 80) return cat("needs compute capability 8.0; got sm_", machine.gpu.arch);
  if (p.weight.dtype != p.in || p.out != p.in) {
    return cat("takes one dtype for inputs, values and outputs; got ", name(p.in), ", ", name(p.weight.dtype),
               " and ", name(p.out));
  }
  const BsrShape& s = p.weight.shape;
  if (s.block_rows % side != 0 || s.block_cols % side != 0) {
    return cat("takes blocks whose sides are multiples of ", side, "; got ", s.block_rows, "x", s.block_cols);
  }
  if (p.in_alignment < 16 || p.out_alignment < 16) {
    return cat("needs operands aligned to 16 bytes; got ", p.in_alignment, " and ", p.out_alignment);
  }
  if (p.in_stride % (16 / size) != 0 || p.out_stride % (16 / size) != 0)
    return "copies of 16 bytes need rows 16 bytes apart";
  // Padding of the last blocks, and tokens of the last tile.
  constexpr std::int64_t kMost = INT32_MAX / 2;
  if (p.tokens > kMost || s.rows > kMost || s.cols > kMost || s.block_rows * s.block_cols > kMost)
    return "coordinates are 32-bit";
  return {};
}

Reason supports(const Problem& p, const Machine& machine) {
  if (p.in != DType::bf16 && p.in != DType::f16) return cat("takes bf16 or f16; got ", name(p.in));
  return supports_layout(p, machine, 2, 16);
}

Reason supports_float(const Problem& p, const Machine& machine) {
  if (p.in != DType::f32) return cat("takes f32; got ", name(p.in));
  return supports_layout(p, machine, 4, 32);
}

Reason yields_few(const Problem& p, const Machine& /*machine*/) {
  if (p.tokens > simt::kFewTokens) return {};
  return cat("leaves up to ", simt::kFewTokens, " tokens to a kernel that reads W once; got ", p.tokens);
}

// grad_weight in f32: few tiles are shared by tokens, so that there are some nine for each SM, of which it
// holds three.
struct FloatShares {
  std::int64_t shares = 1;
  static constexpr std::string_view kFields[] = {"shares"};
};

constexpr std::int64_t kMostShares = 64;

Config configure_shares(const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  const std::int64_t high = s.block_rows % 64 == 0 ? 64 : 32,
                     tiles = s.value_count() / (64 * 128) + s.rows / high / 2;
  const std::int64_t wanted = 9 * machine.gpu.sms / std::max<std::int64_t>(1, tiles);
  return to_config(
      FloatShares{std::clamp<std::int64_t>(wanted, 1, std::clamp<std::int64_t>(p.tokens / 512, 1, 8))});
}

std::int64_t shares_workspace(const Problem& p, const Config& config) {
  const std::int64_t shares = from_config<FloatShares>(config).shares;
  if (shares <= 1 || shares > kMostShares) return 0;
  return shares * p.weight.shape.value_count() * static_cast<std::int64_t>(sizeof(float));
}

Status run_float_gradient(const Call& call) {
  const std::int64_t shares = from_config<FloatShares>(call.config).shares;
  if (shares < 1 || shares > kMostShares) {
    return invalid("grad_weight", cat("shares of the config must be in [1, ", kMostShares, ']'), cat(shares));
  }
  return launch_status("grad_weight", launch_float_gradient(call, static_cast<int>(shares)));
}

template <cudaError_t (*launch)(const Call&)>
Status run(const Call& call) {
  return launch_status(name(call.problem.op), launch(call));
}

Kernel row(Op op, std::string_view name, Reason (*supports)(const Problem&, const Machine&),
           Status (*run)(const Call&)) {
  return {.op = op, .device = Device::cuda, .family = "sm80", .name = name, .supports = supports, .run = run};
}

}  // namespace

void add_rows(Registry& registry) {
  registry.push_back(row(Op::linear, "sm80_linear", supports, run<launch_product>));
  registry.push_back(row(Op::grad_input, "sm80_grad_input", supports, run<launch_product>));
  registry.push_back(row(Op::grad_weight, "sm80_grad_weight", supports, run<launch_gradient>));
  Kernel linear = row(Op::linear, "sm80_float_linear", supports_float, run<launch_float_product>);
  linear.yields = yields_few;
  registry.push_back(linear);
  registry.push_back(row(Op::grad_input, "sm80_float_grad_input", supports_float, run<launch_float_product>));
  Kernel gradient = row(Op::grad_weight, "sm80_float_grad_weight", supports_float, run_float_gradient);
  gradient.configure = configure_shares;
  gradient.fields = FloatShares::kFields;
  gradient.workspace = shares_workspace;
  registry.push_back(gradient);
}

}  // namespace rarefy::cuda::sm80
