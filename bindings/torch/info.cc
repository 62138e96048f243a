// backend_info() of the core, and the kernel each product would use, written as JSON.
#include "info.h"

#include <nlohmann/json.hpp>

#include "core/registry.h"
#include "rarefy/backend.h"

namespace rarefy::binding {

namespace {

// The kernels that were registered for this product and device ahead of the selected one.
std::string passed_over(const BackendInfo& info, const KernelInfo& selected) {
  std::string names;
  for (const KernelInfo& other : info.kernels) {
    if (other.op != selected.op || other.device != selected.device) continue;
    if (other.name == selected.name) break;
    names += (names.empty() ? "" : ", ") + other.name;
  }
  return names;
}

nlohmann::ordered_json selection(const BackendInfo& info, Op op, DType dtype, Device device,
                                 std::int64_t block_rows, std::int64_t block_cols) {
  nlohmann::ordered_json row{
      {"op", name(op)}, {"dtype", name(dtype)}, {"device", name(device)}, {"kernel", nullptr}};
  const auto selected = selected_kernel(op, dtype, device, block_rows, block_cols);
  if (!selected.ok()) {
    row["why"] = selected.status().message();
    return row;
  }
  row["kernel"] = selected->name;
  if (!info.forced_impl.empty()) {
    row["why"] = "forced by RAREFY_FORCE_IMPL=" + info.forced_impl;
  } else if (const std::string others = passed_over(info, *selected); !others.empty()) {
    row["why"] = "first in order of preference for this dtype, block shape and many tokens, after " + others;
  } else {
    row["why"] = "first in order of preference";
  }
  return row;
}

}  // namespace

std::string backend_info_json(std::int64_t block_rows, std::int64_t block_cols) {
  const BackendInfo info = backend_info();
  nlohmann::ordered_json json{{"version", info.version},
                              {"cpu", info.cpu},
                              {"cpu_features", info.cpu_features},
                              {"cuda_built", info.cuda_built},
                              {"cuda_devices", info.cuda_devices},
                              {"forced_impl", nullptr},
                              {"kernels", nlohmann::ordered_json::array()}};
  if (!info.forced_impl.empty()) json["forced_impl"] = info.forced_impl;
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (device == Device::cuda && !info.cuda_built) continue;
    for (const Op op : kAllOps) {
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        json["kernels"].push_back(selection(info, op, dtype, device, block_rows, block_cols));
      }
    }
  }
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace rarefy::binding
