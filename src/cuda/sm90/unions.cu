// The union kernel's launch: tensor maps and the choice of the instantiation.
#include <algorithm>

#include "cuda/sm90/parts.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/token_order.h"
#include "cuda/sm90/union_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch(const UnionProblem& p, const UnionConfig& config, int sms, const UnionOperands& operands,
                   cudaStream_t stream) {
  if (!parts_fit(config.split, config.tokens, config.strips, config.ring_bytes()) ||
      (config.alone && config.split == 1))
    return cudaErrorInvalidConfiguration;
  UnionParams params{};
  const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };

  const std::size_t size = size_of(p.dtype);
  TensorShape x;  // [token][feature]: a box's features × a tile's tokens
  x.tf32 = true;
  x.size[0] = u(p.in_features());
  x.size[1] = u(p.tokens);
  x.stride[0] = u(p.x_stride) * size;
  x.box[0] = static_cast<std::uint32_t>(config.width);
  x.box[1] =
      static_cast<std::uint32_t>(config.tokens / config.pair);  // each of a pair brings its part to both
  cudaError_t status = make_tensor_map(&params.x, p.dtype, operands.x, x);
  if (status != cudaSuccess) return status;
  params.last = LastTokens::of_tiles(p.tokens, config.tokens);
  x.box[1] = params.last.count;
  status = make_tensor_map(&params.x_last, p.dtype, operands.x, x);
  if (status != cudaSuccess) return status;

  TensorShape y;  // [token][feature]: a unit row's features, up to 128 bytes, × a buffer's tokens
  y.size[0] = u(p.out_features());
  y.size[1] = u(p.tokens);
  y.stride[0] = u(p.y_stride) * size;
  y.box[1] = static_cast<std::uint32_t>(128 / size);
  y.box[0] = std::min(static_cast<std::uint32_t>(p.unit()), y.box[1]);
  status = make_tensor_map(&params.y, p.dtype, operands.y, y);
  if (status != cudaSuccess) return status;

  const UnionPlan plan(p, sms);
  const UnionPlan::Groups& groups = plan.of(config.group());
  params.walk = {TileLists(plan.lists(groups), operands.plan + groups.items_at,
                           n((p.tokens + config.tokens - 1) / config.tokens)),
                 reinterpret_cast<const int4*>(operands.plan + groups.groups_at),
                 operands.plan + groups.steps_at,
                 plan.columns,
                 config.split,
                 config.alone ? config.strips : 0,
                 reinterpret_cast<const int4*>(operands.plan + groups.first_at),
                 config.pair};
  params.walk.lists.from_last = begins_with_last_tokens();
  params.w = static_cast<const unsigned char*>(operands.packed);
  params.units = reinterpret_cast<const int4*>(operands.plan + plan.units_at);
  params.bias = operands.bias;
  params.activation = static_cast<Activation>(p.activation);
  params.stored = stored_of(p, {p, operands.index, operands.values}, operands.x, operands.y);
  params.features = n(p.out_features());
  params.log_unit = p.unit() == 64 ? 6 : p.unit() == 32 ? 5 : 4;
  params.slots = static_cast<u32>(config.slots);
  params.pieces = static_cast<u32>(config.pieces);
  params.buffers = config.buffers;
  const bool one = config.width == p.step();
  params.box_width = config.width;
  params.box_bytes = static_cast<u32>(config.tokens * config.width) * static_cast<u32>(size);
  params.last_bytes = params.box_bytes / static_cast<u32>(config.tokens) * params.last.count;
  params.first_box = one ? 0xFFF : 0x333;
  params.second_box = one ? 0 : 0xCCC;
  params.x_layout = one ? operand_layout(Swizzle::b128, 1024) : operand_layout(Swizzle::b64, 512);
  const auto run = p.dtype == DType::bf16  ? launch_union_bf16
                   : p.dtype == DType::f16 ? launch_union_f16
                                           : launch_union_tf32;
  const int tiles = groups.count * (config.alone ? config.strips : 1) * params.walk.lists.token_tiles;
  const int blocks = config.split > 1 ? tiles * config.split : groups.clusters * config.pair;
  return run(config, blocks, params, stream);
}

}  // namespace rarefy::sm90
