// Lists of the weight gradient's tiles, made of a pattern on the device. Blocks whose sides are multiples of
// 16 are seen as rows of two or four units of 32 rows of W over the union of their 32- or 16-wide columns.
#include "cuda/sm90/block_gradient.h"
#include "cuda/sm90/gradient_tiles.cuh"
#include "cuda/sm90/prepared.h"

namespace rarefy::sm90 {
namespace {

template <int kWide>
__device__ inline void write_tile(const GradientTile<kWide>& tile, int* list) {
  constexpr int kWords = sizeof(tile) / sizeof(int);
  static_assert(kWords == tile_words(kWide) && kWords <= kTileThreads);
  const int self = static_cast<int>(threadIdx.x);
  if (self < kWords) list[blockIdx.x * kWords + threadIdx.x] = reinterpret_cast<const int*>(&tile)[self];
}

template <int kWide>
__device__ inline void clear(GradientTile<kWide>& tile) {
  constexpr int kWords = sizeof(tile) / sizeof(int);
  if (threadIdx.x < kWords) reinterpret_cast<int*>(&tile)[threadIdx.x] = -1;
  __syncthreads();
}

__global__ void __launch_bounds__(kTileThreads)
    list_kernel(const __grid_constant__ GradientParams p, int* list) {
  __shared__ GradientTile<64> tile;
  clear(tile);
  find_tile(p, static_cast<int>(blockIdx.x), tile);
  __syncthreads();
  write_tile(tile, list);
}

constexpr int kBitWords = kMostUnionColumns / 32;

constexpr int kMostUnits = 4;  // of a row

// The units of a row, `each` of them. All see them on return.
__device__ inline void find_units(const GradientParams& p, int row, int each, int* units, int* of_warps) {
  const RowUnits all{p.block_rows, p.block_row_count};
  const int self = static_cast<int>(threadIdx.x), count = all.count(),
            share = (count + kTileThreads - 1) / kTileThreads, begin = min(self * share, count),
            end = min(begin + share, count);
  const auto stores = [&](int unit) {
    return __ldg(p.crow + all.first(unit)) != __ldg(p.crow + all.end(unit)) ? 1 : 0;
  };
  int mine = 0, total = 0;
  for (int unit = begin; unit < end; ++unit) mine += stores(unit);
  int rank = sum_before(mine, total, of_warps) - row * each;
  for (int unit = begin; unit < end && rank < each; ++unit) {
    if (stores(unit) == 0) continue;
    if (rank >= 0) units[rank] = unit;
    ++rank;
  }
  if (self < each && row * each + self >= total) units[self] = count + row * each + self - total;
  __syncthreads();
}

// Which columns, `wide` each, these units store. All see it on return.
__device__ inline void row_bits(const GradientParams& p, const int* units, int each, u32* bits) {
  const RowUnits all{p.block_rows, p.block_row_count};
  const int self = static_cast<int>(threadIdx.x), threads = kTileThreads / each, unit = units[self / threads];
  __syncthreads();  // the bits before may still be read
  for (int i = self; i < kBitWords; i += kTileThreads) bits[i] = 0;
  __syncthreads();
  const int last = __ldg(p.crow + all.end(unit));
  for (int e = __ldg(p.crow + all.first(unit)) + self % threads; e < last; e += threads) {
    const int k = __ldg(p.col + e) * p.block_cols;
    for (int c = k / p.wide; c <= (k + p.block_cols - 1) / p.wide; ++c) atomicOr(bits + c / 32, 1u << c % 32);
  }
  __syncthreads();
}

// A thread block for each row: how many columns it stores, and, behind the counts of all rows, its units.
__global__ void __launch_bounds__(kTileThreads)
    count_kernel(const __grid_constant__ GradientParams p, int* counts) {
  __shared__ u32 bits[kBitWords];
  __shared__ alignas(16) int of_warps[kTileThreads / 32];
  __shared__ int units[kMostUnits];
  const int each = p.two ? 4 : 2, row = static_cast<int>(blockIdx.x);
  find_units(p, row, each, units, of_warps);
  if (static_cast<int>(threadIdx.x) < each) {
    const int at = static_cast<int>(gridDim.x) + row * each + static_cast<int>(threadIdx.x);
    counts[at] = units[threadIdx.x];
  }
  row_bits(p, units, each, bits);
  int mine = 0, total = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kBitWords; i += kTileThreads) mine += __popc(bits[i]);
  sum_before(mine, total, of_warps);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// The stored block at a place, or -1.
__device__ inline int find_block(const GradientParams& p, int block_row, int block_col) {
  int low = __ldg(p.crow + block_row), high = __ldg(p.crow + block_row + 1);
  const int end = high;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (__ldg(p.col + middle) < block_col) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < end && __ldg(p.col + low) == block_col ? low : -1;
}

template <int kWide>
__global__ void __launch_bounds__(kTileThreads)
    union_list_kernel(const __grid_constant__ GradientParams p, const int* counts, int rows, int* list) {
  __shared__ GradientTile<kWide> tile;
  __shared__ RowPart parts[2];
  __shared__ u32 bits[kBitWords];
  __shared__ int feature[2][kMostColumns], units[2][kMostUnits];
  const int self = static_cast<int>(threadIdx.x);
  const TileShape shape{kWide, p.two, p.pairs, p.even, p.most};
  clear(tile);
  find_parts(
      shape, rows, static_cast<int>(blockIdx.x), [&](int row) { return __ldg(counts + row); }, parts);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (parts[part].count == 0) continue;
    const int each = shape.units();
    if (self < each) units[part][self] = __ldg(counts + rows + parts[part].row * each + self);
    __syncthreads();
    row_bits(p, units[part], each, bits);
    if (self < parts[part].count) {
      int rank = parts[part].first + self, word = 0;
      for (int n = __popc(bits[0]); rank >= n; n = __popc(bits[++word])) rank -= n;
      feature[part][self] = (word * 32 + static_cast<int>(__fns(bits[word], 0, rank + 1))) * kWide;
    }
  }
  __syncthreads();
  fill_tile<kWide>(
      shape, parts, tile, [&](int part, int column) { return feature[part][column]; },
      [&](int part, int unit) { return units[part][unit]; });
  if (self < 8 * 16) {
    const int cell = self / 16, piece = self % 16;
    const Quarter q = quarter_of(shape, parts, cell / 2);
    constexpr int kInCell = 64 / kWide, kPieces = kWide / 16;  // panels; pieces of a panel, side by side
    const int column = q.first + cell % 2 * kInCell + piece % 4 / kPieces;
    if (q.part >= 0 && column < parts[q.part].count) {
      const int row = piece / 4 * 16, unit = units[q.part][2 * q.strip + row / RowUnits::kHigh];
      const int n = unit * RowUnits::kHigh + row % RowUnits::kHigh,
                k = feature[q.part][column] + piece % kPieces * 16;
      const int block_row = n / p.block_rows;
      const int entry = block_row < p.block_row_count ? find_block(p, block_row, k / p.block_cols) : -1;
      if (entry >= 0) {
        const std::int64_t its = std::int64_t{entry} * p.block_rows + n % p.block_rows;
        tile.offset[self] = static_cast<int>((its * p.block_cols + k % p.block_cols) / 8);
      }
    }
  }
  __syncthreads();
  write_tile(tile, list);
}

}  // namespace

cudaError_t prepare(const GradientProblem& p, const GradientConfig& config, const std::int32_t* crow,
                    const std::int32_t* col, std::int32_t* words, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(tiles_at_most(p, config));
  if (tiles == 0) return cudaSuccess;
  if (config.wide == 64) {
    for (const GradientConfig& one : {whole_tiles(config), half_tiles(config)}) {
      list_kernel<<<static_cast<unsigned>(tiles_at_most(p, one)), kTileThreads, 0, stream>>>(
          of_pattern(p, one, crow, col), words + list_at(p, one));
    }
  } else {
    const GradientParams params = of_pattern(p, config, crow, col);
    const int rows = static_cast<int>(union_rows(p, config));
    count_kernel<<<static_cast<unsigned>(rows), kTileThreads, 0, stream>>>(params, words);
    const auto list = config.wide == 32 ? union_list_kernel<32> : union_list_kernel<16>;
    list<<<tiles, kTileThreads, 0, stream>>>(params, words, rows, words + list_at(p, config));
  }
  return prepared(stream);
}

}  // namespace rarefy::sm90
