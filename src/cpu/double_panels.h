// Panels of doubles by feature, as the kernels of doubles.h read them.
#pragma once

#include <algorithm>

#include "core/registry.h"

namespace rarefy::cpu {

inline constexpr std::int64_t kDoublesPacked = 64;  // features that a task packs

// Features begin … end of tokens first … first + count, [feature][lanes]; lanes and features past them are 0.
inline void pack_doubles(const MatrixView& from, std::int64_t first, std::int64_t count, std::int64_t lanes,
                         std::int64_t begin, std::int64_t end, double* panel) {
  const auto* data = static_cast<const double*>(from.data) + first * from.row_stride;
  for (std::int64_t k = begin; k < end; ++k) {
    double* to = panel + k * lanes;
    const std::int64_t there = k < from.cols ? count : 0;
    for (std::int64_t m = 0; m < there; ++m) to[m] = data[m * from.row_stride + k];
    std::fill(to + there, to + lanes, 0.0);
  }
}

// All of them up to `padded`, by all threads.
inline void pack_doubles(const Executor& executor, const MatrixView& from, std::int64_t first,
                         std::int64_t count, std::int64_t lanes, std::int64_t padded, double* panel) {
  executor.parallel_for((padded + kDoublesPacked - 1) / kDoublesPacked, [&](std::int64_t task) {
    const std::int64_t begin = task * kDoublesPacked;
    pack_doubles(from, first, count, lanes, begin, std::min(padded, begin + kDoublesPacked), panel);
  });
}

}  // namespace rarefy::cpu
