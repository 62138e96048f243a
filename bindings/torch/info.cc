// backend_info(), explain() and force_impl() of the core for Python: ops of strings and integers, JSON out.
#include "info.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "adapt.h"
#include "core/message.h"
#include "core/registry.h"
#include "rarefy/backend.h"

namespace rarefy::binding {

namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Json to_json(const Explanation& e) {
  Json candidates = Json::array();
  for (const Candidate& candidate : e.candidates) {
    candidates.push_back({{"kernel", candidate.kernel.name},
                          {"family", candidate.kernel.family},
                          {"chosen", candidate.chosen},
                          {"why_not", candidate.why_not}});
  }
  Json json{
      {"problem", to_string(e.problem)}, {"kernel", nullptr},      {"config", e.config},
      {"workspace", e.workspace},        {"why_none", e.why_none}, {"candidates", std::move(candidates)}};
  if (!e.kernel.empty()) json["kernel"] = e.kernel;
  return json;
}

int torch_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// The value of `all` that is called `text`.
template <class T>
T parse(std::string_view argument, std::string_view text, std::initializer_list<T> all) {
  for (const T value : all) {
    if (name(value) == text) return value;
  }
  raise("explain", invalid("explain", cat(argument, " must be a name that the core knows"), text));
}

DType parse_dtype(std::string_view argument, std::string_view text) {
  if (const auto dtype = rarefy::parse_dtype(text)) return *dtype;
  raise("explain", invalid("explain", cat(argument, " must be f64, f32, bf16, f16 or i8"), text));
}

// One selection for backend_info: the kernel, and why.
Json selection(const BackendInfo& info, Op op, DType dtype, Device device, const BsrShape& shape,
               std::int64_t tokens) {
  const Explanation e = explain(make_problem(op, shape, tokens, dtype, device, torch_threads()));
  Json row{{"op", name(op)}, {"dtype", name(dtype)}, {"device", name(device)}, {"kernel", nullptr}};
  if (e.kernel.empty()) {
    row["why"] = e.why_none;
    return row;
  }
  row["kernel"] = e.kernel;
  std::string passed_over;
  for (const Candidate& candidate : e.candidates) {
    if (candidate.chosen) break;
    passed_over += cat(passed_over.empty() ? "" : "; ", candidate.kernel.name, ": ", candidate.why_not);
  }
  row["why"] = !info.forced.empty()  ? cat("forced by ", info.forced)
               : passed_over.empty() ? std::string("first in order of preference")
                                     : cat("first that fits, after ", passed_over);
  return row;
}

}  // namespace

std::string backend_info_json(std::int64_t block_rows, std::int64_t block_cols, std::int64_t tokens) {
  const BackendInfo info = backend_info();
  std::vector<std::string> devices;
  for (const DeviceInfo& device : info.cuda_devices) devices.push_back(to_string(device));
  Json json{{"version", info.version},
            {"cpu", info.machine.cpu},
            {"cpu_features", info.machine.features},
            {"machine", to_string(info.machine)},
            {"cuda_built", info.cuda_built},
            {"cuda_devices", devices},
            {"forced_impl", nullptr},
            {"kernels", Json::array()}};
  if (!info.forced.empty()) json["forced_impl"] = info.forced;
  const BsrShape shape{block_rows, block_cols, block_rows, block_cols, 1};
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (device == Device::cuda && !info.cuda_built) continue;
    for (const Op op : kAllOps) {
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        json["kernels"].push_back(selection(info, op, dtype, device, shape, tokens));
      }
    }
  }
  return text_of(json);
}

std::string explain_json(std::string_view op, std::int64_t out_features, std::int64_t in_features,
                         std::int64_t block_rows, std::int64_t block_cols, std::int64_t nnzb,
                         std::string_view values_dtype, std::string_view in_dtype, std::int64_t tokens,
                         bool bias, std::string_view activation, std::string_view device,
                         std::int64_t device_index) {
  const BsrShape shape{out_features, in_features, block_rows, block_cols, nnzb};
  Problem problem = make_problem(parse("op", op, {Op::linear, Op::grad_input, Op::grad_weight}), shape,
                                 tokens, parse_dtype("in_dtype", in_dtype),
                                 parse("device", device, {Device::cpu, Device::cuda}), torch_threads());
  problem.weight.dtype = parse_dtype("values_dtype", values_dtype);
  problem.device_index = static_cast<int>(device_index);
  problem.bias = bias;
  problem.activation = parse(
      "activation", activation,
      {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu});
  check("explain", check_problem("explain", problem));
  return text_of(to_json(explain(problem)));
}

std::string force(std::string_view forced) {
  std::string before = forced_impl();
  check("force_impl", force_impl(forced));
  return before;
}

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def("backend_info(int block_rows, int block_cols, int tokens) -> str");
  m.def(
      "explain(str op, int out_features, int in_features, int block_rows, int block_cols, int nnzb, "
      "str values_dtype, str in_dtype, int tokens, bool bias, str activation, str device, int device_index) "
      "-> str");
  m.def("force_impl(str forced) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CompositeExplicitAutograd, m) {
  m.impl("backend_info", TORCH_BOX(&backend_info_json));
  m.impl("explain", TORCH_BOX(&explain_json));
  m.impl("force_impl", TORCH_BOX(&force));
}

}  // namespace rarefy::binding
