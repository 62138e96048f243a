// The list of kernels, what backend_info() tells of it, and configurations as text.
#include "core/registry.h"

#include <charconv>

#include "core/message.h"
#include "rarefy/version.h"

namespace rarefy {

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

KernelInfo info(const Kernel& kernel) {
  return {kernel.op, kernel.device, std::string(kernel.family), std::string(kernel.name)};
}

Machine machine_of(const Problem& problem) {
  Machine machine = cpu_machine();
  if (problem.device == Device::cuda) {
    const std::vector<DeviceInfo>& devices = cuda_devices();
    const auto index = static_cast<std::size_t>(problem.device_index);
    if (index < devices.size()) machine.gpu = devices[index];
  }
  return machine;
}

BackendInfo backend_info() {
  BackendInfo result{version(), cpu_machine(), cuda_built(), cuda_devices(), forced_impl(), {}};
  for (const Op op : kAllOps) {
    for (const Kernel& kernel : registry()) {
      if (kernel.op == op) result.kernels.push_back(info(kernel));
    }
  }
  return result;
}

std::string to_string(const Kernel& kernel, const Config& config) {
  std::string text;
  for (std::size_t i = 0; i < kernel.fields.size(); ++i) {
    text += cat(i == 0 ? "" : " ", kernel.fields[i], '=', config.value[i]);
  }
  return text;
}

Result<Config> parse_config(const Kernel& kernel, const Config& base, std::string_view text) {
  Config config = base;
  const auto refuse = [&](std::string_view item) {
    return invalid(kernel.name, cat("a config must be name=number, with names of ", to_string(kernel, base)),
                   cat('"', item, '"'));
  };
  while (!text.empty()) {
    const auto end = text.find_first_of(" ,");
    const std::string_view item = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (item.empty()) continue;
    const auto equals = item.find('=');
    if (equals == std::string_view::npos) return refuse(item);
    std::size_t field = 0;
    while (field < kernel.fields.size() && kernel.fields[field] != item.substr(0, equals)) ++field;
    const std::string_view number = item.substr(equals + 1);
    std::int64_t value = 0;
    const auto [last, code] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (field == kernel.fields.size() || code != std::errc() || last != number.data() + number.size()) {
      return refuse(item);
    }
    config.value[field] = value;
  }
  return config;
}

}  // namespace rarefy
