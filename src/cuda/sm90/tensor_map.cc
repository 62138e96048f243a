#include "cuda/sm90/tensor_map.h"

#include <cudaTypedefs.h>

namespace rarefy::sm90 {
namespace {

// Asked of the runtime, so that nothing links against the driver.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* data, const TensorShape& shape) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const CUtensorMapDataType type = dtype == DType::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : shape.tf32          ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const std::size_t bytes = shape.box[0] * size_of(dtype);
  const CUtensorMapSwizzle swizzle = bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_32B;
  const std::uint32_t steps[3] = {1, 1, 1};
  const auto make = [&] {
    return encode(map, type, static_cast<std::uint32_t>(shape.rank), const_cast<void*>(data), shape.size,
                  shape.stride, shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult made = make();
  if (made == CUDA_ERROR_INVALID_CONTEXT) {
    // The driver's call does not make a context current, as the runtime's calls do: this may be the first of
    // all in a thread of autograd.
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaSetDevice(device);
    if (status != cudaSuccess) return status;
    made = make();
  }
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace rarefy::sm90
