// What the union kernel walks and what its packing reads, made of a pattern on the device: strips of similar
// unit rows, groups of similar strips by falling cost, of each group its steps, and of each piece where its
// blocks are, or of fine blocks where pieces are. Nothing comes back to the host.
#include <utility>

#include "cuda/sm90/tile_lists.cuh"
#include "cuda/sm90/union_groups.cuh"
#include "cuda/sm90/union_walk.h"
#include "cuda/sm90/unions.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = kPlanThreads;
constexpr int kUnitStride = 4;  // unit rows of a strip, at most

struct PlanParams {
  const int *offsets, *others, *entries;  // the index, by block row (grad_input: by block column)
  MemberBits units, strips;               // what they store, in columns of 32 bytes
  int columns;
  int along;               // columns of a stored block
  int unit, size, groups;  // features of a unit row; strips of a group
  int boxes, box;          // of a step; columns of one
  int room;                // for steps of a group
  int *sorted, *members, *clocks, *steps_of, *pieces_of;
  u32* by_column;
  int* units_of;  // outputs: of each strip its unit rows
  StripGroup* out;
  int* first_piece;  // of each group, and behind the last the number of all
  int4* steps;
  int* sources;
  int *places, *slots;  // of fine blocks; else null
};

// Bits of boxes, at the first of each box's columns.
__device__ inline u32 boxes_of(u32 columns, int box) {
  columns |= columns >> 1;
  if (box == 2) return columns & 0x55555555;
  columns |= columns >> 2;
  return columns & 0x11111111;
}

// One block: strips, groups and their order.
__global__ void __launch_bounds__(kThreads) group_kernel(const PlanParams p) {
  const int self = static_cast<int>(threadIdx.x), words = p.units.words;
  group_members<kUnitStride>(p.units, 64 / p.unit, p.strips.count, p.sorted, p.by_column, p.units_of);
  for (int i = self; p.slots != nullptr && i < p.strips.count * kUnitStride; i += kThreads) {
    if (p.units_of[i] >= 0) p.slots[p.units_of[i]] = i;
  }
  for (int i = self; i < p.strips.count * words; i += kThreads) {
    const int strip = i / words, w = i % words;
    u32 joined = 0;
    for (int u = 0; u < 64 / p.unit; ++u) {
      const int unit = p.units_of[strip * kUnitStride + u];
      if (unit >= 0) joined |= p.units.of(unit)[w];
    }
    p.strips.of(strip)[w] = joined;
  }
  __syncthreads();
  for (int s = self; s < p.strips.count; s += kThreads) {
    int length = 0;
    for (int w = 0; w < words; ++w) length += __popc(p.strips.of(s)[w]);
    p.strips.length[s] = length;
  }
  __syncthreads();
  group_members<kMostGroup>(p.strips, p.size, p.groups, p.sorted, p.by_column, p.members);
  for (int g = self; g < p.groups; g += kThreads) {
    const int* strip = p.members + g * kMostGroup;
    int boxes = 0, pieces = 0;
    for (int w = 0; w < words; ++w) {
      u32 joined = 0;
      for (int m = 0; m < p.size; ++m) {
        const u32 own = strip[m] < 0 ? 0 : p.strips.of(strip[m])[w];
        joined |= own;
        pieces += __popc(own);
      }
      boxes += __popc(boxes_of(joined, p.box));
    }
    p.steps_of[g] = (boxes + p.boxes - 1) / p.boxes;
    p.pieces_of[g] = pieces;
    p.clocks[g] = union_clocks(p.steps_of[g], boxes * p.box, pieces);
  }
  __syncthreads();
  for (int g = self; g < p.groups; g += kThreads) {
    const int clocks = p.clocks[g];
    int before = 0, pieces = 0;
    for (int other = 0; other < p.groups; ++other) {
      const int c = p.clocks[other];
      if (c < clocks || (c == clocks && other >= g)) continue;
      ++before;
      pieces += p.pieces_of[other];
    }
    StripGroup group{p.steps_of[g], {-1, -1, -1}, {0, 0, 0}, clocks};  // blocks: by step_kernel
    for (int m = 0; m < kMostGroup; ++m) group.strip[m] = p.members[g * kMostGroup + m];
    p.out[before] = group;
    p.first_piece[before] = pieces;
    if (before == p.groups - 1) p.first_piece[p.groups] = pieces + p.pieces_of[g];
  }
}

// A warp for each group: first which boxes, a lane for each of 32; then masks, a lane for each step.
__global__ void __launch_bounds__(kThreads) step_kernel(const PlanParams p) {
  const int g = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (g >= p.groups) return;
  StripGroup& group = p.out[g];
  const int steps = group.steps;
  int* to = reinterpret_cast<int*>(p.steps + static_cast<std::int64_t>(g) * p.room);
  // Columns of strip m in a box, its lowest bit first.
  const auto columns_of = [&](int m, int box) {
    const int strip = group.strip[m], column = box * p.box;
    if (strip < 0 || column >= p.columns) return 0u;
    return p.strips.of(strip)[column / 32] >> column % 32 & ((1u << p.box) - 1);
  };
  for (int s = lane; s < steps; s += 32) to[4 * s + kStepSecond] = -1;
  __syncwarp();
  int rank = 0;
  for (int first = 0; first * p.box < p.columns; first += 32) {
    u32 any = 0;
    for (int m = 0; m < kMostGroup; ++m) any |= columns_of(m, first + lane);
    const u32 present = __ballot_sync(~0u, any != 0);
    const int at = rank + __popc(present & ((1u << lane) - 1));
    if (any != 0) to[4 * (at / p.boxes) + (at % p.boxes == 0 ? kStepFirst : kStepSecond)] = first + lane;
    rank += __popc(present);
  }
  __syncwarp();
  int piece = p.first_piece[g], own_steps[kMostGroup] = {};
  for (int first = 0; first < steps; first += 32) {
    const int s = first + lane;
    u32 mask = 0;
    if (s < steps) {
      const int a = __ldcg(to + 4 * s + kStepFirst), b = __ldcg(to + 4 * s + kStepSecond);
#pragma unroll
      for (int m = 0; m < kMostGroup; ++m) {
        const u32 its = columns_of(m, a) | (b < 0 ? 0 : columns_of(m, b) << p.box);
        mask |= its << (4 * m);
        own_steps[m] += its != 0;
      }
    }
    int behind = __popc(mask);  // pieces up to this step
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, behind, d);
      if (lane >= d) behind += other;
    }
    if (s < steps) {
      to[4 * s + kStepMask] = static_cast<int>(mask);
      to[4 * s + kStepPiece] = piece + behind - __popc(mask);
    }
    piece += __shfl_sync(~0u, behind, 31);
  }
#pragma unroll
  for (int m = 0; m < kMostGroup; ++m) {
    const int all = __reduce_add_sync(~0u, own_steps[m]);
    if (lane == 0) group.blocks[m] = all;
  }
}

// A thread for each unit row of each possible piece of a step; blockIdx.y is the group. A source is a unit
// row's column of a stored block: (entry · unit rows of a block + which) · columns of a block + which, or
// -1.
__global__ void __launch_bounds__(kThreads) source_kernel(const PlanParams p) {
  const int per_strip = 64 / p.unit, g = static_cast<int>(blockIdx.y);
  int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int u = i % per_strip;
  i /= per_strip;
  const int bit = i % (4 * kMostGroup), s = i / (4 * kMostGroup);
  if (s >= p.out[g].steps) return;
  const int4 step = p.steps[static_cast<std::int64_t>(g) * p.room + s];
  const auto mask = static_cast<u32>(step.y);
  if ((mask >> bit & 1) == 0) return;
  const int k = bit % 4, box = k < p.box ? step.x : step.w;
  const int column = box * p.box + k % p.box, strip = p.out[g].strip[bit / 4];
  const int piece = step.z + __popc(mask & ((1u << bit) - 1));
  if (p.places != nullptr) {
    if (u == 0) p.places[strip * p.columns + column] = piece;
    return;
  }
  const int unit = p.units_of[strip * kUnitStride + u];
  int source = -1;
  if (unit >= 0 && (p.units.of(unit)[column / 32] >> column % 32 & 1)) {
    int rank = __popc(p.units.of(unit)[column / 32] & ((1u << column % 32) - 1));
    for (int w = 0; w < column / 32; ++w) rank += __popc(p.units.of(unit)[w]);
    // A stored block has all its columns, so their rank is that of the entry.
    const int at = p.offsets[unit / p.units.across] + rank / p.along;
    const int entry = p.entries == nullptr ? at : p.entries[at];
    source = (entry * p.units.across + unit % p.units.across) * p.along + column % p.along;
  }
  p.sources[static_cast<std::int64_t>(piece) * per_strip + u] = source;
}

// A thread block for each list.
__global__ void __launch_bounds__(kListThreads)
    list_kernel(const StripLists lists, const StripGroup* groups, int2* items) {
  const int level = static_cast<int>(blockIdx.x);
  if (level >= lists.levels()) return;
  int2* const its = items + lists.begin(level);
  const int count =
      order_tiles(lists, level, its, lists.clusters / 2, [&](int group) { return groups[group].clocks; });
  if (threadIdx.x >= 32) return;
  make_list(its, count, lists.clusters, [&](const StripTile& t) {
    const StripGroup& g = groups[t.group];
    return t.part < 0 ? g.clocks : strip_clocks(g.blocks[t.part], g.blocks[t.part]);
  });
}

}  // namespace

cudaError_t prepare(const UnionProblem& p, const UnionLayout& layout, int sms, const ProductIndex& index,
                    std::int32_t* words, cudaStream_t stream) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const UnionPlan plan(p, layout, sms);
  if (plan.groups == 0) return cudaSuccess;
  PlanParams params{};
  params.offsets = index.offsets;
  params.others = index.others;
  params.entries = index.entries;
  params.columns = n(up(p.in_features(), p.column()));
  params.along = n(p.block_in() / p.column());
  params.unit = p.unit();
  params.size = layout.strips;
  params.groups = plan.groups;
  params.box = layout.width / p.column();
  params.boxes = 4 / params.box;
  params.room = plan.columns;
  std::int32_t* at = words + plan.scratch_at;
  const auto take = [&](std::int64_t count) { return std::exchange(at, at + count); };
  const auto members = [&](std::int64_t rows, std::int64_t across, std::int64_t count) {
    MemberBits m{};
    m.rows = n(rows);
    m.words = n(up(params.columns, 32));
    m.across = n(across);
    m.count = n(count);
    m.bits = reinterpret_cast<u32*>(take(rows * m.words));
    m.length = take(rows);
    return m;
  };
  params.units = members(up(p.out_features(), p.marked()), p.marked() / p.unit(), p.units());
  params.strips = members(plan.strips, 1, plan.strips);
  params.sorted = take(p.units());
  params.by_column = reinterpret_cast<u32*>(take(p.units() * params.units.words));
  params.members = take(std::int64_t{kMostGroup} * plan.groups);
  params.clocks = take(plan.groups);
  params.steps_of = take(plan.groups);
  params.pieces_of = take(plan.groups);
  params.units_of = words + plan.units_at;
  params.out = reinterpret_cast<StripGroup*>(words + plan.groups_at);
  params.first_piece = words + plan.count_at;
  params.steps = reinterpret_cast<int4*>(words + plan.steps_at);
  params.sources = words + plan.sources_at;
  params.places = p.fine() ? words + plan.places_at : nullptr;
  params.slots = p.fine() ? words + plan.slots_at : nullptr;
  const auto warps = [](int count) {
    return static_cast<unsigned>((count + kThreads / 32 - 1) / (kThreads / 32));
  };
  const MarkedIndex index_shape{index.offsets,    index.others,    n(up(p.out_features(), p.block_out())),
                                n(p.block_out()), n(p.block_in()), n(p.marked()),
                                p.column(),       params.columns};
  mark_kernel<<<warps(params.units.rows), kThreads, 0, stream>>>(index_shape, params.units);
  group_kernel<<<1, kThreads, 0, stream>>>(params);
  step_kernel<<<warps(params.groups), kThreads, 0, stream>>>(params);
  list_kernel<<<StripLists::kMostLevels, kListThreads, 0, stream>>>(
      plan.lists(), params.out, reinterpret_cast<int2*>(words + plan.items_at));
  const int threads = plan.columns * 4 * kMostGroup * (64 / params.unit);
  source_kernel<<<dim3(n(up(threads, kThreads)), plan.groups), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
