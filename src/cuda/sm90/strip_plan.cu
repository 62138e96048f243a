// What the strip kernel walks, made of a pattern on the device: groups of strips whose columns overlap, by
// falling cost, and of each group its steps. Nothing comes back to the host.
#include <utility>

#include "cuda/sm90/prepared.h"
#include "cuda/sm90/strip_groups.cuh"
#include "cuda/sm90/strip_walk.h"
#include "cuda/sm90/strips.h"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = kPlanThreads;

struct PlanParams {
  const int *offsets, *others, *entries;  // the index, by block row (grad_input: by block column)
  MemberBits strips;                      // what they store, in 64-wide columns
  int columns;
  int along;         // 64-wide columns of a stored block
  int high, wide;    // its rows and columns / 64
  int size, groups;  // strips of a group
  bool transposed;
  int *sorted, *members, *clocks, *steps_of;
  StripGroup* out;  // outputs: see strip_walk.h
  int4* steps;
  struct {
    StripLists lists;
    int2* items;
  } of_cluster[2];  // of one thread block, and of two
};

// A block for a range of strips: groups, and what they cost.
__global__ void __launch_bounds__(kThreads) group_kernel(const PlanParams p, const GroupRoom room) {
  const GroupRange its = group_members<kMostGroup>(p.strips, p.size, p.sorted, room, p.members);
  const int end = its.first_group + its.groups;
  for (int g = its.first_group + static_cast<int>(threadIdx.x); g < end; g += kThreads) {
    const int* strip = p.members + g * kMostGroup;
    int steps = 0, blocks = 0;
    for (int w = 0; w < p.strips.words; ++w) {
      u32 joined = 0;
      for (int m = 0; m < p.size; ++m) {
        const u32 own = strip[m] < 0 ? 0 : p.strips.of(strip[m])[w];
        joined |= own;
        blocks += __popc(own);
      }
      steps += __popc(joined);
    }
    p.steps_of[g] = steps;
    p.clocks[g] = strip_clocks(steps, blocks);
  }
}

// One block: their order.
__global__ void __launch_bounds__(kThreads) order_kernel(const PlanParams p) {
  for (int g = static_cast<int>(threadIdx.x); g < p.groups; g += kThreads) {
    StripGroup group{p.steps_of[g], {-1, -1, -1}, {0, 0, 0}, 0};
    for (int m = 0; m < kMostGroup; ++m) {
      group.strip[m] = p.members[g * kMostGroup + m];
      if (group.strip[m] >= 0) group.blocks[m] = p.strips.length_of(group.strip[m]);
    }
    p.out[falling_place(g, p.groups, [&](int of) { return p.clocks[of]; })] = group;
  }
}

// A warp for each group: a lane for each column of 32.
__global__ void __launch_bounds__(kThreads) step_kernel(const PlanParams p) {
  const int g = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (g >= p.groups) return;
  const StripGroup group = p.out[g];
  const u32 below = (1u << lane) - 1;
  int4* to = p.steps + static_cast<std::int64_t>(g) * p.columns;
  int rank[kMostGroup] = {0, 0, 0};  // among the strip's own columns
  for (int w = 0; w < p.strips.words; ++w) {
    const int column = 32 * w + lane;
    u32 joined = 0;
    int block[kMostGroup];
#pragma unroll
    for (int m = 0; m < kMostGroup; ++m) {
      const int strip = group.strip[m];
      const u32 own = strip < 0 ? 0 : p.strips.of(strip)[w];
      joined |= own;
      block[m] = -1;
      if (own >> lane & 1) {
        // A stored block has all its columns, so their rank is that of the entry.
        const int at = p.offsets[strip / p.strips.across] + (rank[m] + __popc(own & below)) / p.along;
        const int entry = p.entries == nullptr ? at : p.entries[at];
        const int r = p.transposed ? column % p.high : strip % p.strips.across;
        const int c = p.transposed ? strip % p.strips.across : column % p.wide;
        block[m] = (entry * p.high + r) * p.wide + c;
      }
      rank[m] += __popc(own);
    }
    if (joined >> lane & 1) to[__popc(joined & below)] = {column, block[0], block[1], block[2]};
    to += __popc(joined);
  }
}

// A thread block for each list: blockIdx.x is the level, blockIdx.y says whose.
__global__ void __launch_bounds__(kListThreads) list_kernel(const PlanParams p) {
  const auto& [lists, items] = p.of_cluster[blockIdx.y];
  const int level = static_cast<int>(blockIdx.x);
  if (level >= lists.levels()) return;
  const auto clocks_of = [&](int group) {
    const StripGroup& g = p.out[group];
    return strip_clocks(g.steps, g.blocks[0] + g.blocks[1] + g.blocks[2]);
  };
  int2* const its = items + lists.begin(level);
  const int count = order_tiles(lists, level, its, lists.clusters / 2, clocks_of);
  if (threadIdx.x >= 32) return;
  make_list(its, count, lists.clusters, [&](const StripTile& t) {
    if (t.part < 0) return clocks_of(t.group);
    const int blocks = p.out[t.group].blocks[t.part];
    return strip_clocks(blocks, blocks);
  });
}

}  // namespace

cudaError_t prepare(const StripProblem& p, int sms, const ProductIndex& index, std::int32_t* words,
                    cudaStream_t stream) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  if (p.groups() == 0) return cudaSuccess;
  const StripPlan plan(p, sms);
  PlanParams params{};
  params.offsets = index.offsets;
  params.others = index.others;
  params.entries = index.entries;
  params.columns = n(up(p.in_features(), 64));
  params.high = n(p.block_rows / 64);
  params.wide = n(p.block_cols / 64);
  params.along = p.transposed ? params.high : params.wide;
  params.size = p.group_size();
  params.groups = n(p.groups());
  params.transposed = p.transposed;
  std::int32_t* at = words + plan.scratch_at;
  const auto take = [&](std::int64_t count) { return std::exchange(at, at + count); };
  MemberBits& strips = params.strips;
  strips.rows = n(p.transposed ? up(p.cols, p.block_cols) : up(p.rows, p.block_rows));
  strips.words = n(up(params.columns, 32));
  strips.across = p.transposed ? params.wide : params.high;
  strips.count = n(p.strips());
  strips.bits = reinterpret_cast<u32*>(take(std::int64_t{strips.rows} * strips.words));
  strips.length = take(strips.rows);
  const GroupRoom room = GroupRoom::of(strips, take(group_words(strips.count, strips.words)));
  params.sorted = take(strips.count);
  params.members = take(std::int64_t{kMostGroup} * params.groups);
  params.clocks = take(params.groups);
  params.steps_of = take(params.groups);
  params.out = reinterpret_cast<StripGroup*>(words + plan.groups_at);
  params.steps = reinterpret_cast<int4*>(words + plan.steps_at);
  const auto warps = [](int count) {
    return static_cast<unsigned>((count + kThreads / 32 - 1) / (kThreads / 32));
  };
  const int out = 64 * strips.across;
  const MarkedIndex index_shape{index.offsets,     index.others, strips.rows, out,
                                64 * params.along, out,          64,          params.columns};
  mark_kernel<<<warps(strips.rows), kThreads, 0, stream>>>(index_shape, strips);
  static cuda::SharedLimit limit;
  if (cudaError_t status = limit.allow(group_kernel, room.bytes); status != cudaSuccess) return status;
  group_kernel<<<GroupRanges(strips.count).ranges, kThreads, room.bytes, stream>>>(params, room);
  order_kernel<<<1, kThreads, 0, stream>>>(params);
  for (int i = 0; i < 2; ++i) {
    params.of_cluster[i] = {plan.lists(i + 1), reinterpret_cast<int2*>(words + plan.items_at[i])};
  }
  list_kernel<<<dim3(StripLists::kMostLevels, params.size == 2 ? 2 : 1), kListThreads, 0, stream>>>(params);
  step_kernel<<<warps(params.groups), kThreads, 0, stream>>>(params);
  return prepared(stream);
}

}  // namespace rarefy::sm90
