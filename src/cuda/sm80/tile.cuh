// What the sm80 kernels share: tiles in shared memory as rows of 16-byte pieces, swizzled so that eight rows
// of one piece are in different banks, how many steps of them are in flight, products and the launch.
#pragma once

#include "cuda/device/async_copy.cuh"
#include "cuda/device/matrix.cuh"

namespace rarefy::cuda::sm80 {

using device::commit_copies;
using device::copy_16;
using device::wait_for_copies;
using std::uint32_t;

inline constexpr int kThreads = 256, kWarps = kThreads / 32;

// Bytes from a tile's begin to a piece, in rows of kPieces.
template <int kPieces>
__device__ inline uint32_t place(int row, int piece) {
  static_assert(kPieces >= 2 && (kPieces & (kPieces - 1)) == 0);
  const int turned = kPieces >= 8 ? piece ^ row % 8 : piece ^ row / (8 / kPieces) % kPieces;
  return static_cast<uint32_t>((row * kPieces + turned) * 16);
}

// Eight neighbours, 16 bytes, of a row of `size` elements of 16 bits, zeros behind its end.
template <class T>
__device__ inline void copy_piece(uint32_t to, const T* row, int first, int size, bool exists) {
  static_assert(sizeof(T) == 2);
  const int left = exists ? max(0, min(8, size - first)) : 0;
  copy_16(to, row + (left > 0 ? first : 0), static_cast<uint32_t>(2 * left));
}

// Runs `steps` steps, kStages - 1 of them under way: bring(step, stage) starts a step's copies,
// multiply(stage) uses what they brought.
template <int kStages, class Bring, class Multiply>
__device__ inline void pipeline(int steps, Bring&& bring, Multiply&& multiply) {
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) bring(s, s);
    commit_copies();
  }
  int stage = 0, next = kStages - 1;
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // this step is there for all, and nobody reads the one before any more
    if (step + kStages - 1 < steps) bring(step + kStages - 1, next);
    commit_copies();
    multiply(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next = next + 1 == kStages ? 0 : next + 1;
  }
}

// Sums of 16 × 8 each, `high` rows of them, from fragments of 16 × 16: d += a · b. A fragment of b is two
// wide.
template <class T, int high, int wide>
__device__ inline void multiply_tiles(float (&d)[high][wide][4], const uint32_t (&a)[high][4],
                                      const uint32_t (&b)[wide / 2][4]) {
#pragma unroll
  for (int m = 0; m < high; ++m) {
#pragma unroll
    for (int n = 0; n < wide; ++n) {
      device::mma(T{}, d[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[n / 2][n % 2 * 2],
                  b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

// A thread block for each tile, or for each share of one.
template <class Tile, class Params>
cudaError_t launch_tiles(void (*kernel)(Params), int threads, std::int64_t tiles, const Params& params,
                         cudaStream_t stream, int shares = 1) {
  constexpr int kBytes = Tile::kStages * Tile::kBytes;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(shares)), threads, kBytes, stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace rarefy::cuda::sm80
