// X copied into its other layout, by token or by feature, or as it lies, for kernels of CUDA that read it so.
#pragma once

#include <cstdint>
#include <string_view>

#include "rarefy/status.h"
#include "rarefy/view.h"

namespace rarefy {

// Elements from one feature (by token: from one token) of such a copy to the next: whole tiles of the
// kernels.
constexpr std::int64_t turned_stride(std::int64_t count) { return (count + 63) / 64 * 64; }

// What lies side by side in a matrix: rows or, by feature, columns.
struct LineSizes {
  std::int64_t count, length;  // elements
};
inline LineSizes lines_of(const MatrixView& m) {
  return m.layout() == Layout::by_token ? LineSizes{m.rows, m.cols} : LineSizes{m.cols, m.rows};
}

// to[feature][token] = x[token][feature], or the other way round, in device memory, at the speed of a copy on
// Hopper where x and its rows (by feature: features) are aligned to 16 bytes. Other GPUs, and elements that
// are not of 16 bits, are refused. Of each line of `to` turned_stride elements are written.
Status copy_turned(std::string_view op, const MatrixView& x, void* to, void* stream);

// Whether copy_turned takes such a matrix on the current device.
bool can_turn(const MatrixView& x);

// to = from, of one size, dtype and layout, in device memory on Hopper. `fill`: what is missing behind a row
// (by feature: a feature) to a multiple of 16 bytes is set to zero.
Status copy_rows(std::string_view op, const MatrixView& from, const MutableMatrixView& to, bool fill,
                 void* stream);

}  // namespace rarefy
