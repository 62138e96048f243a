// What the plans of the strip and the union kernel share: columns of rows as bits, and members that go
// together because their columns overlap.
#pragma once

#include <cstdint>

#include "cuda/shared_limit.h"
#include "cuda/sm90/device/mbarrier.cuh"

namespace rarefy::sm90 {

using u32 = std::uint32_t;

inline constexpr int kPlanThreads = 512;
inline constexpr int kPickThreads = 256;
inline constexpr int kMostMembers = 1 << 16;

// Rows of bits. Member m has those of row m / across: several strips or unit rows of one block row are alike.
struct MemberBits {
  u32* bits;
  int* length;  // set ones
  int rows, words, across, count;
  __device__ u32* of(int member) const { return bits + static_cast<std::int64_t>(member / across) * words; }
  __device__ int length_of(int member) const { return length[member / across]; }
};

// What rows of bits say of an index: each stands for `high` features of Y, a bit for `wide` features of X.
struct MarkedIndex {
  const int *offsets, *others;
  int block_rows;  // of the index
  int block_out, block_in, high, wide, columns;
};

// A warp for each row of bits; the block rows that it meets are one range of the index.
inline __global__ void __launch_bounds__(kPlanThreads) mark_kernel(const MarkedIndex index, MemberBits to) {
  const int row = static_cast<int>(blockIdx.x) * (kPlanThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= to.rows) return;
  u32* bits = to.bits + static_cast<std::int64_t>(row) * to.words;
  for (int w = lane; w < to.words; w += 32) bits[w] = 0;
  __syncwarp();
  const int first = row * index.high / index.block_out,
            last = min(((row + 1) * index.high - 1) / index.block_out, index.block_rows - 1);
  const int begin = index.offsets[first], end = index.offsets[last + 1];
  for (int e = begin + lane; e < end; e += 32) {
    const int feature = index.others[e] * index.block_in;
    const int stop = min((feature + index.block_in - 1) / index.wide + 1, index.columns);  // then padding
    for (int column = feature / index.wide; column < stop; ++column)
      atomicOr(bits + column / 32, 1u << column % 32);
  }
  __syncwarp();
  int length = 0;
  for (int w = lane; w < to.words; w += 32) length += __popc(__ldcg(bits + w));
  length = __reduce_add_sync(~0u, length);
  if (lane == 0) to.length[row] = length;
}

// The place of one of `count` by falling value; of equal ones the first goes first.
template <class ValueOf>
__device__ inline int falling_place(int own, int count, ValueOf value_of) {
  const int value = value_of(own);
  int before = 0;
  for (int other = 0; other < count; ++other) {
    const int its = value_of(other);
    before += its > value || (its == value && other < own) ? 1 : 0;
  }
  return before;
}

// Members are put into groups by one thread block for each range of them: a pick follows from the one before
// and takes half a microsecond and more. Ranges are neighbours, of which many patterns have like ones, in
// numbers that groups of 2, 3 and 4 divide; unit rows of 4096 features are one. Of 120 members products of
// random patterns took 1–4 % longer, as a pick had fewer to choose from.
struct GroupRanges {
  int members, ranges;
  static constexpr int kMost = 264, kMultiple = 12;

  explicit GroupRanges(int count) {
    const auto up = [](int a, int b) { return (a + b - 1) / b; };
    members = up(up(count, up(count, kMost)), kMultiple) * kMultiple;
    ranges = up(count, members);
  }
};

// Columns of a range's members, read again for each pick: in shared memory where they fit, else `far`, which
// has room for all. Behind them a map for each warp of who is in a group, so that none waits to know it.
struct GroupRoom {
  uint4* far;
  int members;         // of a range
  int bytes, maps_at;  // of dynamic shared memory

  static GroupRoom of(const MemberBits& all, std::int32_t* far) {
    constexpr std::int64_t kMost = 200 * 1024;
    const int members = GroupRanges(all.count).members;
    const std::int64_t columns = std::int64_t{members} * row(all) * 16,
                       maps = kMapWords * 4 * (kPickThreads / 32);
    const bool near = columns + maps <= kMost;
    const auto aligned = (reinterpret_cast<std::uintptr_t>(far) + 15) / 16 * 16;
    return {near ? nullptr : reinterpret_cast<uint4*>(aligned), members,
            static_cast<int>(near ? columns + maps : maps), static_cast<int>(near ? columns : 0)};
  }
  static __host__ __device__ int row(const MemberBits& m) { return (m.words + 3) / 4; }  // 16 bytes each
  static constexpr int kMapWords = (GroupRanges::kMost + 31) / 32;
};

// The largest of the pickers' keys, in all of them.
__device__ inline u32 largest_key(u32 key, u32* of_warps) {
  key = __reduce_max_sync(~0u, key);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  named_barrier(1, kPickThreads);
  return __reduce_max_sync(~0u, of_warps[threadIdx.x % (kPickThreads / 32)]);
}

// By kPickThreads threads: greedily from the longest member on, with which go those that share most columns
// with the group so far. Members are numbers by falling length; `columns` are theirs, `row` of each; `taken`,
// the warp's own, has the bits of those that are in a group. What a pick takes is latency.
template <int kStride>
__device__ void pick_members(int count, int size, int groups, const uint4* columns, int row, u32* taken,
                             int* to) {
  __shared__ u32 of_warps[2][kPickThreads / 32];
  constexpr int kMapWords = GroupRoom::kMapWords;
  const int self = static_cast<int>(threadIdx.x), lane = self % 32;
  if (lane < kMapWords) taken[lane] = lane < count / 32 ? 0 : lane > count / 32 ? ~0u : ~0u << count % 32;
  __syncwarp();
  const auto take = [&](int i) {
    if (lane == 0) taken[i / 32] |= 1u << i % 32;
    __syncwarp();
  };
  int turn = 0;
  for (int g = 0; g < groups; ++g) {
    int chosen[kStride];
    const u32 word = lane < kMapWords ? taken[lane] : ~0u;  // the longest that is left
    const int from = __ffs(__ballot_sync(~0u, word != ~0u)) - 1;
    chosen[0] = from * 32 + __ffs(~__shfl_sync(~0u, word, from)) - 1;
    take(chosen[0]);
#pragma unroll
    for (int m = 1; m < kStride; ++m) {
      chosen[m] = -1;
      if (m >= size || chosen[m - 1] < 0) continue;
      u32 best = 0;
      for (int i = self; i < count; i += kPickThreads) {
        if (taken[i / 32] >> i % 32 & 1) continue;
        u32 shared = 0;
#pragma unroll 2
        for (int w = 0; w < row; ++w) {
          uint4 joined = columns[chosen[0] * row + w];
#pragma unroll
          for (int c = 1; c < m; ++c) {
            const uint4 other = columns[chosen[c] * row + w];
            joined = {joined.x | other.x, joined.y | other.y, joined.z | other.z, joined.w | other.w};
          }
          const uint4 own = columns[i * row + w];
          shared += static_cast<u32>(__popc(joined.x & own.x) + __popc(joined.y & own.y) +
                                     __popc(joined.z & own.z) + __popc(joined.w & own.w));
        }
        best = max(best, shared << 16 | static_cast<u32>(kMostMembers - 1 - i));
      }
      best = largest_key(best, of_warps[turn]);
      turn ^= 1;
      if (best == 0) continue;
      chosen[m] = kMostMembers - 1 - static_cast<int>(best & 0xFFFF);
      take(chosen[m]);
    }
    if (self == 0) {
#pragma unroll
      for (int m = 0; m < kStride; ++m) to[g * kStride + m] = chosen[m];
    }
  }
}

// What a thread block has of members and groups.
struct GroupRange {
  int first, count, first_group, groups;

  __device__ GroupRange(int all, int members, int size, int range)
      : first(range * members),
        count(min(members, all - range * members)),
        first_group(first / size),
        groups((count + size - 1) / size) {}
};

// By one thread block for its range: `to` gets `kStride` members for each group, -1 behind the last. `sorted`
// has room for all members.
template <int kStride>
__device__ GroupRange group_members(const MemberBits& all, int size, int* sorted, const GroupRoom& room,
                                    int* to) {
  extern __shared__ uint4 near[];
  const int self = static_cast<int>(threadIdx.x), range = static_cast<int>(blockIdx.x);
  const GroupRange its(all.count, room.members, size, range);
  to += its.first_group * kStride;
  if (all.across % size == 0) {  // those of a row are alike
    for (int i = self; i < its.groups * kStride; i += kPlanThreads) {
      const int m = i % kStride, member = i / kStride * size + m;
      to[i] = m < size && member < its.count ? its.first + member : -1;
    }
    __syncthreads();
    return its;
  }
  sorted += its.first;
  for (int s = self; s < its.count; s += kPlanThreads) {
    const auto length_of = [&](int member) { return all.length_of(its.first + member); };
    sorted[falling_place(s, its.count, length_of)] = its.first + s;
  }
  __syncthreads();
  const int row = GroupRoom::row(all);
  uint4* const columns = room.far == nullptr ? near : room.far + static_cast<std::int64_t>(its.first) * row;
  for (int i = self; i < 4 * row * its.count; i += kPlanThreads) {
    const int w = i % (4 * row);
    reinterpret_cast<u32*>(columns)[i] = w < all.words ? all.of(sorted[i / (4 * row)])[w] : 0;
  }
  __syncthreads();
  if (self < kPickThreads) {
    u32* const maps = reinterpret_cast<u32*>(reinterpret_cast<char*>(near) + room.maps_at);
    pick_members<kStride>(its.count, size, its.groups, columns, row, maps + self / 32 * GroupRoom::kMapWords,
                          to);
  }
  __syncthreads();
  for (int i = self; i < its.groups * kStride; i += kPlanThreads) {
    if (to[i] >= 0) to[i] = sorted[to[i]];
  }
  __syncthreads();
  return its;
}

}  // namespace rarefy::sm90
