// backend_info() of the core, and the kernel each product would use, written as JSON.
#include "info.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <string_view>
#include <vector>

#include "rarefy/backend.h"

namespace rarefy::binding {

namespace {

std::string json(std::string_view text) {  // a JSON string
  std::ostringstream out;
  out << '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else if (byte < 0x20) {
      out << "\\u" << std::hex << std::setw(4) << std::setfill('0') << unsigned{byte} << std::dec;
    } else {
      out << c;
    }
  }
  out << '"';
  return std::move(out).str();
}

template <class Items, class ToJson>
std::string list(const Items& items, ToJson&& to_json) {
  std::string text = "[";
  for (const auto& item : items) text += (text.size() == 1 ? "" : ", ") + to_json(item);
  return text + "]";
}

std::string device_name(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

// One row of the answer to "which kernel, and why".
std::string selection(const BackendInfo& info, Op op, DType dtype, Device device, std::int64_t block_rows,
                      std::int64_t block_cols) {
  const auto selected = selected_kernel(op, dtype, device, block_rows, block_cols);
  std::string kernel = "null";
  std::string why;
  if (!selected.ok()) {
    why = selected.status().message();
  } else {
    kernel = json(selected->name);
    std::string passed_over;
    for (const KernelInfo& other : info.kernels) {
      if (other.op != op || other.device != device) continue;
      if (other.name == selected->name) break;
      passed_over += (passed_over.empty() ? "" : ", ") + other.name;
    }
    if (!info.forced_impl.empty()) {
      why = "forced by RAREFY_FORCE_IMPL=" + info.forced_impl;
    } else if (passed_over.empty()) {
      why = "first in order of preference";
    } else {
      why = "first in order of preference that takes this dtype and block shape, after " + passed_over;
    }
  }
  return "{\"op\": " + json(name(op)) + ", \"dtype\": " + json(name(dtype)) +
         ", \"device\": " + json(device_name(device)) + ", \"kernel\": " + kernel +
         ", \"why\": " + json(why) + "}";
}

}  // namespace

std::string backend_info_json(std::int64_t block_rows, std::int64_t block_cols) {
  const BackendInfo info = backend_info();
  std::vector<std::string> rows;
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (device == Device::cuda && !info.cuda_built) continue;
    for (const Op op : kAllOps) {
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        rows.push_back(selection(info, op, dtype, device, block_rows, block_cols));
      }
    }
  }
  const auto as_is = [](const std::string& text) { return text; };
  return "{\"version\": " + json(info.version) + ", \"cpu\": " + json(info.cpu) +
         ", \"cpu_features\": " + list(info.cpu_features, json) +
         ", \"cuda_built\": " + (info.cuda_built ? "true" : "false") +
         ", \"cuda_devices\": " + list(info.cuda_devices, json) +
         ", \"forced_impl\": " + (info.forced_impl.empty() ? "null" : json(info.forced_impl)) +
         ", \"kernels\": " + list(rows, as_is) + "}";
}

}  // namespace rarefy::binding
