// Launches the weight gradient of blocks: tensor maps, clusters, and tiles in one launch or in two.
#include "cuda/sm90/block_gradient.h"

#include <algorithm>

#include "cuda/sm90/block_gradient_kernel.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {
namespace {

template <class T, int kWide, int kSplit>
cudaError_t launch_tiles(const GradientParams& params, cudaStream_t stream) {
  const std::int64_t slices = (params.rows + kSlice - 1) / kSlice;
  const std::int64_t for_bias = params.dbias == nullptr || params.goes_on
                                    ? 0
                                    : (std::min<std::int64_t>(128, slices) + kSplit - 1) / kSplit * kSplit;
  // While X is being transposed; in place of thread blocks of the launch before that are done; or with few
  // tokens, where a microsecond counts: of more, thread blocks that start early lie elsewhere, and what
  // neighbours share costs them more (8192 tokens of 4096² at .1 48 → 53 µs).
  constexpr int kFew = 1024;
  const bool early =
      kWide == 16 || sizeof(T) == 4 || params.goes_on || (kSplit == 1 && params.tokens <= kFew);
  return launch_kernel<gradient_kernel<T, kWide, kSplit>>({.blocks = params.tile_blocks + for_bias,
                                                           .threads = kTileThreads,
                                                           .cluster = kSplit,
                                                           .shared_bytes = static_cast<int>(kSharedBytes),
                                                           .early = early},
                                                          params, stream);
}

template <class T, int kWide>
cudaError_t launch_split(int split, const GradientParams& params, cudaStream_t stream) {
  switch (split) {
    case 1: return launch_tiles<T, kWide, 1>(params, stream);
    case 2: return launch_tiles<T, kWide, 2>(params, stream);
    case 4: return launch_tiles<T, kWide, 4>(params, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

template <class T>
cudaError_t launch_wide(const GradientConfig& c, int split, std::int64_t tiles, GradientParams params,
                        cudaStream_t stream) {
  params.tiles = static_cast<int>(tiles);
  params.tile_blocks = params.tiles * split;
  if (split == 1 && c.queues > 0 && params.list != nullptr)
    params.tile_blocks = std::min(params.tile_blocks, c.queues);
  switch (c.wide) {
    case 64: return launch_split<T, 64>(split, params, stream);
    case 32: return launch_split<T, 32>(split, params, stream);
    case 16: return launch_split<T, 16>(split, params, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

// Tiles that have all tokens, then those that share them, in a launch each. Those that no pattern but an
// unlikely one has are the first one's: thread blocks without a tile leave at once there.
template <class T>
cudaError_t launch_type(const GradientConfig& c, std::int64_t tiles, GradientParams params,
                        cudaStream_t stream) {
  if (c.alone == 0) return launch_wide<T>(c, c.split, tiles, params, stream);
  if (c.alone >= tiles) return launch_wide<T>(c, 1, tiles, params, stream);
  const std::int64_t shared = std::min<std::int64_t>(c.shared, tiles - c.alone);
  GradientParams first = params;
  first.skip_from = c.alone;
  first.skipped = static_cast<int>(shared);
  const cudaError_t status = launch_wide<T>(c, 1, tiles - shared, first, stream);
  if (status != cudaSuccess) return status;
  params.skipped = c.alone;
  params.goes_on = true;
  return launch_wide<T>(c, c.split, shared, params, stream);
}

}  // namespace

cudaError_t launch(const GradientProblem& p, const GradientConfig& config, const GradientOperands& o,
                   cudaStream_t stream) {
  const std::int64_t tiles = tiles_at_most(p, config);
  if (o.dbias != nullptr && (tiles == 0 || p.dtype == DType::f32)) return cudaErrorInvalidValue;
  if (tiles == 0) return cudaSuccess;
  if (config.wide < 64 && o.prepared == nullptr) return cudaErrorInvalidValue;
  GradientParams params = of_pattern(p, config, o.crow, o.col);
  params.list = o.prepared == nullptr ? nullptr : o.prepared + list_at(p, config);
  params.dvalues = o.dvalues;
  params.accumulate = o.accumulate;
  params.dbias = o.dbias;
  params.dy_values = o.dy;
  params.dy_stride = p.dy_stride;
  params.row_features = static_cast<int>(config.wide == 64 ? p.block_rows : RowUnits::kHigh);
  // Boxes of features × tokens, or, of X transposed, the other way round.
  const std::size_t size = size_of(p.dtype);
  const auto step = static_cast<int>(128 / size);  // tokens
  const auto map_of = [&](CUtensorMap* map, const void* data, std::int64_t inner, std::int64_t outer,
                          std::int64_t stride, int inner_box, int outer_box) {
    const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
    TensorShape shape;
    shape.tf32 = true;
    shape.size[0] = u(inner);
    shape.size[1] = u(outer);
    shape.stride[0] = u(stride) * size;
    shape.box[0] = static_cast<std::uint32_t>(inner_box);
    shape.box[1] = static_cast<std::uint32_t>(outer_box);
    return make_tensor_map(map, p.dtype, data, shape);
  };
  cudaError_t status = map_of(&params.dy, o.dy, p.rows, p.tokens, p.dy_stride, step, step);
  if (status == cudaSuccess && config.wide < 64)
    status = map_of(&params.dy_units, o.dy, p.rows, p.tokens, p.dy_stride, RowUnits::kHigh, step);
  if (status != cudaSuccess) return status;
  if (transposes(p, config)) {
    const std::int64_t stride = turned_stride(p.tokens);
    status = transpose(o.x, static_cast<int>(size), p.tokens, p.cols, p.x_stride, o.workspace, stride, false,
                       stream);
    if (status == cudaSuccess)
      status = map_of(&params.x, o.workspace, p.tokens, p.cols, stride, step, config.wide);
  } else {
    status = map_of(&params.x, o.x, p.cols, p.tokens, p.x_stride, config.wide, step);
  }
  if (status != cudaSuccess) return status;
  params.tokens = static_cast<int>(p.tokens);
  params.rows = static_cast<int>(p.rows);
  params.cols = static_cast<int>(p.cols);
  const auto run = p.dtype == DType::bf16  ? launch_type<__nv_bfloat16>
                   : p.dtype == DType::f16 ? launch_type<__half>
                                           : launch_type<float>;
  return run(config, tiles, params, stream);
}

}  // namespace rarefy::sm90
