// Shares of the tokens in the weight gradient: the thread blocks of a cluster add up their sums.
#pragma once

#include "cuda/sm90/device/mbarrier.cuh"

namespace rarefy::sm90 {

__device__ inline void add_4(float* sums, float4 more) {
  sums[0] += more.x;
  sums[1] += more.y;
  sums[2] += more.z;
  sums[3] += more.w;
}

// A warpgroup's sums of 64 × 64 cells i = 0 … 3, four at a time: piece(16 i) … piece(16 i + 15). Thread block
// `rank` of the cluster gets the sums of all shares of the tokens for cells i with i · split / 4 = rank: the
// others write theirs into its shared memory, and it adds them to its own in order of their ranks. The last
// one also gets those of kRest pieces behind the cells, if there are any.
template <int kSplit, int kRest = 0, class Piece>
__device__ inline void exchange(Piece&& piece, u32 rank, u32 slots, bool has_rest = false) {
  constexpr u32 kEach = 32 / kSplit;  // pieces for each block
  constexpr u32 kRestAt = (kSplit - 1) * kEach;
  const u32 mine = slots + threadIdx.x * 16;
  cluster_sync();  // all have read their slots
#pragma unroll
  for (u32 to = 0; to < kSplit; ++to) {
    if (to == rank) continue;
    const u32 from_rank = rank - (rank > to ? 1 : 0);
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const float* v = piece(to * kEach + i);
      store_remote_4(mine + (from_rank * kEach + i) * 4096, to, v[0], v[1], v[2], v[3]);
    }
  }
  if constexpr (kRest > 0) {
    if (has_rest && rank < kSplit - 1) {
#pragma unroll
      for (u32 i = 0; i < kRest; ++i) {
        const float* v = piece(32 + i);
        store_remote_4(mine + (kRestAt + rank * kRest + i) * 4096, kSplit - 1, v[0], v[1], v[2], v[3]);
      }
    }
  }
  cluster_sync();
#pragma unroll
  for (u32 self = 0; self < kSplit; ++self) {
    if (self != rank) continue;
#pragma unroll
    for (u32 other = 0; other + 1 < kSplit; ++other) {
#pragma unroll
      for (u32 i = 0; i < kEach; ++i) {
        add_4(piece(self * kEach + i), load_shared_4(mine + (other * kEach + i) * 4096));
      }
    }
  }
  if constexpr (kRest > 0) {
    if (has_rest && rank == kSplit - 1) {
#pragma unroll
      for (u32 i = 0; i < (kSplit - 1) * kRest; ++i) {
        add_4(piece(32 + i % kRest), load_shared_4(mine + (kRestAt + i) * 4096));
      }
    }
  }
}

}  // namespace rarefy::sm90
