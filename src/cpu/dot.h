// The weight gradient on the pattern: each stored element is a dot product over tokens. Tiles of
// rows × columns of one block row keep rows · columns vector sums in registers (per vector of
// tokens: rows + columns loads), and are summed across their lanes once at the end.
#pragma once

#include "cpu/panel.h"

namespace rarefy::cpu {

// Rows of dY that stay in L1 while the columns of X pass by: 16 KB for 512 tokens.
inline constexpr std::int32_t kRowGroup = 8;

// How the sums of a tile lie in dW: those of four rows are neighbours (blocks of one column), those of a
// row's columns, or neither. One by one they cost AVX-512 3 % and AVX2 12 %.
enum class Sums : std::uint8_t { down, across, apart };

// Every row of dY against every column of X: sums[r * Cols + c], or down: sums[c * Rows + r].
template <class I, int Rows, int Cols, Sums kSums>
void dot_tile(const Element<I>* dy, const Element<I>* const* x, std::int64_t lanes, Element<I>* sums) {
  constexpr int count = Rows * Cols;
  Vec<I> sum[count];
#pragma GCC unroll 16
  for (int i = 0; i < count; ++i) sum[i] = I::zero();
  const Element<I>* xs[Cols];
#pragma GCC unroll 16
  for (int c = 0; c < Cols; ++c) xs[c] = x[c];
  for (std::int64_t m = 0; m < lanes; m += I::kWidth) {
    Vec<I> xv[Cols];
#pragma GCC unroll 16
    for (int c = 0; c < Cols; ++c) xv[c] = I::load(xs[c] + m);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec<I> dv = I::load(dy + r * lanes + m);
#pragma GCC unroll 16
      for (int c = 0; c < Cols; ++c) sum[r * Cols + c] = I::fma(dv, xv[c], sum[r * Cols + c]);
    }
  }
  if constexpr (kSums == Sums::down) {
    static_assert(Rows == 4);
#pragma GCC unroll 16
    for (int c = 0; c < Cols; ++c) {
      I::sum4(sum[c], sum[Cols + c], sum[2 * Cols + c], sum[3 * Cols + c], sums + 4 * c);
    }
  } else if constexpr (count % 4 == 0) {
#pragma GCC unroll 16
    for (int i = 0; i < count; i += 4) I::sum4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], sums + i);
  } else {
    for (int i = 0; i < count; ++i) sums[i] = I::sum(sum[i]);
  }
}

// Rows first … last of the block row, a multiple of Rows, against its columns from `q` on: column q is
// column q % C of stored block q / C. What is left of Cols columns goes to half as many.
template <class I, int Rows, int Cols, Sums kSums>
void dot_columns(const DotTaskOf<Element<I>>& task, std::int32_t first, std::int32_t last, std::int64_t q) {
  const std::int64_t block_size = static_cast<std::int64_t>(task.block_rows) * task.block_cols;
  const std::int64_t columns = static_cast<std::int64_t>(task.end - task.begin) * task.block_cols;
  std::int64_t b = q / task.block_cols;
  std::int64_t c = q % task.block_cols;
  for (; q + Cols <= columns; q += Cols) {
    const Element<I>* x[Cols];
    Element<I>* out[Cols];
    for (int i = 0; i < Cols; ++i) {
      x[i] = task.x + (task.col[task.begin + b] * std::int64_t{task.block_cols} + c) * task.lanes;
      out[i] = task.out + b * block_size + c;
      if (++c == task.block_cols) {
        c = 0;
        ++b;
      }
    }
    for (std::int32_t r = first; r < last; r += Rows) {
      Element<I> sums[Rows * Cols];
      dot_tile<I, Rows, Cols, kSums>(task.dy + r * task.lanes, x, task.lanes, sums);
      // NOLINTNEXTLINE(bugprone-branch-clone): as many rows as columns
      constexpr int kRuns = kSums == Sums::down ? Cols : Rows, kLength = Rows * Cols / kRuns;
      for (int i = 0; i < kRuns; ++i) {
        const std::int64_t row = static_cast<std::int64_t>(r + i) * task.block_cols;
        for (int j = 0; j < kLength; ++j) {
          Element<I>* to = kSums == Sums::down     ? out[i] + r + j
                           : kSums == Sums::across ? out[0] + row + j
                                                   : out[j] + row;
          *to = task.accumulate ? *to + sums[i * kLength + j] : sums[i * kLength + j];
        }
      }
    }
  }
  if constexpr (Cols > 1) dot_columns<I, Rows, Cols / 2, kSums>(task, first, last, q);
}

template <class I, Sums kSums>
void dot_rows(const DotTaskOf<Element<I>>& task) {
  constexpr Sums kFew = kSums == Sums::down ? Sums::apart : kSums;
  constexpr int cols = I::kRegisters >= 32 ? 4 : 2;  // beside four rows
  const std::int32_t whole = task.block_rows - task.block_rows % 4;
  for (std::int32_t r = 0; r < whole; r += kRowGroup) {
    dot_columns<I, 4, cols, kSums>(task, r, whole - r < kRowGroup ? whole : r + kRowGroup, 0);
  }
  std::int32_t r = whole;
  if (task.block_rows - r >= 2) {
    dot_columns<I, 2, 2 * cols, kFew>(task, r, r + 2, 0);
    r += 2;
  }
  if (r < task.block_rows) dot_columns<I, 1, 2 * cols, kFew>(task, r, r + 1, 0);
}

template <class I>
void dot(const DotTaskOf<Element<I>>& task) {
  constexpr int most = I::kRegisters >= 32 ? 8 : 4;  // columns of a tile
  if (task.block_cols == 1) return dot_rows<I, Sums::down>(task);
  if (task.block_cols % most == 0) return dot_rows<I, Sums::across>(task);
  dot_rows<I, Sums::apart>(task);
}

}  // namespace rarefy::cpu
