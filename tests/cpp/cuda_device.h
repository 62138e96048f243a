// GPU memory for tests, with exact sizes, so that memcheck sees a read past the end; and the reason
// why there is no GPU to test on.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "rarefy/view.h"

namespace rarefy::test {

inline void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Why tests cannot run here; empty when they can.
inline std::string no_gpu() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return {};
  cudaGetLastError();
  return std::string("no NVIDIA GPU: ") + (status == cudaSuccess ? "none found" : cudaGetErrorString(status));
}

// Bytes of device memory on the current device.
class DeviceBuffer {
 public:
  static constexpr Device kDevice = Device::cuda;

  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) require(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;

  template <class T>
  static DeviceBuffer upload(std::span<const T> host) {
    DeviceBuffer buffer(host.size_bytes());
    require(cudaMemcpy(buffer.data_, host.data(), host.size_bytes(), cudaMemcpyHostToDevice), "upload");
    require(cudaDeviceSynchronize(), "upload");  // the copy may outlast its call
    return buffer;
  }

  std::vector<std::byte> download() const {
    std::vector<std::byte> host(bytes_);
    require(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), "download");
    return host;
  }

  void fill(std::byte value) {
    require(cudaMemset(data_, std::to_integer<int>(value), bytes_), "cudaMemset");
    require(cudaDeviceSynchronize(), "cudaMemset");  // the same
  }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace rarefy::test
