// A matrix transposed at the speed of a copy: 64 × 64 elements a thread block. Rows come as 16-byte pieces
// into shared memory, columns leave as 16-byte pieces; of 16 bits, 8 × 8 matrices turn on their way through
// registers, words are read one by one. Enough blocks share an SM to keep device memory busy.
#include <bit>
#include <climits>

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 128, kSide = 64;

struct TransposeParams {
  const void* from;
  void* to;
  std::int64_t rows, cols, stride, to_stride;
  unsigned col_tiles, tiles;
  int log_panel;  // of how many rows
  std::int64_t panel_stride;
  bool swizzled;
  Zeros zeros;
};

__device__ inline u32 place(int row, int piece) {  // of 16 bytes in a swizzled 64 × 64 tile
  return static_cast<u32>(row * 128 + ((piece ^ row % 8) << 4));
}

// A thread block's tile, and its thread's pieces of the rows: kPieces of 16 bytes a row.
template <class T>
struct TransposeTile {
  static constexpr int kElements = 16 / sizeof(T), kPieces = kSide / kElements, kRows = kThreads / kPieces,
                       kPasses = kSide / kRows;
  std::int64_t row0, col0;
  int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;
  uint4 in[kPasses];

  __device__ explicit TransposeTile(const TransposeParams& p) {
    // The last rows first: what is read first of the result was written last, and is still in L2.
    const unsigned at = p.tiles - 1 - blockIdx.x;
    row0 = std::int64_t{at / p.col_tiles} * kSide;
    col0 = std::int64_t{at % p.col_tiles} * kSide;
    launch_dependents();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const std::int64_t its = row0 + row + i * kRows, col = col0 + piece * kElements;
      const T* from = static_cast<const T*>(p.from) + its * p.stride + col;
      in[i] = {};
      if (its < p.rows && col + kElements <= p.cols) {
        in[i] = __ldcs(reinterpret_cast<const uint4*>(from));
      } else if (its < p.rows) {
        auto* elements = reinterpret_cast<T*>(&in[i]);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          if (col + e < p.cols) elements[e] = from[e];
        }
      }
    }
  }

  // By all threads: pieces of columns, of[column, piece of the rows]. This kernel ends behind the one before
  // it, for those who wait for this one: so one of its thread blocks does.
  template <class Piece>
  __device__ void store(const TransposeParams& p, Piece&& of) const {
    const std::int64_t its = row0 + piece * kElements;  // row
    const std::int64_t panel = (its >> p.log_panel) * p.panel_stride;
    const int in_panel = static_cast<int>(its & ((1 << p.log_panel) - 1));
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int column = row + i * kRows;
      if (col0 + column >= p.cols) continue;
      const int place =
          p.swizzled ? swizzled_piece(1 << (p.log_panel - 3), column, in_panel / 8) * 8 : in_panel;
      *reinterpret_cast<uint4*>(static_cast<T*>(p.to) + (col0 + column) * p.to_stride + panel + place) =
          of(column, piece);
    }
    if (blockIdx.x == gridDim.x - 1) {
      for (int i = static_cast<int>(threadIdx.x); i < p.zeros.count; i += kThreads) p.zeros.words[i] = 0;
      wait_for_kernels();
    }
  }
};

__global__ void __launch_bounds__(kThreads) transpose_words_kernel(const TransposeParams p) {
  constexpr int kStride = kSide + 1;  // one word more: rows of a column are in different banks
  __shared__ u32 tile[kSide * kStride];
  const TransposeTile<u32> t(p);
#pragma unroll
  for (int i = 0; i < t.kPasses; ++i) {
    u32* to = tile + (t.row + i * t.kRows) * kStride + t.piece * 4;
    to[0] = t.in[i].x, to[1] = t.in[i].y, to[2] = t.in[i].z, to[3] = t.in[i].w;
  }
  __syncthreads();
  t.store(p, [&](int column, int piece) -> uint4 {
    const u32* from = tile + 4 * piece * kStride + column;
    return {from[0], from[kStride], from[2 * kStride], from[3 * kStride]};
  });
}

__global__ void __launch_bounds__(kThreads) transpose_kernel(const TransposeParams p) {
  __shared__ alignas(128) unsigned char tile[kSide * kSide * 2];
  const u32 shared = shared_address(tile);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const TransposeTile<std::uint16_t> t(p);
#pragma unroll
  for (int i = 0; i < t.kPasses; ++i) {
    *reinterpret_cast<uint4*>(tile + place(t.row + i * t.kRows, t.piece)) = t.in[i];
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
  t.store(
      p, [&](int column, int piece) { return *reinterpret_cast<const uint4*>(tile + place(column, piece)); });
}

}  // namespace

cudaError_t transpose(const void* from, int size, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                      void* to, std::int64_t to_stride, bool overlap, cudaStream_t stream,
                      TransposedPanels panels, Zeros zeros) {
  const std::int64_t col_tiles = (cols + kSide - 1) / kSide, tiles = (rows + kSide - 1) / kSide * col_tiles;
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  const TransposeParams params{from,
                               to,
                               rows,
                               cols,
                               stride,
                               to_stride,
                               static_cast<unsigned>(col_tiles),
                               static_cast<unsigned>(tiles),
                               std::countr_zero(static_cast<unsigned>(panels.rows)),
                               panels.stride,
                               panels.swizzled,
                               zeros};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(params.tiles);
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&launch, size == 4 ? transpose_words_kernel : transpose_kernel, params);
}

}  // namespace rarefy::sm90
