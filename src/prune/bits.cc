// Masks as bits: applied to a matrix, and from and to bytes.
#include <algorithm>
#include <cstddef>

#include "core/arguments.h"
#include "core/message.h"
#include "prune/lanes.h"
#include "rarefy/prune.h"

namespace rarefy {

namespace {

// Runs body(row) for all rows, in tasks of about 64 K elements.
template <class F>
void each_row(std::int64_t rows, std::int64_t cols, const Executor& executor, F&& body) {
  const std::int64_t step = std::max<std::int64_t>(1, (1 << 16) / std::max<std::int64_t>(1, cols));
  executor.parallel_for((rows + step - 1) / step, [&](std::int64_t task) {
    for (std::int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r) body(r);
  });
}

}  // namespace

Status apply_mask(const MutableMatrixView& matrix, const std::uint8_t* mask, const Executor& executor) {
  constexpr std::string_view op = "apply_mask";
  if (Status status = check_output(op, "matrix", matrix, Device::cpu); !status.ok()) return status;
  if (mask == nullptr && matrix.rows > 0 && matrix.cols > 0) {
    return invalid(op, "mask must point to its bytes", "a null pointer");
  }
  each_row(matrix.rows, matrix.cols, executor, [&](std::int64_t r) {
    const std::size_t size = size_of(matrix.dtype);
    auto* row = static_cast<std::byte*>(matrix.data) + static_cast<std::size_t>(r * matrix.row_stride) * size;
    const std::uint8_t* bits = mask + r * mask_row_bytes(matrix.cols);
    switch (size) {
      case 8: return prune::keep_lanes(reinterpret_cast<std::uint64_t*>(row), matrix.cols, bits);
      case 4: return prune::keep_lanes(reinterpret_cast<std::uint32_t*>(row), matrix.cols, bits);
      case 2: return prune::keep_lanes(reinterpret_cast<std::uint16_t*>(row), matrix.cols, bits);
      default: return prune::keep_lanes(reinterpret_cast<std::uint8_t*>(row), matrix.cols, bits);
    }
  });
  return {};
}

void pack_mask(const std::uint8_t* bytes, std::int64_t rows, std::int64_t cols, std::uint8_t* mask,
               const Executor& executor) {
  each_row(rows, cols, executor, [&](std::int64_t r) {
    const std::uint8_t* from = bytes + r * cols;
    std::uint8_t* to = mask + r * mask_row_bytes(cols);
    for (std::int64_t c = 0; c < cols; c += 8) {
      unsigned byte = 0;
      const auto n = static_cast<int>(std::min<std::int64_t>(8, cols - c));
      for (int b = 0; b < n; ++b) byte |= (from[c + b] != 0 ? 1U : 0U) << b;
      to[c / 8] = static_cast<std::uint8_t>(byte);
    }
  });
}

void unpack_mask(const std::uint8_t* mask, std::int64_t rows, std::int64_t cols, std::uint8_t* bytes,
                 const Executor& executor) {
  each_row(rows, cols, executor, [&](std::int64_t r) {
    const std::uint8_t* from = mask + r * mask_row_bytes(cols);
    std::uint8_t* to = bytes + r * cols;
    std::int64_t c = 0;
    for (; c + 8 <= cols; c += 8) {
      // Bit b of the byte into byte b of a word.
      const std::uint64_t spread = (std::uint64_t{from[c / 8]} * 0x0101010101010101U) & 0x8040201008040201U;
      const std::uint64_t word = ((spread + 0x7f7f7f7f7f7f7f7fU) | spread) >> 7 & 0x0101010101010101U;
      for (int b = 0; b < 8; ++b) to[c + b] = static_cast<std::uint8_t>(word >> (8 * b));
    }
    for (; c < cols; ++c) to[c] = (from[c / 8] >> (c % 8)) & 1;
  });
}

}  // namespace rarefy
