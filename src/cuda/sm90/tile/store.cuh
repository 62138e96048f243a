// The end of a tile: a warpgroup's sums D[64 features][tokens] leave as rows of tokens, with bias and
// activation, rounded once, through shared memory and TMA.
#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/device/tma.cuh"

namespace rarefy::sm90 {

using device::Activation;

inline constexpr u32 kStoreBytes = 64 * 64 * 2;  // a buffer: 64 tokens × 64 features
inline constexpr int kStoreBuffers = 2;

// One warpgroup's way out: its buffers (1024-byte aligned) and a named barrier of its own.
struct StoreLane {
  u32 buffers, barrier;
  int warp, lane;
  u32 turn = 0;
  __device__ bool leads() const { return warp == 0 && lane == 0; }
};

// The warp's sums of feature `row` = 16 · warp + lane / 4 and of row + 8 are d[4j + 2h + e]: token 8j +
// 2(lane % 4) + e, h = 1 for row + 8. `bias` has the biases of the two.
template <class T, Activation activation, int sums>
__device__ inline void store_tile(StoreLane& out, const float (&d)[sums], float2 bias, const CUtensorMap* y,
                                  int feature, int token) {
#pragma unroll
  for (int chunk = 0; chunk < sums / 32; ++chunk) {  // of 64 tokens
    if (out.leads()) store_wait_read<kStoreBuffers - 1>();
    named_barrier(out.barrier, 128);
    const u32 buffer = out.buffers + out.turn * kStoreBytes;
    out.turn ^= 1;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // matrix i: tokens 8(j + i / 2) …, features 16 · warp + 8(i % 2) …
        const int at = (chunk * 8 + j + i / 2) * 4 + i % 2 * 2;
        const float b = i % 2 == 0 ? bias.x : bias.y;
        v[i] = pack<T>(device::apply<activation>(d[at] + b), device::apply<activation>(d[at + 1] + b));
      }
      const int row = (j + out.lane / 16) * 8 + out.lane % 8;  // token of the chunk: 128 bytes, swizzled
      const int piece = 2 * out.warp + out.lane / 8 % 2;       // 16 bytes: eight features
      store_transposed(buffer + static_cast<u32>(row * 128 + ((piece ^ row % 8) << 4)), v[0], v[1], v[2],
                       v[3]);
    }
    fence_async();
    named_barrier(out.barrier, 128);
    if (out.leads()) {
      store_box(y, feature, token + chunk * 64, buffer);
      store_commit();
    }
  }
}

}  // namespace rarefy::sm90
