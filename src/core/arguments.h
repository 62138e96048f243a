// Checks of matrices and weights that several operations share.
#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "rarefy/linear.h"

namespace rarefy {

// Sizes, strides, pointer and device of an input, which must lie by token unless any_layout.
Status check_matrix(std::string_view op, std::string_view argument, const MatrixView& m, Device device,
                    bool any_layout = false);

// The same for an output, whose rows (by feature: columns) must not overlap.
Status check_output(std::string_view op, std::string_view argument, const MatrixView& m, Device device,
                    bool any_layout = false);

// argument must have `expected` of `what`.
Status check_size(std::string_view op, std::string_view argument, std::string_view what,
                  std::int64_t expected, std::int64_t got);

// Activations of dtype `in` give outputs of the same; those of int8 give float32 or float64.
Status check_output_dtype(std::string_view op, std::string_view in_name, DType in, std::string_view out_name,
                          DType out);

Status check_activation(std::string_view op, Activation activation);

// An input or output of a product, with what messages say of it: literals, as calls must not build text.
template <class Matrix>
struct Rows {
  std::string_view argument;      // "x"
  std::string_view columns_text;  // "columns (in_features)"
  std::int64_t columns;
  const Matrix& matrix;
};

// The two matrices of a product that turns rows into rows; `rows_text`: "rows, like x".
Status check_rows(std::string_view op, const Rows<MatrixView>& in, const Rows<MutableMatrixView>& out,
                  std::string_view rows_text, Device device);

// Whether the weights of a feed-forward network fit each other; a gate of no block rows is none.
Status check_feed_forward(std::string_view op, const BsrShape& up, const BsrShape& down,
                          const BsrShape& gate);

// Sizes and pointers of a pattern and its values; the indices were validated when the plan was built. With
// `by_rows` a row plan will do.
Status check_plan(std::string_view op, std::string_view argument, const PlanView& plan, const void* values,
                  bool by_rows = false);

// What scaled values need of the other arguments; `argument`: x or dy, of dtype `in` (linear.cc).
Status check_scaling(std::string_view op, const BsrView& w, std::string_view argument, DType in);

// Memory that an argument covers.
struct Range {
  std::string_view argument;
  const void* data;
  std::int64_t bytes;
};
Range range_of_scales(const BsrView& w);

Range range_of(std::string_view argument, const MatrixView& checked);
Range range_of(std::string_view argument, const PlanView& checked, const void* values, DType dtype);

Status check_disjoint(std::string_view op, const Range& out, std::initializer_list<Range> inputs);

// The largest power of two ≤ 16 that divides every address and stride, in bytes.
class Alignment {
 public:
  void add(const void* data) { bits_ |= reinterpret_cast<std::uintptr_t>(data); }
  void add(const MatrixView& m) {
    add(m.data);
    if ((m.layout() == Layout::by_token ? m.rows : m.cols) > 1)
      bits_ |= static_cast<std::uintptr_t>(m.stride()) * size_of(m.dtype);
  }
  std::int32_t bytes() const { return 1 << std::countr_zero(bits_ | 16U); }

 private:
  std::uintptr_t bits_ = 0;
};

}  // namespace rarefy
