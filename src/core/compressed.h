// The check of compressed index arrays, with the caller's words for its arguments: CSC, for one,
// has ccol_indices and row_indices.
#pragma once

#include <span>
#include <string_view>

#include "rarefy/pattern.h"

namespace rarefy {

struct IndexNames {
  std::string_view compressed = "crow_indices";
  std::string_view plain = "col_indices";
  std::string_view row = "block row";
  std::string_view col = "block column";
};

inline constexpr IndexNames kBsrNames;
inline constexpr IndexNames kCsrNames{"crow_indices", "col_indices", "row", "column"};
inline constexpr IndexNames kCscNames{"ccol_indices", "row_indices", "column", "row"};

Status check_compressed(std::string_view op, const IndexNames& names, const BsrShape& shape,
                        std::span<const std::int32_t> compressed, std::span<const std::int32_t> plain);

}  // namespace rarefy
