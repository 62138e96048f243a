// Non-owning views of dense row-major matrices, in host or device memory.
#pragma once

#include <cstdint>

#include "rarefy/dtype.h"

namespace rarefy {

enum class Device : std::uint8_t { cpu, cuda };

// rows × cols elements; consecutive rows are row_stride elements apart (0 broadcasts one row).
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  Device device = Device::cpu;
};

// The same, writable; row_stride must be at least cols, so that no element is written twice.
struct MutableMatrixView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  Device device = Device::cpu;

  // An output may be read back: implicit, as from T* to const T*.
  operator MatrixView() const {  // NOLINT(google-explicit-constructor)
    return {data, dtype, rows, cols, row_stride, device};
  }
};

}  // namespace rarefy
