// Which weights leave: from scores to masks, exactly as many as asked for, in host memory.
//
// A total order of the units decides, so a mask depends on nothing but its inputs: the score, NaN lowest;
// among equal scores a sequence that spreads evenly over rows and columns, so that ties never take a whole
// row; then the position.
#pragma once

#include <cstdint>
#include <span>

#include "rarefy/convert.h"
#include "rarefy/executor.h"
#include "rarefy/export.h"
#include "rarefy/status.h"
#include "rarefy/view.h"

namespace rarefy {

// A mask has one bit for each element: bit c % 8 of byte c / 8 of its row, 1 where the element stays. Rows
// begin at bytes; the bits past the last column are 0. As numpy.packbits(mask, axis=1, bitorder="little").
constexpr std::int64_t mask_row_bytes(std::int64_t cols) { return cols / 8 + (cols % 8 != 0 ? 1 : 0); }

// How an element counts: as it is, |x|, or x². A unit counts as the sum over its elements, in double, for
// `square` as the root of that.
enum class Importance : std::uint8_t { value, magnitude, square };

struct PruneScores {
  MatrixView matrix;  // f64, f32, bf16 or f16; a score is rounded to float unless they are f64
  Importance importance = Importance::value;
  const double* column_scale = nullptr;    // a factor for each column, of |x| or x²: not for `value`
  const std::uint8_t* previous = nullptr;  // a mask; what it has removed whole leaves before anything else
};

// What leaves or stays as one.
struct PruneUnits {
  // With of = 0 a block R × C; at the edges blocks are smaller, and count as one all the same.
  BlockShape block;
  // With of > 0: of each `of` neighbouring elements of a row at most `keep` stay. With blocks 1×1 the units
  // are those groups, of which the ones that lose least become sparse; with other blocks (whose columns must
  // be a multiple of `of`) every group of every block that stays does.
  std::int64_t keep = 0, of = 0;
  // Whether counts are of each row of units.
  bool each_row = false;
};

// Units in all, or in each row of units.
RAREFY_API Result<std::int64_t> count_units(const MatrixView& matrix, const PruneUnits& units);

struct PruneCount {
  std::int64_t kept = 0;  // elements
  std::int64_t nan = 0;   // units (elements, for N:M) whose score is NaN
};

// Writes to `mask`, rows × mask_row_bytes(cols) bytes, the mask without the `remove` lowest units.
RAREFY_API Result<PruneCount> prune_mask(const PruneScores& scores, const PruneUnits& units,
                                         std::int64_t remove, std::uint8_t* mask, const Executor& executor);

// One of several matrices whose units are compared with each other.
struct PruneLayer {
  PruneScores scores;
  PruneUnits units;
  std::int64_t least = 0, most = 0;  // how many units it must, and may, lose
};

// How many units each layer loses if the `remove` lowest of all leave, within the layers' limits. Equal
// scores at the border are shared in proportion. Nothing is copied: the layers are read a few times.
RAREFY_API Status allocate_global(std::span<const PruneLayer> layers, std::int64_t remove,
                                  std::span<std::int64_t> removed, const Executor& executor);

// Lee et al. 2021: w² / Σ of the squares of all weights of the matrix that are not less, for each weight, in
// ascending order; as doubles to `scores`, rows × cols of them. NaN counts as 0. Between layers such scores
// say what each should lose: they go to allocate_global.
RAREFY_API Status lamp_scores(const MatrixView& weight, double* scores);

// Sets to +0 what the mask has removed, NaN included.
RAREFY_API Status apply_mask(const MutableMatrixView& matrix, const std::uint8_t* mask,
                             const Executor& executor);

// Between bits and bytes (0, or anything else for 1), rows × cols; unpacking writes 0 and 1.
RAREFY_API void pack_mask(const std::uint8_t* bytes, std::int64_t rows, std::int64_t cols, std::uint8_t* mask,
                          const Executor& executor);
RAREFY_API void unpack_mask(const std::uint8_t* mask, std::int64_t rows, std::int64_t cols,
                            std::uint8_t* bytes, const Executor& executor);

}  // namespace rarefy
