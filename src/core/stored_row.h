// A row's stored elements, as kernels of one instruction set have it: a plain struct and nothing else.
#pragma once

#include <cstdint>

namespace rarefy {

// `pieces` runs of `length` elements, their beginnings `stride` apart; the last one has `last`.
struct StoredRow {
  std::int64_t pieces, length, stride, last;
};

}  // namespace rarefy
