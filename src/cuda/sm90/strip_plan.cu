// What the strip kernel walks, made of a pattern on the device: groups of strips whose columns overlap, by
// falling cost, and of each group its steps. Nothing comes back to the host.
#include <utility>

#include "cuda/sm90/strip_walk.h"
#include "cuda/sm90/strips.h"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {
namespace {

using u32 = std::uint32_t;

constexpr int kThreads = 512;
constexpr int kMostStrips = 1 << 16;

struct PlanParams {
  const int *offsets, *others, *entries;  // the index, by block row (grad_input: by block column)
  int rows, strips, columns, words;       // rows of the index; 64-wide columns, and words of their bits
  int across, along;                      // of a stored block: strips, and 64-wide columns of one
  int high, wide;                         // its rows and columns / 64
  int size, groups;                       // strips of a group
  bool transposed;
  u32* bits;  // of each row: the columns that it stores
  int *length, *sorted, *members, *clocks, *steps_of;
  StripGroup* out;  // outputs: see strip_walk.h
  int4* steps;
  struct {
    StripLists lists;
    int2* items;
  } of_cluster[2];  // of one thread block, and of two
};

__device__ inline const u32* bits_of(const PlanParams& p, int strip) {
  return p.bits + static_cast<std::int64_t>(strip / p.across) * p.words;
}

// A warp for each row.
__global__ void __launch_bounds__(kThreads) mark_kernel(const PlanParams p) {
  const int row = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.rows) return;
  u32* bits = p.bits + static_cast<std::int64_t>(row) * p.words;
  for (int w = lane; w < p.words; w += 32) bits[w] = 0;
  __syncwarp();
  const int begin = p.offsets[row], end = p.offsets[row + 1];
  for (int e = begin + lane; e < end; e += 32) {
    for (int k = 0; k < p.along; ++k) {
      const int column = p.others[e] * p.along + k;
      if (column < p.columns) atomicOr(bits + column / 32, 1u << column % 32);  // the rest is padding
    }
  }
  __syncwarp();
  int length = 0;
  for (int w = lane; w < p.words; w += 32) length += __popc(__ldcg(bits + w));
  length = __reduce_add_sync(~0u, length);
  if (lane == 0) p.length[row] = length;
}

// The largest of all threads' keys, in all threads.
__device__ inline u32 block_max(u32 key, u32* of_warps) {
  key = __reduce_max_sync(~0u, key);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  return __reduce_max_sync(~0u, of_warps[threadIdx.x % (kThreads / 32)]);
}

// Greedily from the longest strip on: with it go those that share most columns with the group so far.
__device__ void pair_strips(const PlanParams& p) {
  __shared__ u32 used[kMostStrips / 32], of_warps[2][kThreads / 32];
  const int self = static_cast<int>(threadIdx.x);
  for (int i = self; i < kMostStrips / 32; i += kThreads) used[i] = 0;
  for (int s = self; s < p.strips; s += kThreads) {
    const int row = s / p.across, length = p.length[row];
    int before = s % p.across;
    for (int other = 0; other < p.rows; ++other) {
      const int l = p.length[other], its = min(p.across, p.strips - other * p.across);
      if (l > length || (l == length && other < row)) before += its;
    }
    p.sorted[before] = s;
  }
  __syncthreads();
  const u32* mine = self < p.strips ? bits_of(p, p.sorted[self]) : nullptr;
  int first = 0, turn = 0;
  for (int g = 0; g < p.groups; ++g) {
    while (used[first / 32] >> first % 32 & 1) ++first;  // there is one: groups · size reaches the last strip
    const int seed = p.sorted[first];
    int chosen[kMostGroup] = {seed, -1, -1};
    __syncthreads();  // all have read `used`
    if (self == 0) {
      used[first / 32] |= 1u << first % 32;
      p.members[g * kMostGroup] = seed;
    }
    __syncthreads();
#pragma unroll
    for (int m = 1; m < kMostGroup; ++m) {
      if (m >= p.size) {
        if (self == 0) p.members[g * kMostGroup + m] = -1;
        continue;
      }
      const u32* a = bits_of(p, chosen[0]);
      const u32* b = bits_of(p, chosen[m - 1]);
      u32 best = 0;
      for (int i = first + 1 + self; i < p.strips; i += kThreads) {
        if (used[i / 32] >> i % 32 & 1) continue;
        const u32* own = i == self ? mine : bits_of(p, p.sorted[i]);
        u32 shared = 0;
        for (int w = 0; w < p.words; ++w) shared += static_cast<u32>(__popc((a[w] | b[w]) & own[w]));
        best = max(best, shared << 16 | static_cast<u32>(kMostStrips - 1 - i));
      }
      best = block_max(best, of_warps[turn]);
      turn ^= 1;
      const int i = best == 0 ? -1 : kMostStrips - 1 - static_cast<int>(best & 0xFFFF);
      chosen[m] = i < 0 ? chosen[0] : p.sorted[i];
      if (self == 0) {
        p.members[g * kMostGroup + m] = i < 0 ? -1 : p.sorted[i];
        if (i >= 0) used[i / 32] |= 1u << i % 32;
      }
      __syncthreads();
    }
  }
}

// One block: groups and their order.
__global__ void __launch_bounds__(kThreads) group_kernel(const PlanParams p) {
  const int self = static_cast<int>(threadIdx.x);
  if (p.across % p.size == 0) {  // strips of a block row have the same columns
    for (int i = self; i < p.groups * kMostGroup; i += kThreads) {
      const int m = i % kMostGroup, strip = i / kMostGroup * p.size + m;
      p.members[i] = m < p.size && strip < p.strips ? strip : -1;
    }
  } else {
    pair_strips(p);
  }
  __syncthreads();
  for (int g = self; g < p.groups; g += kThreads) {
    const int* strip = p.members + g * kMostGroup;
    int steps = 0, blocks = 0;
    for (int w = 0; w < p.words; ++w) {
      u32 joined = 0;
      for (int m = 0; m < p.size; ++m) {
        const u32 own = strip[m] < 0 ? 0 : bits_of(p, strip[m])[w];
        joined |= own;
        blocks += __popc(own);
      }
      steps += __popc(joined);
    }
    p.steps_of[g] = steps;
    p.clocks[g] = strip_clocks(steps, blocks);
  }
  __syncthreads();
  for (int g = self; g < p.groups; g += kThreads) {
    const int clocks = p.clocks[g];
    int before = 0;
    for (int other = 0; other < p.groups; ++other) {
      const int c = p.clocks[other];
      before += c > clocks || (c == clocks && other < g);
    }
    StripGroup group{p.steps_of[g], {-1, -1, -1}, {0, 0, 0}, 0};
    for (int m = 0; m < kMostGroup; ++m) {
      group.strip[m] = p.members[g * kMostGroup + m];
      if (group.strip[m] >= 0) group.blocks[m] = p.length[group.strip[m] / p.across];
    }
    p.out[before] = group;
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
  for (int w = 0; w < p.words; ++w) {
    const int column = 32 * w + lane;
    u32 joined = 0;
    int block[kMostGroup];
#pragma unroll
    for (int m = 0; m < kMostGroup; ++m) {
      const int strip = group.strip[m];
      const u32 own = strip < 0 ? 0 : bits_of(p, strip)[w];
      joined |= own;
      block[m] = -1;
      if (own >> lane & 1) {
        // A stored block has all its columns, so their rank is that of the entry.
        const int at = p.offsets[strip / p.across] + (rank[m] + __popc(own & below)) / p.along;
        const int entry = p.entries == nullptr ? at : p.entries[at];
        const int r = p.transposed ? column % p.high : strip % p.across;
        const int c = p.transposed ? strip % p.across : column % p.wide;
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
  params.rows = n(p.transposed ? up(p.cols, p.block_cols) : up(p.rows, p.block_rows));
  params.strips = n(p.strips());
  params.columns = n(up(p.in_features(), 64));
  params.words = n(up(params.columns, 32));
  params.high = n(p.block_rows / 64);
  params.wide = n(p.block_cols / 64);
  params.across = p.transposed ? params.wide : params.high;
  params.along = p.transposed ? params.high : params.wide;
  params.size = p.group_size();
  params.groups = n(p.groups());
  params.transposed = p.transposed;
  std::int32_t* at = words + plan.scratch_at;
  const auto take = [&](std::int64_t count) { return std::exchange(at, at + count); };
  params.bits = reinterpret_cast<u32*>(take(std::int64_t{params.rows} * params.words));
  params.length = take(params.rows);
  params.sorted = take(params.strips);
  params.members = take(std::int64_t{kMostGroup} * params.groups);
  params.clocks = take(params.groups);
  params.steps_of = take(params.groups);
  params.out = reinterpret_cast<StripGroup*>(words + plan.groups_at);
  params.steps = reinterpret_cast<int4*>(words + plan.steps_at);
  const auto warps = [](int count) {
    return static_cast<unsigned>((count + kThreads / 32 - 1) / (kThreads / 32));
  };
  mark_kernel<<<warps(params.rows), kThreads, 0, stream>>>(params);
  group_kernel<<<1, kThreads, 0, stream>>>(params);
  for (int i = 0; i < 2; ++i) {
    params.of_cluster[i] = {plan.lists(i + 1), reinterpret_cast<int2*>(words + plan.items_at[i])};
  }
  list_kernel<<<dim3(StripLists::kMostLevels, params.size == 2 ? 2 : 1), kListThreads, 0, stream>>>(params);
  step_kernel<<<warps(params.groups), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
