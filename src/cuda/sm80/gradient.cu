// grad_weight on mma.sync: a thread block has kRows rows of one block row and up to 128 or 256 columns of the
// blocks that are stored there, 16 at a time, side by side, over all tokens. dY is operand A, X operand B,
// both with tokens outermost.
#include "cuda/sm80/gradient_tile.cuh"
#include "cuda/sm80/kernels.h"

namespace rarefy::cuda::sm80 {
namespace {

// kTokens rows of kPieces pieces of 16 bytes: piece i holds features from feature_of(i) on.
template <int kTokens, int kPieces, class T, class Features>
__device__ inline void bring_tokens(uint32_t to, const T* from, std::int64_t stride, int size, Tokens tokens,
                                    Features&& feature_of) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces, token = tokens.first + row;
    const bool exists = token < tokens.end;
    copy_piece(to + place<kPieces>(row, piece), from + (exists ? token : 0) * stride, feature_of(piece), size,
               exists);
  }
}

template <int kRows>
struct GradientTile {
  static constexpr int kWide = kRows == 64 ? 128 : 256;  // columns; 32 of a warp
  static constexpr int kTokens = 32;                     // of a step
  static constexpr int kDyBytes = kTokens * kRows * 2, kBytes = kDyBytes + kTokens * kWide * 2;
  static constexpr int kStages = kRows == 64 ? 4 : 3;
  static constexpr int kPieces = kWide / 16;  // of 16 columns
};

template <class T, int kRows>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const GradientParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Tile = GradientTile<kRows>;
  constexpr int kDyPieces = kRows / 8, kXPieces = Tile::kWide / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int feature[Tile::kPieces];          // of X, where 16 columns begin; beyond all: none
  __shared__ std::int64_t offset[Tile::kPieces];  // in values; -1: none
  const uint32_t slots = device::shared_address(shared);
  const int self = static_cast<int>(threadIdx.x), warp = self / 32, lane = self % 32;
  const int row0 = find_pieces<Tile::kPieces>(p, kRows, feature, offset);
  if (row0 < 0) return;
  const T *dy = static_cast<const T*>(p.dy), *x = static_cast<const T*>(p.x);
  const auto bring = [&](int step, int stage) {
    const uint32_t to = slots + static_cast<uint32_t>(stage * Tile::kBytes);
    const Tokens tokens{step * Tile::kTokens, p.tokens};
    bring_tokens<Tile::kTokens, kDyPieces>(to, dy, p.dy_stride, p.rows, tokens,
                                           [&](int piece) { return row0 + piece * 8; });
    bring_tokens<Tile::kTokens, kXPieces>(to + Tile::kDyBytes, x, p.x_stride, p.cols, tokens,
                                          [&](int piece) { return feature[piece / 2] + piece % 2 * 8; });
  };

  constexpr int kHigh = kRows < 32 ? 1 : 2;  // times 16 rows of a warp
  constexpr int kAcross = Tile::kWide / 32;
  const int my_rows = warp / kAcross * 32, my_columns = warp % kAcross * 32;
  float d[kHigh][4][4] = {};
  const auto multiply = [&](int stage) {
    const uint32_t from = slots + static_cast<uint32_t>(stage * Tile::kBytes), xs = from + Tile::kDyBytes;
#pragma unroll
    for (int k = 0; k < Tile::kTokens / 16; ++k) {
      uint32_t a[kHigh][4], b[2][4];
#pragma unroll
      for (int m = 0; m < kHigh; ++m) {
        device::load_transposed(
            from + place<kDyPieces>(16 * k + lane / 16 * 8 + lane % 8, (my_rows + 16 * m) / 8 + lane / 8 % 2),
            a[m]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        device::load_transposed(
            xs + place<kXPieces>(16 * k + lane % 16, (my_columns + 16 * n) / 8 + lane / 16), b[n]);
      }
      multiply_tiles<T>(d, a, b);
    }
  };
  pipeline<Tile::kStages>((p.tokens + Tile::kTokens - 1) / Tile::kTokens, bring, multiply);

  // A lane has two neighbouring columns of rows lane / 4 and lane / 4 + 8. Padding is zero, whatever dY has.
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int column = my_columns + 8 * n + 2 * (lane % 4), piece = column / 16;
    if (offset[piece] < 0) continue;
    const int k = feature[piece] + column % 16;
#pragma unroll
    for (int half = 0; half < 2 * kHigh; ++half) {
      const int row = my_rows + 8 * half + lane / 4;
      const bool inside = row0 + row < p.rows;
      const float low = inside && k < p.cols ? d[half / 2][n][half % 2 * 2] : 0,
                  high = inside && k + 1 < p.cols ? d[half / 2][n][half % 2 * 2 + 1] : 0;
      T* to = static_cast<T*>(p.dvalues) + offset[piece] + std::int64_t{row} * p.block_cols + column % 16;
      *reinterpret_cast<uint32_t*>(to) = device::pack<T>(low, high);
    }
  }
#endif
}

template <class T, int kRows>
cudaError_t launch_tile(GradientParams params, std::int64_t blocks, cudaStream_t stream) {
  using Tile = GradientTile<kRows>;
  params.strips = params.block_rows / kRows;
  return launch_tiles<Tile>(gradient_kernel<T, kRows>, kThreads, tiles_of<Tile::kPieces>(params, blocks),
                            params, stream);
}

template <class T>
cudaError_t launch_type(const GradientParams& params, std::int64_t blocks, cudaStream_t stream) {
  if (params.block_rows % 64 == 0) return launch_tile<T, 64>(params, blocks, stream);
  return params.block_rows % 32 == 0 ? launch_tile<T, 32>(params, blocks, stream)
                                     : launch_tile<T, 16>(params, blocks, stream);
}

}  // namespace

cudaError_t launch_gradient(const Call& call) {
  const Problem& p = call.problem;
  const BsrShape& s = p.weight.shape;
  if (s.nnzb == 0) return cudaSuccess;
  const GradientParams params = gradient_params(call);
  auto* stream = static_cast<cudaStream_t>(call.stream);
  return p.in == DType::bf16 ? launch_type<__nv_bfloat16>(params, s.nnzb, stream)
                             : launch_type<__half>(params, s.nnzb, stream);
}

}  // namespace rarefy::cuda::sm80
