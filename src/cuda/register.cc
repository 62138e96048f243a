// The CUDA back end in the registry: its families, best first, and what it knows of the GPUs.
#include <cuda_runtime_api.h>

#include "core/message.h"
#include "core/registry.h"
#include "cuda/simt/kernels.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm90/register.h"
#include "cuda/status.h"

namespace rarefy {

Status cuda::launch_status(std::string_view op, cudaError_t launched) {
  if (launched == cudaSuccess) return {};
  cudaGetLastError();  // it is reported here: not once more by the caller's next CUDA call
  const auto code = [&] {
    switch (launched) {
      case cudaErrorNoDevice:
      case cudaErrorInsufficientDriver:
      case cudaErrorNoKernelImageForDevice: return StatusCode::unsupported;
      case cudaErrorMemoryAllocation: return StatusCode::out_of_memory;
      default: return StatusCode::internal;
    }
  }();
  return error(code, op, "the CUDA kernel must launch",
               cat(cudaGetErrorName(launched), ": ", cudaGetErrorString(launched)));
}

void register_cuda(Registry& registry) {
  sm90::add_rows(registry);
  cuda::sm80::add_rows(registry);
  cuda::simt::add_rows(registry);
}

bool cuda_built() { return true; }
double dense_microseconds(const Problem& problem, const Machine& machine) {
  return problem.device == Device::cuda ? sm90::dense_microseconds(problem, machine) : 0;
}

namespace {

DeviceInfo describe(int device) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return {};
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    cudaDeviceGetAttribute(&value, which, device);
    return static_cast<double>(value);
  };
  // Two transfers a clock, which is given in kHz; the bus in bits.
  const double bandwidth =
      2e3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  return {properties.name,
          10 * properties.major + properties.minor,
          properties.multiProcessorCount,
          static_cast<std::int64_t>(properties.sharedMemPerBlockOptin),
          properties.l2CacheSize,
          static_cast<std::int64_t>(properties.totalGlobalMem),
          bandwidth};
}

}  // namespace

const std::vector<DeviceInfo>& cuda_devices() {
  static const std::vector<DeviceInfo> devices = [] {
    std::vector<DeviceInfo> found;
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) {  // fails without a driver, a GPU or permission
      for (int device = 0; device < count; ++device) found.push_back(describe(device));
    }
    cudaGetLastError();
    return found;
  }();
  return devices;
}

int current_cuda_device() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return device;
  cudaGetLastError();
  return 0;
}

}  // namespace rarefy
