// How much dynamic shared memory a kernel may have: beyond 48 KB CUDA wants to be told, which takes the host
// a microsecond. Told once for each kernel and device, it stays.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>

namespace rarefy::cuda {

// One for each kernel: a static of the template that launches it.
class SharedLimit {
 public:
  template <class Kernel>
  cudaError_t allow(Kernel* kernel, int bytes) {
    int device = 0;
    if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
    if (device < kDevices && allowed_[device].load(std::memory_order_acquire) >= bytes) return cudaSuccess;
    const std::scoped_lock lock(mutex_);  // a smaller limit must not come after a larger one
    if (device < kDevices && allowed_[device].load(std::memory_order_relaxed) >= bytes) return cudaSuccess;
    const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status == cudaSuccess && device < kDevices) allowed_[device].store(bytes, std::memory_order_release);
    return status;
  }

 private:
  static constexpr int kDevices = 64;  // others are told in each launch
  std::atomic<int> allowed_[kDevices]{};
  std::mutex mutex_;
};

}  // namespace rarefy::cuda
