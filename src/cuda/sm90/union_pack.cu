// Packs a weight for the union kernel: pieces of 64 rows × 32 bytes in the order in which they are walked,
// with zeros where a unit row stores nothing; f32 is rounded to tf32, to nearest. Whole blocks: each part of
// a piece reads its source. Fine ones: zeros, then each value goes to its place.
#include "cuda/device/matrix.cuh"
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

struct ScatterParams {
  const int *offsets, *others, *entries;  // as ProductIndex
  const int *places, *slots;
  const void* values;
  unsigned char* packed;
  int in, out, block_in, block_out;  // features
  int unit, columns;
};

constexpr int kClearBlocks = 1056;  // eight for each of 132 SMs

__global__ void __launch_bounds__(kThreads) clear_kernel(const int* pieces, uint4* packed) {
  const std::int64_t end = std::int64_t{__ldg(pieces)} * (kPieceBytes / 16);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end;
       i += std::int64_t{kClearBlocks} * kThreads)
    packed[i] = {0, 0, 0, 0};
}

// blockIdx.x is a row of the index. A thread moves kAtOnce values that lie side by side, 16 bytes or one.
template <class T, bool kTransposed, int kAtOnce>
__global__ void __launch_bounds__(kThreads) scatter_kernel(const ScatterParams p) {
  constexpr int kColumn = 32 / sizeof(T), kHalf = kColumn / 2;  // features
  const int begin = p.offsets[blockIdx.x], end = p.offsets[blockIdx.x + 1];
  const int each = p.block_in * p.block_out / kAtOnce, count = (end - begin) * each;
  for (int t = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); t < count;
       t += static_cast<int>(gridDim.y) * kThreads) {
    const int at = begin + t / each, within = t % each * kAtOnce;
    // A block is (features of Y, features of X), for grad_input the other way round.
    const int inner = kTransposed ? p.block_out : p.block_in, row = within / inner, column = within % inner;
    const int y = static_cast<int>(blockIdx.x) * p.block_out + (kTransposed ? column : row);
    const int x = p.others[at] * p.block_in + (kTransposed ? row : column);
    if (y >= p.out || x >= p.in) continue;  // padding
    const int entry = kTransposed ? p.entries[at] : at;
    const T* from = static_cast<const T*>(p.values) + std::int64_t{entry} * each * kAtOnce + within;
    const int slot = p.slots[y / p.unit], in_piece = slot % 4 * p.unit + y % p.unit;
    const std::int64_t piece = p.places[slot / 4 * p.columns + x / kColumn];
    unsigned char* to = p.packed + piece * kPieceBytes +
                        (in_piece / 8 * 16 + x % kColumn / kHalf * 8 + in_piece % 8) * 16 +
                        x % kHalf * static_cast<int>(sizeof(T));
    if constexpr (kAtOnce == 1) {
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<std::uint32_t*>(to) = to_tf32(*from);
      } else {
        *reinterpret_cast<T*>(to) = *from;
      }
    } else {
      uint4 out = __ldg(reinterpret_cast<const uint4*>(from));
      if constexpr (sizeof(T) == 4) {
        for (std::uint32_t* word : {&out.x, &out.y, &out.z, &out.w}) *word = to_tf32(__uint_as_float(*word));
      }
      *reinterpret_cast<uint4*>(to) = out;
    }
  }
}

}  // namespace

cudaError_t pack(const UnionProblem& p, const UnionLayout& layout, int sms, const ProductIndex& index,
                 const std::int32_t* words, const void* values, void* packed, cudaStream_t stream) {
  const UnionPlan plan(p, layout, sms);
  if (plan.pieces == 0) return cudaSuccess;
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  if (p.fine()) {
    const ScatterParams params{index.offsets,
                               index.others,
                               index.entries,
                               words + plan.places_at,
                               words + plan.slots_at,
                               values,
                               static_cast<unsigned char*>(packed),
                               n(p.in_features()),
                               n(p.out_features()),
                               n(p.block_in()),
                               n(p.block_out()),
                               p.unit(),
                               n((p.in_features() + p.column() - 1) / p.column())};
    clear_kernel<<<kClearBlocks, kThreads, 0, stream>>>(words + plan.count_at + plan.groups,
                                                        static_cast<uint4*>(packed));
    const std::int64_t block_rows = (p.out_features() + p.block_out() - 1) / p.block_out();
    // Thread blocks for all SMs; each takes a share of a block row.
    const dim3 grid(static_cast<unsigned>(block_rows), static_cast<unsigned>(1 + 2048 / block_rows));
    const bool wide = !p.transposed && p.block_in() % (16 / n(size_of(p.dtype))) == 0;
    const auto scatter = p.dtype == DType::f32 ? (p.transposed ? scatter_kernel<float, true, 1>
                                                  : wide       ? scatter_kernel<float, false, 4>
                                                               : scatter_kernel<float, false, 1>)
                                               : (p.transposed ? scatter_kernel<std::uint16_t, true, 1>
                                                  : wide       ? scatter_kernel<std::uint16_t, false, 8>
                                                               : scatter_kernel<std::uint16_t, false, 1>);
    scatter<<<grid, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  }
  const PackParams params{words + plan.sources_at,
                          words + plan.count_at + plan.groups,
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
