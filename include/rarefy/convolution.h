// Convolutions with a sparse weight and both gradients, on the host: windows are gathered a few rows of
// output at a time, as x of a product that stays in L2. A window that reaches past its image meets zeros
// there.
#pragma once

#include <cstdint>
#include <string_view>

#include "rarefy/dtype.h"
#include "rarefy/export.h"
#include "rarefy/linear.h"
#include "rarefy/status.h"

namespace rarefy {

// Sizes of x, (images, rows, cols, channels), and of the windows that meet the weight, (N, kernel_rows ·
// kernel_cols · channels), columns in this order.
struct Convolution {
  std::int64_t images = 1, rows = 1, cols = 1, channels = 1;
  std::int64_t kernel_rows = 1, kernel_cols = 1;
  std::int64_t stride_rows = 1, stride_cols = 1;          // places between windows
  std::int64_t dilation_rows = 1, dilation_cols = 1;      // places between those of a window
  std::int64_t top = 0, bottom = 0, left = 0, right = 0;  // zeros around an image

  std::int64_t window() const { return kernel_rows * kernel_cols * channels; }
  std::int64_t out_rows() const {
    return (rows + top + bottom - dilation_rows * (kernel_rows - 1) - 1) / stride_rows + 1;
  }
  std::int64_t out_cols() const {
    return (cols + left + right - dilation_cols * (kernel_cols - 1) - 1) / stride_cols + 1;
  }
};

// Images whose channels lie side by side; strides in elements.
struct ImagesView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t image_stride = 0, row_stride = 0, col_stride = 0;
};

// Y = act(conv(X, W) + b): (images, out_rows, out_cols, N) of x's dtype, without gaps. Dtypes of x and
// weight, bias and what is derived of the weight are those of `linear`.
RAREFY_API Status convolution(std::string_view op, const Convolution& sizes, const ImagesView& x,
                              const BsrView& w, const void* bias, Activation activation, void* y,
                              const Context& context = {});

// dX, (images, rows, cols, channels), of dY as Y is, both without gaps. Sums of windows that overlap are in
// float32 (float64 of float64), in one order.
RAREFY_API Status convolution_grad_input(std::string_view op, const Convolution& sizes, const void* dy,
                                         DType dtype, const BsrView& w, void* dx,
                                         const Context& context = {});

// dW on the stored blocks, plan.shape.value_count() elements of x's dtype. Sums of pieces as above.
RAREFY_API Status convolution_grad_weight(std::string_view op, const Convolution& sizes, const void* dy,
                                          const ImagesView& x, const PlanView& plan, void* dvalues,
                                          const Context& context = {});

}  // namespace rarefy
