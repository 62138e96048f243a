// Activations on vectors of floats, to a few units in the last place of their large terms; and as exact as
// results need that are rounded to bf16.
#pragma once

#include "cpu/kernels.h"

namespace rarefy::cpu {

template <class I>
using Vec = typename I::Vec;
template <class I>  // float, or double (doubles.h)
using Element = decltype(I::sum(I::zero()));
template <class I>
inline constexpr bool kDoubles = sizeof(Element<I>) == sizeof(double);

// Static, all of them: units of several instruction sets use one trait, and of weak twins the linker would
// keep any, AVX-512's of those that were compiled with AMX.

// N vectors as one, their steps in turn. The steps of one wait for each other, and a scheduler holds those of
// two or three: GELU took 48 cycles a vector on Ice Lake, whose units could do it in 20.
template <class I, int N>
struct Several {
  struct Vec {
    typename I::Vec of[N];
  };
  template <class F>
  [[gnu::always_inline]] static Vec each(F f) {
    Vec result;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) result.of[i] = f(i);
    return result;
  }
  using In = const Vec&;
  static float sum(In x) { return I::sum(x.of[0]); }  // names the elements; see Element
  static Vec zero() { return set1(0.0F); }
  static Vec set1(float x) {
    return each([v = I::set1(x)](int) { return v; });
  }
  static Vec add(In a, In b) {
    return each([&](int i) { return I::add(a.of[i], b.of[i]); });
  }
  static Vec mul(In a, In b) {
    return each([&](int i) { return I::mul(a.of[i], b.of[i]); });
  }
  static Vec div(In a, In b) {
    return each([&](int i) { return I::div(a.of[i], b.of[i]); });
  }
  static Vec fma(In a, In b, In c) {
    return each([&](int i) { return I::fma(a.of[i], b.of[i], c.of[i]); });
  }
  static Vec max(In a, In b) {
    return each([&](int i) { return I::max(a.of[i], b.of[i]); });
  }
  static Vec min(In a, In b) {
    return each([&](int i) { return I::min(a.of[i], b.of[i]); });
  }
  static Vec select_negative(In x, In if_negative, In otherwise) {
    return each([&](int i) { return I::select_negative(x.of[i], if_negative.of[i], otherwise.of[i]); });
  }
  static Vec scale(In v, In n) {
    return each([&](int i) { return I::scale(v.of[i], n.of[i]); });
  }
  static Vec magnitude(In x, float most) requires requires { I::magnitude(x.of[0], most); }
  {
    return each([&](int i) { return I::magnitude(x.of[i], most); });
  }
  static Vec reciprocal(In x) requires requires { I::reciprocal(x.of[0]); }
  {
    return each([&](int i) { return I::reciprocal(x.of[i]); });
  }
};

// c[0] + c[1] x + …
template <class I, int N>
[[gnu::always_inline]] static inline Vec<I> polynomial(const float (&c)[N], Vec<I> x) {
  Vec<I> sum = I::set1(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) sum = I::fma(sum, x, I::set1(c[i]));
  return sum;
}

// eˣ = 2ⁿ eʳ, |r| ≤ ln 2 / 2, with the Taylor series to r⁷ (the next term is 5e-9), for x in −87 … 89.
template <class I>
[[gnu::always_inline]] static inline Vec<I> exp_near(Vec<I> x) {
  static constexpr float kTaylor[] = {1.0F,      1.0F,       1.0F / 2,   1.0F / 6,
                                      1.0F / 24, 1.0F / 120, 1.0F / 720, 1.0F / 5040};
  constexpr float kRounds = 1.5F * (1 << 23);  // whose last place is 1
  const Vec<I> n = I::add(I::fma(x, I::set1(1.44269504F), I::set1(kRounds)), I::set1(-kRounds));
  Vec<I> r = I::fma(n, I::set1(-0.693145752F), x);  // ln 2 in two parts: n times the first is exact
  r = I::fma(n, I::set1(-1.42860677e-6F), r);
  return I::scale(polynomial<I>(kTaylor, r), n);
}

// The same for all x: 89 overflows to infinity, and NaN becomes 89, so that n is an integer; callers multiply
// by x.
template <class I>
[[gnu::always_inline]] static inline Vec<I> exp(Vec<I> x) {
  return exp_near<I>(I::max(I::set1(-87.0F), I::min(x, I::set1(89.0F))));
}

// min(|x|, most); of NaN whatever is there.
template <class I>
[[gnu::always_inline]] static inline Vec<I> magnitude(Vec<I> x, float most) {
  if constexpr (requires { I::magnitude(x, most); }) {
    return I::magnitude(x, most);
  } else {
    return I::min(I::max(I::mul(x, I::set1(-1.0F)), x), I::set1(most));
  }
}

// x / (1 + e⁻ᶻ)
template <class I>
[[gnu::always_inline]] static inline Vec<I> times_sigmoid(Vec<I> x, Vec<I> z) {
  return I::div(x, I::add(I::set1(1.0F), exp<I>(I::mul(z, I::set1(-1.0F)))));
}

// 1 / x for x in 1 … 2¹⁴, to a unit in the last place. A division of 16 floats takes 16 cycles on Ice Lake.
template <class I>
[[gnu::always_inline]] static inline Vec<I> inverse(Vec<I> x) {
  if constexpr (requires { I::reciprocal(x); }) {  // to 2⁻¹⁴
    const Vec<I> near = I::reciprocal(x);
    return I::fma(near, I::fma(I::mul(near, I::set1(-1.0F)), x, I::set1(1.0F)), near);
  } else {
    return I::div(I::set1(1.0F), x);
  }
}

// x Φ(x), Φ(-|x|) = e^(-x²/2) t p(t) with t = 1 / (1 + 0.4 |x| / √2): p is a least-squares fit of erfc
// (relative error 6e-9), so the left tail keeps its relative accuracy, unlike 1 + erf. Beyond x²/2 = 84
// Φ(-|x|) is 0: as a subnormal number it took Intel 14 ns an element.
template <class I>
[[gnu::always_inline]] static inline Vec<I> gelu_erf(Vec<I> x) {
  static constexpr float kFit[] = {0.112837918F,  0.112837851F,  0.103808075F,   0.0858598128F,
                                   0.0595509149F, 0.041819334F,  -0.0231826007F, 0.0684558824F,
                                   -0.11751648F,  0.0701171532F, -0.014587868F};
  const Vec<I> one = I::set1(1.0F);
  const Vec<I> size = magnitude<I>(x, 13.0F);
  const Vec<I> t = inverse<I>(I::fma(size, I::set1(0.282842712F), one));
  const Vec<I> exponent = I::mul(I::mul(size, size), I::set1(-0.5F));
  const Vec<I> gauss = I::select_negative(I::add(exponent, I::set1(84.0F)), I::zero(), exp_near<I>(exponent));
  const Vec<I> tail = I::mul(gauss, I::mul(t, polynomial<I>(kFit, t)));
  const Vec<I> rest = I::fma(tail, I::set1(-1.0F), one);
  return I::mul(x, I::select_negative(x, tail, rest));
}

// 0.5 x (1 + tanh u) = x / (1 + e^(-2u)), u = √(2/π) (x + 0.044715 x³): Hendrycks & Gimpel 2016.
template <class I>
[[gnu::always_inline]] static inline Vec<I> gelu_tanh(Vec<I> x) {
  const Vec<I> cube = I::mul(I::mul(x, x), x);
  const Vec<I> inner = I::fma(cube, I::set1(0.044715F), x);
  return times_sigmoid<I>(x, I::mul(inner, I::set1(1.59576912F)));
}

template <class I>
[[gnu::always_inline]] static inline Vec<I> activate_inlined(Activation activation, Vec<I> x) {
  static_assert(kActivations == 5);
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return I::max(I::zero(), x);
    case Activation::gelu_erf: return gelu_erf<I>(x);
    case Activation::gelu_tanh: return gelu_tanh<I>(x);
    case Activation::silu: return times_sigmoid<I>(x, x);
  }
  return x;
}
template <class I>
[[gnu::noinline]] static Vec<I> activate(Activation activation, Vec<I> x) {
  return activate_inlined<I>(activation, x);
}

// Of several vectors, in place: as many as there are registers for.
template <class I>
inline constexpr int kAtOnce = I::kRegisters >= 32 ? 4 : 2;
template <class I>
[[gnu::noinline]] static void activate_several(Activation activation, Vec<I> (&x)[kAtOnce<I>]) {
  using All = Several<I, kAtOnce<I>>;
  const Vec<All> of = All::each([&](int i) { return x[i]; });
  const Vec<All> result = activate_inlined<All>(activation, of);
#pragma GCC unroll 4
  for (int i = 0; i < kAtOnce<I>; ++i) x[i] = result.of[i];
}

// In place, and on whole vectors.
template <class I>
static void activate_all(Activation activation, float* values, std::int64_t count) {
  if (activation == Activation::none) return;
  constexpr std::int64_t some = kAtOnce<I> * I::kWidth;
  std::int64_t i = 0;
  for (; i + some <= count; i += some) {
    Vec<I> x[kAtOnce<I>];
    for (int v = 0; v < kAtOnce<I>; ++v) x[v] = I::load(values + i + v * I::kWidth);
    activate_several<I>(activation, x);
    for (int v = 0; v < kAtOnce<I>; ++v) I::store(values + i + v * I::kWidth, x[v]);
  }
  for (; i < count; i += I::kWidth) I::store(values + i, activate<I>(activation, I::load(values + i)));
}

// For results that are rounded to bf16: relative errors below 2⁻¹² before that, at most a sixteenth of the
// last place, with half of the instructions. Both tails, NaN, zeros and infinities as above. Inlined into
// loops that know their activation (with_activation): a call for each vector took 5 % of a network with ReLU.

// 2ˣ, whatever x is: 2^⌊x⌋ times a minimax cubic of the rest (7.5e-5).
template <class I>
[[gnu::always_inline]] static inline Vec<I> exp2_bf16(Vec<I> x) {
  static constexpr float kFit[] = {0.999925222F, 0.69583341F, 0.226067571F, 0.078024246F};
  return I::scale_floor(polynomial<I>(kFit, I::fraction(x)), x);
}

// x / (1 + 2ᶻ)
template <class I>
[[gnu::always_inline]] static inline Vec<I> over_exp2_bf16(Vec<I> x, Vec<I> z) {
  const Vec<I> below = I::add(I::set1(1.0F), exp2_bf16<I>(z));
  if constexpr (requires { I::reciprocal(x); }) {
    return I::mul(x, I::reciprocal(below));
  } else {
    return I::div(x, below);
  }
}

// Φ(-|x|) = 2^p(|x|): p is a minimax fit of the logarithm (1.6e-4 of Φ up to 13, a fiftieth of that weight
// from there to 14.75, whose 2⁻¹⁶² is 0).
template <class I>
[[gnu::always_inline]] static inline Vec<I> gelu_erf_bf16(Vec<I> x) {
  static constexpr float kFit[] = {-1.00023055F,    -1.14852464F,     -0.463701904F,
                                   -0.0501821153F,  0.00721621839F,   -0.000708352949F,
                                   4.41599113e-05F, -1.56213821e-06F, 2.37562254e-08F};
  const Vec<I> tail = exp2_bf16<I>(polynomial<I>(kFit, I::magnitude(x, 14.75F)));
  return I::mul(x, I::select_negative(x, tail, I::fma(tail, I::set1(-1.0F), I::set1(1.0F))));
}

// The exponent of gelu_tanh, times -log₂ e.
template <class I>
[[gnu::always_inline]] static inline Vec<I> gelu_tanh_bf16(Vec<I> x) {
  const Vec<I> slope = I::fma(I::mul(x, x), I::set1(-0.102943242F), I::set1(-2.30220819F));
  return over_exp2_bf16<I>(x, I::mul(x, slope));
}

template <class I, Activation kActivation>
[[gnu::always_inline]] static inline Vec<I> activate_bf16(Vec<I> x) {
  static_assert(kActivations == 5);
  if constexpr (kActivation == Activation::relu) return I::max(I::zero(), x);
  if constexpr (kActivation == Activation::gelu_erf) return gelu_erf_bf16<I>(x);
  if constexpr (kActivation == Activation::gelu_tanh) return gelu_tanh_bf16<I>(x);
  if constexpr (kActivation == Activation::silu) {
    return over_exp2_bf16<I>(x, I::mul(x, I::set1(-1.44269504F)));
  }
  return x;
}

// Calls f<kActivation>().
template <class F>
[[gnu::always_inline]] static inline void with_activation(Activation activation, F&& f) {
  static_assert(kActivations == 5);
  switch (activation) {
    case Activation::none: return f.template operator()<Activation::none>();
    case Activation::relu: return f.template operator()<Activation::relu>();
    case Activation::gelu_erf: return f.template operator()<Activation::gelu_erf>();
    case Activation::gelu_tanh: return f.template operator()<Activation::gelu_tanh>();
    case Activation::silu: return f.template operator()<Activation::silu>();
  }
}

// activate_all for what becomes int8 next, where a level is 2⁻⁸ of the largest: as above, where I has what
// that needs (10 cycles a vector for 25).
template <class I>
static void activate_to_int8(Activation activation, float* values, std::int64_t count) {
  if constexpr (requires { I::fraction(I::zero()); }) {
    with_activation(activation, [&]<Activation kActivation>() {
      for (std::int64_t i = 0; i < count; i += I::kWidth)
        I::store(values + i, activate_bf16<I, kActivation>(I::load(values + i)));
    });
  } else {
    activate_all<I>(activation, values, count);
  }
}

}  // namespace rarefy::cpu
