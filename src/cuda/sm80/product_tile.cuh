// What the kernels of linear and grad_input share: their operands, and the launch of a thread block for each
// tile.
#pragma once

#include "core/registry.h"
#include "cuda/device/activation.cuh"
#include "cuda/sm80/tile.cuh"

namespace rarefy::cuda::sm80 {

// A tile: Tile::kRows features of one block row (grad_input: of a block column) and Tile::kTokens tokens. Its
// thread block walks the blocks that are stored there.
struct ProductParams {
  const void *x, *values, *bias;
  void* y;
  const int *offsets, *others, *entries;  // entries: null, or of grad_input
  int tokens, in, out;                    // features
  int block_rows, block_cols;             // of W
  std::int64_t x_stride, y_stride;
  int strips;  // tiles side by side
  device::Activation activation;
};

inline ProductParams product_params(const Call& call) {
  const Problem& p = call.problem;
  const BsrShape& s = p.weight.shape;
  const bool transposed = p.op == Op::grad_input;
  const auto n = [](std::int64_t i) { return static_cast<int>(i); };
  ProductParams params{};
  params.x = transposed ? call.dy.data : call.x.data;
  params.values = call.values;
  params.bias = call.bias;
  params.y = call.out.data;
  params.offsets = transposed ? call.plan.ccol : call.plan.crow;
  params.others = transposed ? call.plan.row : call.plan.col;
  params.entries = transposed ? call.plan.perm : nullptr;
  params.tokens = n(p.tokens);
  params.in = n(transposed ? s.rows : s.cols);
  params.out = n(transposed ? s.cols : s.rows);
  params.block_rows = n(s.block_rows);
  params.block_cols = n(s.block_cols);
  params.x_stride = p.in_stride;
  params.y_stride = p.out_stride;
  params.activation = static_cast<device::Activation>(call.activation);
  return params;
}

template <class Tile, bool kTransposed>
cudaError_t launch_product_tiles(void (*kernel)(ProductParams), int threads, ProductParams params,
                                 cudaStream_t stream) {
  const int block_out = kTransposed ? params.block_cols : params.block_rows;
  const std::int64_t strips =
      std::int64_t{(params.out + block_out - 1) / block_out} * (block_out / Tile::kRows);
  params.strips = static_cast<int>(strips);
  return launch_tiles<Tile>(kernel, threads, strips * ((params.tokens + Tile::kTokens - 1) / Tile::kTokens),
                            params, stream);
}

}  // namespace rarefy::cuda::sm80
