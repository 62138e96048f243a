// Operands of the kernels, as they are passed by value at a launch. All pointers are device memory.
#pragma once

#include <cstdint>

namespace rarefy::device {

// A pattern's plan, as in rarefy/pattern.h.
struct Plan {
  std::int64_t rows, cols, block_rows, block_cols;
  const std::int32_t *crow, *col;         // by block row
  const std::int32_t *ccol, *row, *perm;  // the transposed index, by block column
};

// Consecutive rows are row_stride elements apart; 0 broadcasts one row.
template <class T>
struct Matrix {
  T* data;
  std::int64_t rows;
  std::int64_t row_stride;
};

}  // namespace rarefy::device
