// The three products of a sparse linear layer, and the only ones kernels implement:
//   linear       Y  = act(X Wᵀ + b)
//   grad_input   dX = dY W
//   grad_weight  dW = dYᵀ X, on the stored blocks only
// X is (M, K), W is (N, K), Y is (M, N). All checks happen here, before anything is written.
#pragma once

#include <cstdint>

#include "rarefy/executor.h"
#include "rarefy/export.h"
#include "rarefy/pattern.h"
#include "rarefy/status.h"
#include "rarefy/view.h"

namespace rarefy {

enum class Activation : std::uint8_t { none, relu, gelu_erf, gelu_tanh, silu };

RAREFY_API std::string_view name(Activation activation);

// A weight: its pattern's plan and its values, (nnzb, block_rows, block_cols), row-major, canonical.
struct BsrView {
  PlanView plan;
  const void* values = nullptr;
  DType dtype = DType::f32;
  Device device = Device::cpu;
};

// Where and how to run. CUDA work is queued on `stream` of the current device, nothing waits for it.
struct Context {
  Executor executor;
  void* stream = nullptr;  // a cudaStream_t
};

// bias: N elements of y's dtype, or null.
RAREFY_API Status linear(const MatrixView& x, const BsrView& w, const void* bias, Activation activation,
                         const MutableMatrixView& y, const Context& context = {});

RAREFY_API Status grad_input(const MatrixView& dy, const BsrView& w, const MutableMatrixView& dx,
                             const Context& context = {});

// dvalues: plan.shape.value_count() elements of dtype `dtype`, in canonical order. Padding gets 0.
RAREFY_API Status grad_weight(const MatrixView& dy, const MatrixView& x, const PlanView& plan, void* dvalues,
                              DType dtype, const Context& context = {});

}  // namespace rarefy
