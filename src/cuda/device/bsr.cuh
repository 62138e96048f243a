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

// Consecutive rows are row_stride elements apart, columns col_stride; one of them is 1.
template <class T>
struct Matrix {
  T* data;
  std::int64_t rows;
  std::int64_t row_stride, col_stride;

  __device__ bool by_feature() const { return col_stride != 1; }
};

}  // namespace rarefy::device
