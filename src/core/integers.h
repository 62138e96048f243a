// integer_linear (rarefy/sparse.h) on a GPU, for those who have checked the rest: src/cuda, or its stand-in.
#pragma once

#include <cstdint>
#include <string_view>

#include "rarefy/linear.h"
#include "rarefy/status.h"

namespace rarefy {

Status check_integers(std::string_view op, int bytes, Activation activation);

Status integer_linear_on_device(std::string_view op, int bytes, const void* x, std::int64_t tokens,
                                const PlanView& plan, const void* values, const void* bias,
                                Activation activation, void* y, const Context& context);

}  // namespace rarefy
