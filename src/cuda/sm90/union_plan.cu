// What the union kernel walks and what its packing reads, made of a pattern on the device: strips of similar
// unit rows, groups of similar strips by falling cost, of each group its steps, and of each piece where its
// blocks are, or of fine blocks where pieces are. Nothing comes back to the host.
#include <utility>

#include "cuda/sm90/prepared.h"
#include "cuda/sm90/strip_groups.cuh"
#include "cuda/sm90/tile_lists.cuh"
#include "cuda/sm90/union_walk.h"
#include "cuda/sm90/unions.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = kPlanThreads;
constexpr int kUnitStride = 4;  // unit rows of a strip, at most

// Strips in groups of one size, and how they are walked.
struct GroupParams {
  int size, count;
  int boxes, box;  // of a step; columns of one
  int *sorted, *members, *clocks, *steps_of;
  StripGroup* out;      // of pairs two, one behind the other
  int4 *first, *steps;  // first: of each group's strips their first pieces
};

struct PlanParams {
  const int *offsets, *others, *entries;  // the index, by block row (grad_input: by block column)
  MemberBits units, strips;               // what they store, in columns of 32 bytes
  int columns;
  int along;              // columns of a stored block
  int unit;               // features of a unit row
  int room;               // for steps of a group
  GroupParams groups[3];  // the last: of pairs
  int* sorted;
  int* units_of;  // outputs: of each strip its unit rows
  int* first;     // of each strip its first piece, and behind the last the number of all
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

// The sum of the lanes' values up to this one.
__device__ inline int sum_to_lane(int value, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// A block for a range of unit rows: its strips, and what they store.
__global__ void __launch_bounds__(kThreads) strip_kernel(const PlanParams p, const GroupRoom room) {
  const int self = static_cast<int>(threadIdx.x), words = p.units.words, per_strip = 64 / p.unit;
  const GroupRange its = group_members<kUnitStride>(p.units, per_strip, p.sorted, room, p.units_of);
  const int* const units = p.units_of + its.first_group * kUnitStride;
  for (int i = self; p.slots != nullptr && i < its.groups * kUnitStride; i += kThreads) {
    if (units[i] >= 0) p.slots[units[i]] = its.first_group * kUnitStride + i;
  }
  for (int i = self; i < its.groups * words; i += kThreads) {
    const int strip = i / words, w = i % words;
    u32 joined = 0;
    for (int u = 0; u < per_strip; ++u) {
      const int unit = units[strip * kUnitStride + u];
      if (unit >= 0) joined |= p.units.of(unit)[w];
    }
    p.strips.of(its.first_group + strip)[w] = joined;
  }
  __syncthreads();
  for (int s = its.first_group + self; s < its.first_group + its.groups; s += kThreads) {
    int length = 0;
    for (int w = 0; w < words; ++w) length += __popc(p.strips.of(s)[w]);
    p.strips.length[s] = length;
  }
}

// A block for a range of strips and each group size, which blockIdx.y says: groups, and what they cost.
__global__ void __launch_bounds__(kThreads)
    group_kernel(const PlanParams p, const GroupRoom two, const GroupRoom three) {
  const GroupParams& its = p.groups[blockIdx.y];
  const GroupRange range =
      group_members<kMostGroup>(p.strips, its.size, its.sorted, blockIdx.y == 0 ? two : three, its.members);
  const int end = range.first_group + range.groups;
  for (int g = range.first_group + static_cast<int>(threadIdx.x); g < end; g += kThreads) {
    const int* strip = its.members + g * kMostGroup;
    int boxes = 0, pieces = 0;
    for (int w = 0; w < p.strips.words; ++w) {
      u32 joined = 0;
      for (int m = 0; m < its.size; ++m) {
        const u32 own = strip[m] < 0 ? 0 : p.strips.of(strip[m])[w];
        joined |= own;
        pieces += __popc(own);
      }
      boxes += __popc(boxes_of(joined, its.box));
    }
    its.steps_of[g] = (boxes + its.boxes - 1) / its.boxes;
    its.clocks[g] = union_clocks(its.steps_of[g], boxes * its.box, pieces);
  }
}

// A block for each group size: its groups' order; a third: where the pieces of strips are.
__global__ void __launch_bounds__(kThreads) order_kernel(const PlanParams p) {
  const int self = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 2) {
    if (self >= 32) return;
    int pieces = 0;
    for (int at = 0; at <= p.strips.count; at += 32) {
      const int s = at + self, own = s < p.strips.count ? p.strips.length[s] : 0;
      const int behind = sum_to_lane(own, self);
      if (s <= p.strips.count) p.first[s] = pieces + behind - own;
      pieces += __shfl_sync(~0u, behind, 31);
    }
    return;
  }
  const GroupParams& its = p.groups[blockIdx.x];
  for (int g = self; g < its.count; g += kThreads) {
    StripGroup group{its.steps_of[g], {-1, -1, -1}, {0, 0, 0}, its.clocks[g]};  // blocks: by step_kernel
    for (int m = 0; m < kMostGroup; ++m) group.strip[m] = its.members[g * kMostGroup + m];
    its.out[falling_place(g, its.count, [&](int of) { return its.clocks[of]; })] = group;
  }
}

// By a warp: steps of the kPair groups that begin with the g-th of what is there, all of both. First which
// boxes, a lane for each of 32; then masks, a lane for each step.
template <int kPair>
__device__ void make_steps(const PlanParams& p, const GroupParams& its, int g, int lane) {
  StripGroup* const groups = its.out + g;
  const auto steps_of = [&](int r) {
    return reinterpret_cast<int*>(its.steps + static_cast<std::int64_t>(g + r) * p.room);
  };
  const auto boxes_at = [&](int r, int step) {
    return reinterpret_cast<std::uint16_t*>(steps_of(r) + 4 * step + kStepBoxes);
  };
  // Columns of strip m in a box, its lowest bit first.
  const auto columns_of = [&](int r, int m, int box) {
    const int strip = groups[r].strip[m], column = box * its.box;
    if (strip < 0 || column >= p.columns) return 0u;
    return p.strips.of(strip)[column / 32] >> column % 32 & ((1u << its.box) - 1);
  };
  int rank = 0;
  for (int first = 0; first * its.box < p.columns; first += 32) {
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < kPair; ++r) {
      for (int m = 0; m < kMostGroup; ++m) any |= columns_of(r, m, first + lane);
    }
    const u32 present = __ballot_sync(~0u, any != 0);
    const int at = rank + __popc(present & ((1u << lane) - 1));
#pragma unroll
    for (int r = 0; r < kPair && any != 0; ++r) {
      boxes_at(r, at / its.boxes)[at % its.boxes] = static_cast<std::uint16_t>(first + lane);
      if (its.boxes == 1) boxes_at(r, at)[1] = kNoBox;
    }
    rank += __popc(present);
  }
  const int steps = (rank + its.boxes - 1) / its.boxes;
  if (lane < kPair && rank % its.boxes != 0) boxes_at(lane, steps - 1)[1] = kNoBox;
  __syncwarp();
  int clocks = 0;
#pragma unroll
  for (int r = 0; r < kPair; ++r) {
    StripGroup& group = groups[r];
    int* const to = steps_of(r);
    if (lane < kMostGroup)
      reinterpret_cast<int*>(its.first + g + r)[lane] =
          group.strip[lane] < 0 ? 0 : p.first[group.strip[lane]];
    int before[kMostGroup] = {}, own_steps[kMostGroup] = {};  // pieces; steps with any
    for (int first = 0; first < steps; first += 32) {
      const int s = first + lane;
      u32 mask = 0;
      int had[kMostGroup];  // before this step
      const u32 boxes = s < steps ? __ldcg(reinterpret_cast<const u32*>(to + 4 * s + kStepBoxes)) : 0;
      const int a = static_cast<int>(boxes & 0xFFFF), b = static_cast<int>(boxes >> 16);
#pragma unroll
      for (int m = 0; m < kMostGroup; ++m) {
        u32 own = 0;
        if (s < steps) own = columns_of(r, m, a) | (b == kNoBox ? 0 : columns_of(r, m, b) << its.box);
        mask |= own << (4 * m);
        own_steps[m] += own != 0;
        const int behind = sum_to_lane(__popc(own), lane);
        had[m] = before[m] + behind - __popc(own);
        before[m] += __shfl_sync(~0u, behind, 31);
      }
      if (s < steps) {
        to[4 * s + kStepMask] = static_cast<int>(mask) | had[2] << 12;
        to[4 * s + kStepBefore] = had[0];
        to[4 * s + kStepBefore + 1] = had[1];
      }
    }
    int pieces = 0;
#pragma unroll
    for (int m = 0; m < kMostGroup; ++m) {
      const int all = __reduce_add_sync(~0u, own_steps[m]);
      if (lane == 0) group.blocks[m] = all;
      pieces += before[m];
    }
    clocks = max(clocks, union_clocks(steps, rank * its.box / kPair, pieces));
  }
  if (kPair > 1 && lane < kPair) groups[lane].steps = steps, groups[lane].clocks = clocks;
}

// A warp for each group, or pair of groups of three, neighbours by their cost; blockIdx.y is the size's.
__global__ void __launch_bounds__(kThreads) step_kernel(const PlanParams p) {
  const GroupParams& its = p.groups[blockIdx.y];
  const int g = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (g >= its.count) return;
  if (its.size <= kMostGroup) {
    make_steps<1>(p, its, g, lane);
    return;
  }
  const GroupParams& threes = p.groups[1];  // whose steps other warps make meanwhile
  if (lane < 2) {
    const int of = 2 * g + lane;
    StripGroup& to = its.out[of];
    for (int m = 0; m < kMostGroup; ++m) to.strip[m] = of < threes.count ? threes.out[of].strip[m] : -1;
  }
  __syncwarp();
  make_steps<2>(p, its, 2 * g, lane);
}

// Set bits of a row before a column.
__device__ inline int rank_of(const u32* bits, int column) {
  int rank = __popc(bits[column / 32] & ((1u << column % 32) - 1));
  for (int w = 0; w < column / 32; ++w) rank += __popc(bits[w]);
  return rank;
}

// A thread for each unit row of each column of a strip; blockIdx.y is the strip. A source is a unit row's
// column of a stored block: (entry · unit rows of a block + which) · columns of a block + which, or -1.
__global__ void __launch_bounds__(kThreads) source_kernel(const PlanParams p) {
  const int per_strip = 64 / p.unit, strip = static_cast<int>(blockIdx.y);
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int u = i % per_strip, column = i / per_strip;
  if (column >= p.columns) return;
  const u32* own = p.strips.of(strip);
  if ((own[column / 32] >> column % 32 & 1) == 0) return;
  const int piece = p.first[strip] + rank_of(own, column);
  if (p.places != nullptr) {
    if (u == 0) p.places[strip * p.columns + column] = piece;
    return;
  }
  const int unit = p.units_of[strip * kUnitStride + u];
  int source = -1;
  if (unit >= 0 && (p.units.of(unit)[column / 32] >> column % 32 & 1)) {
    // A stored block has all its columns, so their rank is that of the entry.
    const int at = p.offsets[unit / p.units.across] + rank_of(p.units.of(unit), column) / p.along;
    const int entry = p.entries == nullptr ? at : p.entries[at];
    source = (entry * p.units.across + unit % p.units.across) * p.along + column % p.along;
  }
  p.sources[static_cast<std::int64_t>(piece) * per_strip + u] = source;
}

struct ListParams {
  StripLists lists;
  const StripGroup* groups;
  int pair;  // groups lie so far apart
  int2* items;
};
struct AllLists {
  ListParams of[3];
};

// A thread block for each list; blockIdx.y is the size's.
__global__ void __launch_bounds__(kListThreads) list_kernel(const AllLists all) {
  const auto& [lists, groups, pair, items] = all.of[blockIdx.y];
  const int level = static_cast<int>(blockIdx.x);
  if (level >= lists.levels()) return;
  int2* const its = items + lists.begin(level);
  const int count = order_tiles(lists, level, its, lists.clusters / 2,
                                [&](int group) { return groups[group * pair].clocks; });
  if (threadIdx.x >= 32) return;
  make_list(its, count, lists.clusters, [&](const StripTile& t) {
    const StripGroup& g = groups[t.group * pair];
    return t.part < 0 ? g.clocks : strip_clocks(g.blocks[t.part], g.blocks[t.part]);
  });
}

}  // namespace

cudaError_t prepare(const UnionProblem& p, const UnionLayouts& layouts, int sms, const ProductIndex& index,
                    std::int32_t* words, cudaStream_t stream) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const UnionPlan plan(p, sms);
  if (plan.strips == 0) return cudaSuccess;
  PlanParams params{};
  params.offsets = index.offsets;
  params.others = index.others;
  params.entries = index.entries;
  params.columns = n(up(p.in_features(), p.column()));
  params.along = n(p.block_in() / p.column());
  params.unit = p.unit();
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
  const auto room_of = [&](const MemberBits& m) {
    return GroupRoom::of(m, take(group_words(m.count, m.words)));
  };
  const GroupRoom of_units = room_of(params.units);
  const GroupRoom of_strips[2] = {room_of(params.strips), room_of(params.strips)};
  AllLists lists;
  for (std::size_t i = 0; i < 3; ++i) {
    const UnionPlan::Groups& of = plan.groups[i];
    GroupParams& its = params.groups[i];
    its.size = of.size;
    its.count = of.count;
    its.box = layouts[i].width / p.column();
    its.boxes = 4 / its.box;
    if (of.pair == 1) {
      its.sorted = take(plan.strips);
      its.members = take(std::int64_t{kMostGroup} * of.count);
      its.clocks = take(of.count);
      its.steps_of = take(of.count);
    }
    its.out = reinterpret_cast<StripGroup*>(words + of.groups_at);
    its.first = reinterpret_cast<int4*>(words + of.first_at);
    its.steps = reinterpret_cast<int4*>(words + of.steps_at);
    lists.of[i] = {plan.lists(of), its.out, of.pair, reinterpret_cast<int2*>(words + of.items_at)};
  }
  params.units_of = words + plan.units_at;
  params.first = words + plan.first_at;
  params.sources = words + plan.sources_at;
  params.places = p.fine() ? words + plan.places_at : nullptr;
  params.slots = p.fine() ? words + plan.slots_at : nullptr;
  const auto blocks = [](int warps) {
    return static_cast<unsigned>((warps + kThreads / 32 - 1) / (kThreads / 32));
  };
  const MarkedIndex index_shape{index.offsets,    index.others,    n(up(p.out_features(), p.block_out())),
                                n(p.block_out()), n(p.block_in()), n(p.marked()),
                                p.column(),       params.columns};
  mark_kernel<<<blocks(params.units.rows), kThreads, 0, stream>>>(index_shape, params.units);
  static cuda::SharedLimit strip_limit, group_limit;
  if (cudaError_t status = strip_limit.allow(strip_kernel, of_units.bytes); status != cudaSuccess)
    return status;
  if (cudaError_t status = group_limit.allow(group_kernel, of_strips[0].bytes); status != cudaSuccess)
    return status;
  const auto ranges = [](const MemberBits& m) { return static_cast<unsigned>(GroupRanges(m.count).ranges); };
  strip_kernel<<<ranges(params.units), kThreads, of_units.bytes, stream>>>(params, of_units);
  group_kernel<<<dim3(ranges(params.strips), 2), kThreads, of_strips[0].bytes, stream>>>(params, of_strips[0],
                                                                                         of_strips[1]);
  order_kernel<<<3, kThreads, 0, stream>>>(params);
  step_kernel<<<dim3(blocks(params.groups[0].count), 3), kThreads, 0, stream>>>(params);
  list_kernel<<<dim3(StripLists::kMostLevels, 3), kListThreads, 0, stream>>>(lists);
  const std::int64_t threads = std::int64_t{params.columns} * (64 / params.unit);
  source_kernel<<<dim3(n(up(threads, kThreads)), plan.strips), kThreads, 0, stream>>>(params);
  return prepared(stream);
}

}  // namespace rarefy::sm90
