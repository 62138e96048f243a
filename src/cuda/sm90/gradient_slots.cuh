// Where the weight gradient's operands and results lie in shared memory, and the turns of a ring whose slots
// follow the tile.
#pragma once

#include "cuda/sm90/gradient_bias.cuh"
#include "cuda/sm90/tile/ring.cuh"

namespace rarefy::sm90 {

inline constexpr u32 kCellBytes = 64 * 64 * 2;  // of dY, a step's tokens × 64 features
// Three steps of the largest tiles, more of smaller ones.
inline constexpr u32 kRingBytes = 3 * 9 * kCellBytes;
// Behind the ring: sums of dY; results on their way out, 16 rows of 32 weights of each multiplying warp.
// Where tokens are shared results have room behind the sums of other thread blocks, in the ring.
inline constexpr u32 kBiasAt = kRingBytes, kStageBytes = 16 * 64;
template <int kSplit>
inline constexpr u32 kStageAt = kSplit == 1 ? kBiasAt + 1024 : 16 * kCellBytes;
// Products read up to seven panels of 16 beyond X's last one, which dY's are too short for, whatever is
// there: columns that nobody stores.
inline constexpr u32 kSharedBytes = 1024 + kStageAt<1> + 8 * kStageBytes;
static_assert(PanelSums<__half>::kBytes <= kStageAt<1> - kBiasAt + 8 * kStageBytes);
static_assert(7 * 2048 - kCellBytes <= kSharedBytes - 1024 - kRingBytes);

__device__ inline float2 load_two(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ inline float2 load_two(const __nv_bfloat16* p) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}
__device__ inline float2 load_two(const __half* p) {
  return __half22float2(*reinterpret_cast<const __half2*>(p));
}

// Rows of dY's features in tf32's products: eight lanes read words of eight rows at one time, so these are of
// two halves of the swizzled 128 bytes, which never meet in a bank. `piece`: of 16 bytes, in the first half.
struct WordRows {
  int half, piece, in_piece;  // of a panel's 32 features; the lane's rows: in `piece` and the next one
  __device__ WordRows(int warp, int lane)
      : half(warp / 2), piece(2 * (warp % 2) + lane / 16 * 4), in_piece(lane / 4 % 4) {}
  __device__ int feature(int h) const { return 32 * half + 4 * (piece + h) + in_piece; }
  // Bytes from a panel of dY to the word at row h and step lane % 4 + 4 · later of eight.
  __device__ u32 place(int h, int later, int lane) const {
    const int token = lane % 4 + 4 * later;
    return static_cast<u32>(half * 4096 + token * 128 + (((piece + h) ^ token) << 4) + in_piece * 4);
  }
};

// What the warps of a thread block share, but for the ring's slots.
template <int kWide, int kSplit>
struct GradientState {
  static constexpr bool kQueue = kWide == 64 && kSplit == 1;  // one tile after the other
  static constexpr int kTiles = kQueue ? 2 : 1;               // that the multiplying warps know of
  RingState ring;
  GradientTile<kWide> tile[kTiles];  // the last one has no panels
  alignas(8) u64 tile_full[kTiles], tile_empty[kTiles];
};

// How a tile's steps lie in the ring.
struct GradientSlots {
  u32 dy_at, bytes, count;  // of a slot: where dY's panels begin, all; how many there are
  __device__ GradientSlots(int x_panels, int dy_panels, u32 x_bytes)
      : dy_at(static_cast<u32>(x_panels) * x_bytes),
        bytes(dy_at + static_cast<u32>(dy_panels) * kCellBytes),
        count(min(static_cast<u32>(kMaxSlots), kRingBytes / bytes)) {}
};

// A place in a ring whose slots may become other ones from tile to tile: the parity of each slot's round.
struct SlotTurn {
  u32 slot = 0, parities = 0, bytes = 0;

  __device__ u32 parity() const { return parities >> slot & 1; }
  __device__ void next(u32 count) {
    parities ^= 1u << slot;
    slot = slot + 1 == count ? 0 : slot + 1;
  }
  // Whether they are others than before. If so, all must have been left.
  __device__ bool changes(const GradientSlots& slots) {
    if (bytes == slots.bytes) return false;
    bytes = slots.bytes;
    slot = 0;
    return true;
  }
};

}  // namespace rarefy::sm90
