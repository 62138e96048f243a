// Shares of the tokens in the weight gradient: the thread blocks of a cluster add up their sums.
#pragma once

#include "cuda/sm90/device/mbarrier.cuh"

namespace rarefy::sm90 {

// A warpgroup's sums: 64 × 64 cells i = 0 … 3 are d[i / 2][i % 2 · 32 …]. Thread block `rank` of the cluster
// gets the sums of all shares of the tokens for cells i with i · split / 4 = rank: the others write theirs
// into its shared memory, and it adds them to its own in order of their ranks.
template <int kSplit>
__device__ inline void exchange(float (&d)[2][64], u32 rank, u32 slots) {
  constexpr u32 kEach = 32 / kSplit;  // pieces of four sums for each block
  const u32 mine = slots + threadIdx.x * 16;
  cluster_sync();  // all have read their slots
#pragma unroll
  for (u32 to = 0; to < kSplit; ++to) {
    if (to == rank) continue;
    const u32 from_rank = rank - (rank > to ? 1 : 0);
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 at = to * kEach + i;
      const float* v = &d[at / 16][at % 16 * 4];
      store_remote_4(mine + (from_rank * kEach + i) * 4096, to, v[0], v[1], v[2], v[3]);
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
        const u32 at = self * kEach + i;
        float* v = &d[at / 16][at % 16 * 4];
        const float4 sums = load_shared_4(mine + (other * kEach + i) * 4096);
        v[0] += sums.x;
        v[1] += sums.y;
        v[2] += sums.z;
        v[3] += sums.w;
      }
    }
  }
}

}  // namespace rarefy::sm90
