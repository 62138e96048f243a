// The weight gradient of tall vectors: its tiles, made on the device of the pattern, and the launch.
#include "cuda/sm90/tall_gradient.h"

#include <algorithm>

#include "cuda/sm90/prepared.h"
#include "cuda/sm90/tall_gradient_launch.cuh"
#include "cuda/sm90/tall_walk.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 512,
              kBuckets = 2 * TallGradientConfig::kMost / 8 + 1;  // of tiles by their eights of columns
constexpr int kMostShared = 4;  // rounds of tiles, of which the last one may become parts

struct TilePlan {
  const int* crow;
  int block_rows, tiles_of_block;       // of W; row tiles of one, or windows of a tile of pairs
  int rows, columns, most, most_parts;  // of a tile; tiles; parts of those that are shared
  const int2 *pair_rows, *pairs;        // as TallPairs has them, or null
  int turning;                          // clusters that turn the last tokens, if they have no tiles
  StripLists lists;
  int4* tiles;
  int2* items;
  int* turns_last;
};

// Columns of a tile, at most, where there are `tiles` of the widest: where these are more than clusters, but
// not many rounds, as many as make a tile cost up to 1.2 of what a cluster has to do. Few long rows would
// otherwise be cut into tiles that all others wait for.
__device__ inline int most_columns(const TilePlan& p, int tiles) {
  const int clusters = p.lists.clusters, all = p.crow[p.block_rows] * p.tiles_of_block;
  if (tiles <= clusters) return p.columns;
  const int each = (all + tiles * p.rows) / clusters;  // columns and rows for a cluster
  const int wide = each + each / 5 - p.rows, least = (all + clusters - 1) / clusters;
  return min(p.columns, (max(64, max(wide, least)) + 7) / 8 * 8);
}

// By one block. Where tiles may become parts, equal ones lie by their place: a pattern always has the same
// parts, and so the same bits.
__device__ void order_equal(int4* tiles, int count) {
  constexpr int kMine = (kMostShared * kMostClusters + kThreads - 1) / kThreads;
  int4 mine[kMine];
  int before[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads;
    if (at >= count) continue;
    const int4 own = mine[i] = tiles[at];
    const int eights = (own.z + 7) / 8;
    before[i] = 0;
    for (int other = 0; other < count; ++other) {
      const int4 its = tiles[other];
      const int its_eights = (its.z + 7) / 8;
      before[i] += its_eights > eights ||
                   (its_eights == eights && (its.x < own.x || (its.x == own.x && its.y < own.y)));
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (static_cast<int>(threadIdx.x) + i * kThreads < count) tiles[before[i]] = mine[i];
  }
  __syncthreads();
}

// One block: tiles by falling number of columns, equal ones in any order where there are many.
__global__ void __launch_bounds__(kThreads) tile_kernel(const __grid_constant__ TilePlan p) {
  __shared__ int room[kBuckets], widest;
  const int self = static_cast<int>(threadIdx.x);
  const auto parts_of = [](int columns, int most) { return (columns + most - 1) / most; };
  if (self == 0) widest = 0;
  for (int i = self; i < kBuckets; i += kThreads) room[i] = 0;
  __syncthreads();
  if (p.pairs == nullptr) {
    int mine = 0;
    for (int row = self; row < p.block_rows; row += kThreads)
      mine += parts_of(p.crow[row + 1] - p.crow[row], p.columns) * p.tiles_of_block;
    atomicAdd(&widest, mine);
  }
  __syncthreads();
  const int columns = most_columns(p, widest);
  const auto each_tile = [&](auto&& take) {
    if (p.pairs != nullptr) {
      for (int pair = self; 2 * pair < p.block_rows; pair += kThreads) {
        const int2 first = p.pair_rows[2 * pair], second = p.pair_rows[2 * pair + 1], its = p.pairs[pair];
        const int rows = PairRows::word(first.x, second.x);
        const auto window = static_cast<int>(TallPairs::first_window(first.y, pair));
        for (int i = 0; i < its.x; ++i)
          take(int4{rows, window + i * p.tiles_of_block, its.y, 0}, (its.y + 7) / 8);
      }
      return;
    }
    for (int row = self; row < p.block_rows; row += kThreads) {
      // A row's columns divided evenly, as few tiles as hold them.
      const int begin = p.crow[row], end = p.crow[row + 1];
      const int parts = max(1, parts_of(end - begin, columns));
      const int width = ((end - begin + parts - 1) / parts + 7) / 8 * 8;
      for (int first = begin; first < end; first += width) {
        const int count = min(width, end - first);
        for (int part = 0; part < p.tiles_of_block; ++part)
          take(int4{row * p.tiles_of_block + part, first, count, 0}, (count + 7) / 8);
      }
    }
  };
  each_tile([&](const int4&, int bucket) { atomicAdd(&room[bucket], 1); });
  __syncthreads();
  if (self == 0) {  // where each begins
    int before = 0;
    for (int i = kBuckets - 1; i >= 0; --i) {
      const int count = room[i];
      room[i] = before;
      before += count;
    }
  }
  __syncthreads();
  each_tile([&](const int4& tile, int bucket) { p.tiles[atomicAdd(&room[bucket], 1)] = tile; });
  __syncthreads();
  if (room[0] <= kMostShared * p.lists.clusters) order_equal(p.tiles, room[0]);
  for (int i = room[0] + self; i < p.most; i += kThreads) p.tiles[i] = {0, 0, 0, 0};  // behind the last
}

// Whether a few tiles are left of whole rounds, which become parts.
__device__ bool leaves_few(int tiles, int clusters) {
  const int rest = tiles % clusters;
  return tiles > clusters && tiles <= kMostShared * clusters && rest != 0 && rest <= TileParts::kMostTiles;
}

// Clusters that have tiles: all, or those that do not turn the last tokens, if that asks for no round more
// and nothing is left of rounds that all could share.
__device__ int with_tiles(const TilePlan& p, int tiles) {
  const int all = p.lists.clusters, rounds = (tiles + all - 1) / all;
  return leaves_few(tiles, all) || tiles > rounds * (all - p.turning) ? all : all - p.turning;
}

// By one warp: these few, the narrowest, become parts. How many entries there are then.
__device__ int share_rest(const TilePlan& p, int tiles, int lane) {
  const int clusters = p.lists.clusters, rest = tiles % clusters;
  if (!leaves_few(tiles, clusters)) return tiles;
  const int parts = min(TileParts::kMostOfTile, min(p.most_parts / rest, clusters / rest)),
            first = tiles - rest;
  if (parts < 2) return tiles;
  const int4 mine = p.tiles[min(first + lane, tiles - 1)];
  __syncwarp();
  if (lane < rest) {
    for (int i = 0; i < parts; ++i) {
      p.tiles[first + lane * parts + i] = {mine.x, mine.y, mine.z, TilePart{i, parts, lane}.word()};
    }
  }
  __syncwarp();
  return first + rest * parts;
}

// Wide tiles first, each to the cluster that would be free first. A list has room for tiles that there are
// not.
__global__ void __launch_bounds__(32) tile_list_kernel(const __grid_constant__ TilePlan p) {
  const int lane = static_cast<int>(threadIdx.x);
  int tiles = 0;
  for (int i = lane; i < p.most; i += 32) tiles += p.tiles[i].z > 0 ? 1 : 0;
  tiles = __reduce_add_sync(~0u, tiles);
  const int clusters = with_tiles(p, tiles);
  if (lane == 0) *p.turns_last = clusters < p.lists.clusters ? 1 : 0;
  if (clusters == p.lists.clusters) tiles = share_rest(p, tiles, lane);
  for (int i = lane; i < p.most; i += 32) p.items[i] = {pack_tile({i, 0, i < tiles ? -1 : 0}), -1};
  __syncwarp();
  make_list(p.items, tiles, clusters, [&](const StripTile& t) {
    const int4 tile = p.tiles[t.group];
    const int clocks = (p.rows + tile.z) * 60;  // bytes, mostly; few columns wait for memory
    return 5000 + (tile.w == 0 ? clocks : clocks / TilePart(tile.w).count);
  });
}

template <class T, int kRows, TallSteps kKind>
cudaError_t launch_split(const TallGradientConfig& c, const TallGradientParams& params, Gathered x,
                         cudaStream_t stream) {
  switch (c.split) {
    case 1: return launch_tiles<T, kRows, 1, 0, kKind>(c, params, x, stream);
    case 2: return launch_tiles<T, kRows, 2, 0, kKind>(c, params, x, stream);
    case 4: return launch_tiles<T, kRows, 4, 0, kKind>(c, params, x, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

template <class T>
cudaError_t launch_type(const TallGradientConfig& c, const TallGradientParams& params, Gathered x,
                        cudaStream_t stream) {
  if (c.pairs > 0) return launch_pairs<T>(c, params, x, stream);
  if (c.long_steps) return launch_split<T, 64, TallSteps::long_steps>(c, params, x, stream);
  if (x == Gathered::turned)
    return c.rows == 128 ? launch_split<T, 128, TallSteps::turns>(c, params, x, stream)
                         : launch_split<T, 64, TallSteps::turns>(c, params, x, stream);
  return c.rows == 128 ? launch_split<T, 128, TallSteps::plain>(c, params, x, stream)
                       : launch_split<T, 64, TallSteps::plain>(c, params, x, stream);
}

int n(std::int64_t x) { return static_cast<int>(x); }
std::int64_t up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// X by token becomes panels of a step's tokens, side by side, in workspace: here, but for what the kernel
// turns itself. Counts, and those of parts behind them, are 0 then.
cudaError_t make_panels(const TallGradientProblem& p, const TallGradientConfig& config, const void* x,
                        Gathered how, int counts_of_parts, char* work, const int* turns_last,
                        TurnParams& turn, cudaStream_t stream) {
  const TurnedX turned(p.cols, p.tokens);
  const int step = config.tokens();
  const bool last = how == Gathered::transposed && config.turns_last(p);
  const std::int64_t panels = up(p.tokens, step);
  std::int64_t before = p.tokens;  // that are there at the start
  if (how == Gathered::turned || last) {
    constexpr std::int64_t kSide = LastTokens::kSide;
    const int features = last ? n(kSide) : TurnedX::features(step);
    TensorShape shape;
    shape.box[0] = static_cast<std::uint32_t>(features);
    shape.box[1] = static_cast<std::uint32_t>(step);
    shape.size[0] = static_cast<std::uint64_t>(p.cols);
    shape.size[1] = static_cast<std::uint64_t>(p.tokens);
    shape.stride[0] = static_cast<std::uint64_t>(p.x_stride) * 2;
    cudaError_t status = make_tensor_map(&turn.x, p.dtype, x, shape);
    if (status == cudaSuccess && last) {
      shape.size[0] = shape.box[0];
      shape.size[1] = static_cast<std::uint64_t>(panels * turned.features_in_all);
      shape.stride[0] = kSide * 2;
      status = make_tensor_map(&turn.panels, p.dtype, work, shape);
    }
    if (status != cudaSuccess) return status;
    before = last ? (panels - panels * config.last / 64) * kSide : p.tokens / 16 / 64 * 64 + 64;
    before = std::min(before, p.tokens);
    turn.to = work;
    turn.boxes = n(turned.features_in_all / features);
    turn.first = n(up(before, step)) * turn.boxes;
    turn.end = n(panels) * turn.boxes;
    turn.turners = last ? config.turning() : 0;
    turn.turns_last = turns_last;
  }
  const Elsewhere elsewhere{last ? turns_last : nullptr, before};
  if (last) before = p.tokens;  // unless the plan says that others do the last ones
  turn.counts = reinterpret_cast<int*>(work + turned.bytes);
  return transpose(x, 2, before, p.cols, p.x_stride, work, step, false, stream,
                   {step, turned.features_in_all * step, how == Gathered::turned},
                   {turn.counts, n(turned.counts) + counts_of_parts}, elsewhere);
}

}  // namespace

cudaError_t prepare(const TallGradientProblem& p, const TallGradientConfig& config, const std::int32_t* crow,
                    const std::int32_t* col, std::int32_t* words, cudaStream_t stream) {
  const TallGradientPlan plan(p, config);
  if (plan.most == 0) return cudaSuccess;
  const int2 *pair_rows = nullptr, *pairs = nullptr;
  if (config.pairs > 0) {
    pair_rows = reinterpret_cast<const int2*>(words + plan.pairs.rows_at);
    pairs = reinterpret_cast<const int2*>(words + plan.pairs.pairs_at);
    const cudaError_t status = prepare_pairs(p, config, crow, col, words, stream);
    if (status != cudaSuccess) return status;
  }
  const TilePlan params{crow,
                        n(up(p.rows, p.block_rows)),
                        config.pairs > 0 ? config.pairs : n(up(p.block_rows, config.rows)),
                        config.rows,
                        config.columns,
                        plan.most,
                        TileParts::kMost / std::max(1, config.pairs),
                        pair_rows,
                        pairs,
                        config.turning() / config.cluster(),
                        plan.lists(config),
                        reinterpret_cast<int4*>(words),
                        reinterpret_cast<int2*>(words + plan.items_at),
                        words + plan.turns_last_at};
  tile_kernel<<<1, kThreads, 0, stream>>>(params);
  tile_list_kernel<<<1, 32, 0, stream>>>(params);
  return prepared(stream);
}

cudaError_t launch(const TallGradientProblem& p, const TallGradientConfig& config,
                   const TallGradientOperands& o, cudaStream_t stream) {
  if (p.blocks == 0) return cudaSuccess;
  const TallGradientPlan plan(p, config);
  const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  TallGradientParams params{};
  TensorShape shape;
  shape.box[0] = 64;
  shape.box[1] = static_cast<std::uint32_t>(config.tokens());
  shape.size[0] = u(p.rows);
  shape.size[1] = u(p.tokens);
  shape.stride[0] = u(p.dy_stride) * 2;
  cudaError_t status = make_tensor_map(&params.dy, p.dtype, o.dy, shape);
  if (status != cudaSuccess) return status;
  shape.box[1] = 32;
  shape.size[0] = u(p.block_rows);
  shape.size[1] = u(p.blocks);
  shape.stride[0] = u(p.block_rows) * 2;
  status = make_tensor_map(&params.out, p.dtype, o.dvalues, shape);
  if (status != cudaSuccess) return status;
  const Gathered x = p.x_layout == Layout::by_feature ? Gathered::itself
                     : config.turns_itself(p)         ? Gathered::turned
                                                      : Gathered::transposed;
  char* work = static_cast<char*>(o.workspace);
  if (plan.has_parts) {
    char* parts = work + p.turned_bytes();
    params.part_counts = reinterpret_cast<int*>(parts);
    params.part_sums = reinterpret_cast<float4*>(parts + TileParts::kCountBytes);
  }
  params.turn.boxes = 1, params.turn.first = INT_MAX;  // nobody waits
  if (x != Gathered::itself) {
    status = make_panels(p, config, o.x, x, plan.has_parts ? TileParts::kCounts : 0, work,
                         o.plan + plan.turns_last_at, params.turn, stream);
  } else if (plan.has_parts) {
    status = cudaMemsetAsync(params.part_counts, 0, TileParts::kCountBytes, stream);
  }
  if (status != cudaSuccess) return status;
  params.lists = {plan.lists(config), o.plan + plan.items_at, 1};
  params.tiles = reinterpret_cast<const int4*>(o.plan);
  params.col = o.col;
  if (config.pairs > 0) {
    params.col = o.plan + plan.pairs.columns_at;
    params.windows = reinterpret_cast<const int2*>(o.plan + plan.pairs.windows_at);
    params.targets = o.plan + plan.pairs.targets_at;
    params.second = plan.pairs.room;
  }
  params.x = static_cast<const char*>(x == Gathered::itself ? o.x : o.workspace);
  const int step = config.tokens();
  params.x_tokens = n(x == Gathered::itself ? p.tokens : up(p.tokens, step) * step);
  params.x_pieces = static_cast<u32>(x == Gathered::itself ? p.x_stride / 8 : step / 8);
  params.x_step = (x == Gathered::itself ? 1 : TurnedX(p.cols, p.tokens).features_in_all) * step * 2;
  params.dvalues = o.dvalues;
  params.tokens = n(p.tokens);
  params.rows = n(p.rows);
  params.block_rows = n(p.block_rows);
  params.tiles_of_block = n(up(p.block_rows, config.rows));
  // Who turns X waits behind what is gathered: with a slot less 64×1 is 1–3 % faster.
  params.slots =
      static_cast<u32>(x == Gathered::turned && config.rows == 64 ? std::min(config.slots, 4) : config.slots);
  return p.dtype == DType::bf16 ? launch_type<__nv_bfloat16>(config, params, x, stream)
                                : launch_type<__half>(config, params, x, stream);
}

}  // namespace rarefy::sm90
