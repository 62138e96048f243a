// A matrix transposed at the speed of a copy: 64 × 64 elements a thread block. Rows come as 16-byte pieces
// into shared memory, columns leave as 16-byte pieces; of 16 bits, 8 × 8 matrices turn on their way through
// registers, words are read one by one. Enough blocks share an SM to keep device memory busy. Lines that are
// copied as they lie go by warps, in the widest words that they are aligned to.
#include <bit>
#include <climits>

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/launch.cuh"
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
  bool aligned;  // rows of `from`, to 16 bytes
  Zeros zeros;
  Elsewhere elsewhere;
};

__device__ inline u32 place(int row, int piece) {  // of 16 bytes in a swizzled 64 × 64 tile
  return static_cast<u32>(row * 128 + ((piece ^ row % 8) << 4));
}

// L2 keeps a quarter of what is written, always the same lines of it, until it is wanted: here or in the next
// layer, whose result is often in the same place. X stays as other reads do, since others read it, too.
__device__ inline void store_kept(void* to, uint4 v) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 0.25;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}

// A thread block's tile, and its thread's pieces of the rows: kPieces of 16 bytes a row.
template <class T>
struct TransposeTile {
  static constexpr int kElements = 16 / sizeof(T), kPieces = kSide / kElements, kRows = kThreads / kPieces,
                       kPasses = kSide / kRows;
  std::int64_t row0, col0;
  int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;
  uint4 in[kPasses];

  // The last rows first: what is read first of the result was written last, and is still in L2.
  __device__ static unsigned index(const TransposeParams& p) { return p.tiles - 1 - blockIdx.x; }
  __device__ static bool left_out(const TransposeParams& p) {
    return p.elsewhere.is_so != nullptr && index(p) / p.col_tiles * kSide >= p.elsewhere.from_row &&
           __ldg(p.elsewhere.is_so) != 0;
  }

  __device__ explicit TransposeTile(const TransposeParams& p) {
    const unsigned at = index(p);
    row0 = std::int64_t{at / p.col_tiles} * kSide;
    col0 = std::int64_t{at % p.col_tiles} * kSide;
    launch_dependents();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const std::int64_t its = row0 + row + i * kRows, col = col0 + piece * kElements;
      const T* from = static_cast<const T*>(p.from) + its * p.stride + col;
      in[i] = {};
      if (its < p.rows && col + kElements <= p.cols && p.aligned) {
        in[i] = __ldcg(reinterpret_cast<const uint4*>(from));
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
      store_kept(static_cast<T*>(p.to) + (col0 + column) * p.to_stride + panel + place, of(column, piece));
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
  if (TransposeTile<u32>::left_out(p)) return;
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
  if (TransposeTile<std::uint16_t>::left_out(p)) return;
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

template <class Word>
struct LinesParams {
  const Word* from;
  Word* to;
  std::int64_t stride, to_stride, words, all;  // words, and with the zeros behind them
  unsigned pieces = 0, items = 0;              // of a line, of all lines
};
constexpr int kAtOnce = 8, kLinePiece = 32 * kAtOnce;  // words of a warp

template <class Word>
__global__ void __launch_bounds__(kThreads) lines_kernel(const LinesParams<Word> p) {
  launch_dependents();
  const unsigned item = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (item < p.items) {
    const std::int64_t line = item / p.pieces;
    const std::int64_t first = std::int64_t{item % p.pieces} * kLinePiece + threadIdx.x % 32;
    Word words[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + 32 * i < p.words) words[i] = __ldcs(p.from + line * p.stride + first + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + 32 * i < p.all) p.to[line * p.to_stride + first + 32 * i] = words[i];
    }
  }
  if (blockIdx.x == gridDim.x - 1) wait_for_kernels();
}

}  // namespace

cudaError_t transpose(const void* from, int size, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                      void* to, std::int64_t to_stride, bool overlap, cudaStream_t stream,
                      TransposedPanels panels, Zeros zeros, Elsewhere elsewhere) {
  const std::int64_t col_tiles = (cols + kSide - 1) / kSide, tiles = (rows + kSide - 1) / kSide * col_tiles;
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  const TransposeParams params{
      from,
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
      (reinterpret_cast<std::uintptr_t>(from) | static_cast<std::uintptr_t>(stride * size)) % 16 == 0,
      zeros,
      elsewhere};
  // Otherwise not early: 16 thread blocks would lie on each SM that is free first, so that rows come out of
  // order (8192 × 4096 with a product behind it 92 → 95 µs).
  const KernelLaunch launch{.blocks = tiles, .threads = kThreads, .early = overlap};
  return size == 4 ? launch_kernel<transpose_words_kernel>(launch, params, stream)
                   : launch_kernel<transpose_kernel>(launch, params, stream);
}

cudaError_t copy_lines(Lines<const void> from, Lines<void> to, std::int64_t count, std::int64_t bytes,
                       std::int64_t zeros, bool overlap, cudaStream_t stream) {
  if (count == 0 || bytes == 0) return cudaSuccess;
  const auto copy = [&]<class Word>(Word) {
    constexpr std::int64_t kSize = sizeof(Word);
    LinesParams<Word> p{static_cast<const Word*>(from.data),
                        static_cast<Word*>(to.data),
                        from.stride / kSize,
                        to.stride / kSize,
                        bytes / kSize,
                        (bytes + zeros) / kSize};
    const std::int64_t pieces = (p.all + kLinePiece - 1) / kLinePiece, items = count * pieces;
    if (items > INT_MAX) return cudaErrorInvalidConfiguration;
    p.pieces = static_cast<unsigned>(pieces), p.items = static_cast<unsigned>(items);
    constexpr unsigned kWarps = kThreads / 32;
    return launch_kernel<lines_kernel<Word>>(
        {.blocks = (p.items + kWarps - 1) / kWarps, .threads = kThreads, .early = overlap}, p, stream);
  };
  // The widest words that all lines begin with and are made of.
  const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(from.data) |
                              reinterpret_cast<std::uintptr_t>(to.data) |
                              static_cast<std::uintptr_t>(from.stride | to.stride | bytes | zeros);
  return bits % 16 == 0  ? copy(uint4{})
         : bits % 8 == 0 ? copy(uint2{})
         : bits % 4 == 0 ? copy(u32{})
                         : copy(std::uint16_t{});
}

}  // namespace rarefy::sm90
