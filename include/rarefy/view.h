// Non-owning views of dense matrices, in host or device memory.
#pragma once

#include <cstdint>

#include "rarefy/dtype.h"

namespace rarefy {

enum class Device : std::uint8_t { cpu, cuda };

// How the elements of a row lie: side by side, or those of a column (a feature of all tokens) do.
enum class Layout : std::uint8_t { by_token, by_feature };

// rows × cols elements; consecutive rows are row_stride elements apart (0 broadcasts one row), consecutive
// columns col_stride. One of the two is 1. Only the three products take others than col_stride 1.
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  Device device = Device::cpu;
  std::int64_t col_stride = 1;

  Layout layout() const { return col_stride == 1 ? Layout::by_token : Layout::by_feature; }
  std::int64_t stride() const { return col_stride == 1 ? row_stride : col_stride; }  // the other one
};

// The same, writable; the stride that is not 1 must be at least cols (by feature: rows), so that no element
// is written twice.
struct MutableMatrixView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  Device device = Device::cpu;
  std::int64_t col_stride = 1;

  Layout layout() const { return col_stride == 1 ? Layout::by_token : Layout::by_feature; }
  std::int64_t stride() const { return col_stride == 1 ? row_stride : col_stride; }

  // An output may be read back: implicit, as from T* to const T*.
  operator MatrixView() const {  // NOLINT(google-explicit-constructor)
    return {data, dtype, rows, cols, row_stride, device, col_stride};
  }
};

}  // namespace rarefy
