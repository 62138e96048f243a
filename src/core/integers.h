// What products of integers share. integer_linear (rarefy/sparse.h) on a GPU, for those who have checked the
// rest: src/cuda, or its stand-in.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "rarefy/linear.h"
#include "rarefy/status.h"

namespace rarefy {

// What sums of products are kept in, of which the low bits stay; two factors of 16 bits would become signed
// ints, whose overflow is undefined.
template <class U>
using IntegerSum = std::conditional_t<sizeof(U) == 8, std::uint64_t, std::uint32_t>;

// Calls f(U{}) for the unsigned integer of 1, 2, 4 or 8 bytes.
template <class F>
void visit_integers(int bytes, F&& f) {
  switch (bytes) {
    case 1: return f(std::uint8_t{});
    case 2: return f(std::uint16_t{});
    case 4: return f(std::uint32_t{});
    default: return f(std::uint64_t{});
  }
}

Status check_element_bytes(std::string_view op, int bytes);  // 1, 2, 4 or 8
Status check_integers(std::string_view op, int bytes, Activation activation);

Status integer_linear_on_device(std::string_view op, int bytes, const void* x, std::int64_t tokens,
                                const PlanView& plan, const void* values, const void* bias,
                                Activation activation, void* y, const Context& context);

}  // namespace rarefy
