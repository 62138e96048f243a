// Tiles of the weight gradient, found in a pattern's index by all threads of a block: whole ones first, then
// what is left of each row, which costs less and fills the last round.
#pragma once

#include <cuda.h>

#include "cuda/sm90/block_gradient.h"
#include "cuda/sm90/device/mbarrier.cuh"

namespace rarefy::sm90 {

inline constexpr int kTileThreads = 384;

template <int kWide>
struct GradientTile {
  static constexpr int kUnits = kWide == 64 ? 1 : 2;    // of a panel of dY: parts that may lie apart
  static constexpr int kPanels = 512 / kWide + kUnits;  // of X, and units of dY
  static constexpr int kPieces = kWide == 64 ? 1 : 16;  // of a cell, 64 × 64 weights: itself, or 16 × 16 each
  int x_panels, dy_panels;                              // 0: there is no such tile
  unsigned sums;            // bits of the panels of dY whose sum over the tokens is this tile's
  int feature[kPanels];     // where they begin: panels of X, then units of dY
  int a[4], b[4];           // of quarter 2 · warpgroup + half: its panel of dY, its first of X; -1: none
  int offset[8 * kPieces];  // of the pieces of cell 2 · quarter + half, in eights of values; -1: not stored
  int apart;  // whether units of one panel of dY are no neighbours: then all of dY is loaded as units

  // Of dY, at a row of a panel.
  __device__ int row_feature(int panel, int row) const {
    constexpr int kHigh = 64 / kUnits;
    return feature[x_panels + panel * kUnits + row / kHigh] + row % kHigh;
  }
};

struct GradientParams {
  CUtensorMap dy, x, dy_units;  // the last one of panels narrower than 64
  const int *crow, *col;
  const int* list;  // GradientTile; null: none was made
  void* dvalues;
  // The gradient of the bias, or null. Thread blocks behind those of tiles read the dY of rows, so many
  // features, that store nothing and have no tile.
  void* dbias;
  const void* dy_values;
  std::int64_t dy_stride;
  int tiles, row_features;
  int tile_blocks;  // thread blocks that have the tiles, one each or one after the other
  // Tiles from skip_from on are `skipped` further in the list: those of a call may be two launches', of which
  // the second one begins with the first one's last round, and ends behind it.
  int skip_from, skipped;
  bool goes_on;
  int tokens, rows, cols, block_rows, block_cols, block_row_count;
  int wide, most;
  bool two, pairs, even;
  bool accumulate;  // add to what dvalues holds

  __device__ int list_index(int tile) const { return tile >= skip_from ? tile + skipped : tile; }
};

inline GradientParams of_pattern(const GradientProblem& p, const GradientConfig& config,
                                 const std::int32_t* crow, const std::int32_t* col) {
  GradientParams params{};
  params.crow = crow;
  params.col = col;
  params.block_rows = static_cast<int>(p.block_rows);
  params.block_cols = static_cast<int>(p.block_cols);
  params.block_row_count = static_cast<int>(p.block_row_count());
  params.wide = config.wide;
  params.most = config.most;
  params.even = config.even;
  params.two = config.two;
  params.pairs = config.pairs;
  return params;
}

// The sum of `value` over the threads before this one; `total` over all. Every thread of the block calls it.
__device__ inline int sum_before(int value, int& total, int* of_warps) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kTileThreads / 32; ++w) {
    before += w < warp ? of_warps[w] : 0;
    total += of_warps[w];
  }
  return before + sum - value;
}

// Some columns of a row.
struct RowPart {
  int row, first, count;
};

// Tile `index` as parts of one row or of two; no columns: there are not so many tiles. In shared memory; all
// see it on return.
template <class Columns>
__device__ inline void find_parts(const TileShape& shape, int rows, int index, Columns&& columns_of,
                                  RowPart (&parts)[2]) {
  // Aligned, as the compiler reads whole pieces of 16 bytes, which should hold nothing else.
  __shared__ alignas(16) int of_warps[kTileThreads / 32];
  __shared__ int left[kMostColumns], place[4];
  const int self = static_cast<int>(threadIdx.x), whole = shape.columns();
  const int each = (rows + kTileThreads - 1) / kTileThreads, begin = min(self * each, rows),
            end = min(begin + each, rows);
  if (self < 2) parts[self] = {0, 0, 0};
  if (self < kMostColumns) left[self] = 0;
  // The row with the `at`-th of what `count_of` counts.
  const auto find = [&](int at, auto&& count_of, auto&& found) {
    int mine = 0, total = 0;
    for (int row = begin; row < end; ++row) mine += count_of(row);
    at -= sum_before(mine, total, of_warps);
    if (at >= 0 && at < mine) {
      int row = begin;
      for (; at >= count_of(row); ++row) at -= count_of(row);
      found(row, at);
    }
    return total;
  };
  if (shape.even) {
    const auto tiles_of = [&](int row) { return (columns_of(row) + whole - 1) / whole; };
    find(index, tiles_of, [&](int row, int at) {
      const int columns = columns_of(row), tiles = tiles_of(row), first = at * columns / tiles;
      parts[0] = {row, first, (at + 1) * columns / tiles - first};
    });
    __syncthreads();
    return;
  }
  const int total = find(
      index, [&](int row) { return columns_of(row) / whole; },
      [&](int row, int at) {
        parts[0] = {row, at * whole, whole};
      });
  if (index >= total) {
    for (int row = begin; row < end; ++row) {
      if (const int w = columns_of(row) % whole; w > 0) atomicAdd(left + w, 1);
    }
    __syncthreads();
    if (self == 0) {  // of which widths, and the how many-th of those
      int counts[kMostColumns], at = index - total;
      for (int w = 0; w < kMostColumns; ++w) counts[w] = left[w];
      for (int& word : place) word = 0;
      pair_rests(shape, counts, [&](int w, int v, int n) {
        if (at >= n) {
          at -= n;
          return false;
        }
        place[0] = w;
        place[1] = left[w] - counts[w] + (v == w ? 2 : 1) * at;
        place[2] = v;
        place[3] = v == w ? place[1] + 1 : left[v] - counts[v] + at;
        return true;
      });
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int width = place[2 * part];
      if (width == 0) continue;
      find(
          place[2 * part + 1], [&](int row) { return columns_of(row) % whole == width ? 1 : 0; },
          [&](int row, int) {
            parts[part] = {row, columns_of(row) / whole * whole, width};
          });
    }
  }
  __syncthreads();
}

// A quarter's part, its strip of the row, and which columns of the part; part -1: none.
struct Quarter {
  int part, strip, first;
};

// Quarters go to the warpgroups in turn, so that both have as many.
__device__ inline Quarter quarter_of(const TileShape& shape, const RowPart (&parts)[2], int quarter) {
  int job = 2 * (quarter % 2) + quarter / 2;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int count = shape.quarters(parts[part].count);
    if (job < count) return {part, job % shape.strips(), job / shape.strips() * shape.per_quarter()};
    job -= count;
  }
  return {-1, 0, 0};
}

// The tile of these parts, but for `offset`. feature_of(part, column): where a panel of X begins;
// unit_of(part, unit): a unit of a row. A barrier has to follow.
template <int kWide, class Feature, class Unit>
__device__ inline void fill_tile(const TileShape& shape, const RowPart (&parts)[2], GradientTile<kWide>& tile,
                                 Feature&& feature_of, Unit&& unit_of) {
  const int self = static_cast<int>(threadIdx.x), first = parts[0].count, x = first + parts[1].count;
  const int strips = shape.strips(), each = strips * tile.kUnits;  // of a part
  const int dy = x == 0 ? 0 : parts[1].count > 0 ? 2 * strips : strips;
  if (self == 0) {
    tile.x_panels = x;
    tile.dy_panels = dy;
    tile.apart = 0;
    for (int unit = 0; tile.kUnits > 1 && unit < dy * tile.kUnits; unit += tile.kUnits) {
      const int part = unit / each, first_unit = unit % each, last_unit = first_unit + tile.kUnits - 1;
      if (unit_of(part, last_unit) - unit_of(part, first_unit) >= tile.kUnits) tile.apart = 1;
    }
    tile.sums = 0;  // one tile of a row begins with its first column
    for (int part = 0; part < 2; ++part) {
      if (parts[part].count > 0 && parts[part].first == 0) tile.sums |= ((1u << strips) - 1) << part * strips;
    }
  }
  if (self < x) {
    tile.feature[self] = self < first ? feature_of(0, self) : feature_of(1, self - first);
  } else if (self < x + dy * tile.kUnits) {
    tile.feature[self] = unit_of((self - x) / each, (self - x) % each) * (64 / tile.kUnits);
  }
  if (self < 4) {
    const Quarter q = quarter_of(shape, parts, self);
    tile.a[self] = q.part < 0 ? -1 : q.part * strips + q.strip;
    tile.b[self] = q.part < 0 ? -1 : (q.part == 0 ? 0 : first) + q.first;
  }
}

// A tile of blocks whose sides are multiples of 64, by all threads; a barrier has to follow.
__device__ inline void find_tile(const GradientParams& p, int index, GradientTile<64>& tile) {
  __shared__ RowPart parts[2];
  const TileShape shape{64, p.two, p.pairs, false, p.most};
  const int high = p.block_rows / 64, wide = p.block_cols / 64, tiles_of_row = high / shape.strips();
  const int first_strip = index % tiles_of_row * shape.strips();  // of the block
  find_parts(
      shape, p.block_row_count, index / tiles_of_row,
      [&](int row) { return (__ldg(p.crow + row + 1) - __ldg(p.crow + row)) * wide; }, parts);
  const auto entry_of = [&](const RowPart& part, int column) {
    return __ldg(p.crow + part.row) + (part.first + column) / wide;
  };
  fill_tile<64>(
      shape, parts, tile,
      [&](int part, int column) {
        const RowPart& its = parts[part];
        return __ldg(p.col + entry_of(its, column)) * p.block_cols + (its.first + column) % wide * 64;
      },
      [&](int part, int strip) { return parts[part].row * high + first_strip + strip; });
  if (const int cell = static_cast<int>(threadIdx.x); cell < 8) {
    const Quarter q = quarter_of(shape, parts, cell / 2);
    const int column = q.first + cell % 2;
    int offset = -1;
    if (q.part >= 0 && column < parts[q.part].count) {
      const RowPart& part = parts[q.part];
      const std::int64_t row =
          std::int64_t{entry_of(part, column)} * p.block_rows + (first_strip + q.strip) * 64;
      offset = static_cast<int>((row * p.block_cols + (part.first + column) % wide * 64) / 8);
    }
    tile.offset[cell] = offset;
  }
}

}  // namespace rarefy::sm90
