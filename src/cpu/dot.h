// The weight gradient on the pattern: each stored element is a dot product over tokens. Tiles of
// rows × columns of one block row keep rows · columns vector sums in registers (per vector of
// tokens: rows + columns loads), and are summed across their lanes once at the end.
#pragma once

#include "cpu/panel.h"

namespace rarefy::cpu {

// A tile: `Rows` features of dY against `Cols` features of X, each with its own destination.
template <class I, int Rows, int Cols>
void dot_tile(const float* dy, const float* const* x, std::int64_t lanes, float* const* out,
              std::int64_t out_stride, bool accumulate) {
  Vec<I> sum[Rows][Cols];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < Cols; ++c) sum[r][c] = I::zero();
  }
  const float* xs[Cols];
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
      for (int c = 0; c < Cols; ++c) sum[r][c] = I::fma(dv, xv[c], sum[r][c]);
    }
  }
  for (int c = 0; c < Cols; ++c) {
    float sums[Rows];
    if constexpr (Rows == 4) {
      I::sum4(sum[0][c], sum[1][c], sum[2][c], sum[3][c], sums);
    } else {
      for (int r = 0; r < Rows; ++r) sums[r] = I::sum(sum[r][c]);
    }
    for (int r = 0; r < Rows; ++r) {
      float* to = out[c] + r * out_stride;
      *to = accumulate ? *to + sums[r] : sums[r];
    }
  }
}

template <class I>
void dot(const DotTask& task) {
  constexpr int kCols = I::kRegisters >= 32 ? 4 : 2;
  const std::int64_t block_size = static_cast<std::int64_t>(task.block_rows) * task.block_cols;
  const std::int64_t elements = static_cast<std::int64_t>(task.end - task.begin) * task.block_cols;
  // Columns of the block row's stored blocks, in order: element q is column q % C of block q / C.
  for (std::int64_t q = 0; q < elements; q += kCols) {
    const float* x[kCols];
    float* out[kCols];
    const int cols = elements - q < kCols ? static_cast<int>(elements - q) : kCols;
    for (int i = 0; i < cols; ++i) {
      const std::int64_t b = (q + i) / task.block_cols;
      const std::int64_t c = (q + i) % task.block_cols;
      x[i] =
          task.x + (static_cast<std::int64_t>(task.col[task.begin + b]) * task.block_cols + c) * task.lanes;
      out[i] = task.out + b * block_size + c;
    }
    std::int32_t r = 0;
    const auto step = [&]<int Rows, int Cols>(int first) {
      float* to[Cols];
      for (int i = 0; i < Cols; ++i) to[i] = out[first + i] + static_cast<std::int64_t>(r) * task.block_cols;
      dot_tile<I, Rows, Cols>(task.dy + r * task.lanes, x + first, task.lanes, to, task.block_cols,
                              task.accumulate);
    };
    for (; r + 4 <= task.block_rows; r += 4) {
      if (cols == kCols) {
        step.template operator()<4, kCols>(0);
      } else {
        for (int i = 0; i < cols; ++i) step.template operator()<4, 1>(i);
      }
    }
    for (; r < task.block_rows; ++r) {
      if (cols == kCols) {
        step.template operator()<1, kCols>(0);
      } else {
        for (int i = 0; i < cols; ++i) step.template operator()<1, 1>(i);
      }
    }
  }
}

}  // namespace rarefy::cpu
