// The end of a tile whose result may lie by token or by feature: as tile/store.cuh, with matrices that leave
// shared memory turned or as they are.
#pragma once

#include "cuda/sm90/tile/store.cuh"

namespace rarefy::sm90 {

// The warp's sums of feature `row` = 16 · warp + lane / 4 and of row + 8 are d[4j + 2h + e]: token 8j +
// 2(lane % 4) + e, h = 1 for row + 8. `bias` has the biases of the two. by_feature: y's rows are features.
// Of the tokens those from the first-th to before the end-th are stored, whole 64s.
template <class T, Activation activation, int sums>
__device__ inline void store_either(StoreLane& out, const float (&d)[sums], float2 bias, const CUtensorMap* y,
                                    int feature, int token, bool by_feature, int first = 0,
                                    int end = 2 * sums) {
#pragma unroll
  for (int chunk = 0; chunk < sums / 32; ++chunk) {
    if (chunk * 64 < first || chunk * 64 >= end) continue;
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
        v[i] = pack<T>(apply_rounded<T, activation>(d[at] + b), apply_rounded<T, activation>(d[at + 1] + b));
      }
      // Matrix lane / 8: of which eight tokens, and of which eight features.
      const int tokens = j + out.lane / 16, features = 2 * out.warp + out.lane / 8 % 2;
      const int row = (by_feature ? features : tokens) * 8 + out.lane % 8;  // 128 bytes, swizzled
      const int piece = by_feature ? tokens : features;
      const u32 to = buffer + static_cast<u32>(row * 128 + ((piece ^ row % 8) << 4));
      if (by_feature) {
        store_matrices(to, v[0], v[1], v[2], v[3]);
      } else {
        store_transposed(to, v[0], v[1], v[2], v[3]);
      }
    }
    fence_async();
    named_barrier(out.barrier, 128);
    if (out.leads()) {
      const int its = token + chunk * 64;
      store_box(y, by_feature ? its : feature, by_feature ? feature : its, buffer);
      store_commit();
    }
  }
}

}  // namespace rarefy::sm90
