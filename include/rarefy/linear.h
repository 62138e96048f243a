// The three products of a sparse linear layer, and the only ones kernels implement:
//   linear       Y  = act(X Wᵀ + b)
//   grad_input   dX = dY W
//   grad_weight  dW = dYᵀ X, on the stored blocks only
// X is (M, K), W is (N, K), Y is (M, N). All checks happen here, before anything is written.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "rarefy/executor.h"
#include "rarefy/export.h"
#include "rarefy/problem.h"
#include "rarefy/status.h"

namespace rarefy {

// What one kernel derived from a weight, in memory that its caller holds: `prepared` from the pattern,
// `packed` from the values too. Made by prepare() and pack() below, for one key. Without `packed` a call
// packs for itself, into workspace: derived_sizes' bytes more than workspace_size, rounded up to 256.
struct Derived {
  std::uint64_t key = 0;  // 0: nothing
  const void* prepared = nullptr;
  const void* packed = nullptr;
  std::int64_t prepared_bytes = 0, packed_bytes = 0;  // checked against what derived_sizes says
};

// A weight: its pattern's plan and its values, (nnzb, block_rows, block_cols), row-major, canonical.
struct BsrView {
  PlanView plan;
  const void* values = nullptr;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  Derived derived = {};
  Scaling scaling = Scaling::none;  // of int8 values; with it
  const float* scales = nullptr;    // plan.shape.rows of them, which check_scales accepts
  bool rounds_x = false;  // of bf16 values: x in f32 may be rounded to bf16, for kernels that multiply in it
};

// Memory that a kernel may use during the call; its contents do not matter before or after. Given ahead
// (workspace_size says how much), or by a function that is asked once a call when `bytes` are too few.
struct Workspace {
  void* data = nullptr;  // aligned to 64 bytes (CUDA: 256)
  std::int64_t bytes = 0;
  void* (*provide)(void* provider, std::int64_t bytes) = nullptr;  // null: it cannot
  void* provider = nullptr;
};

// Where and how to run. CUDA work is queued on `stream` of the current device, nothing waits for it.
struct Context {
  Executor executor;
  void* stream = nullptr;  // a cudaStream_t
  // With too little and no function, the CPU takes it from the heap and frees it; CUDA refuses.
  Workspace workspace = {};
  bool tf32 = false;  // Problem::tf32; what was derived for such problems is used by such calls alone
};

// Dtypes: x any; the weight's values the same or any other that is stored; y that of x (int8: f32 or f64).
// What no kernel can combine is refused with the reasons of all (see backend.h). Scaled int8 values take x in
// f32, bf16 or f16, and have no grad_weight; grad_input is that of the scaled values, whatever x was rounded
// to. Where x in f32 may be rounded (rounds_x), linear and feed_forward are within docs/numerics.md's bound
// of it; which kernel rounds depends on machine and tokens. grad_input and grad_weight round nothing.

// bias: N elements of y's dtype, or null.
RAREFY_API Status linear(const MatrixView& x, const BsrView& w, const void* bias, Activation activation,
                         const MutableMatrixView& y, const Context& context = {});

// Scales must be finite and above 0; names the first that is not. The others' check is the caller's.
RAREFY_API Status check_scales(std::string_view op, std::span<const float> scales);

RAREFY_API Status grad_input(const MatrixView& dy, const BsrView& w, const MutableMatrixView& dx,
                             const Context& context = {});

// dvalues: plan.shape.value_count() elements of dtype `dtype`, in canonical order. Padding gets 0.
// derived: nothing or what prepare() made; there are no values to pack. accumulate: the gradient is added to
// what dvalues holds; each sum is rounded once more.
RAREFY_API Status grad_weight(const MatrixView& dy, const MatrixView& x, const PlanView& plan, void* dvalues,
                              DType dtype, const Context& context = {}, const Derived& derived = {},
                              bool accumulate = false);

// build_plan (pattern.h) in memory of the current CUDA device, on the context's stream, with workspace from
// the context. Waits for the stream once, for the error, whose text is the host's; the plan is then of no
// use.
RAREFY_API Status build_device_plan(std::string_view op, const BsrShape& shape,
                                    std::span<const std::int32_t> crow_indices,
                                    std::span<const std::int32_t> col_indices, std::span<std::int32_t> plan,
                                    const Context& context);

// Some kernels want more of a weight than its plan and canonical values. derived_sizes says what the best
// kernel for a problem wants, whatever its `derived`: nothing (key 0), or buffers to be filled once by
// prepare (until the pattern changes) and pack (until a value changes), and passed on in BsrView::derived.
// Never saved; equal keys may share buffers. A call gets the first kernel that needs nothing, or what the key
// names: what was made for one problem is of use to others of the weight, and in the way of none.
struct DerivedSizes {
  std::uint64_t key = 0;
  std::int64_t prepared = 0;  // bytes, on the problem's device
  std::int64_t packed = 0;
};

RAREFY_API Result<DerivedSizes> derived_sizes(const Problem& problem);
RAREFY_API Status prepare(const Problem& problem, const PlanView& plan, void* prepared,
                          const Context& context = {});
RAREFY_API Status pack(const Problem& problem, const BsrView& w, const void* prepared, void* packed,
                       const Context& context = {});

}  // namespace rarefy
