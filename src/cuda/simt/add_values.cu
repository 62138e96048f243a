// A gradient that a kernel wrote for itself, added to one that is there.
#include <algorithm>

#include "core/registry.h"
#include "cuda/device/convert.cuh"
#include "cuda/status.h"

namespace rarefy {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostGroups = 1 << 20;  // beyond, threads take several values

template <class T>
__global__ void add_values(const T* from, T* to, std::int64_t count) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    device::store(to + i, device::load(to + i) + device::load(from + i));
  }
}

template <class T>
cudaError_t launch(const void* from, void* to, std::int64_t count, cudaStream_t stream) {
  const auto groups = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostGroups));
  add_values<<<groups, kThreads, 0, stream>>>(static_cast<const T*>(from), static_cast<T*>(to), count);
  return cudaGetLastError();
}

}  // namespace

Status add_on_device(std::string_view op, DType dtype, const void* from, void* to, std::int64_t count,
                     void* stream) {
  if (count == 0) return {};
  const auto run = dtype == DType::f64    ? launch<double>
                   : dtype == DType::f32  ? launch<float>
                   : dtype == DType::bf16 ? launch<device::bf16>
                                          : launch<device::f16>;
  return cuda::launch_status(op, run(from, to, count, static_cast<cudaStream_t>(stream)));
}

}  // namespace rarefy
