// A matrix of 16-bit elements transposed at the speed of a copy: 64 × 64 elements a thread block. Rows come
// as 16-byte pieces into shared memory, 8 × 8 matrices turn on their way through registers, and columns leave
// as 16-byte pieces. Enough blocks share an SM to keep device memory busy.
#include <climits>

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 128, kSide = 64, kPasses = kSide * 8 / kThreads;

struct TransposeParams {
  const std::uint16_t* from;
  std::uint16_t* to;
  std::int64_t rows, cols, stride, to_stride;
  unsigned col_tiles, tiles;
};

__device__ inline u32 place(int row, int piece) {  // of 16 bytes in a swizzled 64 × 64 tile
  return static_cast<u32>(row * 128 + ((piece ^ row % 8) << 4));
}

__global__ void __launch_bounds__(kThreads) transpose_kernel(const TransposeParams p) {
  __shared__ alignas(128) unsigned char tile[kSide * kSide * 2];
  const u32 shared = shared_address(tile);
  const int thread = static_cast<int>(threadIdx.x), piece = thread % 8, warp = thread / 32,
            lane = thread % 32;
  // The last rows first: what is read first of the result was written last, and is still in L2.
  const unsigned at = p.tiles - 1 - blockIdx.x;
  const std::int64_t row0 = std::int64_t{at / p.col_tiles} * kSide,
                     col0 = std::int64_t{at % p.col_tiles} * kSide;
  launch_dependents();

  uint4 in[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const std::int64_t row = row0 + thread / 8 + i * (kThreads / 8), col = col0 + piece * 8;
    const std::uint16_t* from = p.from + row * p.stride + col;
    in[i] = {};
    if (row < p.rows && col + 8 <= p.cols) {
      in[i] = __ldcs(reinterpret_cast<const uint4*>(from));
    } else if (row < p.rows) {
      auto* elements = reinterpret_cast<std::uint16_t*>(&in[i]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (col + e < p.cols) elements[e] = from[e];
      }
    }
  }
  wait_for_kernels();  // what was here may still be read
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    *reinterpret_cast<uint4*>(tile + place(thread / 8 + i * (kThreads / 8), piece)) = in[i];
  }
  __syncthreads();
  u32 turned[4][4];  // each warp: 16 columns of all rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_transposed(shared + place(i % 2 * 32 + lane, 2 * warp + i / 2), turned[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_matrices(shared + place((2 * warp + i / 2) * 8 + lane % 8, i % 2 * 4 + lane / 8), turned[i][0],
                   turned[i][1], turned[i][2], turned[i][3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = thread / 8 + i * (kThreads / 8);
    if (col0 + row >= p.cols) continue;
    *reinterpret_cast<uint4*>(p.to + (col0 + row) * p.to_stride + row0 + piece * 8) =
        *reinterpret_cast<const uint4*>(tile + place(row, piece));
  }
}

}  // namespace

cudaError_t transpose(const void* from, std::int64_t rows, std::int64_t cols, std::int64_t stride, void* to,
                      std::int64_t to_stride, bool overlap, cudaStream_t stream) {
  const std::int64_t col_tiles = (cols + kSide - 1) / kSide, tiles = (rows + kSide - 1) / kSide * col_tiles;
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  const TransposeParams params{
      static_cast<const std::uint16_t*>(from), static_cast<std::uint16_t*>(to), rows, cols, stride, to_stride,
      static_cast<unsigned>(col_tiles),        static_cast<unsigned>(tiles)};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(params.tiles);
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&launch, transpose_kernel, params);
}

}  // namespace rarefy::sm90
