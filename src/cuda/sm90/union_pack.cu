// Packs a weight for the union kernel: pieces of 64 rows × 16 features in the order in which they are walked,
// with zeros where a unit row stores nothing.
#include "cuda/sm90/union_walk.h"
#include "cuda/sm90/unions.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4;  // of 16 bytes, by each thread

struct PackParams {
  const int* sources;
  const int* count;  // pieces
  const std::uint16_t* values;
  uint4* packed;
  std::int64_t room;        // for pieces
  int unit, across, along;  // as in union_plan.cu
};

// A thread writes eight features of some rows of pieces (16 bytes each). Each read that another waits for is
// a trip to device memory, so they go in three waves, for all rows at once.
template <bool kTransposed>
__global__ void __launch_bounds__(kThreads) pack_kernel(const PackParams p) {
  const int per_strip = 64 / p.unit;
  const std::int64_t stride = std::int64_t{p.along} * 16, height = std::int64_t{p.across} * p.unit;
  const std::int64_t first = std::int64_t{blockIdx.x} * kRows * kThreads + threadIdx.x;
  const int i = static_cast<int>(threadIdx.x % 128);  // of the piece: the same for all rows
  const int row = i / 16 * 8 + i % 8, k = i / 8 % 2 * 8;
  const auto piece_of = [&](int r) { return (first + r * kThreads) / 128; };
  int source[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    source[r] = piece_of(r) < p.room ? __ldg(p.sources + piece_of(r) * per_strip + row / p.unit) : -1;
  }
  const int pieces = __ldg(p.count);  // what is behind them in `sources` means nothing
  uint4 out[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    out[r] = {0, 0, 0, 0};
    if (piece_of(r) >= pieces || source[r] < 0) continue;
    const int column = source[r] % p.along * 16 + k,
              block_row = source[r] / p.along;  // entry · across + which
    const std::uint16_t* block = p.values + block_row / p.across * (stride * height);
    const int feature = block_row % p.across * p.unit + row % p.unit;
    if constexpr (kTransposed) {  // a block is (features of X, features of Y)
      std::uint32_t pair[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint16_t* from = block + (column + 2 * j) * height + feature;
        pair[j] = from[0] | static_cast<std::uint32_t>(from[height]) << 16;
      }
      out[r] = {pair[0], pair[1], pair[2], pair[3]};
    } else {
      out[r] = __ldg(reinterpret_cast<const uint4*>(block + feature * stride + column));
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (piece_of(r) < pieces) p.packed[first + r * kThreads] = out[r];
  }
}

}  // namespace

cudaError_t pack(const UnionProblem& p, const UnionLayout& layout, int sms, const std::int32_t* words,
                 const void* values, void* packed, cudaStream_t stream) {
  const UnionPlan plan(p, layout, sms);
  if (plan.pieces == 0) return cudaSuccess;
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const PackParams params{words + plan.sources_at,
                          words + plan.count_at + plan.groups,
                          static_cast<const std::uint16_t*>(values),
                          static_cast<uint4*>(packed),
                          plan.pieces,
                          p.unit(),
                          n(p.block_out() / p.unit()),
                          n(p.block_in() / 16)};
  const std::int64_t blocks = (plan.pieces * 128 + kRows * kThreads - 1) / (kRows * kThreads);
  const auto run = p.transposed ? pack_kernel<true> : pack_kernel<false>;
  run<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
