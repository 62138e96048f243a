// Activations of sums that leave rounded to T: relative errors below a sixteenth of T's last place before
// that (2⁻¹² for bf16, 2⁻¹⁵ for f16), without branches and in a third of the instructions. Both tails, NaN,
// zeros and infinities as device::apply has them; f16's left tails are right to half of its smallest
// subnormal. f32 is device::apply itself.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/device/activation.cuh"
#include "rarefy/activation.h"

namespace rarefy::sm90 {

using device::Activation;

__device__ __forceinline__ float exp2_approximately(float x) {  // 2⁻²² of it; subnormal numbers are 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {  // 2⁻²³ of it, the same
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// x / (1 + 2ᶻ) of z − 2: a quarter of both, as the reciprocal of what is above 2¹²⁶ is 0.
__device__ __forceinline__ float over_exp2(float x, float z_less_2) {
  return x * 0.25f * reciprocal(0.25f + exp2_approximately(z_less_2));
}

// log₂ Φ(−m), a minimax fit: for bf16 up to 13.3 (1.3e-4 of Φ), whose power of two is 0 to the instruction;
// for f16 up to 6 (3.3e-6), behind which x Φ is below 2⁻²⁵ and the polynomial falls on.
template <class T>
__device__ __forceinline__ float log2_tail(float m) {
  constexpr bool kF16 = std::is_same_v<T, __half>;
  constexpr float kBf16Fit[] = {-1.000192404f,    -1.148940325f,     -0.4629623294f,
                                -0.05067774653f,  0.007377545815f,   -0.0007365946658f,
                                4.687618639e-05f, -1.697217158e-06f, 2.646874719e-08f};
  constexpr float kF16Fit[] = {-0.9999952913f,  -1.151251078f,     -0.4584643841f,   -0.05396006629f,
                               0.008507889695f, -0.0009305244312f, 6.159824261e-05f, -1.834809041e-06f};
  float p = kF16 ? kF16Fit[7] : kBf16Fit[8];
#pragma unroll
  for (int i = kF16 ? 6 : 7; i >= 0; --i) p = fmaf(p, m, kF16 ? kF16Fit[i] : kBf16Fit[i]);
  return p;
}

template <class T, Activation activation>
__device__ __forceinline__ float apply_rounded(float x) {
  if constexpr (std::is_same_v<T, float>) return device::apply<activation>(x);
  if constexpr (activation == Activation::relu) return max_or_nan(x, 0.f);
  if constexpr (activation == Activation::gelu_erf) {  // x Φ(x) = max(x, 0) − |x| Φ(−|x|)
    const float m = fminf(fabsf(x), std::is_same_v<T, __half> ? 100.f : 13.3f);
    // The smaller of x and −m: −∞ stays, for −∞ · 0.
    return fmaf(fminf(x, -m), exp2_approximately(log2_tail<T>(m)), max_or_nan(x, -0.f));
  }
  // −2 √(2/π) log₂ e (x + 0.044715 x³), and −x log₂ e
  if constexpr (activation == Activation::gelu_tanh)
    return over_exp2(x, fmaf(x, fmaf(x * x, -0.102943242f, -2.30220819f), -2.f));
  if constexpr (activation == Activation::silu) return over_exp2(x, fmaf(x, -1.44269504f, -2.f));
  return x;
}

// What a kernel does to its sums before it rounds them: nothing, or what it was launched with. Most products
// have no activation, and a kernel of their own without a branch; all others share one, as a kernel for each
// took half of the time that these units compiled. Once a tile: each way of it is 30 KB of instructions, and
// four jumps between them were 4 to 7 % of 8192 × 4096 → 4096 at .1.
template <bool kActivates>
struct Activations {
  Activation activation;

  // f<activation>()
  template <class F>
  __device__ __forceinline__ void apply_to(const F& f) const {
    if constexpr (kActivates) {
      static_assert(kActivations == 5);
      switch (activation) {
        case Activation::none: break;
        case Activation::relu: return f.template operator()<Activation::relu>();
        case Activation::gelu_erf: return f.template operator()<Activation::gelu_erf>();
        case Activation::gelu_tanh: return f.template operator()<Activation::gelu_tanh>();
        case Activation::silu: return f.template operator()<Activation::silu>();
      }
    } else {
      f.template operator()<Activation::none>();
    }
  }
};

// On the host: f<whether there is one>(), which returns a cudaError_t.
template <class F>
cudaError_t with_activations(Activation activation, const F& f) {
  return activation == Activation::none ? f.template operator()<false>() : f.template operator()<true>();
}

}  // namespace rarefy::sm90
