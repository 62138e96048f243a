// What the tall kernel walks, made of a pattern on the device: groups of rows by falling cost, and lists of
// tiles. Nothing comes back to the host.
#include "cuda/sm90/prepared.h"
#include "cuda/sm90/tall.h"
#include "cuda/sm90/tall_walk.h"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;

struct TallPlanParams {
  const int* crow;
  int rows, per_block;  // of a group; groups of a block row
  StripLists lists;
  int4* groups;
  int2* items;
};

// A thread for each group: how many come before it.
__global__ void __launch_bounds__(kThreads) order_kernel(const TallPlanParams p) {
  const int self = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (self >= p.lists.groups) return;
  const int first = p.crow[self / p.per_block], last = p.crow[self / p.per_block + 1];
  int before = self % p.per_block;
  for (int row = 0; row * p.per_block < p.lists.groups; ++row) {
    const int its = min(p.per_block, p.lists.groups - row * p.per_block);
    const int columns = p.crow[row + 1] - p.crow[row];
    if (columns > last - first || (columns == last - first && row < self / p.per_block)) before += its;
  }
  p.groups[before] = {self, first, last, 0};
}

// A thread block for each list. Nothing by falling cost at the end: columns of X are gathered, and want to be
// in L2.
__global__ void __launch_bounds__(kListThreads) tall_list_kernel(const TallPlanParams p) {
  const int level = static_cast<int>(blockIdx.x);
  if (level >= p.lists.levels()) return;
  const auto clocks_of = [&](int group) {
    return tall_clocks(p.rows, p.groups[group].z - p.groups[group].y);
  };
  int2* const items = p.items + p.lists.begin(level);
  const int count = order_tiles(p.lists, level, items, 0, clocks_of);
  if (threadIdx.x >= 32) return;
  make_list(items, count, p.lists.clusters, [&](const StripTile& t) { return clocks_of(t.group); });
}

}  // namespace

cudaError_t prepare(const TallProblem& p, const TallConfig& config, int sms, const std::int32_t* crow,
                    std::int32_t* words, cudaStream_t stream) {
  const TallPlan plan(p, config, sms);
  if (plan.groups == 0) return cudaSuccess;
  const TallPlanParams params{crow,
                              config.rows,
                              static_cast<int>(p.block_rows / config.rows),
                              plan.lists(),
                              reinterpret_cast<int4*>(words),
                              reinterpret_cast<int2*>(words + plan.items_at)};
  order_kernel<<<static_cast<unsigned>((plan.groups + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      params);
  tall_list_kernel<<<StripLists::kMostLevels, kListThreads, 0, stream>>>(params);
  return prepared(stream);
}

}  // namespace rarefy::sm90
