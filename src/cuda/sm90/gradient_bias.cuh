// The gradient of a bias in the weight gradient's pass. The loading warps, who wait most of the time, sum
// panels of dY over the tokens as they pass by: one tile of each strip those of its strip. Rows of W that
// store nothing have no tile, and get a thread block that reads their dY.
#pragma once

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/gradient_tiles.cuh"

namespace rarefy::sm90 {

__device__ inline float2 two_of(const __nv_bfloat16*, u32 bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000)};
}
__device__ inline float2 two_of(const __half*, u32 bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// Eight features' sums.
template <class T>
struct Sums {
  float of[8] = {};

  __device__ void add(const float4& piece) {  // 16 bytes
    const float words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = two_of(static_cast<const T*>(nullptr), __float_as_uint(words[i]));
      of[2 * i] += two.x;
      of[2 * i + 1] += two.y;
    }
  }

  // Over the warp's lanes with the same lane % kPieces.
  template <int kPieces = 8>
  __device__ void add_lanes() {
#pragma unroll
    for (float& sum : of) {
#pragma unroll
      for (int d = kPieces; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    }
  }
};

// Four warps share the panels to be summed, 1, 2 or 4 of them; those of one panel share a step's 64 tokens.
template <class T>
struct PanelSums {
  static constexpr int kWarps = 4;
  u32 mask;   // of dY's panels
  int warps;  // of a panel
  int warp, lane;
  u32 first, next, flip;  // bytes to its first piece of a panel, from load to load; bits between these
  Sums<T> sums;

  // A load of a warp reads four rows of 128 bytes, of every `warps` times four. Units apart have 64 bytes of
  // a row each, and are read from two rows at a time, which meet in no bank.
  __device__ PanelSums(u32 panels, bool apart, int its_warp, int its_lane) {
    mask = panels;
    warps = kWarps / max(1, __popc(panels));
    warp = its_warp;
    lane = its_lane;
    const auto share = static_cast<u32>(warp & (warps - 1)), row = static_cast<u32>(lane) / 8 + 4 * share,
               piece = static_cast<u32>(lane) % 8;
    first = apart ? piece / 4 * 4096 + (row ^ piece / 4) * 64 + ((piece % 4 ^ row / 2 % 4) << 4)
                  : row * 128 + ((piece ^ row % 8) << 4);
    next = static_cast<u32>(warps) * (apart ? 256 : 512);
    flip = (static_cast<u32>(warps) & 1) * (apart ? 32 : 64);
  }
  __device__ int panel(int index) const { return static_cast<int>(__fns(mask, 0, index + 1)); }
  __device__ int mine() const { return panel(warp / warps); }

  __device__ void add(u32 panel_at) {  // where the swizzled rows begin
    u32 from = panel_at + first;
    for (int left = 16; left > 0; left -= 4 * warps) {
      float4 v[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[i] = load_shared_4((from + i * next) ^ (i % 2 == 0 ? 0 : flip));
#pragma unroll
      for (const float4& piece : v) sums.add(piece);
      from += 4 * next;
    }
  }

  // The warp's 64 sums, in the shared memory of the first thread block of a cluster of kSplit.
  template <int kSplit>
  __device__ void leave(u32 area, int share) const {
    const u32 to = place(area, share, warp) + static_cast<u32>(lane * 32);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float* v = sums.of + 4 * i;
      if constexpr (kSplit > 1) {
        store_remote_4(to + 16 * i, 0, v[0], v[1], v[2], v[3]);
      } else {
        device::store_shared_4(to + 16 * i, {v[0], v[1], v[2], v[3]});
      }
    }
  }

  // Where a warp of a share of the tokens leaves them.
  __device__ static u32 place(u32 area, int share, int warp) {
    return area + static_cast<u32>(share * kWarps + warp) * 256;
  }
  static constexpr u32 kBytes = 4 * kWarps * 256;  // of four shares

  // By all four warps: the sum of all shares, in their order, into dbias.
  template <class Tile>
  __device__ void finish(const GradientParams& p, const Tile& tile, u32 area, int shares) const {
    for (int i = warp * 32 + lane; i < __popc(mask) * 64; i += 32 * kWarps) {
      float sum = 0;
      for (int share = 0; share < shares; ++share) {
        for (int w = 0; w < warps; ++w) {
          sum += __uint_as_float(
              load_shared(place(area, share, i / 64 * warps + w) + static_cast<u32>(i % 64 * 4)));
        }
      }
      const int feature = tile.row_feature(panel(i / 64), i % 64);
      if (feature < p.rows) static_cast<T*>(p.dbias)[feature] = static_cast<T>(sum);
    }
  }
};

inline constexpr int kSlice = 32;  // features: 64 bytes of a token, whole sectors

// Slices of features of rows that store nothing, every `blocks`-th of all slices from `self_block` on, by a
// thread block each. `shared`: kSlice floats a warp.
template <class T>
__device__ inline void sum_unstored(const GradientParams& p, int self_block, int blocks, float* shared) {
  constexpr int kWarps = kTileThreads / 32, kPieces = kSlice / 8, kEach = kTileThreads / kPieces, kAtOnce = 8;
  const int self = static_cast<int>(threadIdx.x), warp = self / 32, lane = self % 32;
  for (int begin = self_block * kSlice; begin < p.rows; begin += blocks * kSlice) {
    const int row = begin / p.row_features * p.row_features, first = row / p.block_rows,
              last = min((row + p.row_features - 1) / p.block_rows, p.block_row_count - 1);
    if (__ldg(p.crow + first) != __ldg(p.crow + last + 1)) continue;
    const int feature = begin + self % kPieces * 8;
    const T* from = static_cast<const T*>(p.dy_values) + feature;
    Sums<T> sums;
    int token = self / kPieces;
    if (feature + 8 <= p.rows) {
      for (; token < p.tokens; token += kAtOnce * kEach) {
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int its = token + i * kEach;
          v[i] = its < p.tokens ? __ldg(reinterpret_cast<const float4*>(from + its * p.dy_stride)) : float4{};
        }
#pragma unroll
        for (const float4& piece : v) sums.add(piece);
      }
    } else {
      for (; token < p.tokens; token += kEach) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (feature + i < p.rows) sums.of[i] += static_cast<float>(from[token * p.dy_stride + i]);
        }
      }
    }
    sums.template add_lanes<kPieces>();
    __syncthreads();  // what was here has been read
    if (lane < kPieces) {
#pragma unroll
      for (int i = 0; i < 8; ++i) shared[warp * kSlice + lane * 8 + i] = sums.of[i];
    }
    __syncthreads();
    if (self < kSlice && begin + self < p.rows) {
      float sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kSlice + self];
      static_cast<T*>(p.dbias)[begin + self] = static_cast<T>(sum);
    }
  }
}

}  // namespace rarefy::sm90
