// linear for up to 16 tokens. Rows of W are operand A of warp-sized products, tokens operand B. A product's
// sum may run over its 16 steps in any order, so a lane takes eight neighbouring weights of a row with one
// 16-byte load and the same eight inputs of a token with another: no shared memory, no shuffles, no packing.
#include "cuda/sm90/decode.h"

#include "cuda/device/activation.cuh"
#include "cuda/sm90/device/matrix.cuh"

namespace rarefy::sm90 {
namespace {

using device::Activation;

constexpr int kWarps = 8;

struct DecodeParams {
  const void *x, *values, *bias;
  void* y;
  const int *crow, *col;
  int blocks, tokens, rows, cols, block_rows, block_cols;
  std::int64_t x_stride, y_stride;
  Activation activation;
};

template <int kWords>
struct Words {  // 4 or 2 words of 16-bit pairs
  u32 w[kWords] = {};
};

template <int kWords>
__device__ inline Words<kWords> load_streamed(const void* p) {  // read once: not worth a line of L1
  Words<kWords> r;
  if constexpr (kWords == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                 : "l"(p));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.w[0]), "=r"(r.w[1])
                 : "l"(p));
  }
  return r;
}

template <int kWords>
__device__ inline Words<kWords> load_cached(const void* p) {
  Words<kWords> r;
  if constexpr (kWords == 4) {
    const uint4 v = __ldg(static_cast<const uint4*>(p));
    r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  } else {
    const uint2 v = __ldg(static_cast<const uint2*>(p));
    r.w[0] = v.x, r.w[1] = v.y;
  }
  return r;
}

// All thread blocks together ask L2 for the whole index and X, which are small, before they are needed one
// after another: each first read of a line from device memory would cost as much as 4 KB of W for every warp.
template <class T>
__device__ inline void prefetch_index_and_x(const DecodeParams& p) {
  const int threads = static_cast<int>(gridDim.x) * kWarps * 32, line_bytes = 128;
  const int self = static_cast<int>(threadIdx.x) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int col_lines = p.blocks / 32 + 1, x_lines = p.cols * static_cast<int>(sizeof(T)) / line_bytes + 1;
  const int lines = col_lines + p.tokens * x_lines;
  for (int i = self; i < lines; i += threads) {
    const void* at = i < col_lines ? static_cast<const void*>(p.col + min(i * 32, p.blocks - 1))
                                   : static_cast<const T*>(p.x) + (i - col_lines) / x_lines * p.x_stride +
                                         min((i - col_lines) % x_lines * 64, p.cols - 1);
    if (p.blocks > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }
}

// kTiles × 16 rows, kTokens × 8 tokens, pieces of kStep columns (a row's pieces fill four lanes).
template <class T, int kTiles, int kTokens, int kStep, int kSplit>
__global__ void __launch_bounds__(kWarps * 32, kTokens == 1 ? 4 : 3) decode_kernel(const DecodeParams p) {
  constexpr int kRows = 16 * kTiles, kWords = kStep / 8, kPieces = 4 / kTiles;  // pieces in flight
  constexpr int kSums = kRows * kTokens * 8;
  __shared__ float partial[kWarps][kSums];
  const u32 rank = kSplit == 1 ? 0 : cluster_rank();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane / 4, k0 = lane % 4 * (kStep / 4);  // of the piece
  const int strip = static_cast<int>(blockIdx.x) / kSplit, strips_per_block = p.block_rows / kRows;
  const int block_row = strip / strips_per_block, first_row = strip % strips_per_block * kRows;
  prefetch_index_and_x<T>(p);
  const int begin = __ldg(p.crow + block_row), end = __ldg(p.crow + block_row + 1);
  const int per_block = p.block_cols / kStep, pieces = (end - begin) * per_block;
  const T* x = static_cast<const T*>(p.x);
  const T* values = static_cast<const T*>(p.values) +
                    (static_cast<std::int64_t>(begin) * p.block_rows + first_row + row) * p.block_cols + k0;

  float d[kTiles][kTokens][4] = {};
  const int workers = kWarps * kSplit, worker = static_cast<int>(rank) * kWarps + warp;
  for (int first = worker * kPieces; first < pieces; first += workers * kPieces) {
    Words<kWords> a[kPieces][kTiles][2], b[kPieces][kTokens];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = first + i, entry = piece / per_block;
      if (piece >= pieces) continue;
      const T* from =
          values + static_cast<std::int64_t>(entry) * p.block_rows * p.block_cols + piece % per_block * kStep;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          a[i][t][half] =
              load_streamed<kWords>(from + static_cast<std::int64_t>(16 * t + 8 * half) * p.block_cols);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = first + i, entry = piece / per_block;
      if (piece >= pieces) continue;
      const int k = __ldg(p.col + begin + entry) * p.block_cols + piece % per_block * kStep + k0;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (row + 8 * t < p.tokens && k < p.cols)
          b[i][t] = load_cached<kWords>(x + (row + 8 * t) * p.x_stride + k);
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
#pragma unroll
          for (int w = 0; w < kWords; w += 2) {
            mma(T{}, d[t][n], a[i][t][0].w[w], a[i][t][1].w[w], a[i][t][0].w[w + 1], a[i][t][1].w[w + 1],
                b[i][n].w[w], b[i][n].w[w + 1]);
          }
        }
      }
    }
  }

  // Sums by token, then row: what is stored side by side lies side by side.
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * n + 2 * (lane % 4) + i % 2, r = 16 * t + row + i / 2 * 8;
        partial[warp][token * kRows + r] = d[t][n][i];
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kSums; i += kWarps * 32) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][i];
    partial[0][i] = sum;  // by its only reader
  }
  if constexpr (kSplit > 1)
    cluster_sync();
  else
    __syncthreads();
  for (int i = static_cast<int>(rank) * kWarps * 32 + static_cast<int>(threadIdx.x); i < kSums;
       i += kSplit * kWarps * 32) {
    const int token = i / kRows, n = block_row * p.block_rows + first_row + i % kRows;
    if (token >= p.tokens || n >= p.rows) continue;
    float sum = p.bias == nullptr ? 0 : static_cast<float>(static_cast<const T*>(p.bias)[n]);
    if constexpr (kSplit == 1) {
      sum += partial[0][i];
    } else {
#pragma unroll
      for (u32 r = 0; r < kSplit; ++r) sum += load_remote(shared_address(&partial[0][i]), r);
    }
    static_cast<T*>(p.y)[token * p.y_stride + n] = T(device::activate(p.activation, sum));
  }
  if constexpr (kSplit > 1) cluster_sync();  // a peer may still read here
}

template <class T, int kTiles, int kTokens, int kStep, int kSplit>
cudaError_t launch_kernel(std::int64_t strips, const DecodeParams& params, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(strips * kSplit));
  launch.blockDim = dim3(kWarps * 32);
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = kSplit > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&launch, decode_kernel<T, kTiles, kTokens, kStep, kSplit>, params);
}

// Calls f with a compile-time integer equal to `value`, one of `first`, `rest` ….
template <int first, int... rest, class F>
cudaError_t with_int(int value, F&& f) {
  if (value == first) return f(std::integral_constant<int, first>{});
  if constexpr (sizeof...(rest) > 0) return with_int<rest...>(value, f);
  return cudaErrorInvalidConfiguration;
}

template <class T>
cudaError_t launch_type(const DecodeProblem& p, const DecodeConfig& config, const DecodeParams& params,
                        cudaStream_t stream) {
  return with_int<1, 2, 4>(p.strip_rows() / 16, [&](auto tiles) {
    return with_int<1, 2>(p.tokens > 8 ? 2 : 1, [&](auto tokens) {
      return with_int<32, 16>(p.block_cols % 32 == 0 ? 32 : 16, [&](auto step) {
        return with_int<1, 2, 4, 8>(config.split, [&](auto split) {
          return launch_kernel<T, tiles, tokens, step, split>(p.strips(), params, stream);
        });
      });
    });
  });
}

}  // namespace

cudaError_t launch(const DecodeProblem& p, const DecodeConfig& config, const DecodeOperands& o,
                   cudaStream_t stream) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  DecodeParams params{};
  params.x = o.x;
  params.values = o.values;
  params.bias = o.bias;
  params.y = o.y;
  params.crow = o.crow;
  params.col = o.col;
  params.blocks = n(p.blocks);
  params.tokens = n(p.tokens);
  params.rows = n(p.rows);
  params.cols = n(p.cols);
  params.block_rows = n(p.block_rows);
  params.block_cols = n(p.block_cols);
  params.x_stride = p.x_stride;
  params.y_stride = p.y_stride;
  params.activation = static_cast<device::Activation>(p.activation);
  return p.dtype == DType::bf16 ? launch_type<__nv_bfloat16>(p, config, params, stream)
                                : launch_type<__half>(p, config, params, stream);
}

}  // namespace rarefy::sm90
