// What this build and machine can run, and which implementation each product would use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rarefy/export.h"
#include "rarefy/linear.h"
#include "rarefy/status.h"

namespace rarefy {

enum class Op : std::uint8_t { linear, grad_input, grad_weight };

inline constexpr Op kAllOps[] = {Op::linear, Op::grad_input, Op::grad_weight};

RAREFY_API std::string_view name(Op op);

// One registered kernel, in order of preference within its product.
struct KernelInfo {
  Op op;
  Device device;
  std::string impl;  // family: "ref", "scalar", "avx2", "avx512", "cuda"; what RAREFY_FORCE_IMPL takes
  std::string name;  // "avx512_linear"
};

struct BackendInfo {
  std::string version;
  std::string cpu;                        // model name
  std::vector<std::string> cpu_features;  // the ones kernels ask for
  bool cuda_built = false;
  std::vector<std::string> cuda_devices;  // "NVIDIA H200 (sm_90)"; empty without a driver or a GPU
  std::string forced_impl;                // RAREFY_FORCE_IMPL, or empty
  std::vector<KernelInfo> kernels;
};

RAREFY_API BackendInfo backend_info();

// The implementation that `op` would use for inputs of this dtype, device, block shape and number of
// tokens (rows of X), now.
RAREFY_API Result<KernelInfo> selected_kernel(Op op, DType dtype, Device device, std::int64_t block_rows,
                                              std::int64_t block_cols, std::int64_t tokens = 1024);

}  // namespace rarefy
