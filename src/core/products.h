// The three products once their arguments are checked: linear.cc checks views and bare pointers, the binding
// tensors, whose sizes, strides and devices cannot be wrong in most of the ways that a view's can.
#pragma once

#include "rarefy/bitmap.h"
#include "rarefy/feed_forward.h"
#include "rarefy/linear.h"

namespace rarefy {

Status run_linear(const MatrixView& x, const BsrView& w, const void* bias, Activation activation,
                  const MutableMatrixView& y, const Context& context);

// y[i] = x W[i]ᵀ + b[i], the bits of run_linear for each: kernels that can pack x once for all of them.
Status run_linears(const MatrixView& x, std::span<const LayerView> layers,
                   std::span<const MutableMatrixView> y, const Context& context);

// A network on CUDA as calls of run_linear, hidden features in workspace and rounded to y's dtype.
Status run_layers(const MatrixView& x, const FeedForward& layers, const MutableMatrixView& y,
                  const Context& context);

Status run_linear(const MatrixView& x, const BitmapView& w, const void* bias, Activation activation,
                  const MutableMatrixView& y, const Context& context);

Status run_grad_input(const MatrixView& dy, const BsrView& w, const MutableMatrixView& dx,
                      const Context& context);

// The gradient of a bias beside that of a weight: the sum of dY over the tokens.
struct BiasGradient {
  void* data = nullptr;  // dy.cols elements of dY's dtype
  bool written = false;  // by a kernel that sums dY as it reads it; most leave that to the caller
};

Status run_grad_weight(const MatrixView& dy, const MatrixView& x, const PlanView& plan, void* dvalues,
                       DType dtype, const Context& context, const Derived& derived, bool accumulate = false,
                       BiasGradient* bias = nullptr);

}  // namespace rarefy
