// The way out of a strip of W that the warps of a thread block, or of a cluster, have multiplied for a few
// tokens: their sums in a fixed order, bias, activation, rounding.
#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/sm90/device/mbarrier.cuh"

namespace rarefy::sm90 {

// partial: of each warp the sums, of token t and row r at t · kToken + r. The first of `rows` of Y is row.
// Params: y and y_stride, bias, activation, rows.
template <class T, int kWarps, int kRows, int kToken, int kFloats, class Params>
__device__ inline void finish_strip(const Params& p, float (*partial)[kFloats], int tokens, int row,
                                    int split, int rank) {
  constexpr int kThreads = kWarps * 32;
  const auto finish = [&](int i, float sum) {  // as token i / kRows has it of the strip's row i % kRows
    const int token = i / kRows, n = row + i % kRows;
    if (n >= p.rows) return;
    if (p.bias != nullptr) sum += static_cast<float>(static_cast<const T*>(p.bias)[n]);
    static_cast<T*>(p.y)[token * p.y_stride + n] = T(device::activate(p.activation, sum));
  };
  const int sums = kRows * tokens;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < sums; i += kThreads) {
    const int at = i / kRows * kToken + i % kRows;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][at];
    if (split == 1)
      finish(i, sum);
    else
      partial[0][at] = sum;  // by its only reader here
  }
  if (split == 1) return;
  cluster_sync();
#pragma unroll 1
  for (int i = rank * kThreads + static_cast<int>(threadIdx.x); i < sums; i += split * kThreads) {
    float theirs[8], sum = 0;
#pragma unroll
    for (u32 r = 0; r < 8; ++r) {
      theirs[r] = 0;
      if (static_cast<int>(r) < split)
        theirs[r] = load_remote(shared_address(&partial[0][i / kRows * kToken + i % kRows]), r);
    }
#pragma unroll
    for (const float t : theirs) sum += t;
    finish(i, sum);
  }
  cluster_sync();  // a peer may still read here
}

}  // namespace rarefy::sm90
