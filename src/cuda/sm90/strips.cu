// The strip kernel's launch: tensor maps and the choice of the instantiation.
#include "cuda/sm90/parts.h"
#include "cuda/sm90/strip_launch.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/token_order.h"

namespace rarefy::sm90 {

cudaError_t launch(const StripProblem& p, const StripConfig& config, int sms, const StripOperands& operands,
                   cudaStream_t stream) {
  if (!parts_fit(config.split, config.tokens, config.strips, config.ring_bytes()) ||
      (config.split > 1 && config.cluster > 1) || (config.alone && config.split == 1))
    return cudaErrorInvalidConfiguration;
  StripParams params{};
  const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };

  TensorShape x;  // [token][feature]: 64 features × a tile's tokens
  x.size[0] = u(p.in_features());
  x.size[1] = u(p.tokens);
  x.stride[0] = u(p.x_stride) * 2;
  x.box[0] = 64;
  x.box[1] = static_cast<std::uint32_t>(config.tokens);
  cudaError_t status = make_tensor_map(&params.x, p.dtype, operands.x, x);
  if (status != cudaSuccess) return status;
  params.last = LastTokens::of_tiles(p.tokens, config.tokens);
  x.box[1] = params.last.count;
  status = make_tensor_map(&params.x_last, p.dtype, operands.x, x);
  if (status != cudaSuccess) return status;

  if (p.blocks > 0) {
    TensorShape
        w;  // [row of a stored block][64-wide column][64]: one column, as many rows as one block brings
    w.rank = 3;
    w.size[0] = 64;
    w.size[1] = u(p.block_cols / 64);
    w.size[2] = u(p.blocks * p.block_rows);
    w.stride[0] = 128;
    w.stride[1] = u(p.block_cols) * 2;
    w.box[0] = 64;
    w.box[1] = 1;
    w.box[2] = static_cast<std::uint32_t>(64 / config.cluster);
    status = make_tensor_map(&params.w, p.dtype, operands.values, w);
    if (status != cudaSuccess) return status;
  } else {
    params.w = params.x;  // never read, but asked for ahead
  }

  TensorShape y;  // [token][feature]: 64 features × 64 tokens
  y.size[0] = u(p.out_features());
  y.size[1] = u(p.tokens);
  y.stride[0] = u(p.y_stride) * 2;
  y.box[0] = y.box[1] = 64;
  status = make_tensor_map(&params.y, p.dtype, operands.y, y);
  if (status != cudaSuccess) return status;

  const StripPlan plan(p, sms);
  const StripLists lists = plan.lists(config.cluster);
  const std::int64_t tokens = config.tokens * config.cluster;
  params.lists = {lists, operands.plan + plan.items_at[config.cluster - 1],
                  n((p.tokens + tokens - 1) / tokens)};
  params.lists.from_last = begins_with_last_tokens();
  params.groups = reinterpret_cast<const int4*>(operands.plan + plan.groups_at);
  params.steps = operands.plan + plan.steps_at;
  params.bias = operands.bias;
  params.activation = static_cast<Activation>(p.activation);
  params.features = n(p.out_features());
  params.tokens = n(p.tokens);
  params.w_columns = n(p.block_cols / 64);
  params.columns = n((p.in_features() + 63) / 64);
  // Queued products hold a slot for a step longer: of two slots, or of 128 tokens' short steps, that costs
  // more.
  params.whole = p.block_out() / 64 % config.strips == 0 && config.slots > 3;
  params.split = config.split;
  params.alone = config.alone ? config.strips : 0;
  params.slots = static_cast<u32>(config.slots);
  params.w_slots = static_cast<u32>(config.w_slots);
  const auto run = p.dtype == DType::bf16 ? (p.transposed ? launch_grad_input_bf16 : launch_linear_bf16)
                                          : (p.transposed ? launch_grad_input_f16 : launch_linear_f16);
  const int clusters = config.split > 1
                           ? lists.groups * (config.alone ? config.strips : 1) * params.lists.token_tiles
                           : lists.clusters;
  return run(config, clusters, params, stream);
}

}  // namespace rarefy::sm90
