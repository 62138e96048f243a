// What lies outside the matrix in the blocks of a weight's gradient.
#pragma once

#include <algorithm>

#include "rarefy/linear.h"

namespace rarefy::cpu {

// Elements of edge blocks outside the matrix: 0, also where NaN times a zero of padding made a NaN.
template <class T>
void clear_padding(const PlanView& plan, T* sums) {
  const BsrShape& s = plan.shape;
  const std::int64_t rows = s.rows % s.block_rows;
  const std::int64_t cols = s.cols % s.block_cols;
  if (rows != 0) {
    for (std::int64_t e = plan.crow[s.row_count() - 1]; e < plan.crow[s.row_count()]; ++e) {
      T* block = sums + e * s.block_size();
      std::fill(block + rows * s.block_cols, block + s.block_size(), T{0});
    }
  }
  if (cols != 0) {
    for (std::int64_t i = plan.ccol[s.col_count() - 1]; i < plan.ccol[s.col_count()]; ++i) {
      T* row = sums + plan.perm[i] * s.block_size();
      for (std::int64_t r = 0; r < s.block_rows; ++r, row += s.block_cols) {
        std::fill(row + cols, row + s.block_cols, T{0});
      }
    }
  }
}

}  // namespace rarefy::cpu
