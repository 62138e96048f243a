// The list of kernels, and what backend_info() tells of it.
#include "core/registry.h"

#include <cstdlib>

#include "core/message.h"
#include "rarefy/version.h"

namespace rarefy {

std::string_view name(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

std::string_view name(Op op) {
  switch (op) {
    case Op::linear: return "linear";
    case Op::grad_input: return "grad_input";
    case Op::grad_weight: return "grad_weight";
  }
  return "?";
}

const Registry& registry() {
  static const Registry instance = [] {
    Registry built;
    register_cuda(built);
    register_cpu(built);
    register_ref(built);
    return built;
  }();
  return instance;
}

// Read on every call, so that a test or a user can change it between two calls.
std::string forced_impl() {
  const char* value = std::getenv("RAREFY_FORCE_IMPL");  // NOLINT(concurrency-mt-unsafe)
  return value == nullptr ? "" : value;
}

namespace {

template <class Args>
KernelInfo info(Op op, const Kernel<Args>& kernel) {
  return {op, kernel.device, std::string(kernel.impl), std::string(kernel.name)};
}

template <class Args>
Result<KernelInfo> selected(Op op, const std::vector<Kernel<Args>>& kernels, Device device,
                            const Args& args) {
  const std::string forced = forced_impl();
  if (const Kernel<Args>* kernel = select_kernel(kernels, device, args, forced)) return info(op, *kernel);
  return error(StatusCode::unsupported, name(op), "an implementation must fit this dtype and device",
               forced.empty() ? cat("none on ", name(device))
                              : cat("RAREFY_FORCE_IMPL=", forced, " on ", name(device)));
}

}  // namespace

BackendInfo backend_info() {
  BackendInfo result{version(), cpu_model(), cpu_features(), cuda_built(), cuda_devices(), forced_impl(), {}};
  for (const auto& kernel : registry().linear) result.kernels.push_back(info(Op::linear, kernel));
  for (const auto& kernel : registry().grad_input) result.kernels.push_back(info(Op::grad_input, kernel));
  for (const auto& kernel : registry().grad_weight) result.kernels.push_back(info(Op::grad_weight, kernel));
  return result;
}

Result<KernelInfo> selected_kernel(Op op, DType dtype, Device device, std::int64_t block_rows,
                                   std::int64_t block_cols, std::int64_t tokens) {
  const BsrShape shape{block_rows, block_cols, block_rows, block_cols, 1};
  if (Status status = check_shape("selected_kernel", shape); !status.ok()) return status;
  const DType out = dtype == DType::i8 ? DType::f32 : dtype;
  const BsrView w{{shape, nullptr, nullptr, nullptr, nullptr, nullptr}, nullptr, dtype, device};
  const MutableMatrixView in{nullptr, dtype, tokens, shape.cols, shape.cols, device};
  const MutableMatrixView y{nullptr, out, tokens, shape.rows, shape.rows, device};
  switch (op) {
    case Op::linear: return selected(op, registry().linear, device, {in, w, nullptr, Activation::none, y});
    case Op::grad_input: return selected(op, registry().grad_input, device, {y, w, in});
    case Op::grad_weight: return selected(op, registry().grad_weight, device, {y, in, w.plan, nullptr, out});
  }
  return error(StatusCode::internal, "selected_kernel", "op must be one of the three products", "another");
}

}  // namespace rarefy
