// What the tall kernel walks, made of a pattern on the device: groups of rows by falling cost, lists of
// tiles, and the columns of pairs of units. Nothing comes back to the host.
#include "cuda/sm90/tall.h"
#include "cuda/sm90/tall_walk.h"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;

struct TallPlanParams {
  const int* crow;
  const int2* ranges;   // of pairs: a group's columns
  int rows, per_block;  // of a group; groups of a block row
  StripLists lists;
  int4* groups;
  int2* items;
};

// A thread for each group: how many come before it.
__global__ void __launch_bounds__(kThreads) order_kernel(const TallPlanParams p) {
  const int self = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (self >= p.lists.groups) return;
  const auto range_of = [&](int row) {
    return p.ranges != nullptr ? p.ranges[row] : int2{p.crow[row], p.crow[row + 1]};
  };
  const auto [first, last] = range_of(self / p.per_block);
  int before = self % p.per_block;
  for (int row = 0; row * p.per_block < p.lists.groups; ++row) {
    const int its = min(p.per_block, p.lists.groups - row * p.per_block);
    const int2 range = range_of(row);
    const int columns = range.y - range.x;
    if (columns > last - first || (columns == last - first && row < self / p.per_block)) before += its;
  }
  p.groups[before] = {self, first, last, 0};
}

// A warp for each list.
__global__ void __launch_bounds__(32) tall_list_kernel(const TallPlanParams p) {
  const int level = static_cast<int>(blockIdx.x);
  if (level >= p.lists.levels()) return;
  const auto clocks_of = [&](int group) {
    return tall_clocks(p.rows, p.groups[group].z - p.groups[group].y);
  };
  const TallOrder order(p.lists.groups, heavy_groups(p.lists.groups, clocks_of), 1 << level);
  make_list(p.lists, order, p.items + p.lists.begin(level),
            [&](const StripTile& t) { return clocks_of(t.group); });
}

struct PairParams {
  const int *crow, *col;
  int block_rows, block_row_count, cols;
  int2* ranges;
  int* columns;
  int2* sources;
};

// Where a unit's columns begin among those of all units, and how many there are; its block row's first entry.
struct UnitColumns {
  int before, count, first;
};
__device__ inline UnitColumns columns_of(const PairParams& p, int unit) {
  const int units = p.block_rows / 32, row = unit / units;
  if (row >= p.block_row_count) return {p.crow[p.block_row_count] * units, 0, 0};
  const int first = p.crow[row], count = p.crow[row + 1] - first;
  return {first * units + unit % units * count, count, first};
}

// A thread block for each pair of units: what either stores, in order, where the two would lie one after the
// other.
__global__ void __launch_bounds__(kThreads) pair_kernel(const PairParams p) {
  constexpr int kWords = kMostPairColumns / 32;
  __shared__ std::uint32_t bits[kWords];
  __shared__ int before[kWords], of_warps[kThreads / 32];
  const int self = static_cast<int>(threadIdx.x), group = static_cast<int>(blockIdx.x);
  const int words = (p.cols + 31) / 32, each = (words + kThreads - 1) / kThreads;
  const UnitColumns halves[2] = {columns_of(p, 2 * group), columns_of(p, 2 * group + 1)};
  for (int w = self; w < words; w += kThreads) bits[w] = 0;
  __syncthreads();
  for (const UnitColumns& half : halves) {
    for (int i = self; i < half.count; i += kThreads) {
      const int c = p.col[half.first + i];
      atomicOr(bits + c / 32, 1u << c % 32);
    }
  }
  __syncthreads();
  // How many columns come before each word's.
  const int begin = min(self * each, words), end = min(begin + each, words);
  int mine = 0;
  for (int w = begin; w < end; ++w) mine += __popc(bits[w]);
  int sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, sum, d);
    if (self % 32 >= d) sum += below;
  }
  if (self % 32 == 31) of_warps[self / 32] = sum;
  __syncthreads();
  int at = halves[0].before + sum - mine;
  for (int w = 0; w < self / 32; ++w) at += of_warps[w];
  for (int w = begin; w < end; ++w) {
    before[w] = at;
    for (std::uint32_t left = bits[w]; left != 0; left &= left - 1) {
      p.columns[at] = w * 32 + __ffs(static_cast<int>(left)) - 1;
      p.sources[at++] = {-1, -1};
    }
  }
  if (self == kThreads - 1) p.ranges[group] = {halves[0].before, at};
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    for (int i = self; i < halves[h].count; i += kThreads) {
      const int entry = halves[h].first + i, c = p.col[entry];
      int* source = &p.sources[before[c / 32] + __popc(bits[c / 32] & ((1u << c % 32) - 1))].x;
      source[h] = entry;
    }
  }
}

struct PackPairsParams {
  const int2 *ranges, *sources;
  const std::uint16_t* values;
  uint4* packed;
  int block_rows;
};

// Columns of a group, eight threads each.
__global__ void __launch_bounds__(kThreads) pack_pairs_kernel(const PackPairsParams p) {
  const int group = static_cast<int>(blockIdx.x), piece = static_cast<int>(threadIdx.x) % 8, half = piece / 4;
  const int row = (2 * group + half) % (p.block_rows / 32) * 32 + piece % 4 * 8;
  const int2 range = __ldg(p.ranges + group);
  const int step = static_cast<int>(gridDim.y) * kThreads / 8;
#pragma unroll 4
  for (int i = range.x + (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) / 8;
       i < range.y; i += step) {
    const int2 source = __ldg(p.sources + i);
    const int entry = half == 0 ? source.x : source.y;
    uint4 out{0, 0, 0, 0};
    if (entry >= 0)
      out = __ldg(reinterpret_cast<const uint4*>(p.values + std::int64_t{entry} * p.block_rows + row));
    p.packed[std::int64_t{i} * 8 + piece] = out;
  }
}

}  // namespace

cudaError_t pack(const TallProblem& p, const TallConfig& config, int sms, const std::int32_t* words,
                 const void* values, void* packed, cudaStream_t stream) {
  const TallPlan plan(p, config, sms);
  if (p.columns() == 0) return cudaSuccess;
  const PackPairsParams params{reinterpret_cast<const int2*>(words + plan.ranges_at),
                               reinterpret_cast<const int2*>(words + plan.sources_at),
                               static_cast<const std::uint16_t*>(values), static_cast<uint4*>(packed),
                               static_cast<int>(p.block_rows)};
  // Enough thread blocks for all SMs.
  const dim3 grid(static_cast<unsigned>(plan.groups), static_cast<unsigned>(1 + 2048 / plan.groups));
  pack_pairs_kernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t prepare(const TallProblem& p, const TallConfig& config, int sms, const std::int32_t* crow,
                    const std::int32_t* col, std::int32_t* words, cudaStream_t stream) {
  const TallPlan plan(p, config, sms);
  if (plan.groups == 0) return cudaSuccess;
  auto* ranges = reinterpret_cast<int2*>(words + plan.ranges_at);
  if (p.in_pairs()) {
    const PairParams params{crow,
                            col,
                            static_cast<int>(p.block_rows),
                            static_cast<int>((p.rows + p.block_rows - 1) / p.block_rows),
                            static_cast<int>(p.cols),
                            ranges,
                            words + plan.columns_at,
                            reinterpret_cast<int2*>(words + plan.sources_at)};
    pair_kernel<<<static_cast<unsigned>(plan.groups), kThreads, 0, stream>>>(params);
  }
  const TallPlanParams params{crow,
                              p.in_pairs() ? ranges : nullptr,
                              config.rows,
                              static_cast<int>(p.column_rows() / config.rows),
                              plan.lists(),
                              reinterpret_cast<int4*>(words),
                              reinterpret_cast<int2*>(words + plan.items_at)};
  order_kernel<<<static_cast<unsigned>((plan.groups + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      params);
  tall_list_kernel<<<StripLists::kMostLevels, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
