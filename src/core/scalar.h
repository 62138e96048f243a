// One element of any dtype as a double, and back with a single rounding.
#pragma once

#include <cstdint>
#include <type_traits>

#include "rarefy/dtype.h"

namespace rarefy {

inline double load(const double* p) { return *p; }
inline double load(const float* p) { return *p; }
inline double load(const bfloat16* p) { return to_float(*p); }
inline double load(const float16* p) { return to_float(*p); }
inline double load(const std::int8_t* p) { return *p; }

inline void store(double* p, double x) { *p = x; }
inline void store(float* p, double x) { *p = static_cast<float>(x); }
inline void store(bfloat16* p, double x) { *p = to_bfloat16(x); }
inline void store(float16* p, double x) { *p = to_float16(x); }

// What sums of T are kept in.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f(T{}) for the floating-point element type T of `dtype`; for int8, which is no output, not at all.
template <class F>
void visit_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64: return f(double{});
    case DType::f32: return f(float{});
    case DType::bf16: return f(bfloat16{});
    case DType::f16: return f(float16{});
    case DType::i8: return;
  }
}

// Calls f(T{}) for the element type T of `dtype`.
template <class F>
decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64: return f(double{});
    case DType::f32: return f(float{});
    case DType::bf16: return f(bfloat16{});
    case DType::f16: return f(float16{});
    case DType::i8: break;
  }
  return f(std::int8_t{});
}

}  // namespace rarefy
