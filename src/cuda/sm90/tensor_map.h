// Descriptors of tensors in device memory for the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "rarefy/dtype.h"

namespace rarefy::sm90 {

// Up to three dimensions, innermost first; its elements are side by side, strides of the others are in bytes
// and multiples of 16. Elements of 16 bits, or f32.
struct TensorShape {
  int rank = 2;
  bool tf32 = false;  // f32 is rounded to tf32 on its way into shared memory
  std::uint64_t size[3] = {1, 1, 1};
  std::uint64_t stride[2] = {0, 0};
  std::uint32_t box[3] = {1, 1, 1};  // innermost: 128, 64 or 32 bytes, swizzled by as many
};

cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* data, const TensorShape& shape);

}  // namespace rarefy::sm90
