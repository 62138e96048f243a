// The tall kernel's launch: tensor maps, and X that is turned or copied first.
#include "cuda/sm90/tall.h"

#include <algorithm>

#include "cuda/sm90/tall_launch.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/token_order.h"

namespace rarefy::sm90 {

cudaError_t launch(const TallProblem& p, const TallConfig& config, int sms, const TallOperands& o,
                   cudaStream_t stream) {
  TallParams params{};
  const TallPlan plan(p, config, sms);
  const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  if (p.blocks > 0) {
    TensorShape w;  // [stored column][row of the block]
    w.size[0] = u(p.block_rows);
    w.size[1] = u(p.blocks);
    w.stride[0] = u(p.block_rows) * 2;
    w.box[0] = 64;
    w.box[1] = static_cast<std::uint32_t>(config.tile.columns);
    const cudaError_t status = make_tensor_map(&params.w, p.dtype, o.values, w);
    if (status != cudaSuccess) return status;
  }
  params.groups = reinterpret_cast<const int4*>(o.plan);
  params.col = o.col;
  params.values = o.values;
  params.bias = o.bias;
  params.activation = static_cast<Activation>(p.activation);
  params.features = static_cast<int>(p.rows);
  params.block_rows = static_cast<int>(p.block_rows);
  params.y_by_feature = p.y_layout == Layout::by_feature;
  params.slots = static_cast<u32>(config.slots);
  params.split = config.split;
  params.halves = config.rows / config.tile.rows;

  const bool by_token = p.x_layout == Layout::by_token, copies = p.copies_x();
  const std::int64_t at_once = copies ? config.chunk : p.tokens;
  for (std::int64_t first = 0; first < p.tokens; first += at_once) {
    const std::int64_t tokens = std::min(at_once, p.tokens - first);
    auto* y_data = static_cast<std::uint16_t*>(o.y) + first * (params.y_by_feature ? 1 : p.y_stride);
    TensorShape y;  // [token][feature], or [feature][token]
    y.size[0] = u(params.y_by_feature ? tokens : p.rows);
    y.size[1] = u(params.y_by_feature ? p.rows : tokens);
    y.stride[0] = u(p.y_stride) * 2;
    y.box[0] = y.box[1] = 64;
    cudaError_t status = make_tensor_map(&params.y, p.dtype, y_data, y);
    if (status != cudaSuccess) return status;
    if (p.blocks == 0) params.w = params.y;  // never read, but asked for ahead
    const auto* x = static_cast<const std::uint16_t*>(o.x) + first * (by_token ? p.x_stride : 1);
    params.x = x;
    std::int64_t x_tile = config.tile.tokens, x_stride = p.x_stride;  // elements
    params.turned = copies;
    params.ragged = !copies && p.tokens % 8 != 0;
    if (copies) {
      // What a tile reads lies side by side, if all tiles are whole: 1.4 of the transpose's 36 us less.
      TransposedPanels panels;
      x_stride = config.chunk_stride(p.tokens);
      if (by_token && tokens % x_tile == 0) {
        panels = {config.tile.tokens, p.cols * x_tile};
        x_stride = x_tile;
        x_tile = panels.stride;
      }
      char* to = static_cast<char*>(o.workspace) + first / at_once % 2 * config.chunk_bytes(p);
      status = by_token ? transpose(x, 2, tokens, p.cols, p.x_stride, to, x_stride, first > 0, stream, panels)
                        : copy_lines({x, 2 * p.x_stride}, {to, 2 * x_stride}, p.cols, 2 * tokens,
                                     2 * ((8 - tokens % 8) % 8), first > 0, stream);
      if (status != cudaSuccess) return status;
      params.x = to;
    }
    params.x_tile = x_tile * 2;
    params.x_bytes = static_cast<u32>(x_stride * 2);
    params.tokens = static_cast<int>(tokens);
    if (o.stated.values != nullptr) {
      const Product& stated = o.stated.product;
      const ProductIndex& index = o.stated.index;
      Stored& s = params.stored;
      s = {x, o.stated.values, y_data, index.offsets, index.others, index.entries, p.x_stride, p.y_stride};
      s.tokens = static_cast<int>(tokens);
      s.in = static_cast<int>(p.cols);
      s.out = static_cast<int>(p.rows);
      s.block_in = static_cast<int>(stated.block_in());
      s.block_out = static_cast<int>(stated.block_out());
      if (!by_token) std::swap(s.x_stride, s.x_feature);
      if (params.y_by_feature) std::swap(s.y_stride, s.y_feature);
    }
    params.lists = {plan.lists(), o.plan + plan.items_at,
                    static_cast<int>((tokens + config.tile.tokens - 1) / config.tile.tokens)};
    // Of X that is turned the first tokens came last (transpose.cu).
    params.lists.from_last = begins_with_last_tokens(!copies);
    const auto launch_type = p.dtype == DType::bf16 ? launch_tall_bf16 : launch_tall_f16;
    status = launch_type(config, plan.groups, copies, params, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace rarefy::sm90
