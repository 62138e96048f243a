// linear of tall vectors for up to 32 tokens. Tokens are operand A of warp-sized products, rows of W operand
// B: a lane takes neighbouring rows of four columns as they are stored, two columns' weights of a row become
// a register of the product, and its sum may run over its 16 columns in any order. X is read as it is for up
// to four tokens, else from where a kernel before put all tokens of a column side by side. Loads are not
// `.nc`: the kernel before, which this one may overlap, may write what they read.
#include "cuda/sm90/tall_decode.h"

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tile/strip_sums.cuh"

namespace rarefy::sm90 {
namespace {

using device::Activation;

// Of W that all ask for before they may read.
constexpr u32 kAheadBytes = 4 << 20;
constexpr int kWarpsOfSm = 16;  // 128 registers a thread
constexpr int kColumns = 16;    // of a step, which is that of a product

struct TallDecodeParams {
  const void *x, *values, *bias;
  void* y;
  const int *crow, *col;
  int tokens, rows, cols, block_rows, columns;
  bool late;  // whether the next kernel may start only when this one's loads are done
  int split;  // thread blocks of a cluster, which share a strip
  u32 ahead;  // bytes of W that a thread block asks L2 for
  std::int64_t x_stride, y_stride;
  Activation activation;
};

// kWords 32-bit words of W, read once: not worth a line of L1. Zeros where nothing is wanted (by hand, as in
// decode.cu).
template <int kWords>
__device__ inline void load_streamed(u32 (&r)[kWords], const void* p, bool wanted) {
  const auto predicate = static_cast<u32>(wanted);
  if constexpr (kWords == 4) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
        : "l"(p), "r"(predicate)
        : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
        "@p ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];\n}"
        : "=&r"(r[0]), "=&r"(r[1])
        : "l"(p), "r"(predicate)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n"
        "@p ld.global.L1::no_allocate.L2::128B.u32 %0, [%1];\n}"
        : "=&r"(r[0])
        : "l"(p), "r"(predicate)
        : "memory");
  }
}

__device__ inline u32 load_half(const void* p, bool wanted) {  // 16 bits
  u32 r;
  asm volatile(
      "{\n.reg .pred p;\n.reg .u16 h;\nsetp.ne.u32 p, %2, 0;\nmov.u16 h, 0;\n@p ld.global.u16 h, [%1];\n"
      "cvt.u32.u16 %0, h;\n}"
      : "=r"(r)
      : "l"(p), "r"(static_cast<u32>(wanted))
      : "memory");
  return r;
}
template <int kWords>
__device__ inline void load_words(u32 (&r)[kWords], const void* p, bool wanted) {
  if constexpr (kWords == 2) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
        "@p ld.global.v2.u32 {%0, %1}, [%2];\n}"
        : "=&r"(r[0]), "=&r"(r[1])
        : "l"(p), "r"(static_cast<u32>(wanted))
        : "memory");
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.global.u32 %0, [%1];\n}"
                 : "=&r"(r[0])
                 : "l"(p), "r"(static_cast<u32>(wanted))
                 : "memory");
  }
}

__device__ inline u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ inline u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// All thread blocks together ask L2 for the index, each for the begin of what it will read of W. Hints, so
// they may be given while the kernel before runs, whatever that writes.
__device__ inline void ask_ahead(const TallDecodeParams& p, std::int64_t first_byte, std::int64_t bytes) {
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  const int self = static_cast<int>(threadIdx.x) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  if (p.columns == 0) return;
  for (int i = self; i < p.columns / 32 + 1; i += threads) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.col + min(i * 32, p.columns - 1)));
  }
  const u32 asked = static_cast<u32>(min(std::int64_t{p.ahead}, bytes)) / 16 * 16;
  if (threadIdx.x == 0 && asked > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(p.values) +
                                                                    first_byte / 16 * 16),
                 "r"(asked)
                 : "memory");
  }
}

struct TurnParams {
  const std::uint16_t* x;
  std::uint16_t* to;
  std::int64_t x_stride;
  int tokens, cols;
};

// x of kTurned tokens of a column side by side: of eight as they are, of more token t beside t + 8, and of 32
// those beside t + 16 and t + 24.
template <int kTurned>
__global__ void turn_kernel(const TurnParams p) {
  launch_dependents();
  wait_for_kernels();
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= p.cols) return;
  u32 words[kTurned / 2];
  std::uint16_t value[kTurned];
#pragma unroll
  for (int t = 0; t < kTurned; ++t) value[t] = t < p.tokens ? p.x[t * p.x_stride + k] : 0;
#pragma unroll
  for (int i = 0; i < kTurned / 2; ++i) {
    const int low = kTurned == 8 ? 2 * i : kTurned == 16 ? i : i / 2 + i % 2 * 16;
    const int high = kTurned == 8 ? low + 1 : low + 8;
    words[i] = value[low] | static_cast<u32>(value[high]) << 16;
  }
  auto* out = reinterpret_cast<uint4*>(p.to + static_cast<std::int64_t>(k) * kTurned);
#pragma unroll
  for (int i = 0; i < kTurned / 8; ++i)
    out[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
}

// A warp's sums, by token, then row.
template <int kRows, int kTurned>
struct Sums {
  static constexpr int kTokens = kTurned == 0 ? 4 : kTurned, kToken = kRows + 4, kFloats = kTokens * kToken;
};

// kRows rows of W; kTurned as TallDecodeProblem::turned has it.
template <class T, int kRows, int kTurned, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarpsOfSm / kWarps)
    tall_decode_kernel(const TallDecodeParams p) {
  constexpr int kWords = kRows / 16;    // of a lane's rows of a column
  constexpr int kProducts = kRows / 8;  // of a step
  // In flight; of 32 tokens sums take the registers.
  constexpr int kSteps = (kRows == 64 ? 2 : 4) / (kRows >= 32 && kTurned == 32 ? 2 : 1);
  constexpr int kTokens = Sums<kRows, kTurned>::kTokens, kToken = Sums<kRows, kTurned>::kToken;
  constexpr int kTiles = kTurned == 32 ? 2 : 1;
  extern __shared__ __align__(16) float partials[];
  auto* const partial = reinterpret_cast<float(*)[Sums<kRows, kTurned>::kFloats]>(partials);
  const int split = p.split, rank = static_cast<int>(cluster_rank());
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, q = lane % 4;
  const int strip = static_cast<int>(blockIdx.x) / split, strips_per_block = p.block_rows / kRows;
  const int block_row = strip / strips_per_block, first_row = strip % strips_per_block * kRows;
  if (!p.late) launch_dependents();
  const int begin = p.crow[block_row], end = p.crow[block_row + 1];
  {
    const std::int64_t all = static_cast<std::int64_t>(end - begin) * p.block_rows * 2;
    const int parts = strips_per_block * split, part = strip % strips_per_block * split + rank;
    ask_ahead(p, static_cast<std::int64_t>(begin) * p.block_rows * 2 + all * part / parts, all / parts);
  }
  const int steps = (end - begin + kColumns - 1) / kColumns;
  const int workers = kWarps * split, worker = rank * kWarps + warp;
  // Column i of this lane's four of a step; p.cols: none.
  const auto find = [&](int(&k)[kSteps][4], int first) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = begin + (first + s) * kColumns + 4 * q + i;
        k[s][i] = at < end ? p.col[at] : p.cols;
      }
    }
  };
  int k[kSteps][4];
  find(k, worker * kSteps);
  float d[kTiles][kProducts][4] = {};
  wait_for_kernels();
#pragma unroll 1
  for (int first = worker * kSteps; first < steps; first += workers * kSteps) {
    u32 w[kSteps][4][kWords], x[kSteps][4][kTiles];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int column = begin + (first + s) * kColumns + 4 * q;
      const T* from = static_cast<const T*>(p.values) + static_cast<std::int64_t>(column) * p.block_rows +
                      (first_row + g * (kRows / 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) load_streamed(w[s][i], from + i * p.block_rows, column + i < end);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool stored = k[s][i] < p.cols;
        const auto* in = static_cast<const T*>(p.x);
        if constexpr (kTurned == 0)
          x[s][i][0] = load_half(in + (g * p.x_stride + k[s][i]), stored && g < p.tokens);
        else if constexpr (kTurned == 8)
          x[s][i][0] = load_half(in + (k[s][i] * 8 + g), stored);
        else
          load_words(x[s][i], in + (k[s][i] * kTurned + 2 * kTiles * g), stored);
      }
    }
    find(k, first + workers * kSteps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      u32 a[kTiles][4];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        a[n][0] = low_halves(x[s][0][n], x[s][1][n]);
        a[n][2] = low_halves(x[s][2][n], x[s][3][n]);
        a[n][1] = kTurned < 16 ? 0 : high_halves(x[s][0][n], x[s][1][n]);  // tokens from 8 on
        a[n][3] = kTurned < 16 ? 0 : high_halves(x[s][2][n], x[s][3][n]);
      }
#pragma unroll
      for (int j = 0; j < kProducts; ++j) {  // the lane's j-th row
        const auto rows = [&](int i) {
          return j % 2 == 0 ? low_halves(w[s][i][j / 2], w[s][i + 1][j / 2])
                            : high_halves(w[s][i][j / 2], w[s][i + 1][j / 2]);
        };
        const u32 b0 = rows(0), b1 = rows(2);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma(T{}, d[n][j], a[n][0], a[n][1], a[n][2], a[n][3], b0, b1);
      }
    }
  }

  // The next kernel may start now. Sums by token, then row: of product j tokens g and g + 8, rows j of lanes
  // 2q and 2q + 1.
  if (p.late) launch_dependents();
#pragma unroll
  for (int j = 0; j < kProducts; ++j) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int token = g + i / 2 * 8;
      if (token < kTokens)
        partial[warp][token * kToken + (2 * q + i % 2) * kProducts + j] = d[i / 4][j][i % 4];
    }
  }
  __syncthreads();
  finish_strip<T, kWarps, kRows, kToken>(p, partial, p.tokens, block_row * p.block_rows + first_row, split,
                                         rank);
}

template <class T, int kRows, int kTurned>
cudaError_t launch_rows(const TallDecodeProblem& p, const TallDecodeConfig& c, const TallDecodeParams& params,
                        cudaStream_t stream) {
  const auto launch = [&]<int kWarps>() {
    return launch_kernel<tall_decode_kernel<T, kRows, kTurned, kWarps>>(
        {.blocks = c.strips(p) * c.split,
         .threads = kWarps * 32,
         .cluster = c.split,
         .shared_bytes = kWarps * Sums<kRows, kTurned>::kFloats * 4},
        params, stream);
  };
  switch (c.warps) {
    case 16: return launch.template operator()<16>();
    case 8: return launch.template operator()<8>();
    default: return launch.template operator()<4>();
  }
}

template <class T, int kTurned>
cudaError_t launch_turned(const TallDecodeProblem& p, const TallDecodeConfig& c,
                          const TallDecodeParams& params, cudaStream_t stream) {
  switch (c.rows) {
    case 64: return launch_rows<T, 64, kTurned>(p, c, params, stream);
    case 32: return launch_rows<T, 32, kTurned>(p, c, params, stream);
    default: return launch_rows<T, 16, kTurned>(p, c, params, stream);
  }
}

template <class T>
cudaError_t launch_type(const TallDecodeProblem& p, const TallDecodeConfig& c, TallDecodeParams params,
                        void* workspace, cudaStream_t stream) {
  if (p.turned() == 0) return launch_turned<T, 0>(p, c, params, stream);
  const TurnParams turn{static_cast<const std::uint16_t*>(params.x), static_cast<std::uint16_t*>(workspace),
                        p.x_stride, params.tokens, params.cols};
  constexpr int kThreads = 128;
  const KernelLaunch of{.blocks = (p.cols + kThreads - 1) / kThreads, .threads = kThreads};
  params.x = workspace;
  const auto both = [&]<int kTurned>() {
    const cudaError_t status = launch_kernel<turn_kernel<kTurned>>(of, turn, stream);
    return status == cudaSuccess ? launch_turned<T, kTurned>(p, c, params, stream) : status;
  };
  switch (p.turned()) {
    case 8: return both.template operator()<8>();
    case 16: return both.template operator()<16>();
    default: return both.template operator()<32>();
  }
}

}  // namespace

cudaError_t launch(const TallDecodeProblem& p, const TallDecodeConfig& config, const TallDecodeOperands& o,
                   cudaStream_t stream) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  TallDecodeParams params{};
  params.x = o.x;
  params.values = o.values;
  params.bias = o.bias;
  params.y = o.y;
  params.crow = o.crow;
  params.col = o.col;
  params.tokens = n(p.tokens);
  params.rows = n(p.rows);
  params.cols = n(p.cols);
  params.block_rows = n(p.block_rows);
  params.columns = n(p.columns);
  params.late = config.late;
  params.split = config.split;
  params.ahead = kAheadBytes / static_cast<u32>(std::max<std::int64_t>(1, config.strips(p) * config.split));
  params.x_stride = p.x_stride;
  params.y_stride = p.y_stride;
  params.activation = static_cast<device::Activation>(p.activation);
  return p.dtype == DType::bf16 ? launch_type<__nv_bfloat16>(p, config, params, o.workspace, stream)
                                : launch_type<__half>(p, config, params, o.workspace, stream);
}

}  // namespace rarefy::sm90
