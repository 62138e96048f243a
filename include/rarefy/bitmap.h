// Weights of single elements with one bit for each that says whether it is stored: for densities of 0.1 and
// more, 2:4 among them, where a column index for each value would take as much memory as the values.
//   values  (nnz): the stored elements by row, and in it by column, as in CSR
//   bits    rows × mask_row_bytes(cols), a mask as prune.h has it: 1 where something is stored
// At density 0.5, and so for 2:4, f32 takes 2.125 bytes a weight: two bits for each position of a stored one
// among four would be as many. linear is a kernel's; the gradients are those of CSR on the same values.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "rarefy/export.h"
#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "rarefy/prune.h"
#include "rarefy/status.h"
#include "rarefy/view.h"

namespace rarefy {

// What kernels read of a bitmap: where each row's values begin, and the bits in rows of whole 8 bytes. Where
// of each four columns exactly two are stored, the positions of these take the bits' place: for each value
// two bits, which of the four it is.
struct BitmapPlanView {
  BsrShape shape;                      // blocks of 1×1, nnzb of them stored
  const std::int32_t* crow = nullptr;  // rows + 1
  const std::uint8_t* bits = nullptr;  // rows × row_bytes()
  bool two_of_four = false;
  std::int64_t row_bytes() const { return (shape.cols + 63) / 64 * 8; }
  Format format() const { return two_of_four ? Format::two_of_four : Format::bitmap; }
};

// The plan as plain int32 words, which callers can hold, copy and move. Its length depends on the shape.
RAREFY_API std::int64_t bitmap_plan_size(std::int64_t rows, std::int64_t cols);

// Copies bits, rows × mask_row_bytes(cols), into `plan`, and says how many are 1; bits past the last column
// must be 0. On error no header is written: no plan.
RAREFY_API Result<std::int64_t> build_bitmap_plan(std::string_view op, std::int64_t rows, std::int64_t cols,
                                                  std::span<const std::uint8_t> bits,
                                                  std::span<std::int32_t> plan);

// The bits of a pattern of blocks of 1×1, rows × mask_row_bytes(cols).
RAREFY_API Status bitmap_of(std::string_view op, const PlanView& pattern, std::span<std::uint8_t> bits);

// Pointers into a plan in host memory, after checking in O(1) that it is one of this shape.
RAREFY_API Result<BitmapPlanView> view_bitmap_plan(std::string_view op, std::int64_t rows, std::int64_t cols,
                                                   std::span<const std::int32_t> plan);

// col_indices of the same pattern as CSR, nnzb of them; crow is in the view.
RAREFY_API Status bitmap_columns(std::string_view op, const BitmapPlanView& plan,
                                 std::span<std::int32_t> col_indices);

struct BitmapView {
  BitmapPlanView plan;
  const void* values = nullptr;
  DType dtype = DType::f32;
};

// Y = act(X Wᵀ + b) as of BsrView, in host memory; dtypes as there.
RAREFY_API Status linear(const MatrixView& x, const BitmapView& w, const void* bias, Activation activation,
                         const MutableMatrixView& y, const Context& context = {});

}  // namespace rarefy
