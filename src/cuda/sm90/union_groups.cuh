// What the plans of the strip and the union kernel share, device side: columns of rows as bits, members that
// go together because their columns overlap, and which cluster works on what.
#pragma once

#include <cstdint>

namespace rarefy::sm90 {

using u32 = std::uint32_t;

inline constexpr int kPlanThreads = 512;
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

// The largest of all threads' keys, in all threads.
__device__ inline u32 block_max(u32 key, u32* of_warps) {
  key = __reduce_max_sync(~0u, key);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  return __reduce_max_sync(~0u, of_warps[threadIdx.x % (kPlanThreads / 32)]);
}

// By one thread block: `to` gets `groups` times `kStride` members, -1 behind the last. Greedily from the
// longest member on: with it go those that share most columns with the group so far. `sorted` has room for
// all members, `columns` for all their words: word w of the i-th longest is columns[w · count + i], so that
// threads read side by side.
template <int kStride>
__device__ void group_members(const MemberBits& all, int size, int groups, int* sorted, u32* columns,
                              int* to) {
  __shared__ u32 used[kMostMembers / 32], joined[kMostMembers / 32], of_warps[2][kPlanThreads / 32];
  const int self = static_cast<int>(threadIdx.x), count = all.count, words = all.words;
  if (all.across % size == 0) {  // those of a row are alike
    for (int i = self; i < groups * kStride; i += kPlanThreads) {
      const int m = i % kStride, member = i / kStride * size + m;
      to[i] = m < size && member < count ? member : -1;
    }
    __syncthreads();
    return;
  }
  for (int i = self; i < kMostMembers / 32; i += kPlanThreads) used[i] = 0;
  for (int s = self; s < count; s += kPlanThreads) {
    const int row = s / all.across, length = all.length[row];
    int before = s % all.across;
    for (int other = 0; other < all.rows; ++other) {
      const int l = all.length[other], its = min(all.across, count - other * all.across);
      if (l > length || (l == length && other < row)) before += its;
    }
    sorted[before] = s;
  }
  __syncthreads();
  for (int i = self; i < words * count; i += kPlanThreads) columns[i] = all.of(sorted[i % count])[i / count];
  __syncthreads();
  int first = 0, turn = 0;
  for (int g = 0; g < groups; ++g) {
    while (used[first / 32] >> first % 32 & 1) ++first;  // there is one: groups · size reaches the last
    __syncthreads();                                     // all have read `used`
    if (self == 0) {
      used[first / 32] |= 1u << first % 32;
      to[g * kStride] = sorted[first];
    }
    for (int w = self; w < words; w += kPlanThreads) joined[w] = columns[w * count + first];
    __syncthreads();
    for (int m = 1; m < kStride; ++m) {
      if (m >= size) {
        if (self == 0) to[g * kStride + m] = -1;
        continue;
      }
      u32 best = 0;
      for (int i = first + 1 + self; i < count; i += kPlanThreads) {
        if (used[i / 32] >> i % 32 & 1) continue;
        u32 shared = 0;
        for (int w = 0; w < words; ++w)
          shared += static_cast<u32>(__popc(joined[w] & columns[w * count + i]));
        best = max(best, shared << 16 | static_cast<u32>(kMostMembers - 1 - i));
      }
      best = block_max(best, of_warps[turn]);
      turn ^= 1;
      const int i = best == 0 ? -1 : kMostMembers - 1 - static_cast<int>(best & 0xFFFF);
      if (i >= 0) {
        for (int w = self; w < words; w += kPlanThreads) joined[w] |= columns[w * count + i];
      }
      if (self == 0) {
        to[g * kStride + m] = i < 0 ? -1 : sorted[i];
        if (i >= 0) used[i / 32] |= 1u << i % 32;
      }
      __syncthreads();
    }
  }
}

}  // namespace rarefy::sm90
