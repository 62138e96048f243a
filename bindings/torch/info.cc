// backend_info(), explain() and force_impl() of the core for Python: ops of strings and integers, JSON out.
#include "info.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "adapt.h"
#include "core/message.h"
#include "core/registry.h"
#include "io/info_json.h"
#include "rarefy/backend.h"

namespace rarefy::binding {

namespace {

std::string text_of(const Json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
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

Activation parse_activation(std::string_view text) {
  return parse(
      "activation", text,
      {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu});
}

}  // namespace

std::string backend_info_json(std::int64_t block_rows, std::int64_t block_cols, std::int64_t tokens) {
  const BackendInfo info = backend_info();
  Json json = to_json(info);
  Json& kernels = json["kernels"] = Json::array();
  const BsrShape shape{block_rows, block_cols, block_rows, block_cols, 1};
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (device == Device::cuda && !info.cuda_built) continue;
    for (const Op op : kProducts) {
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        const Problem problem = make_problem(op, shape, tokens, dtype, device, torch_threads());
        kernels.push_back(summary(explain(problem), info.forced));
      }
    }
  }
  return text_of(json);
}

// The problem of x as it lies, unless the call would copy it: by feature for a kernel that wants it by token.
Problem as_read(const Problem& by_token, std::int64_t in_stride, bool by_feature) {
  Problem problem = by_token;
  problem.in_stride = in_stride;
  if (!by_feature) return problem;
  problem.in_layout = Layout::by_feature;
  const auto copied = choose(by_token), in_place = choose(problem);
  return copied.ok() && in_place.ok() && copied->kernel == in_place->kernel ? problem : by_token;
}

// "bf16", "i8 dynamic", "bf16 rounding x": as problems are printed.
void set_values(WeightSpec& weight, std::string_view text) {
  constexpr std::string_view kRounding = " rounding x";
  weight.rounds_x = text.ends_with(kRounding);
  if (weight.rounds_x) text.remove_suffix(kRounding.size());
  for (const Format format : {Format::bitmap, Format::two_of_four}) {  // "f32 bitmap", "f32 2:4"
    const std::string_view word = name(format);
    if (!text.ends_with(word)) continue;
    weight.format = format;
    text.remove_suffix(word.size() + 1);
  }
  if (text.starts_with("i8 ")) {
    weight.scaling = parse("scaling", text.substr(3), {Scaling::weight, Scaling::dynamic});
    text = "i8";
  }
  weight.dtype = parse_dtype("values_dtype", text);
}

std::string explain_json(std::string_view op, std::int64_t out_features, std::int64_t in_features,
                         std::int64_t block_rows, std::int64_t block_cols, std::int64_t nnzb,
                         std::string_view values_dtype, std::string_view in_dtype, std::int64_t tokens,
                         bool bias, std::string_view activation, std::string_view device,
                         std::int64_t device_index, std::int64_t derived, std::int64_t in_stride,
                         bool by_feature) {
  const BsrShape shape{out_features, in_features, block_rows, block_cols, nnzb};
  Problem problem = make_problem(parse("op", op, {Op::linear, Op::grad_input, Op::grad_weight}), shape,
                                 tokens, parse_dtype("in_dtype", in_dtype),
                                 parse("device", device, {Device::cpu, Device::cuda}), torch_threads());
  set_values(problem.weight, values_dtype);
  problem.device_index = static_cast<int>(device_index);
  problem.bias = bias;
  // The key is that of linear; who holds it has what the gradients' kernels want of the pattern, too.
  problem.derived =
      problem.op == Op::linear || derived == 0 ? static_cast<std::uint64_t>(derived) : kAnyDerived;
  problem.activation = parse_activation(activation);
  check("explain", check_problem("explain", problem));
  if (problem.op == Op::linear && in_stride > 0) problem = as_read(problem, in_stride, by_feature);
  return text_of(to_json(explain(problem)));
}

std::string explain_feed_forward_json(std::int64_t out_features, std::int64_t hidden_features,
                                      std::int64_t in_features, std::int64_t up_rows, std::int64_t up_cols,
                                      std::int64_t up_nnzb, std::int64_t gate_rows, std::int64_t gate_cols,
                                      std::int64_t gate_nnzb, std::int64_t down_rows, std::int64_t down_cols,
                                      std::int64_t down_nnzb, std::string_view values_dtype,
                                      std::string_view in_dtype, std::int64_t tokens, bool bias,
                                      std::string_view activation, std::string_view device,
                                      std::int64_t device_index, std::int64_t derived) {
  const BsrShape up{hidden_features, in_features, up_rows, up_cols, up_nnzb};
  Problem problem = make_problem(Op::feed_forward, up, tokens, parse_dtype("in_dtype", in_dtype),
                                 parse("device", device, {Device::cpu, Device::cuda}), torch_threads());
  problem.device_index = static_cast<int>(device_index);
  set_values(problem.weight, values_dtype);
  set_values(problem.down, values_dtype);
  problem.down.shape = {out_features, hidden_features, down_rows, down_cols, down_nnzb};
  if (gate_rows > 0) {
    problem.gate = problem.weight;
    problem.gate.shape = {hidden_features, in_features, gate_rows, gate_cols, gate_nnzb};
  }
  problem.out_stride = out_features;
  problem.bias = bias;
  problem.derived = static_cast<std::uint64_t>(derived);
  problem.activation = parse_activation(activation);
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
      "str values_dtype, str in_dtype, int tokens, bool bias, str activation, str device, int device_index, "
      "int derived, int in_stride=0, bool by_feature=False) -> str");
  m.def(
      "explain_feed_forward(int out_features, int hidden_features, int in_features, int up_rows, int "
      "up_cols, "
      "int up_nnzb, int gate_rows, int gate_cols, int gate_nnzb, int down_rows, int down_cols, int "
      "down_nnzb, "
      "str values_dtype, str in_dtype, int tokens, bool bias, str activation, str device, int device_index, "
      "int derived) -> str");
  m.def("force_impl(str forced) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CompositeExplicitAutograd, m) {
  m.impl("backend_info", TORCH_BOX(&backend_info_json));
  m.impl("explain", TORCH_BOX(&explain_json));
  m.impl("explain_feed_forward", TORCH_BOX(&explain_feed_forward_json));
  m.impl("force_impl", TORCH_BOX(&force));
}

}  // namespace rarefy::binding
