// linear and grad_input on mma.sync: a thread block has kRows features of one block row (grad_input: of a
// block column) and 128 or 256 tokens, and walks the blocks that are stored there. Tokens are operand A.
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/product_tile.cuh"

namespace rarefy::cuda::sm80 {
namespace {

template <int kFeatures, int kChunk>
struct ProductTile {
  static constexpr int kRows = kFeatures;
  static constexpr int kWide = kRows < 32 ? kRows : 32;          // features of a warp
  static constexpr int kTokens = 32 * kWarps / (kRows / kWide);  // 32 of a warp
  static constexpr int kXBytes = kTokens * kChunk * 2, kBytes = kXBytes + kRows * kChunk * 2;
  static constexpr int kStages = kRows == 64 && kChunk < 64 ? 4 : 3;
};

// kChunk features of X at a time. kTransposed: W's tile lies with Y's features side by side.
template <class T, int kRows, int kChunk, bool kTransposed>
__global__ void __launch_bounds__(kThreads) product_kernel(const ProductParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Tile = ProductTile<kRows, kChunk>;
  constexpr int kXPieces = kChunk / 8, kWPieces = (kTransposed ? kRows : kChunk) / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t slots = device::shared_address(shared);
  const int self = static_cast<int>(threadIdx.x), warp = self / 32, lane = self % 32;
  const int strip = static_cast<int>(blockIdx.x) % p.strips,
            token0 = static_cast<int>(blockIdx.x) / p.strips * Tile::kTokens;
  const int block_out = kTransposed ? p.block_cols : p.block_rows,
            block_in = kTransposed ? p.block_rows : p.block_cols;
  const int outer = strip / (block_out / kRows), within = strip % (block_out / kRows) * kRows;
  const int begin = __ldg(p.offsets + outer), end = __ldg(p.offsets + outer + 1), chunks = block_in / kChunk;
  const T *x = static_cast<const T*>(p.x), *values = static_cast<const T*>(p.values);

  const auto bring = [&](int step, int stage) {
    const int e = begin + step / chunks, inner = step % chunks * kChunk;
    const int column = __ldg(p.others + e) * block_in + inner;
    const std::int64_t entry = p.entries == nullptr ? e : __ldg(p.entries + e);
    const T* block = values + entry * p.block_rows * p.block_cols +
                     (kTransposed ? inner * p.block_cols + within : within * p.block_cols + inner);
    const uint32_t to = slots + static_cast<uint32_t>(stage * Tile::kBytes);
#pragma unroll
    for (int i = self; i < Tile::kTokens * kXPieces; i += kThreads) {
      const int row = i / kXPieces, piece = i % kXPieces, token = token0 + row;
      const bool exists = token < p.tokens;
      copy_piece(to + place<kXPieces>(row, piece), x + (exists ? token : 0) * p.x_stride, column + piece * 8,
                 p.in, exists);
    }
    constexpr int kAll = kRows * kChunk / 8;
#pragma unroll
    for (int i = self; i < kAll; i += kThreads) {
      const int row = i / kWPieces, piece = i % kWPieces;
      copy_16(to + Tile::kXBytes + place<kWPieces>(row, piece), block + row * p.block_cols + piece * 8);
    }
  };

  constexpr int kWide = Tile::kWide;
  const int my_tokens = warp / (kRows / kWide) * 32, my_rows = warp % (kRows / kWide) * kWide;
  float d[2][kWide / 8][4] = {};
  const auto multiply = [&](int stage) {
    const uint32_t from = slots + static_cast<uint32_t>(stage * Tile::kBytes), w = from + Tile::kXBytes;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t a[2][4], b[kWide / 16][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        device::load_matrices(from + place<kXPieces>(my_tokens + 16 * m + lane % 16, 2 * k + lane / 16),
                              a[m]);
#pragma unroll
      for (int n = 0; n < kWide / 16; ++n) {
        const int row = my_rows + 16 * n;
        if constexpr (kTransposed) {
          device::load_transposed(w + place<kWPieces>(16 * k + lane % 16, row / 8 + lane / 16), b[n]);
        } else {
          device::load_matrices(w + place<kWPieces>(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2),
                                b[n]);
        }
      }
      multiply_tiles<T>(d, a, b);
    }
  };
  pipeline<Tile::kStages>((end - begin) * chunks, bring, multiply);

  // A lane has two neighbouring features of eight tokens of each tile.
#pragma unroll
  for (int n = 0; n < kWide / 8; ++n) {
    const int o = outer * block_out + within + my_rows + 8 * n + 2 * (lane % 4);
    if (o >= p.out) continue;
    const bool both = o + 1 < p.out;
    float bias[2] = {};
    if (p.bias != nullptr) {
      bias[0] = static_cast<float>(static_cast<const T*>(p.bias)[o]);
      if (both) bias[1] = static_cast<float>(static_cast<const T*>(p.bias)[o + 1]);
    }
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const int token = token0 + my_tokens + 8 * half + lane / 4;
      if (token >= p.tokens) continue;
      const float low = device::activate(p.activation, d[half / 2][n][half % 2 * 2] + bias[0]),
                  high = device::activate(p.activation, d[half / 2][n][half % 2 * 2 + 1] + bias[1]);
      T* y = static_cast<T*>(p.y) + token * p.y_stride + o;
      if (both) {
        *reinterpret_cast<uint32_t*>(y) = device::pack<T>(low, high);
      } else {
        *y = T(low);
      }
    }
  }
#endif
}

template <class T, int kRows, int kChunk, bool kTransposed>
cudaError_t launch_tile(const ProductParams& params, cudaStream_t stream) {
  return launch_product_tiles<ProductTile<kRows, kChunk>, kTransposed>(
      product_kernel<T, kRows, kChunk, kTransposed>, kThreads, params, stream);
}

template <class T, bool kTransposed>
cudaError_t launch_type(const ProductParams& params, cudaStream_t stream) {
  const int out = kTransposed ? params.block_cols : params.block_rows,
            in = kTransposed ? params.block_rows : params.block_cols;
  const auto run = [&]<int kRows>() {
    if constexpr (kRows == 64) {  // fewer barriers; smaller tiles would not fit every GPU's shared memory
      if (in % 64 == 0) return launch_tile<T, kRows, 64, kTransposed>(params, stream);
    }
    return in % 32 == 0 ? launch_tile<T, kRows, 32, kTransposed>(params, stream)
                        : launch_tile<T, kRows, 16, kTransposed>(params, stream);
  };
  if (out % 64 == 0) return run.template operator()<64>();
  return out % 32 == 0 ? run.template operator()<32>() : run.template operator()<16>();
}

}  // namespace

cudaError_t launch_product(const Call& call) {
  const bool transposed = call.problem.op == Op::grad_input;
  const auto run = call.problem.in == DType::bf16
                       ? (transposed ? launch_type<__nv_bfloat16, true> : launch_type<__nv_bfloat16, false>)
                       : (transposed ? launch_type<__half, true> : launch_type<__half, false>);
  return run(product_params(call), static_cast<cudaStream_t>(call.stream));
}

}  // namespace rarefy::cuda::sm80
