// The activations that `linear` fuses, in float or double.
#pragma once

namespace rarefy::device {

enum class Activation : unsigned char { none, relu, gelu_erf, gelu_tanh, silu };

// Both GELUs are written without 1 + erf or 1 + tanh, which cancel for negative x.
template <Activation activation, class A>
__device__ __forceinline__ A apply(A x) {
  if constexpr (activation == Activation::relu) return x > 0 || isnan(x) ? x : A(0);
  if constexpr (activation == Activation::gelu_erf) {
    return A(0.5) * x * erfc(x * A(-0.70710678118654752440));  // -1/√2
  }
  if constexpr (activation == Activation::gelu_tanh) {  // (1 + tanh u) / 2 = 1 / (1 + exp(-2u))
    const A u = A(0.79788456080286535588) * (x + A(0.044715) * x * x * x);  // √(2/π)
    return x / (1 + exp(-2 * u));
  }
  if constexpr (activation == Activation::silu) return x / (1 + exp(-x));
  return x;
}

// Not inlined: a thread calls it for each of its sums, and that many copies double the code of the kernel.
template <class A>
__device__ __noinline__ A activate(Activation activation, A x) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return apply<Activation::relu>(x);
    case Activation::gelu_erf: return apply<Activation::gelu_erf>(x);
    case Activation::gelu_tanh: return apply<Activation::gelu_tanh>(x);
    case Activation::silu: return apply<Activation::silu>(x);
  }
  return x;
}

}  // namespace rarefy::device
