// How a plan lies in its buffer: header, crow, col, ccol, row, perm. Offsets follow from the shape alone, so
// that host and device agree on them without reading the buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "rarefy/pattern.h"

namespace rarefy {

struct PlanHeader {
  static constexpr std::int32_t kMagic = 0x52465031;  // "RFP1": bump the digit with the layout
  static constexpr std::int64_t kWords = 8;
  std::int32_t word[kWords];  // magic, rows, cols, block_rows, block_cols, nnzb, 0, 0

  explicit PlanHeader(const BsrShape& shape)
      : word{kMagic,
             static_cast<std::int32_t>(shape.rows),
             static_cast<std::int32_t>(shape.cols),
             static_cast<std::int32_t>(shape.block_rows),
             static_cast<std::int32_t>(shape.block_cols),
             static_cast<std::int32_t>(shape.nnzb),
             0,
             0} {}

  // The shape that a header's words say, whoever wrote them.
  static BsrShape shape_of(const std::int32_t* word) { return {word[1], word[2], word[3], word[4], word[5]}; }
};

struct PlanLayout {
  std::int64_t crow, col, ccol, row, perm, size;

  explicit PlanLayout(const BsrShape& shape)
      : crow(PlanHeader::kWords),
        col(crow + shape.row_count() + 1),
        ccol(col + shape.nnzb),
        row(ccol + shape.col_count() + 1),
        perm(row + shape.nnzb),
        size(perm + shape.nnzb) {}
};

Status check_index_sizes(std::string_view op, const BsrShape& shape, std::size_t crow, std::size_t col);

// Lengths of the index arrays and of the plan, for those who cannot look at the arrays yet.
Status check_plan_sizes(std::string_view op, const BsrShape& shape, std::size_t crow, std::size_t col,
                        std::size_t plan);

}  // namespace rarefy
