// Elements of device memory combined with others, in place: a gradient that a kernel wrote for itself added
// to one that is there, hidden features multiplied with their gate.
#include <algorithm>

#include "core/registry.h"
#include "cuda/device/convert.cuh"
#include "cuda/status.h"

namespace rarefy {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostGroups = 1 << 20;  // beyond, threads take several values

struct Add {
  template <class A>
  __device__ static A of(A a, A b) {
    return a + b;
  }
};

struct Multiply {
  template <class A>
  __device__ static A of(A a, A b) {
    return a * b;
  }
};

template <class Combine, class T>
__global__ void combine(const T* from, T* to, std::int64_t count) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    device::store(to + i, Combine::of(device::load(to + i), device::load(from + i)));
  }
}

template <class Combine, class T>
cudaError_t launch(const void* from, void* to, std::int64_t count, cudaStream_t stream) {
  const auto groups = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostGroups));
  combine<Combine><<<groups, kThreads, 0, stream>>>(static_cast<const T*>(from), static_cast<T*>(to), count);
  return cudaGetLastError();
}

template <class Combine>
Status run(std::string_view op, DType dtype, const void* from, void* to, std::int64_t count, void* stream) {
  if (count == 0) return {};
  const auto kernel = dtype == DType::f64    ? launch<Combine, double>
                      : dtype == DType::f32  ? launch<Combine, float>
                      : dtype == DType::bf16 ? launch<Combine, device::bf16>
                                             : launch<Combine, device::f16>;
  return cuda::launch_status(op, kernel(from, to, count, static_cast<cudaStream_t>(stream)));
}

}  // namespace

Status add_on_device(std::string_view op, DType dtype, const void* from, void* to, std::int64_t count,
                     void* stream) {
  return run<Add>(op, dtype, from, to, count, stream);
}

Status multiply_on_device(std::string_view op, DType dtype, const void* from, void* to, std::int64_t count,
                          void* stream) {
  return run<Multiply>(op, dtype, from, to, count, stream);
}

}  // namespace rarefy
