// Stands in for the CUDA back end in builds without nvcc: it registers nothing.
#include "core/by_feature.h"
#include "core/integers.h"
#include "core/message.h"
#include "core/move_blocks.h"
#include "core/registry.h"

namespace rarefy {

void register_cuda(Registry& /*registry*/) {}
bool cuda_built() { return false; }
const std::vector<DeviceInfo>& cuda_devices() {
  static const std::vector<DeviceInfo> none;
  return none;
}
int current_cuda_device() { return 0; }
double dense_microseconds(const Problem& /*problem*/, const Machine& /*machine*/) { return 0; }

Status add_on_device(std::string_view op, DType /*dtype*/, const void* /*from*/, void* /*to*/,
                     std::int64_t /*count*/, void* /*stream*/) {
  return error(StatusCode::unsupported, op, "needs a build with CUDA (RAREFY_CUDA=on)", "a build without it");
}

Status multiply_on_device(std::string_view op, DType /*dtype*/, const void* /*from*/, void* /*to*/,
                          std::int64_t /*count*/, void* /*stream*/) {
  return error(StatusCode::unsupported, op, "needs a build with CUDA (RAREFY_CUDA=on)", "a build without it");
}

bool can_turn(const MatrixView& /*x*/) { return false; }

Status copy_turned(std::string_view op, const MatrixView& /*x*/, void* /*to*/, void* /*stream*/) {
  return error(StatusCode::unsupported, op, "needs a build with CUDA (RAREFY_CUDA=on)", "a build without it");
}

Status copy_rows(std::string_view op, const MatrixView& /*from*/, const MutableMatrixView& /*to*/,
                 bool /*fill*/, void* /*stream*/) {
  return error(StatusCode::unsupported, op, "needs a build with CUDA (RAREFY_CUDA=on)", "a build without it");
}

Status build_device_plan(std::string_view op, const BsrShape& /*shape*/,
                         std::span<const std::int32_t> /*crow_indices*/,
                         std::span<const std::int32_t> /*col_indices*/, std::span<std::int32_t> /*plan*/,
                         const Context& /*context*/) {
  return error(StatusCode::unsupported, op, "needs a build with CUDA (RAREFY_CUDA=on)", "a build without it");
}

Status move_device_blocks(std::string_view op, const std::byte* /*from*/, std::int64_t /*from_blocks*/,
                          const std::int64_t* /*source*/, std::int64_t /*blocks*/,
                          std::int64_t /*block_bytes*/, std::byte* /*to*/, const Context& /*context*/) {
  return error(StatusCode::unsupported, op, "needs a build with CUDA (RAREFY_CUDA=on)", "a build without it");
}

Status integer_linear_on_device(std::string_view op, int /*bytes*/, const void* /*x*/,
                                std::int64_t /*tokens*/, const PlanView& /*plan*/, const void* /*values*/,
                                const void* /*bias*/, Activation /*activation*/, void* /*y*/,
                                const Context& /*context*/) {
  return error(StatusCode::unsupported, op, "needs a build with CUDA (RAREFY_CUDA=on)", "a build without it");
}

}  // namespace rarefy
