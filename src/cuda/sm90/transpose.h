// A matrix of elements of 16 or 32 bits turned, at the speed of a copy: what kernels that want X by feature
// make of one by token, into workspace. And one copied as it lies, into lines that are aligned.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/by_feature.h"
#include "cuda/sm90/host_device.h"

namespace rarefy::sm90 {

// Launch included; 3.6 MB a µs, read and written at once.
constexpr double transpose_microseconds(std::int64_t bytes) {  // of the matrix
  return static_cast<double>(bytes) / 3.6e6 + 2;
}

// Where a column's elements go: all side by side, or so many rows of all columns side by side, the next ones
// `stride` elements on. `swizzled`, of 32 or 64 rows of 16 bits: the pieces of 16 bytes of
// a column lie where swizzled_piece says.
struct TransposedPanels {
  int rows = 64;  // a power of two
  std::int64_t stride = 64;
  bool swizzled = false;
};

// Eight columns' pieces of the same rows are in different banks; `pieces`: 4 or 8 of a column.
RAREFY_HOST_DEVICE constexpr int swizzled_piece(int pieces, int column, int piece) {
  return pieces == 8 ? piece ^ column % 8 : piece ^ column / 2 % 4;
}

struct Zeros {
  int* words = nullptr;
  int count = 0;
};

// Rows that another kernel turns if that word is not 0: from a multiple of 64 on.
struct Elsewhere {
  const int* is_so = nullptr;
  std::int64_t from_row = 0;
};

// to[column][row] = from[row][column], elements of `size` bytes, 2 or 4; rows of `to` are strides apart,
// which are multiples of 16 bytes, as its address is; those of `from` are slower if they are not. Rows of
// `to` are written up to a multiple of 64. The next kernel of the stream may start while this one ends;
// `overlap`: this one may start, read and write while the kernel before ends, and ends behind it. `zeros`:
// words that it sets to 0 as well; `elsewhere`: rows that it leaves out.
cudaError_t transpose(const void* from, int size, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                      void* to, std::int64_t to_stride, bool overlap, cudaStream_t stream,
                      TransposedPanels panels = {}, Zeros zeros = {}, Elsewhere elsewhere = {});

// Lines of memory, so many bytes apart.
template <class Data>
struct Lines {
  Data* data;
  std::int64_t stride;
};

// `bytes` of each line, an even number, and zeros behind them. `overlap`: as above.
cudaError_t copy_lines(Lines<const void> from, Lines<void> to, std::int64_t count, std::int64_t bytes,
                       std::int64_t zeros, bool overlap, cudaStream_t stream);

}  // namespace rarefy::sm90
