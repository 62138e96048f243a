// What blocks at the edge hold outside of the matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rarefy/pattern.h"

namespace rarefy {

inline bool has_padding(const BsrShape& s) {
  return s.rows % s.block_rows != 0 || s.cols % s.block_cols != 0;
}

// Sets the padding of a block row to zero; values are whole blocks of elements of `size` bytes.
inline void clear_padding(const PlanView& plan, std::int64_t i, void* values, std::int64_t size) {
  const BsrShape& s = plan.shape;
  const std::int64_t rows = std::min(s.block_rows, s.rows - i * s.block_rows);
  for (std::int64_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
    const std::int64_t cols = std::min(s.block_cols, s.cols - plan.col[e] * s.block_cols);
    for (std::int64_t r = 0; r < s.block_rows; ++r) {
      const std::int64_t kept = r < rows ? cols : 0;
      const std::int64_t first = (e * s.block_rows + r) * s.block_cols + kept;
      std::memset(static_cast<std::byte*>(values) + first * size, 0,
                  static_cast<std::size_t>((s.block_cols - kept) * size));
    }
  }
}

}  // namespace rarefy
