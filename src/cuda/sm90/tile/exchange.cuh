// Thread blocks of a cluster that each have a part of a tile's sums (of the tokens in the weight gradient, of
// the features of X where there are few tiles) add them up.
#pragma once

#include "cuda/sm90/device/mbarrier.cuh"
#include "cuda/sm90/owners.h"

namespace rarefy::sm90 {

__device__ inline void add_4(float* sums, float4 more) {
  sums[0] += more.x;
  sums[1] += more.y;
  sums[2] += more.z;
  sums[3] += more.w;
}

// A thread's sums, four at a time: piece(0) … piece(kPieces - 1). Thread block `rank` of the cluster gets the
// sums of all for its share of the pieces, the first kOwners have one each: the others write theirs into its
// shared memory, and it adds them to its own in order of their ranks. The last one also gets those of kRest
// pieces behind them, if there are any. wanted: so many shares are wanted by anyone.
template <int kSplit, int kRest = 0, int kPieces = 32, int kOwners = kSplit, u32 kThreads = 256, class Piece>
__device__ inline void exchange(Piece&& piece, u32 rank, u32 slots, bool has_rest = false,
                                u32 wanted = kOwners) {
  constexpr u32 kEach = kPieces / kOwners, kStride = kThreads * 16, kRestAt = (kSplit - 1) * kEach;
  const u32 mine = slots + threadIdx.x * 16;
  cluster_sync();  // all have read their slots
#pragma unroll
  for (u32 to = 0; to < kOwners; ++to) {
    if (to == rank || to >= wanted) continue;
    const u32 from_rank = rank - (rank > to ? 1 : 0);
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const float* v = piece(to * kEach + i);
      store_remote_4(mine + (from_rank * kEach + i) * kStride, to, v[0], v[1], v[2], v[3]);
    }
  }
  if constexpr (kRest > 0) {
    if (has_rest && rank < kSplit - 1) {
#pragma unroll
      for (u32 i = 0; i < kRest; ++i) {
        const float* v = piece(kPieces + i);
        store_remote_4(mine + (kRestAt + rank * kRest + i) * kStride, kSplit - 1, v[0], v[1], v[2], v[3]);
      }
    }
  }
  cluster_sync();
#pragma unroll
  for (u32 self = 0; self < kOwners; ++self) {
    if (self != rank || self >= wanted) continue;
#pragma unroll
    for (u32 other = 0; other + 1 < kSplit; ++other) {
#pragma unroll
      for (u32 i = 0; i < kEach; ++i) {
        add_4(piece(self * kEach + i), load_shared_4(mine + (other * kEach + i) * kStride));
      }
    }
  }
  if constexpr (kRest > 0) {
    if (has_rest && rank == kSplit - 1) {
#pragma unroll
      for (u32 i = 0; i < (kSplit - 1) * kRest; ++i) {
        add_4(piece(kPieces + i % kRest), load_shared_4(mine + (kRestAt + i) * kStride));
      }
    }
  }
}

// Sums of a tile of kTokens tokens, where a cluster's `split` thread blocks, 2 to 4, have a part of its steps
// each: whole 64s of the tokens go to each, or to the first two or one.
template <int kTokens>
struct ShareOfTokens {
  int first, end;
  __device__ ShareOfTokens(int split, u32 rank) {
    const int owners = owners_of(kTokens, split), each = kTokens / owners;
    first = static_cast<int>(rank) * each;
    end = static_cast<int>(rank) < owners ? first + each : first;
  }
};

// By threads 0 … kThreads - 1; `left` tokens of the tile are there, or more.
template <int kTokens, u32 kThreads, int parts, int sums>
__device__ inline void exchange_tile(float (&d)[parts][sums], int split, u32 rank, u32 slots, int left) {
  constexpr int kPieces = kTokens / 8, kOfPart = sums / 4;
  const auto add = [&]<int kSplit>() {
    constexpr int kOwners = owners_of(kTokens, kSplit), kEach = kTokens / kOwners;
    const auto wanted = static_cast<u32>((max(left, 0) + kEach - 1) / kEach);
    exchange<kSplit, 0, kPieces, kOwners, kThreads>([&](u32 i) { return &d[i / kOfPart][i % kOfPart * 4]; },
                                                    rank, slots, false, wanted);
  };
  if (split == 2) add.template operator()<2>();
  if (split == 3) add.template operator()<3>();
  if (split == 4) add.template operator()<4>();
}

// By a warp that has no sums, or none that anyone wants: the exchange's.
__device__ inline void watch_exchange() {
  __syncwarp();
  cluster_sync();
  cluster_sync();
}

}  // namespace rarefy::sm90
