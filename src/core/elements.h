// Elements of sparse matrices outside of layers, floats or integers modulo a power of two, and what sums of
// them are kept in.
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>

#include "core/integers.h"
#include "core/scalar.h"
#include "rarefy/linear.h"
#include "rarefy/status.h"

namespace rarefy {

template <class T>
struct ElementSumOf {
  using type = SumOf<T>;
};
template <std::unsigned_integral T>
struct ElementSumOf<T> {
  using type = IntegerSum<T>;
};
template <class T>
using ElementSum = typename ElementSumOf<T>::type;

// As sums have it, and rounded back; without a double between, which is a call for 16 bits.
template <class T>
ElementSum<T> read(const T* p) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>) {
    return to_float(*p);
  } else {
    return *p;
  }
}

template <class T>
void write(T* p, ElementSum<T> sum) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    *p = to_bfloat16(sum);
  } else if constexpr (std::is_same_v<T, float16>) {
    *p = to_float16(sum);
  } else {
    *p = static_cast<T>(sum);
  }
}

// Calls f(T{}) for floats of `dtype`, or for integers of so many bytes if those are not 0.
template <class F>
void visit_elements(DType dtype, int integers, F&& f) {
  integers == 0 ? visit_float(dtype, f) : visit_integers(integers, f);
}

// What the operands of sums and products of two matrices must have in common: floats of one dtype, or
// integers.
Status check_elements(std::string_view op, const BsrView& a, const BsrView& b, int integers);

}  // namespace rarefy
