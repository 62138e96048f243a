// Packs a weight for the union kernel: pieces of 64 rows × 32 bytes, strip by strip, column by column, with
// zeros where a unit row stores nothing; f32 is rounded to tf32, to nearest. Whole blocks: each part of a
// piece reads its source. Fine ones: zeros, then each value goes to its place.
#include "cuda/sm90/places.cuh"
#include "cuda/sm90/union_walk.h"
#include "cuda/sm90/unions.h"

namespace rarefy::sm90 {
namespace {

using device::to_tf32;

constexpr int kThreads = 256;
constexpr int kRows = 4;  // of 16 bytes, by each thread

struct PackParams {
  const int* sources;
  const int* count;  // pieces
  const void* values;
  uint4* packed;
  std::int64_t room;        // for pieces
  int unit, across, along;  // as in union_plan.cu
};

__device__ inline std::uint32_t packed_word(const std::uint16_t* from, std::int64_t next) {
  return from[0] | static_cast<std::uint32_t>(from[next]) << 16;
}
__device__ inline std::uint32_t packed_word(const float* from, std::int64_t /*next*/) {
  return to_tf32(*from);
}

// A thread writes some rows of pieces (16 bytes each). Each read that another waits for is
// a trip to device memory, so they go in three waves, for all rows at once. T: 16 bits, or float.
template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) pack_kernel(const PackParams p) {
  constexpr int kColumn = 32 / sizeof(T), kInWord = 4 / sizeof(T);  // features
  const int per_strip = 64 / p.unit;
  const std::int64_t stride = std::int64_t{p.along} * kColumn, height = std::int64_t{p.across} * p.unit;
  const std::int64_t first = std::int64_t{blockIdx.x} * kRows * kThreads + threadIdx.x;
  const int i = static_cast<int>(threadIdx.x % 128);  // of the piece: the same for all rows
  const int row = i / 16 * 8 + i % 8, k = i / 8 % 2 * (kColumn / 2);
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
    const int column = source[r] % p.along * kColumn + k,
              block_row = source[r] / p.along;  // entry · across + which
    const T* block = static_cast<const T*>(p.values) + block_row / p.across * (stride * height);
    const int feature = block_row % p.across * p.unit + row % p.unit;
    if constexpr (kTransposed) {  // a block is (features of X, features of Y)
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        word[j] = packed_word(block + (column + kInWord * j) * height + feature, height);
      out[r] = {word[0], word[1], word[2], word[3]};
    } else {
      out[r] = __ldg(reinterpret_cast<const uint4*>(block + feature * stride + column));
      if constexpr (sizeof(T) == 4) {
        for (std::uint32_t* word : {&out[r].x, &out[r].y, &out[r].z, &out[r].w})
          *word = to_tf32(__uint_as_float(*word));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (piece_of(r) < pieces) p.packed[first + r * kThreads] = out[r];
  }
}

// Where a weight of a fine block lies among the packed ones.
struct UnionPlace {
  const int *places, *slots;
  unsigned char* packed;
  int unit, columns, width, bytes;  // features of a column, bytes of a value
  __device__ unsigned char* operator()(int y, int x) const {
    const int slot = __ldg(slots + y / unit), row = slot % 4 * unit + y % unit, half = width / 2;
    const std::int64_t piece = __ldg(places + slot / 4 * columns + x / width);
    return packed + piece * kPieceBytes + (row / 8 * 16 + x % width / half * 8 + row % 8) * 16 +
           x % half * bytes;
  }
};

template <class T>
cudaError_t scatter_fine(const UnionProblem& p, const ProductIndex& index, const void* values,
                         const UnionPlace& place, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = !p.transposed && p.block_in() % kWide == 0;
  const auto run = p.transposed ? scatter<T, true, 1, UnionPlace>
                   : wide       ? scatter<T, false, kWide, UnionPlace>
                                : scatter<T, false, 1, UnionPlace>;
  return run(p, index, values, place, stream);
}

}  // namespace

cudaError_t pack(const UnionProblem& p, int sms, const ProductIndex& index, const std::int32_t* words,
                 const void* values, void* packed, cudaStream_t stream) {
  const UnionPlan plan(p, sms);
  if (plan.pieces == 0) return cudaSuccess;
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  if (p.fine()) {
    const UnionPlace place{words + plan.places_at,
                           words + plan.slots_at,
                           static_cast<unsigned char*>(packed),
                           p.unit(),
                           n((p.in_features() + p.column() - 1) / p.column()),
                           p.column(),
                           n(size_of(p.dtype))};
    clear(words + plan.first_at + plan.strips, kPieceBytes / 16, packed, stream);
    return p.dtype == DType::f32 ? scatter_fine<float>(p, index, values, place, stream)
                                 : scatter_fine<std::uint16_t>(p, index, values, place, stream);
  }
  const PackParams params{words + plan.sources_at,
                          words + plan.first_at + plan.strips,
                          values,
                          static_cast<uint4*>(packed),
                          plan.pieces,
                          p.unit(),
                          n(p.block_out() / p.unit()),
                          n(p.block_in() / p.column())};
  const std::int64_t blocks = (plan.pieces * 128 + kRows * kThreads - 1) / (kRows * kThreads);
  const auto run =
      p.dtype == DType::f32
          ? (p.transposed ? pack_kernel<float, true> : pack_kernel<float, false>)
          : (p.transposed ? pack_kernel<std::uint16_t, true> : pack_kernel<std::uint16_t, false>);
  run<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
