// Element types on the device: in which type each is summed, and how it is loaded and stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace rarefy::device {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
// What sums, bias and activations are computed in: double for f64, else float.
template <class T>
using accumulator_t = typename Accumulator<T>::type;

__device__ inline double load(const double* p) { return *p; }
__device__ inline float load(const float* p) { return *p; }
__device__ inline float load(const bf16* p) { return __bfloat162float(*p); }
__device__ inline float load(const f16* p) { return __half2float(*p); }

// Rounds to nearest even, once.
__device__ inline void store(double* p, double x) { *p = x; }
__device__ inline void store(float* p, float x) { *p = x; }
__device__ inline void store(bf16* p, float x) { *p = __float2bfloat16_rn(x); }
__device__ inline void store(f16* p, float x) { *p = __float2half_rn(x); }

}  // namespace rarefy::device
