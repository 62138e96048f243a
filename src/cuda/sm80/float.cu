// The three products in f32, without rounding inputs to tf32: a thread has 8 × 8 sums in registers. What is
// fetched by cp.async is read 16 bytes at a time, by k where k lies side by side (X, dY, and W of linear),
// else by feature.
#include "cuda/sm80/gradient_tile.cuh"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/product_tile.cuh"

namespace rarefy::cuda::sm80 {
namespace {

using device::load_shared_4;
using device::store_shared;
using device::store_shared_4;

constexpr int kFloatThreads = 128;

__device__ inline float element(const float4& v, int e) {
  return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
}

// kRows features × tokens: kAcross threads of 8 features, each with every kDown-th token.
template <int kFeatures>
struct FloatTile {
  static constexpr int kRows = kFeatures;
  static constexpr int kTokens = 64 * kFloatThreads / kRows, kChunk = 16;
  static constexpr int kAcross = kRows / 8, kDown = kTokens / 8;
  static constexpr int kXBytes = kTokens * kChunk * 4, kBytes = kXBytes + kRows * kChunk * 4;
  static constexpr int kStages = 4;
};

// Threads of a warp are 4 × 8, or 8 × 4 where there are but four rows of them; warps are side by side first.
template <int kAcross, int kDown>
__device__ inline int2 thread_place() {
  constexpr int kLanes = kDown < 8 ? 8 : 4, kWarpsAcross = kAcross / kLanes;
  static_assert(kAcross * kDown == kFloatThreads && kAcross % kLanes == 0);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  return {warp % kWarpsAcross * kLanes + lane % kLanes, warp / kWarpsAcross * (32 / kLanes) + lane / kLanes};
}

template <int kRows, bool kTransposed>
__global__ void __launch_bounds__(kFloatThreads, 3) float_product_kernel(const ProductParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Tile = FloatTile<kRows>;
  constexpr int kChunk = Tile::kChunk, kXPieces = kChunk / 4, kWPieces = (kTransposed ? kRows : kChunk) / 4;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t slots = device::shared_address(shared);
  const int self = static_cast<int>(threadIdx.x);
  const auto [across, down] = thread_place<Tile::kAcross, Tile::kDown>();
  const int strip = static_cast<int>(blockIdx.x) % p.strips,
            token0 = static_cast<int>(blockIdx.x) / p.strips * Tile::kTokens;
  const int block_out = kTransposed ? p.block_cols : p.block_rows,
            block_in = kTransposed ? p.block_rows : p.block_cols;
  const int outer = strip / (block_out / kRows), within = strip % (block_out / kRows) * kRows;
  const int begin = __ldg(p.offsets + outer), end = __ldg(p.offsets + outer + 1), chunks = block_in / kChunk;

  // A thread brings one piece of 16 bytes of every kXRows-th token, and one of every kWRows-th row of W's
  // tile. Both strides are multiples of eight rows, so that all of its pieces have the first one's swizzle.
  constexpr int kXRows = kFloatThreads / kXPieces, kWRows = kFloatThreads / kWPieces;
  static_assert(kXRows % 8 == 0 && kWRows % 8 == 0);
  const int x_row = self / kXPieces, x_piece = self % kXPieces, w_row = self / kWPieces,
            w_piece = self % kWPieces;
  const auto *all_x = static_cast<const float*>(p.x), *values = static_cast<const float*>(p.values);
  const float* x_from = all_x + (token0 + x_row) * p.x_stride + x_piece * 4;
  const int w_from =
      (kTransposed ? w_row * p.block_cols + within : (within + w_row) * p.block_cols) + w_piece * 4;
  const uint32_t x_to = slots + place<kXPieces>(x_row, x_piece),
                 w_to = slots + Tile::kXBytes + place<kWPieces>(w_row, w_piece);
  const auto bring = [&](int step, int stage) {
    const int e = begin + step / chunks, inner = step % chunks * kChunk;
    const int column = __ldg(p.others + e) * block_in + inner;
    const std::int64_t entry = p.entries == nullptr ? e : __ldg(p.entries + e);
    const auto at = static_cast<uint32_t>(stage * Tile::kBytes);
    const float* x = x_from + column;
    const uint32_t bytes = 4 * static_cast<uint32_t>(min(4, max(0, p.in - column - x_piece * 4)));
#pragma unroll
    for (int i = 0; i < Tile::kTokens / kXRows; ++i, x += kXRows * p.x_stride) {
      const bool exists = token0 + x_row + i * kXRows < p.tokens && bytes > 0;
      copy_16(x_to + at + static_cast<uint32_t>(i * kXRows * kChunk * 4), exists ? x : all_x,
              exists ? bytes : 0);
    }
    const float* w =
        values + entry * p.block_rows * p.block_cols + w_from + (kTransposed ? inner * p.block_cols : inner);
#pragma unroll
    for (int i = 0; i < kRows * kChunk / 4 / kFloatThreads; ++i, w += kWRows * p.block_cols)
      copy_16(w_to + at + static_cast<uint32_t>(i * kFloatThreads * 16), w);
  };

  // Sums of tokens down + i · kDown; of features across + j · kAcross, or, transposed, of four neighbours in
  // each half.
  float d[8][8] = {};
  const auto multiply = [&](int stage) {
    const uint32_t x = slots + static_cast<uint32_t>(stage * Tile::kBytes), w = x + Tile::kXBytes;
#pragma unroll 2
    for (int k = 0; k < kChunk / 4; ++k) {
      float4 a[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] = load_shared_4(x + place<kXPieces>(down + i * Tile::kDown, k));
      if constexpr (kTransposed) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float4 low = load_shared_4(w + place<kWPieces>(4 * k + e, across)),
                       high = load_shared_4(w + place<kWPieces>(4 * k + e, across + Tile::kAcross));
          const float b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) d[i][j] += element(a[i], e) * b[j];
          }
        }
      } else {
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
          float4 b[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            b[j] = load_shared_4(w + place<kWPieces>(across + (half + j) * Tile::kAcross, k));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
              for (int j = 0; j < 4; ++j) d[i][half + j] += element(a[i], e) * element(b[j], e);
            }
          }
        }
      }
    }
  };
  pipeline<Tile::kStages>((end - begin) * chunks, bring, multiply);

  // By way of shared memory, so that rows of Y are written 16 bytes at a time, side by side.
  constexpr int kYPieces = kRows / 4;
  static_assert(Tile::kTokens * kRows * 4 <= Tile::kStages * Tile::kBytes);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = down + i * Tile::kDown;
    if constexpr (kTransposed) {
      store_shared_4(slots + place<kYPieces>(row, across), {d[i][0], d[i][1], d[i][2], d[i][3]});
      store_shared_4(slots + place<kYPieces>(row, across + Tile::kAcross),
                     {d[i][4], d[i][5], d[i][6], d[i][7]});
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int feature = across + j * Tile::kAcross;
        store_shared(slots + place<kYPieces>(row, feature / 4) + static_cast<uint32_t>(feature % 4 * 4),
                     d[i][j]);
      }
    }
  }
  __syncthreads();
  const int o = outer * block_out + within + self % kYPieces * 4;
  float bias[4] = {};
  for (int e = 0; e < 4; ++e) {
    if (p.bias != nullptr && o + e < p.out) bias[e] = static_cast<const float*>(p.bias)[o + e];
  }
#pragma unroll 2
  for (int row = self / kYPieces; row < Tile::kTokens; row += kFloatThreads / kYPieces) {
    if (token0 + row >= p.tokens) break;
    const float4 v = load_shared_4(slots + place<kYPieces>(row, self % kYPieces));
    float sums[4] = {v.x + bias[0], v.y + bias[1], v.z + bias[2], v.w + bias[3]};
    if (p.activation != device::Activation::none) {
#pragma unroll
      for (float& sum : sums) sum = device::activate(p.activation, sum);
    }
    float* to = static_cast<float*>(p.y) + (token0 + row) * p.y_stride + o;
    if (o + 3 < p.out) {
      *reinterpret_cast<float4*>(to) = {sums[0], sums[1], sums[2], sums[3]};
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (o + e < p.out) to[e] = sums[e];
      }
    }
  }
#endif
}

// grad_weight: a thread's pieces of 16 bytes of a panel with tokens outermost, one of kPieces of every
// kRows-th token.
template <int kTokens, int kPieces>
struct TokenColumn {
  static constexpr int kRows = kFloatThreads / kPieces;
  const float *all, *from;
  std::int64_t stride;
  int row, piece;
  uint32_t bytes;

  __device__ TokenColumn(const float* x, std::int64_t distance, int size, int feature)
      : all(x),
        stride(distance),
        row(static_cast<int>(threadIdx.x) / kPieces),
        piece(static_cast<int>(threadIdx.x) % kPieces),
        bytes(4 * static_cast<uint32_t>(min(4, max(0, size - feature)))) {
    from = x + row * stride + (bytes > 0 ? feature : 0);
  }
  __device__ void bring(uint32_t to, Tokens tokens) const {
    const float* at = from + tokens.first * stride;
#pragma unroll
    for (int i = 0; i < kTokens / kRows; ++i, at += kRows * stride) {
      const bool exists = tokens.first + row + i * kRows < tokens.end;
      copy_16(to + place<kPieces>(row + i * kRows, piece), exists ? at : all, exists ? bytes : 0);
    }
  }
};

// Thread blocks that share a tile's tokens leave their sums in `partial`, each its own.
struct FloatGradientParams {
  GradientParams p;
  float* partial;  // [share][value], or null: one share has all tokens
  std::int64_t values;
};

// kRows rows of one block row × kWide columns of stored blocks side by side, kTokens at a time.
template <int kRows>
struct FloatGradientTile {
  static constexpr int kWide = 64 * kFloatThreads / kRows, kTokens = 16;
  static constexpr int kAcross = kWide / 8, kDown = kRows / 8;
  static constexpr int kDyBytes = kTokens * kRows * 4, kBytes = kDyBytes + kTokens * kWide * 4;
  static constexpr int kStages = 4, kPieces = kWide / 16;
};

template <int kRows>
__global__ void __launch_bounds__(kFloatThreads, 3) float_gradient_kernel(const FloatGradientParams shares) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Tile = FloatGradientTile<kRows>;
  constexpr int kDyPieces = kRows / 4, kXPieces = Tile::kWide / 4;
  const GradientParams& p = shares.p;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int feature[Tile::kPieces];
  __shared__ std::int64_t offset[Tile::kPieces];
  const uint32_t slots = device::shared_address(shared);
  const int row0 = find_pieces<Tile::kPieces>(p, kRows, feature, offset);
  if (row0 < 0) return;
  const auto [across, down] = thread_place<Tile::kAcross, Tile::kDown>();
  const int all = (p.tokens + Tile::kTokens - 1) / Tile::kTokens;
  const auto share = [&](unsigned i) { return static_cast<int>(std::int64_t{all} * i / gridDim.y); };
  const int first = share(blockIdx.y), steps = share(blockIdx.y + 1) - first;
  const int self = static_cast<int>(threadIdx.x), x_piece = self % kXPieces;
  const TokenColumn<Tile::kTokens, kDyPieces> dy_column(static_cast<const float*>(p.dy), p.dy_stride, p.rows,
                                                        row0 + self % kDyPieces * 4);
  const TokenColumn<Tile::kTokens, kXPieces> x_column(static_cast<const float*>(p.x), p.x_stride, p.cols,
                                                      feature[x_piece / 4] + x_piece % 4 * 4);
  const auto bring = [&](int step, int stage) {
    const uint32_t to = slots + static_cast<uint32_t>(stage * Tile::kBytes);
    const Tokens tokens{(first + step) * Tile::kTokens, p.tokens};
    dy_column.bring(to, tokens);
    x_column.bring(to + Tile::kDyBytes, tokens);
  };

  // Sums of rows 4 · down + i, the second four in the lower half of the tile; of columns the same way.
  float d[8][8] = {};
  const auto multiply = [&](int stage) {
    const uint32_t dy = slots + static_cast<uint32_t>(stage * Tile::kBytes), x = dy + Tile::kDyBytes;
#pragma unroll
    for (int k = 0; k < Tile::kTokens; ++k) {
      const float4 a0 = load_shared_4(dy + place<kDyPieces>(k, down)),
                   a1 = load_shared_4(dy + place<kDyPieces>(k, down + Tile::kDown)),
                   b0 = load_shared_4(x + place<kXPieces>(k, across)),
                   b1 = load_shared_4(x + place<kXPieces>(k, across + Tile::kAcross));
      const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w},
                  b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) d[i][j] += a[i] * b[j];
      }
    }
  };
  pipeline<Tile::kStages>(steps, bring, multiply);

  float* out = shares.partial == nullptr ? static_cast<float*>(p.dvalues)
                                         : shares.partial + blockIdx.y * shares.values;

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = 4 * across + half * (Tile::kWide / 2), piece = column / 16;
    if (offset[piece] < 0) continue;
    const int k = feature[piece] + column % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 4 * down + i % 4 + i / 4 * (kRows / 2);
      float4 sums{d[i][4 * half], d[i][4 * half + 1], d[i][4 * half + 2], d[i][4 * half + 3]};
      if (row0 + row >= p.rows) sums = {0, 0, 0, 0};  // padding is zero, whatever dY has
      if (k >= p.cols) sums.x = 0;
      if (k + 1 >= p.cols) sums.y = 0;
      if (k + 2 >= p.cols) sums.z = 0;
      if (k + 3 >= p.cols) sums.w = 0;
      float* to = out + offset[piece] + std::int64_t{row} * p.block_cols + column % 16;
      *reinterpret_cast<float4*>(to) = sums;
    }
  }
#endif
}

template <int kRows, bool kTransposed>
cudaError_t launch_float_tile(const Call& call) {
  return launch_product_tiles<FloatTile<kRows>, kTransposed>(float_product_kernel<kRows, kTransposed>,
                                                             kFloatThreads, product_params(call),
                                                             static_cast<cudaStream_t>(call.stream));
}

// The sums of all shares, in their order.
__global__ void __launch_bounds__(256)
    add_shares_kernel(const float4* partial, int count, std::int64_t values, float4* out) {
  const std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x;
  if (i >= values) return;
  float4 sum = partial[i];
  for (int share = 1; share < count; ++share) {
    const float4 more = partial[share * values + i];
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  out[i] = sum;
}

template <int kRows>
cudaError_t launch_float_gradient(FloatGradientParams params, std::int64_t blocks, int shares,
                                  cudaStream_t stream) {
  using Tile = FloatGradientTile<kRows>;
  params.p.strips = params.p.block_rows / kRows;
  const cudaError_t status =
      launch_tiles<Tile>(float_gradient_kernel<kRows>, kFloatThreads,
                         tiles_of<Tile::kPieces>(params.p, blocks), params, stream, shares);
  if (status != cudaSuccess || shares == 1) return status;
  const std::int64_t pieces = params.values / 4;
  if ((pieces + 255) / 256 > INT32_MAX) return cudaErrorInvalidConfiguration;
  add_shares_kernel<<<static_cast<unsigned>((pieces + 255) / 256), 256, 0, stream>>>(
      reinterpret_cast<const float4*>(params.partial), shares, pieces,
      static_cast<float4*>(params.p.dvalues));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_float_product(const Call& call) {
  const BsrShape& s = call.problem.weight.shape;
  if (call.problem.op == Op::grad_input)
    return s.block_cols % 64 == 0 ? launch_float_tile<64, true>(call) : launch_float_tile<32, true>(call);
  return s.block_rows % 64 == 0 ? launch_float_tile<64, false>(call) : launch_float_tile<32, false>(call);
}

cudaError_t launch_float_gradient(const Call& call, int shares) {
  const BsrShape& s = call.problem.weight.shape;
  if (s.nnzb == 0) return cudaSuccess;
  const FloatGradientParams params{
      gradient_params(call), shares == 1 ? nullptr : static_cast<float*>(call.workspace), s.value_count()};
  auto* stream = static_cast<cudaStream_t>(call.stream);
  return s.block_rows % 64 == 0 ? launch_float_gradient<64>(params, s.nnzb, shares, stream)
                                : launch_float_gradient<32>(params, s.nnzb, shares, stream);
}

}  // namespace rarefy::cuda::sm80
