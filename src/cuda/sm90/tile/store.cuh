// The end of a tile: a warpgroup's sums D[64 features][tokens] leave as rows of tokens, with bias and
// activation, rounded once, through shared memory and TMA.
#pragma once

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/device/tma.cuh"
#include "cuda/sm90/tile/activation.cuh"

namespace rarefy::sm90 {

inline constexpr u32 kStoreBytes = 64 * 64 * 2;  // a buffer: 64 tokens (f32: 32) × 64 features
inline constexpr int kStoreBuffers = 2;

// One warpgroup's way out: its one or two buffers (1024-byte aligned) and a named barrier of its own.
struct StoreLane {
  u32 buffers, barrier;
  int warp, lane;
  int count = kStoreBuffers;
  u32 turn = 0;
  __device__ bool leads() const { return warp == 0 && lane == 0; }
};

// Where a tile's 64 features go: 64 neighbours, or boxes of fewer, each at a place of its own.
struct Neighbours {
  int first;
  __device__ static constexpr int wide() { return 3; }  // 128 bytes
  __device__ int box() const { return first; }          // the first feature of box `lane`; negative: none
};
struct Boxes {
  int log_wide, of_lane;  // a box is 16 << log_wide bytes wide
  __device__ int wide() const { return log_wide; }
  __device__ int box() const { return of_lane; }
};

// f32 into a buffer: the warp's sums of 32 tokens, as below; `d` begins with them. Boxes of 32 tokens lie
// behind one another. Lanes of a store are two pieces of 16 bytes of four rows: the swizzle keeps them apart.
template <Activation activation>
__device__ inline void stage_words(u32 buffer, int wide, int warp, int lane, const float* d, float2 bias) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int feature = 16 * warp + lane / 4 + 8 * h, piece = feature / 4;
    const u32 box = buffer + static_cast<u32>((piece >> wide << (9 + wide)) + feature % 4 * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * j + 2 * (lane % 4) + e;  // token of the chunk
        const int place = (piece & ((1 << wide) - 1)) ^ (row >> (3 - wide) & ((1 << wide) - 1));
        store_shared(box + static_cast<u32>((row << (4 + wide)) | place << 4),
                     apply_rounded<float, activation>(d[4 * j + 2 * h + e] + (h == 0 ? bias.x : bias.y)));
      }
    }
  }
}

// The warp's sums of feature `row` = 16 · warp + lane / 4 and of row + 8 are d[4j + 2h + e]: token 8j +
// 2(lane % 4) + e, h = 1 for row + 8. `bias` has the biases of the two. Of the tokens those from the first-th
// to before the end-th are stored, whole 64s.
template <class T, Activation activation, int sums, class Features>
__device__ inline void store_tile(StoreLane& out, const float (&d)[sums], float2 bias, const CUtensorMap* y,
                                  const Features& features, int token, int first = 0, int end = 2 * sums) {
  constexpr int kSize = sizeof(T), kTokens = static_cast<int>(kStoreBytes) / (64 * kSize);
  const int wide = features.wide();
  const bool stores = out.warp == 0 && out.lane < 4 * kSize >> wide;  // a lane for each box
#pragma unroll
  for (int chunk = 0; chunk < 2 * sums / kTokens; ++chunk) {
    if (chunk * kTokens < first || chunk * kTokens >= end) continue;
    if (stores) {
      if (out.count == 2) {
        store_wait_read<1>();
      } else {
        store_wait_read<0>();
      }
    }
    named_barrier(out.barrier, 128);
    const u32 buffer = out.buffers + out.turn * kStoreBytes;
    if (out.count == 2) out.turn ^= 1;
    if constexpr (kSize == 4) {
      stage_words<activation>(buffer, wide, out.warp, out.lane, d + chunk * 16, bias);
    } else {
      const int piece = 2 * out.warp + out.lane / 8 % 2;  // 16 bytes: eight features
      // In a box rows are 16 << wide bytes, swizzled.
      const int place =
          (piece >> wide << (10 + wide)) | ((piece & ((1 << wide) - 1)) ^ out.lane % 8 >> (3 - wide)) << 4;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // matrix i: tokens 8(j + i / 2) …, features 16 · warp + 8(i % 2) …
          const int at = (chunk * 8 + j + i / 2) * 4 + i % 2 * 2;
          const float b = i % 2 == 0 ? bias.x : bias.y;
          v[i] =
              pack<T>(apply_rounded<T, activation>(d[at] + b), apply_rounded<T, activation>(d[at + 1] + b));
        }
        const int row = (j + out.lane / 16) * 8 + out.lane % 8;  // token of the chunk
        store_transposed(buffer + static_cast<u32>((row << (4 + wide)) + place), v[0], v[1], v[2], v[3]);
      }
    }
    fence_async();
    named_barrier(out.barrier, 128);
    if (stores) {
      if (features.box() >= 0) {
        store_box(y, features.box(), token + chunk * kTokens,
                  buffer + static_cast<u32>(out.lane * (kTokens * 16) << wide));
      }
      store_commit();
    }
  }
}

template <class T, Activation activation, int sums>
__device__ inline void store_tile(StoreLane& out, const float (&d)[sums], float2 bias, const CUtensorMap* y,
                                  int feature, int token, int first = 0, int end = 2 * sums) {
  store_tile<T, activation>(out, d, bias, y, Neighbours{feature}, token, first, end);
}

}  // namespace rarefy::sm90
