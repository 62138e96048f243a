// Checks of matrices and weights that several operations share.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "rarefy/linear.h"

namespace rarefy {

// Sizes, strides, pointer and device of an input.
Status check_matrix(std::string_view op, std::string_view argument, const MatrixView& m, Device device);

// The same for an output, whose rows must not overlap.
Status check_output(std::string_view op, std::string_view argument, const MatrixView& m, Device device);

// Sizes and pointers of a pattern and its values; the indices were validated when the plan was built.
Status check_plan(std::string_view op, std::string_view argument, const PlanView& plan, const void* values);

// Memory that an argument covers.
struct Range {
  std::string_view argument;
  const void* data;
  std::int64_t bytes;
};

Range range_of(std::string_view argument, const MatrixView& checked);
Range range_of(std::string_view argument, const PlanView& checked, const void* values, DType dtype);

Status check_disjoint(std::string_view op, const Range& out, std::initializer_list<Range> inputs);

}  // namespace rarefy
